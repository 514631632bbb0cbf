"""What happened to the latest requests, and what the latest steps were: bounded.

Scheduler, core and service tell it as things happen. It changes nothing and decides nothing. Times are
time.monotonic(), which all processes of a machine share.
"""

import time
from collections import OrderedDict, deque
from typing import Final

import msgspec

from engine.step import Step, StepResult

Attributes = dict[str, int | float | str]
LaunchTimes = tuple[float, float, float]
"""When a step's scheduling began and ended, and when its launch had returned."""

# Of one request; what comes after them is not kept, but for its end.
MAX_EVENTS: Final = 1024
_ENDS: Final = ("finished", "released", "sent")
STEPS_PER_REQUEST: Final = 8


class TraceEvent(msgspec.Struct, array_like=True):
    """Something that happened to a request."""

    at: float
    kind: str
    attributes: Attributes


class StepTrace(msgspec.Struct, array_like=True):
    """One step.

    Attributes:
        scheduling, scheduled, launched: its scheduling began, ended; its launch returned.
        collecting, collected, processed: it was waited for; its tokens were on the host; they had been taken in.
        busy_seconds: how long the device worked on it, where that is known.
        rows, tokens, samples: rows with work, tokens through the model, tokens drawn.
        admitted: rows that sequences took in it.
        error: why it failed, or "".
    """

    step_id: int
    scheduling: float
    scheduled: float
    launched: float
    collecting: float
    collected: float
    processed: float
    busy_seconds: float
    rows: int
    tokens: int
    samples: int
    admitted: int
    error: str


class Tracer:
    """Keeps the last `requests` requests (0: none), and STEPS_PER_REQUEST times as many steps."""

    def __init__(self, requests: int) -> None:
        self.keeps = requests > 0
        self._limit = requests
        self._requests: OrderedDict[str, list[TraceEvent]] = OrderedDict()
        self.steps: deque[StepTrace] = deque(maxlen=STEPS_PER_REQUEST * requests)

    def begin(self, request_id: str, events: list[TraceEvent]) -> None:
        """A request has come; `events` are what has happened before. An earlier one of the same id is forgotten."""
        self._requests.pop(request_id, None)
        self._requests[request_id] = events
        if len(self._requests) > self._limit:
            self._requests.popitem(last=False)

    def add(self, request_id: str, kind: str, **attributes: int | float | str) -> None:
        """Something happened just now to a request; one that is not kept (any more) is ignored."""
        events = self._requests.get(request_id)
        if events is not None and (len(events) < MAX_EVENTS or kind in _ENDS):
            events.append(TraceEvent(time.monotonic(), kind, attributes))

    def step(self, step: Step, launch: LaunchTimes, collect: tuple[float, float], outcome: StepResult | str) -> None:
        """A step has just been taken in; collect: when it was waited for and had come; outcome: or why it failed."""
        self.steps.append(
            StepTrace(
                step.step_id,
                *launch,
                *collect,
                time.monotonic(),
                0.0 if isinstance(outcome, str) else outcome.busy_seconds,
                len({work.row for work in step.works}),
                step.num_tokens,
                len(step.samples),
                len(step.inits),
                outcome if isinstance(outcome, str) else "",
            )
        )

    def request(self, request_id: str) -> list[TraceEvent]:
        """The events of a request in their order; empty where it is not kept."""
        return sorted(self._requests.get(request_id, ()), key=lambda event: event.at)
