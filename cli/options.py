"""The options that several commands share. Every one can also be given by its FULCRUM_… variable.

Knows no room's settings: values are checked where the rooms' own records are made.
"""

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import click

from service.parsers.registry import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS
from telemetry.logs import FORMATS

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Command], Command]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class Budget(click.ParamType[int | float]):
    """Bytes ("2GiB", "1500000000") as an int, or a fraction ("0.9", "90%") as a float in (0, 1]."""

    name = "bytes|fraction"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        """Fails, naming the option, where the text is neither."""
        if isinstance(value, int | float):
            return value
        text = str(value).strip().lower()
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyz% ")
        unit = text[len(digits) :].strip()
        try:
            number = float(digits)
        except ValueError:
            self.fail(f"{value!r} is neither bytes (2GiB) nor a fraction (0.9)", param, ctx)
        if unit == "%":
            number, unit = number / 100, ""
        elif unit not in _UNITS:
            self.fail(f"{value!r}: unknown unit {unit!r} (one of KiB, MiB, GiB, KB, MB, GB, %)", param, ctx)
        if number <= 0:
            self.fail(f"{value!r} must be above 0", param, ctx)
        if unit == "" and number <= 1:
            return number
        if text.endswith("%"):
            self.fail(f"{value!r} is more than there is", param, ctx)
        return int(number * _UNITS[unit])


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


def option(name: str, *aliases: str, **settings: Any) -> Decorator[Any]:
    """A click option that FULCRUM_NAME also sets (several values: separated by blanks) and whose help says so."""
    variable = "FULCRUM_" + name.partition("/")[0].removeprefix("--").replace("-", "_").upper()
    return click.option(name, *aliases, envvar=variable, show_envvar=True, **{"show_default": True} | settings)


def together(*decorators: Decorator[Any]) -> Decorator[Any]:
    """One decorator out of several; the help lists their options in this order."""
    return lambda command: reduce(lambda inner, outer: outer(inner), reversed(decorators), command)


existing_file = click.Path(exists=True, dir_okay=False, path_type=Path)
port = click.IntRange(0, 65535)

model = click.argument("model", required=False, envvar="FULCRUM_MODEL")
host = option("--host", default="127.0.0.1", help="Address to listen on. Anything but loopback needs an API key.")
http_port = option("--port", default=8000, type=port, help="Port of the OpenAI API (0: any free one).")
grpc_port = option("--grpc-port", default=50051, type=port, help="Port of the gRPC API (0: any free one).")
log_levels = click.Choice(["debug", "info", "warning", "error"])
logging = together(
    option("--log-level", default="info", type=log_levels, help="Least level logged."),
    option("--log-format", default="text", type=click.Choice(FORMATS), help="json: an object a line."),
)
otlp_endpoint = option("--otlp-endpoint", metavar="URL", help="OpenTelemetry collector (OTLP over HTTP) for traces.")
request_timeout = option(
    "--request-timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds after which a request is ended."
)
# Never passed on in a command line, which other users of the machine can read.
api_keys = together(
    option("--api-key", multiple=True, help="Key that callers must bring (several may be given). Prefer the variable."),
    option("--api-key-file", type=existing_file, help="File of keys, hashed and by tenants; see `fulcrum key`."),
)
gateway_keys = option(
    "--gateway-key", multiple=True, help="Key of a gateway, which may speak for any tenant (several may be given)."
)
tls = together(
    option("--tls-cert", type=existing_file, help="PEM certificate (chain) of the engine: its TCP ports speak TLS."),
    option("--tls-key", type=existing_file, help="PEM key of --tls-cert, without a passphrase."),
    option("--tls-client-ca", type=existing_file, help="PEM authorities: clients must have a certificate of theirs."),
)
https = together(
    option("--https-cert", type=existing_file, help="PEM certificate (chain) of the gateway, which then serves HTTPS."),
    option("--https-key", type=existing_file, help="PEM key of --https-cert, without a passphrase."),
    option("--https-client-ca", type=existing_file, help="PEM authorities: clients must have a certificate of theirs."),
)
engine_tls = together(
    option("--engine-ca", type=existing_file, help="PEM authorities of engines that speak TLS."),
    option("--engine-cert", type=existing_file, help="PEM certificate to show to engines that ask for one."),
    option("--engine-cert-key", type=existing_file, help="PEM key of --engine-cert, without a passphrase."),
    option("--engine-tls-name", help="Name in the engines' certificate, where it is not their host's."),
)
grace = option(
    "--grace", default=30.0, type=click.FloatRange(min=0), help="Seconds that running requests get when it ends."
)

