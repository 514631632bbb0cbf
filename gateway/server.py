"""Runs one gateway process. Knows uvicorn; the application knows it not."""

import functools
import math
import socket
from collections.abc import Callable

import uvicorn

from fulcrum.tls import server_context
from gateway.config import GatewayConfig
from gateway.protocol import BoundedHttp

BACKLOG = 2048
# Longer than clients and balancers keep idle connections, so that none is closed under a request.
KEEP_ALIVE_SECONDS = 75
START_FAILED = 3


def serve(
    config: GatewayConfig, on_bound: Callable[[str, int], None] | None = None, listener: socket.socket | None = None
) -> None:
    """Serves until SIGINT or SIGTERM, then lets running requests finish for `shutdown_seconds`.

    Args:
        config: the settings.
        on_bound: called once with host and port when the socket listens.
        listener: a listening socket, which other processes may share (None: one at the address in the settings).

    Raises: OSError when the address cannot be bound; SystemExit when the application does not start.
    """
    from gateway.app import create_app  # it takes a second, and who only listens serves nothing

    identity = config.identity()
    settings = uvicorn.Config(
        create_app(config),
        loop="uvloop",
        # Its type is said to be a class; what uvicorn does is to call it.
        http=functools.partial(BoundedHttp, patience=config.arrival_seconds),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # ours knows the label, and who has gone (gateway/edge.py)
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(config.shutdown_seconds),
        ssl_context_factory=None if identity is None else lambda *_: server_context(identity),
    )
    with listener or listen(config.host, config.port) as shared:
        if on_bound is not None:
            on_bound(config.host, shared.getsockname()[1])
        server = uvicorn.Server(settings)
        server.run(sockets=[shared])
        if not server.started:
            raise SystemExit(START_FAILED)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises: OSError."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address, family=family, backlog=BACKLOG)
