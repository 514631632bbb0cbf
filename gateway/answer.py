"""The Generate calls of one HTTP request as one stream of pieces. Knows no JSON and no HTTP server."""

import asyncio
import time
from dataclasses import dataclass

import grpc

from fulcrum.v1 import inference_pb2 as pb
from gateway.engines import CallContext, EnginePool, Generation, Read
from gateway.errors import internal_error
from gateway.logprobs import Logprobs
from gateway.sse import CallPiece, Ending, TokenCounts

Merged = asyncio.Queue[tuple[int, pb.GenerateResponse | grpc.aio.AioRpcError | None]]

REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(slots=True)  # not frozen, which would triple the time to make one
class Piece:
    """A choice goes on by this, or ends. Or it is about the prompt of the n choices from `index` on."""

    index: int
    text: str
    ending: Ending | None = None
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    logprobs: Logprobs = ()
    prompt: Logprobs = ()


class PromptRefused(Exception):
    """One of several prompts is refused.

    Attributes:
        number: which, from 0.
        error: why.
    """

    def __init__(self, number: int, error: grpc.aio.AioRpcError) -> None:
        super().__init__(number, error)
        self.number = number
        self.error = error


class Answer:
    """What the engine generates for one HTTP request: `n` choices for each prompt. Close it, or its calls run on."""

    def __init__(self, generations: list[Generation], n: int) -> None:
        """Use `Answer.open`."""
        self._generations = generations
        self.n = n
        self.choices = n * len(generations)
        self._open_choices = set(range(self.choices))
        self._open_usages = len(generations)
        self._running = 0
        self._pumps: list[asyncio.Task[None]] = []
        self._read = self._read_one
        if len(generations) > 1:
            self._read = self._read_merged
            self._merged: Merged = asyncio.Queue(maxsize=len(generations))
            self._pumps = [
                asyncio.create_task(pump(number, generation.read, self._merged))
                for number, generation in enumerate(generations)
            ]
            self._running = len(generations)
        self.counts = TokenCounts()
        self.first_text_at: float | None = None  # of text of any kind; on the monotonic clock
        # The engine's id and its name of the model; of several prompts the first one's.
        self.request_id = generations[0].accepted.request_id
        self.model = generations[0].accepted.model

    @classmethod
    async def open(cls, pool: EnginePool, requests: list[pb.GenerateRequest], n: int, context: CallContext) -> "Answer":
        """Starts one Generate for each request and waits until all are accepted.

        Raises: AioRpcError (of several prompts, PromptRefused) or ApiError of the first one that is refused; then the
            others are cancelled.
        """
        tasks = [asyncio.create_task(pool.generate(request, context)) for request in requests]
        generations: list[Generation] = []
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for number, task in enumerate(tasks):
                error = task.exception() if task.done() else None
                if isinstance(error, grpc.aio.AioRpcError) and len(tasks) > 1:
                    raise PromptRefused(number, error)
                if error is not None:
                    raise error
            generations = [task.result() for task in tasks]
            return cls(generations, n)
        finally:
            if not generations:
                for task in tasks:
                    task.cancel()
                for ended in await asyncio.gather(*tasks, return_exceptions=True):
                    if isinstance(ended, Generation):
                        ended.cancel()

    def close(self) -> None:
        """Cancels what still runs."""
        for task in self._pumps:
            task.cancel()
        for generation in self._generations:
            generation.cancel()

    async def next(self) -> Piece | None:
        """The next piece: per choice its texts, then one ending. None at the end; then `counts` is complete.

        Raises: AioRpcError; ApiError 500 when the engine ends well but has left something out.
        """
        while True:
            number, event = await self._read()
            if event is None:
                if self._open_choices or self._open_usages:
                    raise internal_error()
                return None
            kind = event.WhichOneof("event")
            if kind == "delta":
                delta = event.delta
                text, reasoning, calls, logprobs = delta.text, delta.reasoning, delta.tool_calls, delta.logprobs
                if text or reasoning or calls or logprobs:
                    if self.first_text_at is None and (text or reasoning or calls):
                        self.first_text_at = time.monotonic()
                    index = number * self.n + delta.index
                    if not (reasoning or calls or logprobs):
                        return Piece(index, text)
                    pieces = tuple(CallPiece(call.index, call.id, call.name, call.arguments) for call in calls)
                    return Piece(index, text, reasoning=reasoning, calls=pieces, logprobs=logprobs)
            elif kind == "prompt_logprobs":
                return Piece(number * self.n, "", prompt=event.prompt_logprobs.tokens)
            elif kind == "finished":
                finished = event.finished
                index = number * self.n + finished.index
                if index not in self._open_choices or finished.reason not in REASONS:
                    raise internal_error()
                self._open_choices.remove(index)
                return Piece(index, "", Ending(REASONS[finished.reason], matched(finished)))
            elif kind == "usage":
                self._open_usages -= 1
                self.counts.prompt += event.usage.prompt_tokens
                self.counts.completion += event.usage.completion_tokens
                self.counts.cached += event.usage.cached_tokens
                self.counts.reasoning += event.usage.reasoning_tokens

    async def _read_one(self) -> tuple[int, pb.GenerateResponse | None]:
        return 0, await self._generations[0].read() or None

    async def _read_merged(self) -> tuple[int, pb.GenerateResponse | None]:
        """The next event of any call, with its prompt's number; in order within a prompt."""
        while self._running:
            number, item = await self._merged.get()
            if isinstance(item, grpc.aio.AioRpcError):
                raise item
            if item is not None:
                return number, item
            self._running -= 1
        return 0, None


async def pump(number: int, read: Read, merged: Merged) -> None:
    """Moves one call's events, then how it ended, into the bounded queue: a slow reader slows the engine."""
    try:
        while event := await read():
            await merged.put((number, event))
    except grpc.aio.AioRpcError as error:
        await merged.put((number, error))
    else:
        await merged.put((number, None))


def matched(finished: pb.Finished) -> str | int | None:
    """The stop string or stop token id that ended a choice (vLLM's stop_reason: an end-of-sequence token is None)."""
    kind = finished.WhichOneof("matched")
    if kind == "stop":
        return finished.stop
    return finished.stop_token_id if kind == "stop_token_id" else None
