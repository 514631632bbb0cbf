"""The client for programs without asyncio. It can be shared by threads; the rest is as in `fulcrum.client`.

with SyncFulcrumClient("127.0.0.1:50051") as client:
    request = GenerateRequest(text="Once upon a time", stopping=StoppingCriteria(max_tokens=32))
    with client.generate(request) as events:
        for event in events:
            if isinstance(event, Delta):
                print(event.text, end="")
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import grpc

from fulcrum.client import (
    CHANNEL_OPTIONS,
    RETRIES,
    Completion,
    Event,
    FulcrumError,
    Metadata,
    Tries,
    direct,
    event_of,
    metadata_of,
    tls_options,
)
from fulcrum.v1.inference_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GetModelRequest,
    GetModelResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from fulcrum.v1.inference_pb2_grpc import AdminServiceStub, InferenceServiceStub

_ADMIN_SECONDS = 30.0


def _channel(address: str, credentials: grpc.ChannelCredentials | None, tls_name: str | None) -> grpc.Channel:
    """With TLS where there are credentials, but on Unix sockets."""
    options = (*direct(address), *CHANNEL_OPTIONS, *tls_options(tls_name))
    if credentials is None or address.startswith("unix:"):
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


@contextmanager
def admin_service(
    address: str,
    *,
    api_key: str | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    tls_name: str | None = None,
    metadata: Metadata = (),
) -> Iterator[tuple[AdminServiceStub, dict[str, Any]]]:
    """AdminService at HOST:PORT or unix:/PATH, and what each call is given. Raises: FulcrumError."""
    given = {"metadata": metadata_of(api_key, metadata), "timeout": _ADMIN_SECONDS}
    try:
        with _channel(address, credentials, tls_name) as channel:
            yield AdminServiceStub(channel), given
    except grpc.RpcError as error:
        raise FulcrumError.from_rpc(error) from error


class EventStream(Iterator[Event]):
    """The events of one request, in their order; ends after Usage.

    `close` cancels the call, which stops the work on the server. Any thread may call it: one that waits for an event
    then gets a FulcrumError CANCELLED. So does the end of a `with` block, and of the object.
    """

    def __init__(self, start: Callable[[float | None], Any], tries: Tries) -> None:
        """`start` begins a try that may take so many seconds."""
        self._start = start
        self._tries = tries
        self._begun = False
        self._closed = threading.Event()
        self._call = start(tries.remaining())

    def __next__(self) -> Event:
        """Raises: FulcrumError."""
        while True:
            try:
                response = next(self._call)
            except grpc.RpcError as error:
                failure = FulcrumError.from_rpc(error)
                pause = None if self._begun else self._tries.pause(failure)
                if pause is None or self._closed.wait(pause):
                    raise failure from error
                self._call = self._start(self._tries.remaining())
                if self._closed.is_set():  # by another thread, which knew only the call before
                    self._call.cancel()
                continue
            self._begun = True
            if (event := event_of(response)) is not None:
                return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the call, unless it has ended."""
        self._closed.set()
        self._call.cancel()


class SyncFulcrumClient:
    """A connection to an engine server. Use as a context manager, or call close().

    Args:
        address: HOST:PORT, or unix:PATH.
        api_key: sent as `authorization: Bearer KEY`.
        credentials: TLS (`fulcrum.tls.channel_credentials`); the connection is plain without, and to a Unix socket.
        tls_name: the name in the server's certificate, where it is not the address's host.
        metadata: goes with every call.
        retries: further tries of a call that is UNAVAILABLE and of which nothing has been received.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        tls_name: str | None = None,
        metadata: Metadata = (),
        retries: int = RETRIES,
    ) -> None:
        self._channel = _channel(address, credentials, tls_name)
        self._stub = InferenceServiceStub(self._channel)
        self._metadata = metadata_of(api_key, metadata)
        self._retries = retries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and ends the calls that still run."""
        self._channel.close()

    def generate(
        self, request: GenerateRequest, *, deadline: float | None = None, metadata: Metadata = ()
    ) -> EventStream:
        """Starts a request; its events are read from what this returns. `deadline` is in seconds from now."""

        def start(seconds: float | None) -> Any:
            return self._stub.Generate(request, timeout=seconds, metadata=(*self._metadata, *metadata))

        return EventStream(start, Tries(self._retries, deadline))

    def complete(
        self, request: GenerateRequest, *, deadline: float | None = None, metadata: Metadata = ()
    ) -> Completion:
        """Generates and waits for all of it. Raises: FulcrumError."""
        answer = Completion()
        with self.generate(request, deadline=deadline, metadata=metadata) as events:
            for event in events:
                answer.add(event, request.n or 1)
        return answer

    def tokenize(
        self, request: TokenizeRequest, *, deadline: float | None = None, metadata: Metadata = ()
    ) -> TokenizeResponse:
        """Renders (a chat) and tokenizes. Raises: FulcrumError."""
        reply: TokenizeResponse = self._unary(self._stub.Tokenize, request, deadline, metadata)
        return reply

    def detokenize(
        self, request: DetokenizeRequest, *, deadline: float | None = None, metadata: Metadata = ()
    ) -> DetokenizeResponse:
        """Turns token ids back into text. Raises: FulcrumError."""
        reply: DetokenizeResponse = self._unary(self._stub.Detokenize, request, deadline, metadata)
        return reply

    def get_model(self, model: str = "", *, deadline: float | None = None, metadata: Metadata = ()) -> GetModelResponse:
        """Tells what is served, and its limits. Raises: FulcrumError."""
        request = GetModelRequest(model=model)
        reply: GetModelResponse = self._unary(self._stub.GetModel, request, deadline, metadata)
        return reply

    def _unary(self, method: Callable[..., Any], request: object, deadline: float | None, metadata: Metadata) -> Any:
        tries = Tries(self._retries, deadline)
        while True:
            try:
                return method(request, timeout=tries.remaining(), metadata=(*self._metadata, *metadata))
            except grpc.RpcError as error:
                failure = FulcrumError.from_rpc(error)
                if (pause := tries.pause(failure)) is None:
                    raise failure from error
            time.sleep(pause)
