"""A `fulcrum serve` of one's own to measure, and what it tells of itself. Knows no loads and no figures."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.admin import flush_cache, stats
from loadtest.records import LoadTestError, Target
from loadtest.tokens import served_model

_LAST_LINES = 15
_END_SECONDS = 30.0
_POLL_SECONDS = 0.1
_GAUGES = (
    "running_sequences",
    "waiting_sequences",
    "live_requests",
    "used_pages",
    "free_pages",
    "cached_pages",
    "total_pages",
    "preemptions",
)
_COUNTERS = (
    "steps",
    "prefill_tokens",
    "generated_tokens",
    "preemptions",
    "schedule_seconds",
    "execute_seconds",
    "process_seconds",
    "device_busy_seconds",
    "device_gap_seconds",
)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: how load tests reach it, its operator address, its log, its process."""

    target: Target
    admin: str
    log: Path
    process: "subprocess.Popen[bytes]"

    def flush(self) -> None:
        """Empties its prefix cache. Raises: LoadTestError."""
        flush_cache(self.admin, self.target)

    def counters(self) -> dict[str, float]:
        """What it has counted since its start; seconds of the device are 0 but on CUDA. Raises: LoadTestError."""
        now = stats(self.admin, self.target)
        return {name: getattr(now, name) for name in _COUNTERS}

    def gauges(self) -> dict[str, int]:
        """How many sequences run and wait, and whose the pages are. Raises: LoadTestError."""
        now = stats(self.admin, self.target)
        return {name: getattr(now, name) for name in _GAUGES}

    def last_words(self) -> str:
        """The end of its log."""
        return _end_of(self.log)


@contextmanager
def serving(model: Path | str, options: Sequence[str], log: Path, start_seconds: float) -> Iterator[Server]:
    """A server for `model` with these further options, on free ports; it ends with the block.

    Raises: LoadTestError when it does not serve within `start_seconds`. One of the block gets the end of the log too.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fulcrum-suite-") as folder:
        admin = f"unix:{folder}/admin"
        own = ("--port=0", "--grpc-port=0", "--grace=5", f"--admin-address={admin}")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "cli", "serve", str(model), *options, *own],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the suite's, which then ends it
            )
        try:
            with _ended(process):
                url = _address(process, log, time.monotonic() + start_seconds)
                target = Target("openai", url, "/v1/completions", "", {}, {"temperature": 0.0}, ignore_eos=True)
                yield Server(replace(target, model=served_model(target)), admin, log, process)
        except LoadTestError as error:
            raise LoadTestError(f"{error}\n{_end_of(log)}") from error


class Watch:
    """Notes a server's gauges and the device's memory once a second, from `with` to its end.

    Attributes:
        samples: each with "seconds" since the beginning, the gauges, and "device_memory_mib" (None without a GPU).
        error: why it stopped before its end, if it did.
    """

    def __init__(self, server: Server) -> None:
        self.samples: list[dict[str, Any]] = []
        self.error = ""
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            while True:
                seconds = round(time.monotonic() - began, 2)
                self.samples.append(
                    {"seconds": seconds, **self._server.gauges(), "device_memory_mib": _device_memory()}
                )
                if self._stop.wait(max(0.0, 1 - (time.monotonic() - began - seconds))):
                    return
        except LoadTestError as error:
            self.error = str(error)


def _device_memory() -> int | None:
    """MiB in use on the device (on that with the most, of several); None without nvidia-smi."""
    query = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        return max(int(line) for line in run.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _address(process: "subprocess.Popen[bytes]", log: Path, deadline: float) -> str:
    """The URL that the server names once it is healthy (`fulcrum serve` names none before)."""
    while time.monotonic() < deadline:
        status = process.poll()
        if found := re.search(r"OpenAI API\s+(http://[^/\s]+)/v1", log.read_text(errors="replace")):
            return found.group(1)
        if status is not None:
            raise LoadTestError(f"the server ended with status {status} before it served")
        time.sleep(_POLL_SECONDS)
    raise LoadTestError("the server does not serve yet (--start-seconds gives it longer)")


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])


@contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """After the block: asks it to end, insists after a while."""
    try:
        yield
    finally:
        process.terminate()
        _wait(process)


def _wait(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its children end with their lifelines
        process.wait()
