"""Prometheus metrics of one service process, over HTTP. Knows the engine only through its stats."""

import asyncio
import concurrent.futures
import logging
from collections import Counter
from collections.abc import Iterator
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.client import CoreClient, CoreDied
from engine.messages import CoreStats

logger = logging.getLogger(__name__)

_GAUGES = frozenset(
    (
        "uptime_seconds",
        "running_sequences",
        "waiting_sequences",
        "live_requests",
        "total_pages",
        "free_pages",
        "cached_pages",
        "used_pages",
        "last_step_rows",
        "max_step_rows",
        "last_step_tokens",
    )
)
_SCRAPE_SECONDS = 5.0


class EngineCollector(Collector):
    """Asks the engine at every scrape: a gauge can be neither stale nor forgotten.

    Args:
        core: the engine.
        calls: (method, status code) -> how many calls have ended so.
        loop: the event loop that `core` belongs to.
    """

    def __init__(self, core: CoreClient, calls: Counter[tuple[str, str]], loop: asyncio.AbstractEventLoop) -> None:
        self._core = core
        self._calls = calls
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """Runs in a thread of the HTTP server."""
        stats = self._stats()
        yield GaugeMetricFamily("fulcrum_engine_up", "Whether the engine core answers.", value=stats is not None)
        if stats is not None:
            for name in stats.__struct_fields__:
                value = float(getattr(stats, name))
                text = name.replace("_", " ").capitalize() + "; see Stats in fulcrum/v1/inference.proto."
                kind = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
                yield kind(f"fulcrum_engine_{name}", text, value=value)
        calls = CounterMetricFamily(
            "fulcrum_service_calls", "RPCs of this process that have ended, by status.", labels=("method", "code")
        )
        for (method, code), count in self._calls.copy().items():
            calls.add_metric((method, code), count)
        yield calls

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not ask the engine."""
        return iter(())

    def _stats(self) -> CoreStats | None:
        asked = asyncio.run_coroutine_threadsafe(self._core.stats(), self._loop)
        try:
            return asked.result(_SCRAPE_SECONDS)
        except (CoreDied, concurrent.futures.TimeoutError, concurrent.futures.CancelledError) as error:
            asked.cancel()
            logger.warning("the engine core does not answer a scrape: %r", error)
            return None


class MetricsServer:
    """An HTTP server for one collector, in a daemon thread.

    Args:
        host: where it listens.
        port: 0 for any free one; `port` tells which.
    """

    def __init__(self, host: str, port: int, collector: EngineCollector) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        server: WSGIServer
        thread: Thread
        server, thread = start_http_server(port, host, registry)
        self._server, self._thread = server, thread
        self.port: int = server.server_port

    async def close(self) -> None:
        """Stops listening and waits for the thread; the loop stays free to answer a last scrape."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        await asyncio.to_thread(self._thread.join)
