"""One continuation of a request: token ids in, serialized Deltas and Finished out. Knows no RPC, no engine process."""

from collections.abc import Sequence

import grpc

from engine.messages import SequenceOutput
from engine.request import FinishReason
from fulcrum.v1 import inference_pb2 as pb
from service.detokenizer import TextStream
from service.errors import ApiError
from service.grammar import invalid_grammar
from service.logprobs import token_logprobs
from service.tokenizer import Tokenizer
from service.validate import Plan
from service.wire import text_delta

# The engine ended it on a token that is not part of the text.
STOPPED_BY_TOKEN = (FinishReason.EOS, FinishReason.STOP_TOKEN)


class Choice:
    """Turns one index's tokens into messages.

    Args:
        index: 0 to n - 1.
        plan: what was asked for.
        text: the text of this index; None where neither text nor stop strings are wanted.
        tokenizer: tells the bytes of tokens, where logprobs are wanted.

    Attributes:
        tokens: how many tokens count for this index.
        reasoned: how many of them are reasoning.
        finish: how it ended (None while it runs).
        reason: the same as the caller is told it.
    """

    __slots__ = ("_plan", "_text", "_tokenizer", "finish", "index", "reason", "reasoned", "tokens")

    def __init__(self, index: int, plan: Plan, text: TextStream | None, tokenizer: Tokenizer | None = None) -> None:
        self.index = index
        self.tokens = self.reasoned = 0
        self.finish: FinishReason | None = None
        self.reason = pb.FINISH_REASON_UNSPECIFIED
        self._plan = plan
        self._text = text
        self._tokenizer = tokenizer

    def take(self, output: SequenceOutput) -> list[bytes]:
        """The messages that these tokens make: none while the text lags, one Delta, and Finished at the end.

        Tokens after a stop string are dropped: the engine sampled them before it knew.

        Raises ApiError: ABORTED, INVALID_ARGUMENT (INVALID_GRAMMAR) or INTERNAL where the engine gave the sequence up.
        """
        ids, finish = output.token_ids, output.finish
        if finish is FinishReason.ABORT:
            raise ApiError(grpc.StatusCode.ABORTED, "ABORTED", "the request was aborted")
        if finish is FinishReason.GRAMMAR:
            asked = self._plan.constraint
            raise invalid_grammar(
                "chat.tools" if asked is None else asked.kind,
                "it allows nothing more here, or takes too long to follow",
            )
        if finish is FinishReason.ERROR:
            raise ApiError(grpc.StatusCode.INTERNAL, "STEP_FAILED", "the engine could not compute this request")
        if self._plan.max_tokens == 0:  # the engine always draws one
            ids, finish = [], FinishReason.LENGTH
        text, stop = "", None
        if self._text is not None:
            text, stop, used = self._read(self._text, ids, finish)
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
        """The text of these ids, the stop string that ended it, and how many ids it took."""
        if finish is None and len(ids) == 1:  # as it nearly always is
            return *stream.step(ids[0]), 1
        text = ""
        hidden = finish in STOPPED_BY_TOKEN and not self._plan.include_stop
        for position in range(len(ids) - hidden):
            piece, stop = stream.step(ids[position])
            text += piece
            if stop is not None:
                return text, stop, position + 1
        if finish is None:
            return text, None, len(ids)
        piece, stop = stream.finish()
        return text + piece, stop, len(ids)

    def _logprobs(
        self, ids: Sequence[int], records: bytes | bytearray, finish: FinishReason | None
    ) -> list[pb.TokenLogprob]:
        """The logprobs of these ids, the last of which has ended the text if it did."""
        assert self._tokenizer is not None
        found = token_logprobs(self._tokenizer, ids, records, self._plan.job.params.top_logprobs or 0)
        skipped = self._text.skipped if self._text is not None else ()
        for one in found:
            one.hidden = one.token_id in skipped
        if found and finish in STOPPED_BY_TOKEN and not self._plan.include_stop:
            found[-1].hidden = True
        return found

    def _deltas(self, text: str, ids: Sequence[int], logprobs: Sequence[pb.TokenLogprob]) -> list[bytes]:
        """The Delta of this text and these tokens, if there is something to say."""
        if not self._plan.text:
            text = ""
        if not (logprobs or (ids and self._plan.token_ids)):
            return [text_delta(self.index, text)] if text else []
        delta = self._tokens_delta(ids, logprobs)
        delta.text = text
        return [pb.GenerateResponse(delta=delta).SerializeToString()]

    def _tokens_delta(self, ids: Sequence[int], logprobs: Sequence[pb.TokenLogprob]) -> pb.Delta:
        """A Delta with these tokens and no text."""
        return pb.Delta(index=self.index, token_ids=ids if self._plan.token_ids else (), logprobs=logprobs)

    def _finished(self, finish: FinishReason, stop: str | None, ids: Sequence[int]) -> pb.Finished:
        finished = pb.Finished(index=self.index, completion_tokens=self.tokens)
        if finish is FinishReason.LENGTH:
            finished.reason = pb.FINISH_REASON_LENGTH
            return finished
        finished.reason = pb.FINISH_REASON_STOP
        if stop is not None:
            finished.stop = stop
        elif finish is FinishReason.EOS:
            finished.eos_token_id = ids[-1]
        else:
            finished.stop_token_id = ids[-1]
        return finished
