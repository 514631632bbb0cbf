"""What an output must look like that has to call a tool. Knows the formats of calls; compiles nothing."""

import json
from collections.abc import Mapping
from typing import Any

from service.parsers.think import Think
from service.parsers.tool_parser import ToolParser

# Of white space at one place in the arguments: small models lose themselves there.
_MAX_WHITESPACE = 16


def forced_calls(
    parser: type[ToolParser],
    tools: Mapping[str, Mapping[str, Any]],
    *,
    only: str | None = None,
    parallel: bool = True,
    reasoning: type[Think] | None = None,
    opened: bool = False,
) -> str:
    """The grammar of an output that is one tool call or, with `parallel`, several, behind the parser's `prefill`.

    Args:
        parser: the model's format.
        tools: the JSON Schemas of their arguments, by name.
        only: the one tool to call, once (tool_choice names it); None: any of them (tool_choice "required").
        parallel: more than one call may come.
        reasoning: the form of the reasoning that may come before.
        opened: the prompt has opened it, so it does come.

    Returns: a structural tag, XGrammar's JSON form (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html). Each
        schema stays the root of its own document, so that its references ("#/$defs/…") hold.

    Raises KeyError: there is no such tool.
    """
    wanted = tools if only is None else {only: tools[only]}
    tags = []
    for name, schema in wanted.items():
        begin, end = parser.around_arguments(name)
        content = {
            "type": "json_schema",
            "json_schema": {"type": "object", **schema},
            "max_whitespace_cnt": _MAX_WHITESPACE,
        }
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": parser.separator,
        "at_least_one": True,
        "stop_after_first": only is not None or not parallel,
    }
    form = parser.around_calls(calls)
    if reasoning is not None:
        begin = "" if opened else reasoning.opening
        thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": reasoning.closing}
        blanks = {"type": "const_string", "value": "\n\n"}
        behind = {"type": "sequence", "elements": [thought, blanks, form]}
        form = behind if opened else {"type": "or", "elements": [behind, form]}
    return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
