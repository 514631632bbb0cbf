"""`fulcrum bench`: its commands and options, which are named as those of `vllm bench serve`."""

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click

if TYPE_CHECKING:
    from loadtest.report import Run
    from loadtest.serve import LoadTest

_Command = TypeVar("_Command", bound=Callable[..., Any])
_RATES = "1,2,4,8,16,32,inf"
_OBJECTIVES = ("ttft:200", "tpot:20")
_NEEDED = ("numpy", "msgspec", "httptools", "httpx", "tqdm")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class _Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers between commas; "inf" is one."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(float(each) for each in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers", param, ctx)


class _Ratio(click.ParamType[tuple[float, float]]):
    """One number for input and output, or a JSON object with both."""

    name = "ratio"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        if isinstance(value, tuple):
            return value
        try:
            given = json.loads(str(value))
            pair = (float(given["input"]), float(given["output"])) if isinstance(given, dict) else (float(given),) * 2
        except (ValueError, KeyError, TypeError):
            self.fail(f'{value!r} is neither a number nor {{"input": ..., "output": ...}}', param, ctx)
        if not all(0 <= each < 1 for each in pair):
            self.fail(f"{value!r} must be at least 0 and below 1", param, ctx)
        return pair


_count = click.IntRange(min=1)
_length = click.IntRange(min=1)
_positive = click.FloatRange(min=0, min_open=True)
_options = (
    click.option("--backend", type=click.Choice(["openai", "openai-chat", "grpc"]), default="openai"),
    click.option("--base-url", metavar="URL", help="Such as http://10.0.0.1:8000, instead of --host and --port."),
    click.option("--host", default="127.0.0.1"),
    click.option("--port", type=click.IntRange(1, 65535), show_default="8000; 50051 with grpc"),
    click.option("--endpoint", show_default="/v1/completions or /v1/chat/completions", help="Path of the HTTP call."),
    click.option("--header", multiple=True, metavar="KEY=VALUE", help="Sent with each request (several may be given)."),
    click.option("--model", show_default="the server's first", help="Name that the server knows."),
    click.option("--tokenizer", type=click.Path(exists=True, path_type=Path), show_default="the server's /tokenize"),
    click.option(
        "--dataset-name",
        type=click.Choice(["sharegpt", "random", "custom", "prefix-trace", "multi-turn", "shared-prefix"]),
        default="random",
    ),
    click.option("--dataset-path", type=click.Path(exists=True, dir_okay=False, path_type=Path)),
    click.option("--num-prompts", type=_count, default=1000, help="Requests."),
    click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the samples and of the arrivals."),
    click.option("--disable-shuffle", is_flag=True, help="Keep the file's order."),
    click.option("--no-oversample", is_flag=True, help="Do not repeat samples where the file has too few."),
    click.option("--input-len", type=_length, help="The same as --random-input-len."),
    click.option("--output-len", type=_length, help="Tokens to generate, whatever the data set says."),
    click.option("--random-input-len", type=_length, default=1024),
    click.option("--random-output-len", type=_length, default=128),
    click.option("--random-range-ratio", type=_Ratio(), default="0.0", help="Lengths within (1 - r, 1 + r)."),
    click.option("--random-prefix-len", type=click.IntRange(min=0), default=0, help="Tokens that all begin with."),
    click.option("--sharegpt-output-len", type=_length),
    click.option("--custom-output-len", type=click.IntRange(min=-1), default=256, help="-1: the file's output_tokens."),
    click.option("--trace-block", type=_length, default=16, help="prefix-trace: tokens for each block of 512."),
    click.option("--prefix-repetition-prefix-len", type=_length, default=2048, help="shared-prefix."),
    click.option("--prefix-repetition-suffix-len", type=_length, default=128),
    click.option("--prefix-repetition-num-prefixes", type=_length, default=64),
    click.option("--prefix-repetition-output-len", type=_length, default=256),
    click.option("--burstiness", type=_positive, default=1.0, help="1: Poisson; less: bursts; more: even."),
    click.option("--max-concurrency", type=_count, help="Most requests under way at once."),
    click.option("--ignore-eos", is_flag=True, help="Generate all tokens (random prompts always do)."),
    click.option("--temperature", type=float),
    click.option("--top-p", type=float),
    click.option("--top-k", type=int),
    click.option("--min-p", type=float),
    click.option("--presence-penalty", type=float),
    click.option("--frequency-penalty", type=float),
    click.option("--repetition-penalty", type=float),
    click.option("--extra-body", metavar="JSON", help="Further fields of the HTTP body."),
    click.option("--num-warmups", type=click.IntRange(min=0), default=0, help="Requests before the measurement."),
    click.option("--workers", type=_count, show_default="a quarter of the cores, at most 4", help="Client processes."),
    click.option("--percentile-metrics", default="ttft,tpot,itl,e2el", help="Latencies to show."),
    click.option("--metric-percentiles", type=_Numbers(), default="50,95,99"),
    click.option("--disable-tqdm", is_flag=True, help="No progress bar."),
    click.option("--label", help="Name of this run in the result file."),
    click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="Kept in the result file (several)."),
    click.option("--result-dir", type=click.Path(file_okay=False, path_type=Path), default=Path()),
    click.option("--fail-on-error", is_flag=True, help="Exit status 1 when a request failed."),
    # `--goodput a:1 b:2`: what follows the option's first value.
    click.argument("further_goodput", nargs=-1, metavar=""),
)


