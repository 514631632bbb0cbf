"""Writes answers of the Responses API: whole, and as its typed events. Knows no gRPC call and no HTTP server."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from fulcrum.v1 import inference_pb2 as pb
from gateway.choices_format import Head, TokenCounts, length
from gateway.errors import ApiError
from gateway.logprobs import ContentTokens, Logprobs, token_logprobs
from gateway.responses_schema import ResponsesRequest
from gateway.sse import HOLE, around, commas, compact, quote


class Kind(NamedTuple):
    """A type of item: how its ids begin, its events' names, and the type of its one part (calls have none)."""

    type: str
    id_prefix: str
    events: str
    part: str


REASONING = Kind("reasoning", "rs", "response.reasoning_text", "reasoning_text")
MESSAGE = Kind("message", "msg", "response.output_text", "output_text")
CALL = Kind("function_call", "fc", "response.function_call_arguments", "")


class ResponsesFormat:
    """A response. It grows item by item, streamed or not: reasoning, messages and calls, as the model writes them."""

    size = 0  # as of ChoicesFormat

    def __init__(self, head: Head, choices: int, body: ResponsesRequest) -> None:
        """Takes the request for what the answer repeats of it."""
        repeated = {"reasoning", "text", "tool_choice", "tools"}
        given = body.model_dump(include=repeated, by_alias=True, exclude_none=True)
        self._id = head.id
        self._output: list[dict[str, Any]] = []
        self._response = {
            "id": f"resp_{head.id}",
            "object": "response",
            "created_at": head.created,
            "status": "in_progress",
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": head.model,
            "output": self._output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | given.get("reasoning", {}),
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}} | given.get("text", {}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": [
                {"description": None, "parameters": None, "strict": None} | tool for tool in given.get("tools", [])
            ],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "background": False,
            "usage": None,
        }
        self._events = 0
        self._cut = False
        self._tokens = ContentTokens()
        self._told: list[list[str]] = []  # JSON of the logprobs of each message, in pieces
        # The open item: its kind, the call's number (0 for others), its pieces, where events say that it is, and what
        # stands before a piece in its event.
        self._open: tuple[Kind, int] | None = None
        self._pieces: list[str] = []
        self._place: dict[str, Any] = {}
        self._before = ""

    def opening(self) -> Iterator[bytes]:
        """The response, still empty."""
        for state in ("response.created", "response.in_progress"):
            yield self._event(state, response=self._response).encode()

    def started(self, indexes: range, started: pb.Started) -> None:
        """Nothing is said of it."""

    def delta(self, index: int, delta: pb.Delta) -> bytes:
        """The events of reasoning, text and calls, in this order."""
        return self._delta(delta).encode()

    def prompt(self, indexes: range, logprobs: Logprobs) -> Iterator[bytes]:
        """A prompt's logprobs have no place."""
        yield from ()

    def ending(self, index: int, finished: pb.Finished) -> bytes:
        """The end of the open item, which the limit of tokens may have cut."""
        self._cut = finished.reason == pb.FINISH_REASON_LENGTH
        rest = self._tokens.rest()  # of a message: what ended it
        events = self._say(MESSAGE, "", logprobs=rest) if rest and self._open == (MESSAGE, 0) else ""
        return (events + self._close("incomplete" if self._cut else "completed")).encode()

    def closing(self, counts: TokenCounts) -> bytes:
        """The whole response."""
        self._complete(counts)
        return self._event(f"response.{self._response['status']}", *self._told, response=self._response).encode()

    def keep(self, index: int, delta: pb.Delta) -> int:
        """The response goes on, as in a stream."""
        events = self._delta(delta)
        # Events are many times as long as a token; logprobs, of which these are mostly made, are kept.
        return len(events) if delta.logprobs else length(delta)

    def keep_prompt(self, indexes: range, logprobs: Logprobs) -> int:
        """A prompt's logprobs have no place."""
        return 0

    def keep_ending(self, index: int, finished: pb.Finished) -> None:
        """As in a stream."""
        self.ending(index, finished)

    def whole(self, counts: TokenCounts) -> Iterator[str]:
        """The answer, in pieces."""
        self._complete(counts)
        return around(self._response, *map(commas, self._told))

    def failed(self, error: ApiError) -> bytes:
        """What went wrong, then the response as far as it came. (Its own error has another, closed list of codes.)"""
        events = self._close("incomplete")
        events += self._event("error", code=error.code, message=error.message, param=error.param)
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return (events + self._event("response.failed", *self._told, response=self._response)).encode()

    def _complete(self, counts: TokenCounts) -> None:
        self._response |= {
            "status": "incomplete" if self._cut else "completed",
            "completed_at": None if self._cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if self._cut else None,
            "usage": {
                "input_tokens": counts.prompt,
                # What is written to the cache is not counted.
                "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
                "output_tokens": counts.completion,
                "output_tokens_details": {"reasoning_tokens": counts.reasoning},
                "total_tokens": counts.prompt + counts.completion,
            },
        }

    def _delta(self, delta: pb.Delta) -> str:
        text, reasoning = delta.text, delta.reasoning
        if delta.logprobs:
            self._tokens.add(delta.logprobs)
        events = self._say(REASONING, reasoning) if reasoning else ""
        if text:
            events += self._say(MESSAGE, text, logprobs=self._tokens.next(text, reasoning))
        elif reasoning:
            self._tokens.rest()  # reasoning has no place for them
        for call in delta.tool_calls:
            events += self._say(CALL, call.arguments, call)
        return events

    def _say(self, kind: Kind, text: str, call: pb.ToolCallDelta | None = None, logprobs: Logprobs = ()) -> str:
        """An item goes on; another kind, or another call, ends the one before."""
        key = (kind, 0 if call is None else call.index)
        events = "" if key == self._open else self._close("completed") + self._begin(kind, call)
        self._open = key
        if not (text or logprobs):
            return events
        self._pieces.append(text)
        told = ',"logprobs":[]' if kind is MESSAGE else ""
        if logprobs:
            self._told[-1].append(compact(token_logprobs(logprobs))[1:-1])
            told = f',"logprobs":[{self._told[-1][-1]}]'
        return f'{events}{self._before}{quote(text)}{told},"sequence_number":{self._number()}}}\n\n'

    def _begin(self, kind: Kind, call: pb.ToolCallDelta | None) -> str:
        index = len(self._output)
        item: dict[str, Any] = {
            "id": f"{kind.id_prefix}_{self._id}_{index}",
            "type": kind.type,
            "status": "in_progress",
        }
        if call is not None:
            item |= {"call_id": call.id, "name": call.name, "arguments": ""}
        elif kind is MESSAGE:
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": [], "encrypted_content": None}
        self._output.append(item)
        self._pieces = []
        if kind is MESSAGE:
            self._told.append([])
        self._place = {"item_id": item["id"], "output_index": index} | ({"content_index": 0} if kind.part else {})
        head = compact({"type": f"{kind.events}.delta"} | self._place).removesuffix("}")
        self._before = f'event: {kind.events}.delta\ndata: {head},"delta":'
        events = self._event("response.output_item.added", output_index=index, item=item)
        if kind.part:
            events += self._event("response.content_part.added", **self._place, part=part(kind, "", told=False))
        return events

    def _close(self, status: str) -> str:
        """The open item, if one is, has come to its end."""
        if self._open is None:
            return ""
        kind, _ = self._open
        self._open = None
        text, item, done = "".join(self._pieces), self._output[-1], f"{kind.events}.done"
        item["status"] = status
        told: list[list[str]] = []
        if kind is CALL:
            item["arguments"] = text
            events = self._event(done, **self._place, name=item["name"], arguments=text)
        else:
            item["content"] = [part(kind, text)]
            logprobs: dict[str, Any] = {"logprobs": [HOLE]} if kind is MESSAGE else {}
            told = self._told[-1:] if kind is MESSAGE else []
            events = self._event(done, *told, **self._place, text=text, **logprobs)
            events += self._event("response.content_part.done", *told, **self._place, part=item["content"][0])
        place = self._place["output_index"]
        return events + self._event("response.output_item.done", *told, output_index=place, item=item)

    def _event(self, type: str, *told: list[str], **fields: Any) -> str:
        data = around({"type": type} | fields | {"sequence_number": self._number()}, *map(commas, told))
        return f"event: {type}\ndata: {''.join(data)}\n\n"

    def _number(self) -> int:
        self._events += 1
        return self._events - 1


def part(kind: Kind, text: str, *, told: bool = True) -> dict[str, Any]:
    """The one part of a message (with a HOLE for its tokens' logprobs, if `told`) or of reasoning."""
    more = {"annotations": [], "logprobs": [HOLE] if told else []}
    return {"type": kind.part, "text": text} | (more if kind is MESSAGE else {})
