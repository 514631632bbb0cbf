"""SIGKILL for each kind of process of a running `fulcrum serve`: who notices, what they see, and that it comes back."""

import contextlib
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from fulcrum.client import FulcrumError
from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1.inference_pb2_grpc import AdminServiceStub, InferenceServiceStub

# What a command line of this kind has, and what it has not.
KINDS = {
    "grammar compiler": ("service.grammar_worker", None),
    "core": ("engine.core_main", None),
    "engine": ("\0engine\0", None),
    "service worker": ("\0service-worker\0", None),
    "gateway": ("\0gateway\0", "--listener="),
    "gateway worker": ("--listener=", None),
}
BODY = {"model": "tiny-llama", "prompt": "x", "ignore_eos": True, "temperature": 1.0, "seed": 7}
# Seconds. On a machine of its own the first is a tenth, the second what a process takes to start.
AT_ONCE, BACK = 5.0, 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kill:
    """What happens when a process of this kind is killed.

    Args:
        ends: how gRPC streams end: their reasons, one of these; empty: they go on.
        events: how event streams end: codes of their error event; None: they break; empty: they go on.
        others: streams of other processes of its kind go on, and new requests are served.
        status: of a new HTTP request meanwhile.
    """

    kind: str
    ends: tuple[str, ...] = ()
    events: tuple[str | None, ...] = ()
    others: bool = False
    status: int | None = 200


# Where there are service workers, these live long enough to say that their core has gone.
ENGINE_ENDS = {"ends": ("", "ENGINE_DEAD", "DRAINING"), "events": ("unavailable", "engine_dead", "draining")}
COMPILER = Kill("grammar compiler")
CORE = Kill("core", ends=("ENGINE_DEAD",), events=("engine_dead",), status=503)
ENGINE = Kill("engine", **ENGINE_ENDS, status=503)
SERVICE_WORKER = Kill("service worker", ends=("",), events=("unavailable",), others=True)
GATEWAY = Kill("gateway", events=(None, "draining"), status=None)
GATEWAY_WORKER = Kill("gateway worker", events=(None,), others=True)
KILLS = [
    *(pytest.param(1, kill, marks=pytest.mark.full, id=f"1-{kill.kind}") for kill in (COMPILER, CORE)),
    *(pytest.param(1, kill, id=f"1-{kill.kind}") for kill in (ENGINE, GATEWAY)),
    *(pytest.param(2, kill, id=f"2-{kill.kind}") for kill in (CORE, SERVICE_WORKER, GATEWAY_WORKER)),
    *(pytest.param(2, kill, marks=pytest.mark.full, id=f"2-{kill.kind}") for kill in (ENGINE, GATEWAY)),
]


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def _own_address(pid: int) -> str:
    return re.search(r"--own-address=([^\0]+)", Path(f"/proc/{pid}/cmdline").read_text()).group(1)


def _socket_between(server: int, client: int) -> str:
    """The name of the server's socket of a connection, by its ports."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    ends = [f"0100007F:{server:04X}", f"0100007F:{client:04X}"]
    return next(f"socket:[{row[9]}]" for row in rows if row[1:3] == ends)


def _sockets(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(link))
    return found


class Stream(threading.Thread):
    """A stream that is read until it ends, or until it is left."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.leave = False
        self.ended: tuple[Any, float] | None = None  # how, and when
        self.pid = 0  # of the process that serves it
        self.start()
        until(lambda: len(self.text) > 8, BACK, "the stream does not begin")

    def run(self) -> None:
        end = self.read()
        self.ended = (end, time.monotonic())


class EventStream(Stream):
    """A streamed completion. Ends with an error event's code, or None where the connection breaks without one."""

    def __init__(self, served: "Served") -> None:
        self.url = served.url
        self.port = 0
        super().__init__()
        socket = _socket_between(int(served.url.rpartition(":")[2]), self.port)
        self.pid = next(pid for pid in served.gateways() if socket in _sockets(pid))

    def read(self) -> str | None:
        body = BODY | {"max_tokens": 30_000, "stream": True}
        with (
            contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError),
            httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as response,
        ):
            self.port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
            for line in response.iter_lines():
                if self.leave:
                    break
                event = json.loads(line.removeprefix("data: ") or "{}")
                if "error" in event:
                    return event["error"]["code"]
                self.text += "".join(choice["text"] for choice in event.get("choices", ()))
        return None


