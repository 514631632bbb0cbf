"""Runs a load over several worker processes and gathers what came of it. Knows no data sets and no figures."""

import math
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, cast

from loadtest.records import Chain, LoadTestError, Record, Target, WorkerUsage
from loadtest.worker import Share, work

_START_IN = 0.1  # seconds from the word to start to the start, so that all workers have heard it
_END_IN = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """How the requests are sent.

    Attributes:
        times: seconds from the start at which each chain is due.
        max_concurrency: most chains under way at once, over all workers.
        warmups: requests sent before the start.
        workers: processes; never more than max_concurrency.
        seconds: from the start, after which a worker under max_concurrency begins no further chain; None: all are sent.
        give_up: seconds after which all is left as it is, as after Ctrl-C; None: never.
    """

    times: Sequence[float]
    max_concurrency: int | None = None
    warmups: int = 0
    workers: int = 1
    seconds: float | None = None
    give_up: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a load.

    Attributes:
        records: of all requests that have ended, in the order of the chains.
        duration: seconds from the start to the end of the last request.
        usages: of each worker.
        interrupted: by Ctrl-C, or given up; then the requests under way are in no record.
        warmup_errors: of each warm-up that failed.
    """

    records: list[Record]
    duration: float
    usages: list[WorkerUsage]
    interrupted: bool
    warmup_errors: list[str]


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker process: what is said to it, and what it reports."""

    process: BaseProcess
    words: connection.Connection
    reports: connection.Connection


def generate(target: Target, chains: Sequence[Chain], load: Load, progress: Callable[[int], object]) -> Outcome:
    """Sends all chains and waits for them, or for Ctrl-C.

    Args:
        progress: called with the number of requests that have ended since the last call.

    Raises: LoadTestError when a worker dies.
    """
    context = multiprocessing.get_context("spawn")
    taken = context.Value("q", 0)
    workers: list[_Worker] = []
    try:
        with _interrupts_noted() as noted:
            for share in _shares(target, chains, load):
                (heard, words), (reports, told) = context.Pipe(duplex=False), context.Pipe(duplex=False)
                process = context.Process(target=work, args=(share, taken, heard, told), daemon=True)
                process.start()
                heard.close()
                told.close()
                workers.append(_Worker(process, words, reports))
        return _supervise(workers, progress, math.inf if load.give_up is None else load.give_up, noted)
    finally:
        for worker in workers:
            worker.words.close()  # which ends a worker that still runs
            worker.reports.close()
        for worker in workers:
            worker.process.join(_END_IN)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


@contextmanager
def _interrupts_noted() -> Iterator[list[int]]:
    """Within it Ctrl-C is only noted, in the list, and blocked in processes that start (which ignore it soon)."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted  # which no Ctrl-C interrupts
        return
    former = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield noted
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, former)


def _shares(target: Target, chains: Sequence[Chain], load: Load) -> list[Share]:
    jobs = [(number, due, chain) for number, (due, chain) in enumerate(zip(load.times, chains, strict=True))]
    limit = load.max_concurrency
    count = min(load.workers, limit or len(jobs), len(jobs))
    shares = []
    for worker in range(count):
        # Under a limit any worker may take any chain, so that none idles while another has a queue.
        own = limit is None or count == 1
        shares.append(
            Share(
                target,
                tuple(jobs[worker::count] if own else jobs),
                own,
                None if limit is None else _part(limit, worker, count),
                _part(load.warmups, worker, count),
                math.inf if load.seconds is None else load.seconds,
            )
        )
    return shares


def _part(whole: int, worker: int, count: int) -> int:
    return whole // count + (worker < whole % count)


def _supervise(
    workers: Sequence[_Worker], progress: Callable[[int], object], give_up: float, noted: Sequence[int]
) -> Outcome:
    records: list[Record] = []
    usages: list[WorkerUsage] = []
    warmup_errors: list[str] = []
    interrupted = False
    start = end = time.perf_counter()
    ready = counted = 0
    open_ones = {worker.reports: worker for worker in workers}
    while open_ones:
        try:
            if noted and not interrupted:
                raise KeyboardInterrupt
            left = start + give_up - time.perf_counter()
            pipes = connection.wait(list(open_ones), None if interrupted or math.isinf(left) else max(0.0, left))
            if not pipes:
                raise KeyboardInterrupt
            for pipe in pipes:
                worker = open_ones[cast(connection.Connection, pipe)]
                match _receive(worker):
                    case ("ready", list(errors)):
                        ready += 1
                        warmup_errors += errors
                        if ready == len(workers) and not interrupted:
                            start = time.perf_counter() + _START_IN
                            _tell(workers, start)
                    case ("result", list(some), WorkerUsage() as usage):
                        records += some
                        usages.append(usage)
                        del open_ones[worker.reports]
                    case int(count):
                        counted += count
                        progress(count)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            end = time.perf_counter()
            _tell(open_ones.values(), None)
    progress(len(records) - counted)
    if not interrupted:
        end = max((record.start + record.latency for record in records), default=start)
    records.sort(key=lambda record: (record.chain, record.turn))
    return Outcome(records, max(end - start, 1e-9), usages, interrupted, warmup_errors)


def _receive(worker: _Worker) -> Any:
    try:
        return worker.reports.recv()
    except EOFError as error:
        worker.process.join(_END_IN)
        raise LoadTestError(f"a worker process ended with status {worker.process.exitcode}") from error


def _tell(workers: Iterable[_Worker], word: float | None) -> None:
    for worker in workers:
        try:
            worker.words.send(word)
        except BrokenPipeError:
            continue  # it is ending; what it sent before is still to be read
