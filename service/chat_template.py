"""Renders a chat into the prompt text that a model was trained on, as `transformers` does. Knows nothing of token ids.

Templates are Jinja, come from the operator (the model's files or --chat-template) and run in Jinja's immutable sandbox.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.model.config import read_json
from engine.model.errors import ModelError

# Longest text that a template may render, characters. A window of a million tokens is about four million characters.
MAX_CHARACTERS = 64 << 20
# Longest time from piece to piece of it, all together; templates that never write are the operator's own fault.
MAX_SECONDS = 20.0
# Between the text parts of one message, for templates that take strings alone.
PART_SEPARATOR = "\n"
# Written behind the message that is to be continued, and cut off again with what the template put after it.
# The space at its end tells whether the template trims messages.
END_MARK = "\ue000CONTINUE-HERE\ue000 "
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")

# A content that shows where a template puts it, and how.
_PROBE = "PROBE"
_PROBE_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

ContentForm = Literal["string", "list", "either"]


class TemplateError(Exception):
    """A chat that this model's template does not render; the message is the template's own where it raised one."""


class ChatTemplate:
    """The chat templates of one model. Rendering is thread-safe.

    Attributes:
        content_form: by template name, what it takes as the content of a message.
        takes_tools: whether a template reads the tools.
        source: the templates' sources, joined.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], origin: str = "template") -> None:
        """Compiles the templates.

        Args:
            sources: Jinja sources: "default", and "tool_use" for chats with tools. Either may be missing.
            special_tokens: variables such as bos_token and eos_token.
            origin: where the sources come from, for messages.

        Raises:
            ModelError: a syntax error.
        """
        self._sources = dict(sources)
        self.source = "\n".join(sources.values())
        self.takes_tools = False
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        self._templates = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                self.takes_tools |= "tools" in meta.find_undeclared_variables(environment.parse(source))
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(
                    f"{origin}: the chat template {name!r} is broken: {error} (line {error.lineno})"
                ) from error
        self.content_form = {name: self._content_form(name) for name in sources}

    @classmethod
    def from_file(cls, path: Path, special_tokens: Mapping[str, str]) -> "ChatTemplate":
        """Reads the operator's own template.

        Raises:
            ModelError: it cannot be read, or it is broken.
        """
        return cls({"default": _read_source(path)}, special_tokens, str(path))

    @classmethod
    def from_folder(cls, folder: Path, special_tokens: Mapping[str, str]) -> "ChatTemplate":
        """Reads a model folder: *.jinja files, else what tokenizer_config.json holds.

        Raises:
            ModelError: a file or a template is broken.
        """
        files = {
            "default": folder / "chat_template.jinja",
            "tool_use": folder / "additional_chat_templates" / "tool_use.jinja",
        }
        sources = {name: _read_source(path) for name, path in files.items() if path.is_file()}
        if not sources:
            entry = read_json(folder / "tokenizer_config.json", optional=True).get("chat_template")
            if isinstance(entry, str):
                sources = {"default": entry}
            elif isinstance(entry, list):
                try:
                    sources = {item["name"]: item["template"] for item in entry}
                except (KeyError, TypeError) as error:
                    raise ModelError(
                        f"{folder}/tokenizer_config.json: broken list in chat_template: {error!r}"
                    ) from error
        return cls(sources, special_tokens, str(folder))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], special_tokens: Mapping[str, str], path: Path) -> "ChatTemplate":
        """Reads the templates in GGUF metadata.

        Raises:
            ModelError: a template is broken.
        """
        keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
        sources = {name: metadata[key] for name, key in keys.items() if key in metadata}
        return cls(sources, special_tokens, str(path))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a chat.

        Args:
            messages: in OpenAI's form: role, content (a string, or a list of {"type": "text", "text": ...}), and where
                it applies tool_calls (their arguments parsed), tool_call_id, name, reasoning_content. At least one.
            tools: in OpenAI's form.
            add_generation_prompt: end where the assistant's answer begins.
            continue_final_message: leave the last message open; excludes `add_generation_prompt`.
            template_kwargs: further variables for the template, none of them RESERVED.

        Raises:
            TemplateError: the template refuses this chat, or there is no template.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TemplateError("this model has no chat template; give one with --chat-template, or send a text prompt")
        chat = [self._message(message, name) for message in messages]
        final = _mark_final(chat[-1]) if continue_final_message else ""
        variables = {"messages": chat, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        text = self._text(name, {**(template_kwargs or {}), **variables})
        return _cut_at_mark(text, final) if continue_final_message else text

    def _text(self, name: str, variables: Mapping[str, Any]) -> str:
        pieces, size, end = [], 0, time.monotonic() + MAX_SECONDS
        try:
            for piece in self._templates[name].generate({**self._special_tokens, "documents": None, **variables}):
                size += len(piece)
                if time.monotonic() > end:
                    raise TemplateError(f"the chat template took longer than {MAX_SECONDS:g} s")
                if size > MAX_CHARACTERS:
                    raise TemplateError(f"the chat template rendered more than {MAX_CHARACTERS} characters")
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or type(error).__name__) from error
        # What an expression of the template may raise in Python, such as None + "text".
        except (
            ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError,
        ) as error:  # fmt: skip
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return "".join(pieces)

    def _content_form(self, name: str) -> ContentForm:
        """Tells by rendering a chat: of a list a template for strings shows more than its text, or nothing at all."""

        def shown(content: str | list[dict[str, str]]) -> str:
            chat, tools = [{"role": "user", "content": content}], [_PROBE_TOOL] if name == "tool_use" else None
            try:
                return self._text(name, {"messages": chat, "tools": tools, "add_generation_prompt": True})
            except TemplateError:
                return ""

        plain, parts = shown(_PROBE), shown([{"type": "text", "text": _PROBE}])
        if _PROBE in plain:
            return "either" if plain == parts else "string"
        return "list" if _PROBE in parts else "string"

    def _message(self, message: Mapping[str, Any], name: str) -> dict[str, Any]:
        """A copy of the message in the form that the template reads."""
        copy = {**message, "content": _content(message["content"], self.content_form[name])}
        if copy["role"] == "developer" and "developer" not in self._sources[name]:
            copy["role"] = "system"
        if "reasoning_content" in copy:
            copy["thinking"] = copy["reasoning_content"]  # its name in the templates of gpt-oss
        return copy


def _read_source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: the chat template cannot be read: {error}") from error


def _content(content: str | list[dict[str, str]], form: ContentForm) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form == "list" else content
    if form == "string":
        return PART_SEPARATOR.join(part["text"] for part in content)
    return [dict(part) for part in content]


def _mark_final(message: dict[str, Any]) -> str:
    """Writes END_MARK behind the message's text, and returns that text."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + END_MARK
        return content
    text: str = content[-1]["text"]
    content[-1]["text"] = text + END_MARK
    return text


def _cut_at_mark(text: str, final: str) -> str:
    at = text.rfind(END_MARK.strip())
    if at < 0 or final.strip() not in text:
        raise TemplateError(
            "continue_final_message is set, but the chat template does not render the last message as it is"
        )
    kept = text[:at]
    # A template that trims has trimmed behind the mark; the message's own end gets the same.
    return kept if text.startswith(END_MARK, at) else kept.rstrip()


class _GenerationTag(Extension):
    """{% generation %}…{% endgeneration %} marks the assistant's text for training; here it only is a scope."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    # Jinja's own escapes HTML and sorts keys.
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
