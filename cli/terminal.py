"""What `fulcrum chat` and `fulcrum generate` share: what is asked of a model, and how what it writes is shown."""

import re
import sys
from typing import Any

import click

from cli.settings import Params
from fulcrum.v1 import inference_pb2 as pb

# Of ASCII and Latin-1, all but tabs and line feeds: they move the cursor, set titles, fill the clipboard.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def fields(params: Params) -> dict[str, Any]:
    """Fields of GenerateRequest."""
    sampling = {name: params[name] for name in ("temperature", "top_p", "top_k", "seed")}
    stopping = pb.StoppingCriteria(max_tokens=params["max_tokens"], stop=params["stop"])
    return {"sampling": pb.SamplingParams(**sampling), "stopping": stopping}


def system(params: Params) -> list[tuple[str, str]]:
    """The messages that every chat begins with."""
    return [("system", params["system"])] if params["system"] else []


def say(text: str, *, err: bool = False, dim: bool = False) -> None:
    """Writes text to standard output or error; to a terminal without what would command it."""
    if (sys.stderr if err else sys.stdout).isatty():
        text = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
    click.echo(click.style(text, dim=True) if dim else text, nl=False, err=err)
