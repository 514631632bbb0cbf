"""What a suite prints: a line for each run, medians beside the reference. Knows no server and no files."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.records import Fields
from loadtest.suite_rows import Row
from loadtest.tables import columns, compare_table, markdown, number

_SPREADS = tuple(f"{each}_{name}_ms" for name in ("ttft", "tpot", "itl") for each in ("p50", "p99"))
_FIGURES = ("request_throughput", "output_throughput", *_SPREADS)
_LINE = "{:12}{:>8}{:>10}{:>18}{:>14}{:>14}{:>9}{:>8}{:>9}"
_HEAD = ("row", "req/s", "out tok/s", "TTFT p50/p99 ms", "TPOT", "ITL", "ev/tok", "client", "gap/step")
PER_STEP = ("device_gap", "device_busy", "schedule", "execute", "process")
"""Of each the server counts NAME_seconds; a result file has NAME_ms_per_step."""


def head() -> str:
    """Of the lines."""
    return _LINE.format(*_HEAD)


def line(fields: Fields) -> str:
    """A run in one line; client is the CPU of its busiest process in its busiest second, gaps are milliseconds."""
    spreads = [f"{fields[f'p50_{name}_ms']:.2f}/{fields[f'p99_{name}_ms']:.2f}" for name in ("ttft", "tpot", "itl")]
    client = max(usage["peak"] for usage in fields["client_cpu"])
    rates = f"{fields['request_throughput']:.2f}", f"{fields['output_throughput']:.0f}"
    last = f"{fields['events_per_token']:.3f}", f"{client:.2f}", f"{fields['device_gap_ms_per_step']:.3f}"
    return _LINE.format(fields["row"], *rates, *spreads, *last)


def card_text(fields: Fields) -> str:
    """What a mixed row is run for."""
    pages, server = fields["pages_at_end"], fields["server"]
    return (
        f"  {fields['completed']} requests in {fields['duration']:.0f} s, {fields['failed']} failed; peak device memory"
        f" {number(fields['peak_memory_mib']) or 'unknown'} MiB; running of {fields['concurrency']}: at least"
        f" {fields['least_running']}, median {fields['median_running']:g}; {server['preemptions']:.0f} preemptions;"
        f" pages at the end: {pages['used_pages']} used + {pages['free_pages']} free + {pages['cached_pages']} cached"
        f" {'=' if fields['pages_add_up'] else 'are NOT'} {pages['total_pages']}"
    )


def medians(runs: Sequence[Fields]) -> Fields:
    """Of the figures of one row's runs."""
    names = [*_FIGURES, *(f"{name}_ms_per_step" for name in PER_STEP)]
    return {"load": runs[0]["load"]} | {name: statistics.median(run[name] for run in runs) for name in names}


def summary(reference: Mapping[str, Any], done: Mapping[str, Sequence[Fields]], rows: Mapping[str, Row]) -> str:
    """Medians of each row beside the reference, and where the server's steps spent their time."""
    figures = {key: medians(runs) for key, runs in done.items()}
    theirs = {each["load"]: each for each in reference["rows"]}
    compared = [row for key, row in rows.items() if key in figures and row.compared_with]
    known = [{**theirs[row.compared_with], "load": row.load} for row in compared]
    parts = []
    if compared:
        parts.append(
            compare_table({**reference, "rows": known}, [figures[row.key] for row in compared], columns(*_FIGURES))
        )
    cells = [[key, *(f"{each[f'{name}_ms_per_step']:.3f}" for name in PER_STEP)] for key, each in figures.items()]
    parts.append(markdown(["ms per step", *(name.replace("_", " ") for name in PER_STEP)], cells))
    return "\n\n".join(parts)
