"""`fulcrum bench`: its commands that measure a running server, and `compare`."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli import bench_ladder, bench_offline
from cli import bench_options as options
from cli.bench_options import Numbers, load_test, positive
from cli.bench_prefix import prefix

if TYPE_CHECKING:
    from loadtest.report import Run
    from loadtest.serve import LoadTest

_RATES = "1,2,4,8,16,32,inf"
_OBJECTIVES = ("ttft:200", "tpot:20")
_NEEDED = ("numpy", "msgspec", "httptools", "httpx", "tqdm")


@click.group(context_settings={"show_default": True})
def bench() -> None:
    """Load tests: of this server, or of any that speaks OpenAI's API. A key is taken from OPENAI_API_KEY."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise click.ClickException(f"{missing[0]} is missing: pip install 'fulcrum-llm[bench]'")


bench.add_command(bench_offline.throughput)
bench.add_command(bench_offline.latency)
bench.add_command(prefix)
bench.add_command(bench_ladder.ladder)


@bench.command()
@options.load
@click.option(
    "--request-rate", type=options.positive_or_inf, default=math.inf, help="Requests per second; inf: all at once."
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
    from loadtest.records import LoadTestError
    from loadtest.report import check_folder, result_json, save

    try:
        if params["save_result"]:
            check_folder(params["result_dir"])
        test = load_test(params, params["request_rate"], params["goodput"]).prepared()
        run = _measure(test)
        if params["save_result"]:
            rate, limit = params["request_rate"], params["max_concurrency"]
            middle = f"{rate}qps" + (f"-concurrency{limit}" if limit else "")
            model = test.target.model.split("/")[-1]
            name = (
                f"{(params['label'] or params['backend']).replace('/', '_')}-{middle}-{model}-{run.about['date']}.json"
            )
            path = params["result_dir"] / (params["result_filename"] or name)
            save(result_json(run, detailed=params["save_detailed"]), path)
            click.echo(f"Saved {path}", err=True)
    except LoadTestError as error:
        raise click.ClickException(str(error)) from error
    _exit(params, [run])


@bench.command()
@options.load
@click.option(
    "--request-rates",
    type=Numbers(),
    callback=options.rates,
    default=_RATES,
    help="Requests per second of each row, in order.",
)
@click.option("--seconds", type=positive, help="At most as many prompts a row as its rate sends in this time.")
@click.option("--goodput", multiple=True, default=_OBJECTIVES, metavar="NAME:MS...", help="Objectives.")
@options.flush
@click.option("--vary-seed", is_flag=True, help="Add the row's number to the seed: other prompts in each row.")
@click.option("--plot-format", type=click.Choice(["svg", "png", "svg,png"]), default="svg")
def sweep(**params: Any) -> None:
    """Measure a running server at several request rates: a table, result files, plots of goodput and latency.

    All rows have the same seed: from the second on, prompts may be in the server's prefix cache, unless it is emptied
    before each row (--flush-cache) or the rows have prompts of their own (--vary-seed).
    """
    from loadtest.records import LoadTestError
    from loadtest.report import check_folder, result_json, save
    from loadtest.sweep import plot, table

    folder: Path = params["result_dir"]
    runs: list[Run] = []
    try:
        check_folder(folder)
        test = load_test(params | {"self_timed": False}, math.inf, params["goodput"]).prepared()
        try:
            for number, rate in enumerate(params["request_rates"]):
                count = params["num_prompts"]
                if params["seconds"] and not math.isinf(rate):
                    count = min(count, math.ceil(rate * params["seconds"]))
                click.echo(f"{rate:g} requests/s, {count} prompts", err=True)
                seed = (test.sampling.seed + (number if params["vary_seed"] else 0)) % 2**32
                about = dict(test.about) | {"cache_flushed": params["flush_cache"] is not None}
                row = replace(test, rate=rate, sampling=replace(test.sampling, count=count, seed=seed), about=about)
                options.flush_cache(params, test.target)
                runs.append(_measure(row))
                save(result_json(runs[-1]), folder / f"sweep-{rate:g}qps.json")
                if runs[-1].unfinished:
                    break
        finally:  # the rows that were measured are shown, whatever came of a later one
            rows = [result_json(run) for run in runs]
            if rows:
                click.echo(table(rows))
                for path in plot(rows, folder, params["plot_format"].split(",")):
                    click.echo(f"Saved {path}", err=True)
    except LoadTestError as error:
        raise click.ClickException(str(error)) from error
    _exit(params, runs)


@bench.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def compare(files: tuple[Path, ...]) -> None:
    """Show result FILES side by side, with ratios to the first: ours, or those of vLLM's tools."""
    from loadtest.compare import compare as side_by_side
    from loadtest.records import LoadTestError
    from loadtest.sweep import read_result

    stems = [file.stem for file in files]
    try:
        click.echo(
            side_by_side(
                {
                    stem if stems.count(stem) == 1 else str(file): read_result(file)
                    for stem, file in zip(stems, files, strict=True)
                }
            )
        )
    except LoadTestError as error:
        raise click.ClickException(str(error)) from error


def _measure(test: "LoadTest") -> "Run":
    """Samples, sends, and prints the figures (standard output) and what to know about them (standard error)."""
    from loadtest.report import print_out, warnings

    run = test.run(test.chains())
    click.echo(print_out(run))
    for warning in warnings(run):
        click.echo(f"WARNING: {warning}", err=True)
    return run


def _exit(params: dict[str, Any], runs: Sequence["Run"]) -> None:
    if any(run.unfinished for run in runs):
        sys.exit(130)
    if params["fail_on_error"] and any(run.result.failed or not run.result.completed for run in runs):
        sys.exit(1)
