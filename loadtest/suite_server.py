"""A `fulcrum serve` of one's own to measure, and what it tells of itself. Knows no loads and no figures."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fulcrum.v1.inference_pb2 import FlushCacheRequest, GetStatsRequest
from loadtest.admin import operator
from loadtest.records import LoadTestError, Target
from loadtest.tokens import served_model

GAUGES = (
    *("running_sequences", "waiting_sequences", "live_requests", "preemptions"),
    *("used_pages", "free_pages", "cached_pages", "total_pages"),
)
COUNTERS = (
    *("steps", "prefill_tokens", "generated_tokens", "preemptions", "schedule_seconds", "execute_seconds"),
    *("process_seconds", "device_busy_seconds", "device_gap_seconds"),
)
# What a process is, by a word of its command line.
_KINDS = {"engine.core_main": "core", "engine": "service", "service-worker": "service", "gateway": "gateway"}
_TICKS = os.sysconf("SC_CLK_TCK")
_LAST_LINES = 15
_END_SECONDS = 30.0
_POLL_SECONDS = 0.1
_SAMPLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: how load tests reach it, its operator address, its log, its process."""

    target: Target
    admin: str
    log: Path
    process: "subprocess.Popen[bytes]"

    def flush(self) -> None:
        """Empties its prefix cache. Raises: LoadTestError."""
        with operator(self.admin, self.target) as (service, given):
            service.FlushCache(FlushCacheRequest(), **given)

    def stats(self, names: Sequence[str]) -> dict[str, Any]:
        """Its gauges, or what it has counted since its start (of the device: on CUDA). Raises: LoadTestError."""
        with operator(self.admin, self.target) as (service, given):
            now = service.GetStats(GetStatsRequest(), **given).stats
        return {name: getattr(now, name) for name in names}

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time, user and system, that its processes have used: those of the core, the service, the gateway."""
        found: dict[str, float] = dict.fromkeys(_KINDS.values(), 0.0)
        _add_cpu(self.process.pid, "", found)
        return found

    def last_words(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])


@contextmanager
def serving(model: Path | str, options: Sequence[str], log: Path, start_seconds: float) -> Iterator[Server]:
    """A server for `model` with these further options, on free ports; it ends with the block.

    Raises: LoadTestError when it does not serve within `start_seconds`. One of the block gets the end of the log too.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fulcrum-suite-") as folder, log.open("wb") as output:
        admin = f"unix:{folder}/admin"
        own = ("--port=0", "--grpc-port=0", "--grace=5", f"--admin-address={admin}")
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", "serve", str(model), *options, *own],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is the suite's, which then ends it
        )
        target = Target("openai", "", "/v1/completions", "", {}, {"temperature": 0.0}, ignore_eos=True)
        server = Server(target, admin, log, process)
        try:
            target = replace(target, url=_url(server, time.monotonic() + start_seconds))
            yield replace(server, target=replace(target, model=served_model(target)))
        except LoadTestError as error:
            raise LoadTestError(f"{error}\n{server.last_words()}") from error
        finally:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its children end with their lifelines
                process.wait()


def _url(server: Server, deadline: float) -> str:
    """Where it serves, as it says once it is healthy."""
    while time.monotonic() < deadline:
        status = server.process.poll()
        if found := re.search(r"OpenAI API\s+(http://[^/\s]+)/v1", server.log.read_text(errors="replace")):
            return found.group(1)
        if status is not None:
            raise LoadTestError(f"the server ended with status {status} before it served")
        time.sleep(_POLL_SECONDS)
    raise LoadTestError("the server does not serve yet (--start-seconds gives it longer)")


def _add_cpu(pid: int, kind: str, found: dict[str, float]) -> None:
    """Adds the CPU time of a process and those below it; one that no word tells the kind of is of its parent's."""
    folder = Path(f"/proc/{pid}")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        kind = next((_KINDS[word] for word in (folder / "cmdline").read_text().split("\0") if word in _KINDS), kind)
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        if kind:
            found[kind] += (int(fields[11]) + int(fields[12])) / _TICKS
        for child in (folder / f"task/{pid}/children").read_text().split():
            _add_cpu(int(child), kind, found)


@contextmanager
def watched(server: Server) -> Iterator[list[dict[str, Any]]]:
    """Notes the gauges and the device's memory once a second, from the block's beginning to its end.

    Each sample has "seconds" since the beginning, the gauges, and "device_memory_mib" (None without a GPU).

    Raises: LoadTestError at the end, if they could not be read.
    """
    samples: list[dict[str, Any]] = []
    began, ended = time.monotonic(), threading.Event()

    def sample() -> None:
        while not samples or not ended.wait(_SAMPLE_SECONDS):
            seconds = round(time.monotonic() - began, 2)
            samples.append({"seconds": seconds, **server.stats(GAUGES), "device_memory_mib": _device_memory()})

    with ThreadPoolExecutor(1) as thread:
        sampling = thread.submit(sample)
        try:
            yield samples
        finally:
            ended.set()
    sampling.result()


def _device_memory() -> int | None:
    """MiB in use on the device (on that with the most, of several); None without nvidia-smi."""
    query = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        return max(int(line) for line in run.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
