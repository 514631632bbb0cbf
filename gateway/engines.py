"""Connections to the engine servers: who is SERVING, whose turn it is, and one retry elsewhere. Knows no HTTP."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fulcrum import limits
from fulcrum.client import DIRECT, LONGEST_SECONDS, keepalive, open_channel, tls_options
from fulcrum.keys import DEFAULT_TENANT, TENANT
from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1 import inference_pb2_grpc
from gateway.config import GatewayConfig
from gateway.errors import internal_error, no_engine

logger = logging.getLogger(__name__)

OPTIONS = [
    DIRECT,  # engines are no part of the web that http_proxy is for
    # Each channel its own connection: the engine may be several processes behind one port.
    ("grpc.use_local_subchannel_pool", 1),
    *keepalive(10, within=10),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES),
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES),
]
# An error that says CANCELLED tells of the other side, which goes down; a cancel of ours is no error.
GONE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
FORBIDDEN = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
REWATCH_SECONDS = 0.2
KEY_SECONDS = 10.0  # an engine has to say whether it takes our key
# A new process waits this long for its engines to say that they serve, so that its first request finds them.
START_SECONDS = 1.0

T = TypeVar("T")
Read = Callable[[], Awaitable[Any]]  # of pb.GenerateResponse, at the end of something that is false


@dataclass(frozen=True, slots=True)
class CallContext:
    """What goes with each call of one HTTP request.

    Args:
        request_id: the label that the caller gave, or a minted one.
        deadline: on the monotonic clock, seconds (None: no limit).
        further: metadata that names the caller to the engine, and the trace.
    """

    request_id: str
    deadline: float | None
    further: tuple[tuple[str, str], ...] = ()

    def remaining(self) -> float | None:
        """Seconds left, never negative."""
        return None if self.deadline is None else min(max(self.deadline - time.monotonic(), 0.0), LONGEST_SECONDS)


@dataclass(frozen=True, slots=True)
class Generation:
    """A Generate call that was accepted.

    Attributes:
        read: the next event; after the last something that is false. Raises AioRpcError where the call ends ill.
        cancel: ends the call.
    """

    accepted: pb.Accepted
    read: Read
    cancel: Callable[[], bool]


class Link:
    """One connection to one engine, and whether the engine says over it that it is SERVING, and takes our key."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        metadata: list[tuple[str, str]],
        turned: Callable[[], None],
        forbidden: Callable[[str], None],
    ) -> None:
        """The channel connects in the background.

        Args:
            address: of the engine, for the log.
            channel: to it.
            metadata: of a call on a caller's behalf.
            turned: called when `serving` has changed.
            forbidden: called with the reason when the engine refuses such a call, until it takes one.
        """
        self.address = address
        self.serving = False
        self.seen_serving = asyncio.Event()
        self.channel = channel
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self._health = health_pb2_grpc.HealthStub(self.channel)
        self._metadata = metadata
        self._turned = turned
        self._forbidden = forbidden

    async def watch(self) -> None:
        """Follows the engine's health until cancelled. A lost connection counts as not serving."""
        while True:
            watch = self._health.Watch(  # type: ignore[attr-defined]
                health_pb2.HealthCheckRequest(), metadata=self._metadata, wait_for_ready=True
            )
            try:
                async for reply in watch:
                    serving = reply.status == health_pb2.HealthCheckResponse.SERVING
                    if serving:  # health needs no key: this does
                        await self.inference.GetModel(
                            pb.GetModelRequest(), metadata=self._metadata, timeout=KEY_SECONDS
                        )
                    self._turn(serving)
            except grpc.aio.AioRpcError as error:
                logger.debug("health of engine %s: %s %s", self.address, error.code().name, error.details())
                if error.code() in FORBIDDEN:
                    self._forbidden(error.details() or error.code().name)
            watch.cancel()
            self._turn(serving=False)
            await asyncio.sleep(REWATCH_SECONDS)

    def _turn(self, serving: bool) -> None:
        if serving != self.serving:
            self.serving = serving
            if serving:
                self.seen_serving.set()
            self._turned()


