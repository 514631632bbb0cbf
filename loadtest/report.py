"""The print-out and the files of a run: those of `vllm bench serve`, and what is known beyond. No network."""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import click

from loadtest.environment import environment
from loadtest.metrics import VOID_BELOW
from loadtest.records import Fields, LoadTestError, Record

NAMES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
SATURATED = 0.8
"""Share of a second, running or waiting for a core, above which a worker process may be what limits the figures."""

_WIDTH = 50
_KINDS_SHOWN = 10
_FIGURES = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Unfinished requests (interrupted):", "unfinished"),
    ("Maximum request concurrency:", "max_concurrency"),
    ("Request rate configured (RPS):", "request_rate"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
    ("Peak concurrent requests:", "max_concurrent_requests"),
    ("Total token throughput (tok/s):", "total_token_throughput"),
)
_LEFT_OUT = {"unfinished": 0, "max_concurrency": None, "request_rate": "inf", "request_goodput": None}
"""Figures that are told only when they have another value."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run: the fields of its result file, what came of each request, and what a reader has to know, in sentences."""

    fields: Fields
    records: Sequence[Record]
    warnings: Sequence[str]


def print_out(fields: Fields) -> str:
    """The figures of a result file, line by line."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    lines += [_row(title, fields[key]) for title, key in _FIGURES if fields[key] != _LEFT_OUT.get(key, ...)]
    for name, (short, title) in NAMES.items():
        keys = [key for key in fields if key.endswith(f"_{name}_ms") and not key.startswith("std")]
        if keys:
            void = fields["token_latencies_void"] and name in ("tpot", "itl")
            lines.append(f"{title + ' (VOID)' * void:-^{_WIDTH}}")
        lines += [_row(f"{key.split('_')[0].capitalize()} {short} (ms):", fields[key]) for key in keys]
    lines += [f"{'Client':-^{_WIDTH}}", _row("Events per token:", fields["events_per_token"])]
    if fields["cached_tokens"]:
        lines.append(_row("Cached input tokens:", fields["cached_tokens"]))
    mean, peak, busy = (
        max((usage[key] for usage in fields["client_cpu"]), default=0.0) for key in ("mean", "peak", "busy")
    )
    lines.append(_row("Worker processes:", fields["workers"]))
    lines.append(_row("CPU of the busiest worker (cores):", mean))
    lines.append(_row("  in its busiest second:", peak))
    lines.append(_row("  with its wait for a core:", busy))
    return "\n".join([*lines, "=" * _WIDTH])


def _row(label: str, value: float | str | None) -> str:
    text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {text:<10}"


def warnings(fields: Fields, records: Sequence[Record]) -> list[str]:
    """What a reader of the figures has to know, in sentences."""
    found = []
    if fields["token_latencies_void"]:
        found.append(
            f"{fields['events_per_token']:.3f} events per token, below {VOID_BELOW}: several tokens came in one "
            "event, so TPOT and ITL are void."
        )
    if fields["client_saturated"]:
        found.append(
            f"a worker process ran or waited for a core for more than {SATURATED} of a second: the client may be what "
            "limits these figures; use more --workers, or a machine with idle cores."
        )
    kinds = Counter(record.error for record in records if record.error)
    found += [f"failed, {count} times: {error}" for error, count in kinds.most_common(_KINDS_SHOWN)]
    if len(kinds) > _KINDS_SHOWN:
        found.append(f"and {len(kinds) - _KINDS_SHOWN} other kinds of failures")
    return found


def details(records: Sequence[Record]) -> Fields:
    """Further fields of a result file: what came of each request."""
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [0 if record.error else record.output_tokens for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.itls for record in records],
        "start_times": [record.start for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
    }


def check_folder(folder: Path) -> None:
    """Makes a folder for result files and tries to write into it. Raises: LoadTestError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LoadTestError(f"{folder} cannot be written: {error}") from error


def save(fields: Fields, path: Path) -> None:
    """Writes a result file, and its folder. Raises: LoadTestError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fields) + "\n", encoding="utf-8")
    except OSError as error:
        raise LoadTestError(f"{path} cannot be written: {error}") from error


def save_figures(fields: Fields, path: Path | None) -> None:
    """Writes figures, if a path is given, with date, machine, commit and command beside them. Raises: LoadTestError."""
    if path is not None:
        save({"date": now(), **environment(), **fields}, path)
        click.echo(f"Saved {path}", err=True)


def read_result(path: Path) -> Fields:
    """A result file's fields. Raises: LoadTestError when it is none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadTestError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise LoadTestError(f"{path} is not a result file")
    return fields


def now() -> str:
    """The date of a result file."""
    return datetime.now().strftime("%Y%m%d-%H%M%S")
