"""The client, against a real grpc.aio server whose answers the test writes down."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from fulcrum.client import FulcrumClient, FulcrumError, keepalive
from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)

ANSWER = [
    pb.GenerateResponse(accepted=pb.Accepted(request_id="r1", model="m")),
    pb.GenerateResponse(started=pb.Started(prompt_tokens=3, cached_tokens=1)),
    pb.GenerateResponse(delta=pb.Delta(index=0, text="Hel", token_ids=[1])),
    pb.GenerateResponse(delta=pb.Delta(index=1, text="Bye", token_ids=[7])),
    pb.GenerateResponse(delta=pb.Delta(index=0, text="lo", reasoning="hm", token_ids=[2, 3])),
    pb.GenerateResponse(finished=pb.Finished(index=1, reason=pb.FINISH_REASON_LENGTH, completion_tokens=1)),
    pb.GenerateResponse(
        finished=pb.Finished(index=0, reason=pb.FINISH_REASON_STOP, eos_token_id=3, completion_tokens=3)
    ),
    pb.GenerateResponse(usage=pb.Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=1)),
]

Handler = Callable[[pb.GenerateRequest, grpc.aio.ServicerContext], AsyncIterator[pb.GenerateResponse]]


class Servicer(InferenceServiceServicer):
    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        async for response in self._handler(request, context):
            yield response

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        if request.text == "hang":
            async for _ in self._handler(pb.GenerateRequest(), context):
                pass
        return pb.TokenizeResponse(token_ids=request.text.encode(), max_model_len=8)

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        if request.model not in ("", "m"):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"model {request.model} is not served")
        return pb.GetModelResponse(served_names=["m"])


@asynccontextmanager
async def serving(handler: Handler, **client_options: str) -> AsyncIterator[FulcrumClient]:
    server = grpc.aio.server()
    add_InferenceServiceServicer_to_server(Servicer(handler), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with FulcrumClient(f"127.0.0.1:{port}", **client_options) as client:
            yield client
    finally:
        await server.stop(0)


async def answers(request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
    for response in ANSWER:
        yield response


async def within(seconds: float, awaitable: Awaitable[object]) -> None:
    await asyncio.wait_for(awaitable, seconds)


async def test_generate_yields_typed_events_in_order() -> None:
    async with serving(answers) as client:
        events = [event async for event in client.generate(pb.GenerateRequest(text="x", n=2))]
    assert events == [getattr(response, response.WhichOneof("event")) for response in ANSWER]


async def test_this_machine_is_reached_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    async with serving(answers) as client:
        assert (await client.complete(pb.GenerateRequest(text="x", n=2), deadline=20)).request_id == "r1"


async def test_complete_joins_each_index() -> None:
    async with serving(answers) as client:
        done = await client.complete(pb.GenerateRequest(text="x", n=2))
    assert (done.request_id, done.model) == ("r1", "m")
    assert [choice.text for choice in done.choices] == ["Hello", "Bye"]
    assert done.choices[0].reasoning == "hm"
    assert [choice.token_ids for choice in done.choices] == [[1, 2, 3], [7]]
    assert done.choices[0].finished.eos_token_id == 3
    assert done.choices[1].finished.reason == pb.FINISH_REASON_LENGTH
    assert done.usage.completion_tokens == 4


async def test_complete_joins_tool_calls() -> None:
    async def handler(
        request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(accepted=pb.Accepted(request_id="r"))
        for piece in (
            pb.ToolCallDelta(index=0, id="a", name="f"),
            pb.ToolCallDelta(index=0, arguments='{"x": '),
            pb.ToolCallDelta(index=1, id="b", name="g", arguments="{}"),
            pb.ToolCallDelta(index=0, arguments="1}"),
        ):
            yield pb.GenerateResponse(delta=pb.Delta(tool_calls=[piece]))

    async with serving(handler) as client:
        done = await client.complete(pb.GenerateRequest(text="x"))
    assert done.choices[0].tool_calls == [
        pb.ToolCall(id="a", name="f", arguments_json='{"x": 1}'),
        pb.ToolCall(id="b", name="g", arguments_json="{}"),
    ]


async def test_closing_the_iterator_cancels_the_call() -> None:
    cancelled = asyncio.Event()

    async def handler(
        request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            yield ANSWER[0]
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving(handler) as client:
        async with aclosing(client.generate(pb.GenerateRequest(text="x"))) as events:
            assert isinstance(await anext(events), pb.Accepted)
        await within(5, cancelled.wait())


async def test_cancelling_complete_cancels_the_call() -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def handler(
        request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            yield ANSWER[0]
            began.set()  # not before: a call cancelled while it is written to never comes back here
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving(handler) as client:
        task = asyncio.create_task(client.complete(pb.GenerateRequest(text="x")))
        await within(5, began.wait())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await within(5, cancelled.wait())


@pytest.mark.parametrize("call", ["generate", "tokenize"])
async def test_a_call_whose_client_is_closed_says_so(call: str) -> None:
    """As of the other client. grpc raises CancelledError, and to a TaskGroup such a task were one that it has ended."""
    began = asyncio.Event()

    async def hang(*_: object) -> AsyncIterator[pb.GenerateResponse]:
        yield ANSWER[0]
        began.set()
        await asyncio.Event().wait()

    async def read(client: FulcrumClient) -> None:
        if call == "generate":
            await client.complete(pb.GenerateRequest(text="x"))
        else:
            await client.tokenize(pb.TokenizeRequest(text="hang"))

    async with serving(hang) as client:
        task = asyncio.create_task(read(client))
        await within(5, began.wait())
        await client.close()
        with pytest.raises(FulcrumError) as caught:
            await within(5, task)
    assert caught.value.code is grpc.StatusCode.CANCELLED


async def test_deadline_travels_and_ends_the_call() -> None:
    seen: list[float | None] = []

    async def handler(
        request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        seen.append(context.time_remaining())
        yield ANSWER[0]
        await asyncio.Event().wait()

    async with serving(handler) as client:
        with pytest.raises(FulcrumError) as caught:
            await client.complete(pb.GenerateRequest(text="x"), deadline=1.0)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert seen[0] is not None
    assert 0 < seen[0] <= 1.01  # gRPC may round it up


async def test_retries_before_the_first_message_only() -> None:
    calls = 0

    async def refuses_twice(
        request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        nonlocal calls
        calls += 1
        if calls < 3:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        for response in ANSWER:
            yield response

    async with serving(refuses_twice) as client:
        done = await client.complete(pb.GenerateRequest(text="x", n=2))
    assert done.choices[0].text == "Hello"
    assert calls == 3

    calls = 0

    async def breaks_later(
        request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        nonlocal calls
        calls += 1
        yield ANSWER[0]
        await context.abort(grpc.StatusCode.UNAVAILABLE, "core died")

    async with serving(breaks_later) as client:
        with pytest.raises(FulcrumError) as caught:
            await client.complete(pb.GenerateRequest(text="x"))
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert calls == 1


async def test_a_refusal_is_not_tried_again() -> None:
    calls = 0

    async def handler(
        request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        nonlocal calls
        calls += 1
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
        yield ANSWER[0]

    async with serving(handler) as client:
        with pytest.raises(FulcrumError, match="INVALID_ARGUMENT: no"):
            await client.complete(pb.GenerateRequest(text="x", n=2**32 - 1))  # nor does an absurd n take memory here
    assert calls == 1


async def test_error_details_are_read() -> None:
    details = []
    for message in (
        error_details_pb2.ErrorInfo(reason="CONTEXT_LENGTH_EXCEEDED", domain="fulcrum"),
        error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(field="stopping.max_tokens", description="big")
            ]
        ),
        error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000)),
    ):
        packed = any_pb2.Any()
        packed.Pack(message)
        details.append(packed)
    status = rpc_status.to_status(
        status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="too long", details=details)
    )

    async def handler(
        request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        await context.abort(status.code, status.details, status.trailing_metadata)
        yield ANSWER[0]

    async with serving(handler) as client:
        with pytest.raises(FulcrumError) as caught:
            await client.complete(pb.GenerateRequest(text="x"))
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.message == "too long"
    assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert error.violations == (("stopping.max_tokens", "big"),)
    assert error.retry_after == 1.5


async def test_the_key_travels_as_a_bearer() -> None:
    seen: list[str | None] = []

    async def handler(
        request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        seen.append(dict(context.invocation_metadata()).get("authorization"))
        yield ANSWER[0]

    async with serving(handler, api_key="sk-1") as client:
        await client.complete(pb.GenerateRequest(text="x"))
    async with serving(handler) as client:
        await client.complete(pb.GenerateRequest(text="x"))
    assert seen == ["Bearer sk-1", None]


async def test_a_unix_socket_is_plain_whatever_the_credentials(tmp_path: Path) -> None:
    server, credentials = grpc.aio.server(), grpc.ssl_channel_credentials()
    add_InferenceServiceServicer_to_server(Servicer(answers), server)
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    try:
        async with FulcrumClient(f"unix:{tmp_path}/s", credentials=credentials, tls_name="x", retries=0) as client:
            assert (await client.get_model(deadline=1e12)).served_names == ["m"]
    finally:
        await server.stop(0)


async def test_unary_calls() -> None:
    async with serving(answers) as client:
        tokens = await client.tokenize(pb.TokenizeRequest(text="ab"))
        assert list(tokens.token_ids) == [97, 98]
        assert (await client.get_model()).served_names == ["m"]
        with pytest.raises(FulcrumError, match="NOT_FOUND"):
            await client.get_model("other")
        with pytest.raises(FulcrumError) as caught:
            await client.detokenize(pb.DetokenizeRequest(token_ids=[1]))
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_server_that_stands_still_is_given_up() -> None:
    async def stand_still(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))  # SETTINGS; what comes is taken by the system alone
        await asyncio.Event().wait()

    server = await asyncio.start_server(stand_still, "127.0.0.1", 0)
    async with (
        server,
        grpc.aio.insecure_channel(
            f"127.0.0.1:{server.sockets[0].getsockname()[1]}", options=keepalive(0.2, within=0.2)
        ) as channel,
    ):
        call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(), timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
