"""The `fulcrum` command as a real process that never outlives its test."""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import descendants

WAIT_SECONDS = 60.0


class Fulcrum:
    """A running `fulcrum` command. Its standard output can be waited for; its standard error is kept in a file."""

    def __init__(self, arguments: list[str], log: Path, variables: dict[str, str]) -> None:
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | variables,
                text=True,
                start_new_session=True,
            )
        self.log = log
        self.output = ""
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def expect(self, pattern: str) -> str:
        """Reads standard output until the pattern is found; returns its first group."""
        while not (found := re.search(pattern, self.output)):
            line = self._lines.get(timeout=WAIT_SECONDS)
            if line is None:
                pytest.fail(f"no {pattern!r} in {self.output!r}; standard error:\n{self.log.read_text()}")
            self.output += line
        return found.group(1)

    def descendants(self) -> list[int]:
        """The process ids of everything below this process."""
        return descendants(self.process.pid)

    def wait(self) -> int:
        """Returns the exit status."""
        return self.process.wait(WAIT_SECONDS)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_SECONDS)

    def kill(self) -> None:
        """Ends it and everything below it at once."""
        family = self.descendants()
        self.process.kill()
        self.process.wait()
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def hangups_count() -> Iterator[None]:
    """A command under test hears SIGHUP though the tests themselves run under nohup, whose children ignore it too."""
    # A handler of ours is the default again in a child.
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    if ignored:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.fixture(scope="session")
def await_end() -> Callable[[list[int]], None]:
    """Fails unless these processes end within some seconds (a helper of multiprocessing ends after its parent)."""

    def wait(pids: list[int]) -> None:
        deadline = time.monotonic() + 10
        while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, f"processes {left} are left"
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def fulcrum_process() -> type[Fulcrum]:
    """For a process that several tests share; kill it at the end."""
    return Fulcrum


@pytest.fixture
def fulcrum(tmp_path: Path) -> Iterator[Callable[..., Fulcrum]]:
    """Starts `fulcrum ARGUMENTS` with further environment variables; it, and all that it started, end with the test."""
    started: list[Fulcrum] = []

    def start(*arguments: object, **variables: str) -> Fulcrum:
        process = Fulcrum([str(each) for each in arguments], tmp_path / f"stderr-{len(started)}.log", variables)
        started.append(process)
        return process

    yield start
    for each in started:
        each.kill()
