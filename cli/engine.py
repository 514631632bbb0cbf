"""`fulcrum engine`: the core process and the gRPC service around it. Knows how they start and end, not what they do."""

import asyncio
import contextlib
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from cli.child import STOP_SECONDS, Child, ChildDied
from cli.report import EngineReport
from cli.signals import Stopped, StopSignals, first, unless
from engine.client import CoreClient
from engine.config import EngineConfig
from engine.process import CoreEnded, CoreProcess
from service.config import ServiceConfig
from service.server import BoundAddresses, serve

CORE = "engine core"

Ready = Callable[[EngineReport], None]


async def run_engine(
    config: EngineConfig,
    service: ServiceConfig,
    *,
    ready: Ready,
    workers: Sequence[Sequence[str]],
    variables: Mapping[str, str],
    log_format: str,
    restarts: int,
) -> None:
    """Serves until a signal, then drains.

    Args:
        config: the core's settings.
        service: the service's settings.
        ready: called once everything listens and health is SERVING.
        workers: command lines of the processes that serve instead of this one; empty: this one serves.
        variables: environment variables for these, which carry their secrets.
        log_format: of the core (telemetry.logs.FORMATS).
        restarts: of a core that dies (engine.process.CoreProcess).

    Raises:
        ModelError: the model cannot be served.
        OSError: an address cannot be bound.
        ChildDied: a process ended that should not have.
    """
    signals = StopSignals()
    with contextlib.suppress(Stopped):
        async with contextlib.AsyncExitStack() as stack:
            progress = sys.stderr.isatty()
            start = CoreProcess.start(config, progress=progress, log_format=log_format, restarts=restarts)
            core = await unless(stack.enter_async_context(start), signals.stopped())
            keeping = asyncio.create_task(_keep(core))
            stack.push_async_callback(_cancel, keeping)
            if workers:
                lines = [
                    (line[0], f"--core={core.socket}", f"--own-address=unix:{core.socket.parent}/{number}", *line[1:])
                    for number, line in enumerate(workers)
                ]
                await _run_workers(lines, variables, keeping, grace=service.grace_seconds, signals=signals, ready=ready)
                return
            # Where the gateway beside it needs no certificate, and no key with admin.
            service = replace(service, own_address=f"unix:{core.socket.parent}/0")
            await serve_core(service, core.socket, ready, signals, keeping)


async def _run_workers(
    lines: Sequence[Sequence[str]],
    variables: Mapping[str, str],
    keeping: asyncio.Task[NoReturn],
    *,
    grace: float,
    signals: StopSignals,
    ready: Ready,
) -> None:
    """Runs the service processes of a core until a signal."""
    workers: list[Child] = []

    async def kept() -> NoReturn:
        await asyncio.shield(keeping)

    try:
        for number, line in enumerate(lines):
            workers.append(await Child.start(f"service worker {number}", line, variables))
        reports = await unless(asyncio.gather(*(worker.ready() for worker in workers)), signals.stopped(), kept())
        addresses = [address for report in reports for address in report["process_addresses"]]
        ready(replace(EngineReport(**reports[0]), process_addresses=addresses))
        await unless(signals.stopped(), kept(), *(worker.died() for worker in workers))
    finally:
        await asyncio.gather(*(worker.stop(grace + STOP_SECONDS, signals.hurry) for worker in workers))


async def _keep(core: CoreProcess) -> NoReturn:
    try:
        await core.keep()
    except CoreEnded as error:
        raise ChildDied(CORE, error.status) from error


async def _cancel(task: asyncio.Task[NoReturn]) -> None:
    task.cancel()
    await asyncio.wait((task,))


async def serve_core(
    service: ServiceConfig,
    core: Path,
    ready: Ready,
    signals: StopSignals | None = None,
    keeping: asyncio.Task[NoReturn] | None = None,
) -> None:
    """Serves a running core from this process until a signal, then drains; a second signal cuts the drain short.

    Args:
        keeping: of the core; what it raises ends the service as well. None: somebody else keeps it.

    Raises: CoreDied, OSError, ChildDied.
    """
    signals = signals or StopSignals()
    client = await CoreClient.connect(core)

    def report(bound: BoundAddresses) -> None:
        # What was made until now lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        info = client.info
        ready(
            EngineReport(
                bound.address,
                [] if bound.own_address is None else [bound.own_address],
                bound.admin_addresses,
                bound.metrics_address,
                info.architecture,
                info.dtype,
                info.device,
                info.max_model_len,
                info.page_size,
                info.num_pages,
                info.max_num_seqs,
                info.max_num_batched_tokens,
            )
        )

    stop = asyncio.Event()
    serving = asyncio.create_task(serve(service, client, ready=report, stop=stop))
    try:
        await first(serving, signals.drain.wait(), *(() if keeping is None else (keeping,)))
        stop.set()
        await first(serving, signals.hurry.wait())
        if serving.done():
            serving.result()
        if keeping is not None and keeping.done():
            keeping.result()
    finally:
        serving.cancel()
        await asyncio.wait((serving,))
        await client.close()
