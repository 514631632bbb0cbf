"""What a model writes, as it is shown."""

import re
import sys

import click

# Of ASCII and Latin-1, all but tabs and line feeds: they move the cursor, set titles, fill the clipboard.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def say(text: str, *, err: bool = False, dim: bool = False) -> None:
    """Writes text to standard output or error; to a terminal without what would command it."""
    if (sys.stderr if err else sys.stdout).isatty():
        text = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
    click.echo(click.style(text, dim=True) if dim else text, nl=False, err=err)
