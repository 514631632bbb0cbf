"""A scripted engine (a real grpc.aio server) and a real gateway process in front of it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import grpc
import httpx
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1 import inference_pb2_grpc

ROOT = Path(__file__).parents[2]
MODEL = "org/tiny-model"
PROGRAM = """
import json, socket, sys
from pathlib import Path
from gateway.config import GatewayConfig
from gateway.server import serve
from telemetry.logs import configure
settings = json.loads(sys.argv[1])
configure(settings.pop("log_level", "info"), "text", "gateway")
settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
files = ("api_key_file", "https_cert", "https_key", "https_client_ca", "engine_ca")
settings |= {k: Path(settings[k]) for k in files if k in settings}
if __name__ == "__main__":
    serve(GatewayConfig(**settings), lambda host, port: print(port, flush=True), socket.socket(fileno=int(sys.argv[2])))
"""

Script = Callable[[pb.GenerateRequest, grpc.aio.ServicerContext], AsyncIterator[pb.GenerateResponse]]


def wait_until(condition, seconds=10.0, what="the condition"):
    """Polls; fails the test when it takes too long."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.005)
    return value


@dataclass
class Call:
    """One Generate that reached the engine."""

    request: pb.GenerateRequest
    metadata: dict[str, str]
    time_remaining: float | None
    peer: str
    cancelled: threading.Event = field(default_factory=threading.Event)


# ------------------------------------------------------------------------------------------------------ events


def accepted(id="r1"):
    return pb.GenerateResponse(accepted=pb.Accepted(request_id=id, model=MODEL))


def started(prompt=5, cached=2):
    return pb.GenerateResponse(started=pb.Started(prompt_tokens=prompt, cached_tokens=cached))


def delta(text="", index=0, reasoning="", calls=()):
    """`calls`: pieces of tool calls, as (number, id, name, arguments)."""
    pieces = [pb.ToolCallDelta(index=call, id=id, name=name, arguments=more) for call, id, name, more in calls]
    return pb.GenerateResponse(delta=pb.Delta(index=index, text=text, reasoning=reasoning, tool_calls=pieces))


def finished(index=0, reason=pb.FINISH_REASON_STOP, tokens=3, **matched):
    return pb.GenerateResponse(finished=pb.Finished(index=index, reason=reason, completion_tokens=tokens, **matched))


def usage(prompt=5, completion=3, cached=2, reasoning=0):
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": cached}
    return pb.GenerateResponse(usage=pb.Usage(**counts, reasoning_tokens=reasoning))


def says(*texts, **end) -> Script:
    """A script: these pieces for each of the n choices, interleaved."""

    async def script(request, context):
        n = request.n if request.HasField("n") else 1
        yield accepted()
        yield started()
        for text in texts:
            for index in range(n):
                yield delta(text, index)
        for index in range(n):
            yield finished(index, **end)
        yield usage(completion=3 * n)

    return script


def plays(*deltas, reasons=(pb.FINISH_REASON_TOOL_CALLS,), reasoning=0) -> Script:
    """A script: these Deltas, then the end of each choice."""

    async def script(request, context):
        yield accepted()
        yield started()
        for each in deltas:
            yield each
        for index, reason in enumerate(reasons):
            yield finished(index, reason)
        yield usage(reasoning=reasoning)

    return script


def two_calls() -> Script:
    """A script: reasoning, content and two calls in pieces; a piece of everything in one Delta."""
    return plays(
        delta(reasoning="Hm"),
        delta(reasoning=", é", text="I ", calls=[(0, "call_1", "weather", '{"z"')]),
        delta(calls=[(0, "", "", ": 1}"), (1, "call_2", "now", "")]),
        delta(calls=[(1, "", "", "{}")]),
        reasoning=1,
    )


def status(code, message, *details) -> grpc.Status:
    packed = []
    for detail in details:
        item = any_pb2.Any()
        item.Pack(detail)
        packed.append(item)
    return rpc_status.to_status(status_pb2.Status(code=code.value[0], message=message, details=packed))


