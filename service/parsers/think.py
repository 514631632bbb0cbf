"""<think>…</think> before an answer: Qwen 3, DeepSeek R1 and what was distilled from it, SmolLM3."""

from collections.abc import Callable

from service.parsers.events import Content, Event, Reasoning
from service.parsers.until import Until


class Think:
    """Splits a text that comes in pieces into reasoning and content. Blanks beside the markers belong to them.

    Reasoning stands at the beginning or nowhere: <think> further on is content. Without </think> all is reasoning.

    Attributes:
        passed: the rest is content, as it comes.
    """

    opening = "<think>"
    closing = "</think>"
    markers = (opening, closing)

    def __init__(self, opened: bool) -> None:
        """Starts a text. `opened`: the prompt ends behind <think>, so the text begins with reasoning."""
        self.passed = False
        self._opened = opened
        self._held = ""
        self._until = Until(self.closing)
        self._mode: Callable[[str], str] = self._before
        self._events: list[Event] = []

    @property
    def thinking(self) -> bool:
        """Whether what came last was reasoning, or a marker of it."""
        return not self.passed and (self._opened or self._mode != self._before)

    def feed(self, text: str) -> list[Event]:
        """Takes the next piece of the text; returns what is known by now."""
        if self.passed:
            return [Content(text)] if text else []
        while text:
            text = self._mode(text)
        return self._taken()

    def finish(self) -> list[Event]:
        """The text has ended: returns what was held back."""
        if self._mode == self._before:
            self._say(self._held, reasoning=self._opened)
        self._say(self._until.finish(), reasoning=True)
        return self._taken()

    def _before(self, text: str) -> str:
        text = self._held + text
        body = text.lstrip()
        if body.startswith(self.opening):
            self._mode = self._skip
            return body[len(self.opening) :]
        if self.opening.startswith(body):
            self._held = text
            return ""
        self._mode = self._skip if self._opened else self._content
        return text

    def _skip(self, text: str) -> str:
        text = text.lstrip()
        if text:
            self._mode = self._thinking
        return text

    def _thinking(self, text: str) -> str:
        before, closing, rest = self._until.step(text)
        self._say(before, reasoning=True)
        if closing:
            self._mode = self._behind
        return rest

    def _behind(self, text: str) -> str:
        text = text.lstrip()
        if text:
            self._mode = self._content
        return text

    def _content(self, text: str) -> str:
        self._say(text, reasoning=False)
        self.passed = True
        return ""

    def _say(self, text: str, *, reasoning: bool) -> None:
        if text:
            self._events.append(Reasoning(text) if reasoning else Content(text))

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events
