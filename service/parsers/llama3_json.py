"""Llama 3.1 to 3.3: {"name": "f", "parameters": {…}}, at the beginning or behind <|python_tag|>; others behind ";"."""

from typing import Any

from service.parsers.call_reader import CallObject
from service.parsers.events import Event
from service.parsers.tool_parser import ToolParser


class Llama3Json(ToolParser):
    """Without <|python_tag|> a call is the beginning of the text, and has the name of a tool: else it is content."""

    opening = "<|python_tag|>"
    markers = (opening,)
    bare = True
    separator = "; "

    def __init__(self, names: frozenset[str], *, prefilled: bool = False) -> None:
        super().__init__(names, prefilled=prefilled)
        self._mode = self._start

    def _start(self, text: str) -> str:
        text = self._lead + text
        body = text.lstrip()
        if not body:
            self._lead = text
            return ""
        if body[0] == "{":
            self._read(CallObject, text[: -len(body)], self._names)
            return body
        self._lead, self._mode = "", self._content
        return text

    def _behind(self, text: str) -> str:
        self._lead += text[: len(text) - len(text.lstrip())]
        text = text.lstrip()
        if text[:1] == ";" and ";" not in self._lead:
            self._lead += ";"
            return text[1:]
        if text[:1] == "{":
            self._read(CallObject, self._lead, self._names)
        elif text:
            # A semicolon that no call follows is content; blanks beside a call are not.
            text, self._lead, self._mode = self._lead.lstrip() + text, "", self._content
        return text

    def finish(self) -> list[Event]:
        """As ToolParser."""
        if self._mode == self._behind:
            self._lead = self._lead.lstrip()
        return super().finish()

    @staticmethod
    def around_arguments(name: str) -> tuple[str, str]:
        """As ToolParser."""
        return f'{{"name": "{name}", "parameters": ', "}"

    @classmethod
    def calls_in_text(cls, tags: list[dict[str, Any]], calls: dict[str, Any]) -> dict[str, Any] | None:
        """As ToolParser: what begins with a brace is a call. (The marker, a special token, is in no grammar.)"""
        return {"type": "or", "elements": [calls, {"type": "regex", "pattern": r"\s*([^\s{][\s\S]*)?"}]}
