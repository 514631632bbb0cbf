"""Spans to an OpenTelemetry collector (OTLP over HTTP). OpenTelemetry itself is imported when a Tracer is made."""

import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

HEADERS = ("traceparent", "tracestate")  # https://www.w3.org/TR/trace-context
_CLOSE_SECONDS = 3.0
_PLAIN = re.compile(r"[\x20-\x7e]{1,512}")


def check_endpoint(url: str | None) -> None:
    """Raises ValueError where this is no collector's address, or OpenTelemetry is not installed. None: no tracing."""
    if url is None:
        return
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ValueError(f"otlp_endpoint must be http://HOST:PORT or https://..., not {url!r}")
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ValueError("otlp_endpoint needs OpenTelemetry: pip install 'fulcrum-llm[otel]'") from error


def passed_on(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The trace headers that a process without a tracer hands on as they are."""
    return tuple((name, value) for name in HEADERS if _PLAIN.fullmatch(value := headers.get(name, "")))


def nanoseconds(at: float) -> int:
    """A moment of time.monotonic() (s) as Unix time (ns)."""
    # The largest of several: whatever comes between the two readings makes it smaller.
    return int(at * 1e9) + max(time.time_ns() - time.monotonic_ns() for _ in range(3))


class Tracer:
    """Makes spans, and sends them in batches from a thread of its own.

    Args:
        endpoint: the collector's address; without a path, that of traces is added, as OpenTelemetry has it.
        process: OTEL_SERVICE_NAME, where it is set, says otherwise.
    """

    def __init__(self, endpoint: str, process: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import propagation
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        name = os.environ.get("OTEL_SERVICE_NAME") or f"fulcrum-{process}"
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("fulcrum", version("fulcrum-llm"))
        self._propagator = TraceContextTextMapPropagator()
        self._within = propagation.set_span_in_context

    def serve(self, name: str, headers: Iterable[tuple[str, Any]], arrival: float) -> Any:
        """Begins the span of a request that came with these headers, at `arrival` on time.monotonic()."""
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract({name: value for name, value in headers if name in HEADERS})
        return self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=nanoseconds(arrival))

    def child(self, parent: Any, name: str, begin: float, end: float) -> None:
        """A span within another, from and to these moments of time.monotonic()."""
        span = self._tracer.start_span(name, self._within(parent), start_time=nanoseconds(begin))
        span.end(nanoseconds(end))

    def headers(self, span: Any) -> tuple[tuple[str, str], ...]:
        """What makes the next process's span a child of this one."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._within(span))
        return tuple(carrier.items())

    def close(self) -> None:
        """Sends what is left; a collector that does not answer is not waited for longer than 3 s."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_CLOSE_SECONDS)


def fail(span: Any, text: str) -> None:
    """Marks a span as an error's."""
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR, text)
