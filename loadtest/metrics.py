"""From records to figures. Pure arithmetic, that of `vllm bench serve` 0.26: knows no network, no clock, no print-out.

Only successful requests count, but for `failed`. With n output tokens of a request:
    TTFT = first event - start;  E2EL = end - start;  TPOT = (E2EL - TTFT) / (n - 1), for n > 1 alone;
    ITL  = the gaps between events, of all requests together.
Standard deviations are those of the whole population; percentiles interpolate linearly. No value at all gives 0.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from loadtest.records import Fields, Record

LATENCIES = ("ttft", "tpot", "itl", "e2el")
VOID_BELOW = 0.98
"""Below this many events to a token, the gaps between events are not gaps between tokens."""


def metrics(
    records: Sequence[Record],
    duration: float,
    percentiles: Sequence[float] = (50, 95, 99),
    objectives: Mapping[str, float] | None = None,
    selected: Sequence[str] = LATENCIES,
) -> Fields:
    """The figures of `records`, by their names in a result file.

    Args:
        duration: seconds from the start of the run to its end.
        percentiles: within 0 to 100.
        objectives: milliseconds that a good request does not exceed, by "ttft", "tpot" or "e2el".
        selected: the latencies that are told.

    Returns:
        counts; throughputs per second; latencies in ms, as mean_ttft_ms, median_, std_, p99_ttft_ms. Besides:
        request_goodput: requests per second that met every objective; None without objectives.
        max_output_tokens_per_s: events in the busiest second, counted in whole seconds from the first start.
        max_concurrent_requests: most requests that were under way within one such second.
        events_per_token: how many messages a token took, over all requests.
        token_latencies_void: TPOT and ITL say nothing, since too many tokens came several to an event.
        cached_tokens: prompt tokens that the server found in its prefix cache, where it says so.
        What rests on tokens that nobody counted is None.
    """
    good = [record for record in records if not record.error]
    lengths = [record.output_tokens or 0 for record in good]
    outputs = None if any(record.output_tokens is None for record in good) else sum(lengths)
    inputs = sum(record.prompt_tokens for record in good) if all(record.prompt_tokens for record in good) else None
    events = sum(1 + len(record.itls) for record in good)
    # By request, in order. A single token has no time per further token: it meets any objective of TPOT.
    by_request = {
        "ttft": [record.ttft for record in good],
        "e2el": [record.latency for record in good],
        "tpot": [(r.latency - r.ttft) / (n - 1) if n > 1 else 0.0 for r, n in zip(good, lengths, strict=True)],
    }
    seconds = by_request | {
        "tpot": [tpot for tpot, length in zip(by_request["tpot"], lengths, strict=True) if length > 1],
        "itl": [itl for record in good for itl in record.itls],
    }
    goodput = None
    if objectives and not (outputs is None and "tpot" in objectives):
        met = [all(by_request[name][i] <= limit / 1000 for name, limit in objectives.items()) for i in range(len(good))]
        goodput = sum(met) / duration
    peak_events, peak_requests = _peaks(good)
    events_per_token = None if outputs is None else events / outputs if outputs else 0.0
    fields = {
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration,
        "request_goodput": goodput,
        "output_throughput": None if outputs is None else outputs / duration,
        "total_token_throughput": None if inputs is None or outputs is None else (inputs + outputs) / duration,
        "max_output_tokens_per_s": peak_events,
        "max_concurrent_requests": peak_requests,
        "rtfx": 0.0,  # of audio, which there is none of
    }
    for name in selected:
        ms = 1000 * np.asarray(seconds[name] or [0.0])
        values = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std()}
        values |= {f"p{each:g}": np.percentile(ms, each) for each in percentiles}
        known = name != "tpot" or outputs is not None
        fields |= {f"{kind}_{name}_ms": float(value) if known else None for kind, value in values.items()}
    return fields | {
        "events_per_token": events_per_token,
        "token_latencies_void": bool(good) and events_per_token is not None and events_per_token < VOID_BELOW,
        "cached_tokens": sum(record.cached_tokens for record in good),
    }


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