def _load_options(command: _Command) -> _Command:
    return reduce(lambda inner, outer: outer(inner), reversed(_options), command)


@click.group(context_settings={"show_default": True})
def bench() -> None:
    """Load tests: of this server, or of any that speaks OpenAI's API. A key is taken from OPENAI_API_KEY."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise click.ClickException(f"{missing[0]} is missing: pip install 'fulcrum-llm[bench]'")


@bench.command()
@_load_options
@click.option("--request-rate", type=_positive, default=math.inf, help="Requests per second; inf: all at once.")
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
    from loadtest.report import result_json, save

    try:
        test = _load_test(params, params["request_rate"], params["goodput"]).prepared()
        run = _measure(test)
        if params["save_result"]:
            rate, limit = params["request_rate"], params["max_concurrency"]
            middle = f"{rate}qps" + (f"-concurrency{limit}" if limit else "")
            model = test.target.model.split("/")[-1]
            name = f"{params['label'] or params['backend']}-{middle}-{model}-{run.about['date']}.json"
            path = params["result_dir"] / (params["result_filename"] or name)
            save(result_json(run, detailed=params["save_detailed"]), path)
            click.echo(f"Saved {path}", err=True)
    except LoadTestError as error:
        raise click.ClickException(str(error)) from error
    _exit(params, [run])


@bench.command()
@_load_options
@click.option("--request-rates", type=_Numbers(), default=_RATES, help="Requests per second of each row, in order.")
@click.option("--seconds", type=_positive, help="At most as many prompts a row as its rate sends in this time.")
@click.option("--goodput", multiple=True, default=_OBJECTIVES, metavar="NAME:MS...", help="Objectives.")
@click.option("--plot-format", type=click.Choice(["svg", "png", "svg,png"]), default="svg")
def sweep(**params: Any) -> None:
    """Measure a running server at several request rates: a table, result files, plots of goodput and latency.

    All rows have the same seed: from the second on, prompts may be in the server's prefix cache.
    """
    from loadtest.records import LoadTestError
    from loadtest.report import result_json, save
    from loadtest.sweep import plot, table

    folder: Path = params["result_dir"]
    runs: list[Run] = []
    try:
        test = _load_test(params | {"self_timed": False}, math.inf, params["goodput"]).prepared()
        for rate in params["request_rates"]:
            if not rate > 0:
                raise click.UsageError("--request-rates must be above 0")
            count = params["num_prompts"]
            if params["seconds"] and not math.isinf(rate):
                count = min(count, math.ceil(rate * params["seconds"]))
            click.echo(f"{rate:g} requests/s, {count} prompts", err=True)
            row = replace(test, rate=rate, sampling=replace(test.sampling, count=count))
            runs.append(_measure(row))
            save(result_json(runs[-1]), folder / f"sweep-{rate:g}qps.json")
            if runs[-1].unfinished:
                break
        rows = [result_json(run) for run in runs]
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


def _load_test(params: dict[str, Any], rate: float, goodput: Sequence[str]) -> "LoadTest":
    """The load test that the options ask for. Raises: click.UsageError, LoadTestError."""
    from loadtest.datasets import Sampling
    from loadtest.serve import LoadTest

    if not all(0 <= each <= 100 for each in params["metric_percentiles"]):
        raise click.BadParameter("percentiles are within 0 to 100", param_hint="--metric-percentiles")
    self_timed = params["self_timed"]
    if self_timed is None:
        self_timed = params["dataset_name"] == "prefix-trace" and math.isinf(rate)
    output_len = params["output_len"]
    if output_len is None and params["dataset_name"] == "sharegpt":
        output_len = params["sharegpt_output_len"]
    if output_len is None and params["dataset_name"] == "custom" and params["custom_output_len"] > 0:
        output_len = params["custom_output_len"]
    sampling = Sampling(
        path=params["dataset_path"],
        count=params["num_prompts"],
        seed=params["seed"],
        output_len=output_len,
        shuffle=not params["disable_shuffle"],
        oversample=not params["no_oversample"],
        random_input_len=params["input_len"] or params["random_input_len"],
        random_output_len=params["output_len"] or params["random_output_len"],
        range_ratio=params["random_range_ratio"],
        random_prefix_len=params["random_prefix_len"],
        block=params["trace_block"],
        prefixes=params["prefix_repetition_num_prefixes"],
        prefix_len=params["prefix_repetition_prefix_len"],
        suffix_len=params["prefix_repetition_suffix_len"],
        prefix_output_len=params["prefix_repetition_output_len"],
    )
    return LoadTest(
        target=_target(params),
        dataset=params["dataset_name"],
        sampling=sampling,
        rate=rate,
        burstiness=params["burstiness"],
        max_concurrency=params["max_concurrency"],
        warmups=params["num_warmups"],
        workers=params["workers"] or max(1, min(4, (os.cpu_count() or 1) // 4)),
        self_timed=self_timed,
        tokenizer_path=params["tokenizer"],
        objectives=_objectives([*goodput, *params["further_goodput"]]),
        percentiles=params["metric_percentiles"],
        selected=_selected(params["percentile_metrics"]),
        label=params["label"],
        about=_pairs(params["metadata"], "--metadata"),
        progress=not params["disable_tqdm"],
    )


def _target(params: dict[str, Any]) -> Any:
    from loadtest.records import Target

    backend = params["backend"]
    port = params["port"] or (50051 if backend == "grpc" else 8000)
    url = params["base_url"] or f"http://{params['host']}:{port}"
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise click.BadParameter(f"{url!r} is not http(s)://HOST[:PORT]", param_hint="--base-url")
    headers = {name.lower(): value for name, value in _pairs(params["header"], "--header").items()}
    if (key := os.environ.get("OPENAI_API_KEY")) and "authorization" not in headers:
        headers["authorization"] = f"Bearer {key}"
    try:
        extra = dict(json.loads(params["extra_body"] or "{}"))
    except (ValueError, TypeError) as error:
        raise click.BadParameter(f"not a JSON object: {error}", param_hint="--extra-body") from error
    return Target(
        backend=backend,
        url=url.rstrip("/"),
        endpoint=params["endpoint"] or ("/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"),
        model=params["model"] or "",
        headers=headers,
        sampling={name: params[name] for name in _SAMPLING if params[name] is not None},
        ignore_eos=params["ignore_eos"],
        extra_body=extra,
    )


def _objectives(texts: Sequence[str]) -> dict[str, float]:
    """Milliseconds by name, out of NAME:MS."""
    found = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            found[name] = float(limit)
        except ValueError:
            found[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or found[name] < 0:
            raise click.UsageError(f"{text!r} is no objective: ttft:MS, tpot:MS or e2el:MS (after --goodput)")
    return found


def _selected(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in ("ttft", "tpot", "itl", "e2el")]:
        raise click.BadParameter(f"{unknown[0]!r} is none of ttft, tpot, itl, e2el", param_hint="--percentile-metrics")
    return names


def _pairs(texts: Sequence[str], hint: str) -> dict[str, str]:
    if wrong := [text for text in texts if "=" not in text]:
        raise click.BadParameter(f"{wrong[0]!r} is not KEY=VALUE", param_hint=hint)
    return {name.strip(): value.strip() for name, _, value in (text.partition("=") for text in texts)}