revision = option("--revision", help="Branch, tag or commit of a hub model.")
tokenizer = option(
    "--tokenizer", type=click.Path(exists=True, path_type=Path), help="Folder or file, instead of the model's."
)
model_files = together(
    revision,
    tokenizer,
    option("--chat-template", type=existing_file, help="Jinja file, instead of the model's chat template."),
)

engine_settings = together(
    option("--load-format", default="auto", type=click.Choice(["auto", "dummy"]), help="dummy: seeded random weights."),
    option(
        "--dtype",
        default="auto",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        help="auto: bfloat16 where the device computes it natively, else float32.",
    ),
    option("--device", default="auto", help="cpu, cuda, cuda:1, ... auto: cuda where there is one."),
    option(
        "--memory-budget",
        type=Budget(),
        help="Bytes (2GiB) or a fraction (0.9): on CUDA for everything, on the CPU for the KV pool (2GiB if unset).",
    ),
    option(
        "--max-model-len",
        type=int,
        show_default="the model's",
        help="Longest prompt and completion together, in tokens.",
    ),
    option("--page-size", default=16, type=int, help="Tokens in a page of the KV pool."),
    option("--max-num-seqs", type=int, show_default="256; 1024 on CUDA", help="Most sequences in one step."),
    option("--max-num-batched-tokens", type=int, show_default="2048; 1152 on CUDA", help="Token budget of one step."),
    option(
        "--scheduler",
        default="continuous",
        type=click.Choice(["continuous", "static"]),
        help="static: the naive baseline, kept to measure against.",
    ),
    option("--prefix-cache/--no-prefix-cache", default=True, help="Share the pages of equal prefixes."),
    option(
        "--chunked-prefill/--no-chunked-prefill", default=True, help="Compute long prompts beside decodes, in pieces."
    ),
    option(
        "--admission",
        default="fcfs",
        type=click.Choice(["fcfs", "prefix"]),
        help="Who waits shortest: the first come, or the one with the longest cached prefix (within bounds).",
    ),
    option("--max-queue-requests", default=16_384, type=int, help="Requests that may wait; more are refused."),
    option("--max-queue-tokens", default=16_777_216, type=int, help="Prompt tokens that may wait; more are refused."),
    option(
        "--reserve-full-length/--no-reserve-full-length",
        default=False,
        help="Give a sequence the pages of its prompt and max_tokens at once; kept to measure against.",
    ),
    option(
        "--speculative",
        default="off",
        type=click.Choice(["off", "ngram"]),
        help="ngram: guess tokens from what stood before and verify several in one step; the text stays the same.",
    ),
    option("--speculative-length", default=8, type=int, help="Most tokens guessed for a sequence in a step."),
    option(
        "--speculative-window",
        default="2,4",
        type=Window(),
        help="Shortest and longest run of tokens whose last occurrence is looked for.",
    ),
    option("--look-ahead", default=4, type=int, help="Requests that do not fit and may be passed by; 0: first come."),
    option("--overlap/--no-overlap", default=True, help="CUDA: launch a step before the last one is read back."),
    option("--cuda-graphs/--no-cuda-graphs", default=True, help="CUDA: replay recorded steps."),
    option(
        "--attention",
        default="auto",
        type=click.Choice(["auto", "reference"]),
        help="reference: plain torch on CUDA too, kept to measure against.",
    ),
    option(
        "--logits-processor",
        "--logits-processors",
        multiple=True,
        metavar="PKG.MOD:CLASS",
        help="Applied to the logits, in order.",
    ),
    option(
        "--step-timeout",
        default=300.0,
        type=click.FloatRange(min=0),
        help="Seconds that a step may take before the core says where it hangs, and is started again (0: any time).",
    ),
    option(
        "--trace-requests",
        default=0,
        type=click.IntRange(min=0),
        help="Keep the timelines of so many requests, for fulcrum trace.",
    ),
    option("--threads", type=int, show_default="the cores at hand", help="Torch threads on the CPU."),
)

