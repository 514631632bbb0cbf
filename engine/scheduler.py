"""Iteration-level scheduling: which tokens go through the model in the next step. Plain data; knows no torch, no text.

There are no phases. Every running sequence has `num_computed` chasing `num_tokens`; a step gives each as much of its
gap as the token budget allows: decodes first, then chunks of running prompts, then admissions (in the order of
`engine.waiting`). `schedule` needs lengths only, so it may be called again before earlier steps are collected.

Rules kept here:
- Steps are executed in the order of their ids. Row and pages of a sequence that leaves (finished, aborted, preempted)
  go back when no step in flight uses them; until then it is not admitted again.
- A page enters the tree when the step that fills it has been scheduled and its tokens are known: prompt pages in
  `schedule`, generated ones in `update`.
- A failed step ends its sequences, and withdraws from the tree what it wrote. Sequences of a later step in flight that
  read such pages are restarted: that sample is void, the text so far is kept. A sequence whose logits were not finite
  ends, and its whole cached prefix is withdrawn: the page that spoilt it may be one that it only read.
- Out of pages, the sequence of the last rank is preempted (of the tenant that has had most, where there are several):
  its pages stay in the tree, it goes back to the place of its rank in the queue. Nothing is admitted in such a step.
- A sequence is admitted when all its known tokens fit, with a watermark to spare if others run: as many in a step as
  have MOVING tokens together, cached ones too, so that no step is long in the making. Up to `look_ahead` that
  do not fit are passed by, each MAX_OVERTAKEN times at most; then nobody of a later rank is admitted before it.
- With full-length reservation a sequence gets, when it is admitted, the pages of its prompt and all its max_tokens, as
  engines without paging do, and never lacks one afterwards.
- Logprobs of a prompt are of its leader, in the order of its tokens, each once: after a preemption it goes on behind
  those that have been collected. What is still to be reported is computed, never matched.
- Without chunked prefill, prompts come before decodes and wait for a step that takes them whole; only a prompt beyond
  the whole budget is cut.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from engine.cache.kv_cache import KVCache
from engine.cache.pool import check
from engine.config import EngineConfig
from engine.grammar import GrammarError, GrammarMatcher, Grammars
from engine.limits import check_limits
from engine.messages import CoreInfo, CoreStats
from engine.ngram import PromptRuns
from engine.plan import Plan
from engine.request import FinishReason, RejectReason, Request, RequestRejected
from engine.sequence import Sequence, SequenceUpdate, State
from engine.step import Draft, PageUpdate, PromptLogprobs, RowInit, RowWork, Sample, Step, StepResult
from engine.trace import TraceEvent, Tracer
from engine.waiting import DECODE_WORK, MAX_OVERTAKEN, PREFILL_WORK, WaitingQueue

WATERMARK = 0.01  # of the pool; at least one page
MOVING = 131_072  # tokens of the sequences that take a row in one step, if there are several
READING = 2048  # tokens of prompts that a step reads for guesses, beside those that it computes

_tuple = tuple.__new__


class Scheduler:
    """Continuous batching over a paged KV pool with a prefix cache.

    Args:
        config: how requests are queued, admitted and guessed for.
        info: the pool, and the most that a step and a sequence may hold.
        grammars: makes the matchers of requests that have a grammar.
        tracer: is told what happens to each request.
        watermark: share of the pool to spare when one is admitted beside others (0: none).

    Attributes:
        cache: the pages and the tree.
        draining: no new request is taken.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: CoreInfo,
        grammars: Grammars | None = None,
        tracer: Tracer | None = None,
        *,
        watermark: float = WATERMARK,
    ) -> None:
        self.draining = False
        self.grammars = grammars or Grammars()
        self.tracer = tracer or Tracer(0)
        self._config, self._info = config, info
        self.cache = KVCache(info.num_pages, info.page_size, prefix_cache=config.prefix_cache)
        self._budget = info.max_num_batched_tokens
        self._reserve = config.reserve_full_length
        self._guess = 0 if config.speculative == "off" else config.speculative_length
        self._max_samples = info.max_samples or info.max_num_seqs
        self._watermark = 0 if self._reserve or not watermark else max(1, int(info.num_pages * watermark))
        self._eos = dict.fromkeys(info.eos_token_ids, FinishReason.EOS)
        self._random = random.Random(config.seed)
        self._stats = CoreStats(total_pages=info.num_pages)
        self._live: dict[str, dict[int, Sequence]] = {}  # unfinished sequences, by request and index
        self._waiting = WaitingQueue(config, self.cache.hit if config.admission == "prefix" else None)
        self._prefilling: dict[Sequence, None] = {}  # running, in the order of admission
        self._decoding: dict[Sequence, None] = {}
        self._leaving: list[Sequence] = []  # no longer running, but used by a step in flight
        self._rows: dict[int, Sequence] = {}  # of those running and leaving
        self._free_rows = list(range(info.max_num_seqs - 1, -1, -1))
        self._asked: dict[int, int] = {}  # rows whose samples have logprobs, and of how many of the likeliest
        self._in_flight: dict[int, Step] = {}
        self._next_id = 0
        self._short = False  # the step before lacked pages

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises: RequestRejected.
        """
        try:
            matchers = self._check(request)
        except RequestRejected:
            self._stats.requests_rejected += 1
            raise
        self._stats.requests_accepted += 1
        params, arrival = request.params, self._stats.requests_accepted
        if params.seed is None:
            request = replace(request, params=replace(params, seed=self._random.getrandbits(63)))
        guessing = self._guess > 0 and request.speculative
        guess = (self._guess, PromptRuns(request.prompt, self._config.speculative_window)) if guessing else None
        sequences = [
            Sequence(request, index, (-request.priority, arrival, index), matcher, self._eos, guess)
            for index, matcher in enumerate(matchers)
        ]
        self._live[request.request_id] = dict(enumerate(sequences))
        self._waiting.join(request)
        before = [("arrived", request.arrival), *request.marks]
        self.tracer.begin(request.request_id, [TraceEvent(at, kind, {}) for kind, at in before])
        ahead = len(self._waiting)
        self.tracer.add(request.request_id, "queued", prompt_tokens=len(request.prompt), n=params.n, ahead=ahead)
        self._enqueue(sequences)

    def _check(self, request: Request) -> list[GrammarMatcher | None]:
        """The matchers of the request's sequences. Raises: RequestRejected where it cannot be taken."""
        if self.draining:
            raise RequestRejected(RejectReason.DRAINING, "the engine is draining and takes no new requests")
        if request.request_id in self._live:
            raise RequestRejected(RejectReason.DUPLICATE_ID, f"a request {request.request_id!r} is live", "request_id")
        check_limits(request, self._info)
        self._waiting.check_room(len(request.prompt))
        if not request.grammar:
            return [None] * request.params.n
        try:
            matchers = [self.grammars.matcher(request.grammar) for _ in range(request.params.n)]
        except GrammarError as error:
            raise RequestRejected(RejectReason.INVALID, str(error), "constraint") from error
        if None in matchers:
            raise RequestRejected(RejectReason.UNKNOWN_GRAMMAR, "the engine does not hold this grammar", "constraint")
        return matchers

    def _enqueue(self, siblings: list[Sequence]) -> None:
        """Queues the first of these; the others wait for it to have the prompt computed."""
        leader, *leader.followers = siblings
        leader.leader = None
        for follower in leader.followers:
            follower.leader = leader
        self._waiting.add(leader)

    def abort(self, request_id: str) -> bool:
        """Ends a request, whatever it is doing. Nothing more is reported of it.

        Returns: whether it was live.
        """
        sequences = list(self._live.get(request_id, {}).values())
        for sequence in reversed(sequences):  # followers before their leader: none is to take its place
            self._end(sequence, FinishReason.ABORT)
        return bool(sequences)

    def end_sequence(self, request_id: str, index: int) -> None:
        """Ends one sequence (its stop string was found). Nothing more is reported of it; an unknown one is ignored."""
        sequence = self._live.get(request_id, {}).get(index)
        if sequence is not None:
            self._end(sequence, FinishReason.STOP_STRING)

    def is_live(self, request_id: str) -> bool:
        """Whether a sequence of the request is unfinished."""
        return request_id in self._live

    # A step is made.

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
                plan.draw(row, sequence.mask())
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
        wait as all their guesses have room for: the others would lose the overlap of steps for nothing.
        """
        if sequence.num_tokens == len(sequence.tokens):
            return False
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
            if room <= 0 or ngrams is None:
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
                plan.draw(row, mask)
            plan.drafts.append(Draft(row, start, guesses[:count]))
            sequence.guessed = True
            plan.budget -= count
            self._stats.draft_tokens += count
            self._waiting.charge(sequence.request.tenant, PREFILL_WORK * count)

    def _prefill(self, plan: Plan) -> None:
        for sequence in tuple(self._prefilling):
            if plan.budget and sequence.state is State.RUNNING:
                self._compute(plan, sequence)

    def _admit(self, plan: Plan) -> None:
        passed: list[Sequence] = []
        candidates = self._waiting.candidates()
        while self._free_rows and plan.budget and plan.moving > 0 and not plan.short:
            sequence = next(candidates, None)
            if sequence is None or sequence.row >= 0:  # a step in flight uses what it held
                return
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
                self._stats.prefix_query_tokens += min(sequence.num_tokens, sequence.logprobs_from)
                self._stats.prefix_hit_tokens += hit
                self.cache.count_hit(sequence)

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
        self._stats.prefill_tokens += chunk
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
        plan.draw(sequence.row, sequence.mask())
        sequence.num_tokens += 1
        sequence.last_step = plan.step_id
        self._decoding[sequence] = None

    def _fork(self, plan: Plan, leader: Sequence, sibling: Sequence) -> None:
        """A sibling goes on from the leader's prompt. It queues on its own where it does not fit in this step."""
        sibling.leader = None
        # Full pages are shared.
        wanted = len(leader.pages) - leader.num_computed // self.cache.page_size if self._reserve else 1
        shared = leader.node is not None  # so that it finds the prompt again
        if self._free_rows and self.cache.available - wanted >= self._watermark and (plan.moving > 0 or not shared):
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
        priority, arrival, index = sequence.rank
        return priority, self._waiting.work(sequence.request.tenant), arrival, index

    # Sequences leave.

    def _preempt(self, sequence: Sequence) -> None:
        self._stats.preemptions += 1
        self._trace(sequence, "preempted", pages=len(sequence.pages), tokens=len(sequence.tokens))
        self._stop(sequence)
        sequence.state = State.WAITING
        self._waiting.add(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """The sequence is over, in whatever state it was."""
        generated = max(0, len(sequence.tokens) - len(sequence.request.prompt))
        self._trace(sequence, "finished", reason=reason.name, tokens=generated)
        if sequence.state is State.RUNNING:
            self._stop(sequence)
        elif sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.state = State.FINISHED
        if sequence.followers:
            sequence.followers[0].logprobs_from = sequence.logprobs_from
            self._enqueue(sequence.followers)
            sequence.followers = []
        request_id = sequence.request.request_id
        siblings = self._live[request_id]
        del siblings[sequence.index]
        if not siblings:
            del self._live[request_id]
            self._waiting.leave(sequence.request)
            if reason is FinishReason.ABORT:
                self._stats.requests_aborted += 1
            else:
                self._stats.requests_finished += 1

    def _stop(self, sequence: Sequence) -> None:
        """A running sequence stops; row and pages go back now, or with the last step in flight that uses them."""
        self._prefilling.pop(sequence, None)
        self._decoding.pop(sequence, None)
        if self._in_use(sequence):
            self._leaving.append(sequence)
        else:
            self._release(sequence)

    def _in_use(self, sequence: Sequence) -> bool:
        """Whether a step in flight, or the one in the making, uses row and pages."""
        return sequence.last_step >= next(iter(self._in_flight), self._next_id)

    def _release(self, sequence: Sequence) -> None:
        self._trace(sequence, "released", pages=len(sequence.pages), cached_tokens=sequence.num_cached)
        del self._rows[sequence.row]
        self._asked.pop(sequence.row, None)
        self._free_rows.append(sequence.row)
        sequence.row = -1
        sequence.num_tokens = len(sequence.tokens)
        self.cache.release(sequence)

    def _sweep(self) -> None:
        """Takes back what leaving sequences held, as soon as nothing uses it."""
        leaving, self._leaving = self._leaving, []
        for sequence in leaving:
            if self._in_use(sequence):
                self._leaving.append(sequence)
            else:
                self._release(sequence)

    def _trace(self, sequence: Sequence, kind: str, **attributes: int | float | str) -> None:
        self.tracer.add(sequence.request.request_id, kind, index=sequence.index, **attributes)

    # A step is collected.

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
                self._stats.accepted_tokens += max(0, len(taken) - 1)
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
        self._stats.generated_tokens += len(updates) - before + more
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
        rows = dict.fromkeys([work.row for work in step.works] + [sample.row for sample in step.samples])
        parts = [self._rows[row] for row in rows]
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

    # What is known of it all.

    @property
    def has_work(self) -> bool:
        """Whether a request is live."""
        return bool(self._live)

    @property
    def num_running(self) -> int:
        """Sequences that have a row and are not leaving it."""
        return len(self._decoding) + len(self._prefilling)

    @property
    def num_waiting(self) -> int:
        """Sequences that are queued, preempted, or wait for a sibling to have their prompt computed."""
        return sum(map(len, self._live.values())) - self.num_running

    @property
    def stats(self) -> CoreStats:
        """Counters, and gauges brought up to date; what concerns steps and time is for the core to fill in."""
        stats = self._stats
        stats.running_sequences = self.num_running
        stats.waiting_sequences = self.num_waiting
        stats.live_requests = len(self._live)
        stats.free_pages = self.cache.num_free
        stats.cached_pages = self.cache.num_cached
        stats.used_pages = stats.total_pages - stats.free_pages - stats.cached_pages
        return stats

    def check_integrity(self) -> None:
        """Compares all books with one another; O(everything).

        Raises: IntegrityError.
        """
        held = list(self._rows.values())
        running = {*self._decoding, *self._prefilling}
        live = {sequence for siblings in self._live.values() for sequence in siblings.values()}
        queued = {*self._waiting, *(follower for sequence in live for follower in sequence.followers)}
        self.cache.check_integrity(held)
        rows = sorted([*self._rows, *self._free_rows])
        check(rows == list(range(self._info.max_num_seqs)), "a row is lost")
        check(all(one.row == row for row, one in self._rows.items()), "a sequence is not in its row")
        used = sorted(map(id, [*running, *self._leaving]))
        check(sorted(map(id, held)) == used, "rows are not those of running and leaving")
        check(self._waiting.in_order, "the queue is out of order, or miscounted")
        check(live == running | queued and not running & queued, "live is not running or queued")
        check(all((one.state is State.RUNNING) == (one in running) for one in live), "a state is wrong")
