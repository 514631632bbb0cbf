"""The text of one answer, in the order in which models write: reasoning, then content and tool calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from service.parsers.events import CallEnd, CallStart, Content, Event
from service.parsers.think import Think
from service.parsers.tool_parser import ToolParser


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one prompt are to be read; as it stands: all of them is content.

    Args:
        reasoning: the form of reasoning, where the model reasons.
        opened: the prompt has opened the reasoning.
        tools: the form of tool calls, where there are tools.
        arguments: the JSON Schemas that the arguments of a call must follow, by the names of the tools that may be
            called: {} where not strict.
        parallel: more than one call may come.
        thinks: reasoning may come: the prompt has not ended it, and begins no call.
        must_call: a call has to come, behind ToolParser.prefill.
    """

    reasoning: type[Think] | None = None
    opened: bool = False
    tools: type[ToolParser] | None = None
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parallel: bool = True
    thinks: bool = False
    must_call: bool = False

    @property
    def strict(self) -> bool:
        """Whether there are calls whose arguments must follow a schema."""
        return self.tools is not None and any(self.arguments.values())

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser must see, though they may be special tokens."""
        return tuple(marker for form in (self.reasoning, self.tools) if form is not None for marker in form.markers)

    def parser(self) -> "OutputParser":
        """A parser for one answer."""
        think = None if self.reasoning is None else self.reasoning(self.opened)
        tools = None if self.tools is None else self.tools(frozenset(self.arguments), prefilled=self.must_call)
        return OutputParser(think, tools, parallel=self.parallel)


class OutputParser:
    """Joins the parsers of one answer.

    Attributes:
        calls: how many tool calls have begun.
        complete: the one call that is wanted is there: whatever follows is not.
    """

    def __init__(self, think: Think | None, tools: ToolParser | None, *, parallel: bool = True) -> None:
        """Takes fresh parsers. `parallel`: more than one call may come."""
        self._think = think
        self._tools = tools
        self._parallel = parallel
        self.calls = 0
        self.complete = False

    @property
    def idle(self) -> bool:
        """Whether all that comes is content."""
        return self._tools is None and (self._think is None or self._think.passed)

    @property
    def thinking(self) -> bool:
        """Whether what came last was reasoning."""
        return self._think is not None and self._think.thinking

    def feed(self, text: str) -> list[Event]:
        """Takes the next piece of the text; returns what is known by now."""
        if not text:
            return []
        return self._through(self._think.feed(text) if self._think is not None else [Content(text)])

    def finish(self) -> list[Event]:
        """The text has ended: returns what was held back."""
        events = self._through(self._think.finish() if self._think is not None else [])
        return events + (self._counted(self._tools.finish()) if self._tools is not None else [])

    def _through(self, events: list[Event]) -> list[Event]:
        """Lets the tool parser read the content."""
        if self._tools is None:
            return events
        parsed: list[Event] = []
        for event in events:
            parsed += self._tools.feed(event.text) if isinstance(event, Content) else [event]
        return self._counted(parsed)

    def _counted(self, events: list[Event]) -> list[Event]:
        if self.complete:
            return []
        for position, event in enumerate(events):
            if isinstance(event, CallStart):
                self.calls += 1
            elif isinstance(event, CallEnd) and not self._parallel:
                self.complete = True
                return events[: position + 1]
        return events
