"""The options that the load tests share, named as those of `vllm bench serve`, and the records that they ask for."""

import json
import math
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from cli.options import engine_tls, together

if TYPE_CHECKING:
    from loadtest.datasets import Sampling
    from loadtest.records import Target
    from loadtest.serve import LoadTest

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class Number(click.FloatRange):
    """A number: never NaN, and infinite only where that has a meaning."""

    def __init__(self, *, infinite: bool = False, **bounds: Any) -> None:
        super().__init__(**bounds)
        self._infinite = infinite

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Fails, naming the option, for what is no such number."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number) or (math.isinf(number) and not self._infinite):
            self.fail(f"{value!r} is not a {'' if self._infinite else 'finite '}number", param, ctx)
        return number


class Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers between commas; "inf" is one."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Fails, naming the option, for another text."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(float(each) for each in str(value).split(","))
        except ValueError:
            numbers = (math.nan,)
        if any(map(math.isnan, numbers)):
            self.fail(f"{value!r} is not a list of numbers", param, ctx)
        return numbers


def rates(ctx: click.Context, param: click.Parameter, value: tuple[float, ...]) -> tuple[float, ...]:
    """The callback of an option of request rates: each above 0, or inf, and none twice."""
    if not all(rate > 0 for rate in value) or len({f"{rate:g}" for rate in value}) < len(value):
        raise click.BadParameter("rates are above 0, and each is there once", ctx, param)
    return value


def _writable(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """The callback of an option that names a result file: wrong folders are told before anything is measured."""
    if value is not None:
        from loadtest.records import LoadTestError
        from loadtest.report import check_folder

        try:
            check_folder(value.parent)
        except LoadTestError as error:
            raise click.BadParameter(str(error), ctx, param) from error
    return value


class Ratio(click.ParamType[tuple[float, float]]):
    """One number for input and output, or a JSON object with both."""

    name = "ratio"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """Fails, naming the option, for another text."""
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


count = click.IntRange(min=1)
length = click.IntRange(min=1)
seed = click.IntRange(0, 2**32 - 1)
finite = Number()
positive = Number(min=0, min_open=True)
positive_or_inf = Number(min=0, min_open=True, infinite=True)
server = together(
    click.option("--backend", type=click.Choice(["openai", "openai-chat", "grpc"]), default="openai"),
    click.option("--base-url", metavar="URL", help="Such as http://10.0.0.1:8000, instead of --host and --port."),
    click.option("--host", default="127.0.0.1"),
    click.option("--port", type=click.IntRange(1, 65535), show_default="8000; 50051 with grpc"),
    click.option("--endpoint", show_default="/v1/completions or /v1/chat/completions", help="Path of the HTTP call."),
    click.option("--header", multiple=True, metavar="KEY=VALUE", help="Sent with each request (several may be given)."),
    click.option("--model", show_default="the server's first", help="Name that the server knows."),
)
dataset = together(
    click.option(
        "--dataset-name",
        type=click.Choice(["sharegpt", "random", "custom", "prefix-trace", "multi-turn", "shared-prefix"]),
        default="random",
    ),
    click.option("--dataset-path", type=click.Path(exists=True, dir_okay=False, path_type=Path)),
    click.option("--num-prompts", type=count, default=1000, help="Requests."),
    click.option("--seed", type=seed, default=0, help="Of the samples and of the arrivals."),
    click.option("--disable-shuffle", is_flag=True, help="Keep the file's order."),
    click.option("--no-oversample", is_flag=True, help="Do not repeat samples where the file has too few."),
    click.option("--input-len", type=length, help="The same as --random-input-len."),
    click.option("--output-len", type=length, help="Tokens to generate, whatever the data set says."),
    click.option("--random-input-len", type=length, default=1024),
    click.option("--random-output-len", type=length, default=128),
    click.option("--random-range-ratio", type=Ratio(), default="0.0", help="Lengths within (1 - r, 1 + r)."),
    click.option("--random-prefix-len", type=click.IntRange(min=0), default=0, help="Tokens that all begin with."),
    click.option("--sharegpt-output-len", type=length),
    click.option("--custom-output-len", type=click.IntRange(min=-1), default=256, help="-1: the file's output_tokens."),
    click.option("--trace-block", type=length, default=16, help="prefix-trace: tokens for each block of 512."),
    click.option("--prefix-repetition-prefix-len", type=length, default=2048, help="shared-prefix."),
    click.option("--prefix-repetition-suffix-len", type=length, default=128),
    click.option("--prefix-repetition-num-prefixes", type=length, default=64),
    click.option("--prefix-repetition-output-len", type=length, default=256),
)
flush = together(
    click.option(
        "--flush-cache",
        metavar="ADDRESS",
        help="Empty the prefix cache first, at Fulcrum's HOST:PORT or unix:/PATH of admin.",
    ),
    engine_tls,
)
output_json = click.option(
    "--output-json",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_writable,
    help="Write the figures, and how they were made.",
)
load = together(
    server,
    click.option("--tokenizer", type=click.Path(exists=True, path_type=Path), show_default="the server's /tokenize"),
    dataset,
    click.option("--burstiness", type=positive_or_inf, default=1.0, help="1: Poisson; less: bursts; more: even."),
    click.option("--max-concurrency", type=count, help="Most requests under way at once."),
    click.option("--ignore-eos", is_flag=True, help="Generate all tokens (random prompts always do)."),
    click.option("--temperature", type=finite),
    click.option("--top-p", type=finite),
    click.option("--top-k", type=int),
    click.option("--min-p", type=finite),
    click.option("--presence-penalty", type=finite),
    click.option("--frequency-penalty", type=finite),
    click.option("--repetition-penalty", type=finite),
    click.option("--extra-body", metavar="JSON", help="Further fields of the HTTP body."),
    click.option("--num-warmups", type=click.IntRange(min=0), default=0, help="Requests before the measurement."),
    click.option("--workers", type=count, show_default="a quarter of the cores, at most 4", help="Client processes."),
    click.option("--percentile-metrics", default="ttft,tpot,itl,e2el", help="Latencies to show."),
    click.option("--metric-percentiles", type=Numbers(), default="50,95,99"),
    click.option("--disable-tqdm", is_flag=True, help="No progress bar."),
    click.option("--label", help="Name of this run in the result file."),
    click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="Kept in the result file (several)."),
    click.option("--result-dir", type=click.Path(file_okay=False, path_type=Path), default=Path()),
    click.option("--fail-on-error", is_flag=True, help="Exit status 1 when a request failed."),
    # `--goodput a:1 b:2`: what follows the option's first value.
    click.argument("further_goodput", nargs=-1, metavar=""),
)


