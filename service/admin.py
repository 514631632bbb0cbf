"""AdminService: what operators ask. Knows the engine only through CoreClient."""

import asyncio
from dataclasses import dataclass

import grpc
from msgspec.structs import asdict

from engine.client import CoreClient
from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1 import inference_pb2_grpc
from service.aio_server import Context
from service.errors import ApiError, Violation, invalid
from service.figures import Figures
from service.live import LiveCalls
from service.validate import given

_MIN_INTERVAL, _MAX_INTERVAL = 0.1, 3600.0
_MAX_GRACE = 86400.0
_LATEST_STEPS = 32_768  # with 90 bytes each below the 4 MB that a gRPC client takes unless told otherwise
# How often Drain asks the core who is left: other service processes have requests too.
_DRAIN_POLL_SECONDS = 0.05


@dataclass(eq=False)
class AdminServicer(inference_pb2_grpc.AdminServiceServicer):
    """Serves one engine core.

    Args:
        core: the engine.
        live: the open Generate calls of this process.
        figures: what the engine's service processes count.
    """

    core: CoreClient
    live: LiveCalls
    figures: Figures

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends live requests by their exact ids, whichever process took them."""
        ids = list(dict.fromkeys(request.request_ids))
        live = set(await self.core.abort(ids))
        aborted, missing = pb.AbortResponse.OUTCOME_ABORTED, pb.AbortResponse.OUTCOME_NOT_FOUND
        reply = pb.AbortResponse()
        for request_id in ids:
            reply.results.add(request_id=request_id, outcome=aborted if request_id in live else missing)
        return reply

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        """Counters and gauges of this moment."""
        return pb.GetStatsResponse(stats=await self._stats(), waits=self._waits())

    async def WatchStats(self, request: pb.WatchStatsRequest, context: Context) -> None:
        """The same, again and again, until the caller leaves."""
        interval = given(request, "interval_seconds", 1.0)
        if not _MIN_INTERVAL <= interval <= _MAX_INTERVAL:  # NaN fails too
            text = f"must be in [{_MIN_INTERVAL:g}, {_MAX_INTERVAL:g}] s, not {interval:g}"
            raise invalid([Violation("interval_seconds", text)])
        while True:
            await context.write(pb.WatchStatsResponse(stats=await self._stats(), waits=self._waits()))
            await asyncio.sleep(interval)

    async def GetCache(self, request: pb.GetCacheRequest, context: Context) -> pb.GetCacheResponse:
        """What is in the pages and in the tree of prefixes."""
        view = await self.core.cache()
        nodes = [pb.CacheNode(**node._asdict()) for node in view.nodes]
        return pb.GetCacheResponse(pages=view.pages, nodes=nodes, total_nodes=view.total_nodes)

    async def GetTrace(self, request: pb.GetTraceRequest, context: Context) -> pb.GetTraceResponse:
        """What happened to a request that is running or was one of the latest."""
        self._check_traces()
        events = await self.core.trace(request.request_id)
        if not events:
            text = f"nothing is kept of a request {request.request_id[:200]!r}"
            raise ApiError(grpc.StatusCode.NOT_FOUND, "TRACE_NOT_FOUND", text, field="request_id")
        reply = pb.GetTraceResponse(request_id=request.request_id)
        for event in events:
            about = {name: str(value) for name, value in event.attributes.items()}
            reply.events.add(at_seconds=event.at - events[0].at, kind=event.kind, attributes=about)
        return reply

    async def GetSteps(self, request: pb.GetStepsRequest, context: Context) -> pb.GetStepsResponse:
        """The latest steps that are kept."""
        self._check_traces()
        steps = await self.core.steps(given(request, "last", _LATEST_STEPS))
        return pb.GetStepsResponse(steps=[pb.StepTrace(**asdict(step)) for step in steps])

    def _check_traces(self) -> None:
        if not self.core.info.traces:
            text = "the engine keeps no traces: start it with --trace-requests"
            raise ApiError(grpc.StatusCode.FAILED_PRECONDITION, "TRACES_OFF", text)

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        """Drops every cached page that no running sequence uses."""
        return pb.FlushCacheResponse(pages_freed=await self.core.flush_cache())

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """The core takes nothing new from now on, for good; the answer comes when the running requests have ended.

        What still runs after the grace is ended, in every process.
        """
        grace = given(request, "grace_seconds", None)
        if grace is not None and not 0 <= grace <= _MAX_GRACE:
            raise invalid([Violation("grace_seconds", f"must be in [0, {_MAX_GRACE:g}] s, not {grace:g}")])
        try:
            async with asyncio.timeout(grace):
                while await self.core.drain() or len(self.live):  # noqa: ASYNC110 - other processes end theirs
                    await asyncio.sleep(_DRAIN_POLL_SECONDS)
        except TimeoutError:
            return pb.DrainResponse(requests_aborted=await self.core.drain(end=True))
        return pb.DrainResponse()

    def _waits(self) -> pb.Waits:
        first_tokens, first_seconds = self.figures.totals("time_to_first_token_seconds")
        inter_tokens, inter_seconds = self.figures.totals("inter_token_seconds")
        return pb.Waits(
            first_tokens=first_tokens,
            first_token_seconds=first_seconds,
            inter_tokens=inter_tokens,
            inter_token_seconds=inter_seconds,
        )

    async def _stats(self) -> pb.Stats:
        return pb.Stats(**asdict(await self.core.stats()))
