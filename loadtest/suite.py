"""Measures a whole served engine, row by row, beside vLLM: `python -m loadtest.suite MODEL -- SERVER-OPTIONS`.

It starts `fulcrum serve` with random weights, sends the rows of suite_rows.py through the OpenAI API from processes of
this machine, and writes a result file for each run: that of `fulcrum bench serve`, and what the server counted.
"""

import math
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from loadtest.datasets import Sampling
from loadtest.options import COUNT, POSITIVE, POSITIVE_OR_INF, WORKERS
from loadtest.records import Chain, Fields, LoadTestError
from loadtest.report import check_folder, read_result, save
from loadtest.serve import LoadTest
from loadtest.suite_rows import GROUPS, OBJECTIVES, ROWS, Row, gate, mixed_prompts, select
from loadtest.suite_server import COUNTERS, GAUGES, Server, serving, watched
from loadtest.tables import columns, compare_table, medians, number, rows_table

REFERENCE = Path(__file__).parent.parent / "docs" / "results" / "reference-vllm-0.26.0-h200.json"
_SERVER_OPTIONS = ("--load-format=dummy", "--max-model-len=8192")
_WARM_UP = Row("warm-up", "", "random", 64, (32, 8), seed=123_456, reference="")
_ROW_SECONDS = 6.0  # what a row takes beside its load: prompts, client processes
_DRAIN_SECONDS = 30.0  # what is in flight when a mixed row begins no more
_RAMP_SECONDS = 10.0  # until all that is to be in flight is
_LATENCIES = tuple(f"{each}_{name}_ms" for name in ("ttft", "tpot", "itl") for each in ("p50", "p99"))
_FIGURES = ("request_throughput", "output_throughput", *_LATENCIES)
_PER_STEP = ("device_gap", "device_busy", "schedule", "execute", "process")
"""Of each the server counts NAME_seconds; a result file has NAME_ms_per_step."""
_COSTS = {f"{name.replace('_', ' ')}, ms a step": f"{name}_ms_per_step" for name in _PER_STEP}
_COSTS |= {f"{kind}, CPU us a token": f"{kind}_cpu_us_per_token" for kind in ("core", "service", "gateway", "client")}
_LINE = "{:12}{:>8}{:>10}{:>18}{:>14}{:>14}{:>9}{:>8}{:>9}"
_HEAD = ("row", "req/s", "out tok/s", "TTFT p50/p99 ms", "TPOT", "ITL", "ev/tok", "client", "gap/step")


