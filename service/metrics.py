"""Prometheus metrics of an engine, over HTTP: its core's and those of its service processes. Asks when it is asked."""

import asyncio
import concurrent.futures
import io
import logging
import socket
import ssl
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Thread
from wsgiref.simple_server import WSGIRequestHandler, make_server

from msgspec.structs import asdict
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from engine.client import CoreClient, CoreDied
from engine.messages import STEP_BOUNDS, CoreStats
from service.figures import Figures, histogram

logger = logging.getLogger(__name__)

_GAUGES = frozenset(
    (
        "uptime_seconds", "running_sequences", "waiting_sequences", "live_requests", "total_pages", "free_pages",
        "cached_pages", "used_pages", "last_step_rows", "max_step_rows", "last_step_tokens",
    )
)  # fmt: skip
# The sum that belongs to a list of counts by STEP_BOUNDS.
_SUMS = {"step_rows": "scheduled_rows", "step_tokens": "scheduled_tokens"}
_SCRAPE_SECONDS = 5.0

# What a figure is called by vLLM (0.26), whose dashboards and autoscalers know it by that name.
VLLM_NAMES = {
    "fulcrum_engine_running_sequences": "vllm:num_requests_running",
    "fulcrum_engine_waiting_sequences": "vllm:num_requests_waiting",
    "fulcrum_engine_kv_usage_ratio": "vllm:kv_cache_usage_perc",
    "fulcrum_engine_preemptions": "vllm:num_preemptions",
    "fulcrum_engine_prefix_query_tokens": "vllm:prefix_cache_queries",
    "fulcrum_engine_prefix_hit_tokens": "vllm:prefix_cache_hits",
    "fulcrum_engine_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "fulcrum_engine_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "fulcrum_engine_generated_tokens": "vllm:generation_tokens",
    "fulcrum_engine_step_tokens": "vllm:iteration_tokens_total",
    "fulcrum_service_prompt_tokens": "vllm:prompt_tokens",
    "fulcrum_service_cached_tokens": "vllm:prompt_tokens_cached",
    "fulcrum_service_finished": "vllm:request_success",
    "fulcrum_service_queue_seconds": "vllm:request_queue_time_seconds",
    "fulcrum_service_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "fulcrum_service_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "fulcrum_service_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "fulcrum_service_request_seconds": "vllm:e2e_request_latency_seconds",
    "fulcrum_service_prefill_seconds": "vllm:request_prefill_time_seconds",
    "fulcrum_service_decode_seconds": "vllm:request_decode_time_seconds",
    "fulcrum_service_request_prompt_tokens": "vllm:request_prompt_tokens",
    "fulcrum_service_request_generated_tokens": "vllm:request_generation_tokens",
    "fulcrum_service_request_max_tokens": "vllm:request_params_max_tokens",
}
# vLLM's finished_reason, where it has another word.
_VLLM_REASONS = {"tool_calls": "stop", "cancel": "abort", "deadline": "abort", "unavailable": "abort"}


@dataclass(eq=False)
class EngineCollector(Collector):
    """Asks the engine at every scrape: a gauge can be neither stale nor forgotten.

    Args:
        core: the engine.
        figures: what its service processes count.
        model: the label model_name of vLLM's names.
        loop: the event loop that `core` belongs to.
    """

    core: CoreClient
    figures: Figures
    model: str
    loop: asyncio.AbstractEventLoop

    def collect(self) -> Iterator[Metric]:
        """Runs in a thread of the HTTP server."""
        stats = self._stats()
        yield GaugeMetricFamily("fulcrum_engine_up", "Whether the engine core answers.", value=stats is not None)
        metrics = [*self.figures.metrics(), *([] if stats is None else of_core(stats))]
        yield from metrics
        yield from (vllm_metric(metric, self.model) for metric in metrics if metric.name in VLLM_NAMES)

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not ask the engine."""
        return iter(())

    def _stats(self) -> CoreStats | None:
        asked = asyncio.run_coroutine_threadsafe(self.core.stats(), self.loop)
        try:
            return asked.result(_SCRAPE_SECONDS)
        except (CoreDied, concurrent.futures.TimeoutError, concurrent.futures.CancelledError) as error:
            asked.cancel()
            logger.warning("the engine core does not answer a scrape: %r", error)
            return None


def of_core(stats: CoreStats) -> Iterator[Metric]:
    """Every field under its own name: counters, gauges, and histograms of the lists."""
    for name, value in asdict(stats).items():
        full, text = f"fulcrum_engine_{name}", name.replace("_", " ").capitalize() + "; see Stats in inference.proto."
        if isinstance(value, list):
            yield histogram(full, text, STEP_BOUNDS, value, getattr(stats, _SUMS[name]))
        else:
            yield (GaugeMetricFamily if name in _GAUGES else CounterMetricFamily)(full, text, value=float(value))
    text = "Pages that running sequences hold, of all."
    yield GaugeMetricFamily("fulcrum_engine_kv_usage_ratio", text, value=stats.used_pages / max(1, stats.total_pages))


def vllm_metric(metric: Metric, model: str) -> Metric:
    """The same figure under vLLM's name, and with its labels."""
    alias = VLLM_NAMES[metric.name]
    sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in metric.samples:
        labels = {"model_name": model, "engine": "0"} | sample.labels
        if reason := labels.pop("reason", ""):
            labels["finished_reason"] = _VLLM_REASONS.get(reason, reason)
        sums[alias + sample.name.removeprefix(metric.name), tuple(labels.items())] += sample.value
    renamed = Metric(alias, metric.documentation, metric.type)
    for (name, pairs), value in sums.items():
        renamed.add_sample(name, dict(pairs), value)
    return renamed


class MetricsServer:
    """An HTTP server for these collectors, in a daemon thread.

    Args:
        host: where it listens.
        port: 0 for any free one.
        tls: for HTTPS (None: plain HTTP).

    Attributes:
        address: HOST:PORT.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, collectors: Sequence[Collector]) -> None:
        registry = CollectorRegistry()
        for each in collectors:
            registry.register(each)
        server = _Server if ":" not in host else _ServerIPv6
        self._server = make_server(host, port, make_wsgi_app(registry), server, _Handler)
        if tls is not None:  # each connection's own thread shakes hands, lest a silent one holds up the others
            plain = self._server.socket
            self._server.socket = tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._server.server_port}"

    async def close(self) -> None:
        """Stops listening and waits for the thread; the loop stays free to answer a last scrape."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        await asyncio.to_thread(self._thread.join)


class _Handler(WSGIRequestHandler):
    timeout = _SCRAPE_SECONDS  # of a read or a write

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: scrapes are many."""

    def get_stderr(self) -> io.StringIO:
        """Where a traceback is written to, and flushed."""
        return _Errors()


class _Errors(io.StringIO):
    def flush(self) -> None:
        """A scraper that has left (an OSError), or a fault of ours."""
        left = isinstance(sys.exc_info()[1], OSError)
        logger.log(logging.DEBUG if left else logging.ERROR, "a scrape failed", exc_info=True)


class _Server(ThreadingWSGIServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that leaves, or does not shake hands."""
        logger.debug("a scrape of %s failed", client_address, exc_info=True)


class _ServerIPv6(_Server):
    address_family = socket.AF_INET6
