"""A grpc.aio server whose accepting no caller ends. Knows no service.

grpcio 1.84 and 1.85 decode the path of a call to an unknown method in the loop that takes all calls: a path that is not
UTF-8, of whoever reaches the port, ends that loop, and with it the server. So here only methods that are registered are
known by their names; any other call is refused unnamed.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio._server import Server

Context = grpc.aio.ServicerContext[Any, Any]

_LOOK_SECONDS = 1.0
_FIRST_SECONDS = 5.0


class _Acceptor(cygrpc.AioServer):  # type: ignore[misc]
    def _make_request_call_future(self, method: bytes | None) -> Any:
        return asyncio.create_task(self._refuse()) if method is None else super()._make_request_call_future(method)

    async def _refuse(self) -> None:
        """Answers what names no method of ours, until the server stops."""
        refusals = set()
        while True:
            refusals.add(refusal := asyncio.create_task(_refused(await self._request_call())))
            refusal.add_done_callback(refusals.discard)


def _shows_no_metadata(record: logging.LogRecord) -> bool:
    """False for the traceback, and the value, of any metadata that are not UTF-8: it may be somebody's key."""
    return not str(record.msg).startswith("Invalid encoding on")


async def _refused(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with contextlib.suppress(grpc.aio.AbortError, grpc.aio.InternalError):  # the latter: the caller has gone
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


class AioServer(Server):
    """As grpc.aio.server makes it; but of handlers only registered ones are served."""

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]) -> None:
        """To be made within the event loop that it serves in. From then on grpcio's log shows no metadata."""
        logging.getLogger("grpc._cython.cygrpc").addFilter(_shows_no_metadata)  # once, however many servers there are
        # In the place of the inherited one, whose own acceptor, let go without use, is logged when it is freed already.
        self._loop = asyncio.get_running_loop()
        self._server = _Acceptor(self._loop, None, (), tuple(interceptors), tuple(options), None)


async def write_first(context: Context, message: Any) -> None:
    """Writes the first message of a call, whole also where its handler is cancelled meanwhile (for 5 s at most).

    With it go the call's metadata, and grpc.aio knows of that only when the write is over: cut short, it would send
    them once more together with the status; gRPC takes neither then, and the caller would wait for ever.
    """
    writing = asyncio.ensure_future(context.write(message))
    writing.add_done_callback(lambda task: task.cancelled() or task.exception())  # no fault where nobody waits any more
    try:
        await asyncio.wait((writing,))
    except asyncio.CancelledError:
        await asyncio.wait((writing,), timeout=_FIRST_SECONDS)
        raise
    writing.result()


async def ended(server: grpc.aio.Server) -> None:
    """Returns when the server was stopped. Raises what has ended its accepting otherwise."""
    while await server.wait_for_termination(_LOOK_SECONDS):
        pass
