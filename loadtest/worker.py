"""One process of the load generator: sends its share of the requests at their times and keeps what comes of them.

Speaks with its parent over two pipes (one each way, since a loop makes the one that it watches non-blocking):
("ready", errors of warm-ups) when it is warm; then the parent sends the start time; a number for
every few finished requests; ("result", records, usage) at the end, also when the parent says stop or has gone.
"""

import asyncio
import contextlib
import itertools
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from loadtest.records import Chain, Prompt, Record, Target, WorkerUsage

_SCHEDSTAT = Path("/proc/self/schedstat")
_TICK = 0.1  # seconds between two reports of progress
_WINDOW = 1.0  # seconds over which the busiest moment is measured


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker does.

    Attributes:
        chains: all there are, with their numbers and the seconds from the start at which each is due.
        own: the numbers that are this worker's; None: it takes the next one that no worker has taken yet.
        slots: how many chains it has under way at most; None: as many as are due.
        warmups: sent before the start, all of them `chains[0]`'s first prompt.
        seconds: from the start, after which a slot takes no further chain.
    """

    target: Target
    chains: tuple[tuple[int, float, Chain], ...]
    own: bool
    slots: int | None
    warmups: int
    seconds: float


class _Client(Protocol):
    async def send(self, prompt: Prompt, record: Record) -> None: ...
    async def close(self) -> None: ...


def work(share: Share, taken: Any, words: Connection, reports: Connection) -> None:
    """The process's main function. `taken` counts the chains that are taken (a multiprocessing.Value)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who tells us
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a connection for each request under way
    with contextlib.suppress(ImportError):
        import uvloop

        if share.target.backend != "grpc":
            uvloop.run(_Worker(share, taken, words, reports).run())
            return
    asyncio.run(_Worker(share, taken, words, reports).run())


class _Worker:
    def __init__(self, share: Share, taken: Any, words: Connection, reports: Connection) -> None:
        self._share, self._taken, self._words, self._reports = share, taken, words, reports
        self._records: list[Record] = []
        self._stop = asyncio.Event()
        self._started: asyncio.Future[float] | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        loop.add_reader(self._words.fileno(), self._told)
        client = self._client()
        try:
            self._reports.send(("ready", await self._warm_up(client)))
            usage = await self._measure(client)
        finally:
            loop.remove_reader(self._words.fileno())
            await client.close()
        with contextlib.suppress(BrokenPipeError):
            self._reports.send(("result", self._records, usage))

    async def _warm_up(self, client: _Client) -> list[str]:
        """Sends the warm-ups; returns at their end, or when told to stop. The errors of those that failed."""
        prompt = self._share.chains[0][2].prompts[0]
        records = [Record() for _ in range(self._share.warmups)]
        stop = asyncio.ensure_future(self._stop.wait())
        warm = asyncio.gather(*(client.send(prompt, record) for record in records))
        try:
            await asyncio.wait((warm, stop), return_when=asyncio.FIRST_COMPLETED)
            if warm.done():
                warm.result()
        finally:
            warm.cancel()
            stop.cancel()
            await asyncio.gather(warm, stop, return_exceptions=True)
        return [record.error for record in records if record.error]

    def _client(self) -> _Client:
        if self._share.target.backend == "grpc":
            from loadtest.grpc_client import GrpcClient

            return GrpcClient(self._share.target)
        from loadtest.http_client import HttpClient

        return HttpClient(self._share.target)

    def _told(self) -> None:
        """The parent says when to start, or to stop (None); or it is gone."""
        try:
            start = self._words.recv()
        except EOFError:
            start = None
            asyncio.get_running_loop().remove_reader(self._words.fileno())
        assert self._started is not None
        if start is None:
            self._stop.set()
            if not self._started.done():
                self._started.cancel()
        elif not self._started.done():
            self._started.set_result(start)

    async def _measure(self, client: _Client) -> WorkerUsage:
        assert self._started is not None
        try:
            start = await self._started
        except asyncio.CancelledError:
            return WorkerUsage(0.0, 0.0, 0.0)
        await asyncio.sleep(start - time.perf_counter())
        began, cpu, waited = time.perf_counter(), time.process_time(), _waited()
        load = asyncio.ensure_future(self._load(client, start))
        stop = asyncio.ensure_future(self._stop.wait())
        watch = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait((load, stop), return_when=asyncio.FIRST_COMPLETED)
            if load.done():
                load.result()
        finally:
            tasks = (load, stop, watch)
            for task in tasks:
                task.cancel()
            *_, peaks = await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(peaks, BaseException):
            raise peaks
        seconds = max(time.perf_counter() - began, 1e-9)
        mean = (time.process_time() - cpu) / seconds
        busy = mean + (_waited() - waited) / seconds
        part = min(seconds / _WINDOW, 1)
        return WorkerUsage(mean, max(peaks[0], mean * part), max(peaks[1], busy * part))

    async def _load(self, client: _Client, start: float) -> None:
        queue = self._next(start + self._share.seconds)

        async def slot() -> None:
            for number, due, chain in queue:
                await self._chain(client, number, start + due, chain)

        if self._share.slots is not None:
            await asyncio.gather(*(slot() for _ in range(self._share.slots)))
        else:
            await asyncio.gather(*(self._chain(client, n, start + due, chain) for n, due, chain in queue))

    def _next(self, end: float) -> Iterator[tuple[int, float, Chain]]:
        if self._share.own:
            yield from itertools.takewhile(lambda _: time.perf_counter() < end, self._share.chains)
            return
        while time.perf_counter() < end:
            with self._taken.get_lock():
                number = self._taken.value
                self._taken.value += 1
            if number >= len(self._share.chains):
                return
            yield self._share.chains[number]

    async def _chain(self, client: _Client, number: int, due: float, chain: Chain) -> None:
        if (early := due - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        for turn, prompt in enumerate(chain.prompts):
            record = Record(number, turn)
            await client.send(prompt, record)
            self._records.append(record)

    async def _watch(self) -> tuple[float, float]:
        """Reports progress until cancelled; the largest share of a window that it ran, and that it ran or waited."""
        peak = busiest = 0.0
        told = 0
        began, cpu, waited = time.perf_counter(), time.process_time(), _waited()
        try:
            while True:
                await asyncio.sleep(_TICK)
                if len(self._records) > told:
                    with contextlib.suppress(BrokenPipeError):
                        self._reports.send(len(self._records) - told)
                    told = len(self._records)
                now = time.perf_counter()
                if now - began >= _WINDOW:
                    used, queued = time.process_time(), _waited()
                    peak = max(peak, (used - cpu) / (now - began))
                    busiest = max(busiest, (used - cpu + queued - waited) / (now - began))
                    began, cpu, waited = now, used, queued
        except asyncio.CancelledError:
            return peak, busiest


def _waited() -> float:
    """Seconds for which this process was ready to run and had no core (0 where the system does not count them)."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except OSError:
        return 0.0
