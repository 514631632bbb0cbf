"""What an output must look like that has to call a tool. Knows the formats of calls; compiles nothing."""

import json
from collections.abc import Mapping
from typing import Any

from service.parsers.tool_parser import ToolParser


def forced_calls(
    parser: type[ToolParser], tools: Mapping[str, Mapping[str, Any]], *, only: str | None = None, parallel: bool = True
) -> str:
    """The grammar of an output that is one tool call or, with `parallel`, several.

    Args:
        parser: the model's format.
        tools: the JSON Schemas of their arguments, by name.
        only: the one tool to call, once (tool_choice names it); None: any of them (tool_choice "required").
        parallel: more than one call may come.

    Returns: a structural tag, XGrammar's JSON form (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html). Each
        schema stays the root of its own document, so that its references ("#/$defs/…") hold.

    Raises KeyError: there is no such tool.
    """
    wanted = tools if only is None else {only: tools[only]}
    tags = []
    for name, schema in wanted.items():
        begin, end = parser.around_arguments(name)
        content = {"type": "json_schema", "json_schema": {"type": "object", **schema}}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": parser.separator,
        "at_least_one": True,
        "stop_after_first": only is not None or not parallel,
    }
    return json.dumps({"type": "structural_tag", "format": parser.around_calls(calls)}, ensure_ascii=False)
