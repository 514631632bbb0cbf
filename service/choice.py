"""One continuation of a request: token ids in, serialized Deltas and Finished out. Knows no RPC, no engine process."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from engine.messages import SequenceOutput
from engine.request import FinishReason
from fulcrum.v1 import inference_pb2 as pb
from service.detokenizer import TextStream
from service.errors import ApiError
from service.grammar import invalid_grammar
from service.logprobs import token_logprobs
from service.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from service.parsers.output_parser import OutputParser
from service.tokenizer import Tokenizer
from service.validate import Plan
from service.wire import text_delta

# The engine ended it on a token that is not part of the text.
_STOPPED_BY_TOKEN = (FinishReason.EOS, FinishReason.STOP_TOKEN)
# Ended by a call behind which nothing is wanted: no stop string is empty.
_ENOUGH = ""
# The order within one Delta, by its fields: reasoning, text, tool calls.
_PLACES: dict[type[Event], int] = {Reasoning: 0, Content: 1, CallStart: 2, Arguments: 2}


@dataclass(eq=False, slots=True)
class Choice:
    """Turns one index's tokens into messages.

    Args:
        index: 0 to n - 1.
        plan: what was asked for.
        text: the text of this index; None where neither text nor stop strings are wanted.
        tokenizer: tells the bytes of tokens, where logprobs are wanted.
        parser: reads the text in which stop strings have been looked for: reasoning and tool calls apart from content.

    Attributes:
        tokens: how many tokens count for this index.
        reasoned: how many of them are reasoning.
        finish: how it ended (None while it runs).
        reason: the same as the caller is told it.
    """

    index: int
    plan: Plan
    text: TextStream | None
    tokenizer: Tokenizer
    parser: OutputParser
    tokens: int = 0
    reasoned: int = 0
    finish: FinishReason | None = None
    reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED
    _events: list[Event] = field(default_factory=list)  # not told yet

    def take(self, output: SequenceOutput) -> list[bytes]:
        """The messages that these tokens make: none while the text lags, one Delta, and Finished at the end.

        Tokens after a stop string are dropped: the engine sampled them before it knew.

        Raises ApiError: ABORTED, INVALID_ARGUMENT (INVALID_GRAMMAR) or INTERNAL where the engine gave the sequence up.
        """
        ids, finish = output.token_ids, output.finish
        if finish is FinishReason.ABORT:
            raise ApiError(grpc.StatusCode.ABORTED, "ABORTED", "the request was aborted")
        if finish is FinishReason.GRAMMAR:
            asked = self.plan.constraint
            blamed = "chat.tools" if asked is None else asked.kind
            raise invalid_grammar(blamed, "it allows nothing more here, or takes too much time or memory to follow")
        if finish is FinishReason.ERROR:
            raise ApiError(grpc.StatusCode.INTERNAL, "STEP_FAILED", "the engine could not compute this request")
        if self.plan.max_tokens == 0:  # the engine always draws one
            ids, finish = [], FinishReason.LENGTH
        text, stop = "", None
        if self.text is not None:
            text, stop, used = self._read(self.text, ids, finish)
            if stop is not None:
                ids, finish = ids[:used], FinishReason.STOP_STRING
        self.tokens += len(ids)
        self.finish = finish
        messages = self._deltas(text, ids, self._logprobs(ids, output.logprobs, finish) if output.logprobs else ())
        if finish is not None:
            finished = self._finished(finish, stop, ids)
            self.reason = finished.reason
            messages.append(pb.GenerateResponse(finished=finished).SerializeToString())
        return messages

    def _read(self, stream: TextStream, ids: Sequence[int], finish: FinishReason | None) -> tuple[str, str | None, int]:
        """The text of these ids, the stop string that ended it, and how many ids it took. What is parsed is no text."""
        parser, text = self.parser, ""
        if finish is None and len(ids) == 1 and parser.idle:  # as it nearly always is
            return *stream.step(ids[0]), 1
        hidden = finish in _STOPPED_BY_TOKEN and not self.plan.include_stop
        for position in range(len(ids) - hidden):
            piece, stop = stream.step(ids[position])
            if parser.idle:
                text += piece
            else:
                self._events += parser.feed(piece)
                self.reasoned += parser.thinking
            if parser.complete:
                return "", _ENOUGH, position + 1
            if stop is not None:
                self._events += parser.finish()
                return text, stop, position + 1
        if finish is None:
            return text, None, len(ids)
        piece, stop = stream.finish()
        if parser.idle:
            return text + piece, stop, len(ids)
        self._events += parser.feed(piece) + parser.finish()
        return "", stop, len(ids)

    def _logprobs(
        self, ids: Sequence[int], records: bytes | bytearray, finish: FinishReason | None
    ) -> list[pb.TokenLogprob]:
        """The logprobs of these ids, the last of which has ended the text if it did."""
        found = token_logprobs(self.tokenizer, ids, records, self.plan.job.params.top_logprobs or 0)
        skipped = self.text.skipped if self.text is not None else ()
        for one in found:
            one.hidden = one.token_id in skipped
        if found and finish in _STOPPED_BY_TOKEN and not self.plan.include_stop:
            found[-1].hidden = True
        return found

    def _deltas(self, text: str, ids: Sequence[int], logprobs: Sequence[pb.TokenLogprob]) -> list[bytes]:
        """The Deltas of what was read and of these tokens, if there is something to say."""
        told = ids if self.plan.token_ids else ()
        if not self.plan.text:
            text = ""
        events = [event for event in self._events if not isinstance(event, CallEnd)]
        self._events.clear()
        if not (events or logprobs or told):
            return [text_delta(self.index, text)] if text else []
        if text:
            events.append(Content(text))
        deltas, last = [pb.Delta(index=self.index, token_ids=told, logprobs=logprobs)], 0
        for event in events:
            place = _PLACES[type(event)]
            if place < last:
                deltas.append(pb.Delta(index=self.index))
            last = place
            _put(event, deltas[-1])
        return [pb.GenerateResponse(delta=delta).SerializeToString() for delta in deltas]

    def _finished(self, finish: FinishReason, stop: str | None, ids: Sequence[int]) -> pb.Finished:
        finished = pb.Finished(index=self.index, completion_tokens=self.tokens)
        if finish is FinishReason.LENGTH:
            finished.reason = pb.FINISH_REASON_LENGTH
            return finished
        if self.parser.calls:
            finished.reason = pb.FINISH_REASON_TOOL_CALLS
            return finished
        finished.reason = pb.FINISH_REASON_STOP
        if stop is not None:
            finished.stop = stop
        elif finish is FinishReason.EOS:
            finished.eos_token_id = ids[-1]
        else:
            finished.stop_token_id = ids[-1]
        return finished


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
