"""`fulcrum engine`: the core process and the gRPC service around it. Knows how they start and end, not what they do."""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cli.child import Child, run_workers
from cli.report import EngineReport
from cli.signals import Stopped, StopSignals, first, unless
from engine.client import CoreClient
from engine.config import EngineConfig
from engine.process import CoreProcess
from service.config import ServiceConfig
from service.server import BoundAddresses, serve
from telemetry.garbage import collect_rarely

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
    folder: Path | None,
) -> None:
    """Serves until a signal, then drains.

    Args:
        config: the core's settings.
        service: the service's settings.
        ready: called once everything listens and health is SERVING.
        workers: command lines of the processes that serve instead of this one; empty: this one serves.
        variables: environment variables for these, which carry their secrets.
        log_format: of the core (telemetry.logs.FORMATS).
        restarts: of each process that dies (engine.kept.Kept).
        folder: for sockets and figures (None: one of its own).

    Raises:
        ModelError: the model cannot be served.
        OSError: an address cannot be bound.
        ProcessDied: a process ended that should not have.
    """
    signals = StopSignals()
    with contextlib.suppress(Stopped):
        async with contextlib.AsyncExitStack() as stack:
            progress = sys.stderr.isatty()
            start = CoreProcess.start(
                config, progress=progress, log_format=log_format, restarts=restarts, folder=folder
            )
            core = await unless(stack.enter_async_context(start), signals.stopped())
            if not workers:
                # Where the gateway beside it needs no certificate, and no key with admin.
                service = replace(service, own_address=f"unix:{core.socket.parent}/0")
                await serve_core(service, core.socket, ready, signals, core)
                return
            children = [
                Child(
                    f"service worker {number}",
                    (line[0], f"--core={core.socket}", f"--own-address=unix:{core.socket.parent}/{number}", *line[1:]),
                    variables,
                    restarts,
                )
                for number, line in enumerate(workers)
            ]

            def all_serve(reports: list[dict[str, Any]]) -> None:
                for child, report in zip(children, reports, strict=True):
                    child.again = EngineReport(**report).again()
                addresses = [address for report in reports for address in report["process_addresses"]]
                ready(replace(EngineReport(**reports[0]), process_addresses=addresses))

            await run_workers(children, core, ready=all_serve, grace=service.grace_seconds, signals=signals)


async def serve_core(
    service: ServiceConfig,
    socket: Path,
    ready: Ready,
    signals: StopSignals | None = None,
    core: CoreProcess | None = None,
) -> None:
    """Serves a core from this process until a signal, then drains; a second signal cuts the drain short.

    Args:
        socket: the core's; it is waited for.
        core: ends the service as well when it is not started again. None: somebody else sees to it.

    Raises: OSError, ProcessDied.
    """
    signals = signals or StopSignals()
    kept = () if core is None else (core,)
    try:
        client = await unless(CoreClient.connect(socket), signals.stopped(), *(each.died() for each in kept))
    except Stopped:
        return

    def report(bound: BoundAddresses) -> None:
        collect_rarely()
        sys.setswitchinterval(0.001)  # a thread that renders a long chat lets the streams go on so soon
        own = [] if bound.own_address is None else [bound.own_address]
        of_core = {each.name for each in fields(EngineReport)} & set(client.info.__struct_fields__)
        about = {name: getattr(client.info, name) for name in of_core}
        ready(EngineReport(bound.address, own, bound.admin_addresses, bound.metrics_address, **about))

    stop = asyncio.Event()
    serving = asyncio.create_task(serve(service, client, ready=report, stop=stop))
    died = [asyncio.create_task(each.died()) for each in kept]
    try:
        await first(serving, signals.drain.wait(), *died)
        stop.set()
        await first(serving, signals.hurry.wait())
        for task in (serving, *died):
            if task.done():
                task.result()
    finally:
        for task in (serving, *died):
            task.cancel()
        await asyncio.wait((serving, *died))
        await client.close()
