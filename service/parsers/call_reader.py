"""Reads one tool call, character by character, so that how its text was cut makes no difference.

What has a name and has begun its arguments is a call, and the arguments are passed on as the model wrote them, be they
valid JSON or not: only brackets and strings are followed, to find their end. What breaks before that is no call: `raw`
then holds its text.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Generator

from service.parsers.events import Arguments, CallEnd, CallStart, Event

# One character in at a time; returns what was read.
Read = Generator[None, str, str]

ARGUMENTS = ("arguments", "parameters")


class _Broken(Exception):
    """The character that was sent does not belong to a call."""


class CallReader(ABC):
    """One call.

    Attributes:
        ended: it takes nothing more.
        raw: its text, until it is called.
    """

    def __init__(self, index: int, call_id: str, names: frozenset[str] | None = None) -> None:
        """Starts before the call's first character.

        Args:
            index: the call's number.
            call_id: its id, should it be one.
            names: a call of any other name is none (None: any name is taken).
        """
        self.ended = False
        self.raw = ""
        self._index = index
        self._id = call_id
        self._names = names
        self._name = ""
        self._begun = self._complete = False  # the arguments
        self._arguments: list[str] = []  # not given out yet
        self._start_given = self._end_given = False
        self._grammar = self._read()
        next(self._grammar)

    @property
    def called(self) -> bool:
        """It has a name, and its arguments have begun: it is a call."""
        return self._begun and bool(self._name)

    @abstractmethod
    def _read(self) -> Read:
        """The call's grammar."""

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Takes text; returns what it means and, once the call has ended, the text behind it."""
        taken = 0
        try:
            for char in text:
                self._grammar.send(char)
                taken += 1
        except _Broken:
            self.ended = True
        except StopIteration:
            self.ended = True
            taken += 1
        if not self.called:
            self.raw += text[:taken]
        return self._news(), text[taken:]

    def finish(self) -> list[Event]:
        """The text has ended."""
        self.ended = True
        return self._news()

    def _news(self) -> list[Event]:
        events: list[Event] = []
        if self.called:
            if not self._start_given:
                events.append(CallStart(self._index, self._id, self._name))
                self._start_given = True
            if self._arguments:
                events.append(Arguments(self._index, "".join(self._arguments)))
                self._arguments.clear()
            if (self._complete or self.ended) and not self._end_given:
                events.append(CallEnd(self._index))
                self._end_given = True
        return events

    def _take_name(self, name: str) -> None:
        _expect(bool(name) and (self._names is None or name in self._names))
        self._name = name

    def _take_arguments(self) -> Read:
        """The object whose first brace has been read."""
        self._begun = True
        yield from _nested("{", self._arguments)
        self._complete = True
        return ""


class CallObject(CallReader):
    """{"name": "f", "arguments": {…}}: members in any order, "parameters" for "arguments", further ones ignored."""

    def _read(self) -> Read:
        _expect((yield from _solid()) == "{")
        char = yield from _solid()
        while True:
            _expect(char == '"')
            key = yield from _string()
            _expect((yield from _solid()) == ":")
            char = yield from _solid()
            if key == "name" and not self._name:
                _expect(char == '"')
                self._take_name((yield from _string()))
                char = yield from _solid()
            elif key in ARGUMENTS and not self._complete:
                _expect(char == "{")
                yield from self._take_arguments()
                char = yield from _solid()
            else:
                char = yield from _passed_over(char)
            if char == "}":
                return ""
            _expect(char == ",")
            char = yield from _solid()


class NamedCall(CallReader):
    """name[CALL_ID]id[ARGS]{…}, as Mistral's tokenizers from version 11 on write it; both marks may be missing."""

    _may_be = re.compile(r"\s*[\w.-]*(?:\[[\w.\]-]*)*\s*")
    _head = re.compile(r"\s*([\w.-]{1,64})(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*")
    _LONGEST = 256

    def _read(self) -> Read:
        head = ""
        while (char := (yield)) != "{":
            head += char
            _expect(len(head) <= self._LONGEST and self._may_be.fullmatch(head) is not None)
        if (found := self._head.fullmatch(head)) is None:
            raise _Broken
        self._take_name(found[1])
        yield from self._take_arguments()
        return ""


def _expect(good: bool) -> None:
    if not good:
        raise _Broken


def _solid() -> Read:
    """The next character that is no blank."""
    while (char := (yield)).isspace():
        pass
    return char


def _string() -> Read:
    """The value of the string whose first quote has been read."""
    raw: list[str] = []
    while (char := (yield)) != '"':
        raw.append(char)
        if char == "\\":
            raw.append((yield))
    try:
        value: str = json.loads(f'"{"".join(raw)}"', strict=False)
        value.encode()
    except ValueError as error:  # a lone surrogate too
        raise _Broken from error
    return value


def _nested(first: str, sink: list[str]) -> Read:
    """Reads on to the bracket that closes `first`; what it reads, and `first`, go to `sink`."""
    sink.append(first)
    depth, in_string = 1, False
    while depth:
        char = yield
        if in_string:
            in_string = char != '"'
            if char == "\\":
                sink.append(char)
                char = yield
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        elif char == "<":  # never JSON: a marker that came too early
            raise _Broken
        sink.append(char)
    return ""


def _passed_over(char: str) -> Read:
    """Reads a value that begins with `char`, whatever it is; returns the character behind it."""
    if char == '"':
        yield from _string()
    elif char in "{[":
        yield from _nested(char, [])
    else:
        while char not in ",}":
            _expect(char.isalnum() or char in "+-." or char.isspace())
            char = yield
        return char
    return (yield from _solid())
