"""Both ends of a supervised process: `Child` in the parent, `Parent` in the child. Knows nothing of what it serves.

A child is the `fulcrum` command with --supervised. Its standard input is a lifeline: a pipe on which nothing is ever
written, and whose end means that the parent has gone, however it went. On standard output it writes one line of JSON
when it serves: its addresses and other facts. It has a session of its own, so that Ctrl-C reaches the parent alone.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Self

from cli.signals import first

# What the end of a drained process may take, beside the grace: last words to clients, the end of the core.
STOP_SECONDS = 15.0
# What a process that was told to end at once may take to do it cleanly.
_HURRY_SECONDS = 3.0


class ChildDied(Exception):
    """A child ended that should not have.

    Attributes:
        name: of the child.
        status: its exit status (negative: the signal that killed it).
    """

    def __init__(self, name: str, status: int) -> None:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        super().__init__(f"the {name} {how}")
        self.name = name
        self.status = status


class Child:
    """A running `fulcrum COMMAND --supervised`, started by `start`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process

    @classmethod
    async def start(cls, name: str, arguments: Sequence[str], variables: Mapping[str, str]) -> Self:
        """Starts `fulcrum ARGUMENTS` (a command and its options), supervised, with further environment variables."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cli", arguments[0], "--supervised", *arguments[1:]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | variables,
            start_new_session=True,
        )
        return cls(name, process)

    async def ready(self) -> dict[str, Any]:
        """Waits until the child serves; returns what it reports. Raises ChildDied."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise ChildDied(self.name, await self._process.wait())
        report: dict[str, Any] = json.loads(line)
        return report

    async def died(self) -> NoReturn:
        """Raises ChildDied when the child ends; never returns."""
        raise ChildDied(self.name, await self._process.wait())

    async def stop(self, grace: float, hurry: asyncio.Event) -> None:
        """Asks the child to drain and end; insists when `grace` seconds have passed or `hurry` is set."""
        if self._process.returncode is None:
            self._process.terminate()
            await first(self._process.wait(), hurry.wait(), deadline=grace)
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)  # the second signal: end at once, but cleanly
            await first(self._process.wait(), deadline=_HURRY_SECONDS)
        # Whatever the child has left of its group ends with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()


class Parent:
    """In a child: the process that started it. Attach before anything is printed."""

    def __init__(self) -> None:
        # The pipe carries one line; whatever else is printed goes where the log goes.
        self._reply = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), name="lifeline", daemon=True).start()

    def report(self, facts: Mapping[str, Any]) -> None:
        """Tells the parent that this process serves, and where."""
        os.write(self._reply, json.dumps(dict(facts)).encode() + b"\n")
        os.close(self._reply)


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    for number in (signal.SIGTERM, signal.SIGINT):  # a drain is no longer wanted, only a clean end
        os.kill(os.getpid(), number)
        time.sleep(_HURRY_SECONDS)
    os.killpg(0, signal.SIGKILL)
