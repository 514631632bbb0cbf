"""The grpc.aio servers of one service process: services, health, reflection, drain. Knows no prompt and no token."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer
from prometheus_client.registry import Collector

from engine.client import CoreClient, CoreDied
from fulcrum.client import keepalive
from fulcrum.tls import Identity, server_context
from fulcrum.v1 import inference_pb2, inference_pb2_grpc
from service.addresses import bind, is_unix, runtime_dir, split_address, swept_runtime_dir, unix_path
from service.admin import AdminServicer
from service.aio_server import AioServer, ended
from service.auth import Authenticator
from service.config import ServiceConfig
from service.errors import draining, engine_dead
from service.figures import SUFFIX, Figures
from service.grammar import GrammarCompiler
from service.guard import Guard
from service.health import Health
from service.live import LiveCalls
from service.metrics import EngineCollector, MetricsServer
from service.model import ServedModel
from service.parsers.registry import AUTO
from service.servicer import InferenceServicer
from telemetry.expiry import Certificates
from telemetry.garbage import give_back_freed_memory
from telemetry.tracing import Tracer

logger = logging.getLogger(__name__)

_SERVICES = inference_pb2.DESCRIPTOR.services_by_name
INFERENCE: str = _SERVICES["InferenceService"].full_name
ADMIN: str = _SERVICES["AdminService"].full_name
HEALTH: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"

# A dead peer is found after this long, and its requests are ended.
_KEEPALIVE = keepalive(30, within=20)
# Calls of a burst that may wait to be looked at. By itself gRPC cancels some from 1,000 on, and all from 3,000 on.
_MAX_PENDING = 1 << 14
# What is left after the grace gets this long to hear its status.
_LAST_WORDS_SECONDS = 1.0
# How often the core is asked for a sign of life, while calls are open.
_ASK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class BoundAddresses:
    """Where a service listens, with the ports that were found; each can be given to a gRPC channel (metrics: HTTP).

    Attributes:
        admin_addresses: of AdminService; the last is a Unix socket where there is an `own_address`.
    """

    address: str
    own_address: str | None
    admin_addresses: list[str]
    metrics_address: str | None


async def serve(
    config: ServiceConfig,
    core: CoreClient,
    *,
    ready: Callable[[BoundAddresses], None] | None = None,
    stop: asyncio.Event,
) -> None:
    """Serves until `stop` is set, then drains: NOT_SERVING, nothing new, running calls end within the grace.

    When the core dies, every call ends UNAVAILABLE, and health is NOT_SERVING until one serves the same socket again.

    Args:
        config: settings.
        core: a connected client; stays the caller's to close.
        ready: called once everything listens.
        stop: set by the caller (a signal handler) to end it.

    Raises:
        OSError: an address cannot be bound.
        CoreDied: the core that serves the socket again speaks of another version.
        Whatever reading the tokenizer, the template and the defaults raises, and what ends gRPC's accepting.
    """
    loop = asyncio.get_running_loop()
    model = await asyncio.to_thread(ServedModel.load, config)
    authenticator = Authenticator(config.key_ring(), config.max_priority)
    identity = config.identity()
    own = config.own_address or ""
    figures = Figures(unix_path(own).with_suffix(SUFFIX) if is_unix(own) else None)
    live = LiveCalls(config.request_timeout)
    grammars = GrammarCompiler(
        model.prompts.tokenizer, core.info.vocab_size, core.info.eos_token_ids, seconds=config.grammar_timeout
    )
    health = Health((INFERENCE, ADMIN))

    async with AsyncExitStack() as cleanup:
        cleanup.callback(model.prompts.close)
        cleanup.push_async_callback(grammars.close)
        tracer = None if config.otlp_endpoint is None else Tracer(config.otlp_endpoint, "engine")
        if tracer is not None:
            cleanup.push_async_callback(asyncio.to_thread, tracer.close)
        main = _new_server(config, Guard(authenticator.caller, figures))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(
                core=core,
                model=model,
                authenticator=authenticator,
                live=live,
                grammars=grammars,
                figures=figures,
                tracer=tracer,
                share_prefixes=config.share_prefixes,
                log_requests=config.log_requests,
            ),
            main,
        )
        health_pb2_grpc.add_HealthServicer_to_server(health, main)
        _add_reflection(main, (INFERENCE, HEALTH))
        address = bind(main, config.address, identity, cleanup)
        own_address = None if config.own_address is None else bind(main, config.own_address, identity, cleanup)
        certificates = Certificates(config.certificates())
        following = asyncio.create_task(_watch_core(core, live, health))  # the core may be draining already
        stopped = asyncio.create_task(stop.wait())
        others = certificates.watch(), give_back_freed_memory(), _watch_silence(core, live, health)
        for task in (following, stopped, *map(asyncio.create_task, others)):
            cleanup.callback(task.cancel)
        serving = [await _start(main, cleanup)]

        admin_addresses = []
        for each in _admin_addresses(config, address):
            # Who may open a socket may administer.
            check = (lambda _: None) if is_unix(each) else authenticator.admin
            admin = _new_server(config, Guard(check, figures))
            inference_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(core, live, figures), admin)
            health_pb2_grpc.add_HealthServicer_to_server(health, admin)
            _add_reflection(admin, (ADMIN, HEALTH))
            with swept_runtime_dir() if config.admin_address == AUTO else contextlib.nullcontext():
                admin_addresses.append(bind(admin, each, identity, cleanup))
            serving.append(await _start(admin, cleanup))

        collector = EngineCollector(core, figures, model.names[0], loop)
        metrics_address = _serve_metrics(config, [collector, certificates], identity, cleanup)

        if ready is not None:
            ready(BoundAddresses(address, own_address, admin_addresses, metrics_address))
        await asyncio.wait((following, stopped, *serving), return_when=asyncio.FIRST_COMPLETED)
        for task in (following, *serving):  # without them, health would not be true any more
            if task.done():
                task.result()

        health.end()
        live.refuse(draining)
        if not await live.idle(config.grace_seconds):
            logger.warning("the grace of %g s has passed: %d requests are ended", config.grace_seconds, len(live))
            live.end(draining)
            await live.idle(_LAST_WORDS_SECONDS)


async def _watch_core(core: CoreClient, live: LiveCalls, health: Health) -> None:
    """Tells health when the core drains, and everybody when that is over or it dies; then waits for the next one."""
    drained = False
    while True:
        await core.state_changed()
        drained |= core.draining
        if drained:
            health.end()
        if await core.ending():
            live.end(draining)
        await core.closed()
        health.set(serving=False)
        logger.error("the engine core is gone: %d requests are ended", live.interrupt(engine_dead))
        await core.reconnect()
        if drained:  # which is for good
            with contextlib.suppress(CoreDied):  # that one is gone, too: the next will be told
                await core.drain()
        logger.warning("the engine core serves again")
        health.set(serving=True)


async def _watch_silence(core: CoreClient, live: LiveCalls, health: Health) -> None:
    """Tells health when the core, with calls open, answers nothing for as long as a step may take; then, when it does.

    It is stopped, or hangs where its own watchdog cannot run. That it has died is told by `_watch_core`.
    """
    silent = False
    while seconds := core.info.step_timeout:
        await asyncio.sleep(min(_ASK_SECONDS, seconds))
        if not live and not silent:
            continue
        try:
            async with asyncio.timeout(seconds):
                await core.stats()
        except TimeoutError:
            if not silent:
                logger.error("the engine core has not answered for %g s, with %d requests open", seconds, len(live))
            silent = True
            health.set(serving=False)
        except CoreDied:
            silent = False
        else:
            if silent:
                logger.warning("the engine core answers again")
                health.set(serving=True)
            silent = False


def _new_server(config: ServiceConfig, guard: Guard) -> grpc.aio.Server:
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.so_reuseport", int(config.reuse_port)),
        *_KEEPALIVE,
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
        ("grpc.keepalive_permit_without_calls", 1),
        # A little below what is promised: a ping sent on time may follow its late predecessor closely.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", int(config.min_ping_seconds * 900)),
    ]
    return AioServer((guard,), options)  # type: ignore[return-value] # the stubs have a class of their own


async def _start(server: grpc.aio.Server, cleanup: AsyncExitStack) -> asyncio.Task[None]:
    """Starts a server; what follows it until it has ended."""
    await server.start()
    cleanup.push_async_callback(server.stop, 0)
    following = asyncio.create_task(ended(server))
    cleanup.callback(following.cancel)
    return following


def _add_reflection(server: grpc.aio.Server, services: tuple[str, ...]) -> None:
    """Serves reflection as v1alpha and as v1, whose messages are the same on the wire."""
    servicer = ReflectionServicer((*services, reflection.SERVICE_NAME))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (reflection.SERVICE_NAME, _REFLECTION_V1):
        server.add_registered_method_handlers(name, {"ServerReflectionInfo": handler})


def _admin_addresses(config: ServiceConfig, address: str) -> list[str]:
    if config.admin_address is None:
        return []
    if config.admin_address == AUTO:
        if is_unix(address):
            return [f"{address}.admin"]
        return [f"unix:{runtime_dir() / f'admin-{split_address(address)[1]}.sock'}"]
    own = [] if config.own_address is None or is_unix(config.admin_address) else [f"{config.own_address}.admin"]
    return [config.admin_address, *own]


def _serve_metrics(
    config: ServiceConfig, collectors: Sequence[Collector], identity: Identity | None, cleanup: AsyncExitStack
) -> str | None:
    """Returns its HOST:PORT, if there is one. Raises OSError."""
    if config.metrics_port is None:
        return None
    tls = None if identity is None else server_context(identity)
    server = MetricsServer(config.metrics_host, config.metrics_port, tls, collectors)
    cleanup.push_async_callback(server.close)
    return server.address
