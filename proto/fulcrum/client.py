"""A small asyncio client for the contract, over the generated stubs.

It adds what every caller would write again: keys, typed events, typed errors, deadlines, cancellation and safe
retries. It knows nothing of models, tokenizers or HTTP.

    async with FulcrumClient("127.0.0.1:50051") as client:
        request = GenerateRequest(text="Once upon a time", stopping=StoppingCriteria(max_tokens=32))
        async with aclosing(client.generate(request)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    print(event.text, end="")
"""

import json
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from fulcrum.v1.inference_pb2 import (
    Accepted,
    Delta,
    DetokenizeRequest,
    DetokenizeResponse,
    Finished,
    GenerateRequest,
    GetModelRequest,
    GetModelResponse,
    PromptLogprobs,
    Started,
    TokenizeRequest,
    TokenizeResponse,
    ToolCall,
    Usage,
)
from fulcrum.v1.inference_pb2_grpc import InferenceServiceStub

Event = Accepted | Started | PromptLogprobs | Delta | Finished | Usage

# gRPC commits a call to its attempt when the first message arrives: a stream that has begun is never tried again.
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "fulcrum.v1.InferenceService"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
_CHANNEL_OPTIONS = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.keepalive_time_ms", 30_000),
    # The server bounds what it takes; its answers are as long as the caller asked for.
    ("grpc.max_receive_message_length", -1),
)

_Response = TypeVar("_Response")


class FulcrumError(Exception):
    """A call that did not end OK.

    Attributes:
        code: the gRPC status.
        message: what the server says.
        reason: the ErrorInfo reason, such as CONTEXT_LENGTH_EXCEEDED, or "".
        violations: (field, description) of each field of the request that is to blame.
        retry_after: seconds to wait before the next try, where the server names them.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        reason: str = "",
        violations: tuple[tuple[str, str], ...] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = violations
        self.retry_after = retry_after

    @classmethod
    def from_rpc(cls, error: grpc.aio.AioRpcError) -> "FulcrumError":
        """Reads the status and its google.rpc details."""
        reason, violations, retry_after = "", [], None
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        # An AioRpcError has what from_call reads of a Call: code, details and trailing metadata.
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        for detail in status.details if status is not None else ():
            if detail.Unpack(info):
                reason = info.reason
            elif detail.Unpack(bad):
                violations = [(each.field, each.description) for each in bad.field_violations]
            elif detail.Unpack(retry):
                retry_after = retry.retry_delay.ToTimedelta().total_seconds()
        return cls(error.code(), error.details() or "", reason, tuple(violations), retry_after)


@dataclass(slots=True)
class Choice:
    """One continuation, complete."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: Finished = field(default_factory=Finished)

    def add(self, delta: Delta) -> None:
        """Appends a piece of this continuation."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.token_ids.extend(delta.token_ids)
        for piece in delta.tool_calls:
            while len(self.tool_calls) <= piece.index:
                self.tool_calls.append(ToolCall())
            call = self.tool_calls[piece.index]
            call.id = call.id or piece.id
            call.name = call.name or piece.name
            call.arguments_json += piece.arguments


@dataclass(slots=True)
class Completion:
    """A whole answer: one Choice for each index, in order."""

    request_id: str
    model: str
    choices: list[Choice]
    usage: Usage


class FulcrumClient:
    """A connection to an engine server. Use as an async context manager, or call close().

    Args:
        address: HOST:PORT, or unix:PATH.
        api_key: sent as `authorization: Bearer KEY`.
        credentials: TLS; without them the connection is plain.
    """

    def __init__(
        self, address: str, *, api_key: str | None = None, credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        self._channel = (
            grpc.aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
            if credentials is not None
            else grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        )
        self._stub = InferenceServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection and ends the calls that still run."""
        await self._channel.close()

    async def generate(self, request: GenerateRequest, *, deadline: float | None = None) -> AsyncGenerator[Event, None]:
        """Yields the events of one request in their order; ends after Usage.

        Closing the iterator early cancels the call, which stops the work on the server: leave a loop early only inside
        `contextlib.aclosing`. `deadline` is in seconds from now.

        Raises: FulcrumError.
        """
        call = self._stub.Generate(request, timeout=deadline, metadata=self._metadata)
        try:
            async for response in call:
                kind = response.WhichOneof("event")
                if kind is not None:  # None: an event of a later version of the contract
                    yield getattr(response, kind)
        except grpc.aio.AioRpcError as error:
            raise FulcrumError.from_rpc(error) from error
        finally:
            call.cancel()

    async def complete(self, request: GenerateRequest, *, deadline: float | None = None) -> Completion:
        """Generates and waits for all of it. Raises: FulcrumError."""
        answer = Completion("", "", [], Usage())
        async for event in self.generate(request, deadline=deadline):
            match event:
                case Accepted():
                    answer.request_id, answer.model = event.request_id, event.model
                    # Only now: an absurd n is the server's to refuse, not ours to make room for.
                    answer.choices = [Choice() for _ in range(request.n or 1)]
                case Delta():
                    answer.choices[event.index].add(event)
                case Finished():
                    answer.choices[event.index].finished = event
                case Usage():
                    answer.usage = event
        return answer

    async def tokenize(self, request: TokenizeRequest, *, deadline: float | None = None) -> TokenizeResponse:
        """Renders (a chat) and tokenizes. Raises: FulcrumError."""
        return await _unary(self._stub.Tokenize(request, timeout=deadline, metadata=self._metadata))

    async def detokenize(self, request: DetokenizeRequest, *, deadline: float | None = None) -> DetokenizeResponse:
        """Turns token ids back into text. Raises: FulcrumError."""
        return await _unary(self._stub.Detokenize(request, timeout=deadline, metadata=self._metadata))

    async def get_model(self, model: str = "", *, deadline: float | None = None) -> GetModelResponse:
        """Tells what is served, and its limits. Raises: FulcrumError."""
        call = self._stub.GetModel(GetModelRequest(model=model), timeout=deadline, metadata=self._metadata)
        return await _unary(call)


async def _unary(call: Awaitable[_Response]) -> _Response:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise FulcrumError.from_rpc(error) from error