@dataclass(slots=True)
class Suite:
    """What is measured, and how; and what came of it."""

    model: Path  # a folder with config.json and tokenizer.json
    options: Sequence[str]  # of every server, after those of its rows
    folder: Path  # of result files and logs
    sharegpt: Path | None  # the ShareGPT file
    repeat: int
    seconds: float  # how long a mixed row begins requests
    workers: int
    start_seconds: float  # how long a server may take to serve
    deadline: float  # of the whole, on the monotonic clock
    rates: Mapping[str, float]  # requests per second of the other engine, by load
    commit: str | None  # of a copy that has no git; None: as git says
    done: dict[str, list[Fields]] = field(default_factory=dict)  # result files' fields of each row's runs, by its key
    failed: dict[str, None] = field(default_factory=dict)  # keys of rows of which a run failed

    def run(self, rows: Sequence[Row]) -> None:
        """Runs them, and tells of each; ends early where the next one would pass the deadline."""
        click.echo(_LINE.format(*_HEAD))
        for group, options in enumerate(dict.fromkeys(row.options for row in rows), 1):
            plan = [(row, n + 1) for n in range(self.repeat) for row in rows if row.options == options]
            if not self._fits(plan[0][0]):
                return
            seconds = min(self.start_seconds, self.deadline - time.monotonic())
            settings = [*_SERVER_OPTIONS, *options, *self.options]
            try:
                with serving(self.model, settings, self.folder / f"server-{group}.log", seconds) as server:
                    click.echo(f"Serves; {self.deadline - time.monotonic():.0f} s are left", err=True)
                    self._sent(server, _WARM_UP, 0)
                    while plan and self._fits(plan[0][0]):
                        self._measure(server, *plan.pop(0), settings)
                        if plan and server.process.poll() is not None:
                            raise LoadTestError("the server has ended")
            except LoadTestError as error:
                for row, _ in plan:
                    self._fail(row, error)
                    error = LoadTestError("as above")
                plan = []
            if plan:
                return

    def _fits(self, row: Row) -> bool:
        fits = time.monotonic() + self._estimate(row) <= self.deadline
        if not fits:
            click.echo(f"Stopped before {row.key}: it takes about {self._estimate(row):.0f} s", err=True)
        return fits

    def _estimate(self, row: Row) -> float:
        """Seconds, as the reference took, or as the rate says."""
        if row.compared_with:
            return _ROW_SECONDS + row.count / self.rates[row.compared_with]
        return _ROW_SECONDS + (self.seconds + _DRAIN_SECONDS if row.dataset == "mixed" else row.count / row.rate)

    def _fail(self, row: Row, error: LoadTestError) -> None:
        self.failed[row.key] = None
        click.echo(f"{row.key} FAILED: {error}")

    def _measure(self, server: Server, row: Row, repeat: int, settings: Sequence[str]) -> None:
        """Runs a row, writes its file, and tells of it."""
        try:
            if row.flush:
                server.flush()
            fields = self._sent(server, row, repeat)
            fields |= {"load": row.load, "row": row.key, "repeat": repeat, "cache_flushed": row.flush}
            fields |= {"settings": shlex.join(settings), "commit": self.commit or fields["commit"]}
            save(fields, self.folder / f"{row.key}-{repeat}.json")
            if fields["failed"] or fields["unfinished"] or not fields["completed"]:
                unfinished = f"{fields['unfinished']} requests did not end in time"
                raise LoadTestError("; ".join([*fields["warnings"], unfinished]))
        except LoadTestError as error:
            self._fail(row, LoadTestError(f"{error}\n{server.last_words()}"))
            return
        self.done.setdefault(row.key, []).append(fields)
        click.echo("\n".join([_line(fields), *(f"  WARNING: {each}" for each in fields["warnings"])]))
        if row.dataset == "mixed":
            click.echo(_card_text(fields))

    def _sent(self, server: Server, row: Row, repeat: int) -> Fields:
        """Sends a row; the result file's fields. Raises: LoadTestError."""
        mixed = row.dataset == "mixed"
        test = LoadTest(
            target=server.target,
            dataset="random" if mixed else row.dataset,
            sampling=Sampling(
                path=self.sharegpt if row.dataset == "sharegpt" else None,
                count=row.count + int(row.count * self.seconds) if mixed else row.count,
                seed=row.seed + repeat * row.fresh,
                oversample=row.oversample,
                random_input_len=row.lengths[0],
                random_output_len=row.lengths[1],
            ),
            rate=row.rate,
            max_concurrency=row.concurrency,
            workers=self.workers,
            tokenizer_path=self.model if (self.model / "tokenizer.json").exists() else None,
            progress=False,
            seconds=self.seconds if mixed else math.inf,
            objectives=OBJECTIVES if row.dataset == "sharegpt" else {},
        )
        chains, began = chains_of(row, test), time.monotonic()
        before, cpu = server.stats(COUNTERS), server.cpu_seconds()
        give_up = min(60 + 3 * self._estimate(row), max(1.0, self.deadline - began))
        with watched(server) if mixed else nullcontext(list[Fields]()) as samples:
            run = replace(test, give_up=give_up).run(chains)
        if run.fields["unfinished"] and time.monotonic() - began < give_up:
            raise KeyboardInterrupt
        counted = {name: value - before[name] for name, value in server.stats(COUNTERS).items()}
        fields = run.fields | {"server": counted, "warnings": run.warnings}
        spent = {kind: seconds - cpu[kind] for kind, seconds in server.cpu_seconds().items()}
        spent["client"] = sum(usage["mean"] for usage in fields["client_cpu"]) * fields["duration"]
        for kind, seconds in spent.items():
            fields[f"{kind}_cpu_us_per_token"] = 1e6 * seconds / max(1, counted["generated_tokens"])
        for name in _PER_STEP:
            fields[f"{name}_ms_per_step"] = 1000 * counted[f"{name}_seconds"] / max(1, counted["steps"])
        if samples:
            fields |= {"num_prompts": fields["completed"] + fields["failed"], "concurrency": row.concurrency}
            fields |= self._watched(samples) | _pages(server.stats(GAUGES))
        return fields

    def _watched(self, samples: Sequence[Fields]) -> Fields:
        """What the samples of a mixed row say."""
        start = next((each["seconds"] for each in samples if each["live_requests"]), 0.0)
        first, last = start + min(_RAMP_SECONDS, self.seconds / 4), start + self.seconds - 1
        full = [each["running_sequences"] for each in samples if first <= each["seconds"] <= last]
        return {
            "least_running": min(full, default=0),
            "median_running": statistics.median(full) if full else 0,
            "peak_memory_mib": max(each["device_memory_mib"] or 0 for each in samples) or None,
            "least_free_and_cached_pages": min(each["free_pages"] + each["cached_pages"] for each in samples),
            "samples": samples,
        }


def _pages(gauges: Fields) -> Fields:
    whole = sum(gauges[f"{name}_pages"] for name in ("used", "free", "cached")) == gauges["total_pages"]
    return {"pages_at_end": gauges, "pages_add_up": whole}


def chains_of(row: Row, test: LoadTest) -> Sequence[Chain]:
    """The requests of a row, as the test samples them. Raises: LoadTestError."""
    if row.dataset == "mixed":
        return mixed_prompts(test.tokenizer.ids, test.sampling.count, row.lengths, test.sampling.seed)
    chains = test.chains()
    if not row.as_ids:
        return chains
    prompts = [chain.prompts[0] for chain in chains]
    ids = test.tokenizer.encode([str(prompt.content) for prompt in prompts])
    return [Chain((replace(prompt, content=each),)) for prompt, each in zip(prompts, ids, strict=True)]


