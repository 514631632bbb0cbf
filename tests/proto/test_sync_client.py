"""The client without asyncio, against a real grpc server whose answers the test writes down; how tries are spaced."""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from fulcrum.client import Choice, FulcrumClient, FulcrumError, Tries, chat_request, message
from fulcrum.sync_client import SyncFulcrumClient
from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server

ANSWER = [
    pb.GenerateResponse(accepted=pb.Accepted(request_id="r1", model="m")),
    pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(offset=1, tokens=[pb.TokenLogprob(token_id=5)])),
    pb.GenerateResponse(delta=pb.Delta(text="Hel", token_ids=[1], logprobs=[pb.TokenLogprob(token_id=1)])),
    pb.GenerateResponse(delta=pb.Delta(text="lo", token_ids=[2], logprobs=[pb.TokenLogprob(token_id=2)])),
    pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_STOP, completion_tokens=2)),
    pb.GenerateResponse(usage=pb.Usage(prompt_tokens=3, completion_tokens=2)),
]
REQUEST = pb.GenerateRequest(text="x")
Handler = Callable[[pb.GenerateRequest, grpc.ServicerContext], Iterator[pb.GenerateResponse]]


class Servicer(InferenceServiceServicer):
    """Generate is the test's; of the others, GetModel is UNAVAILABLE once."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._asked = 0

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield from self._handler(request, context)

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=request.text.encode())

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.GetModelResponse:
        self._asked += 1
        if self._asked == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        return pb.GetModelResponse(served_names=["m"])


@contextmanager
def serving(handler: Handler, tls: grpc.ServerCredentials | None = None) -> Iterator[str]:
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        add_InferenceServiceServicer_to_server(Servicer(handler), server)
        address = "127.0.0.1:0"
        port = server.add_secure_port(address, tls) if tls else server.add_insecure_port(address)
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait()


def answers(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    yield from ANSWER


def unavailable(retry_after: float | None) -> grpc.Status:
    details = []
    if retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(retry_after * 1e9))
        packed = any_pb2.Any()
        packed.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        details.append(packed)
    return rpc_status.to_status(status_pb2.Status(code=code_pb2.UNAVAILABLE, message="busy", details=details))


class Flaky:
    """UNAVAILABLE `times` times, before or after the first message, then the answer. Knows when it was called."""

    def __init__(self, times: int, *, after: int = 0, retry_after: float | None = None) -> None:
        self.calls: list[float] = []
        self._times, self._after, self._retry_after = times, after, retry_after

    def __call__(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.calls.append(time.monotonic())
        if len(self.calls) <= self._times:
            yield from ANSWER[: self._after]
            context.abort_with_status(unavailable(self._retry_after))
        yield from ANSWER


def test_this_machine_is_reached_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    with serving(answers) as address, SyncFulcrumClient(address) as client:
        assert client.complete(pb.GenerateRequest(text="x", n=2), deadline=20).request_id == "r1"


def test_generate_and_complete() -> None:
    with serving(answers) as address, SyncFulcrumClient(address) as client:
        with client.generate(REQUEST) as events:
            assert list(events) == [getattr(response, response.WhichOneof("event")) for response in ANSWER]
        done = client.complete(REQUEST)
        assert client.tokenize(pb.TokenizeRequest(text="ab")).token_ids == [97, 98]
        assert client.get_model().served_names == ["m"]  # UNAVAILABLE at first
        with pytest.raises(FulcrumError) as caught:
            client.detokenize(pb.DetokenizeRequest(token_ids=[1]))
    assert (done.request_id, done.model, done.text) == ("r1", "m", "Hello")
    assert done.choices[0].token_ids == [1, 2]
    assert [each.token_id for each in done.choices[0].logprobs] == [1, 2]
    assert [each.token_id for each in done.prompt_logprobs] == [5]
    assert done.usage.prompt_tokens == 3
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED


def test_tries_again_before_the_first_message_only() -> None:
    flaky = Flaky(2)
    with serving(flaky) as address, SyncFulcrumClient(address) as client:
        assert client.complete(REQUEST).text == "Hello"
    assert len(flaky.calls) == 3
    assert flaky.calls[1] - flaky.calls[0] >= 0.08
    assert flaky.calls[2] - flaky.calls[1] >= 0.16

    late = Flaky(1, after=1)
    with serving(late) as address, SyncFulcrumClient(address) as client:
        events = client.generate(REQUEST)
        assert next(events) == ANSWER[0].accepted
        with pytest.raises(FulcrumError, match="UNAVAILABLE: busy"):
            next(events)
    assert len(late.calls) == 1


def test_gives_up_after_its_retries() -> None:
    flaky = Flaky(9)
    with serving(flaky) as address, SyncFulcrumClient(address, retries=1) as client:  # noqa: SIM117
        with pytest.raises(FulcrumError, match="UNAVAILABLE: busy"):
            client.complete(REQUEST)
    assert len(flaky.calls) == 2


def test_waits_as_long_as_the_server_asks_for() -> None:
    flaky = Flaky(1, retry_after=0.5)
    with serving(flaky) as address, SyncFulcrumClient(address) as client:
        assert client.complete(REQUEST).text == "Hello"
    assert 0.5 <= flaky.calls[1] - flaky.calls[0] < 5


async def test_the_asyncio_client_waits_as_long_as_the_server_asks_for() -> None:
    flaky = Flaky(1, retry_after=0.5)
    with serving(flaky) as address:
        async with FulcrumClient(address) as client:
            assert (await client.complete(REQUEST)).text == "Hello"
            assert (await client.get_model()).served_names == ["m"]
    assert 0.5 <= flaky.calls[1] - flaky.calls[0] < 5


def test_a_wait_beyond_the_deadline_is_no_use() -> None:
    flaky = Flaky(1, retry_after=25)
    with serving(flaky) as address, SyncFulcrumClient(address) as client:
        began = time.monotonic()
        with pytest.raises(FulcrumError) as caught:
            client.complete(REQUEST, deadline=20)
    assert time.monotonic() - began < 15
    assert caught.value.retry_after == 25.0
    assert len(flaky.calls) == 1


def test_the_tries_share_one_deadline() -> None:
    seen: list[float] = []

    def handler(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        seen.append(context.time_remaining())
        if len(seen) == 1:
            context.abort_with_status(unavailable(0.3))
        yield ANSWER[0]
        while context.is_active():
            time.sleep(0.01)

    with serving(handler) as address, SyncFulcrumClient(address) as client, pytest.raises(FulcrumError) as caught:
        client.complete(REQUEST, deadline=2)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert seen[0] < 2.1  # gRPC rounds up what it sends
    assert seen[1] < seen[0] - 0.2


def test_pauses_double_up_to_a_limit() -> None:
    tries = Tries(8, None)
    error = FulcrumError(grpc.StatusCode.UNAVAILABLE, "")
    for middle in (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0):
        pause = tries.pause(error)
        assert pause is not None
        assert 0.8 * middle <= pause <= 1.2 * middle
    assert tries.pause(error) is None
    assert Tries(8, None).pause(FulcrumError(grpc.StatusCode.RESOURCE_EXHAUSTED, "", retry_after=1.0)) is None
    assert Tries(8, None).pause(FulcrumError(grpc.StatusCode.UNAVAILABLE, "", retry_after=3600.0)) is None


@pytest.mark.parametrize("way", ["close", "with", "drop"])
def test_leaving_the_stream_cancels_the_call(way: str) -> None:
    gone = threading.Event()

    def handler(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        context.add_callback(gone.set)
        yield ANSWER[0]
        gone.wait(10)

    with serving(handler) as address, SyncFulcrumClient(address) as client:
        events = client.generate(REQUEST)
        assert next(events) == ANSWER[0].accepted
        assert not gone.is_set()
        if way == "close":
            events.close()
            with pytest.raises(FulcrumError, match="CANCELLED"):
                next(events)
        elif way == "with":
            with events:
                pass
        del events
        assert gone.wait(5)


def test_another_thread_may_close_a_stream_that_waits() -> None:
    gone, begun = threading.Event(), threading.Event()

    def handler(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        context.add_callback(gone.set)
        begun.set()
        gone.wait(10)
        yield ANSWER[0]

    with serving(handler) as address, SyncFulcrumClient(address) as client, ThreadPoolExecutor(1) as pool:
        events = client.generate(REQUEST)
        waiting = pool.submit(next, events)
        assert begun.wait(5)
        events.close()
        with pytest.raises(FulcrumError, match="CANCELLED"):
            waiting.result(5)
        assert gone.wait(5)


def test_closing_ends_the_wait_for_another_try() -> None:
    flaky = Flaky(1, retry_after=20)
    with serving(flaky) as address, SyncFulcrumClient(address) as client, ThreadPoolExecutor(1) as pool:
        events = client.generate(REQUEST)
        waiting = pool.submit(next, events)
        while not flaky.calls:
            time.sleep(0.01)
        events.close()
        with pytest.raises(FulcrumError):
            waiting.result(5)
    assert len(flaky.calls) == 1


def test_metadata_goes_with_every_call() -> None:
    seen: list[dict[str, str | bytes]] = []

    def handler(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        seen.append(dict(context.invocation_metadata()))
        yield from ANSWER

    with (
        serving(handler) as address,
        SyncFulcrumClient(address, api_key="sk-1", metadata=[("x-team", "blue")]) as client,
    ):
        client.complete(REQUEST, metadata=[("x-request-id", "label")])
    (metadata,) = seen
    assert metadata["authorization"] == "Bearer sk-1"
    assert metadata["x-team"] == "blue"
    assert metadata["x-request-id"] == "label"


async def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    # fmt: off
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )
    # fmt: on
    pair = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    trust = grpc.ssl_channel_credentials(certificate.read_bytes())
    with serving(answers, pair) as address:
        name = address.replace("127.0.0.1", "localhost")
        with SyncFulcrumClient(name, credentials=trust, api_key="sk-1") as client:
            assert client.complete(REQUEST).text == "Hello"
        async with FulcrumClient(name, credentials=trust, api_key="sk-1") as other:
            assert (await other.complete(REQUEST)).text == "Hello"
        with SyncFulcrumClient(name, retries=0) as plain, pytest.raises(FulcrumError, match="UNAVAILABLE"):
            plain.complete(REQUEST)


def test_chats() -> None:
    request = chat_request(
        [("system", "Be brief."), message("user", "Hi")],
        stopping=pb.StoppingCriteria(max_tokens=5),
        tools=[pb.Tool(name="f", parameters_json="{}")],
        n=2,
    )
    assert [(each.role, each.content[0].text) for each in request.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]
    assert request.chat.tools[0].name == "f"
    assert (request.stopping.max_tokens, request.n) == (5, 2)
    with pytest.raises(ValueError, match="max_tokens"):
        chat_request([], max_tokens=5)
    calls = [pb.ToolCall(id="1", name="f", arguments_json="{}")]
    answer = Choice(text="Yes", reasoning="hm", tool_calls=calls).message()
    assert answer == pb.ChatMessage(
        role="assistant", content=[pb.ContentPart(text="Yes")], tool_calls=calls, reasoning="hm"
    )
