"""Reads a text that comes in pieces: what every parser of one shares. Knows no format."""

from collections.abc import Callable

from service.parsers.events import Content, Event, Reasoning

# Takes text, and returns what is left of it for the mode that follows.
Mode = Callable[[str], str]


class TextReader:
    """Reads by one mode after the other."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        """Takes the next piece of the text; returns what is known by now."""
        while text:
            text = self._mode(text)
        return self._taken()

    def _past_blanks(self, mode: Mode) -> Mode:
        """The mode that leaves blanks out, and then becomes another."""

        def skip(text: str) -> str:
            text = text.lstrip()
            if text:
                self._mode = mode
            return text

        return skip

    def _say(self, text: str, kind: type[Content] | type[Reasoning] = Content) -> None:
        if text:
            self._events.append(kind(text))

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events
