"""What an output must look like that has to call a tool, or may, as parts of a structural tag. Compiles nothing.

Structural tags are XGrammar's form of grammars, in JSON (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html).
"""

from collections.abc import Mapping
from typing import Any

from service.parsers.think import Think
from service.parsers.tool_parser import ToolParser

# Of white space at one place in JSON: small models lose themselves there.
MAX_WHITESPACE = 16

Form = dict[str, Any]


def calls_form(
    parser: type[ToolParser], tools: Mapping[str, Mapping[str, Any]], *, only: str | None = None, parallel: bool = True
) -> Form:
    """An output that is one tool call or, with `parallel`, several; it stands behind the parser's `prefill`.

    Args:
        parser: the model's format.
        tools: the JSON Schemas of their arguments, by name. Each stays the root of its own document, so that its
            references ("#/$defs/…") hold.
        only: the one tool to call, once (tool_choice names it); None: any of them (tool_choice "required").
        parallel: more than one call may come.

    Raises KeyError: there is no such tool.
    """
    wanted = tools if only is None else {only: tools[only]}
    calls = {
        "type": "tags_with_separator",
        "tags": call_tags(parser, wanted),
        "separator": parser.separator,
        "at_least_one": True,
        "stop_after_first": only is not None or not parallel,
    }
    return parser.around_calls(calls)


def free_form(parser: type[ToolParser], tools: Mapping[str, Mapping[str, Any]]) -> Form | None:
    """An output that is free but for the calls that come in it, which follow their schemas (`tools` as above).

    None where no grammar can see to that.
    """
    return parser.calls_in_text(call_tags(parser, tools), calls_form(parser, tools))


def call_tags(parser: type[ToolParser], tools: Mapping[str, Mapping[str, Any]]) -> list[Form]:
    """A call of each of the tools."""
    tags = []
    for name, schema in tools.items():
        begin, end = parser.around_arguments(name)
        tags.append({"type": "tag", "begin": begin, "content": json_form({"type": "object", **schema}), "end": end})
    return tags


def json_form(schema: Any) -> Form:
    """JSON that follows a schema."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def behind_reasoning(form: Form, reasoning: type[Think], *, opened: bool) -> Form:
    """An output that may reason before. `opened`: the prompt has begun to, so that it has to end it."""
    begin = "" if opened else reasoning.opening
    thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": reasoning.closing}
    blanks = {"type": "const_string", "value": "\n\n"}
    behind = {"type": "sequence", "elements": [thought, blanks, form]}
    return behind if opened else {"type": "or", "elements": [behind, form]}
