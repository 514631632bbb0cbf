"""The options that several commands share. Every one can also be given by its FULCRUM_… variable.

Knows no room's settings: values are checked where the rooms' own records are made.
"""

import inspect
import math
import re
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click

from engine.config import EngineConfig
from loadtest.options import POSITIVE
from service.parsers.registry import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS
from telemetry.logs import FORMATS

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Command], Command]

_UNITS = {"": 1, "%": 0.01, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class Budget(click.ParamType[int | float]):
    """Bytes ("2GiB", "1500000000") as an int, or a fraction ("0.9", "90%") as a float in (0, 1]."""

    name = "bytes|fraction"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        """Fails, naming the option, where the text is neither."""
        if isinstance(value, int | float):
            return value
        # With an exponent, as a child is given 0.001%.
        found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?) *(%|[kmg]?i?b|)", str(value).strip().lower())
        if found is None or found[2] not in _UNITS:
            self.fail(f"{value!r} is neither bytes (2GiB, 500MB) nor a fraction (0.9, 90%)", param, ctx)
        number = float(found[1]) * _UNITS[found[2]]
        if not 0 < number < math.inf or (found[2] == "%" and number > 1):
            self.fail(f"{value!r} must be above 0, and no more than there is", param, ctx)
        if found[2] in ("", "%") and number <= 1:
            return number
        if number < 2 or (not found[2] and not number.is_integer()):  # to a child 1 is all that there is
            self.fail(f"{value!r} is no number of bytes: write 1.5GiB, for one", param, ctx)
        return int(number)


class Window(click.ParamType[tuple[int, int]]):
    """MIN,MAX, or one number for both."""

    name = "min,max"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Fails, naming the option, for another text."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = [int(each) for each in str(value).strip("()").split(",")]  # a child is given (2, 4)
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2):
            self.fail(f"{value!r} is not of the form MIN,MAX", param, ctx)
        return numbers[0], numbers[-1]


def option(flag: str, help: str, *names: str, **settings: Any) -> Decorator[Any]:
    """A click option that FULCRUM_FLAG also sets (several values: separated by blanks) and whose help says so."""
    variable = "FULCRUM_" + flag.partition("/")[0].removeprefix("--").replace("-", "_").upper()
    usual: dict[str, Any] = {"help": help, "envvar": variable, "show_envvar": True, "show_default": True}
    return click.option(flag, *names, **usual | settings)


def several(flag: str, help: str, *aliases: str, **settings: Any) -> Decorator[Any]:
    """An option that may be given several times; the parameter is named in the plural."""
    return option(flag, help, *aliases, f"{flag.removeprefix('--').replace('-', '_')}s", multiple=True, **settings)


def switch(flag: str, help: str, *, default: bool = False) -> Decorator[Any]:
    """An option --FLAG that --no-FLAG turns off."""
    return option(f"{flag}/--no-{flag.removeprefix('--')}", help, default=default)


def together(*decorators: Decorator[Any]) -> Decorator[Any]:
    """One decorator out of several; the help lists their options in this order."""
    return lambda command: reduce(lambda inner, outer: outer(inner), reversed(decorators), command)


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}

_COUNT = click.IntRange(min=1)
existing_file = click.Path(exists=True, dir_okay=False, path_type=Path)
port = click.IntRange(0, 65535)