class GrpcStream(Stream):
    """A Generate. Ends with the code and the reason of its error."""

    def __init__(self, address: str, pid: int) -> None:
        self.address = address
        super().__init__()
        self.pid = pid

    def read(self) -> tuple[str, str] | None:
        stopping = pb.StoppingCriteria(max_tokens=30_000, ignore_eos=True)
        request = pb.GenerateRequest(text="x", stopping=stopping, sampling=pb.SamplingParams(temperature=1.0, seed=7))
        with grpc.insecure_channel(self.address) as channel:
            try:
                for event in InferenceServiceStub(channel).Generate(request, timeout=120):
                    self.text += event.delta.text
                    if self.leave:
                        break
            except grpc.RpcError as error:
                return error.code().name, FulcrumError.from_rpc(error).reason
        return None


class Served:
    """A running `fulcrum serve` of so many service processes and as many gateway processes."""

    def __init__(self, process: Any, workers: int) -> None:
        self.process = process
        self.workers = workers
        self.grpc = process.expect(r"gRPC +(\S+)")
        self.admin = process.expect(r"admin +(\S+)")
        self.metrics = process.expect(r"metrics +(\S+)")
        self.url = process.expect(r"OpenAI API +(\S+)/v1")
        process.expect(r"(Ctrl-C ends it)")
        if workers > 1:
            # The gateway reaches each service process by an address of its own.
            own = [_own_address(pid) for pid in self.pids("service worker")]
            assert len(own) == workers
            assert f"--engine={','.join(own)}" in Path(f"/proc/{self.pids('gateway')[0]}/cmdline").read_text()
        self.reference = self.complete(max_tokens=300).json()["choices"][0]["text"]

    def complete(self, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=BODY | fields, timeout=60)

    def pids(self, kind: str) -> list[int]:
        """The processes of this kind, oldest first."""
        has, lacks = KINDS[kind]
        lines = {}
        for pid in self.process.descendants():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                lines[pid] = Path(f"/proc/{pid}/cmdline").read_text()
        return sorted(pid for pid, line in lines.items() if has in line and (lacks is None or lacks not in line))

    def census(self) -> dict[str, int]:
        """How many of each kind that is always there."""
        return {kind: len(self.pids(kind)) for kind in KINDS if kind != "grammar compiler"}

    def gateways(self) -> list[int]:
        return self.pids("gateway worker") or self.pids("gateway")

    def health(self) -> int | None:
        """The status of /health, of whichever gateway process takes it."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=30).status_code
        return None

    def streams(self) -> list[Stream]:
        """On each service process one over gRPC, and through each gateway process two."""
        if self.workers == 1:
            streams: list[Stream] = [GrpcStream(self.grpc, self.pids("engine")[0])]
        else:
            streams = [GrpcStream(_own_address(pid), pid) for pid in self.pids("service worker")]
        wanted = sorted(2 * self.gateways())
        while wanted:
            stream = EventStream(self)
            if stream.pid in wanted:
                wanted.remove(stream.pid)
                streams.append(stream)
            stream.leave = stream not in streams
        return streams

    def counted(self) -> float:
        """Calls of Generate that have ended well, by metrics that a process just started may not serve yet."""
        name = 'fulcrum_service_calls_total{code="OK",method="Generate"}'
        pages: list[str] = []

        def told() -> bool:
            with contextlib.suppress(httpx.ConnectError):
                pages.append(httpx.get(self.metrics, timeout=30).text)
            return bool(pages)

        until(told, BACK, "nobody serves the metrics")
        return sum(float(line.rpartition(" ")[2]) for line in pages[0].splitlines() if line.startswith(name))


@pytest.fixture(scope="module")
def servers(fulcrum_process, await_end, tiny_model: Path, tmp_path_factory) -> Iterator[Callable[[int], Served]]:
    """servers(N): the one with N service processes and N gateway processes."""
    started: dict[int, Served] = {}

    def serve(workers: int) -> Served:
        if workers not in started:
            # fmt: off
            arguments = [
                "serve", str(tiny_model), "--load-format=dummy", "--dtype=float32", "--device=cpu", "--threads=1",
                "--memory-budget=32MiB", "--max-num-seqs=32", "--grpc-port=0", "--port=0", "--metrics-port=0",
                "--log-level=warning", f"--service-workers={workers}", f"--workers={workers}",
            ]
            # fmt: on
            log = tmp_path_factory.mktemp("kills") / "stderr.log"
            process = fulcrum_process(arguments, log, {})
            stack.callback(process.kill)
            started[workers] = Served(process, workers)
        return started[workers]

    with contextlib.ExitStack() as stack:
        yield serve
        for served in started.values():
            family = served.process.descendants()
            assert served.process.stop() == 0
            await_end(family)
            assert "Traceback" not in served.process.log.read_text()


@pytest.mark.parametrize(("workers", "kill"), KILLS)
def test_a_killed_process_comes_back(servers, workers: int, kill: Kill, await_end) -> None:
    served = servers(workers)
    if kill.kind == "grammar compiler":
        assert served.complete(max_tokens=9, guided_choice=["left"]).json()["choices"][0]["text"] == "left"
    streams, family, counted = served.streams(), set(served.process.descendants()), served.counted()
    census = served.census()
    victim = served.pids(kill.kind)[0]
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    marks = {stream: len(stream.text) for stream in streams}

    # A new request, at once.
    if kill.status is not None:
        answer = served.complete(max_tokens=3)
        assert answer.status_code == kill.status
        assert (answer.status_code != 503) or int(answer.headers["retry-after"]) >= 1
        assert time.monotonic() - began < AT_ONCE

    # Open streams go on or end.
    def told(stream: Stream) -> bool:
        ends = kill.ends if isinstance(stream, GrpcStream) else kill.events
        return stream.ended or (len(stream.text) > marks[stream] + 200 and (kill.others or not ends))

    until(lambda: all(map(told, streams)), BACK, "a stream neither goes on nor ends")
    ended = {stream for stream in streams if stream.ended}
    for stream in ended:
        how, when = stream.ended
        if isinstance(stream, GrpcStream):
            assert how in [("UNAVAILABLE", reason) for reason in kill.ends]
        else:
            assert how in kill.events
        assert when - began < AT_ONCE
    for kind, ends in ((GrpcStream, kill.ends), (EventStream, kill.events)):
        of_kind = {stream for stream in streams if isinstance(stream, kind)}
        if not kill.others:
            assert ended & of_kind == (of_kind if ends else set())
        elif kind is EventStream and kill.kind == "service worker":
            assert ended & of_kind  # each gateway process takes the service processes in turn
            assert of_kind - ended
        else:
            assert ended & of_kind == {stream for stream in of_kind if stream.pid == victim}
    # All have the same text, each as far as it has come.
    longest = max((stream.text for stream in streams), key=len)
    assert longest.startswith(served.reference[: len(longest)])
    assert all(longest.startswith(stream.text) for stream in streams)

    # Health says so, it comes back, and nothing is left of what has gone.
    if kill.status == 503:
        until(lambda: served.health() == 503, AT_ONCE, "health is 200")
    if kill.kind == "grammar compiler":
        assert served.complete(max_tokens=9, guided_choice=["right"]).json()["choices"][0]["text"] == "right"
    until(lambda: served.census() == census and served.health() == 200, BACK, "it does not come back")
    assert victim not in served.pids(kill.kind)
    # Each gateway process looks for its engines by itself.
    until(lambda: all(served.health() == 200 for _ in range(8)), BACK, "health is not 200 everywhere")
    assert served.complete(max_tokens=300).json()["choices"][0]["text"] == served.reference
    logger.info("%s of %d: back after %.1f s", kill.kind, served.workers, time.monotonic() - began)
    await_end(list(family - set(served.process.descendants())))
    assert served.counted() >= (counted if kill.others else 0)

    # Pages and gauges are back.
    for stream in streams:
        stream.leave = True
    for stream in streams:
        stream.join(BACK)
    with grpc.insecure_channel(served.admin) as channel:
        watch = AdminServiceStub(channel).WatchStats(pb.WatchStatsRequest(interval_seconds=0.1), timeout=60)
        stats = next(reply.stats for reply in watch if not reply.stats.live_requests)
    assert (stats.running_sequences, stats.waiting_sequences, stats.used_pages) == (0, 0, 0)
    assert stats.free_pages + stats.cached_pages == stats.total_pages


@pytest.mark.full
def test_a_service_worker_that_stands_still_is_left_to_itself(servers) -> None:
    served = servers(2)
    victim = served.pids("service worker")[0]
    streams = served.streams()
    os.kill(victim, signal.SIGSTOP)
    try:
        until(lambda: any(stream.ended for stream in streams), 30, "no stream is given up")
        ended = [stream for stream in streams if stream.ended]
        assert {stream.ended[0] for stream in ended} == {"unavailable"}
        assert 0 < len(ended) < len(streams) - 1
        assert [served.complete(max_tokens=3).status_code for _ in range(8)] == [200] * 8
    finally:
        os.kill(victim, signal.SIGCONT)
    for stream in streams:
        stream.leave = True
        stream.join(BACK)
    with grpc.insecure_channel(served.admin) as channel:
        watch = AdminServiceStub(channel).WatchStats(pb.WatchStatsRequest(interval_seconds=0.1), timeout=60)
        assert not next(reply.stats.used_pages for reply in watch if not reply.stats.live_requests)
