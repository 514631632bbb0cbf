"""However a call ends early, the engine hears of it at once, in queue, in prefill and in decode."""

import asyncio
import threading

import grpc
import pytest

from engine.request import FinishReason
from fulcrum.v1 import inference_pb2 as pb
from service.tokenizer import Tokenizer

STAGES = ("queue", "prefill", "decode")


def prompt(request_id, **fields):
    return pb.GenerateRequest(request_id=request_id, token_ids=pb.TokenIds(ids=[1, 2, 3]), **fields)


async def reach(stage, core, call, request_id):
    """Reads up to the stage: accepted only; started, its prompt being computed; a token there."""
    assert (await call.read()).HasField("accepted")
    if stage != "queue":
        core.start(request_id)
        assert (await call.read()).HasField("started")
    if stage == "decode":
        core.emit(request_id, 0, [65])
        assert (await call.read()).HasField("delta")


async def drained(call):
    """Reads to the end, and returns the error that ended it."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    pytest.fail("the call has ended OK")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
async def test_cancelling_the_call_aborts_the_request(make_core, serving, stage, n):
    core = make_core()
    async with serving(core) as server:
        call = server.stub.Generate(prompt("r", n=n))
        await reach(stage, core, call, "r")
        call.cancel()
        await core.until(lambda: core.aborted == ["r"])
        await core.until(lambda: not core.streams)


async def test_the_callers_own_name_is_in_the_log(make_core, serving, caplog):
    core = make_core()
    with caplog.at_level("DEBUG", logger="service"):
        async with serving(core) as server:
            for name, metadata in (("named", (("x-request-id", "my-label"),)), ("nameless", ())):
                call = server.stub.Generate(prompt(name), metadata=metadata)
                await reach("decode", core, call, name)
                call.cancel()
            await core.until(lambda: len(core.aborted) == 2)
    lines = [record.getMessage() for record in caplog.records if record.name == "service.servicer"]
    assert [line.startswith("request named (my-label) ") for line in lines].count(True) == 2  # accepted, ended early
    assert [line.startswith("request nameless (-) ") for line in lines].count(True) == 2


@pytest.mark.parametrize("stage", STAGES)
async def test_the_callers_deadline_aborts_the_request(make_core, serving, stage):
    core = make_core()
    async with serving(core) as server:
        call = server.stub.Generate(prompt("r"), timeout=0.5)
        await reach(stage, core, call, "r")
        assert (await drained(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await core.until(lambda: core.aborted == ["r"])


@pytest.mark.parametrize("stage", STAGES)
async def test_the_servers_own_limit_ends_the_request(make_core, serving, details, stage):
    core = make_core()
    async with serving(core, request_timeout=0.3) as server:
        call = server.stub.Generate(prompt("r"))
        await reach(stage, core, call, "r")
        error = details(await drained(call))
        assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "REQUEST_TIMEOUT")
        assert core.aborted == ["r"]


async def test_a_lost_connection_aborts_the_request(make_core, serving):
    core = make_core()
    async with serving(core) as server:
        async with grpc.aio.insecure_channel(server.addresses.address) as channel:
            call = channel.unary_stream(
                "/fulcrum.v1.InferenceService/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )(prompt("r"))
            await reach("decode", core, call, "r")
        await core.until(lambda: core.aborted == ["r"])


async def test_a_call_that_waits_for_its_reader_can_be_cancelled(make_core, serving):
    core = make_core(max_model_len=1 << 20)
    async with serving(core) as server:
        call = server.stub.Generate(prompt("r", output=pb.OutputOptions(token_ids=True)))
        await reach("prefill", core, call, "r")
        for number in range(200):
            core.emit("r", 0, [65] * 1000)
            await asyncio.sleep(0.001 if number % 20 == 0 else 0)
        assert "r" in core.streams
        call.cancel()
        await core.until(lambda: core.aborted == ["r"])


async def test_cancelling_while_the_engine_decides_leaves_nothing(make_core, serving):
    """The client of the core aborts by itself when its submit is cancelled; the service passes it on."""
    core = make_core()
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def submit(request):
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    core.submit = submit
    async with serving(core) as server:
        call = server.stub.Generate(prompt("r"))
        reading = asyncio.create_task(call.read())
        await entered.wait()
        call.cancel()
        async with asyncio.timeout(20):
            await cancelled.wait()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_finished_request_is_not_aborted_though_its_reader_leaves(make_core, serving):
    """Its id may be another request's by then."""
    core = make_core()
    async with serving(core) as server:
        first = server.stub.Generate(prompt("r"))
        await reach("decode", core, first, "r")
        core.emit("r", 0, [66] * 200_000, FinishReason.LENGTH)  # more than the connection takes without a reader
        assert "r" not in core.streams
        second = server.stub.Generate(prompt("r"))
        await reach("decode", core, second, "r")
        first.cancel()
        core.emit("r", 0, [67], FinishReason.LENGTH)
        kinds = []
        while (event := await second.read()) is not grpc.aio.EOF:
            kinds.append(event.WhichOneof("event"))
        assert kinds == ["delta", "finished", "usage"]
        assert core.aborted == []


