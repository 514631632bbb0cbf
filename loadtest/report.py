"""The print-out and the result file of a run: those of `vllm bench serve`, and what is known beyond. No network."""

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from loadtest.environment import environment
from loadtest.metrics import VOID_BELOW, Result
from loadtest.records import LoadTestError, Record, WorkerUsage

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


@dataclass(frozen=True, slots=True)
class Run:
    """A run and its circumstances.

    Attributes:
        about: the head of the result file: date, backend, model, rate, machine, ...
        selected: which latencies are shown, in order.
        unfinished: requests that an interruption left without an end.
        notes: further sentences to warn of.
    """

    about: Mapping[str, Any]
    result: Result
    records: Sequence[Record]
    usages: Sequence[WorkerUsage]
    selected: Sequence[str]
    unfinished: int = 0
    notes: Sequence[str] = ()

    @property
    def saturated(self) -> bool:
        """Whether the client may have been the limit."""
        return any(usage.busy > SATURATED for usage in self.usages)


def print_out(run: Run) -> str:
    """The figures, line by line."""
    result, about = run.result, run.about
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    _row(lines, "Successful requests:", result.completed)
    _row(lines, "Failed requests:", result.failed)
    if run.unfinished:
        _row(lines, "Unfinished requests (interrupted):", run.unfinished)
    if about["max_concurrency"] is not None:
        _row(lines, "Maximum request concurrency:", about["max_concurrency"])
    if about["request_rate"] != "inf":
        _row(lines, "Request rate configured (RPS):", float(about["request_rate"]))
    _row(lines, "Benchmark duration (s):", result.duration)
    _row(lines, "Total input tokens:", result.total_input_tokens)
    _row(lines, "Total generated tokens:", result.total_output_tokens)
    _row(lines, "Request throughput (req/s):", result.request_throughput)
    if result.request_goodput is not None:
        _row(lines, "Request goodput (req/s):", result.request_goodput)
    _row(lines, "Output token throughput (tok/s):", result.output_throughput)
    _row(lines, "Peak output token throughput (tok/s):", result.peak_output_throughput)
    _row(lines, "Peak concurrent requests:", float(result.peak_concurrent_requests))
    _row(lines, "Total token throughput (tok/s):", result.total_token_throughput)
    for name in run.selected:
        short, title = NAMES[name]
        latency = result.latencies.get(name)
        void = result.void and name in ("tpot", "itl")
        lines.append(f"{title + ' (VOID)' if void else title:-^{_WIDTH}}")
        if latency is None:
            _row(lines, f"Mean {short} (ms):", None)
            continue
        _row(lines, f"Mean {short} (ms):", latency.mean)
        _row(lines, f"Median {short} (ms):", latency.median)
        for percentile, value in latency.percentiles.items():
            _row(lines, f"P{percentile:g} {short} (ms):", value)
    lines.append(f"{'Client':-^{_WIDTH}}")
    _row(lines, "Events per token:", result.events_per_token)
    if result.cached_tokens:
        _row(lines, "Cached input tokens:", result.cached_tokens)
    _row(lines, "Worker processes:", len(run.usages))
    _row(lines, "CPU of the busiest worker (cores):", max((usage.mean for usage in run.usages), default=0.0))
    _row(lines, "  in its busiest second:", max((usage.peak for usage in run.usages), default=0.0))
    _row(lines, "  with its wait for a core:", max((usage.busy for usage in run.usages), default=0.0))
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def warnings(run: Run) -> list[str]:
    """What a reader of the figures has to know, in sentences."""
    found = list(run.notes)
    if run.result.void:
        found.append(
            f"{run.result.events_per_token:.3f} events per token, below {VOID_BELOW}: several tokens came in one "
            "event, so TPOT and ITL are void."
        )
    if run.saturated:
        found.append(
            f"a worker process ran or waited for a core for more than {SATURATED} of a second: the client may be what "
            "limits these figures; use more --workers, or a machine with idle cores."
        )
    kinds = Counter(record.error for record in run.records if record.error)
    found += [f"failed, {count} times: {error}" for error, count in kinds.most_common(_KINDS_SHOWN)]
    if len(kinds) > _KINDS_SHOWN:
        found.append(f"and {len(kinds) - _KINDS_SHOWN} other kinds of failures")
    return found


def result_json(run: Run, *, detailed: bool = False) -> dict[str, Any]:
    """The result file: the keys of `vllm bench serve`, then ours; with what came of each request if `detailed`."""
    result = run.result
    fields: dict[str, Any] = dict(run.about) | {
        "duration": result.duration,
        "completed": result.completed,
        "failed": result.failed,
        "total_input_tokens": result.total_input_tokens,
        "total_output_tokens": result.total_output_tokens,
        "request_throughput": result.request_throughput,
        "request_goodput": result.request_goodput,
        "output_throughput": result.output_throughput,
        "total_token_throughput": result.total_token_throughput,
        "max_output_tokens_per_s": result.peak_output_throughput,
        "max_concurrent_requests": result.peak_concurrent_requests,
        "rtfx": 0.0,  # of audio, which there is none of
    }
    for name in run.selected:
        latency = result.latencies.get(name)
        if latency is None:
            continue
        fields |= {
            f"mean_{name}_ms": latency.mean,
            f"median_{name}_ms": latency.median,
            f"std_{name}_ms": latency.std,
        }
        fields |= {f"p{percentile:g}_{name}_ms": value for percentile, value in latency.percentiles.items()}
    fields |= {
        "unfinished": run.unfinished,
        "events_per_token": result.events_per_token,
        "token_latencies_void": result.void,
        "cached_tokens": result.cached_tokens,
        "workers": len(run.usages),
        "client_cpu": [asdict(usage) for usage in run.usages],
        "client_saturated": run.saturated,
    }
    if detailed:
        records = run.records
        fields |= {
            "input_lens": [record.prompt_tokens for record in records],
            "output_lens": [0 if record.error else record.output_tokens for record in records],
            "ttfts": [record.ttft for record in records],
            "itls": [record.itls for record in records],
            "start_times": [record.start for record in records],
            "generated_texts": [record.text for record in records],
            "errors": [record.error for record in records],
        }
    return fields


def check_folder(folder: Path) -> None:
    """Makes a folder for result files and tries to write into it. Raises: LoadTestError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LoadTestError(f"{folder} cannot be written: {error}") from error


def save(fields: Mapping[str, Any], path: Path) -> None:
    """Writes a result file, and its folder. Raises: LoadTestError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fields) + "\n", encoding="utf-8")
    except OSError as error:
        raise LoadTestError(f"{path} cannot be written: {error}") from error


def save_figures(fields: Mapping[str, Any], path: Path | None) -> None:
    """Writes figures, if a path is given, with date, machine, commit and command beside them. Raises: LoadTestError."""
    if path is not None:
        save({"date": datetime.now().strftime("%Y%m%d-%H%M%S"), **environment(), **fields}, path)
        click.echo(f"Saved {path}", err=True)


def _row(lines: list[str], label: str, value: float | None) -> None:
    text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    lines.append(f"{label:<40} {text:<10}")
