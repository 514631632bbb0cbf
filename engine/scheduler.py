"""Iteration-level scheduling: which tokens go through the model in the next step. Plain data; knows no torch, no text.

There are no phases. Every running sequence has `num_computed` chasing `num_tokens`; a step gives each as much of its
gap as the token budget allows: decodes first, then chunks of running prompts, then admissions (in the order of
`engine.waiting`). Of prompts under way the one of which least is left is computed first; one that waits goes before it
if it is shorter still and has the turn, or is of higher priority.
`schedule` needs lengths only, so it may be called again before earlier steps are collected.

Rules kept here (more are in `engine.books` and `engine.results`):
- Steps are executed in the order of their ids.
- A full page of a prompt enters the tree when the step that fills it is scheduled.
- Out of pages, the sequence of the last rank is preempted (of the tenant that has had most, where there are several).
  Nothing is admitted in such a step.
- A sequence is admitted when all its known tokens fit beside what running prompts of no lower priority still lack, with
  a watermark to spare if others run: as many in a step as have MOVING tokens together, cached ones too, so that no step
  is long in the making. Up to `look_ahead` that do not fit are passed by, each MAX_OVERTAKEN times at most; then nobody
  of a later rank is admitted before it.
- With full-length reservation a sequence gets, when it is admitted, the pages of its prompt and all its max_tokens, as
  engines without paging do, and never lacks one afterwards.
- Tokens of a prompt whose logprobs are still to be reported are computed, never matched.
- Grammars are followed for FOLLOWING seconds of a step, in the order of admission; the others wait for the next one.
- Without chunked prefill, prompts come before decodes and wait for a step that takes them whole; only a prompt beyond
  the whole budget is cut.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from engine.config import EngineConfig
from engine.messages import CoreInfo
from engine.plan import Plan
from engine.results import Results
from engine.sequence import Sequence, State
from engine.step import Draft, PageUpdate, PromptLogprobs, RowInit, RowWork, Sample, Step
from engine.waiting import DECODE_WORK, MAX_OVERTAKEN, PREFILL_WORK

WATERMARK = 0.01  # of the pool; at least one page
MOVING = 131_072  # tokens of the sequences that take a row in one step, if there are several
READING = 2048  # tokens of prompts that a step reads for guesses, beside those that it computes

_tuple = tuple.__new__


def _left(sequence: Sequence) -> tuple[int, int]:
    """What prompts under way are ordered by: in turns all would be late, and in the order of coming the short ones."""
    return sequence.rank[0], sequence.num_tokens - sequence.num_computed


class Scheduler(Results):
    """Continuous batching over a paged KV pool with a prefix cache.

    Args (the others are those of Books):
        watermark: share of the pool to spare when one is admitted beside others (0: none).
    """

    def __init__(self, config: EngineConfig, info: CoreInfo, *, watermark: float = WATERMARK) -> None:
        super().__init__(config, info)
        self._budget = info.max_num_batched_tokens
        self._reserve = config.reserve_full_length
        self._max_samples = info.max_samples or info.max_num_seqs
        self._watermark = 0 if self._reserve or not watermark else max(1, int(info.num_pages * watermark))
        self._short = False  # the step before lacked pages

    def schedule(self) -> Step | None:
        """The next step, or None if nothing can run before a step in flight is collected, or at all.

        With no step in flight and `has_work`, there always is one. Every step must be given to `update` or `fail`.
        """
        step = self._plan()
        if step is None and self._short and not self._in_flight:
            # The last that ran lacked a page, because it held copies of cached ones, and gave all back: it fits again.
            step = self._plan()
        return step

    def _plan(self) -> Step | None:
        plan = Plan(self._next_id, self._budget, reading=READING, moving=MOVING)
        decoding = tuple(self._decoding)
        decode_first = self._config.chunked_prefill or self._short
        if decode_first:
            self._decode(plan, decoding)
        if self._prefilling:
            first = min(self._prefilling, key=_left)
            turn, left = self._waiting.turn(first), _left(first)
            self._admit(plan, lambda one: self._waiting.turn(one) < turn and _left(one) < left)
        self._prefill(plan)
        self._admit(plan)
        if not decode_first:
            self._decode(plan, decoding)
        if not plan.short:
            self._speculate(plan)
        self._short = plan.short
        return self._close(plan)

    def _close(self, plan: Plan) -> Step | None:
        if not plan.works:
            return None
        if asked := self._asked:
            rows = enumerate(sample[1] for sample in plan.samples)
            plan.logprobs = [(index, asked[row]) for index, row in rows if row in asked]
        step = plan.step()
        self._in_flight[step.step_id] = step
        self._next_id += 1
        return step

    def _decode(self, plan: Plan, decoding: tuple[Sequence, ...]) -> None:
        works, samples, page_size, step_id = plan.works, plan.samples, self.cache.page_size, plan.step_id
        limit, running = len(works) + plan.budget, State.RUNNING
        plan.room = self._max_samples - len(decoding)
        for sequence in decoding:
            place = len(works)
            if place >= limit:
                break
            # It may just have been preempted, or its last token may be in flight.
            if sequence.state is not running or sequence.num_tokens >= sequence.max_length:
                continue
            special = sequence.special
            if special and self._waits(plan, sequence):
                continue
            position, row = sequence.num_computed, sequence.row
            if position == len(sequence.pages) * page_size and not self._grow(plan, sequence, 1):
                continue
            # The plain constructor of a tuple: a named one's own takes three times as long, for every token.
            works.append(_tuple(RowWork, (row, position, 1)))
            if special:
                plan.draw(sequence, sequence.mask())
                if sequence.ngrams is not None and sequence.num_tokens == len(sequence.tokens):
                    plan.guessing.append(sequence)
            else:
                samples.append(_tuple(Sample, (place, row)))
            sequence.num_computed = position + 1
            sequence.num_tokens += 1
            sequence.last_step = step_id
        if self._waiting.contended:
            served = Counter([one.request.tenant for one in decoding if one.last_step == step_id])
            for tenant, count in served.items():
                self._waiting.charge(tenant, DECODE_WORK * count)
        plan.budget = limit - len(works)

    def _waits(self, plan: Plan, sequence: Sequence) -> bool:
        """Whether the sequence has to wait for its last token to be collected, or does better to.

        With a grammar it has to, since that token says what may come, and so it has while guesses may yet be accepted.
        Where guesses go well (`engine.ngram`) it does better to, since they follow its latest token. But only so many
        wait as all their guesses have room for: the others would lose the overlap of steps for nothing. And where the
        grammars before it have taken the step's time, it waits for the next one.
        """
        if sequence.num_tokens == len(sequence.tokens):
            return not plan.may_draw(sequence)
        ngrams, waits = sequence.ngrams, sequence.matcher is not None or sequence.guessed
        if ngrams is not None:
            if not waits and plan.room > 0:
                plan.reading = ngrams.follow(plan.reading)
                waits = ngrams.worth_waiting
            plan.room -= waits * self._guess
        return waits

    def _speculate(self, plan: Plan) -> None:
        """Adds guesses at what decoding sequences draw: with what is left of tokens, samples, and pages to spare.

        A token is drawn behind each, with that position's own random number, as plain decoding would: as long as the
        guess is the token drawn before it, the token behind it counts. So texts are those of plain decoding, greedy or
        not; and a guess x is accepted with probability p(x), else replaced by a draw from what p has besides x, which
        is the rejection rule of speculative sampling for a proposal that is certain (Leviathan et al.,
        arXiv:2211.17192). K and V of a wrong guess lie beyond `num_computed`, where the next step writes.
        """
        spare, page_size = self.cache.available - self._watermark, self.cache.page_size
        for sequence in plan.guessing:
            room = min(plan.budget, self._max_samples - len(plan.samples), sequence.max_length - sequence.num_tokens)
            start, row, ngrams = sequence.num_computed, sequence.row, sequence.ngrams
            if room <= 0 or ngrams is None or not plan.may_draw(sequence):
                continue
            plan.reading = ngrams.follow(plan.reading)
            held = len(sequence.pages) * page_size - start
            guesses = ngrams.guesses(min(room, held + max(0, spare) * page_size))
            masks = sequence.masks_behind(guesses)
            count = len(masks)
            if not count:
                continue
            missing = self.cache.missing(sequence, start + count)
            if missing > 0:
                spare -= missing
                self._lengthen(plan, sequence, missing)
            for place, mask in enumerate(masks, start):
                plan.works.append(RowWork(row, place, 1))
                plan.draw(sequence, mask)
            plan.drafts.append(Draft(row, start, guesses[:count]))
            sequence.guessed = True
            plan.budget -= count
            self.counts.draft_tokens += count
            self._waiting.charge(sequence.request.tenant, PREFILL_WORK * count)

    def _prefill(self, plan: Plan) -> None:
        for sequence in sorted(self._prefilling, key=_left):
            if plan.budget and sequence.state is State.RUNNING and plan.may_draw(sequence):
                self._compute(plan, sequence)

    def _admit(self, plan: Plan, goes: Callable[[Sequence], bool] = lambda _: True) -> None:
        """Admits those that wait and may go."""
        passed: list[Sequence] = []
        candidates = self._waiting.candidates(goes)
        while self._free_rows and plan.budget and plan.moving > 0 and not plan.short:
            sequence = next(candidates, None)
            if sequence is None or sequence.row >= 0:  # a step in flight uses what it held
                return
            if not plan.may_draw(sequence):
                continue
            if self._fits(plan, sequence):
                overtaken = {*passed, *self._waiting.remove(sequence)}
                self._start(plan, sequence)
                self._compute(plan, sequence)
                for one in overtaken:
                    one.overtaken += 1
            else:
                passed.append(sequence)
            if len(passed) > self._config.look_ahead or any(one.overtaken >= MAX_OVERTAKEN for one in passed):
                return

    def _fits(self, plan: Plan, sequence: Sequence) -> bool:
        """Whether the sequence can be admitted; if so, it has its cached prefix."""
        kept = self._watermark if self.num_running else 0
        beside = [one for one in self._prefilling if one.rank[0] <= sequence.rank[0]]
        kept += sum(max(0, self.cache.missing(one, one.num_tokens)) for one in beside)
        if self.cache.available <= kept:
            return False
        self.cache.lock(sequence)
        gap = sequence.num_tokens - sequence.num_computed
        whole = self._config.chunked_prefill or gap <= plan.budget or plan.budget == self._budget
        wanted = sequence.max_length if self._reserve else sequence.num_tokens
        missing = self.cache.missing(sequence, wanted - sequence.num_computed)
        if whole and self.cache.available - missing >= kept:
            self.cache.acquire(sequence)
            return True
        self.cache.release(sequence)
        return False

    def _start(self, plan: Plan, sequence: Sequence) -> None:
        """The sequence begins to run; the first time, its request has started."""
        self._occupy(plan, sequence)
        self._prefilling[sequence] = None
        sequence.overtaken = 0
        hit, pages = sequence.num_computed, len(sequence.pages)
        self._trace(sequence, "admitted", row=sequence.row, cached_tokens=hit, cached_pages=pages)
        if self._waiting.begin(sequence.request):
            plan.started.append((sequence.request.request_id, hit))
            if sequence.node is not None:
                self.counts.prefix_query_tokens += min(sequence.num_tokens, sequence.logprobs_from)
                self.counts.prefix_hit_tokens += hit
                self.cache.count_hit(sequence.node)

    def _occupy(self, plan: Plan, sequence: Sequence) -> None:
        """Takes a row, for a sequence that may have pages already."""
        request = sequence.request
        sequence.state = State.RUNNING
        sequence.row = row = self._free_rows.pop()
        self._rows[row] = sequence
        prompt_length = len(request.prompt)
        if not sequence.tokens:
            sequence.tokens += request.prompt
        tokens = request.prompt if len(sequence.tokens) == prompt_length else tuple(sequence.tokens)
        plan.moving -= len(tokens)
        if request.params.top_logprobs is not None:
            self._asked[row] = request.params.top_logprobs
        plan.inits.append(RowInit(row, tokens, prompt_length, request.params, sequence.index, sequence.stop_mask))
        if self._reserve:
            self.cache.grow(sequence, self.cache.missing(sequence, sequence.max_length))
        if sequence.pages:
            plan.page_updates.append(PageUpdate(row, 0, tuple(sequence.pages)))

    def _compute(self, plan: Plan, sequence: Sequence) -> None:
        """A chunk of a sequence that is being prefilled: what budget and pages allow."""
        position = sequence.num_computed
        gap = sequence.num_tokens - position
        chunk = min(gap, plan.budget)
        missing = self.cache.missing(sequence, position + chunk)
        if missing > 0:
            if not self._grow(plan, sequence, missing):
                return
            chunk = min(chunk, len(sequence.pages) * self.cache.page_size - position)
        plan.works.append(RowWork(sequence.row, position, chunk))
        first = max(sequence.logprobs_from, position + 1)
        end = min(position + 1 + chunk, len(sequence.request.prompt))
        if first < end:
            top = sequence.request.params.prompt_logprobs or 0
            plan.prompt_logprobs.append(PromptLogprobs(len(plan.works) - 1, first, end, top))
        plan.budget -= chunk
        self.counts.prefill_tokens += chunk
        pages = len(sequence.pages)
        self._trace(sequence, "prefill", step=plan.step_id, start=position, tokens=chunk, pages_held=pages)
        self._waiting.charge(sequence.request.tenant, PREFILL_WORK * chunk)
        sequence.num_computed += chunk
        sequence.last_step = plan.step_id
        if sequence.ngrams is not None:
            sequence.ngrams.follow(chunk)
        self.cache.publish(sequence)
        if chunk == gap:
            del self._prefilling[sequence]
            self._draw(plan, sequence)
            followers, sequence.followers = sequence.followers, []
            for follower in followers:
                self._fork(plan, sequence, follower)

    def _draw(self, plan: Plan, sequence: Sequence) -> None:
        """The sequence draws its first token in this row, from the work planned last."""
        plan.draw(sequence, sequence.mask())
        sequence.num_tokens += 1
        sequence.last_step = plan.step_id
        self._decoding[sequence] = None

    def _fork(self, plan: Plan, leader: Sequence, sibling: Sequence) -> None:
        """A sibling goes on from the leader's prompt. It queues on its own where it does not fit in this step."""
        sibling.leader = None
        # Full pages are shared.
        wanted = len(leader.pages) - leader.num_computed // self.cache.page_size if self._reserve else 1
        shared = leader.node is not None  # so that it finds the prompt again
        fits = self._free_rows and self.cache.available - wanted >= self._watermark and plan.may_draw(sibling)
        if fits and (plan.moving > 0 or not shared):
            plan.copies += self.cache.fork(leader, sibling)
            self._occupy(plan, sibling)
            self._draw(plan, sibling)
        else:
            self._waiting.add(sibling)

    def _grow(self, plan: Plan, sequence: Sequence, wanted: int) -> bool:
        """Up to `wanted` pages more for a running sequence, at least one; others are preempted for that one.

        Returns: False if it must wait for pages that steps in flight still use, or has been preempted itself.
        """
        while not self.cache.available:
            plan.short = True
            if self._leaving:
                return False
            victim = max((*self._decoding, *self._prefilling), key=self._standing)
            self._preempt(victim)
            if victim is sequence:
                return False
        self._lengthen(plan, sequence, min(wanted, self.cache.available))
        return True

    def _lengthen(self, plan: Plan, sequence: Sequence, count: int) -> None:
        first = len(sequence.pages)
        plan.page_updates.append(PageUpdate(sequence.row, first, self.cache.grow(sequence, count)))

    def _standing(self, sequence: Sequence) -> tuple[Any, ...]:
        """The last of running sequences in this order is preempted first."""
        return *self._waiting.turn(sequence), sequence.rank
