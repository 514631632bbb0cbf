"""From records to figures. Pure arithmetic, that of `vllm bench serve` 0.26: knows no network, no clock, no print-out.

Only successful requests count, but for `failed`. With n output tokens of a request:
    TTFT = first event - start;  E2EL = end - start;  TPOT = (E2EL - TTFT) / (n - 1), for n > 1 alone;
    ITL  = the gaps between events, of all requests together.
Without the tokens of one of them, what rests on tokens is None (and "tpot" has no latencies).
Standard deviations are those of the whole population; percentiles interpolate linearly. No value at all gives 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.records import Record

LATENCIES = ("ttft", "tpot", "itl", "e2el")
VOID_BELOW = 0.98
"""Below this many events to a token, the gaps between events are not gaps between tokens."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds. `percentiles` has an entry for each percentile asked for (95.0, say)."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a run. Throughputs are per second of its duration (seconds).

    Attributes:
        request_goodput: requests per second that met every objective; None without objectives.
        peak_output_throughput: events in the busiest second, counted in whole seconds from the first start.
        peak_concurrent_requests: most requests that were under way within one such second.
        events_per_token: how many messages a token took, over all requests.
        cached_tokens: prompt tokens that the server found in its prefix cache, where it says so.
        latencies: by name, as in LATENCIES.
    """

    completed: int
    failed: int
    duration: float
    total_input_tokens: int | None
    total_output_tokens: int | None
    request_throughput: float
    request_goodput: float | None
    output_throughput: float | None
    total_token_throughput: float | None
    peak_output_throughput: float
    peak_concurrent_requests: int
    events_per_token: float | None
    cached_tokens: int
    latencies: dict[str, Latency]

    @property
    def void(self) -> bool:
        """Whether TPOT and ITL say nothing, since too many tokens came several to an event."""
        return self.completed > 0 and self.events_per_token is not None and self.events_per_token < VOID_BELOW


def metrics(
    records: Sequence[Record],
    duration: float,
    percentiles: Sequence[float] = (50, 95, 99),
    objectives: Mapping[str, float] | None = None,
) -> Result:
    """The figures of `records`.

    Args:
        duration: seconds from the start of the run to its end.
        percentiles: within 0 to 100.
        objectives: milliseconds that a good request does not exceed, by "ttft", "tpot" or "e2el".
    """
    good = [record for record in records if not record.error]
    lengths = [record.output_tokens or 0 for record in good]
    outputs = None if any(record.output_tokens is None for record in good) else sum(lengths)
    inputs = sum(record.prompt_tokens for record in good) if all(record.prompt_tokens for record in good) else None
    events = sum(1 + len(record.itls) for record in good)
    # By request, in order. A single token has no time per further token: it meets any objective of TPOT.
    tpots = [
        (record.latency - record.ttft) / (length - 1) if length > 1 else 0.0
        for record, length in zip(good, lengths, strict=True)
    ]
    ttfts, e2els = [record.ttft for record in good], [record.latency for record in good]
    values = {
        "ttft": ttfts,
        "tpot": [tpot for tpot, length in zip(tpots, lengths, strict=True) if length > 1],
        "itl": [itl for record in good for itl in record.itls],
        "e2el": e2els,
    }
    goodput = None
    if outputs is None:
        del values["tpot"]
    if objectives and not (outputs is None and "tpot" in objectives):
        by_request = {"ttft": ttfts, "tpot": tpots, "e2el": e2els}
        met = [all(by_request[name][i] <= limit / 1000 for name, limit in objectives.items()) for i in range(len(good))]
        goodput = sum(met) / duration
    peak_tokens, peak_requests = _peaks(good)
    return Result(
        completed=len(good),
        failed=len(records) - len(good),
        duration=duration,
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        request_throughput=len(good) / duration,
        request_goodput=goodput,
        output_throughput=None if outputs is None else outputs / duration,
        total_token_throughput=None if inputs is None or outputs is None else (inputs + outputs) / duration,
        peak_output_throughput=peak_tokens,
        peak_concurrent_requests=peak_requests,
        events_per_token=None if outputs is None else events / outputs if outputs else 0.0,
        cached_tokens=sum(record.cached_tokens for record in good),
        latencies={name: _latency(seconds, percentiles) for name, seconds in values.items()},
    )


def _latency(seconds: Sequence[float], percentiles: Sequence[float]) -> Latency:
    ms = np.asarray(seconds or [0.0]) * 1000
    return Latency(
        mean=float(ms.mean()),
        median=float(np.median(ms)),
        std=float(ms.std()),
        percentiles={float(each): float(np.percentile(ms, each)) for each in percentiles},
    )


def _peaks(records: Sequence[Record]) -> tuple[float, int]:
    """Most events, and most requests under way, in one whole second since the first start."""
    if not records:
        return 0.0, 0
    began = min(record.start for record in records)
    times = np.concatenate(
        [record.start - began + record.ttft + np.cumsum([0.0, *record.itls]) for record in records]
    ).astype(int)
    starts = np.asarray([record.start - began for record in records]).astype(int)
    ends = np.asarray([record.start - began + record.latency for record in records]).astype(int)
    size = int(max(times.max(), ends.max())) + 2
    # A request counts in the second of its start, of its end, and in all between.
    change = np.bincount(starts, minlength=size) - np.bincount(ends + 1, minlength=size)
    return float(np.bincount(times).max()), int(np.cumsum(change).max())
