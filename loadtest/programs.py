"""Programs that a load test starts and speaks with, in lines over their standard input and output."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loadtest.records import LoadTestError

Program = subprocess.Popen[str]
_END_SECONDS = 30.0


@contextmanager
def program(*arguments: str) -> Iterator[Program]:
    """A program with pipes; it is asked to end after the block, and made to after a while."""
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def say(process: Program, line: str) -> None:
    """Writes a line to its standard input."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def answer(process: Program, name: str) -> dict[str, Any]:
    """The next line that it says, JSON. Raises: LoadTestError."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise LoadTestError(f"{name} ended with status {process.wait()}")
    try:
        fields: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise LoadTestError(f"{name} said no JSON: {line[:200]!r}") from error
    return fields
