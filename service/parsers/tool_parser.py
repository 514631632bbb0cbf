"""What every tool parser shares: content up to a marker, a call, what comes behind it. Knows no format."""

import secrets
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from service.parsers.call_reader import CallObject, CallReader
from service.parsers.events import Event
from service.parsers.text_reader import TextReader
from service.parsers.until import Until


class ToolParser(TextReader, ABC):
    """Finds tool calls in a text that comes in pieces.

    The joined events do not depend on how the text was cut. What may become a call is held back until that is known,
    and nothing else is. What turns out not to be a call is content, as it was. Blanks beside a call belong to it.

    A subclass says what begins a call (`opening`), what follows one (`_behind`), how calls are written, and, where that
    is not one JSON object behind each opening, how they are read (`_opened`).
    """

    opening: ClassVar[str]  # the marker before a call
    markers: ClassVar[tuple[str, ...]]  # texts that must be seen, though they may be special tokens
    bare: ClassVar[bool] = False  # a call may come without `opening`
    separator: ClassVar[str]  # between two calls, as the model was taught to write it
    prefill: ClassVar[str] = ""  # what a prompt ends with where a call must follow

    def __init__(self, names: frozenset[str], *, prefilled: bool = False) -> None:
        """Takes the names of the tools. `prefilled`: the prompt ends with `prefill`."""
        super().__init__(self._content)
        self._names = names
        self._calls = 0
        self._until = Until(self.opening)
        self._reader: CallReader | None = None
        self._lead = ""  # what stands before the reader's text
        if prefilled and self.prefill:
            self._opened("")

    def finish(self) -> list[Event]:
        """The text has ended: returns what was held back."""
        if self._reader is not None:
            self._events += self._reader.finish()
            self._settle()
        self._say(self._until.finish() + self._lead)
        self._lead = ""
        return self._taken()

    @staticmethod
    def new_id() -> str:
        """An id for a call."""
        return f"call_{secrets.token_hex(12)}"

    @staticmethod
    @abstractmethod
    def around_arguments(name: str) -> tuple[str, str]:
        """What stands before and behind the arguments of a call of this tool, as the model was taught to write it."""

    @staticmethod
    def around_calls(calls: dict[str, Any]) -> dict[str, Any]:
        """The structural tag of all calls with what stands around them."""
        return calls

    @classmethod
    def calls_in_text(cls, tags: list[dict[str, Any]], calls: dict[str, Any]) -> dict[str, Any] | None:
        """The structural tag of a text in which calls may come. None: there is none.

        Args:
            tags: a call of each tool.
            calls: an output that is calls and nothing else.
        """
        return {"type": "triggered_tags", "triggers": [cls.opening], "tags": tags}

    # Modes.

    def _content(self, text: str) -> str:
        before, lead, rest = self._until.step(text)
        self._say(before)
        if lead:
            self._opened(lead)
        return rest

    def _call(self, text: str) -> str:
        assert self._reader is not None
        events, rest = self._reader.feed(text)
        self._events += events
        if self._reader.ended:
            self._mode = self._behind if self._settle() else self._content
        return rest

    @abstractmethod
    def _behind(self, text: str) -> str:
        """The mode behind a call."""

    def _opened(self, lead: str) -> None:
        """The opening was met: `lead` is it, with the blanks before it."""
        self._read(CallObject, lead)

    def _read(self, kind: type[CallReader], lead: str, names: frozenset[str] | None = None) -> None:
        """A call is to come (of one of `names`). `lead`: what was read before it, content should no call come."""
        self._reader = kind(self._calls, self.new_id(), names)
        self._lead, self._mode = lead, self._call

    def _settle(self) -> bool:
        """The reader has ended: whether it was a call. Its text is content otherwise."""
        assert self._reader is not None
        reader, self._reader = self._reader, None
        if reader.called:
            self._calls += 1
        else:
            self._say(self._lead + reader.raw)
        self._lead = ""
        return reader.called
