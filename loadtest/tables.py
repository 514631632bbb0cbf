"""Markdown tables out of result files: for the terminal and for docs/benchmarks.md. Knows no files and no clock."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.records import Fields, LoadTestError

Columns = Mapping[str, str]
"""Keys of fields by headings."""

_TITLES = {
    "factor_before": "x rung before",
    "factor_first": "x first",
    "hit_rate": "prefix hit rate",
    "ideal_hit_rate": "infinite cache",
    "label": "",
    "lru_hit_rate": "LRU of pages",
    "max_output_tokens_per_s": "peak output tokens/s",
    "output_throughput": "output tokens/s",
    "pool_tokens": "pool, tokens",
    "request_goodput": "good requests/s",
    "request_throughput": "requests/s",
    "same_policy_hit_rate": "with vLLM's policy",
    "total_input_tokens": "input tokens",
    "total_output_tokens": "output tokens",
    "total_token_throughput": "total tokens/s",
    "vllm_rules_hit_rate": "vLLM's rules",
}


def title(key: str) -> str:
    """The heading of a field: p50_ttft_ms is "TTFT p50, ms"."""
    if key.endswith("_ms"):
        *which, statistic, name, unit = key.split("_")
        return " ".join([*which, name.upper(), f"{statistic}, {unit}"])
    return _TITLES.get(key, key.replace("_", " "))


def columns(*keys: str) -> Columns:
    """Fields by their usual headings."""
    return {title(key): key for key in keys}


_RATES = ("request_throughput", "output_throughput")
_ITL = ("p50_itl_ms", "p99_itl_ms")
_TTFT = ("p50_ttft_ms", "p99_ttft_ms")
_LADDER = columns("rung", *_RATES, "factor_before", "factor_first", *_TTFT, "p99_itl_ms", "peak_running")
_SERVE = columns(
    *("load", "request_throughput", "request_goodput", "output_throughput"),
    *(*_TTFT, "p50_tpot_ms", "p99_tpot_ms", *_ITL, "failed"),
)
# Of these, more is better for the first two, less for the others: a ratio is always ours over theirs.
COMPARED = columns(*_RATES, *_TTFT, *_ITL)
ROWS: Mapping[str, Columns] = {
    "peers": columns("label", "weights", "streams", "output_throughput", "p50_ttft_ms", *_ITL),
    "page_sizes": columns(
        *("page_size", "pool_tokens", "cached_tokens", "hit_rate", "same_policy_hit_rate", "ideal_hit_rate"),
        *("lru_hit_rate", "vllm_rules_hit_rate", *_RATES, *_ITL),
    ),
    "turns": columns(
        *("turn", "requests", "mean_prompt_tokens", "hit_rate"),
        *(f"{which}_p{each}_ttft_ms" for which in ("cold", "warm") for each in (50, 90)),
    ),
}
"""Kinds of tables whose file has "rows": columns by kind. A column that no row has is left out."""

# The offline tool's names for the same things.
_OFFLINE = {
    "elapsed_time": "duration",
    "num_requests": "num_prompts",
    "requests_per_second": "request_throughput",
    "tokens_per_second": "total_token_throughput",
}


def offline_renamed(fields: Fields) -> Fields:
    """The fields, those of an offline run under the names that the server's have."""
    return {_OFFLINE.get(key, key): value for key, value in fields.items()}


def ladder_table(result: Fields) -> str:
    """A ladder's rungs, and in sentences what the table rests on."""
    lines = [rows_table(result["rungs"], _LADDER), ""]
    runs = "one run" if result["repeat"] == 1 else f"median of {result['repeat']}"
    lines.append(
        f"{result['num_prompts']} requests at once, {result['total_input_tokens']:,} tokens in"
        f" ({result['prefix_len']} of each prompt from {result['prefix_groups']} common prefixes),"
        f" {result['total_output_tokens']:,} out, max_tokens {result['max_output_len']};"
        f" {_spread([row['kv_tokens'] for row in result['rungs']])} tokens of KV, at most {result['max_num_seqs']}"
        f" sequences, {result['max_num_batched_tokens']:,} tokens a step; {result['dtype']} on {result['device']};"
        f" {runs}."
    )
    if result["repeat"] > 1:
        spread = max(row["request_throughput_max"] / row["request_throughput_min"] for row in result["rungs"])
        lines.append(f"Of one rung, the fastest run was at most {spread:.2f} times as fast as the slowest.")
    equal = [row["equal_answers"] for row in result["rungs"]]
    lines.append(
        f"Answers that are token for token those of the first rung: {_spread(equal)} of {result['num_prompts']}."
    )
    if result["left_out"]:
        lines.append(f"Left out, since this device lacks them: {', '.join(result['left_out'])}.")
    return "\n".join(lines)


