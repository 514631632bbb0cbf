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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cli.signals import StopSignals, first, unless
from engine.kept import Kept, ProcessDied

# What the end of a drained process may take, beside the grace: last words to clients, the end of the core.
STOP_SECONDS = 15.0
# What a process that was told to end at once may take to do it cleanly.
HURRY_SECONDS = 3.0
# What a process whose parent has gone gives its callers to hear of it: another may already wait for its port.
_ORPHAN_SECONDS = 1.0


class Child(Kept):
    """A running `fulcrum COMMAND --supervised`, from `keep` to `stop`.

    Args:
        line: COMMAND and its options.
        variables: further environment variables.
        restarts, speaks: as of `Kept`.
        pass_fds: file descriptors that it has, too.

    Attributes:
        report: what it says when it serves.
        again: options with which it serves at the same addresses when it is started again.
    """

    def __init__(
        self,
        name: str,
        line: Sequence[str],
        variables: Mapping[str, str],
        restarts: int,
        *,
        speaks: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        super().__init__(name, restarts, speaks=speaks)
        self.report: dict[str, Any] = {}
        self.again: Sequence[str] = ()
        self._line = line
        self._variables = variables
        self._pass_fds = pass_fds

    async def launch(self) -> None:
        """Starts the process, and waits for its report. Raises ProcessDied."""
        self._end_group()
        command, *options = self._line
        place = options.index("--") if "--" in options else len(options)  # the last value of an option counts
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cli", command, "--supervised", *options[:place], *self.again, *options[place:]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | self._variables,
            pass_fds=self._pass_fds,
            start_new_session=True,
        )
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise ProcessDied(self.name, await process.wait())
        self.report = json.loads(line)

    async def stop(self, grace: float, hurry: asyncio.Event) -> None:
        """Asks the child to drain and end; insists when `grace` seconds have passed or `hurry` is set."""
        await self.let_go()
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            await first(process.wait(), hurry.wait(), deadline=grace)
        if process.returncode is None:
            process.send_signal(signal.SIGINT)  # the second signal: end at once, but cleanly
            await first(process.wait(), deadline=HURRY_SECONDS)
        self._end_group()
        await process.wait()

    def _end_group(self) -> None:
        """Whatever a child has left of its group ends with it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


async def stop_in_turn(children: Sequence[Child], grace: float, hurry: asyncio.Event) -> None:
    """Stops one after the other, all of them within the grace and STOP_SECONDS, though each may have to be hurried."""
    clock = asyncio.get_running_loop().time
    end = clock() + grace + STOP_SECONDS - len(children) * HURRY_SECONDS
    for child in children:
        await child.stop(max(0.0, end - clock()), hurry)


async def run_workers(
    workers: Sequence[Child],
    *others: Kept,
    ready: Callable[[list[dict[str, Any]]], None],
    grace: float,
    signals: StopSignals,
) -> None:
    """Keeps these processes until a signal; then they drain.

    Args:
        others: ends it as well, when it is not started again.
        ready: called with their reports once all serve.

    Raises: ProcessDied, Stopped.
    """
    try:
        starts = asyncio.gather(*(worker.keep() for worker in workers))
        await unless(starts, signals.stopped(), *(other.died() for other in others))
        ready([worker.report for worker in workers])
        await unless(signals.stopped(), *(kept.died() for kept in (*others, *workers)))
    finally:
        await asyncio.gather(*(worker.stop(grace + STOP_SECONDS, signals.hurry) for worker in workers))


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
    # A drain is no longer wanted, only a clean end.
    for number, pause in ((signal.SIGTERM, _ORPHAN_SECONDS), (signal.SIGINT, HURRY_SECONDS)):
        os.kill(os.getpid(), number)
        time.sleep(pause)
    os.killpg(0, signal.SIGKILL)