model = click.argument("model", required=False, envvar="FULCRUM_MODEL")
log_levels = click.Choice(["debug", "info", "warning", "error"])
restarts = option(
    "--restarts",
    "Start a process that died again, until it has died so often within a minute of its start.",
    default=5,
    type=click.IntRange(min=0),
)
# Of every server. Keys are never passed on in a command line, which other users of the machine can read.
server = together(
    option("--host", "Address to listen on. Anything but loopback needs an API key.", default="127.0.0.1"),
    several("--api-key", "Key that callers must bring (several may be given). Prefer the variable."),
    option("--api-key-file", "File of keys, hashed and by tenants; see `fulcrum key`.", type=existing_file),
    option("--request-timeout", "Seconds after which a request is ended.", type=POSITIVE),
    option("--grace", "Seconds that running requests get when it ends.", default=30.0, type=click.FloatRange(min=0)),
    restarts,
    option("--otlp-endpoint", "OpenTelemetry collector (OTLP over HTTP) for traces.", metavar="URL"),
    option("--log-level", "Least level logged.", default="info", type=log_levels),
    option("--log-format", "json: an object a line.", default="text", type=click.Choice(FORMATS)),
)
grpc_server = together(
    option("--grpc-port", "Port of the gRPC API (0: any free one).", default=50051, type=port),
    several("--gateway-key", "Key of a gateway, which may speak for any tenant (several may be given)."),
    option("--tls-cert", "PEM certificate (chain) of the engine: its TCP ports speak TLS.", type=existing_file),
    option("--tls-key", "PEM key of --tls-cert, without a passphrase.", type=existing_file),
    option("--tls-client-ca", "PEM authorities: clients must have a certificate of theirs.", type=existing_file),
)
workers = option(
    "--workers",
    "Gateway processes that share the HTTP port.",
    type=_COUNT,
    show_default="1; of serve on CUDA 6 of 16 cores, fewer in proportion",
)
http_server = together(
    option("--port", "Port of the OpenAI API (0: any free one).", default=8000, type=port),
    option("--https-cert", "PEM certificate (chain) of the gateway, which then serves HTTPS.", type=existing_file),
    option("--https-key", "PEM key of --https-cert, without a passphrase.", type=existing_file),
    option("--https-client-ca", "PEM authorities: clients must have a certificate of theirs.", type=existing_file),
    workers,
    several("--cors-origin", "Origin that browsers may call from (several may be given; * is any)."),
    switch("--access-log", "Log a line for each HTTP request."),
)
engine_tls = together(
    option("--engine-ca", "PEM authorities of engines that speak TLS.", type=existing_file),
    option("--engine-cert", "PEM certificate to show to engines that ask for one.", type=existing_file),
    option("--engine-cert-key", "PEM key of --engine-cert, without a passphrase.", type=existing_file),
    option("--engine-tls-name", "Name in the engines' certificate, where it is not their host's."),
)

revision = option("--revision", "Branch, tag or commit of a hub model.")
tokenizer = option(
    "--tokenizer", "Folder or file, instead of the model's.", type=click.Path(exists=True, path_type=Path)
)
model_files = together(
    revision,
    tokenizer,
    option("--chat-template", "Jinja file, instead of the model's chat template.", type=existing_file),
)

_ENGINE = inspect.signature(EngineConfig).parameters


def setting(name: str, help: str, **settings: Any) -> Decorator[Any]:
    """The option of a field of EngineConfig: its default, its choices and whether it is a switch are the field's."""
    flag, kind, default = f"--{name.replace('_', '-')}", _ENGINE[name].annotation, _ENGINE[name].default
    if kind is bool:
        return switch(flag, help, default=default)
    if get_origin(kind) is Literal:
        settings["type"] = click.Choice(get_args(kind))
    return option(flag, help, **{"default": default} | settings)


engine_settings = together(
    setting("load_format", "dummy: seeded random weights."),
    setting("dtype", "auto: bfloat16 where the device computes it natively, else float32."),
    setting("device", "cpu, cuda, cuda:1, ... auto: cuda where there is one."),
    setting(
        "memory_budget",
        "Bytes (2GiB) or a fraction (0.9): on CUDA for everything, on the CPU for the KV pool (2GiB if unset).",
        type=Budget(),
    ),
    setting("max_model_len", "Most tokens of prompt and completion.", type=int, show_default="the model's"),
    setting("page_size", "Tokens in a page of the KV pool: a power of two."),
    setting("max_num_seqs", "Most sequences in one step.", type=int, show_default="256; 1024 on CUDA"),
    setting("max_num_batched_tokens", "Token budget of one step.", type=int, show_default="512; 1152 on CUDA"),
    setting("scheduler", "static: the naive baseline, kept to measure against."),
    setting("prefix_cache", "Share the pages of equal prefixes."),
    setting("chunked_prefill", "Compute long prompts beside decodes, in pieces."),
    setting(
        "admission", "Who waits shortest: the first come, or the one with the longest cached prefix (within bounds)."
    ),
    setting("max_queue_requests", "Requests that may wait; more are refused."),
    setting("max_queue_tokens", "Prompt tokens that may wait; more are refused."),
    setting(
        "reserve_full_length",
        "Give a sequence the pages of its prompt and max_tokens at once; kept to measure against.",
    ),
    setting(
        "speculative",
        "ngram: guess tokens from what stood before and verify several in one step; the text stays the same.",
    ),
    setting("speculative_length", "Most tokens guessed for a sequence in a step."),
    setting("speculative_window", "Shortest and longest run looked for, in tokens.", type=Window(), show_default="2,4"),
    setting("look_ahead", "Requests that do not fit and may be passed by; 0: first come."),
    setting("overlap", "CUDA: launch a step before the last one is read back."),
    setting("cuda_graphs", "CUDA: replay recorded steps."),
    setting("attention", "reference: plain torch on CUDA too, kept to measure against."),
    several("--logits-processor", "Applied to the logits, in order.", "--logits-processors", metavar="PKG.MOD:CLASS"),
    setting(
        "step_timeout",
        "Seconds that a step may take before the core says where it hangs, and is started again (0: any time).",
    ),
    setting("trace_requests", "Keep the timelines of so many requests, for fulcrum trace."),
    setting("threads", "Torch threads on the CPU.", type=int, show_default="the cores at hand"),
)

