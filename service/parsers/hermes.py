"""Hermes 2 Pro, Qwen 2.5 and Qwen 3: <tool_call>{"name": "f", "arguments": {…}}</tool_call>."""

from service.parsers.tool_parser import ToolParser


class Hermes(ToolParser):
    """Several calls are several elements. A missing </tool_call> or last brace is forgiven."""

    opening = "<tool_call>"
    closing = "</tool_call>"
    markers = (opening, closing)
    separator = "\n"

    def _behind(self, text: str) -> str:
        text = self._lead + text if self._lead else text.lstrip()
        if text.startswith(self.closing):
            self._lead, self._mode = "", self._past_blanks(self._content)
            return text[len(self.closing) :]
        if self.closing.startswith(text):
            self._lead = text
            return ""
        self._lead, self._mode = "", self._content
        return text

    @staticmethod
    def around_arguments(name: str) -> tuple[str, str]:
        """As ToolParser."""
        return f'<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"
