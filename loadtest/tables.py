"""Markdown tables out of result files: for the terminal and for docs/benchmarks.md. Knows no files and no clock."""

from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.compare import offline_renamed
from loadtest.records import LoadTestError

Fields = Mapping[str, Any]
"""A result file's, or those of one row in it."""
Columns = Sequence[tuple[str, str]]
"""Heading, and the key of the field."""

_LADDER: Columns = (
    ("rung", "rung"),
    ("requests/s", "request_throughput"),
    ("output tokens/s", "output_throughput"),
    ("x rung before", "factor_before"),
    ("x first", "factor_first"),
    ("TTFT p50, ms", "p50_ttft_ms"),
    ("TTFT p99, ms", "p99_ttft_ms"),
    ("ITL p99, ms", "p99_itl_ms"),
    ("peak running", "peak_running"),
)
_SERVE: Columns = (
    ("load", "load"),
    ("requests/s", "request_throughput"),
    ("good requests/s", "request_goodput"),
    ("output tokens/s", "output_throughput"),
    ("TTFT p50, ms", "p50_ttft_ms"),
    ("TTFT p99, ms", "p99_ttft_ms"),
    ("TPOT p50, ms", "p50_tpot_ms"),
    ("TPOT p99, ms", "p99_tpot_ms"),
    ("ITL p50, ms", "p50_itl_ms"),
    ("ITL p99, ms", "p99_itl_ms"),
    ("failed", "failed"),
)
# Of these, more is better for the first two, less for the others: a ratio is always ours over theirs.
COMPARED: Columns = (
    ("requests/s", "request_throughput"),
    ("output tokens/s", "output_throughput"),
    ("TTFT p50, ms", "p50_ttft_ms"),
    ("TTFT p99, ms", "p99_ttft_ms"),
    ("ITL p50, ms", "p50_itl_ms"),
    ("ITL p99, ms", "p99_itl_ms"),
)
SPECULATION: Columns = (
    ("load", "load"),
    ("output tokens/s", "output_throughput"),
    ("without", "output_throughput_without"),
    ("speed-up, median", "speedup"),
    ("range", "speedup_range"),
    ("of CPU time", "cpu_speedup"),
    ("range of that", "cpu_speedup_range"),
    ("guessed", "draft_tokens"),
    ("right", "accepted_tokens"),
    ("output tokens", "total_output_tokens"),
)
ROWS: Mapping[str, Columns] = {
    "peers": (
        ("", "label"),
        ("weights", "weights"),
        ("streams", "streams"),
        ("output tokens/s", "output_throughput"),
        ("TTFT p50, ms", "p50_ttft_ms"),
        ("ITL p50, ms", "p50_itl_ms"),
        ("ITL p99, ms", "p99_itl_ms"),
    ),
    "page_sizes": (
        ("page size", "page_size"),
        ("pool, tokens", "pool_tokens"),
        ("cached tokens", "cached_tokens"),
        ("prefix hit rate", "hit_rate"),
        ("with vLLM's policy", "same_policy_hit_rate"),
        ("infinite cache", "ideal_hit_rate"),
        ("LRU of pages", "lru_hit_rate"),
        ("vLLM's rules", "vllm_rules_hit_rate"),
        ("requests/s", "request_throughput"),
        ("output tokens/s", "output_throughput"),
        ("ITL p50, ms", "p50_itl_ms"),
        ("ITL p99, ms", "p99_itl_ms"),
    ),
    "fairness": (
        ("tenants", "tenants"),
        ("light requests", "light_requests"),
        ("flood requests", "flood_requests"),
        ("queued p50, s", "queued_p50_s"),
        ("queued p99, s", "queued_p99_s"),
        ("queued max, s", "queued_max_s"),
    ),
    "turns": (
        ("turn", "turn"),
        ("requests", "requests"),
        ("prompt tokens", "mean_prompt_tokens"),
        ("hit rate", "hit_rate"),
        ("cold TTFT p50, ms", "cold_p50_ttft_ms"),
        ("p90", "cold_p90_ttft_ms"),
        ("warm TTFT p50, ms", "warm_p50_ttft_ms"),
        ("p90", "warm_p90_ttft_ms"),
    ),
}
"""Kinds of tables whose file has "rows": columns by kind. A column that no row has is left out."""


def ladder_table(result: Fields) -> str:
    """A ladder's rungs, and in sentences what the table rests on."""
    lines = [rows_table(result["rungs"], _LADDER), ""]
    lines.append(
        f"{result['num_prompts']} requests at once, {result['total_input_tokens']:,} tokens in"
        f" ({result['prefix_len']} of each prompt from {result['prefix_groups']} common prefixes),"
        f" {result['total_output_tokens']:,} out, max_tokens {result['max_output_len']};"
        f" {_spread([row['kv_tokens'] for row in result['rungs']])} tokens of KV, at most {result['max_num_seqs']}"
        f" sequences, {result['max_num_batched_tokens']:,} tokens a step; {result['dtype']} on {result['device']};"
        f" median of {result['repeat']}."
    )
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
    """Runs of `fulcrum bench serve`, one a row, named by "load" or "label", else by their rate."""
    rows = [
        {**result, "load": result.get("load") or result.get("label") or f"{result.get('request_rate')} requests/s"}
        for result in results
    ]
    return rows_table(rows, _SERVE)


def compare_table(reference: Fields, results: Sequence[Fields], columns: Columns = COMPARED) -> str:
    """Loads of the reference (its "rows", by "load") beside those of ours with the same "load": theirs / ours (ratio).

    Raises: LoadTestError when a result has no load that the reference has.
    """
    ours: dict[str, Fields] = {}
    names = [row["load"] for row in reference["rows"]]
    for result in map(offline_renamed, results):
        if result.get("load") not in names:
            raise LoadTestError(f"load {result.get('load')!r} is none of the reference's: {'; '.join(names)}")
        ours[result["load"]] = result
    pairs = [(row, ours[row["load"]]) for row in reference["rows"] if row["load"] in ours]
    kept = [(title, key) for title, key in columns if any(key in row and key in own for row, own in pairs)]
    lines = [[row["load"], *(_versus(row.get(key), own.get(key)) for _, key in kept)] for row, own in pairs]
    text = markdown(["load", *(title for title, _ in kept)], lines)
    text += f"\n\nEach cell: {reference['name']} / Fulcrum (ratio)."
    if missing := [name for name in names if name not in ours]:
        text += f" Not compared yet: {'; '.join(missing)}."
    return text


def rows_table(rows: Sequence[Fields], columns: Columns) -> str:
    """One line for each row; columns that no row has are left out.

    Raises: LoadTestError when no column is left.
    """
    kept = [(title, key) for title, key in columns if any(row.get(key) is not None for row in rows)]
    if not kept:
        raise LoadTestError(f"no row has any of {', '.join(key for _, key in columns)}")
    return markdown([title for title, _ in kept], [[number(row.get(key)) for _, key in kept] for row in rows])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; columns of numbers (but for the first) to the right, of words to the left."""
    widths = [max(3, *(len(line[i]) for line in (head, *rows))) for i in range(len(head))]
    right = [i > 0 and any(row[i][:1].isdigit() for row in rows) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        columns = zip(cells, widths, right, strict=True)
        return (
            "| "
            + " | ".join(cell.rjust(width) if of_numbers else cell.ljust(width) for cell, width, of_numbers in columns)
            + " |"
        )

    rule = "|".join(
        "-" * (width + 1) + (":" if of_numbers else "-") for width, of_numbers in zip(widths, right, strict=True)
    )
    return "\n".join([line(head), f"|{rule}|", *map(line, rows)])


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