service_settings = together(
    several("--served-model-name", "What requests may call the model; the first is the principal one."),
    option(
        "--tool-parser",
        "How the model writes tool calls. auto: its chat template tells; none: they stay in the text.",
        default=AUTO,
        type=click.Choice([AUTO, NONE, *TOOL_PARSERS]),
    ),
    option(
        "--reasoning-parser",
        "How the model writes what it thinks before it answers. auto and none: as above.",
        default=AUTO,
        type=click.Choice([AUTO, NONE, *REASONING_PARSERS]),
    ),
    option(
        "--admin-address",
        "HOST:PORT (needs a key with admin) or unix:/PATH.",
        show_default="a Unix socket of the user's own",
    ),
    option("--metrics-port", "Serves the engine's Prometheus metrics here.", type=port, show_default="not served"),
    option("--metrics-host", "Address of --metrics-port, where nobody is asked for a key.", default="127.0.0.1"),
    option(
        "--grammar-timeout", "Seconds that compiling a schema, regex or grammar may take.", default=10.0, type=POSITIVE
    ),
    option("--max-priority", "Highest of callers whose key does not say.", type=int, show_default="any; 0 with keys"),
    switch("--log-requests", "Log each accepted request, prompt and all (else no log holds any text)."),
    switch("--share-prefixes", "Share cached prefixes between tenants too, where a request has no salt."),
    option(
        "--service-workers",
        "Processes that share the gRPC port.",
        type=_COUNT,
        show_default="1; on CUDA 5 of 16 cores, fewer in proportion",
    ),
)

batch = together(
    option("--base-url", "A running server to ask (http://HOST:PORT/v1), instead of one's own.", metavar="URL"),
    option("--api-key", "Key that the server of --base-url wants (of several, the first)."),
    option(
        "--max-concurrency",
        "Requests that run together.",
        type=_COUNT,
        show_default="--max-num-seqs; 64 with --base-url",
    ),
    option(
        "--request-timeout",
        "Seconds after which a request is ended; its row is an error then.",
        default=86400.0,
        type=POSITIVE,
    ),
    switch("--fail-on-error", "Exit status 1 if a row is an error."),
    option("--log-level", "Least level logged, of its own server.", default="warning", type=log_levels),
    switch("--progress", "Draw a progress bar where standard error is a terminal.", default=True),
)

# For commands that answer in the terminal.
sampling = together(
    option("--system", "System prompt.", metavar="TEXT"),
    option(
        "--max-tokens",
        "Most tokens to generate.",
        type=click.IntRange(1, 2**32 - 1),
        show_default="what the window holds",
    ),
    option("--temperature", "0 is greedy.", type=float, show_default="the model's"),
    option("--top-p", "Keep the likeliest tokens up to this probability.", type=float, show_default="the model's"),
    option(
        "--top-k",
        "Keep so many of the likeliest tokens.",
        type=click.IntRange(0, 2**32 - 1),
        show_default="the model's",
    ),
    option("--seed", "Same seed, same answer.", type=click.IntRange(0, 2**64 - 1)),
    option("--stop", "Ends the answer (several may be given).", multiple=True),
)
