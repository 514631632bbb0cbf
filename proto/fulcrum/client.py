"""A small asyncio client for the contract, over the generated stubs, and what it shares with `fulcrum.sync_client`.

It adds what every caller would write again: keys, typed events, typed errors, deadlines, cancellation and safe
retries. It knows nothing of models, tokenizers or HTTP.

    async with FulcrumClient("127.0.0.1:50051") as client:
        request = GenerateRequest(text="Once upon a time", stopping=StoppingCriteria(max_tokens=32))
        async with aclosing(client.generate(request)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    print(event.text, end="")
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from fulcrum.keys import is_loopback
from fulcrum.v1.inference_pb2 import (
    Accepted,
    Chat,
    ChatMessage,
    ContentPart,
    Delta,
    DetokenizeRequest,
    DetokenizeResponse,
    Finished,
    GenerateRequest,
    GenerateResponse,
    GetModelRequest,
    GetModelResponse,
    PromptLogprobs,
    Started,
    TokenizeRequest,
    TokenizeResponse,
    TokenLogprob,
    ToolCall,
    Usage,
)
from fulcrum.v1.inference_pb2_grpc import InferenceServiceStub

Event = Accepted | Started | PromptLogprobs | Delta | Finished | Usage

Metadata = Sequence[tuple[str, str | bytes]]


def keepalive(every: float, within: float) -> tuple[tuple[str, int], ...]:
    """Options of a channel or a server: a peer is pinged after `every` seconds of silence, and has `within` to answer.

    gRPC's keepalive timeout finds a machine that is gone. A process that stands still takes bytes: only pings tell.
    """
    milliseconds = int(within * 1000)
    return (
        ("grpc.keepalive_time_ms", int(every * 1000)),
        ("grpc.keepalive_timeout_ms", milliseconds),
        ("grpc.http2.ping_timeout_ms", milliseconds),
    )


DIRECT = ("grpc.enable_http_proxy", 0)  # without the proxy that gRPC finds in http_proxy
CHANNEL_OPTIONS = (
    *keepalive(30, within=20),
    # The server bounds what it takes; its answers are as long as the caller asked for.
    ("grpc.max_receive_message_length", -1),
)
LONGEST_SECONDS = 1e9  # thirty years; of ten times that gRPC makes a deadline that has passed
RETRIES = 3
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
# A server that names a longer wait is told of at once: the caller knows better what to do meanwhile.
_LONGEST_RETRY_AFTER = 30.0


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
    def from_rpc(cls, error: grpc.RpcError) -> "FulcrumError":
        """Reads the status and its google.rpc details."""
        call: Any = error  # whatever grpc raises is also the Call that ended so
        reason, violations, retry_after = "", [], None
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        try:
            status = rpc_status.from_call(call)
        except (ValueError, DecodeError):  # details that contradict their status, or are none: the status holds
            status = None
        for detail in status.details if status is not None else ():
            if detail.Unpack(info):
                reason = info.reason
            elif detail.Unpack(bad):
                violations = [(each.field, each.description) for each in bad.field_violations]
            elif detail.Unpack(retry):
                retry_after = retry.retry_delay.ToNanoseconds() / 1e9
        return cls(call.code(), call.details() or "", reason, tuple(violations), retry_after)


class Tries:
    """The tries of one call, which share its deadline.

    Args:
        retries: further tries after the first.
        deadline: seconds from now for all of them together (None: no limit).
    """

    def __init__(self, retries: int, deadline: float | None) -> None:
        self._left = retries
        self._end = None if deadline is None else time.monotonic() + min(deadline, LONGEST_SECONDS)
        self._pause = _FIRST_PAUSE

    def remaining(self) -> float | None:
        """Seconds until the deadline, never negative."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)

    def pause(self, error: FulcrumError) -> float | None:
        """Seconds to wait before the next try; None: that was the last one.

        Only UNAVAILABLE is tried again, after as long as the server asks for, at least after a pause that doubles each
        time (and varies, so that many clients do not come back at once), and not beyond the deadline.
        """
        if error.code is not grpc.StatusCode.UNAVAILABLE or self._left < 1:
            return None
        pause = max(self._pause * random.uniform(0.8, 1.2), error.retry_after or 0.0)
        left = self.remaining()
        if pause > _LONGEST_RETRY_AFTER or (left is not None and pause >= left):
            return None
        self._left -= 1
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        return pause


def message(role: str, text: str) -> ChatMessage:
    """A chat message of plain text."""
    return ChatMessage(role=role, content=[ContentPart(text=text)])


def chat_request(messages: Iterable[ChatMessage | tuple[str, str]], **fields: Any) -> GenerateRequest:
    """Asks for a chat's next message.

    Args:
        messages: in their order; (role, text) is short for a message of plain text.
        fields: further fields of GenerateRequest (sampling, stopping, ...) or of Chat (tools, tool_choice, ...).

    Raises: ValueError for a field that neither has; TypeError for a value of another type.
    """
    own = {name: fields.pop(name) for name in Chat.DESCRIPTOR.fields_by_name.keys() & fields.keys()}
    turns = [each if isinstance(each, ChatMessage) else message(*each) for each in messages]
    return GenerateRequest(chat=Chat(messages=turns, **own), **fields)


def event_of(response: GenerateResponse) -> Event | None:
    """The event that a response carries; None: one of a later version of the contract."""
    kind = response.WhichOneof("event")
    event: Event | None = None if kind is None else getattr(response, kind)
    return event


def metadata_of(api_key: str | None, metadata: Metadata) -> tuple[tuple[str, str | bytes], ...]:
    """What goes with every call."""
    return (*((("authorization", f"Bearer {api_key}"),) if api_key else ()), *metadata)


