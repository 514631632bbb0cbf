"""Renders a chat into the prompt text that a model was trained on, as `transformers` does. Knows nothing of token ids.

Templates are Jinja, come from the operator (the model's files or --chat-template) and run in Jinja's immutable sandbox.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import nodes
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

# Tests by which a template tells a string from a list.
TYPE_TESTS = ("string", "sequence", "iterable", "mapping")

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
            sources: Jinja sources by name; "default" is used unless there are tools and a "tool_use". May be empty.
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
        self.content_form: dict[str, ContentForm] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                tree = environment.parse(source)
                self.content_form[name] = content_form(tree)
                self.takes_tools |= any(
                    node.name == "tools" and node.ctx == "load" for node in tree.find_all(nodes.Name)
                )
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(
                    f"{origin}: the chat template {name!r} is broken: {error} (line {error.lineno})"
                ) from error

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
        files = {"default": folder / "chat_template.jinja"}
        files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
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
        keys = {"default": "tokenizer.chat_template"}
        keys |= {name: f"tokenizer.chat_template.{name}" for name in metadata.get("tokenizer.chat_templates", [])}
        sources = {name: metadata[key] for name, key in keys.items() if key in metadata}
        return cls(sources, special_tokens, str(path))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a chat.

        Args:
            messages: in OpenAI's form: role, content (a string, or a list of {"type": "text", "text": ...}), and where
                it applies tool_calls (arguments as JSON text or parsed), tool_call_id, name, reasoning_content.
            tools: in OpenAI's form.
            add_generation_prompt: end where the assistant's answer begins.
            continue_final_message: leave the last message open.
            template_kwargs: further variables for the template.

        Raises:
            TemplateError: the template refuses this chat, or there is no template.
        """
        if not messages:
            raise TemplateError("the chat has no messages")
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
        if reserved := sorted(set(RESERVED) & set(template_kwargs or {})):
            raise TemplateError(f"template_kwargs may not set {', '.join(reserved)}")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TemplateError("this model has no chat template; give one with --chat-template, or send a text prompt")
        chat = [self._message(message, name) for message in messages]
        final = _mark_final(chat[-1]) if continue_final_message else ""
        variables = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "messages": chat,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = _bounded(self._templates[name], variables)
        return _cut_at_mark(text, final) if continue_final_message else text

    def _message(self, message: Mapping[str, Any], name: str) -> dict[str, Any]:
        """A copy of the message in the form that the template reads."""
        copy = {key: value for key, value in message.items() if value is not None}
        if copy.get("role") == "developer" and "developer" not in self._sources[name]:
            copy["role"] = "system"
        if "content" in copy:
            copy["content"] = _content(copy["content"], self.content_form[name])
        if "tool_calls" in copy:
            copy["tool_calls"] = [_tool_call(call) for call in copy["tool_calls"]]
        if "reasoning_content" in copy:
            copy.setdefault("thinking", copy["reasoning_content"])  # its name in the templates of gpt-oss
        return copy


def _read_source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: the chat template cannot be read: {error}") from error


def _content(content: Any, form: ContentForm) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form == "list" else content
    texts = []
    for part in content:
        if part.get("type") != "text":
            raise TemplateError(f"content parts of type {part.get('type')!r} are not supported, only text")
        texts.append(part["text"])
    if form == "string":
        return PART_SEPARATOR.join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            name = function.get("name")
            raise TemplateError(f"the arguments of the tool call {name!r} are not valid JSON: {error}") from error
    return {**call, "function": function}


def _mark_final(message: dict[str, Any]) -> str:
    """Writes END_MARK behind the message's text, and returns that text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + END_MARK
        return content
    if not content:
        raise TemplateError("continue_final_message is set, but the last message has no text to be continued")
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


def _bounded(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    pieces, size, end = [], 0, time.monotonic() + MAX_SECONDS
    try:
        for piece in template.generate(variables):
            size += len(piece)
            if time.monotonic() > end:
                raise TemplateError(f"the chat template took longer than {MAX_SECONDS:g} s")
            if size > MAX_CHARACTERS:
                raise TemplateError(f"the chat template rendered more than {MAX_CHARACTERS} characters")
            pieces.append(piece)
    except jinja2.TemplateError as error:
        raise TemplateError(error.message or type(error).__name__) from error
    # What an expression of the template may raise in Python, such as None + "text".
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise TemplateError(f"{type(error).__name__}: {error}") from error
    return "".join(pieces)


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
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML and sorts keys.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def content_form(template: nodes.Template) -> ContentForm:
    """Tells from a template's syntax tree what it takes as the content of a message.

    "list" loops over the content or looks into its items, "either" does so and also asks whether it is a string, and
    "string" is everything else. The content is followed through variables, filters, slices and parameters of macros.
    """
    names = _content_names(template)
    loops = (loop for loop in template.find_all(nodes.For) if _is_content(loop.iter, names))
    if not any(map(_loops_over_parts, loops)) and not any(
        _is_first_part(access.node, names) for access in _part_accesses(template)
    ):
        return "string"
    asked = (test.node for test in template.find_all(nodes.Test) if test.name in TYPE_TESTS)
    return "either" if any(_is_content(node, names) for node in asked) else "list"


def _part_accesses(node: nodes.Node) -> Iterator[nodes.Getattr | nodes.Getitem]:
    """Every .type, .text, ["type"] and ["text"] in a syntax tree."""
    for access in node.find_all((nodes.Getattr, nodes.Getitem)):
        match access:
            case nodes.Getattr(attr="type" | "text") | nodes.Getitem(arg=nodes.Const(value="type" | "text")):
                yield access


def _loops_over_parts(loop: nodes.For) -> bool:
    """True where the loop's variable is asked for its type or text: other loops are over tool calls, or characters."""
    names = {loop.target.name} if isinstance(loop.target, nodes.Name) else set()
    return any(isinstance(access.node, nodes.Name) and access.node.name in names for access in _part_accesses(loop))


def _content_names(template: nodes.Template) -> frozenset[str]:
    """Variables and macro parameters that hold the content of a message."""
    macros = {macro.name: [arg.name for arg in macro.args] for macro in template.find_all(nodes.Macro)}
    names: frozenset[str] = frozenset()
    while True:
        found = set(_held_contents(template, macros, names))
        if found <= names:
            return names
        names |= found


def _held_contents(template: nodes.Template, macros: Mapping[str, list[str]], names: frozenset[str]) -> Iterator[str]:
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            yield assign.target.name
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            parameters = macros[call.node.name]
            given: Iterable[tuple[str, nodes.Node]] = (
                *zip(parameters, call.args, strict=False),
                *((pair.key, pair.value) for pair in call.kwargs),
            )
            yield from (name for name, value in given if _is_content(value, names))


def _is_content(node: nodes.Node | None, names: frozenset[str]) -> bool:
    match node:
        case nodes.Name(name=name):
            return name in names
        case (
            nodes.Getattr(attr="content")
            | nodes.Getitem(arg=nodes.Const(value="content"))
            | nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value="content"), *_])
        ):
            return True
        case nodes.Filter(node=inner) | nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _is_content(inner, names)
        case nodes.CondExpr(expr1=first, expr2=second) | nodes.Or(left=first, right=second):
            return _is_content(first, names) or _is_content(second, names)
    return False


def _is_first_part(node: nodes.Node, names: frozenset[str]) -> bool:
    """True of content[0] and the like."""
    match node:
        case nodes.Getitem(node=inner, arg=nodes.Const(value=int())):
            return _is_content(inner, names)
    return False
