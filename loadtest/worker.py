"""One process of the load generator: sends its share of the requests at their times and keeps what comes of them.

It looks at a board in shared memory several times a second for what the others tell, and ends when its parent does.
"""

import asyncio
import contextlib
import math
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import uvloop

from loadtest.grpc_client import GrpcClient
from loadtest.http_client import HttpClient
from loadtest.records import Chain, Prompt, Record, Target, WorkerUsage

TICK = 0.1
"""Seconds between two looks at the board."""
_WINDOW = 1.0  # seconds over which the busiest moment is measured
_SCHEDSTAT = Path("/proc/self/schedstat")


@dataclass(frozen=True, slots=True)
class Load:
    """How the requests are sent."""

    times: Sequence[float]  # seconds from the start at which each chain is due
    max_concurrency: int | None = None  # most chains under way at once, over all workers
    warmups: int = 0  # requests sent before the start, all of them the first chain's first
    workers: int = 1  # processes; never more than max_concurrency
    seconds: float = math.inf  # from the start, after which a worker under max_concurrency begins no further chain
    give_up: float = math.inf  # seconds after which all is left as it is, as after Ctrl-C


class Board:
    """What the processes tell each other."""

    def __init__(self, context: SpawnContext) -> None:
        self.warm = context.Value("q")  # workers whose warm-ups have ended
        self.start = context.Value("d")  # when the load starts (time.perf_counter); 0: not yet
        self.taken = context.Value("q")  # chains that a worker has taken
        self.ended = context.Value("q")  # requests that have ended
        self.stop = context.Event()  # nothing further is to be sent, or waited for


@dataclass(slots=True)
class Outcome:
    """What came of a load, or of a worker's share."""

    records: list[Record] = field(default_factory=list)  # of all requests that have ended
    warmup_errors: list[str] = field(default_factory=list)  # of each warm-up that failed
    usages: list[WorkerUsage] = field(default_factory=list)  # of each worker
    duration: float = 0.0  # seconds from the start to the end of the last request
    interrupted: bool = False  # by Ctrl-C, or given up; then the requests under way are in no record


class Worker:
    """One of `count`: which part of the load is its own is told by its number."""

    def __init__(
        self, target: Target, chains: Sequence[Chain], load: Load, board: Board, *, number: int, count: int
    ) -> None:
        self._target, self._chains, self._load, self._board = target, chains, load, board
        self._number, self._count = number, count
        self._outcome = Outcome()
        self._clocks: list[_Clocks] = []

    def work(self, reply: Connection) -> None:
        """The process's main function: sends back an Outcome. Ctrl-C is blocked by its parent, whose it is."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a connection for each request under way
        with asyncio.Runner(loop_factory=None if self._target.backend == "grpc" else uvloop.new_event_loop) as runner:
            outcome = runner.run(self._run())
        with contextlib.suppress(BrokenPipeError):  # where the parent has gone
            reply.send(outcome)

    def _part(self, whole: int) -> int:
        """Of so many things: how many are its own."""
        return whole // self._count + (self._number < whole % self._count)

    async def _run(self) -> Outcome:
        """Ends early when told to stop, or when the parent has gone."""
        records, told = self._outcome.records, 0
        parent = multiprocessing.parent_process()
        assert parent is not None
        client = GrpcClient(self._target) if self._target.backend == "grpc" else HttpClient(self._target)
        started = asyncio.Event()
        load = asyncio.ensure_future(self._send_all(client, started))
        try:
            while not load.done() and not self._board.stop.is_set() and parent.is_alive():
                await asyncio.wait((load,), timeout=TICK)
                with self._board.ended.get_lock():
                    self._board.ended.value += len(records) - told
                told = len(records)
                if self._board.start.value:
                    started.set()
                if self._clocks and time.perf_counter() - self._clocks[-1][0] >= _WINDOW:
                    self._clocks.append(_clocks())
            if load.done():
                load.result()
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
            await client.close()
        self._outcome.usages = [_usage([*self._clocks, _clocks()])]
        return self._outcome

    async def _send_all(self, client: HttpClient | GrpcClient, started: asyncio.Event) -> None:
        """Warms up, waits for the others, and sends the chains."""
        load, board, first = self._load, self._board, self._chains[0].prompts[0]
        warmups = await asyncio.gather(*(send(client, first, Record()) for _ in range(self._part(load.warmups))))
        self._outcome.warmup_errors = [record.error for record in warmups if record.error]
        with board.warm.get_lock():
            board.warm.value += 1
        await started.wait()
        start: float = board.start.value
        await asyncio.sleep(start - time.perf_counter())
        self._clocks.append(_clocks())
        if load.max_concurrency is None:
            own = range(self._number, len(self._chains), self._count)
            await asyncio.gather(*(self._chain(client, number, start) for number in own))
            return
        queue = self._queue(start + load.seconds)

        async def slot() -> None:
            for number in queue:
                await self._chain(client, number, start)

        await asyncio.gather(*(slot() for _ in range(self._part(load.max_concurrency))))

    def _queue(self, end: float) -> Iterator[int]:
        """Chains that no worker has taken yet, so that none idles while another has a queue; none after the end."""
        taken = self._board.taken
        while time.perf_counter() < end:
            with taken.get_lock():
                number = taken.value
                taken.value += 1
            if number >= len(self._chains):
                return
            yield number

    async def _chain(self, client: HttpClient | GrpcClient, number: int, start: float) -> None:
        if (early := start + self._load.times[number] - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        for turn, prompt in enumerate(self._chains[number].prompts):
            self._outcome.records.append(await send(client, prompt, Record(number, turn)))


async def send(client: Any, prompt: Prompt, record: Record) -> Record:
    """Fills `record` with what comes of the prompt, by either client. Raises nothing but a cancellation."""
    record.prompt_tokens, record.start = prompt.prompt_len, time.perf_counter()
    try:
        request = client.request(prompt)
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        record.error = f"cannot be sent: {error}"
        return record
    record.start = time.perf_counter()
    await client.send(request, record)
    if record.error:
        record.latency = time.perf_counter() - record.start
    return record


_Clocks = tuple[float, float, float]
"""Seconds on the clock, of CPU time, and of being ready to run without a core (0 where nobody counts them)."""


def _clocks() -> _Clocks:
    try:
        waited = int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except OSError:
        waited = 0.0
    return time.perf_counter(), time.process_time(), waited


def _usage(clocks: Sequence[_Clocks]) -> WorkerUsage:
    """Of a run, by the clocks at its start, after each window and at its end."""
    spans = [(now[0] - was[0], now[1] - was[1], now[2] - was[2]) for was, now in pairwise(clocks)]
    return WorkerUsage(
        mean=sum(used for _, used, _ in spans) / max(sum(seconds for seconds, _, _ in spans), 1e-9),
        peak=max((used / max(seconds, _WINDOW) for seconds, used, _ in spans), default=0.0),
        busy=max(((used + waited) / max(seconds, _WINDOW) for seconds, used, waited in spans), default=0.0),
    )
