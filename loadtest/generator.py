"""Runs a load over several worker processes and gathers what came of it. Knows no data sets and no figures."""

import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from typing import cast

from loadtest.records import Chain, LoadTestError, Target
from loadtest.worker import TICK, Board, Load, Outcome, Worker

_START_IN = 2.5 * TICK  # so that all workers have seen when the start is
_END_IN = 30.0


def generate(target: Target, chains: Sequence[Chain], load: Load, progress: Callable[[int], object]) -> Outcome:
    """Sends all chains and waits for them, or for Ctrl-C; records come in the order of the chains.

    Args:
        progress: called with the number of requests that have ended since the last call.

    Raises: LoadTestError when a worker dies.
    """
    context = multiprocessing.get_context("spawn")
    board, outcome, interrupts = Board(context), Outcome(), list[int]()
    processes: dict[connection.Connection, SpawnProcess] = {}
    former = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the workers inherit: Ctrl-C is ours
    try:
        count = min(load.workers, load.max_concurrency or len(chains), len(chains))
        for worker in (Worker(target, chains, load, board, number=number, count=count) for number in range(count)):
            reports, reply = context.Pipe(duplex=False)
            processes[reports] = context.Process(target=worker.work, args=(reply,), daemon=True)
            processes[reports].start()
            reply.close()  # so that its end is seen
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _supervise(processes, board, outcome, load, interrupts=interrupts, progress=progress)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, former)
        board.stop.set()
        for process in processes.values():
            process.join(_END_IN)
            if process.is_alive():
                process.kill()
                process.join()
    outcome.records.sort(key=lambda record: (record.chain, record.turn))
    return outcome


def _supervise(
    processes: Mapping[connection.Connection, SpawnProcess],
    board: Board,
    outcome: Outcome,
    load: Load,
    *,
    interrupts: Sequence[int],
    progress: Callable[[int], object],
) -> None:
    """Starts the load when all are warm, and gathers their reports. Raises: LoadTestError, KeyboardInterrupt."""
    working, ended = dict(processes), 0
    began = end = time.perf_counter()
    while working:
        for pipe in connection.wait(list(working), TICK):
            _take(outcome, cast(connection.Connection, pipe), working)
        now, start = time.perf_counter(), board.start.value
        if not start and board.warm.value == len(processes):
            board.start.value = now + _START_IN
        if not outcome.interrupted and (interrupts or now > (start or began) + load.give_up):
            outcome.interrupted, end = True, now
            board.stop.set()
        if len(interrupts) > 1:
            raise KeyboardInterrupt
        before, ended = ended, board.ended.value  # read once: it goes on meanwhile
        progress(ended - before)
    if not outcome.interrupted:
        end = max((record.start + record.latency for record in outcome.records), default=began)
    outcome.duration = max(end - (board.start.value or end), 1e-9)


def _take(outcome: Outcome, pipe: connection.Connection, working: dict[connection.Connection, SpawnProcess]) -> None:
    """Adds the report that has come. Raises: LoadTestError where instead of it the worker has ended."""
    process = working.pop(pipe)
    try:
        share: Outcome = pipe.recv()
    except (EOFError, OSError) as error:  # the latter in the midst of its report
        process.join(_END_IN)
        raise LoadTestError(f"a worker process ended with status {process.exitcode}") from error
    outcome.records += share.records
    outcome.usages += share.usages
    outcome.warmup_errors += share.warmup_errors
