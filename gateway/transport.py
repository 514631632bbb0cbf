"""Reading bodies, noticing that a client has gone, and streaming events. Knows no OpenAI field and no gRPC."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError, going_down
from gateway.parse import parse_json
from gateway.sse import HEARTBEAT
from gateway.structure import Structure

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

# What takes more than some milliseconds to check, by its bytes, its nodes and its values.
LARGE = (128 << 10, 1 << 10, 1 << 13)

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]
Source = Callable[[Write], Awaitable[bytes]]


async def read_json(
    request: Request, max_bytes: int, seconds: float, read: Callable[[dict[str, Any]], T], threads: Executor
) -> T:
    """What `read` makes of the JSON object in a request's body; of a large one in a thread, so that the others go on.

    Raises: ApiError 400 for another content type, bad JSON or too much of it, 413 for a body of more than `max_bytes`,
        408 for one that takes more than `seconds` to come; ClientDisconnect; whatever `read` raises.
    """
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            400, f"Content-Encoding {coding[:80]!r} is not supported: send the body as it is.", code="invalid_encoding"
        )
    # Absent neither: a page from anywhere may send a body without one to a server on its reader's machine.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(400, f"Content-Type must be application/json, not {kind[:80]!r}.", code="invalid_content_type")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large(max_bytes)
    body, structure = bytearray(), Structure()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large(max_bytes)
                structure.add(chunk)
                structure.check(body)
    except TimeoutError as error:
        message = f"The body did not come within {seconds:g} seconds."
        raise ApiError(408, message, code="request_timeout") from error
    if any(size > most for size, most in zip((len(body), structure.nodes, structure.values), LARGE, strict=True)):
        work = asyncio.get_running_loop().run_in_executor(threads, lambda: read(parse_json(bytes(body))))
        return await work
    return read(parse_json(bytes(body)))


def too_large(max_bytes: int) -> ApiError:
    """The answer to a body over the limit."""
    return ApiError(413, f"The body is larger than {max_bytes} bytes.", code="request_too_large")


async def gone(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client goes. Raises: ClientDisconnect then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # its error too is known then, whoever was first


class WholeAnswer(Response):
    """JSON in pieces, which are not joined: with many logprobs they are megabytes."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes | bytearray]) -> None:
        super().__init__(headers={"content-length": str(sum(map(len, pieces)))})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Response):
    """Sends what a source writes, blank lines when that is nothing for a while, and cancels it when the client goes."""

    def __init__(
        self, source: Source, heartbeat_seconds: float, close: Callable[[], None], failed: Callable[[ApiError], bytes]
    ) -> None:
        """`source` returns what comes last, `failed` what does when the drain ends before it.

        `close` is called at the end, also when `source` was never begun.
        """
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._source = source
        self._heartbeat = heartbeat_seconds
        self._close = close
        self._failed = failed
        self._last = 0.0
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Leaves `client_gone` in the request's state when the client did not stay to the end."""
        try:
            await unless_gone(receive, self._stream(send, scope["state"]["send_body"]))
        except ClientDisconnect:
            scope["state"]["client_gone"] = True
        except asyncio.CancelledError:  # the drain is over
            if not self._begun:
                raise
            await send({"type": "http.response.body", "body": self._failed(going_down()), "more_body": False})
        finally:
            self._close()

    async def _stream(self, send: Send, send_body: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._begun = True
        self._last = time.monotonic()
        beat = asyncio.create_task(self._beat(send))

        async def write(chunk: bytes) -> None:
            await send_body({"type": "http.response.body", "body": chunk, "more_body": True})
            self._last = time.monotonic()

        try:
            last = await self._source(write)
        finally:
            beat.cancel()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _beat(self, send: Send) -> None:
        while True:
            silent = time.monotonic() - self._last
            if silent >= self._heartbeat:
                await send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
                self._last = time.monotonic()
                silent = 0.0
            await asyncio.sleep(self._heartbeat - silent)