class Engine:
    """One engine server and the connections to it."""

    def __init__(self, address: str, config: GatewayConfig, metadata: list[tuple[str, str]]) -> None:
        """Opens the channels; to a Unix socket, behind which there is one process, a single one."""
        count = 1 if address.startswith("unix:") else config.channels_per_engine
        credentials = config.engine_credentials()
        options = [*OPTIONS, *tls_options(config.engine_tls_name)]
        self.links = [
            Link(address, open_channel(address, credentials, options), metadata, self._turned, self._forbidden)
            for _ in range(count)
        ]
        self.address = address
        self._was_serving = False
        self._told = ""  # why it refuses our key, if it does

    @property
    def serving(self) -> list[Link]:
        """The connections over which it says that it is SERVING."""
        return [link for link in self.links if link.serving]

    def _turned(self) -> None:
        serving = bool(self.serving)
        if serving != self._was_serving:
            self._was_serving = serving
            level, word = (logging.INFO, "serving") if serving else (logging.WARNING, "not serving")
            logger.log(level, "engine %s is %s", self.address, word)
            self._told = ""

    def _forbidden(self, why: str) -> None:
        if why != self._told:
            self._told = why
            logger.error("engine %s does not take the key of this gateway: %s", self.address, why)


class EnginePool:
    """The engines, taken in turn among those that are SERVING. Use as an async context manager."""

    def __init__(self, config: GatewayConfig) -> None:
        """Connects nothing yet."""
        self._config = config
        self._metadata = [("authorization", f"Bearer {config.engine_key}")] if config.engine_key else []
        self._engines: list[Engine] = []
        self._watches: list[asyncio.Task[None]] = []
        self._turns = itertools.count()

    async def __aenter__(self) -> "EnginePool":
        """Opens the channels, starts to watch, and gives the engines a moment to answer."""
        speaking = self._metadata if self._config.key_ring().open else [*self._metadata, (TENANT, DEFAULT_TENANT)]
        self._engines = [Engine(address, self._config, speaking) for address in self._config.engines]
        self._watches = [asyncio.create_task(link.watch()) for link in self._links]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                await asyncio.gather(*(link.seen_serving.wait() for link in self._links))
        for engine in self._engines:
            if not engine.serving:
                logger.warning("engine %s is not serving yet", engine.address)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Closes the channels; calls that still run are cancelled."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(link.channel.close() for link in self._links))

    @property
    def serving(self) -> bool:
        """Whether any engine is SERVING."""
        return any(engine.serving for engine in self._engines)

    async def call(self, method: str, request: Any, context: CallContext) -> Any:
        """A unary call of InferenceService. Raises: AioRpcError; ApiError 503 when no engine is SERVING."""

        async def attempt(link: Link) -> Any:
            stub = getattr(link.inference, method)
            return await stub(request, metadata=self._metadata_of(context), timeout=context.remaining())

        return await self._with_retry(attempt)

    async def generate(self, request: pb.GenerateRequest, context: CallContext) -> Generation:
        """Starts a Generate and waits until it is accepted. Cancelled: so is the call.

        Raises: AioRpcError when it is refused; ApiError 503 when no engine is SERVING.
        """

        async def attempt(link: Link) -> Generation:
            call = link.inference.Generate(request, metadata=self._metadata_of(context), timeout=context.remaining())
            try:
                first = await call.read()
                if not isinstance(first, pb.GenerateResponse) or first.WhichOneof("event") != "accepted":
                    logger.error("engine %s did not begin its stream with Accepted", link.address)
                    raise internal_error()
            except BaseException:
                call.cancel()
                raise
            return Generation(first.accepted, call.read, call.cancel)

        return await self._with_retry(attempt)

    async def _with_retry(self, attempt: Callable[[Link], Awaitable[T]]) -> T:
        """Tries one engine after another while they are UNAVAILABLE: nothing was received, so nothing is repeated."""
        links = self._candidates()
        for link in links[:-1]:
            try:
                return await attempt(link)
            except grpc.aio.AioRpcError as error:
                if error.code() not in GONE:
                    raise
                logger.warning("engine %s is unavailable, trying another: %s", link.address, error.details())
        return await attempt(links[-1])

    def _candidates(self) -> list[Link]:
        """One serving link of each engine, the engine whose turn it is first. Raises: ApiError 503 if there is none."""
        turn, start = divmod(next(self._turns), len(self._engines))
        in_turn = self._engines[start:] + self._engines[:start]
        chosen = [links[turn % len(links)] for engine in in_turn if (links := engine.serving)]
        if not chosen:
            raise no_engine()
        return chosen

    @property
    def _links(self) -> list[Link]:
        return [link for engine in self._engines for link in engine.links]

    def _metadata_of(self, context: CallContext) -> list[tuple[str, str]]:
        return [*self._metadata, ("x-request-id", context.request_id), *context.further]
