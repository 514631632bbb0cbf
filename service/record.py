"""What happens to one Generate call, and when: the one place where its figures come from. Knows no engine process."""

import asyncio
import time
from typing import Any

import grpc

from engine.request import Request
from fulcrum.v1 import inference_pb2 as pb
from service.auth import Metadata
from service.choice import Choice
from service.errors import ApiError
from service.figures import Figures
from telemetry.logs import about

_LABEL_LENGTH = 128
# A caller's clock began before the request arrived here, so that its deadline passes a little before ours.
_TRAVEL_SECONDS = 0.25
_ENDINGS = {
    grpc.StatusCode.ABORTED: "abort",
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
    grpc.StatusCode.UNAVAILABLE: "unavailable",
}


class Record:
    """Follows one call. Times are of time.monotonic(), in seconds; 0 is "not yet".

    Args:
        figures: where it is counted.
        metadata: of the call.

    Attributes:
        request_id, model: as accepted; "-" before.
        label: as in label_of.
        arrival, accepted, started, first, last, ended: when it came, was queued, was first scheduled, had its first and
            its last token, and ended.
        marks: what was done to its prompt, and when.
        cached_tokens: of the prompt.
        tokens, reasoned: generated, and of them reasoning, of all sequences that have finished.
        reasons: how its sequences have ended, each one of FINISHES.
        error: why it ended ill, "" where it did not.
    """

    def __init__(self, figures: Figures, metadata: Metadata) -> None:
        self._figures = figures
        self.arrival = time.monotonic()
        self.label = label_of(metadata)
        self.metadata = metadata
        self.request_id = self.model = "-"
        self.accepted = self.started = self.first = self.last = self.ended = 0.0
        self.marks: list[tuple[str, float]] = []
        self.reasons: list[str] = []
        self.error = ""
        self.prompt_tokens = self.cached_tokens = self.max_tokens = self.tokens = self.reasoned = 0
        self._running = 0
        self._firsts: list[float] = []
        self._lasts: list[float] = []

    def accept(self, job: Request, model: str) -> None:
        """The core has queued it."""
        self.accepted = time.monotonic()
        self.request_id, self.model = job.request_id, model
        self.prompt_tokens, self.max_tokens = len(job.prompt), job.params.max_tokens
        self._running = n = job.params.n
        self._firsts = [0.0] * n
        self._lasts = [0.0] * n

    @property
    def fields(self) -> dict[str, Any]:
        """For log lines about it."""
        return about(request_id=self.request_id, x_request_id=self.label)

    def start(self, at: float, cached_tokens: int) -> None:
        """Its first step has been scheduled."""
        self.started, self.cached_tokens = at, cached_tokens
        self._figures.queue.observe(at - self.arrival)
        self._figures.prompt_tokens.add(by=self.prompt_tokens)
        self._figures.cached_tokens.add(by=cached_tokens)

    def take(self, index: int, tokens: int) -> None:
        """So many tokens of one sequence have come together; each of them took its share of the time since the last."""
        if not tokens:
            return
        now = time.monotonic()
        last, self._lasts[index] = self._lasts[index], now
        if last:
            self._figures.inter_token.observe((now - last) / tokens, tokens)
            return
        self._firsts[index] = now
        if not self.first:
            self.first = now
            self._figures.first_token.observe(now - self.arrival)

    def finish(self, choice: Choice) -> None:
        """One sequence is complete."""
        self._running -= 1
        self.tokens += choice.tokens
        self.reasoned += choice.reasoned
        self.reasons.append(pb.FinishReason.Name(choice.reason).removeprefix("FINISH_REASON_").lower())
        self._figures.finished.add(self.reasons[-1])
        if choice.tokens > 1:
            passed = self._lasts[choice.index] - self._firsts[choice.index]
            self._figures.per_token.observe(passed / (choice.tokens - 1))

    def usage(self) -> pb.Usage:
        """What the caller is told, once all sequences are complete."""
        self.last = max(self._lasts) or time.monotonic()
        self.first = self.first or self.last  # it may have ended without a token
        return pb.Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.tokens,
            cached_tokens=self.cached_tokens,
            reasoning_tokens=self.reasoned,
            queue_seconds=self.started - self.arrival,
            prefill_seconds=self.first - self.started,
            decode_seconds=self.last - self.first,
        )

    def end(self, error: BaseException | None, remaining: float | None) -> None:
        """The call has ended: well, or by this error with so many seconds of its deadline left."""
        figures, self.ended = self._figures, time.monotonic()
        if error is not None:
            reason = ending(error, remaining)
            self.error = error.reason if isinstance(error, ApiError) else reason
            self.reasons += [reason] * self._running
            figures.finished.add(reason, by=self._running)
            return
        figures.end_to_end.observe(self.ended - self.arrival)
        figures.prefill.observe(self.first - self.started)
        figures.decode.observe(self.last - self.first)
        figures.request_prompt_tokens.observe(self.prompt_tokens)
        figures.request_tokens.observe(self.tokens)
        figures.max_tokens.observe(self.max_tokens)


def label_of(metadata: Metadata) -> str:
    """The caller's own name of a request (metadata x-request-id, printable by gRPC's rules), "-" without one."""
    return next((str(value)[:_LABEL_LENGTH] for key, value in metadata or () if key == "x-request-id"), "-")


def ending(error: BaseException, remaining: float | None) -> str:
    """Which of FINISHES an error is, with so many seconds of the caller's deadline left (None: no deadline)."""
    if isinstance(error, ApiError):
        return _ENDINGS.get(error.code, "error")
    if isinstance(error, asyncio.CancelledError | grpc.aio.InternalError):  # the caller has gone
        return "cancel" if remaining is None or remaining > _TRAVEL_SECONDS else "deadline"
    return "error"
