"""The Generate calls of one HTTP request as one stream of events. Knows no JSON and no HTTP server."""

import asyncio
import logging
import time
from dataclasses import dataclass

import grpc

from fulcrum.v1 import inference_pb2 as pb
from gateway.choices_format import REASONS, TokenCounts
from gateway.engines import CallContext, EnginePool, Generation, Read
from gateway.errors import ApiError, internal_error

logger = logging.getLogger(__name__)

Merged = asyncio.Queue[tuple[int, pb.GenerateResponse | grpc.aio.AioRpcError | None]]

Event = pb.Started | pb.Delta | pb.Finished | pb.PromptLogprobs


@dataclass(eq=False)
class PromptRefused(Exception):
    """One of several prompts is refused.

    Args:
        number: which, from 0.
        error: why.
    """

    number: int
    error: grpc.aio.AioRpcError


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
        if len(generations) > 1:
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

    async def next(self) -> tuple[int, Event] | None:
        """A choice and how it goes on or ends; or the first of n choices and their start, or logprobs of their prompt.

        None at the end; then `counts` is complete.

        Raises: AioRpcError; ApiError 500 when the engine ends well but has left something out.
        """
        while True:
            number, event = await (self._read_merged() if self._pumps else self._read_one())
            if event is None:
                if self._open_choices or self._open_usages:
                    raise self._broken()
                return None
            first = number * self.n
            match event.WhichOneof("event"):
                case "delta":
                    delta = event.delta
                    index = self._open(first, delta.index)
                    if self.first_text_at is None and (delta.text or delta.reasoning or delta.tool_calls):
                        self.first_text_at = time.monotonic()
                    return index, delta
                case "started":
                    return first, event.started
                case "prompt_logprobs":
                    return first, event.prompt_logprobs
                case "finished":
                    index = self._open(first, event.finished.index)
                    if event.finished.reason not in REASONS:
                        raise self._broken()
                    self._open_choices.remove(index)
                    return index, event.finished
                case "usage":
                    self._open_usages -= 1
                    self.counts.add(event.usage)

    def _open(self, first: int, index: int) -> int:
        """The choice of all that has this index behind the first of its prompt. Raises ApiError: it is not open."""
        if index >= self.n or first + index not in self._open_choices:
            raise self._broken()
        return first + index

    def _broken(self) -> ApiError:
        """The caller is told nothing of it."""
        logger.error("the engine's stream for request %s breaks the contract", self.request_id)
        return internal_error()

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
