"""HTTP/1.1 as uvicorn reads it, with bounds on what is no body, and no protocol to be upgraded to."""

import asyncio
import re
import sys
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Of a request's line and headers, and of what surrounds its body: sizes of chunks, their extensions, trailers.
# What the last read brought is not counted, so a little more may pass.
MAX_HEAD_BYTES = 64 << 10
HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
# Java's client and others ask for h2c in each request. The parser would leave the body unread for it.
UPGRADE = re.compile(rb"\r\nupgrade(?= *:)", re.IGNORECASE)
NO_UPGRADE = b"\r\nignored"  # as long: what follows stays where its length says
# Requests that wait for answers of others on their connection. With more, what comes next is not read meanwhile.
MAX_PIPELINED = 16
# In a drain, from the end of an answer. The loop would wait for a TLS client's goodbye for 30 s, and one that keeps the
# connection for later reads nothing, so that it sends none.
GOODBYE_SECONDS = 2.0


class BoundedHttp(HttpToolsProtocol):
    """Ends connections that keep sending what nobody reads: the parser would go on, whether or not a key was shown."""

    def __init__(self, *args: Any, patience: float, **further: Any) -> None:
        """`patience`: seconds from a new connection, or a request's first byte, to the end of its headers; from an
        answer to the end of its request's body; and in which nearly all that lies ready of an answer has to be taken.
        """
        super().__init__(*args, **further)
        self.patience = patience
        self.loose_bytes = 0  # since the request began, or since the last of its body
        self.in_head = self.in_body = self.draining = False
        self.timer: asyncio.TimerHandle | None = None
        self.unread: asyncio.TimerHandle | None = None
        self.running: Any = None  # the request that is being answered; `self.cycle` is the one that came last

    def connection_made(self, transport: Any) -> None:
        """A client is there."""
        super().connection_made(transport)
        self._await()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._no_longer_await()
        if self.unread is not None:
            self.unread.cancel()
        self.pipeline.clear()
        if self.running is not None:
            self.running.disconnected = True
            self.running.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """What lies ready is more than the client takes."""
        super().pause_writing()
        self.unread = self.loop.call_later(self.patience, self.transport.abort)

    def resume_writing(self) -> None:
        """It has taken some of it."""
        super().resume_writing()
        if self.unread is not None:
            self.unread.cancel()

    def on_message_begin(self) -> None:
        """A request begins."""
        self.in_head, self.loose_bytes = True, 0
        if self.timer is None:
            self._await()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers are not wanted."""
        if self.in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its body, or the next request, follows."""
        self.in_head, self.in_body = False, True
        self._no_longer_await()
        super().on_headers_complete()
        if self.parser.should_upgrade():  # the header's name came in pieces: what follows may be the body, or anything
            self.cycle.keep_alive = False
        if 0 < len(self.pipeline) <= MAX_PIPELINED:  # who does not read does not see the client go
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A piece of its body."""
        self.loose_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next request follows."""
        self.in_body = False
        self._no_longer_await()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """It is answered, perhaps before it has come whole."""
        super().on_response_complete()
        if self.in_body and self.cycle.response_complete and self.timer is None:
            self._await()
        self._part()

    def data_received(self, data: bytes) -> None:
        """The next bytes of the connection."""
        if self.loose_bytes > MAX_HEAD_BYTES:
            if self.in_head:
                self.transport.write(HEAD_TOO_LARGE)
            self.transport.close()
            return
        self.loose_bytes += len(data)
        super().data_received(data if self.in_body else UPGRADE.sub(NO_UPGRADE, data))

    def shutdown(self) -> None:
        """The server drains: what is being answered is the last."""
        self.draining = True
        super().shutdown()
        self._part()

    def _part(self) -> None:
        if self.draining and self.transport.is_closing() and self.scheme == "https":
            self.loop.call_later(GOODBYE_SECONDS, self._hang_up)

    def _hang_up(self) -> None:
        if self.flow.write_paused:  # the client is still reading
            self._part()
        else:
            self.transport.abort()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.running = cycle
        if cycle.scope["http_version"] != "1.1":
            app = unchunked(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _await(self) -> None:
        self.timer = self.loop.call_later(self.patience, self.transport.close)

    def _no_longer_await(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def unchunked(app: ASGIApp, cycle: Any) -> ASGIApp:
    """The application for a client of HTTP/1.0, which knows no chunks (RFC 9112, 6.1): without a content-length its
    answer ends with the connection.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        endless = False

        async def send_unchunked(message: Message) -> None:
            nonlocal endless
            if message["type"] == "http.response.start":
                endless = "content-length" not in Headers(raw=message["headers"])
                if endless:  # as if a length had been told, which uvicorn counts down
                    cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
            elif endless and not message["more_body"]:
                cycle.expected_content_length = len(message["body"])
            await send(message)

        await app(scope, receive, send_unchunked)

    return answer