async def test_abort_ends_exactly_the_named_request(make_core, serving, details):
    core = make_core()
    async with serving(core) as server:
        calls = {}
        for request_id in ("req-1", "req-10"):
            calls[request_id] = server.stub.Generate(prompt(request_id))
            await reach("decode", core, calls[request_id], request_id)
        reply = await server.admin.Abort(pb.AbortRequest(request_ids=["req-1", "req-", "req-1", "never"]))
        outcomes = [(result.request_id, result.outcome) for result in reply.results]
        aborted, missing = pb.AbortResponse.OUTCOME_ABORTED, pb.AbortResponse.OUTCOME_NOT_FOUND
        assert outcomes == [("req-1", aborted), ("req-", missing), ("never", missing)]
        error = details(await drained(calls["req-1"]))
        assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "ABORTED")
        # Idempotent: it has ended.
        again = await server.admin.Abort(pb.AbortRequest(request_ids=["req-1"]))
        assert again.results[0].outcome == missing
        core.emit("req-10", 0, [66], FinishReason.LENGTH)
        assert (await calls["req-10"].read()).delta.text == "B"
        assert (await calls["req-10"].read()).HasField("finished")
        assert (await calls["req-10"].read()).HasField("usage")


@pytest.mark.parametrize("stage", STAGES)
async def test_abort_works_in_every_stage(make_core, serving, details, stage):
    core = make_core()
    async with serving(core) as server:
        call = server.stub.Generate(prompt("r", n=2))
        await reach(stage, core, call, "r")
        await server.admin.Abort(pb.AbortRequest(request_ids=["r"]))
        assert details(await drained(call)).reason == "ABORTED"
        assert not core.streams


async def test_a_live_duplicate_is_refused_and_the_first_goes_on(make_core, serving, details):
    core = make_core()
    async with serving(core) as server:
        first = server.stub.Generate(prompt("r"))
        await reach("decode", core, first, "r")
        error = details(await drained(server.stub.Generate(prompt("r"))))
        assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
        assert error.fields == ["request_id"]
        core.emit("r", 0, [66], FinishReason.LENGTH)
        assert (await first.read()).delta.text == "B"
        assert (await first.read()).HasField("finished")
        assert (await first.read()).HasField("usage")
        assert core.aborted == []
        # The id is free again.
        again = server.stub.Generate(prompt("r"))
        await reach("decode", core, again, "r")
        again.cancel()
        await core.until(lambda: core.aborted == ["r"])


@pytest.fixture
def slow_tokenizer(monkeypatch):
    entered, release = threading.Event(), threading.Event()
    encode = Tokenizer.encode

    def slow(self, text, add_special_tokens=True):
        entered.set()
        assert release.wait(20)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    return entered, release


async def test_tokenizing_does_not_hold_the_others_up(make_core, serving, slow_tokenizer):
    """A prompt that takes long to tokenize is a thread's affair: the event loop answers others meanwhile."""
    entered, release = slow_tokenizer
    async with serving(make_core()) as server:
        large = asyncio.ensure_future(server.stub.Tokenize(pb.TokenizeRequest(text="large")))
        assert await asyncio.to_thread(entered.wait, 20)
        assert (await server.stub.GetModel(pb.GetModelRequest())).vocab_size == 258
        assert not large.done()
        release.set()
        assert list((await large).token_ids) == list(b"large")


async def test_a_call_cancelled_while_tokenizing_leaves_nothing_running(make_core, serving, slow_tokenizer):
    entered, release = slow_tokenizer
    core = make_core()
    async with serving(core) as server:
        call = server.stub.Generate(pb.GenerateRequest(text="gone", request_id="gone"))
        reading = asyncio.create_task(call.read())
        assert await asyncio.to_thread(entered.wait, 20)
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        release.set()
        # The cancellation may have been overtaken by the tokenizer: then the engine was told.
        await core.until(lambda: core.aborted == [request.request_id for request in core.requests])
        core.reply = lambda request: [(0, [65], FinishReason.LENGTH)]
        assert [event async for event in server.stub.Generate(prompt("next"))]
        await core.until(lambda: not core.streams)
