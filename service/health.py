"""grpc.health.v1: whether the engine serves, of all services alike. Knows no core.

The library's own servicer writes to its watchers under a lock that changes need too: one of them that does not read
(nobody asks it a key) would keep the server from saying that it goes down, and from going on.
"""

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.aio_server import Context

_Reply = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """Tells and streams one status.

    Args:
        services: whose it is, beside that of the server as a whole ("").
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(("", *services))
        self._status: int = _Reply.SERVING
        self._changed = asyncio.Event()
        self._ended = False

    def set(self, *, serving: bool) -> None:
        """Changes the status, unless it has been told to stay."""
        if not self._ended:
            self._status = _Reply.SERVING if serving else _Reply.NOT_SERVING
            self._changed.set()
            self._changed = asyncio.Event()

    def end(self) -> None:
        """NOT_SERVING, for good."""
        self.set(serving=False)
        self._ended = True

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """The status of this moment."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return _Reply(status=self._status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """The status, and each change of it, until the caller leaves; who reads slowly misses those between."""
        told = None
        while True:
            changed = self._changed
            status = self._status if request.service in self._services else _Reply.SERVICE_UNKNOWN
            if status != told:
                await context.write(_Reply(status=status))
                told = status
            await changed.wait()
