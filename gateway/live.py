"""The page at `/`: its files, and the live view that it draws. Knows of the engine what AdminService tells."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from starlette.requests import Request
from starlette.responses import Response

from fulcrum.client import DIRECT, metadata_of, open_channel, tls_options
from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1 import inference_pb2_grpc
from gateway.config import GatewayConfig
from gateway.errors import ApiError, from_rpc
from gateway.sse import event
from gateway.transport import EventStream, Write

FOLDER = Path(__file__).parent / "page"
# By path; these hold no secrets, so that a browser can ask for them before it has a key.
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
# Nothing from elsewhere, nothing inline, and no text ever becomes markup.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
# Then a stream ends and the page asks anew: a drain waits for streams, and a key may have been taken out meanwhile.
STREAM_SECONDS = 5.0
_NODE = [field.name for field in pb.CacheNode.DESCRIPTOR.fields]


class Page:
    """Serves the page, and relays AdminService to each browser that looks at it."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._files = {path: ((FOLDER / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}

    async def file(self, request: Request) -> Response:
        """GET / and what it links to."""
        body, kind = self._files[request.url.path]
        return Response(body, headers=HEADERS | {"content-type": kind})

    async def live(self, request: Request) -> Response:
        """GET /page/live: an event a second, of what the engine does; for callers who may administer."""
        if not request.state.admin:
            text = "The live view is for API keys with the right to administer (admin)."
            raise ApiError(403, text, "permission_error", code="permission_denied")
        if self._config.engine_admin is None:
            text = "This gateway knows no AdminService: start it with --engine-admin, or use fulcrum serve."
            raise ApiError(404, text, code="no_live_view")
        source = partial(self._relay, self._config.engine_admin, request.state.request_id)
        return EventStream(source, self._config.heartbeat_seconds, lambda: None, failed)

    async def _relay(self, address: str, label: str, write: Write) -> bytes:
        config = self._config
        metadata = metadata_of(config.engine_key, (("x-request-id", label),))
        try:
            async with (
                asyncio.timeout(STREAM_SECONDS),
                open_channel(
                    address, config.engine_credentials(), (DIRECT, *tls_options(config.engine_tls_name))
                ) as channel,
            ):
                admin = inference_pb2_grpc.AdminServiceStub(channel)
                async for reply in admin.WatchStats(pb.WatchStatsRequest(), metadata=metadata):
                    cache = await admin.GetCache(pb.GetCacheRequest(), metadata=metadata)
                    await write(event(view(reply, cache)))
        except TimeoutError:
            pass
        except grpc.aio.AioRpcError as error:
            return failed(from_rpc(error, {}, label))
        return b""


def failed(error: ApiError) -> bytes:
    """The end of a stream that breaks."""
    return event(error.body())


def view(reply: pb.WatchStatsResponse, cache: pb.GetCacheResponse) -> dict[str, Any]:
    """What the page draws: numbers by their names in the contract, a digit for each page, a list for each node."""
    return {
        "stats": numbers(reply.stats),
        "waits": numbers(reply.waits),
        "pages": cache.pages.translate(bytes.maketrans(b"\0\1\2", b"012")).decode("ascii"),
        "nodes": [[getattr(node, name) for name in _NODE] for node in cache.nodes],
        "total_nodes": cache.total_nodes,
    }


def numbers(message: pb.Stats | pb.Waits) -> dict[str, float]:
    """The scalar fields."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields if not field.is_repeated}
