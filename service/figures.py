"""What a service process counts: numbers in a block of memory, which another process of the same engine can read too.

Every process has the same layout, so that the engine's figures are the sums of the blocks. A token costs one `observe`.
"""

import mmap
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import grpc
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from fulcrum.v1 import inference_pb2 as pb

SUFFIX = ".figures"
# Seconds; their digits are 1, 2.5 and 5, finer where an answer is felt to be fast or slow.
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 10)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 30, 60, 120, 300, 600, 1800)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

FINISHES = ("stop", "length", "tool_calls", "abort", "cancel", "deadline", "unavailable", "error")
_METHODS = [method.name for service in pb.DESCRIPTOR.services_by_name.values() for method in service.methods]
_OTHER_METHODS = ("Check", "Watch", "List", "ServerReflectionInfo")  # of health and reflection
_BYTES = 1 << 13


class Counter:
    """Counts by the values of its labels."""

    def __init__(self, values: "memoryview[float]", keys: Sequence[tuple[str, ...]]) -> None:
        self._values = values
        self._places = {key: place for place, key in enumerate(keys)}

    def add(self, *key: str, by: float = 1) -> None:
        """Adds to what these values of the labels have. Raises KeyError for unknown ones."""
        self._values[self._places[key]] += by


class Histogram:
    """Counts by size."""

    __slots__ = ("_bounds", "_values")

    def __init__(self, values: "memoryview[float]", bounds: Sequence[float]) -> None:
        self._values = values  # as many as there are bounds, those above the last one, and the sum
        self._bounds = bounds

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `times` values that are alike."""
        values = self._values
        values[bisect_left(self._bounds, value)] += times
        values[-1] += value * times


class _Family(NamedTuple):
    name: str
    text: str
    size: int
    labels: Sequence[str] = ()
    keys: Sequence[tuple[str, ...]] = ()
    bounds: Sequence[float] = ()

    def metric(self, values: Sequence[float]) -> Metric:
        """In Prometheus' terms. Of pairs of labels only what has been counted: most never are. What is there from 0 on
        shows its first count as an increase.
        """
        name = f"fulcrum_service_{self.name}"
        if self.bounds:
            return histogram(name, self.text, self.bounds, values[:-1], values[-1])
        counter = CounterMetricFamily(name, self.text, labels=self.labels)
        for key, value in zip(self.keys, values, strict=True):
            if value or len(self.labels) < 2:
                counter.add_metric(key, value)
        return counter


class Figures:
    """The figures of one process, and the sums over all that share its folder.

    Args:
        path: of the block, a file `NAME.figures` in a folder of this engine's own. None: there is no other process.

    Attributes:
        calls: RPCs that have ended, by method and status.
        finished: sequences that have ended, by FINISHES.
        others: what their names say; they count at the moment that they name, except for those of whole requests
            (end_to_end, prefill, decode, *_tokens), which count what ended well alone.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._families: list[_Family] = []
        self._places: dict[str, slice] = {}  # of a family in a block
        if path is None:
            memory = mmap.mmap(-1, _BYTES)
        else:
            with path.open("a+b") as file:  # one that is started again goes on where it was
                os.posix_fallocate(file.fileno(), 0, _BYTES)  # a hole in it would be SIGBUS once the disk is full
                memory = mmap.mmap(file.fileno(), _BYTES)
        self._block = memoryview(memory).cast("d")
        calls = [(method, code.name) for method in (*_METHODS, *_OTHER_METHODS) for code in grpc.StatusCode]
        self.calls = self._counter("calls", "RPCs that have ended, by status.", ("method", "code"), calls)
        self.finished = self._counter(
            "finished", "Sequences that have ended, by reason.", ("reason",), [(reason,) for reason in FINISHES]
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that have been started.")
        self.cached_tokens = self._counter("cached_tokens", "Of these, found in the prefix cache.")
        self.queue = self._histogram("queue_seconds", "From a request's arrival to its first step.", _SECONDS)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS
        )
        self.inter_token = self._histogram(
            "inter_token_seconds", "From one token of a sequence to its next, for each token.", _TOKEN_SECONDS
        )
        self.per_token = self._histogram(
            "time_per_output_token_seconds", "Of finished sequences, the mean from token to token.", _TOKEN_SECONDS
        )
        self.end_to_end = self._histogram("request_seconds", "From a request's arrival to its end.", _SECONDS)
        self.prefill = self._histogram("prefill_seconds", "From a request's first step to its first token.", _SECONDS)
        self.decode = self._histogram("decode_seconds", "From a request's first token to its last.", _SECONDS)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_tokens = self._histogram("request_generated_tokens", "Tokens generated for a request.", _TOKENS)
        self.max_tokens = self._histogram("request_max_tokens", "Most tokens that a request may generate.", _TOKENS)

    def metrics(self) -> Iterator[Metric]:
        """The sums over all processes; a process that has just been started counts as soon as its block is there."""
        values = list(map(sum, zip(*self._blocks(), strict=True)))
        for family in self._families:
            yield family.metric(values[self._places[family.name]])

    def totals(self, name: str) -> tuple[int, float]:
        """Of a histogram, over all processes: how many values, and their sum."""
        parts = [block[self._places[name]] for block in self._blocks()]
        return int(sum(sum(part[:-1]) for part in parts)), sum(part[-1] for part in parts)

    def _blocks(self) -> "list[memoryview[float]]":
        own = self._path
        blocks = [self._block] if own is None else [_read(path) for path in own.parent.glob(f"*{SUFFIX}")]
        return [block for block in blocks if len(block)]

    def _counter(
        self, name: str, text: str, labels: Sequence[str] = (), keys: Sequence[tuple[str, ...]] = ((),)
    ) -> Counter:
        return Counter(self._place(_Family(name, text, len(keys), labels, keys)), keys)

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        return Histogram(self._place(_Family(name, text, len(bounds) + 2, bounds=bounds)), bounds)

    def _place(self, family: _Family) -> "memoryview[float]":
        begin = sum(earlier.size for earlier in self._families)
        self._families.append(family)
        self._places[family.name] = place = slice(begin, begin + family.size)
        return self._block[place]


def histogram(
    name: str, text: str, bounds: Sequence[float], counts: Sequence[float], total: float
) -> HistogramMetricFamily:
    """In Prometheus' terms: how many values were at most each of the bounds, and above the last; and their sum."""
    edges = [*map(floatToGoString, bounds), "+Inf"]
    return HistogramMetricFamily(name, text, buckets=list(zip(edges, accumulate(counts), strict=True)), sum_value=total)


def _read(path: Path) -> "memoryview[float]":
    return memoryview(path.read_bytes()).cast("d")
