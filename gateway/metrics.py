"""The gateway's own figures. With several workers each writes to files in a shared folder, and any worker sums them up.

prometheus_client looks for PROMETHEUS_MULTIPROC_DIR when it is imported; who starts several processes sets it for them.
"""

import os
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from gateway.choices_format import TokenCounts
from telemetry.expiry import Certificates

SHARED = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Of each kind, in a process's own file: several times what all labels that there are take.
RESERVED_BYTES = 256 << 10
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One application's metrics."""

    def __init__(self, certificates: Certificates) -> None:
        """Registers them in a registry of their own. Raises: OSError where they share a folder and the disk is full."""
        if SHARED in os.environ:
            for kind in ("counter", "histogram"):
                reserve(Path(os.environ[SHARED]) / f"{kind}_{os.getpid()}.db")
        self._certificates = certificates
        self._registry = CollectorRegistry()
        self._registry.register(certificates)
        counter = partial(Counter, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry, buckets=SECONDS)
        text = "HTTP requests that ended (status 499: the client had gone)."
        self.requests = counter("fulcrum_gateway_http_requests", text, ("method", "path", "status"))
        text = "From an HTTP request's arrival to the end of its answer."
        self.seconds = histogram("fulcrum_gateway_http_request_seconds", text, ("path",))
        text = "From an HTTP request's arrival to the first text from the engine, streamed or not."
        self.first_text_seconds = histogram("fulcrum_gateway_time_to_first_text_seconds", text)
        text = "Event streams that ended with an error event, by the status that it would have had."
        self.stream_errors = counter("fulcrum_gateway_stream_errors", text, ("status",))
        for status in ("409", "500", "503", "504"):  # from 0 on: to Prometheus a first value is no increase
            self.stream_errors.labels(status)
        self.prompt_tokens = counter("fulcrum_gateway_prompt_tokens", "Prompt tokens of answered requests.")
        self.cached_tokens = counter("fulcrum_gateway_cached_tokens", "Of these, found in the prefix cache.")
        self.completion_tokens = counter("fulcrum_gateway_completion_tokens", "Tokens generated for answered requests.")

    def count_tokens(self, counts: TokenCounts) -> None:
        """Adds the tokens of one answer."""
        self.prompt_tokens.inc(counts.prompt)
        self.cached_tokens.inc(counts.cached)
        self.completion_tokens.inc(counts.completion)

    def render(self) -> bytes:
        """Prometheus' text format, over all workers."""
        if SHARED not in os.environ:
            return generate_latest(self._registry)
        everyone = CollectorRegistry()
        everyone.register(self._certificates)
        MultiProcessCollector(everyone)  # type: ignore[no-untyped-call]
        return generate_latest(everyone)


def reserve(path: Path) -> None:
    """Makes a file that has its room: the library's own are all holes, and SIGBUS meets a process that writes into one
    once the disk is full.
    """
    with path.open("a+b") as file:
        os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)
