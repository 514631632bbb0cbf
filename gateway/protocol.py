"""HTTP/1.1 as uvicorn reads it, with bounds on a request's head, and no protocol to be upgraded to."""

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Of a request's line and headers. What the last read brought is not counted, so a little more may pass.
MAX_HEAD_BYTES = 64 << 10
HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
# Java's client and others ask for h2c in each request. The parser would leave the body unread for it.
UPGRADE = re.compile(rb"\r\nupgrade(?= *:)", re.IGNORECASE)
NO_UPGRADE = b"\r\nignored"  # as long: what follows stays where its length says


class BoundedHttp(HttpToolsProtocol):
    """Ends connections whose headers do not end: the parser would keep them all, before any key is looked at."""

    def __init__(self, *args: Any, head_seconds: float, **further: Any) -> None:
        """`head_seconds`: from a new connection, or from a request's first byte, to the end of its headers."""
        super().__init__(*args, **further)
        self.head_seconds = head_seconds
        self.head_bytes = 0
        self.in_head = self.in_body = False
        self.head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client is there."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._no_longer_await()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins."""
        self.in_head, self.head_bytes = True, 0
        if self.head_timer is None:
            self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its body, or the next request, follows."""
        self.in_head, self.in_body = False, True
        self._no_longer_await()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next request follows."""
        self.in_body = False
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """The next bytes of the connection."""
        if self.in_head:
            self.head_bytes += len(data)
            if self.head_bytes > MAX_HEAD_BYTES:
                self.transport.write(HEAD_TOO_LARGE)
                self.transport.close()
                return
        super().data_received(data if self.in_body else UPGRADE.sub(NO_UPGRADE, data))

    def _await_head(self) -> None:
        self.head_timer = self.loop.call_later(self.head_seconds, self.transport.close)

    def _no_longer_await(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
