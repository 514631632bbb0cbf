"""Which parsers a model needs: by name, or found in its template. To add one, write its class and name it here."""

import logging
from dataclasses import dataclass

from service.parsers.hermes import Hermes
from service.parsers.llama3_json import Llama3Json
from service.parsers.mistral import Mistral
from service.parsers.think import Think
from service.parsers.tool_parser import ToolParser

logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
TOOL_PARSERS: dict[str, type[ToolParser]] = {"hermes": Hermes, "llama3_json": Llama3Json, "mistral": Mistral}
REASONING_PARSERS: dict[str, type[Think]] = {"think": Think}


@dataclass(frozen=True, slots=True)
class Formats:
    """How a model writes.

    Args:
        tools: its tool calls; None: unknown, or not to be parsed.
        reasoning: its reasoning; None: it has none, or it is not to be parsed.
        raw_calls: the operator wants tool calls left in the content.
    """

    tools: type[ToolParser] | None = None
    reasoning: type[Think] | None = None
    raw_calls: bool = False

    @classmethod
    def choose(cls, tools: str, reasoning: str, template: str) -> "Formats":
        """By the names of parsers (auto: the template's source tells; none: no parser). Raises ValueError: unknown."""
        check_names(tools, reasoning)
        tool_name = _tool_format(template) if tools == AUTO else tools
        reasoning_name = ("think" if Think.closing in template else NONE) if reasoning == AUTO else reasoning
        logger.info("parsers of the model's output: tool calls %s, reasoning %s", tool_name, reasoning_name)
        return cls(TOOL_PARSERS.get(tool_name), REASONING_PARSERS.get(reasoning_name), raw_calls=tools == NONE)


def check_names(tools: str, reasoning: str) -> None:
    """Raises ValueError naming the setting that names no parser."""
    for setting, name, known in (
        ("tool_parser", tools, TOOL_PARSERS),
        ("reasoning_parser", reasoning, REASONING_PARSERS),
    ):
        if name not in (AUTO, NONE, *known):
            raise ValueError(f"{setting} must be one of {', '.join((AUTO, NONE, *known))}, not {name!r}")


def _tool_format(template: str) -> str:
    """The name of the format in which a template writes earlier calls; NONE where it is none of ours."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    # Others have <tool_call> too, with XML in it: Qwen 3 Coder and GLM.
    if "<tool_call>" in template and '"arguments' in template:
        return "hermes"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters": ' in template):
        return "llama3_json"
    return NONE
