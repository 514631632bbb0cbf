"""<think>…</think> before an answer: Qwen 3, DeepSeek R1 and what was distilled from it, SmolLM3."""

from service.parsers.events import Content, Event, Reasoning
from service.parsers.text_reader import TextReader
from service.parsers.until import Until


class Think(TextReader):
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
        super().__init__(self._before)
        self.passed = False
        self._opened = opened
        self._held = ""
        self._until = Until(self.closing)

    @property
    def thinking(self) -> bool:
        """Whether what came last was reasoning, or a marker of it."""
        return not self.passed and (self._opened or self._mode != self._before)

    def finish(self) -> list[Event]:
        """The text has ended: returns what was held back."""
        if self._mode == self._before:
            self._say(self._held, Reasoning if self._opened else Content)
        self._say(self._until.finish(), Reasoning)
        return self._taken()

    def _before(self, text: str) -> str:
        text = self._held + text
        body = text.lstrip()
        if body.startswith(self.opening):
            self._mode = self._past_blanks(self._thinking)
            return body[len(self.opening) :]
        if self.opening.startswith(body):
            self._held = text
            return ""
        self._mode = self._past_blanks(self._thinking) if self._opened else self._content
        return text

    def _thinking(self, text: str) -> str:
        before, closing, rest = self._until.step(text)
        self._say(before, Reasoning)
        if closing:
            self._mode = self._past_blanks(self._content)
        return rest

    def _content(self, text: str) -> str:
        self._say(text)
        self.passed = True
        return ""
