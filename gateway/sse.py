"""JSON as it is written: compact, in pieces, and as server-sent events. Knows no field.

What is long in a whole answer is written as it comes, so that no call takes long.
"""

import json
import secrets
from collections.abc import Iterable, Iterator
from json.encoder import encode_basestring
from typing import Any

DONE = b"data: [DONE]\n\n"
# Blank lines, no comment: the client of `vllm bench serve` 0.26 loses all that follows a comment in a chunk of its own.
HEARTBEAT = b"\n\n"

# Some readers of event streams take these for line ends; inside JSON they may be escaped.
LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def compact(value: object) -> str:
    """JSON without spaces, safe inside a line of an event stream."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(LINE_ENDS)


def event(value: object) -> bytes:
    """One server-sent event."""
    return f"data: {compact(value)}\n\n".encode()


# In the place of JSON that is written already. Nobody can have said it.
HOLE = secrets.token_hex(16)


def around(value: object, *holes: Iterable[str]) -> Iterator[str]:
    """JSON of a value, in pieces, with these in the place of its HOLEs."""
    first, *behind = compact(value).split(f'"{HOLE}"')
    yield first
    for hole, text in zip(holes, behind, strict=True):
        yield from hole
        yield text


def commas(pieces: Iterable[str]) -> Iterator[str]:
    """The pieces of a list."""
    for number, piece in enumerate(pieces):
        yield f",{piece}" if number else piece


class Written:
    """Lists of JSON as they grow, by name: the entries are written when they come."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[str]] = {}

    def add(self, lists: dict[str, list[Any]]) -> int:
        """The next entries of each list. Returns: how many characters they take."""
        size = 0
        for name, entries in lists.items():
            text = compact(entries)[1:-1]
            size += len(text)
            if text:
                self._pieces.setdefault(name, []).append(text)
        return size

    def __getitem__(self, name: str) -> list[str]:
        return self._pieces.get(name, [])


def quote(text: str) -> str:
    """A JSON string, safe inside a line of an event stream."""
    quoted: str = encode_basestring(text)
    return quoted if quoted.isascii() else quoted.translate(LINE_ENDS)