def serve_table(results: Sequence[Fields]) -> str:
    """Runs of `fulcrum bench serve`, one a row, named by "load" or "label", else by their rate.

    Of a run of which no request succeeded there are no figures.
    """
    rows = []
    for result in results:
        name = result.get("load") or result.get("label") or f"{result.get('request_rate')} requests/s"
        rows.append({**(result if result.get("completed", 1) else {"failed": result["failed"]}), "load": name})
    return rows_table(rows, _SERVE)


def compare_table(reference: Fields, results: Sequence[Fields], columns: Columns = COMPARED) -> str:
    """Loads of the reference (its "rows", by "load") beside those of ours with the same "load": theirs / ours (ratio).

    Raises: LoadTestError when a result has no load that the reference has.
    """
    runs: dict[str, list[Fields]] = {}
    names = [row["load"] for row in reference["rows"]]
    for result in map(offline_renamed, results):
        if result.get("load") not in names:
            raise LoadTestError(f"load {result.get('load')!r} is none of the reference's: {'; '.join(names)}")
        runs.setdefault(result["load"], []).append(result)
    ours = {load: medians(same, list(columns.values())) for load, same in runs.items()}
    pairs = [(row, ours[row["load"]]) for row in reference["rows"] if row["load"] in ours]
    kept = {head: key for head, key in columns.items() if any(key in row and key in own for row, own in pairs)}
    lines = [[row["load"], *(_versus(row.get(key), own.get(key)) for key in kept.values())] for row, own in pairs]
    text = markdown(["load", *kept], lines)
    text += f"\n\nEach cell: {reference['name']} / Fulcrum (ratio)."
    if len(results) > len(runs):
        counts = sorted({len(same) for same in runs.values()}, reverse=True)
        loads = ("; ".join(load for load, same in runs.items() if len(same) == count) for count in counts)
        text += f" Medians; runs: {', '.join(f'{n} of {which}' for n, which in zip(counts, loads, strict=True))}."
    if missing := [name for name in names if name not in ours]:
        text += f" Not compared yet: {'; '.join(missing)}."
    return text


def medians(runs: Sequence[Fields], names: Sequence[str]) -> Fields:
    """Of the figures of these names that all runs of one load have."""
    return {
        name: statistics.median(run[name] for run in runs)
        for name in names
        if all(run.get(name) is not None for run in runs)
    }


def rows_table(rows: Sequence[Fields], columns: Columns) -> str:
    """One line for each row; columns that no row has are left out.

    Raises: LoadTestError when no column is left.
    """
    kept = {head: key for head, key in columns.items() if any(row.get(key) is not None for row in rows)}
    if not kept:
        raise LoadTestError(f"no row has any of {', '.join(columns.values())}")
    return markdown(list(kept), [[number(row.get(key)) for key in kept.values()] for row in rows])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; columns of numbers (but for the first) to the right, of words to the left."""
    widths = [max(3, *map(len, column)) for column in zip(head, *rows, strict=True)]
    sides = [">" if i > 0 and any(row[i][:1].isdigit() for row in rows) else "<" for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    rules = ("-" * (width + 1) + (":" if side == ">" else "-") for side, width in zip(sides, widths, strict=True))
    return "\n".join([line(head), f"|{'|'.join(rules)}|", *map(line, rows)])


def number(value: Any) -> str:
    """A cell: three digits, four after the point below 0.1, or all before the point; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        whole = len(str(int(abs(value))))
        return f"{value:,.{4 if abs(value) < 0.1 else 3 if abs(value) < 1 else max(0, 3 - whole)}f}"
    return str(value)


def _versus(theirs: Any, own: Any) -> str:
    if theirs is None and own is None:
        return ""
    ratio = f" ({own / theirs:.2f})" if theirs and own is not None else ""
    return f"{number(theirs) or '-'} / {number(own) or '-'}{ratio}"


def _spread(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
