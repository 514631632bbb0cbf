"""Result files side by side, with ratios to the first. Reads ours and those of `vllm bench serve` and `throughput`."""

from collections.abc import Mapping
from typing import Any

from loadtest.metrics import LATENCIES
from loadtest.records import Fields, LoadTestError
from loadtest.tables import markdown, offline_renamed, title

# Where these differ the figures are not of the same load.
_LOAD = (
    *("model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency"),
    *("total_input_tokens", "total_output_tokens"),
)
_HEAD = ("duration", "completed", "failed")
_FIGURES = (
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{each}_{name}_ms" for name in LATENCIES for each in ("mean", "median", "std", "p50", "p90", "p95", "p99")),
)


def compare(results: Mapping[str, Fields]) -> str:
    """The table of these results, by the name of each, in order: figures, each with its ratio to the first's.

    Raises: LoadTestError when there is nothing to compare, or a figure is no number.
    """
    columns = [offline_renamed(fields) for fields in results.values()]
    if not any("request_throughput" in fields for fields in columns):
        raise LoadTestError("these are no result files of a load test")
    for name, fields in zip(results, columns, strict=True):
        if odd := [key for key in _FIGURES if not isinstance(fields.get(key), int | float | None)]:
            raise LoadTestError(f"{name} is no result file of a load test: its {odd[0]} is no number")
    lines = [[title(key), *(_text(fields.get(key)) for fields in columns)] for key in (*_LOAD, *_HEAD)]
    for key in _FIGURES:  # of a run of which no request succeeded there are none
        values = [fields.get(key) if fields.get("completed", 1) else None for fields in columns]
        if any(value is not None for value in values):
            lines.append([title(key), *(_with_ratio(value, values[0]) for value in values)])
    notes = []
    known = {key: {_text(fields[key]) for fields in columns if key in fields} for key in _LOAD}
    if differing := [title(key) for key, values in known.items() if len(values) > 1]:
        notes.append(f"Not like for like: other {', '.join(differing)}.")
    for name, fields in zip(results, columns, strict=True):
        if fields.get("token_latencies_void"):
            notes.append(f"{name}: TPOT and ITL are void (several tokens to an event).")
        if fields.get("client_saturated"):
            notes.append(f"{name}: the client may have been the limit.")
    return "\n".join([markdown(["", *results], lines), *notes])


def _with_ratio(value: Any, first: Any) -> str:
    return _text(value) + (f" (x{value / first:.3f})" if value is not None and first else "")


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:,.2f}" if isinstance(value, float) else str(value)
