"""Puts the application together: routes, middleware, error answers, and the engines' connections for its lifetime."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from gateway.config import GatewayConfig
from gateway.edge import CLIENT_GONE, Edge
from gateway.engines import EnginePool
from gateway.errors import ApiError, internal_error
from gateway.live import FILES, Page
from gateway.metrics import Metrics
from gateway.routes import VERSION, Routes
from telemetry.expiry import Certificates
from telemetry.garbage import collect_rarely, forget_frames, give_back_freed_memory
from telemetry.tracing import Tracer

logger = logging.getLogger(__name__)


def create_app(config: GatewayConfig) -> FastAPI:
    """The gateway as an ASGI application."""
    pool = EnginePool(config)
    certificates = Certificates(config.certificates())
    metrics = Metrics(certificates)
    tracer = None if config.otlp_endpoint is None else Tracer(config.otlp_endpoint, "gateway")
    routes = Routes(config, pool, metrics)
    page = Page(config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        beside = [asyncio.create_task(each) for each in (certificates.watch(), give_back_freed_memory())]
        async with pool:
            collect_rarely()
            sys.setswitchinterval(0.001)  # a thread that checks a large body lets the streams go on so soon
            yield
        for task in beside:
            task.cancel()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)

    app = FastAPI(title="Fulcrum", version=VERSION, lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    for path, endpoint, methods in (
        ("/v1/chat/completions", routes.chat_completions, ["POST"]),
        ("/v1/completions", routes.completions, ["POST"]),
        ("/v1/responses", routes.responses, ["POST"]),
        ("/v1/responses/{id:path}", routes.stored_response, ["GET", "DELETE"]),
        ("/v1/embeddings", routes.embeddings, ["POST"]),
        ("/v1/models", routes.models, ["GET"]),
        ("/v1/models/{name:path}", routes.model, ["GET"]),
        ("/tokenize", routes.tokenize, ["POST"]),
        ("/detokenize", routes.detokenize, ["POST"]),
        ("/health", routes.health, ["GET", "HEAD"]),
        ("/livez", routes.livez, ["GET", "HEAD"]),
        ("/version", routes.version, ["GET"]),
        ("/openapi.json", routes.openapi, ["GET"]),
        ("/metrics", routes.metrics, ["GET"]),
        *((path, page.file, ["GET", "HEAD"]) for path in FILES),
        ("/page/live", page.live, ["GET"]),
    ):
        app.add_api_route(path, endpoint, methods=methods, response_model=None)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_crash)
    app.add_middleware(Edge, keys=config.key_ring(), metrics=metrics, access_log=config.access_log, tracer=tracer)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


async def on_api_error(request: Request, error: Exception) -> Response:
    """Any error that the gateway knows."""
    assert isinstance(error, ApiError)
    forget_frames(error)
    return error.response()


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    # A base URL without /v1, with two of them, or with a slash behind.
    meant = {f"/v1{path}", path.removeprefix("/v1"), path.removesuffix("/")} - {path, ""}
    known = sorted(meant.intersection(getattr(route, "path", "") for route in request.app.routes))
    where = f"{request.method} {path:.200}" + (f": call {known[0]}" if known else "")
    message = f"There is no {where}." if error.status_code in (404, 405) else str(error.detail)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    return JSONResponse(ApiError(error.status_code, message, code=code).body(), error.status_code, error.headers)


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Nobody is left to read this; it is for the counters."""
    forget_frames(error)
    return Response(status_code=CLIENT_GONE)


async def on_crash(request: Request, error: Exception) -> Response:
    """A fault of the gateway's own; the server logs its traceback."""
    crash = internal_error().response()
    crash.headers["x-request-id"] = request.state.request_id
    crash.headers["connection"] = "close"  # as the server does then
    return crash