def write_json(path: Path | None, fields: dict[str, Any]) -> None:
    """Writes figures with date, machine, commit and command beside them, if a path is given. Raises: LoadTestError."""
    if path is not None:
        from loadtest.environment import environment
        from loadtest.report import save

        save({"date": datetime.now().strftime("%Y%m%d-%H%M%S")} | fields | environment(), path)
        click.echo(f"Saved {path}", err=True)


def flush_cache(params: dict[str, Any], server: "Target") -> None:
    """Empties the server's prefix cache, if --flush-cache was given. Raises: LoadTestError."""
    if params["flush_cache"] is not None:
        from cli.settings import engine_credentials
        from loadtest.admin import flush_cache

        pages = flush_cache(params["flush_cache"], server, engine_credentials(params), params["engine_tls_name"])
        click.echo(f"Flushed {pages} pages", err=True)


def load_test(params: dict[str, Any], rate: float, goodput: Sequence[str]) -> "LoadTest":
    """The load test that the options ask for. Raises: click.UsageError, LoadTestError."""
    from loadtest.serve import LoadTest

    if not all(0 <= each <= 100 for each in params["metric_percentiles"]):
        raise click.BadParameter("percentiles are within 0 to 100", param_hint="--metric-percentiles")
    self_timed = params["self_timed"]
    if self_timed is None:
        self_timed = params["dataset_name"] == "prefix-trace" and math.isinf(rate)
    return LoadTest(
        target=target(params),
        dataset=params["dataset_name"],
        sampling=sampling(params),
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


def sampling(params: dict[str, Any]) -> "Sampling":
    """What the options of the data set ask for."""
    from loadtest.datasets import Sampling

    output_len = params["output_len"]
    if output_len is None and params["dataset_name"] == "sharegpt":
        output_len = params["sharegpt_output_len"]
    if output_len is None and params["dataset_name"] == "custom" and params["custom_output_len"] > 0:
        output_len = params["custom_output_len"]
    return Sampling(
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


def target(params: dict[str, Any]) -> "Target":
    """The server that the options name, and how it is asked. Raises: click.UsageError."""
    from loadtest.records import Target

    backend = params["backend"]
    port = params["port"] or (50051 if backend == "grpc" else 8000)
    url = params["base_url"] or f"http://{params['host']}:{port}"
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and _plain(url)
    except ValueError:
        known = False
    if not known:
        raise click.BadParameter(f"{url!r} is not http(s)://HOST[:PORT]", param_hint="--base-url")
    headers = {name.lower(): value for name, value in _pairs(params["header"], "--header").items()}
    if (key := os.environ.get("OPENAI_API_KEY")) and "authorization" not in headers:
        headers["authorization"] = f"Bearer {key}"
    if wrong := [name for name, value in headers.items() if not _plain(name + value)]:
        raise click.BadParameter(f"{wrong[0]!r} has more than printable ASCII", param_hint="--header")
    if not _plain(params["endpoint"] or ""):
        raise click.BadParameter("a path is printable ASCII", param_hint="--endpoint")
    try:
        extra = dict(json.loads(params.get("extra_body") or "{}"))
    except (ValueError, TypeError) as error:
        raise click.BadParameter(f"not a JSON object: {error}", param_hint="--extra-body") from error
    return Target(
        backend=backend,
        url=url.rstrip("/"),
        endpoint=params["endpoint"] or ("/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"),
        model=params["model"] or "",
        headers=headers,
        sampling={name: params[name] for name in _SAMPLING if params.get(name) is not None},
        ignore_eos=params.get("ignore_eos", False),
        extra_body=extra,
    )


def _plain(text: str) -> bool:
    """Whether it can stand in the head of a request."""
    return text.isascii() and text.isprintable()


def _objectives(texts: Sequence[str]) -> dict[str, float]:
    """Milliseconds by name, out of NAME:MS."""
    found = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            found[name] = float(limit)
        except ValueError:
            found[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not 0 <= found[name] < math.inf:
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
