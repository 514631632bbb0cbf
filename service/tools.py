"""The tools of a chat: checked, and in the form that templates know. Knows no output and no token."""

import re
from typing import Any

import msgspec

from fulcrum import limits
from fulcrum.v1 import inference_pb2 as pb
from service.validate import Violations

MAX_TOOL_BYTES = 64 << 10
MAX_ALL_BYTES = 1 << 20
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def read_tools(chat: pb.Chat, bad: Violations) -> list[dict[str, Any]]:
    """The tools that the model may call, in OpenAI's form, as templates take them; none where tool_choice is none.

    Adds a violation for everything that is wrong with tools and tool_choice.
    """
    count = len(chat.tools)
    size = sum(tool.ByteSize() for tool in chat.tools[: limits.TOOLS])
    if not (
        bad.most("chat.tools", count, limits.TOOLS) and bad.most("chat.tools", size, MAX_ALL_BYTES, "bytes are given")
    ):
        return []
    tools = []
    names: set[str] = set()
    for number, tool in enumerate(chat.tools):
        where = f"chat.tools[{number}]"
        if not bad.most(where, tool.ByteSize(), MAX_TOOL_BYTES, "bytes are given"):
            continue
        text = f"must be 1 to 64 letters, digits, _ or - (ASCII), not {tool.name!r:.50}"
        bad.unless(_NAME.fullmatch(tool.name) is not None, f"{where}.name", text)
        bad.unless(tool.name not in names, f"{where}.name", f"{tool.name!r:.70} is given twice")
        names.add(tool.name)
        parameters = json_object(tool.parameters_json)
        bad.unless(parameters is not None, f"{where}.parameters_json", "is no JSON object")
        function: dict[str, Any] = {"name": tool.name}
        function |= {"description": tool.description} if tool.description else {}
        function |= {"parameters": parameters} if tool.parameters_json else {}
        tools.append({"type": "function", "function": function})
    choice = chat.tool_choice
    match choice.WhichOneof("choice"):
        case "function":
            known = choice.function in names
            bad.unless(known, "chat.tool_choice", f"there is no tool of the name {choice.function[:70]!r}")
        case "mode":
            bad.unless(choice.mode in pb.ToolChoice.Mode.values(), "chat.tool_choice", f"is unknown: {choice.mode}")
            needy = choice.mode == pb.ToolChoice.MODE_REQUIRED and not count
            bad.unless(not needy, "chat.tool_choice", "requires a call, but there are no tools")
    return [] if choice.mode == pb.ToolChoice.MODE_NONE else tools


def must_call(choice: pb.ToolChoice) -> bool:
    """Whether an answer without a call is not wanted (required, or a tool by name)."""
    return choice.WhichOneof("choice") == "function" or choice.mode == pb.ToolChoice.MODE_REQUIRED


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object in `text` ({} for an empty text), or None where it is none."""
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
