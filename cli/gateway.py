"""`fulcrum gateway` as several processes, which share a listening socket and a folder where metrics are summed."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

from cli.child import Child, run_workers
from cli.signals import Stopped, StopSignals
from engine.own_folder import OwnFolder
from gateway.config import GatewayConfig
from gateway.server import listen


async def run_gateway(
    config: GatewayConfig,
    worker: Sequence[str],
    count: int,
    *,
    variables: Mapping[str, str],
    restarts: int,
    bound: Callable[[str, int], None],
) -> None:
    """Serves until a signal, then drains.

    Args:
        config: the settings.
        worker: the command line of one process.
        count: how many of them.
        variables: environment variables for these, which carry their secrets.
        restarts: of each that dies (engine.kept.Kept).
        bound: called with host and port once all serve.

    Raises: OSError, ProcessDied.
    """
    signals = StopSignals()
    with OwnFolder() as folder, listen(config.host, config.port) as listener, contextlib.suppress(Stopped):
        port, shared = listener.getsockname()[1], listener.fileno()
        children = [
            Child(
                f"gateway worker {number}",
                (worker[0], f"--listener={shared}", *worker[1:]),
                {**variables, "PROMETHEUS_MULTIPROC_DIR": folder},
                restarts,
                pass_fds=(shared,),
            )
            for number in range(count)
        ]
        # Who comes during the drain is refused at once.
        draining = asyncio.create_task(signals.drain.wait())
        draining.add_done_callback(lambda _: listener.close())
        await run_workers(
            children, ready=lambda _: bound(config.host, port), grace=config.shutdown_seconds, signals=signals
        )
