"""The engine core: a scheduler and a runner, turned step by step. Knows no sockets; `core_server` and `llm` drive it.

Schedule, launch and collect are separate, so that a step can be launched before the one before it has been collected:
`overlap` is how many launched steps may wait uncollected while the next is scheduled (0 on the CPU, where a launch
computes).
"""

import logging
import time
from bisect import bisect_left
from collections import deque
from typing import Any, NamedTuple, Protocol

import msgspec

from engine.messages import STEP_BOUNDS, CoreStats, RequestStart
from engine.pacing import Pacer
from engine.request import FinishReason
from engine.scheduler import Scheduler
from engine.sequence import SequenceUpdate
from engine.step import DeviceLost, Step, StepResult
from engine.trace import LaunchTimes
from telemetry.logs import about

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What executes steps (`engine.runner.ModelRunner`, or a fake in tests)."""

    def launch(self, step: Step) -> Any:
        """Begins the step and returns at once where the device works by itself."""

    def collect(self, launched: Any) -> StepResult:
        """Waits for the step that `launch` began."""


class Turn(msgspec.Struct, tag="outputs", array_like=True):
    """What one turn of the core brought. Encoded, it is a `messages.Outputs`."""

    started: list[RequestStart]
    updates: list[SequenceUpdate]


class _InFlight(NamedTuple):
    """A launched step; followed: the device had work until then."""

    step: Step
    launched: Any
    followed: bool
    times: LaunchTimes


class EngineCore:
    """Turns the scheduler's steps into tokens."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, overlap: int = 0) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._overlap = overlap
        self._in_flight: deque[_InFlight] = deque()
        self._busy = False  # since the step before
        self._pacer = Pacer()
        self._computed = 0.0  # when the last result came
        self._born = time.monotonic()

    def restart(self, scheduler: Scheduler) -> None:
        """Forgets what was in flight and goes on with new books: after a turn that was cut short, as by Ctrl-C."""
        self.scheduler, self._in_flight, self._pacer, self._busy = scheduler, deque(), Pacer(), False

    @property
    def has_work(self) -> bool:
        """Whether a turn would do something."""
        return bool(self._in_flight) or self.scheduler.has_work

    def hold(self) -> float:
        """Seconds that the next turn may wait for more requests, without the device running out of work."""
        return self._pacer.hold(time.monotonic()) if self._overlap and self.scheduler.has_work else 0.0

    def turn(self) -> Turn:
        """Schedules and launches one step, and collects the oldest launched one when its time has come.

        A step that raises ends its own sequences with ERROR; the core goes on.

        Raises: DeviceLost.
        """
        began = time.monotonic()
        step = self.scheduler.schedule()
        scheduled = time.monotonic()
        self.scheduler.counts.schedule_seconds += scheduled - began
        turn = Turn([], [])
        if step is not None:
            self._count(step)
            turn.started = [RequestStart(request_id, cached, scheduled) for request_id, cached in step.started]
            try:
                launched, now = self._runner.launch(step), time.monotonic()
                self._in_flight.append(_InFlight(step, launched, self._busy, (began, scheduled, now)))
                self._pacer.launched(step, began, now)
                self.scheduler.counts.launch_seconds += now - scheduled
            except DeviceLost:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a step raises is about its own sequences
                now = time.monotonic()
                turn.updates += self._fail(step, error, (began, scheduled, now), now)
        if self._in_flight and (step is None or len(self._in_flight) > self._overlap):
            turn.updates += self._collect()
        self._busy = step is not None and self.has_work
        return turn

    def _collect(self) -> list[SequenceUpdate]:
        step, launched, followed, times = self._in_flight.popleft()
        began = time.monotonic()
        try:
            result = self._runner.collect(launched)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a step raises is about its own sequences
            self._pacer.collected(0.0, time.monotonic())
            return self._fail(step, error, times, began)
        computed = time.monotonic()
        self._pacer.collected(result.busy_seconds, computed)
        updates = self.scheduler.update(step, result)
        if result.failed or step.masks:
            for one in updates:
                if one.finish is FinishReason.ERROR:
                    fields = about(request_id=one.request_id)
                    logger.error("request %s, sequence %d: %s", one.request_id, one.index, one.message, extra=fields)
        stats = self.scheduler.counts
        stats.collect_seconds += computed - began
        stats.execute_seconds += computed - max(times[1], self._computed)
        self._computed = computed
        stats.device_busy_seconds += result.busy_seconds
        if followed:  # else the device had nothing to do
            stats.device_gap_seconds += result.gap_seconds
        stats.process_seconds += time.monotonic() - computed
        self.scheduler.tracer.step(step, times, (began, computed), result)
        return updates

    def _fail(self, step: Step, error: Exception, times: LaunchTimes, began: float) -> list[SequenceUpdate]:
        self.scheduler.tracer.step(step, times, (began, time.monotonic()), str(error))
        updates = self.scheduler.fail(step, str(error))
        logger.error("step %d failed: %d sequences end with an error", step.step_id, len(updates), exc_info=error)
        return updates

    def _count(self, step: Step) -> None:
        stats = self.scheduler.counts
        stats.steps += 1
        rows, tokens = len(step.works) - step.num_drafts, step.num_tokens
        stats.last_step_rows, stats.last_step_tokens = rows, tokens
        stats.max_step_rows = max(stats.max_step_rows, rows)
        stats.scheduled_rows += rows
        stats.scheduled_tokens += tokens
        stats.step_rows[bisect_left(STEP_BOUNDS, rows)] += 1
        stats.step_tokens[bisect_left(STEP_BOUNDS, tokens)] += 1

    def describe(self) -> str:
        """What is being worked on, for who looks on from another thread."""
        steps = [one.step for one in list(self._in_flight)]
        waiting = "; ".join(f"step {step.step_id}, {len(step.works)} rows, {step.num_tokens} tokens" for step in steps)
        return f"{self.scheduler.num_running} sequences run; in flight: {waiting or 'nothing'}"

    def stats(self) -> CoreStats:
        """Gauges of this moment and counters since the start."""
        stats = self.scheduler.stats
        stats.uptime_seconds = time.monotonic() - self._born
        return stats
