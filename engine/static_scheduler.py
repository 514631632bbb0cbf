"""Static batching, the naive baseline that continuous batching is measured against. Knows no torch and no text.

When idle it takes as many waiting sequences as there are rows, and pages for each at its full length, and runs them to
the end of the last one before it takes others. As in a padded tensor, all rows cost the same throughout:
- Every prompt is as long as the longest. The padding of a shorter one is really computed: as the tokens of the longest
  prompt at the places that the padding would have, whose K and V are thereby written again as they were.
- A row that has ended has its last token computed again in every step until the batch is over.
No pages are shared, and siblings compute their prompt each for itself.
"""

from dataclasses import replace

from msgspec import structs

from engine.config import EngineConfig
from engine.messages import CoreInfo
from engine.plan import Plan
from engine.request import FinishReason
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step import RowWork, Step


class StaticScheduler(Scheduler):
    """A `Scheduler` (which see for the arguments) that makes its steps batch by batch, without a prefix cache."""

    def __init__(self, config: EngineConfig, info: CoreInfo) -> None:
        rows = min(info.max_num_seqs, info.max_num_batched_tokens)
        config = replace(config, prefix_cache=False, chunked_prefill=True, reserve_full_length=True)
        super().__init__(config, structs.replace(info, max_num_seqs=rows))
        self._longest: Sequence | None = None  # of the batch, by prompt
        self._padding: list[int] = []  # for each shorter prompt: tokens of padding still to compute

    def schedule(self) -> Step | None:
        """The next step, or None if nothing can run before a step in flight is collected, or at all."""
        plan = Plan(self._next_id, self._budget)
        if not self.num_running and not self._leaving:
            self._begin(plan)
        if self._prefilling or self._padding:
            self._prefill(plan)
            self._pad_prompts(plan)
        if not plan.works:
            self._decode(plan, tuple(self._decoding))
            self._pad_ended(plan)
        return self._close(plan)

    def _begin(self, plan: Plan) -> None:
        batch: list[Sequence] = []
        for sequence in self._waiting.candidates():
            lacking = self.cache.missing(sequence, sequence.max_length) > self.cache.available
            if lacking or not self._free_rows:
                break
            self._waiting.remove(sequence)
            self._start(plan, sequence)
            sequence.last_step = plan.step_id  # though it may compute nothing yet: the step begins its row, or fails to
            batch.append(sequence)
        lengths = [sequence.num_tokens for sequence in batch]
        self._longest = max(batch, key=lambda sequence: sequence.num_tokens, default=None)
        self._padding = [max(lengths) - length for length in lengths if length < max(lengths)]

    def _pad_prompts(self, plan: Plan) -> None:
        longest = self._longest
        if self._prefilling or longest is None:
            return
        length = len(longest.request.prompt)
        # With nobody left the batch is over, and this row may have gone back.
        if not self.num_running or (longest in self._leaving and not _has_drawn(longest)):
            self._padding = []
        while self._padding and plan.budget:
            chunk = min(self._padding[-1], plan.budget)
            plan.works.append(RowWork(longest.row, length - self._padding[-1], chunk))
            plan.budget -= chunk
            longest.last_step = plan.step_id
            self._padding[-1] -= chunk
            if not self._padding[-1]:
                self._padding.pop()

    def _pad_ended(self, plan: Plan) -> None:
        if plan.works:
            for sequence in self._leaving:
                if _has_drawn(sequence):
                    last = min(sequence.num_computed, len(sequence.tokens)) - 1
                    plan.works.append(RowWork(sequence.row, last, 1))
                    sequence.last_step = plan.step_id

    def _enqueue(self, siblings: list[Sequence]) -> None:
        for sibling in siblings:
            super()._enqueue([sibling])

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        super()._end(sequence, reason)
        self._sweep()

    def _in_use(self, sequence: Sequence) -> bool:
        """A row stays until the batch is over."""
        return self.num_running > 0 or super()._in_use(sequence)


def _has_drawn(sequence: Sequence) -> bool:
    """Whether it has computed its prompt; one that ended before may not even have begun its row, in a failed step."""
    return len(sequence.tokens) > len(sequence.request.prompt)
