"""What surrounds every command: standard streams that are there, and one line for what the system refuses."""

import os
import sys
from typing import Any

import click


class Outermost(click.Group):
    """The `fulcrum` command itself. OSErrors (a full disk, no folder for temporary files) are one line, status 1."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """As of click."""
        _open_streams()
        try:
            return super().main(*args, **extra)
        except OSError as error:
            click.ClickException(str(error)).show()
            sys.exit(1)


def _open_streams() -> None:
    """A stream that was closed (2>&-) is /dev/null: else a file or a socket gets its number, and children have none."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            lowest = os.open(os.devnull, os.O_RDWR)  # of its number, if nothing was opened since the start
            os.set_inheritable(lowest, True)
            setattr(sys, name, os.fdopen(lowest, mode))