service_settings = together(
    option(
        "--served-model-name", multiple=True, help="What requests may call the model; the first is the principal one."
    ),
    option(
        "--tool-parser",
        default=AUTO,
        type=click.Choice([AUTO, NONE, *TOOL_PARSERS]),
        help="How the model writes tool calls. auto: its chat template tells; none: they stay in the text.",
    ),
    option(
        "--reasoning-parser",
        default=AUTO,
        type=click.Choice([AUTO, NONE, *REASONING_PARSERS]),
        help="How the model writes what it thinks before it answers. auto and none: as above.",
    ),
    option(
        "--admin-address",
        show_default="a Unix socket of the user's own",
        help="HOST:PORT (needs a key with admin) or unix:/PATH.",
    ),
    option("--metrics-port", type=port, show_default="not served", help="Serves the engine's Prometheus metrics here."),
    option("--metrics-host", default="127.0.0.1", help="Address of --metrics-port, where nobody is asked for a key."),
    option(
        "--grammar-timeout",
        default=10.0,
        type=click.FloatRange(min=0, min_open=True),
        help="Seconds that the compilation of a JSON schema, regex or grammar may take.",
    ),
    option(
        "--max-priority",
        type=int,
        show_default="any; 0 with keys",
        help="Highest priority of callers whose key does not say.",
    ),
    option(
        "--log-requests/--no-log-requests",
        default=False,
        help="Log each accepted request, prompt and all (else no log holds any text).",
    ),
    option(
        "--share-prefixes/--no-share-prefixes",
        default=False,
        help="Share cached prefixes between tenants too, where a request has no salt.",
    ),
    option(
        "--core-restarts",
        default=5,
        type=click.IntRange(min=0),
        help="Start a core that died again, until it has died so often within a minute of its start.",
    ),
    option(
        "--service-workers",
        type=click.IntRange(min=1),
        show_default="1; on CUDA 5 of 16 cores, fewer in proportion",
        help="Processes that share the gRPC port.",
    ),
)

workers = option(
    "--workers",
    type=click.IntRange(min=1),
    show_default="1; of serve on CUDA 6 of 16 cores, fewer in proportion",
    help="Gateway processes that share the HTTP port.",
)
gateway_settings = together(
    workers,
    option("--cors-origin", multiple=True, help="Origin that browsers may call from (several may be given; * is any)."),
    option("--access-log/--no-access-log", default=False, help="Log a line for each HTTP request."),
)

batch = together(
    option("--base-url", metavar="URL", help="A running server to ask (http://HOST:PORT/v1), instead of one's own."),
    option("--api-key", help="Key that the server of --base-url wants."),
    option(
        "--max-concurrency",
        type=click.IntRange(min=1),
        show_default="--max-num-seqs; 64 with --base-url",
        help="Requests that run together.",
    ),
    option(
        "--request-timeout",
        default=86400.0,
        type=click.FloatRange(min=0, min_open=True),
        help="Seconds after which a request is ended; its row is an error then.",
    ),
    option("--fail-on-error/--no-fail-on-error", default=False, help="Exit status 1 if a row is an error."),
    option("--log-level", default="warning", type=log_levels, help="Least level logged, of its own server."),
    option("--progress/--no-progress", default=True, help="Draw a progress bar where standard error is a terminal."),
)

# For commands that answer in the terminal.
sampling = together(
    option("--system", metavar="TEXT", help="System prompt."),
    option(
        "--max-tokens",
        type=click.IntRange(min=1),
        show_default="what the window holds",
        help="Most tokens to generate.",
    ),
    option("--temperature", type=float, show_default="the model's", help="0 is greedy."),
    option("--top-p", type=float, show_default="the model's", help="Keep the likeliest tokens up to this probability."),
    option(
        "--top-k",
        type=click.IntRange(min=0),
        show_default="the model's",
        help="Keep this many of the likeliest tokens.",
    ),
    option("--seed", type=click.IntRange(min=0), help="Same seed, same answer."),
    option("--stop", multiple=True, help="Ends the answer (several may be given)."),
)
