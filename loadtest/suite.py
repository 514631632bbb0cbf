"""Measures a whole served engine, row by row, beside vLLM: `python -m loadtest.suite MODEL -- SERVER-OPTIONS`.

It starts `fulcrum serve` with random weights, sends the rows of suite_rows.py through the OpenAI API from processes of
this machine, and writes a result file for each run: that of `fulcrum bench serve`, and what the server counted.
"""

import math
import os
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from loadtest.datasets import Sampling
from loadtest.options import COUNT, POSITIVE, POSITIVE_OR_INF
from loadtest.records import Chain, Fields, LoadTestError
from loadtest.report import check_folder, read_result, save
from loadtest.serve import LoadTest
from loadtest.suite_report import PER_STEP, card_text, head, line, medians, summary
from loadtest.suite_rows import GROUPS, ROWS, Row, gate, mixed_lengths, mixed_prompts, select
from loadtest.suite_server import Server, Watch, serving

REFERENCE = Path(__file__).parent.parent / "docs" / "results" / "reference-vllm-0.26.0-h200.json"
_SERVER_OPTIONS = ("--load-format=dummy", "--max-model-len=8192")
_WARM_UP = Row("warm-up", "", "random", 64, (32, 8), seed=123_456, reference="")
_ROW_SECONDS = 6.0  # what a row takes beside its load: prompts, client processes
_DRAIN_SECONDS = 30.0  # what is in flight when a mixed row begins no more
_SAMPLE_SECONDS = 1.0
_RAMP_SECONDS = 10.0  # until all that is to be in flight is


