"""The grammar of a chat's answer: what was asked for, beside the tool calls and behind the reasoning that may come.

It is a structural tag, XGrammar's form of grammars in JSON: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html.
Knows no request and compiles nothing.
"""

import json
from collections.abc import Mapping
from typing import Any

from service.grammar_worker import MAX_WHITESPACE, Constraint, alternatives
from service.parsers.output_parser import Reading
from service.parsers.think import Think
from service.parsers.tool_parser import ToolParser

Form = dict[str, Any]


def output_grammar(constraint: Constraint | None, reading: Reading) -> Constraint | None:
    """What the whole output must follow; None where it is free.

    Args:
        constraint: what the answer's content must follow. None where a call must come.
        reading: how the output will be read.
    """
    tools, form = reading.tools, None
    if constraint is not None:
        form = _form(constraint)
        # Calls in place of the content; a marker that is a special token can be part of no grammar.
        callable_now = tools is not None and not tools.prefill
        if form is None or not (callable_now or reading.thinks):
            return constraint
        if tools is not None and callable_now:
            form = {"type": "or", "elements": [form, calls_form(tools, reading.arguments, parallel=reading.parallel)]}
    elif tools is not None and reading.must_call:
        form = calls_form(tools, reading.arguments, parallel=reading.parallel)
    elif tools is not None and reading.strict:
        form = free_form(tools, reading.arguments)
    if form is None:
        return None
    if reading.reasoning is not None and reading.thinks:
        form = behind_reasoning(form, reading.reasoning, opened=reading.opened)
    return Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


def calls_form(parser: type[ToolParser], tools: Mapping[str, Mapping[str, Any]], *, parallel: bool = True) -> Form:
    """An output that is one tool call or, with `parallel`, several; it stands behind the parser's `prefill`.

    Args:
        parser: the model's format.
        tools: the JSON Schemas of their arguments, by name. Each stays the root of its own document, so that its
            references ("#/$defs/…") hold.
        parallel: more than one call may come.
    """
    calls = {
        "type": "tags_with_separator",
        "tags": _call_tags(parser, tools),
        "separator": parser.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return parser.around_calls(calls)


def free_form(parser: type[ToolParser], tools: Mapping[str, Mapping[str, Any]]) -> Form | None:
    """An output that is free but for the calls that come in it, which follow their schemas (`tools` as above).

    None where no grammar can see to that.
    """
    return parser.calls_in_text(_call_tags(parser, tools), calls_form(parser, tools))


def behind_reasoning(form: Form, reasoning: type[Think], *, opened: bool) -> Form:
    """An output that may reason before. `opened`: the prompt has begun to, so that it has to end it."""
    begin = "" if opened else reasoning.opening
    thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": reasoning.closing}
    blanks = {"type": "const_string", "value": "\n\n"}
    behind = {"type": "sequence", "elements": [thought, blanks, form]}
    return behind if opened else {"type": "or", "elements": [behind, form]}


def _call_tags(parser: type[ToolParser], tools: Mapping[str, Mapping[str, Any]]) -> list[Form]:
    """A call of each of the tools."""
    tags = []
    for name, schema in tools.items():
        begin, end = parser.around_arguments(name)
        tags.append({"type": "tag", "begin": begin, "content": _json_form({"type": "object", **schema}), "end": end})
    return tags


def _json_form(schema: Any) -> Form:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def _form(constraint: Constraint) -> Form | None:
    """A constraint as a part of a structural tag; None of a schema that is no JSON, which its compilation will tell."""
    match constraint.kind:
        case "json_schema":
            try:
                return _json_form(json.loads(constraint.text))
            except (ValueError, RecursionError):
                return None
        case "json_object":
            return _json_form({"type": "object"})
        case "regex":
            return {"type": "regex", "pattern": constraint.text}
        case "grammar":
            return {"type": "grammar", "grammar": constraint.text}
        case "choices":
            return {"type": "grammar", "grammar": alternatives(json.loads(constraint.text))}
        case kind:
            raise ValueError(f"unknown kind of constraint {kind!r}")