def tls_options(name: str | None) -> tuple[tuple[str, str], ...]:
    """Channel options for a server whose certificate has this name, whatever its address."""
    return () if name is None else (("grpc.ssl_target_name_override", name),)


def direct(address: str) -> tuple[tuple[str, int], ...]:
    """Channel options: this machine is reached without a proxy."""
    return (DIRECT,) if is_loopback(address.rpartition(":")[0].strip("[]")) else ()


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, Any]]
) -> grpc.aio.Channel:
    """A channel with TLS, or a plain one: without credentials, and to a Unix socket."""
    options = (*direct(address), *options)
    if credentials is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


@dataclass(slots=True)
class Choice:
    """One continuation, complete."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished = field(default_factory=Finished)

    def add(self, delta: Delta) -> None:
        """Appends a piece of this continuation."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        for piece in delta.tool_calls:
            while len(self.tool_calls) <= piece.index:
                self.tool_calls.append(ToolCall())
            call = self.tool_calls[piece.index]
            call.id = call.id or piece.id
            call.name = call.name or piece.name
            call.arguments_json += piece.arguments

    def message(self) -> ChatMessage:
        """This answer as a message, for the chat's next request."""
        content = [ContentPart(text=self.text)] if self.text else []
        return ChatMessage(role="assistant", content=content, tool_calls=self.tool_calls, reasoning=self.reasoning)


@dataclass(slots=True)
class Completion:
    """A whole answer: one Choice for each index, in order."""

    request_id: str = ""
    model: str = ""
    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    def add(self, event: Event, n: int) -> None:
        """Takes the next event of a request for `n` choices."""
        match event:
            case Accepted():
                self.request_id, self.model = event.request_id, event.model
                # Only now: an absurd n is the server's to refuse, not ours to make room for.
                self.choices = [Choice() for _ in range(n)]
            case PromptLogprobs():
                self.prompt_logprobs.extend(event.tokens)
            case Delta():
                self.choices[event.index].add(event)
            case Finished():
                self.choices[event.index].finished = event
            case Usage():
                self.usage = event


class FulcrumClient:
    """A connection to an engine server. Use as an async context manager, or call close().

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
        self._channel = open_channel(address, credentials, (*CHANNEL_OPTIONS, *tls_options(tls_name)))
        self._stub = InferenceServiceStub(self._channel)
        self._metadata = metadata_of(api_key, metadata)
        self._retries = retries

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection and ends the calls that still run."""
        await self._channel.close()

    async def generate(
        self, request: GenerateRequest, *, deadline: float | None = None, metadata: Metadata = ()
    ) -> AsyncGenerator[Event, None]:
        """Yields the events of one request in their order; ends after Usage.

        Closing the iterator early cancels the call, which stops the work on the server: leave a loop early only inside
        `contextlib.aclosing`. `deadline` is in seconds from now.

        Raises: FulcrumError.
        """
        tries = Tries(self._retries, deadline)
        pause: float | None = 0.0
        while pause is not None:
            await asyncio.sleep(pause)
            call = self._stub.Generate(request, timeout=tries.remaining(), metadata=(*self._metadata, *metadata))
            begun = False
            try:
                async for response in call:
                    begun = True
                    if (event := event_of(response)) is not None:
                        yield event
                return
            except grpc.aio.AioRpcError as error:
                failure = FulcrumError.from_rpc(error)
                pause = None if begun else tries.pause(failure)
                if pause is None:
                    raise failure from error
            except asyncio.CancelledError as error:
                raise _ending(error) from None
            finally:
                call.cancel()

    async def complete(
        self, request: GenerateRequest, *, deadline: float | None = None, metadata: Metadata = ()
    ) -> Completion:
        """Generates and waits for all of it. Raises: FulcrumError."""
        answer = Completion()
        async for event in self.generate(request, deadline=deadline, metadata=metadata):
            answer.add(event, request.n or 1)
        return answer

    async def tokenize(
        self, request: TokenizeRequest, *, deadline: float | None = None, metadata: Metadata = ()
    ) -> TokenizeResponse:
        """Renders (a chat) and tokenizes. Raises: FulcrumError."""
        reply: TokenizeResponse = await self._unary(self._stub.Tokenize, request, deadline, metadata)
        return reply

    async def detokenize(
        self, request: DetokenizeRequest, *, deadline: float | None = None, metadata: Metadata = ()
    ) -> DetokenizeResponse:
        """Turns token ids back into text. Raises: FulcrumError."""
        reply: DetokenizeResponse = await self._unary(self._stub.Detokenize, request, deadline, metadata)
        return reply

    async def get_model(
        self, model: str = "", *, deadline: float | None = None, metadata: Metadata = ()
    ) -> GetModelResponse:
        """Tells what is served, and its limits. Raises: FulcrumError."""
        request = GetModelRequest(model=model)
        reply: GetModelResponse = await self._unary(self._stub.GetModel, request, deadline, metadata)
        return reply

    async def _unary(
        self, method: Callable[..., Awaitable[Any]], request: object, deadline: float | None, metadata: Metadata
    ) -> Any:
        tries = Tries(self._retries, deadline)
        while True:
            try:
                return await method(request, timeout=tries.remaining(), metadata=(*self._metadata, *metadata))
            except grpc.aio.AioRpcError as error:
                failure = FulcrumError.from_rpc(error)
                if (pause := tries.pause(failure)) is None:
                    raise failure from error
            except asyncio.CancelledError as error:
                raise _ending(error) from None
            await asyncio.sleep(pause)


def _ending(error: asyncio.CancelledError) -> BaseException:
    """What a call raises that grpc has cancelled: where nobody cancels its task, its client was closed."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        return error
    return FulcrumError(grpc.StatusCode.CANCELLED, "the client was closed")
