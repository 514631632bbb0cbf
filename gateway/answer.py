"""The Generate calls of one HTTP request as one stream of pieces. Knows no JSON and no HTTP server."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from fulcrum.v1 import inference_pb2 as pb
from gateway.engines import CallContext, EnginePool, Generation
from gateway.errors import internal_error
from gateway.sse import Ending, TokenCounts

REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A choice goes on by this text, or ends."""

    index: int
    text: str
    ending: Ending | None = None


class Answer:
    """What the engine generates for one HTTP request: `n` choices for each prompt. Close it, or its calls run on."""

    def __init__(self, generations: list[Generation], n: int) -> None:
        """Use `Answer.open`."""
        self._generations = generations
        self._n = n
        self.choices = n * len(generations)
        self.counts = TokenCounts()
        self.first_text_at: float | None = None  # on the monotonic clock
        # The engine's id and its name of the model; of several prompts the first one's.
        self.request_id = generations[0].accepted.request_id
        self.model = generations[0].accepted.model

    @classmethod
    async def open(cls, pool: EnginePool, requests: list[pb.GenerateRequest], n: int, context: CallContext) -> "Answer":
        """Starts one Generate for each request and waits until all are accepted.

        Raises: AioRpcError or ApiError of the first one that is refused; then the others are cancelled.
        """
        tasks = [asyncio.create_task(pool.generate(request, context)) for request in requests]
        generations: list[Generation] = []
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            refused = [error for task in tasks if task.done() and (error := task.exception())]
            if refused:
                raise refused[0]
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
        for generation in self._generations:
            generation.cancel()

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer as it comes: per choice its texts, then one ending. Afterwards `counts` is complete.

        Raises: AioRpcError; ApiError 500 when the engine ends well but has left something out.
        """
        open_choices = set(range(self.choices))
        open_usages = len(self._generations)
        async for number, event in self._events():
            kind = event.WhichOneof("event")
            if kind == "delta":
                if event.delta.text:
                    if self.first_text_at is None:
                        self.first_text_at = time.monotonic()
                    yield Piece(number * self._n + event.delta.index, event.delta.text)
            elif kind == "finished":
                finished = event.finished
                index = number * self._n + finished.index
                if index not in open_choices or finished.reason not in REASONS:
                    raise internal_error()
                open_choices.remove(index)
                yield Piece(index, "", Ending(REASONS[finished.reason], matched(finished)))
            elif kind == "usage":
                open_usages -= 1
                self.counts.prompt += event.usage.prompt_tokens
                self.counts.completion += event.usage.completion_tokens
                self.counts.cached += event.usage.cached_tokens
        if open_choices or open_usages:
            raise internal_error()

    async def _events(self) -> AsyncIterator[tuple[int, pb.GenerateResponse]]:
        """The events of all calls, each with its prompt's number; in order within a prompt."""
        if len(self._generations) == 1:
            async for event in self._generations[0].events:
                yield 0, event
            return
        merged: asyncio.Queue[tuple[int, pb.GenerateResponse | grpc.aio.AioRpcError | None]]
        merged = asyncio.Queue(maxsize=len(self._generations))
        pumps = [
            asyncio.create_task(pump(number, generation.events, merged))
            for number, generation in enumerate(self._generations)
        ]
        try:
            running = len(pumps)
            while running:
                number, item = await merged.get()
                if item is None:
                    running -= 1
                elif isinstance(item, grpc.aio.AioRpcError):
                    raise item
                else:
                    yield number, item
        finally:
            for task in pumps:
                task.cancel()


async def pump(
    number: int,
    events: AsyncIterator[pb.GenerateResponse],
    merged: "asyncio.Queue[tuple[int, pb.GenerateResponse | grpc.aio.AioRpcError | None]]",
) -> None:
    """Moves one call's events, then how it ended, into the bounded queue: a slow reader slows the engine."""
    try:
        async for event in events:
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