def reason(name):
    return error_details_pb2.ErrorInfo(reason=name, domain="fulcrum")


def violation(name):
    field_violation = error_details_pb2.BadRequest.FieldViolation(field=name, description="bad")
    return error_details_pb2.BadRequest(field_violations=[field_violation])


def retry(seconds, nanos=0):
    return error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds, nanos=nanos))


def refuses(code, message="no", *details, after=()) -> Script:
    """A script that sends `after` and then fails."""

    async def script(request, context):
        for event in after:
            yield event
        await context.abort_with_status(status(code, message, *details))

    return script


def hangs(*events) -> Script:
    """A script that sends these events and then nothing more, until it is cancelled."""

    async def script(request, context):
        for event in events:
            yield event
        await asyncio.Event().wait()

    return script


# ------------------------------------------------------------------------------------------------------ the engine


class FakeEngine(inference_pb2_grpc.InferenceServiceServicer):
    """Answers Generate by `script`; tokens are code points. Runs on an event loop in a thread of its own."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.script: Script = says("Hello", " world")
        self.unary_error: grpc.Status | None = None
        self.port = 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def start(self) -> None:
        self.run(self._start())

    async def _start(self) -> None:
        self.server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
                ("grpc.max_receive_message_length", 16 << 20),
            ]
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self.server)
        self.health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        assert self.port
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.server.start()

    def set_serving(self, serving: bool) -> None:
        kind = health_pb2.HealthCheckResponse
        self.run(self.health.set("", kind.SERVING if serving else kind.NOT_SERVING))

    def stop(self) -> None:
        """Dies: running calls are cut."""
        self.run(self.server.stop(0))

    def close(self) -> None:
        self.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def Generate(self, request, context):
        call = Call(request, dict(context.invocation_metadata()), context.time_remaining(), context.peer())
        self.calls.append(call)
        ended = False
        try:
            async for event in self.script(request, context):
                yield event
            ended = True
        finally:
            if not ended:
                call.cancelled.set()

    async def Tokenize(self, request, context):
        await self._maybe_fail(context)
        if request.WhichOneof("prompt") == "chat":
            text = "".join(p.text for m in request.chat.messages for p in m.content)
        else:
            text = request.text
        return pb.TokenizeResponse(
            token_ids=[ord(c) for c in text], token_bytes=[c.encode() for c in text], max_model_len=2048
        )

    async def Detokenize(self, request, context):
        await self._maybe_fail(context)
        return pb.DetokenizeResponse(text=self.text_of(request.token_ids))

    @staticmethod
    def text_of(token_ids):
        return "".join(map(chr, token_ids))

    async def GetModel(self, request, context):
        await self._maybe_fail(context)
        return pb.GetModelResponse(served_names=[MODEL, "alias"], max_model_len=2048, created=1700000000)

    async def _maybe_fail(self, context):
        if self.unary_error is not None:
            await context.abort_with_status(self.unary_error)


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


@pytest.fixture
def engine(shared_engine: FakeEngine) -> Iterator[FakeEngine]:
    """The engine behind `gateway`, with its standard script and no calls seen."""
    shared_engine.calls.clear()
    shared_engine.script = says("Hello", " world")
    shared_engine.unary_error = None
    yield shared_engine
    shared_engine.script = says("Hello", " world")
    shared_engine.unary_error = None


@pytest.fixture
def own_engines() -> Iterator[Callable[[], FakeEngine]]:
    """Makes engines that a test may stop."""
    made: list[FakeEngine] = []

    def make() -> FakeEngine:
        made.append(FakeEngine())
        return made[-1]

    yield make
    for fake in made:
        fake.close()


# ------------------------------------------------------------------------------------------------------ the gateway


@contextmanager
def running_gateway(
    log: Path, *, wait=True, python=sys.executable, installed=False, workers=1, **settings
) -> Iterator[str]:
    """A gateway on a free port; gives its base URL.

    `installed`: with `python`'s own packages alone. `workers`: processes, which share the socket and a folder.
    """
    env = os.environ | {"PYTHONPATH": "" if installed else f"{ROOT}{os.pathsep}{ROOT / 'proto'}"}
    with ExitStack() as stack:
        errors = stack.enter_context(log.open("w"))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
        if workers > 1:
            env |= {"PROMETHEUS_MULTIPROC_DIR": stack.enter_context(tempfile.TemporaryDirectory())}
        processes = [
            subprocess.Popen(
                [python, "-c", PROGRAM, json.dumps(settings), str(listener.fileno())],
                pass_fds=[listener.fileno()],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                cwd=log.parent if installed else ROOT,
            )
            for _ in range(workers)
        ]
        try:
            for process in processes:
                assert process.stdout.readline(), log.read_text()
            url = f"http{'s' if 'https_cert' in settings else ''}://127.0.0.1:{listener.getsockname()[1]}"
            if wait:  # each process looks for its engines by itself, and any may take a connection
                looks = 1 if workers == 1 else 4 * workers
                wait_until(lambda: all(is_healthy(url) for _ in range(looks)), 30, "the gateway to be healthy")
            yield url
        finally:
            listener.close()
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                try:
                    process.wait(15)
                finally:
                    process.kill()
                    process.wait()
                    process.stdout.close()


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2, verify=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="session")
def http() -> Iterator[httpx.Client]:
    """One client for all, because making one is slow."""
    with httpx.Client(timeout=20, verify=False) as client:
        yield client


@pytest.fixture(scope="session")
def shared_gateway(shared_engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("gateway") / "log"
    settings = {"max_body_bytes": 1 << 20, "heartbeat_seconds": 0.2, "max_prompts": 4}
    with running_gateway(log, engines=[shared_engine.address], **settings) as url:
        yield url


@pytest.fixture
def gateway(shared_gateway: str, engine: FakeEngine) -> str:
    """Base URL of a gateway of one process, without keys, in front of `engine`."""
    return shared_gateway


@dataclass
class Guarded:
    url: str
    log: Path
    headers: ClassVar = {"authorization": "Bearer key-two"}


@pytest.fixture(scope="session")
def shared_guarded(shared_engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    log = tmp_path_factory.mktemp("guarded") / "log"
    settings = {
        "api_keys": ["key-one", "key-two"],
        "engine_key": "engine-secret",
        "cors_origins": ["https://app.example"],
        "workers": 2,
        "access_log": True,
        "request_timeout": 30,
    }
    with running_gateway(log, engines=[shared_engine.address], **settings) as url:
        yield Guarded(url, log)


@pytest.fixture
def guarded(shared_guarded: Guarded, engine: FakeEngine) -> Guarded:
    """A gateway of two processes with keys and CORS, in front of `engine`."""
    return shared_guarded


@pytest.fixture
def start_gateway(tmp_path: Path):
    """Starts further gateways: `with start_gateway(engines=[...]) as url`."""

    def start(**settings):
        return running_gateway(tmp_path / "gateway.log", **settings)

    return start


# ------------------------------------------------------------------------------------------------------ for the tests


class Kit:
    """What tests build scripts and requests from (test modules cannot import this file)."""

    accepted = staticmethod(accepted)
    started = staticmethod(started)
    delta = staticmethod(delta)
    finished = staticmethod(finished)
    usage = staticmethod(usage)
    says = staticmethod(says)
    plays = staticmethod(plays)
    two_calls = staticmethod(two_calls)
    hangs = staticmethod(hangs)
    refuses = staticmethod(refuses)
    status = staticmethod(status)
    reason = staticmethod(reason)
    violation = staticmethod(violation)
    retry = staticmethod(retry)
    wait_until = staticmethod(wait_until)
    is_healthy = staticmethod(is_healthy)
    MODEL = MODEL
    ROOT = ROOT
    CHAT: ClassVar = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}

    @staticmethod
    def events(text: str) -> list:
        """The JSON of each event of a stream; its last is the string [DONE], if it was sent."""
        datas = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
