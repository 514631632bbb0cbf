"""What the serving commands do: settings out of options, errors into one line and an exit status, then serve."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli import banner, processes, settings
from cli.child import Parent
from cli.report import EngineReport
from cli.settings import Params
from cli.signals import Stopped, StopSignals, unless
from engine.kept import ProcessDied
from telemetry import logs

if TYPE_CHECKING:
    from engine import LLM

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


class Failed(click.ClickException):
    """It could not be done: one line, exit status 1."""


def serve_both(params: Params, engine: click.Command, gateway: click.Command) -> None:
    """`fulcrum serve`."""
    from cli.serve import running

    processes.raise_file_limit()
    params = processes.with_counts(params)
    logs.configure(params["log_level"], params["log_format"], "serve")
    settings.engine_config(params, Path())
    service = settings.service_config(params, Path(), grpc_port=params["grpc_port"])
    with_key = not service.key_ring().open
    settings.gateway_config(params, ("127.0.0.1:1",))
    settings.check_ports(params, "--port", "--grpc-port", "--metrics-port")
    # A key of the gateway's own, so that the engine can tell it from its users.
    gateway_keys = (*service.gateway_keys, secrets.token_urlsafe(32) if with_key else "")

    async def work() -> None:
        signals = StopSignals()
        with contextlib.suppress(Stopped):
            async with running(
                params, engine, gateway, signals, api_keys=service.api_keys, gateway_keys=gateway_keys
            ) as both:
                name = settings.served_names(params)[0]
                click.echo(banner.serve_banner(both.report, both.address, params, name, with_key=with_key))
                try:
                    await unless(signals.stopped(), both.died())
                except Stopped:
                    with contextlib.suppress(OSError):  # its terminal may be what has ended
                        click.echo("Running requests finish first; Ctrl-C again ends at once.")

    run(work())


def serve_engine(params: Params, service_worker: click.Command) -> None:
    """`fulcrum engine`."""
    parent = Parent() if params["supervised"] else None
    processes.raise_file_limit()
    params = processes.with_counts(params)
    logs.configure(params["log_level"], params["log_format"], "engine")
    count, port = params["service_workers"], params["grpc_port"]
    settings.engine_config(params, Path())
    settings.service_config(params, Path(), grpc_port=port)
    settings.check_ports(params, "--grpc-port", "--metrics-port")
    # Only now: wrong settings are told at once.
    from cli.engine import run_engine
    from engine.hub import resolve_model

    with settings.reserved_port(params["host"], port, shared=count > 1) as port, clear_errors():
        model = resolve_model(params["model"], revision=params["revision"], progress=sys.stderr.isatty())
        service = settings.service_config(params, model, grpc_port=port)
        names = service.served_model_names

        def ready(report: EngineReport) -> None:
            if parent is not None:
                parent.report(asdict(report))
            else:
                click.echo(banner.engine_banner(report, params, names[0], with_key=not service.key_ring().open))

        def worker(number: int) -> list[str]:
            metrics_port = params["metrics_port"] if number == 0 else None
            changed = {"model": model, "grpc_port": port, "served_model_names": names, "metrics_port": metrics_port}
            return settings.child_arguments(service_worker, params, admin=number == 0, **changed)

        work = run_engine(
            settings.engine_config(params, model),
            service,
            ready=ready,
            workers=[worker(number) for number in range(count)] if count > 1 else (),
            log_format=params["log_format"],
            restarts=params["restarts"],
            folder=params["own_folder"],
            variables=settings.key_variables(service.api_keys, gateway_keys=service.gateway_keys),
        )
        run(work, _fast_loop())


def serve_worker(params: Params) -> None:
    """`fulcrum service-worker`, which always has a parent."""
    parent = Parent()
    from cli.engine import serve_core

    logs.configure(params["log_level"], params["log_format"], "service")
    service = settings.service_config(params, params["model"], grpc_port=params["grpc_port"], admin=params["admin"])
    with clear_errors():
        run(serve_core(service, params["core"], lambda report: parent.report(asdict(report))), _fast_loop())


def serve_gateway(params: Params, gateway: click.Command) -> None:
    """`fulcrum gateway`."""
    parent = Parent() if params["supervised"] else None
    from gateway.server import serve

    processes.raise_file_limit()
    logs.configure(params["log_level"], params["log_format"], "gateway")
    engines = tuple(address.strip() for address in params["engine"].split(","))
    config = settings.gateway_config(params, engines)
    listener = None if params["listener"] is None else socket.socket(fileno=params["listener"])
    if listener is None:
        settings.check_port(params["host"], params["port"], "--port")

    def bound(host: str, port: int) -> None:
        address = settings.join_address(host, port)
        if parent is not None:
            https, mutual = config.https_cert is not None, config.https_client_ca is not None
            parent.report({"address": address, "https": https, "mutual": mutual})
        else:
            click.echo(banner.gateway_banner(address, engines, params))

    # Before and after the server has its own handlers, both signals mean: end, all is well. Nothing is left to be
    # unwound then, and an exception would look like the application's.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    count = params["workers"] or 1
    with clear_errors():
        if count == 1:
            serve(config, bound, listener)
            return
        from cli.gateway import run_gateway

        variables = settings.key_variables(config.api_keys, engine_key=config.engine_key or "")
        worker = settings.child_arguments(gateway, params, workers=1)
        run(run_gateway(config, worker, count, variables=variables, restarts=params["restarts"], bound=bound))


def run(work: Coroutine[Any, Any, None], loop_factory: LoopFactory | None = None) -> None:
    """Runs the work. Raises Failed where a process of ours has ended."""
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(work)
    except ProcessDied as error:
        click.echo(f"Error: {error}", err=True)
        # A signal as a shell puts it. A child that ended well should still not have ended.
        raise SystemExit(128 - error.status if error.status < 0 else error.status or 1) from error


def _fast_loop() -> LoopFactory:
    import uvloop

    return uvloop.new_event_loop


@contextlib.contextmanager
def engine_in_process(params: Params) -> "Iterator[tuple[LLM, Path]]":
    """The engine that the options ask for, in this process, and the model's path. Raises: Failed, ConfigError."""
    settings.engine_config(params, Path())  # wrong settings are told before anything is loaded
    from engine import LLM
    from engine.hub import resolve_model

    progress = sys.stderr.isatty()
    with clear_errors():
        path = resolve_model(params["model"], revision=params["revision"], progress=progress)
        yield LLM(progress=progress, **asdict(settings.engine_config(params, path))), path


@contextlib.contextmanager
def utf8_alone() -> Iterator[None]:
    """Says in one line that a prompt has other bytes."""
    try:
        yield
    except UnicodeError as error:
        raise Failed("what was typed or piped in is not UTF-8") from error


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Turns what a person can mend into one line."""
    from engine.model.errors import ModelError
    from engine.request import RequestRejected

    try:
        yield
    except (ModelError, RequestRejected) as error:
        raise Failed(str(error)) from error
