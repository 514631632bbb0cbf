"""The options that the load tests share, named as those of `vllm bench serve`, and the records that they ask for.

Parameters have the names of the records' fields that they fill.
"""

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from cli.options import engine_tls, existing_file, together
from cli.settings import Params, engine_credentials, is_http, join_address, record
from fulcrum.v1.inference_pb2 import FlushCacheRequest
from loadtest.admin import operator
from loadtest.datasets import DATASETS, Sampling
from loadtest.metrics import LATENCIES
from loadtest.options import COUNT, POSITIVE_OR_INF, WORKERS, Listed, Number
from loadtest.records import LoadTestError, Target
from loadtest.report import check_folder
from loadtest.serve import LoadTest

_PATH = click.Path(exists=True, path_type=Path)
_NUMBER = click.IntRange(min=0)
_RATIO = Number(min=0, max=1, max_open=True)
_SHARE = Number(min=0, max=1)
_PENALTY = Number(min=-2, max=2)
_SAMPLING: dict[str, click.ParamType[Any]] = {
    "temperature": Number(min=0),
    "top_p": _SHARE,
    "top_k": click.INT,
    "min_p": _SHARE,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": Number(min=0, min_open=True),
}


def _pairs(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    if wrong := [text for text in texts if "=" not in text]:
        raise click.BadParameter(f"{wrong[0]!r} is not KEY=VALUE", ctx, param)
    return {name.strip(): value.strip() for name, _, value in (text.partition("=") for text in texts)}


def _object(ctx: click.Context, param: click.Parameter, text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise click.BadParameter(f"not a JSON object: {error}", ctx, param) from error
    if not isinstance(found, dict):
        raise click.BadParameter(f"not a JSON object: {text}", ctx, param)
    return found


def _writable(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Wrong folders are told before anything is measured."""
    if path is not None:
        try:
            check_folder(path.parent)
        except LoadTestError as error:
            raise click.BadParameter(str(error), ctx, param) from error
    return path


_pair = partial(click.option, multiple=True, callback=_pairs, metavar="KEY=VALUE")
seed = click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Of the samples and of the arrivals.")
server = together(
    click.option("--backend", type=click.Choice(["openai", "openai-chat", "grpc"]), default="openai"),
    click.option("--base-url", metavar="URL", help="Such as http://10.0.0.1:8000, instead of --host and --port."),
    click.option("--host", default="127.0.0.1"),
    click.option("--port", type=click.IntRange(1, 65535), show_default="8000; 50051 with grpc"),
    click.option("--endpoint", show_default="/v1/completions or /v1/chat/completions", help="Path of the HTTP call."),
    _pair("--header", "headers", help="Sent with each request (several may be given)."),
    click.option("--model", show_default="the server's first", help="Name that the server knows."),
)
dataset = together(
    click.option("--dataset-name", "dataset", type=click.Choice(list(DATASETS)), default="random"),
    click.option("--dataset-path", "path", type=existing_file),
    click.option("--num-prompts", "count", type=COUNT, default=1000, help="Requests."),
    seed,
    click.option("--disable-shuffle", is_flag=True, help="Keep the file's order."),
    click.option("--no-oversample", is_flag=True, help="Do not repeat samples where the file has too few."),
    click.option("--input-len", type=COUNT, help="The same as --random-input-len."),
    click.option("--output-len", type=COUNT, help="Tokens to generate, whatever the data set says."),
    click.option("--random-input-len", type=COUNT, default=1024),
    click.option("--random-output-len", type=COUNT, default=128),
    click.option("--random-range-ratio", "range_ratio", type=_RATIO, default=0.0, help="Lengths within 1 - r, 1 + r."),
    click.option("--random-prefix-len", type=_NUMBER, default=0, help="Tokens that all begin with."),
    click.option("--sharegpt-output-len", type=COUNT),
    click.option("--custom-output-len", type=click.IntRange(min=-1), default=256, help="-1: the file's output_tokens."),
    click.option("--trace-block", "block", type=COUNT, default=16, help="prefix-trace: tokens for each block of 512."),
    click.option("--prefix-repetition-prefix-len", "prefix_len", type=COUNT, default=2048, help="shared-prefix."),
    click.option("--prefix-repetition-suffix-len", "suffix_len", type=COUNT, default=128),
    click.option("--prefix-repetition-num-prefixes", "prefixes", type=COUNT, default=64),
    click.option("--prefix-repetition-output-len", "prefix_output_len", type=COUNT, default=256),
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
    click.option("--tokenizer", "tokenizer_path", type=_PATH, show_default="the server's /tokenize"),
    dataset,
    click.option("--burstiness", type=POSITIVE_OR_INF, default=1.0, help="1: Poisson; less: bursts; more: even."),
    click.option("--max-concurrency", type=COUNT, help="Most requests under way at once."),
    click.option("--ignore-eos", is_flag=True, help="Generate all tokens (random prompts always do)."),
    *(click.option(f"--{name.replace('_', '-')}", type=kind) for name, kind in _SAMPLING.items()),
    click.option("--extra-body", callback=_object, metavar="JSON", help="Further fields of the HTTP body."),
    click.option("--num-warmups", "warmups", type=_NUMBER, default=0, help="Requests before the measurement."),
    click.option("--workers", type=COUNT, default=WORKERS, show_default="a quarter of the cores, at most 4"),
    click.option("--percentile-metrics", "selected", type=Listed(click.Choice(LATENCIES)), default=",".join(LATENCIES)),
    click.option("--metric-percentiles", "percentiles", type=Listed(Number(min=0, max=100)), default="50,95,99"),
    click.option("--disable-tqdm", is_flag=True, help="No progress bar."),
    click.option("--label", help="Name of this run in the result file."),
    _pair("--metadata", "about", help="Kept in the result file (several)."),
    click.option("--result-dir", type=click.Path(file_okay=False, path_type=Path), default=Path()),
    click.option("--fail-on-error", is_flag=True, help="Exit status 1 when a request failed."),
    # `--goodput a:1 b:2`: what follows the option's first value.
    click.argument("further_goodput", nargs=-1, metavar=""),
)


def flush_cache(params: Params, server: Target) -> None:
    """Empties the server's prefix cache, if --flush-cache was given. Raises: LoadTestError."""
    if params["flush_cache"] is not None:
        tls = (engine_credentials(params), params["engine_tls_name"])
        with operator(params["flush_cache"], server, *tls) as (service, given):
            click.echo(f"Flushed {service.FlushCache(FlushCacheRequest(), **given).pages_freed} pages", err=True)


def load_test(params: Params) -> LoadTest:
    """The load test that the options ask for. Raises: click.UsageError, LoadTestError."""
    return record(
        LoadTest,
        params,
        target=target(params),
        sampling=sampling(params),
        objectives=_objectives([*params["goodput"], *params["further_goodput"]]),
        progress=not params["disable_tqdm"],
    )


def sampling(params: Params) -> Sampling:
    """What the options of the data set ask for."""
    name, output_len = params["dataset"], params["output_len"]
    if output_len is None and name == "sharegpt":
        output_len = params["sharegpt_output_len"]
    if output_len is None and name == "custom" and params["custom_output_len"] > 0:
        output_len = params["custom_output_len"]
    return record(
        Sampling,
        params,
        output_len=output_len,
        shuffle=not params["disable_shuffle"],
        oversample=not params["no_oversample"],
        random_input_len=params["input_len"] or params["random_input_len"],
        random_output_len=params["output_len"] or params["random_output_len"],
    )


def target(params: Params) -> Target:
    """The server that the options name, and how it is asked. Raises: click.UsageError."""
    backend, endpoint = params["backend"], params["endpoint"] or ""
    port = params["port"] or (50051 if backend == "grpc" else 8000)
    url = params["base_url"] or join_address(params["host"], port)
    if "://" not in url:
        url = f"http://{url}"
    if not is_http(url):
        raise click.BadParameter(f"{url!r} is not http(s)://HOST[:PORT]", param_hint="--base-url")
    headers = {name.lower(): value for name, value in params["headers"].items()}
    if (key := os.environ.get("OPENAI_API_KEY")) and "authorization" not in headers:
        headers["authorization"] = f"Bearer {key}"
    if wrong := [name for name, value in headers.items() if not _plain(name + value)]:
        raise click.BadParameter(f"{wrong[0]!r} has more than printable ASCII", param_hint="--header")
    if not _plain(endpoint):
        raise click.BadParameter("a path is printable ASCII", param_hint="--endpoint")
    return record(
        Target,
        params,
        url=url.rstrip("/"),
        endpoint=endpoint or ("/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"),
        model=params["model"] or "",
        headers=headers,
        sampling={name: params[name] for name in _SAMPLING if params.get(name) is not None},
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
            found[name] = Number(min=0).convert(limit, None, None)
        except click.BadParameter:
            name = ""
        if name not in ("ttft", "tpot", "e2el"):
            raise click.UsageError(f"{text!r} is no objective: ttft:MS, tpot:MS or e2el:MS (after --goodput)")
    return found