def _line(fields: Fields) -> str:
    """A run in one line; client is the CPU of its busiest process in its busiest second, gaps are milliseconds."""
    spreads = [f"{fields[f'p50_{name}_ms']:.2f}/{fields[f'p99_{name}_ms']:.2f}" for name in ("ttft", "tpot", "itl")]
    client = max(usage["peak"] for usage in fields["client_cpu"])
    rates = f"{fields['request_throughput']:.2f}", f"{fields['output_throughput']:.0f}"
    last = f"{fields['events_per_token']:.3f}", f"{client:.2f}", f"{fields['device_gap_ms_per_step']:.3f}"
    return _LINE.format(fields["row"], *rates, *spreads, *last)


def _card_text(fields: Fields) -> str:
    """What a mixed row is run for."""
    pages = fields["pages_at_end"]
    return (
        f"  {fields['completed']} requests in {fields['duration']:.0f} s, {fields['failed']} failed; peak device memory"
        f" {number(fields['peak_memory_mib']) or 'unknown'} MiB; running of {fields['concurrency']}: at least"
        f" {fields['least_running']}, median {fields['median_running']:g}; {fields['server']['preemptions']:.0f}"
        f" preemptions; pages at the end: {pages['used_pages']} used + {pages['free_pages']} free +"
        f" {pages['cached_pages']} cached {'=' if fields['pages_add_up'] else 'are NOT'} {pages['total_pages']}"
    )


def _summary(reference: Fields, done: Mapping[str, Sequence[Fields]], figures: Mapping[str, Fields]) -> str:
    """Medians of each row beside the reference, and what steps and tokens cost."""
    theirs = {each["load"]: each for each in reference["rows"]}
    compared = [row for key, row in ROWS.items() if key in done and row.compared_with]
    known = [{**theirs[row.compared_with], "load": row.load} for row in compared]
    parts = [rows_table([{"row": key, **each} for key, each in figures.items()], {"row": "row", **_COSTS})]
    if compared:
        ours = [run for row in compared for run in done[row.key]]
        parts.insert(0, compare_table({**reference, "rows": known}, ours, columns(*_FIGURES)))
    return "\n\n".join(parts)


def _rates(reference: Fields) -> dict[str, float]:
    try:
        return {each["load"]: float(each["request_throughput"]) for each in reference["rows"]}
    except (KeyError, TypeError, ValueError) as error:
        raise LoadTestError(f"the reference is no file of rows with load and request_throughput: {error!r}") from error


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("options", nargs=-1, metavar="[SERVER_OPTIONS]...")
@click.option(
    "--rows", "names", default="rnd1k,rnd7k,long50,sg", show_default=True, help=f"{', '.join([*GROUPS, *ROWS])}."
)
@click.option("--result-dir", "folder", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--sharegpt", type=_FILE, help="File of the sg rows.")
@click.option("--repeat", type=COUNT, default=1, show_default=True, help="Runs; medians are compared.")
@click.option("--seconds", type=POSITIVE, default=300.0, show_default=True, help="How long card24 begins requests.")
@click.option("--time-limit", type=POSITIVE_OR_INF, default=math.inf, help="Seconds for all, servers' starts included.")
@click.option("--start-seconds", type=POSITIVE, default=300.0, show_default=True, help="For a server's start.")
@click.option("--workers", type=COUNT, default=WORKERS, show_default=True)
@click.option("--reference", "reference_file", type=_FILE, default=REFERENCE)
@click.option("--commit", help="For the result files, where this is a copy without git.")
@click.option("--gate", "gated", is_flag=True, help="Say which of the project's targets are met.")
def main(names: str, time_limit: float, reference_file: Path, gated: bool, **params: Any) -> None:
    """Measure `fulcrum serve MODEL --load-format dummy SERVER_OPTIONS`. Exit status 1 when a row failed."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the server ends too
    rows, reference = select(names), read_result(reference_file)
    if params["sharegpt"] is None and any(row.dataset == "sharegpt" for row in rows):
        raise LoadTestError("the sg rows need --sharegpt FILE")
    suite = Suite(deadline=time.monotonic() + time_limit, rates=_rates(reference), **params)
    if missing := {row.compared_with for row in rows if row.compared_with} - suite.rates.keys():
        raise LoadTestError(f"{reference_file} has no rate of {', '.join(sorted(missing))}")
    check_folder(suite.folder)
    suite.run(rows)
    figures = {key: medians(runs, [*_FIGURES, *_COSTS.values()]) for key, runs in suite.done.items()}
    if figures:
        click.echo("\n" + _summary(reference, suite.done, figures))
    if gated:
        click.echo("\n" + "\n".join(gate(figures)))
    if suite.failed or not figures:
        raise click.ClickException(f"failed: {', '.join(suite.failed) or 'there was time for no row'}")


if __name__ == "__main__":
    main()
