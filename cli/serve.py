"""`fulcrum serve`: an engine and a gateway as child processes. Knows how they start and end, not what they do."""

import asyncio
import contextlib
import http.client
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from cli.banner import reachable
from cli.child import HURRY_SECONDS, STOP_SECONDS, Child
from cli.report import EngineReport
from cli.signals import StopSignals, unless
from engine.own_folder import OwnFolder

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Both:
    """A running engine and its gateway.

    Attributes:
        report: the engine's facts.
        address: the gateway's HOST:PORT.
    """

    report: EngineReport
    address: str
    engine: Child
    gateway: Child

    async def died(self) -> NoReturn:
        """Raises ProcessDied when one of them ends for good; never returns."""
        await unless(self.engine.died(), self.gateway.died())
        raise AssertionError


@contextlib.asynccontextmanager
async def running(
    engine_line: Sequence[str],
    gateway_line: Callable[[EngineReport], Sequence[str]],
    *,
    engine_variables: Mapping[str, str],
    gateway_variables: Mapping[str, str],
    grace: float,
    restarts: int,
    signals: StopSignals,
) -> AsyncIterator[Both]:
    """Both, for as long as the block lasts; a request would be answered when it is entered.

    Args:
        engine_line: the engine's command line.
        gateway_line: the gateway's, for an engine that reports this.
        engine_variables, gateway_variables: environment variables for each, which carry their secrets.
        grace: seconds that running requests get at the end.
        restarts: of each that is killed (engine.kept.Kept); one that ends by itself ends both.
        signals: end the start (Stopped is raised then), and hurry the end.

    Raises: ProcessDied, Stopped.
    """
    children: list[Child] = []
    with OwnFolder() as folder:
        try:
            own = (engine_line[0], f"--own-folder={folder}", *engine_line[1:])
            engine = Child("engine", own, engine_variables, restarts, speaks=True)
            children.append(engine)
            await unless(engine.keep(), signals.stopped())
            report = EngineReport(**engine.report)
            engine.again = report.again()
            gateway = Child("gateway", gateway_line(report), gateway_variables, restarts, speaks=True)
            children.append(gateway)
            await unless(gateway.keep(), signals.stopped(), engine.died())
            serves = gateway.report
            gateway.again = [f"--port={serves['address'].rpartition(':')[2]}"]
            await unless(_healthy(**serves), signals.stopped(), engine.died(), gateway.died())
            yield Both(report, serves["address"], engine, gateway)
        finally:
            # This process is given STOP_SECONDS beside the grace, and each child may need to be hurried.
            end = asyncio.get_running_loop().time() + grace + STOP_SECONDS - 2 * HURRY_SECONDS
            for child in reversed(children):
                await child.stop(max(0.0, end - asyncio.get_running_loop().time()), signals.hurry)


async def _healthy(address: str, *, https: bool, mutual: bool) -> None:
    """Returns when the gateway says that an engine is SERVING."""
    while True:
        if await asyncio.to_thread(_is_healthy, reachable(address), https, mutual):
            return
        await asyncio.sleep(_POLL_SECONDS)


def _is_healthy(address: str, https: bool, mutual: bool) -> bool:
    connection = http.client.HTTPConnection(address, timeout=2)
    if https:
        # A child of ours, on this machine, asked for no secret: its certificate is for others, by other names.
        unchecked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(address, timeout=2, context=unchecked)
    try:
        connection.connect()
        if mutual:  # no request without a certificate; and it speaks to nobody before it has looked for its engines
            return True
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()
