"""What every request passes first: its label, the key check, and the counting at the end. Pure ASGI, so that
disconnects and streams go through untouched."""

import asyncio
import ipaddress
import logging
import re
import secrets
import time
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fulcrum.keys import MAX_PRIORITY, TENANT, Key, KeyRing, bearer
from gateway.errors import ApiError, going_down
from gateway.live import FILES
from gateway.metrics import Metrics
from telemetry.logs import about
from telemetry.tracing import Tracer, fail, passed_on

OPEN_PATHS = frozenset({"/health", "/livez", *FILES})
NOT_IN_LABEL = re.compile(r"[^A-Za-z0-9._:/=+-]")
LABEL_LENGTH = 128
CLIENT_GONE = 499

access = logging.getLogger("gateway.access")
access.setLevel(logging.INFO)  # it is asked for by a switch of its own


class Edge:
    """The outermost middleware of ours."""

    def __init__(
        self, app: ASGIApp, *, keys: KeyRing, metrics: Metrics, access_log: bool, tracer: Tracer | None
    ) -> None:
        """`access_log`: a line for each request. `tracer`: a span for each POST."""
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._access_log = access_log
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["request_id"] = label = clean_label(headers.get("x-request-id", ""))
        state["arrival"] = arrival = time.monotonic()
        shown = bearer(headers.get("authorization"))
        key = None if shown is None or self._keys.open else self._keys.find(shown)
        state["admin"] = self._keys.open or (key is not None and key.admin)
        state["caller"] = () if key is None else caller_metadata(key)
        span, state["trace"] = None, passed_on(headers)
        if self._tracer is not None and scope["method"] == "POST":
            span = self._tracer.serve("POST", headers.items(), arrival)
            state["trace"] = self._tracer.headers(span)
        # What is between us and a stream looks at the beginning of an answer alone: what follows may pass it by.
        state["send_body"] = send
        status = 500
        begun = False

        async def send_labelled(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                MutableHeaders(scope=message)["x-request-id"] = label
            await send(message)

        try:
            refusal = self._refusal(scope, headers, key)
            app = self._app if refusal is None else refusal.response()
            await app(scope, receive, send_labelled)
        except asyncio.CancelledError:
            # Only the end of a drain cancels requests. (A stream has said it itself, behind its head.)
            if begun:
                raise
            await going_down().response()(scope, receive, send_labelled)
        finally:
            del state["send_body"]  # it leads back to the scope, and the ring would keep the body
            self._ended(scope, CLIENT_GONE if state.get("client_gone") else status, span)

    def _ended(self, scope: Scope, status: int, span: Any) -> None:
        """Counts a request, ends its span, and writes its line."""
        state, path = scope["state"], getattr(scope.get("route"), "path", "other")
        passed = time.monotonic() - state["arrival"]
        self._metrics.requests.labels(scope["method"], path, str(status)).inc()
        self._metrics.seconds.labels(path).observe(passed)
        if span is not None:
            end_span(span, path, status, state)
        if self._access_log:
            # The path is quoted as the wire had it, so that it cannot end the line.
            line = {"method": scope["method"], "path": scope["raw_path"].decode("ascii", "backslashreplace")}
            line |= {"status": status, "seconds": passed, "x_request_id": state["request_id"]}
            extra = about(**line, request_id=state.get("engine_id"))
            access.info("%s %s %d %.3fs %s", *line.values(), extra=extra)

    def _refusal(self, scope: Scope, headers: Headers, key: Key | None) -> ApiError | None:
        if self._keys.open:
            if is_local(headers.get("host", "localhost")):
                return None
            text = "Without API keys the server is called by localhost or an IP address alone, not by another name."
            return ApiError(403, text, "permission_error", code="host_not_allowed")
        if key is not None or scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS:
            return None
        return ApiError(401, "Missing or wrong API key: send Authorization: Bearer KEY.", code="invalid_api_key")


def is_local(host: str) -> bool:
    """Whether a Host header may be of somebody on this machine. Of a page from elsewhere, which has let its name lead
    here (DNS rebinding), it is that name.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name.endswith(".localhost") or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def end_span(span: Any, route: str, status: int, state: dict[str, Any]) -> None:
    """Writes into a request's span how it has ended."""
    span.update_name(f"POST {route}")
    span.set_attributes(
        {
            "http.request.method": "POST",
            "http.route": route,
            "http.response.status_code": status,
            "gen_ai.response.id": state.get("engine_id", "-"),
            "fulcrum.x_request_id": state["request_id"],
        }
    )
    if status >= 500:
        fail(span, str(status))
    span.end()


def caller_metadata(key: Key) -> tuple[tuple[str, str], ...]:
    """What tells an engine whom a call is made for."""
    limit = () if key.max_priority is None else ((MAX_PRIORITY, str(key.max_priority)),)
    return ((TENANT, key.tenant), *limit)


def clean_label(label: str) -> str:
    """The caller's label without what could harm a log or a header; a fresh one if nothing is left."""
    return NOT_IN_LABEL.sub("", label)[:LABEL_LENGTH] or f"req-{secrets.token_hex(12)}"
