"""A continuation whose text is read: reasoning and tool calls apart from content. Knows no format of either."""

from collections.abc import Sequence

from engine.request import FinishReason
from fulcrum.v1 import inference_pb2 as pb
from service.choice import STOPPED_BY_TOKEN, Choice
from service.detokenizer import TextStream
from service.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from service.parsers.output_parser import OutputParser
from service.tokenizer import Tokenizer
from service.validate import Plan

# Ended by a call behind which nothing is wanted: no stop string is empty.
_ENOUGH = ""
# The order within one Delta, by its fields: reasoning, text, tool calls.
_PLACES: dict[type[Event], int] = {Reasoning: 0, Content: 1, CallStart: 2, Arguments: 2}


class ParsedChoice(Choice):
    """As Choice, with a parser of its own behind the text; stop strings are looked for before it."""

    __slots__ = ("_events", "_parser")

    def __init__(self, index: int, plan: Plan, text: TextStream, tokenizer: Tokenizer, parser: OutputParser) -> None:
        super().__init__(index, plan, text, tokenizer)
        self._parser = parser
        self._events: list[Event] = []

    def _read(self, stream: TextStream, ids: Sequence[int], finish: FinishReason | None) -> tuple[str, str | None, int]:
        if self._parser.idle:
            return super()._read(stream, ids, finish)
        hidden = finish in STOPPED_BY_TOKEN and not self._plan.include_stop
        for position in range(len(ids) - hidden):
            piece, stop = stream.step(ids[position])
            self._events += self._parser.feed(piece)
            self.reasoned += self._parser.thinking
            if self._parser.complete:
                return "", _ENOUGH, position + 1
            if stop is not None:
                self._events += self._parser.finish()
                return "", stop, position + 1
        if finish is None:
            return "", None, len(ids)
        piece, stop = stream.finish()
        self._events += self._parser.feed(piece)
        self._events += self._parser.finish()
        return "", stop, len(ids)

    def _deltas(self, text: str, ids: Sequence[int], logprobs: Sequence[pb.TokenLogprob]) -> list[bytes]:
        events = [event for event in self._events if not isinstance(event, CallEnd)]
        self._events.clear()
        if not events:
            return super()._deltas(text, ids, logprobs)
        deltas = [self._tokens_delta(ids, logprobs)]
        last = 0
        for event in events:
            place = _PLACES[type(event)]
            if place < last:
                deltas.append(pb.Delta(index=self.index))
            last = place
            _put(event, deltas[-1])
        return [pb.GenerateResponse(delta=delta).SerializeToString() for delta in deltas]

    def _finished(self, finish: FinishReason, stop: str | None, ids: Sequence[int]) -> pb.Finished:
        if self._parser.calls and finish is not FinishReason.LENGTH:
            reason = pb.FINISH_REASON_TOOL_CALLS
            return pb.Finished(index=self.index, completion_tokens=self.tokens, reason=reason)
        return super()._finished(finish, stop, ids)


def _put(event: Event, delta: pb.Delta) -> None:
    match event:
        case Content(text):
            delta.text += text
        case Reasoning(text):
            delta.reasoning += text
        case CallStart(call, call_id, name):
            delta.tool_calls.add(index=call, id=call_id, name=name)
        case Arguments(call, text):
            if not delta.tool_calls or delta.tool_calls[-1].index != call:
                delta.tool_calls.add(index=call)
            delta.tool_calls[-1].arguments += text
