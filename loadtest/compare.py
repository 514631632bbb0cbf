"""Result files side by side, with ratios to the first. Reads ours and those of `vllm bench serve` and `throughput`."""

from collections.abc import Mapping
from typing import Any

from loadtest.records import LoadTestError

_FIGURES = (
    ("requests/s", "request_throughput"),
    ("good requests/s", "request_goodput"),
    ("output tokens/s", "output_throughput"),
    ("total tokens/s", "total_token_throughput"),
    ("peak output tokens/s", "max_output_tokens_per_s"),
    ("peak concurrent requests", "max_concurrent_requests"),
)
_STATISTICS = ("mean", "median", "std", "p50", "p90", "p95", "p99")
_LATENCIES = ("ttft", "tpot", "itl", "e2el")
# Where these differ the figures are not of the same load.
_LOAD = (
    ("model", "model_id"),
    ("prompts", "num_prompts"),
    ("request rate", "request_rate"),
    ("burstiness", "burstiness"),
    ("max. concurrency", "max_concurrency"),
    ("input tokens", "total_input_tokens"),
    ("output tokens", "total_output_tokens"),
)
# The offline tool's names for the same things.
_OFFLINE = {
    "elapsed_time": "duration",
    "num_requests": "num_prompts",
    "requests_per_second": "request_throughput",
    "tokens_per_second": "total_token_throughput",
}


def compare(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of these results, by the name of each, in order: figures, each with its ratio to the first's.

    Raises: LoadTestError when there is nothing to compare.
    """
    columns = {name: offline_renamed(fields) for name, fields in results.items()}
    if not any("request_throughput" in fields for fields in columns.values()):
        raise LoadTestError("these are no result files of a load test")
    latencies = [(f"{stat} {name.upper()} ms", f"{stat}_{name}_ms") for name in _LATENCIES for stat in _STATISTICS]
    head = [("duration s", "duration"), ("completed", "completed"), ("failed", "failed")]
    lines = [["", *columns]]
    lines += [[title, *(_text(fields.get(key)) for fields in columns.values())] for title, key in (*_LOAD, *head)]
    for title, key in (*_FIGURES, *latencies):
        values = [fields.get(key) for fields in columns.values()]
        if any(isinstance(value, int | float) for value in values):
            lines.append([title, *(_with_ratio(value, values[0]) for value in values)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    return "\n".join([*rows, *_notes(columns)])


def _notes(columns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    notes = []
    known = {title: {_text(fields[key]) for fields in columns.values() if key in fields} for title, key in _LOAD}
    if differing := [title for title, values in known.items() if len(values) > 1]:
        notes.append(f"Not like for like: other {', '.join(differing)}.")
    for name, fields in columns.items():
        if fields.get("token_latencies_void"):
            notes.append(f"{name}: TPOT and ITL are void (several tokens to an event).")
        if fields.get("client_saturated"):
            notes.append(f"{name}: the client may have been the limit.")
    return notes


def offline_renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, those of an offline run under the names that the server's have."""
    return {_OFFLINE.get(key, key): value for key, value in fields.items()}


def _with_ratio(value: Any, first: Any) -> str:
    ratio = ""
    if isinstance(value, int | float) and isinstance(first, int | float) and first:
        ratio = f" (x{value / first:.3f})"
    return _text(value) + ratio


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:,.2f}" if isinstance(value, float) else str(value)
