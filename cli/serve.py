"""`fulcrum serve`: an engine and a gateway as child processes. Knows how they start and end, not what they do."""

import asyncio
import contextlib
import http.client
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import click

from cli import settings
from cli.banner import reachable
from cli.child import Child, stop_in_turn
from cli.report import EngineReport
from cli.settings import Params
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
    params: Params,
    engine: click.Command,
    gateway: click.Command,
    signals: StopSignals,
    *,
    api_keys: Sequence[str],
    gateway_keys: Sequence[str],
) -> AsyncIterator[Both]:
    """Both, for as long as the block lasts; a request would be answered when it is entered.

    Args:
        params: the options of both commands. `grace` are the seconds that running requests get at the end; of each
            process that is killed there are so many `restarts` (engine.kept.Kept); one that ends by itself ends both.
        signals: end the start (Stopped is raised then), and hurry the end.
        api_keys: of callers.
        gateway_keys: that the engine knows; the last is the gateway's own.

    Raises: ProcessDied, Stopped.
    """
    keys = settings.key_variables(api_keys, gateway_keys=gateway_keys)
    own_key = settings.key_variables(api_keys, engine_key=gateway_keys[-1])
    children: list[Child] = []
    with OwnFolder() as folder:
        try:
            line = settings.child_arguments(engine, params, own_folder=folder)
            core = Child("engine", line, keys, params["restarts"], speaks=True)
            children.append(core)
            await unless(core.keep(), signals.stopped())
            report = EngineReport(**core.report)
            core.again = report.again()
            engines, admin = ",".join(report.process_addresses), report.admin_addresses[-1]
            line = settings.child_arguments(gateway, params, engine=engines, engine_admin=admin)
            front = Child("gateway", line, own_key, params["restarts"], speaks=True)
            children.append(front)
            await unless(front.keep(), signals.stopped(), core.died())
            serves = front.report
            front.again = [f"--port={serves['address'].rpartition(':')[2]}"]
            await unless(_healthy(**serves), signals.stopped(), core.died(), front.died())
            yield Both(report, serves["address"], core, front)
        finally:
            await stop_in_turn(children[::-1], params["grace"], signals.hurry)


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
