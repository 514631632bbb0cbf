"""Mistral: [TOOL_CALLS] and an array of {"name": "f", "arguments": {…}}; newer ones [TOOL_CALLS]f[ARGS]{…} for each."""

import secrets
from typing import Any

from service.parsers.call_reader import CallObject, NamedCall
from service.parsers.tool_parser import ToolParser


class Mistral(ToolParser):
    """Takes both forms, whichever the text has."""

    opening = "[TOOL_CALLS]"
    markers = (opening, "[ARGS]", "[CALL_ID]")
    separator = ", "
    prefill = opening

    def __init__(self, names: frozenset[str], *, prefilled: bool = False) -> None:
        self._in_array = False
        super().__init__(names, prefilled=prefilled)

    def _opened(self, lead: str) -> None:
        self._lead, self._mode, self._in_array = lead, self._form, False

    def _form(self, text: str) -> str:
        """Behind the marker: the first character tells the form."""
        body = text.lstrip()
        self._lead += text[: len(text) - len(body)]
        if body[:1] == "[":
            self._in_array = True
            self._read(CallObject, self._lead + "[")
            return body[1:]
        if body:
            self._read(CallObject if body[0] == "{" else NamedCall, self._lead)
        return body

    def _behind(self, text: str) -> str:
        text = text.lstrip()
        if not text:
            return ""
        if self._in_array and text[0] == ",":
            self._read(CallObject, ",")
            return text[1:]
        self._mode = self._past_blanks(self._content)
        return text[1:] if self._in_array and text[0] == "]" else text

    @staticmethod
    def new_id() -> str:
        """Nine letters and digits: the templates of Mistral refuse anything else when the call comes back."""
        return secrets.token_hex(5)[:9]

    @staticmethod
    def around_arguments(name: str) -> tuple[str, str]:
        """As ToolParser."""
        return f'{{"name": "{name}", "arguments": ', "}"

    @staticmethod
    def around_calls(calls: dict[str, Any]) -> dict[str, Any]:
        """An array; the prompt ends with the marker, a special token that no grammar can ask for."""
        brackets = [{"type": "const_string", "value": bracket} for bracket in "[]"]
        return {"type": "sequence", "elements": [brackets[0], calls, brackets[1]]}

    @classmethod
    def calls_in_text(cls, tags: list[dict[str, Any]], calls: dict[str, Any]) -> dict[str, Any] | None:
        """None: under a grammar the marker could not come, and with it no call."""
        return None
