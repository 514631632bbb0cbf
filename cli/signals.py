"""Waiting for work or for what interrupts it; Ctrl-C and SIGTERM as such interruptions."""

import asyncio
import signal
from collections.abc import Awaitable
from typing import NoReturn, TypeVar

_Result = TypeVar("_Result")


class Stopped(Exception):
    """A signal came before the work was done."""


class StopSignals:
    """Takes SIGINT, SIGTERM and SIGHUP for the running event loop, from here to the end of the process.

    Attributes:
        drain: set by the first signal.
        hurry: set by SIGINT after that: end at once. A further SIGTERM changes nothing, since what sends it to a whole
            group of processes (systemd, for one) would meet the one that a supervising parent passes on.
    """

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.drain.set)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            loop.add_signal_handler(signal.SIGHUP, self.drain.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)

    def _interrupt(self) -> None:
        (self.hurry if self.drain.is_set() else self.drain).set()

    async def stopped(self) -> NoReturn:
        """Raises Stopped at the first signal; never returns."""
        await self.drain.wait()
        raise Stopped


async def unless(work: Awaitable[_Result], *interruptions: Awaitable[NoReturn]) -> _Result:
    """Returns what `work` returns; raises what an interruption raises before that, and then the work is cancelled."""
    task = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(each) for each in interruptions]
    try:
        await asyncio.wait((task, *others), return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            if other.done():
                other.result()
        return task.result()
    finally:
        for each in (task, *others):
            each.cancel()
        await asyncio.gather(task, *others, return_exceptions=True)  # a cancelled work cleans up first


async def first(*events: Awaitable[object], deadline: float | None = None) -> None:
    """Returns when one of these has come, or when `deadline` seconds have passed.

    Tasks among them go on; whatever else did not come is cancelled.
    """
    tasks = [asyncio.ensure_future(event) for event in events]
    try:
        await asyncio.wait(tasks, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for event, task in zip(events, tasks, strict=True):
            if task is not event:
                task.cancel()
