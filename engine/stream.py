"""What comes of one request, from the client that hears it to the call that waits for it. Belongs to one event loop."""

import asyncio
from typing import Final, Self

import msgspec

from engine.messages import RequestStart, SequenceOutput
from engine.request import FinishReason, Request

PIECE: Final = 256  # tokens: with logprobs of 20 others for each it takes some milliseconds to make messages of them


class RequestStream:
    """The events of one request: RequestStart once, then lists of SequenceOutput, one entry an index at most.

    Nothing is taken in before `accepted` is done: until then the core speaks of an earlier request with the same id.
    What the reader has not taken is merged, so that the memory held is bounded by the request's own tokens, and handed
    out in pieces of PIECE tokens. Ends after the last index has finished, or after an entry with FinishReason.ABORT.
    Raises what `fail` was told.
    """

    def __init__(self, request: Request) -> None:
        self.request_id = request.request_id
        self.accepted: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._open_indexes = set(range(request.params.n))
        self._start: RequestStart | None = None
        self._pending: dict[int, SequenceOutput] = {}
        self._news: asyncio.Future[None] | None = None  # what the reader waits for
        self._error: Exception | None = None

    @property
    def ended(self) -> bool:
        """Whether the core has nothing more to say about this request."""
        return not self._open_indexes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestStart | list[SequenceOutput]:
        while True:
            if self._start is not None:
                start, self._start = self._start, None
                return start
            if self._pending:
                waiting, self._pending = self._pending, {}
                return [self._piece(output) for output in waiting.values()]
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def _piece(self, output: SequenceOutput) -> SequenceOutput:
        """The beginning of what a slow reader has left; the rest is pending again."""
        ids, logprobs = output.token_ids, output.logprobs
        if len(ids) <= PIECE:
            return output
        at = len(logprobs) // len(ids) * PIECE
        piece = SequenceOutput(
            output.request_id, output.index, ids[:PIECE], None, logprobs[:at], output.prompt_logprobs
        )
        del ids[:PIECE], logprobs[:at]
        output.prompt_logprobs = bytearray()
        self._pending[output.index] = output
        return piece

    def put_start(self, start: RequestStart) -> None:
        """Called by the client: the first step has been scheduled."""
        if self.accepted.done():
            self._start = start
            self._wake()

    def put(self, output: SequenceOutput) -> None:
        """Called by the client: tokens have come."""
        if not self.accepted.done():
            return
        if output.finish is FinishReason.ABORT and self._open_indexes:
            output.index = min(self._open_indexes)  # one that the reader still waits for
            self._open_indexes.clear()
        elif output.index not in self._open_indexes:
            return
        earlier = self._pending.get(output.index)
        if earlier is None:
            self._pending[output.index] = output
        else:
            earlier.token_ids += output.token_ids
            earlier.logprobs += output.logprobs
            earlier.prompt_logprobs += output.prompt_logprobs
            earlier.finish = output.finish
        if output.finish is not None:
            self._open_indexes.discard(output.index)
        self._wake()

    def end_index(self, index: int) -> None:
        """Nothing more is wanted of this index."""
        self._open_indexes.discard(index)
        self._pending.pop(index, None)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Called by the client: the core is gone."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
