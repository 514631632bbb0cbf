"""What a parser finds in a text, in the order of the text."""

from typing import NamedTuple, TypeAlias


class Content(NamedTuple):
    """The next piece of the answer."""

    text: str


class Reasoning(NamedTuple):
    """The next piece of what the model thought before it answered."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins: the first is 0."""

    call: int
    id: str
    name: str


class Arguments(NamedTuple):
    """The next piece of a call's arguments: the JSON text as the model wrote it."""

    call: int
    text: str


class CallEnd(NamedTuple):
    """The call's arguments are complete, or the text ended within them."""

    call: int


Event: TypeAlias = Content | Reasoning | CallStart | Arguments | CallEnd