@dataclass(frozen=True, slots=True)
class Suite:
    """What is measured, and how.

    Attributes:
        model: a folder with config.json and tokenizer.json.
        options: of every server, after those of its rows.
        folder: of result files and logs.
        path: the ShareGPT file.
        seconds: how long a mixed row begins requests.
        start_seconds: how long a server may take to serve.
        deadline: of the whole, on the monotonic clock.
        reference: the other engine's result file.
        commit: of a copy that has no git; None: as git says.
    """

    model: Path
    options: Sequence[str]
    folder: Path
    path: Path | None
    repeat: int
    seconds: float
    workers: int
    start_seconds: float
    deadline: float
    reference: Mapping[str, Any]
    commit: str | None

    def runs(self, rows: Sequence[Row]) -> Generator[tuple[Row, Fields | LoadTestError]]:
        """What came of each run, as soon as it is done; ends early where the next one would pass the deadline."""
        for number, options in enumerate(dict.fromkeys(row.options for row in rows), 1):
            plan = [(row, n + 1) for n in range(self.repeat) for row in rows if row.options == options]
            try:
                if not self._fits(plan[0][0]):
                    return
                seconds = min(self.start_seconds, self.deadline - time.monotonic())
                settings = [*_SERVER_OPTIONS, *options, *self.options]
                with serving(self.model, settings, self.folder / f"server-{number}.log", seconds) as server:
                    click.echo(f"Serves; {self.deadline - time.monotonic():.0f} s are left", err=True)
                    self._run(server, _WARM_UP, 0)
                    while plan and self._fits(plan[0][0]):
                        row, repeat = plan.pop(0)
                        yield row, self._measured(server, row, repeat, settings)
                        if plan and server.process.poll() is not None:
                            raise LoadTestError("the server has ended")
            except LoadTestError as error:
                for row, _ in plan:
                    yield row, error
                    error = LoadTestError("as above")
                continue
            if plan:
                return

    def _fits(self, row: Row) -> bool:
        fits = time.monotonic() + self._estimate(row) <= self.deadline
        if not fits:
            click.echo(f"Stopped before {row.key}: it takes about {self._estimate(row):.0f} s", err=True)
        return fits

    def _estimate(self, row: Row) -> float:
        """Seconds, as the reference took."""
        if not row.compared_with:
            return _ROW_SECONDS + (self.seconds + _DRAIN_SECONDS if row.dataset == "mixed" else 0)
        return _ROW_SECONDS + row.count / reference_rates(self.reference)[row.compared_with]

    def _measured(self, server: Server, row: Row, repeat: int, settings: Sequence[str]) -> Fields | LoadTestError:
        try:
            if row.flush:
                server.flush()
            fields = self._run(server, row, repeat)
            fields |= {"load": row.load, "row": row.key, "repeat": repeat, "cache_flushed": row.flush}
            fields |= {"settings": shlex.join(settings), "commit": self.commit or fields["commit"]}
            save(fields, self.folder / f"{row.key}-{repeat}.json")
            if fields["failed"] or fields["unfinished"] or not fields["completed"]:
                unfinished = f"{fields['unfinished']} requests did not end in time"
                raise LoadTestError("; ".join([*fields["warnings"], unfinished]))
            return fields
        except LoadTestError as error:
            return LoadTestError(f"{error}\n{server.last_words()}")

    def _run(self, server: Server, row: Row, repeat: int) -> Fields:
        """Sends a row; the result file's fields. Raises: LoadTestError."""
        mixed = row.dataset == "mixed"
        test = LoadTest(
            target=server.target,
            dataset="random" if mixed else row.dataset,
            sampling=Sampling(
                path=self.path if row.dataset == "sharegpt" else None,
                count=row.count + int(row.count * self.seconds) if mixed else row.count,
                seed=row.seed_of(repeat),
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
        )
        chains = chains_of(row, test)
        before = server.counters()
        give_up = 60 + 3 * self._estimate(row)
        give_up, began = min(give_up, max(1.0, self.deadline - time.monotonic())), time.monotonic()
        watch = Watch(server) if mixed else None
        with watch or nullcontext():
            run = replace(test, give_up=give_up).run(chains)
        if run.fields["unfinished"] and time.monotonic() - began < give_up:
            raise KeyboardInterrupt
        counted = {name: value - before[name] for name, value in server.counters().items()}
        steps = max(1, counted["steps"])
        fields = run.fields | {"server": counted, "warnings": run.warnings}
        fields |= {f"{name}_ms_per_step": 1000 * counted[f"{name}_seconds"] / steps for name in PER_STEP}
        if watch:
            fields |= {"num_prompts": fields["completed"] + fields["failed"], **self._watched(watch, server, row)}
        return fields

    def _watched(self, watch: Watch, server: Server, row: Row) -> Fields:
        """What the samples of a mixed row say."""
        if watch.error:
            raise LoadTestError(watch.error)
        start = next((each["seconds"] for each in watch.samples if each["live_requests"]), 0.0)
        first, last = start + min(_RAMP_SECONDS, self.seconds / 4), start + self.seconds - _SAMPLE_SECONDS
        full = [each["running_sequences"] for each in watch.samples if first <= each["seconds"] <= last]
        pages = server.gauges()
        return {
            "least_running": min(full, default=0),
            "median_running": statistics.median(full) if full else 0,
            "peak_memory_mib": max((each["device_memory_mib"] or 0 for each in watch.samples), default=0) or None,
            "least_free_and_cached_pages": min(each["free_pages"] + each["cached_pages"] for each in watch.samples),
            "pages_at_end": pages,
            "pages_add_up": sum(pages[f"{name}_pages"] for name in ("used", "free", "cached")) == pages["total_pages"],
            "concurrency": row.concurrency,
            "samples": watch.samples,
        }


def reference_rates(reference: Mapping[str, Any]) -> dict[str, float]:
    """Requests per second of a reference, by load. Raises: LoadTestError for a file of another form."""
    try:
        return {each["load"]: float(each["request_throughput"]) for each in reference["rows"]}
    except (KeyError, TypeError, ValueError) as error:
        raise LoadTestError(f"the reference is no file of rows with load and request_throughput: {error!r}") from error


def chains_of(row: Row, test: LoadTest) -> Sequence[Chain]:
    """The requests of a row, as the test samples them. Raises: LoadTestError."""
    if row.dataset == "mixed":
        lengths = mixed_lengths(test.sampling.count, *row.lengths, seed=test.sampling.seed)
        return mixed_prompts(test.tokenizer.ids, lengths, test.sampling.seed)
    chains = test.chains()
    if not row.as_ids:
        return chains
    prompts = [chain.prompts[0] for chain in chains]
    ids = test.tokenizer.encode([str(prompt.content) for prompt in prompts])
    return [Chain((replace(prompt, content=each),)) for prompt, each in zip(prompts, ids, strict=True)]


def _ended(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("server_options", nargs=-1)
@click.option(
    "--rows", "names", default="rnd1k,rnd7k,long50,sg", show_default=True, help=f"{', '.join([*GROUPS, *ROWS])}."
)
@click.option("--result-dir", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--sharegpt", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="File of the sg rows.")
@click.option("--repeat", type=COUNT, default=1, show_default=True, help="Runs; medians are compared.")
@click.option("--seconds", type=POSITIVE, default=300.0, show_default=True, help="How long card24 begins requests.")
@click.option("--time-limit", type=POSITIVE_OR_INF, default=math.inf, help="Seconds for all, servers' starts included.")
@click.option("--start-seconds", type=POSITIVE, default=300.0, show_default=True, help="For a server's start.")
@click.option("--workers", type=COUNT, default=max(1, min(4, (os.cpu_count() or 1) // 4)), show_default=True)
@click.option("--reference", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=REFERENCE)
@click.option("--commit", help="For the result files, where this is a copy without git.")
@click.option("--gate", "gated", is_flag=True, help="Say which of the project's targets are met.")
def main(
    model: Path, server_options: tuple[str, ...], names: str, result_dir: Path, gated: bool, **params: Any
) -> None:
    """Measure `fulcrum serve MODEL --load-format dummy SERVER_OPTIONS`. Exit status 1 when a row failed."""
    signal.signal(signal.SIGTERM, _ended)  # so that the server ends too
    rows, reference = select(names), read_result(params["reference"])
    if params["sharegpt"] is None and any(row.dataset == "sharegpt" for row in rows):
        raise LoadTestError("the sg rows need --sharegpt FILE")
    compared = {row.compared_with for row in rows if row.compared_with}
    if missing := compared - reference_rates(reference).keys():
        raise LoadTestError(f"{params['reference']} has no rate of {', '.join(sorted(missing))}")
    check_folder(result_dir)
    suite = Suite(
        model=model,
        options=server_options,
        folder=result_dir,
        path=params["sharegpt"],
        deadline=time.monotonic() + params["time_limit"],
        reference=reference,
        **{name: params[name] for name in ("repeat", "seconds", "workers", "start_seconds", "commit")},
    )
    done: dict[str, list[Fields]] = {}
    failed: dict[str, None] = {}
    click.echo(head())
    with closing(suite.runs(rows)) as runs:
        for row, outcome in runs:
            if isinstance(outcome, LoadTestError):
                failed[row.key] = None
                click.echo(f"{row.key} FAILED: {outcome}")
                continue
            done.setdefault(row.key, []).append(outcome)
            click.echo("\n".join([line(outcome), *(f"  WARNING: {each}" for each in outcome["warnings"])]))
            if row.dataset == "mixed":
                click.echo(card_text(outcome))
    if done:
        click.echo("\n" + summary(reference, done, {row.key: row for row in rows}))
    if gated:
        click.echo("\n" + "\n".join(gate({key: medians(runs) for key, runs in done.items()})))
    if failed or not done:
        raise click.ClickException(f"failed: {', '.join(failed) or 'there was time for no row'}")


if __name__ == "__main__":
    main()
