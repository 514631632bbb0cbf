"""`fulcrum bench`: its commands that measure a running server, and `compare`."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cli import bench_offline, bench_prefix
from cli import bench_options as options
from cli.options import CONTEXT, existing_file
from loadtest.compare import compare as side_by_side
from loadtest.options import POSITIVE, POSITIVE_OR_INF, Listed
from loadtest.plots import plot
from loadtest.report import Run, check_folder, details, print_out, read_result, save
from loadtest.serve import LoadTest
from loadtest.tables import serve_table


@click.group(context_settings=CONTEXT | {"show_default": True})
def bench() -> None:
    """Load tests: of this server, or of any that speaks OpenAI's API. A key is taken from OPENAI_API_KEY."""


for command in (bench_offline.throughput, bench_offline.latency, bench_offline.ladder, bench_prefix.prefix):
    bench.add_command(command)


def _rates(ctx: click.Context, param: click.Parameter, rates: tuple[float, ...]) -> tuple[float, ...]:
    if len({f"{rate:g}" for rate in rates}) < len(rates):
        raise click.BadParameter("each rate is there once", ctx, param)
    return rates


@bench.command()
@options.load
@click.option(
    "--request-rate", "rate", type=POSITIVE_OR_INF, default=math.inf, help="Requests per second; inf: all at once."
)
@click.option("--self-timed/--no-self-timed", default=None, show_default="with prefix-trace", help="The trace's times.")
@click.option("--goodput", multiple=True, metavar="NAME:MS...", help="Such as ttft:200 tpot:20 (also e2el).")
@click.option("--save-result", is_flag=True, help="Write a result file.")
@click.option("--save-detailed", is_flag=True, help="With every request's times and text in it.")
@click.option("--result-filename", show_default="BACKEND-RATEqps-MODEL-DATE.json")
def serve(**params: Any) -> None:
    """Measure a running server: throughput, TTFT, TPOT, ITL, end-to-end latency.

    Options, arithmetic and print-out are those of `vllm bench serve`.
    """
    if params["self_timed"] is None:
        params["self_timed"] = params["dataset"] == "prefix-trace" and math.isinf(params["rate"])
    if params["save_result"]:
        check_folder(params["result_dir"])
    test = options.load_test(params).prepared()
    run = _measure(test)
    if params["save_result"]:
        limit = f"-concurrency{test.max_concurrency}" if test.max_concurrency else ""
        name, model = (test.label or test.target.backend).replace("/", "_"), test.target.model.split("/")[-1]
        name = params["result_filename"] or f"{name}-{test.rate}qps{limit}-{model}-{run.fields['date']}.json"
        save(run.fields | (details(run.records) if params["save_detailed"] else {}), params["result_dir"] / name)
        click.echo(f"Saved {params['result_dir'] / name}", err=True)
    _exit(params, [run])


@bench.command()
@options.load
@click.option(
    "--request-rates",
    type=Listed(POSITIVE_OR_INF),
    callback=_rates,
    default="1,2,4,8,16,32,inf",
    help="Requests per second of each row, in order.",
)
@click.option(
    "--seconds", "row_seconds", type=POSITIVE, help="At most as many prompts a row as its rate sends in this time."
)
@click.option("--goodput", multiple=True, default=("ttft:200", "tpot:20"), metavar="NAME:MS...", help="Objectives.")
@options.flush
@click.option("--vary-seed", is_flag=True, help="Add the row's number to the seed: other prompts in each row.")
@click.option("--plot-format", type=Listed(click.Choice(["svg", "png"])), default="svg")
def sweep(**params: Any) -> None:
    """Measure a running server at several request rates: a table, result files, plots of goodput and latency.

    All rows have the same seed: from the second on, prompts may be in the server's prefix cache, unless it is emptied
    before each row (--flush-cache) or the rows have prompts of their own (--vary-seed).
    """
    folder: Path = params["result_dir"]
    check_folder(folder)
    test = options.load_test(params).prepared()
    runs: list[Run] = []
    try:
        for number, rate in enumerate(params["request_rates"]):
            count = params["count"]
            if params["row_seconds"] and not math.isinf(rate):
                count = min(count, math.ceil(rate * params["row_seconds"]))
            click.echo(f"{rate:g} requests/s, {count} prompts", err=True)
            seed = (test.sampling.seed + (number if params["vary_seed"] else 0)) % 2**32
            about = {**test.about, "cache_flushed": params["flush_cache"] is not None}
            row = replace(test, rate=rate, sampling=replace(test.sampling, count=count, seed=seed), about=about)
            options.flush_cache(params, test.target)
            runs.append(_measure(row))
            save(runs[-1].fields, folder / f"sweep-{rate:g}qps.json")
            if runs[-1].fields["unfinished"]:
                break
    finally:  # the rows that were measured are shown, whatever came of a later one
        if rows := [run.fields for run in runs]:
            click.echo(serve_table(rows))
            for path in plot(rows, folder, params["plot_format"]):
                click.echo(f"Saved {path}", err=True)
    _exit(params, runs)


@bench.command()
@click.argument("files", nargs=-1, required=True, type=existing_file)
@click.option("--plot-dir", type=click.Path(file_okay=False, path_type=Path), help="Draw them over their rates too.")
def compare(files: tuple[Path, ...], plot_dir: Path | None) -> None:
    """Show result FILES side by side, with ratios to the first: ours, or those of vLLM's tools."""
    stems = [file.stem for file in files]
    names = [stem if stems.count(stem) == 1 else str(file) for stem, file in zip(stems, files, strict=True)]
    results = {name: read_result(file) for name, file in zip(names, files, strict=True)}
    click.echo(side_by_side(results))
    if plot_dir:
        check_folder(plot_dir)
        for path in plot(list(results.values()), plot_dir, ["svg"]):
            click.echo(f"Saved {path}", err=True)


def _measure(test: LoadTest) -> Run:
    """Samples, sends, and prints the figures (standard output) and what to know about them (standard error)."""
    run = test.run(test.chains())
    click.echo(print_out(run.fields))
    for warning in run.warnings:
        click.echo(f"WARNING: {warning}", err=True)
    return run


def _exit(params: dict[str, Any], runs: Sequence[Run]) -> None:
    if any(run.fields["unfinished"] for run in runs):
        sys.exit(130)
    if params["fail_on_error"] and any(run.fields["failed"] or not run.fields["completed"] for run in runs):
        sys.exit(1)
