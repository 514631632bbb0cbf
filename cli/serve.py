"""`fulcrum serve`: an engine and a gateway as child processes. Knows how they start and end, not what they do."""

import asyncio
import http.client
from collections.abc import Callable, Mapping, Sequence

import click

from cli.banner import reachable
from cli.child import STOP_SECONDS, Child
from cli.report import EngineReport
from cli.signals import Stopped, StopSignals, unless

_POLL_SECONDS = 0.1


async def run_both(
    engine_line: Sequence[str],
    gateway_line: Callable[[EngineReport], Sequence[str]],
    *,
    engine_variables: Mapping[str, str],
    gateway_variables: Mapping[str, str],
    grace: float,
    ready: Callable[[EngineReport, str], None],
) -> None:
    """Serves until a signal: then the gateway drains, and after it the engine.

    Args:
        engine_line: the engine's command line.
        gateway_line: the gateway's, for an engine that reports this.
        engine_variables, gateway_variables: environment variables for each, which carry their secrets.
        grace: seconds that running requests get.
        ready: called with the engine's facts and the gateway's HOST:PORT once a request would be answered.

    Raises: ChildDied.
    """
    signals = StopSignals()
    children: list[Child] = []
    try:
        engine = await Child.start("engine", engine_line, engine_variables)
        children.append(engine)
        report = EngineReport(**await unless(engine.ready(), signals.stopped()))
        gateway = await Child.start("gateway", gateway_line(report), gateway_variables)
        children.append(gateway)
        address = (await unless(gateway.ready(), signals.stopped(), engine.died()))["address"]
        await unless(_healthy(address), signals.stopped(), engine.died(), gateway.died())
        ready(report, address)
        await unless(signals.stopped(), engine.died(), gateway.died())
    except Stopped:
        click.echo("Running requests finish first; Ctrl-C again ends at once.", err=True)
    finally:
        end = asyncio.get_running_loop().time() + grace + STOP_SECONDS
        for child in reversed(children):
            await child.stop(max(0.0, end - asyncio.get_running_loop().time()), signals.hurry)


async def _healthy(gateway: str) -> None:
    """Returns when the gateway says that an engine is SERVING."""
    address = reachable(gateway)
    while True:
        if await asyncio.to_thread(_is_healthy, address):
            return
        await asyncio.sleep(_POLL_SECONDS)


def _is_healthy(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()
