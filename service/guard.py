"""The interceptor around every RPC: keys, malformed messages, errors as rich statuses, counts by status.

Knows no service. A handler refuses or ends a call by raising ApiError, or CoreDied where the engine is gone; anything
else that escapes it is INTERNAL with a generic message, and the story in the log.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from engine.client import CoreDied
from service.aio_server import Context
from service.auth import Metadata
from service.errors import ApiError, Violation, engine_dead, invalid
from service.figures import Figures
from service.record import ending, label_of
from service.wire import field_beyond, serialized
from telemetry.garbage import forget_frames
from telemetry.logs import about

logger = logging.getLogger(__name__)

# Of a request, with the messages in it: 15 ms to read at the worst. (8,192 messages of a chat have some 65,000.)
_MAX_FIELDS = 1 << 17
# A message may take so long to come, as at the gateway: gRPC sets no limit to a caller who answers its pings.
_ARRIVAL_SECONDS = 120.0
# Probes carry no credentials, and learn nothing but the status of the server as a whole.
_OPEN_SERVICE = "/grpc.health.v1.Health/"
# They may hold so many calls open (Watch) at once: each takes 20 KB, and a connection brings any number of them.
_MAX_UNKNOWN_WATCHES = 1024

Handler = Callable[[Any, Context], Awaitable[Any]]
MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


@dataclass(frozen=True, eq=False)
class Guard(grpc.aio.ServerInterceptor):
    """One for all RPCs of a server.

    Args:
        check: raises ApiError where a call's metadata does not let it pass.
        figures: where calls are counted by method and status.
    """

    check: Callable[[Metadata], object]
    figures: Figures
    _watches: set[Context] = field(default_factory=set, init=False)  # of callers without a key

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MaybeHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MaybeHandler:
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # grpc answers UNIMPLEMENTED
        method = handler_call_details.method
        try:
            self.check(handler_call_details.invocation_metadata)
        except ApiError as error:
            # As a stream, whatever it is: no message is read, and so none is kept, for a caller without a key.
            if method.startswith(_OPEN_SERVICE):
                unread = partial(self._unread, method, self._wrap(method, handler, _nothing))
                return grpc.stream_stream_rpc_method_handler(unread, None, serialized)
            return grpc.stream_stream_rpc_method_handler(partial(self._refuse, method, error))
        if handler.request_streaming:  # reflection: it has no messages of ours to guard
            reflected = partial(_reflected, handler.stream_stream)
            serializers = handler.request_deserializer, handler.response_serializer
            return grpc.stream_stream_rpc_method_handler(reflected, *serializers)
        wrapped = self._wrap(method, handler, _message)
        # As streams of messages, so that the first is read here and each is written; on the wire one is like the other.
        return grpc.stream_stream_rpc_method_handler(partial(_written, wrapped), None, serialized)

    def _wrap(self, method: str, handler: Any, message: Callable[[Context], Awaitable[bytes]]) -> Handler:
        name, deserialize = method.rpartition("/")[2], handler.request_deserializer
        behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def guarded(_: Any, context: Context) -> Any:
            try:
                with _who_may_go():
                    return await answered(context)
            except grpc.aio.AbortError as error:
                forget_frames(error)  # grpc keeps it in a ring with the call
                raise

        async def answered(context: Context) -> Any:
            code = "OK"
            try:
                payload = await message(context)
                if len(payload) > 2 * _MAX_FIELDS:  # no field is shorter
                    kind = deserialize.__self__.DESCRIPTOR
                    beyond = await asyncio.to_thread(field_beyond, payload, kind, _MAX_FIELDS)
                    if beyond is not None:
                        raise invalid([Violation(beyond, f"more than {_MAX_FIELDS} fields are in the message")])
                try:
                    request = deserialize(payload)
                except DecodeError as error:  # such as a string that is not UTF-8
                    raise _malformed() from error
                del payload  # a stream may last
                return await behavior(request, context)
            except (ApiError, CoreDied) as error:
                forget_frames(error)  # this one holds it as `refusal`
                refusal = error if isinstance(error, ApiError) else engine_dead()
                code = refusal.code.name
                await _abort(context, refusal)
            except (asyncio.CancelledError, grpc.aio.InternalError) as error:
                late = ending(error, context.time_remaining()) == "deadline"
                code = "DEADLINE_EXCEEDED" if late else "CANCELLED"
                raise
            except grpc.aio.AbortError:
                code = context.code().name
                raise
            except Exception:  # the one place that turns the unexpected into a status
                code = "INTERNAL"
                fields = about(x_request_id=label_of(context.invocation_metadata()))
                logger.exception("%s failed", method, extra=fields)
                text = "internal error; the server's log has more"
                await _abort(context, ApiError(grpc.StatusCode.INTERNAL, "INTERNAL", text))
            finally:
                self.figures.calls.add(name, code)

        return guarded

    async def _refuse(self, method: str, refusal: ApiError, _: Any, context: Context) -> None:
        self.figures.calls.add(method.rpartition("/")[2], refusal.code.name)
        await _abort(context, refusal)

    async def _unread(self, method: str, wrapped: Handler, _: Any, context: Context) -> None:
        """As if the message had been empty: of Health that asks for the server as a whole."""
        if method.endswith("/Watch"):  # probes are answered at once, however many there are
            if len(self._watches) >= _MAX_UNKNOWN_WATCHES:
                await self._refuse(method, _too_many_watches(), None, context)
            self._watches.add(context)
        try:
            await _written(wrapped, None, context)
        finally:
            self._watches.discard(context)


async def _written(wrapped: Handler, requests: Any, context: Context) -> None:
    """Writes itself what a handler returns that has written nothing, so that it hears of a caller who has gone."""
    reply = await wrapped(requests, context)
    if reply is not None:
        with _who_may_go():
            await context.write(reply)


@contextlib.contextmanager
def _who_may_go() -> Iterator[None]:
    """A caller that goes while it is answered is no fault, which grpc would log with a traceback: it has cancelled."""
    try:
        yield
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


async def _reflected(behavior: Any, requests: Any, context: Context) -> None:
    """Writes itself what the behavior yields, so that it hears of a caller who has gone."""
    try:
        with _who_may_go():
            async for reply in behavior(requests, context):
                await context.write(reply)
    except DecodeError:
        await _abort(context, _malformed())


async def _message(context: Context) -> bytes:
    """The bytes of a call's message. Raises ApiError: it does not come, or not in time."""
    try:
        async with asyncio.timeout(_ARRIVAL_SECONDS):
            payload = await context.read()
    except TimeoutError:
        text = f"the message has not come within {_ARRIVAL_SECONDS:g} s"
        raise ApiError(grpc.StatusCode.DEADLINE_EXCEEDED, "REQUEST_TIMEOUT", text) from None
    if not isinstance(payload, bytes):  # the end of the call's stream
        raise _malformed()
    return payload


async def _nothing(_: Context) -> bytes:
    return b""


async def _abort(context: Context, error: ApiError) -> NoReturn:
    await context.abort(error.code, error.message, error.trailers())


def _malformed() -> ApiError:
    text = "the message is not a valid protobuf message of this RPC"
    return ApiError(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", text)


def _too_many_watches() -> ApiError:
    text = f"{_MAX_UNKNOWN_WATCHES} callers without a key watch already"
    return ApiError(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHES", text)
