"""What became of a step: its tokens are taken in, ends are judged, and what a failed one wrote is withdrawn.

Rules kept here:
- A page that generated tokens have filled enters the tree when they are known.
- A failed step ends its sequences, and withdraws from the tree what it wrote. Sequences of a later step in flight that
  read such pages are restarted: that sample is void, the text so far is kept. A sequence whose logits were not finite
  ends, and its whole cached prefix is withdrawn: the page that spoilt it may be one that it only read.
- Logprobs of a prompt are of its leader, in the order of its tokens, each once: after a preemption it goes on behind
  those that have been collected.
"""

from collections.abc import Iterator
from itertools import chain

from engine.books import Books
from engine.request import FinishReason
from engine.sequence import Sequence, SequenceUpdate, State
from engine.step import Step, StepResult


class Results(Books):
    """Books (which see for the arguments) that take in what steps brought."""

    def update(self, step: Step, result: StepResult) -> list[SequenceUpdate]:
        """Takes in what a step brought: tokens are appended, ends are judged, rows and pages go back."""
        plain = len(step.samples) - step.num_drafts
        updates = [*self._spoilt(step, [at for at in result.failed if at < plain]), *self._prompt_updates(step, result)]
        ended: list[tuple[Sequence, FinishReason]] = []
        before, more = len(updates), 0  # more: tokens behind right guesses; less the one that a grammar refuses
        rows, page_size, running = self._rows, self.cache.page_size, State.RUNNING
        guessed, records, traced = step.guessed(result), step.records(result), self.tracer.keeps
        for (_, row), token in zip(step.samples[:plain], result.tokens[:plain], strict=True):
            sequence = rows[row]
            if sequence.state is not running and self._is_void(sequence, step):
                continue
            tokens = sequence.tokens
            if traced and len(tokens) == len(sequence.request.prompt):
                self._trace(sequence, "first_token", step=step.step_id)
            taken: tuple[int, ...] = (token,)
            finish = None
            if sequence.special:
                taken, finish = sequence.take(token, guessed.get(row, ()))
                more += len(taken) - 1
                self.counts.accepted_tokens += max(0, len(taken) - 1)
            else:
                tokens.append(token)
                if token in sequence.stops or len(tokens) >= sequence.max_length:
                    finish = sequence.judge(token)
            if sequence.num_computed - sequence.num_cached >= page_size:
                self.cache.publish(sequence)
            updates.append(SequenceUpdate(sequence.request.request_id, sequence.index, taken, finish))
            if records:
                updates[-1].logprobs = b"".join(records.get(row, ())[: len(taken)])
            if finish is not None:
                ended.append((sequence, finish))
                if finish is FinishReason.ERROR:
                    updates[-1].message = f"its grammar does not allow token {tokens[-1]}"
        self.counts.generated_tokens += len(updates) - before + more
        for sequence, finish in ended:
            self._end(sequence, finish)
        self._collected(step)
        return updates

    def _prompt_updates(self, step: Step, result: StepResult) -> Iterator[SequenceUpdate]:
        """The logprobs of prompts that a step brought."""
        for wanted, records in zip(step.prompt_logprobs, result.prompt_logprobs, strict=True):
            sequence = self._rows[step.works[wanted.work].row]
            if not self._is_void(sequence, step):
                request = sequence.request
                sequence.logprobs_from = wanted.end if wanted.end < len(request.prompt) else sequence.max_length
                yield SequenceUpdate(request.request_id, sequence.index, (), prompt_logprobs=records)

    def _is_void(self, sequence: Sequence, step: Step) -> bool:
        """Whether a sample is surplus: the sequence had ended, or was restarted after a failure."""
        return sequence.state is State.FINISHED or step.step_id <= sequence.void_through

    def _spoilt(self, step: Step, failed: list[int]) -> Iterator[SequenceUpdate]:
        """Ends the sequences of samples whose logits were not finite.

        The page that spoilt them may be one that the sequence only read. A grammar without a way out spoils none.
        """
        for index in failed:
            sequence = self._rows[step.samples[index].row]
            dead_end = any(at == index and not any(mask) for at, mask in step.masks)
            if not dead_end:
                self.cache.withdraw(sequence, 0)
            if not self._is_void(sequence, step):
                if dead_end:
                    yield self._fail(sequence, "its grammar allows no token", FinishReason.GRAMMAR)
                else:
                    yield self._fail(sequence, "its logits are not finite")

    def _fail(self, sequence: Sequence, message: str, why: FinishReason = FinishReason.ERROR) -> SequenceUpdate:
        self._end(sequence, why)
        return SequenceUpdate(sequence.request.request_id, sequence.index, (), why, message=message)

    def fail(self, step: Step, message: str) -> list[SequenceUpdate]:
        """The step raised: its sequences end with ERROR, and what it wrote is trusted no more. All others live on."""
        spoilt: set[int] = set()
        for later in self._in_flight.values():
            if later.step_id >= step.step_id:
                self._taint(later, spoilt, all_of_it=later is step)
        for work in step.works:
            self.cache.withdraw(self._rows[work.row], work.start // self.cache.page_size)
        # Also of a sequence that only took its row in it, in a static batch: the runner may know nothing of that.
        named = [work.row for work in step.works], [one.row for one in step.samples], [init.row for init in step.inits]
        parts = [self._rows[row] for row in dict.fromkeys(chain(*named))]
        updates = [self._fail(sequence, message) for sequence in parts if not self._is_void(sequence, step)]
        for sequence in list(self._rows.values()):
            if not spoilt.isdisjoint(sequence.pages):
                sequence.void_through = sequence.last_step
                if sequence.state is State.RUNNING:
                    self._preempt(sequence)
        self._collected(step)
        return updates

    def _taint(self, step: Step, spoilt: set[int], *, all_of_it: bool) -> None:
        """Adds the pages that a step writes wrongly: a failed one all, a later one those that follow from `spoilt`."""
        for row, start, length in step.works:
            pages = self._rows[row].pages
            if all_of_it or not spoilt.isdisjoint(pages):
                spoilt.update(pages[start // self.cache.page_size : -(-(start + length) // self.cache.page_size)])
        spoilt.update(target for source, target in step.copies if source in spoilt)

    def _collected(self, step: Step) -> None:
        del self._in_flight[step.step_id]
        self._sweep()
