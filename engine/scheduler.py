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
- A sequence with a grammar draws a token only when the one before it has been collected: that one says what may come.
  So does one whose guesses go well (`engine.ngram`); they follow its latest token, and have to be known. But only so
  many wait as all their guesses have room for: the others would lose the overlap of steps for nothing.
- Guesses come last in a step: they get what is left of its tokens and samples, and of the pages beyond the watermark.
  A step draws a token behind each, with that position's own random number, as plain decoding would: as long as the
  guess is the token drawn before it, the token behind it counts. So texts are those of plain decoding, greedy or not;
  and a guess x is accepted with probability p(x), else replaced by a draw from what p has besides x, which is the
  rejection rule of speculative sampling for a proposal that is certain (Leviathan et al., arXiv:2211.17192). K and V
  of a wrong guess lie beyond `num_computed`, where the next step writes.
- Logprobs of a prompt are of its leader, in the order of its tokens, each once: after a preemption it goes on behind
  those that have been collected. What is still to be reported is computed, never matched.
- Without chunked prefill, prompts come before decodes and wait for a step that takes them whole; only a prompt beyond
  the whole budget is cut.
"""

import random
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

from engine.cache.kv_cache import CacheView, KVCache
from engine.cache.pool import IntegrityError
from engine.grammar import GrammarError, Matcher, Matchers
from engine.limits import Limits
from engine.messages import CoreStats
from engine.ngram import NGrams, PromptRuns
from engine.plan import Plan
from engine.request import FinishReason, RejectReason, Request, RequestRejected
from engine.sequence import Sequence, SequenceUpdate, State
from engine.step import Draft, PageUpdate, PromptLogprobs, RowInit, RowWork, Sample, Step, StepResult
from engine.trace import TraceEvent, Tracer
from engine.waiting import DECODE_WORK, PREFILL_WORK, WaitingQueue

__all__ = ["IntegrityError", "Scheduler", "SequenceUpdate"]

MAX_OVERTAKEN = 64
WATERMARK = 0.01  # of the pool; at least one page
MOVING = 131_072  # tokens of the sequences that take a row in one step, if there are several
READING = 2048  # tokens of prompts that a step reads for guesses, beside those that it computes

_tuple = tuple.__new__


class Scheduler:
    """Continuous batching over a paged KV pool with a prefix cache.

    Args:
        num_pages, page_size: the KV pool, and tokens in a page.
        max_num_seqs: rows: most sequences in a step.
        max_num_batched_tokens: most tokens in a step.
        max_model_len: most tokens of prompt and completion.
        vocab_size: token ids are below it.
        eos_token_ids: end a sequence, unless it ignores them.
        prefix_cache: share the pages of equal prefixes.
        chunked_prefill: cut prompts to the budget that decodes leave.
        reserve_full_length: admit only with pages for prompt and max_tokens; kept to measure against.
        longest_prefix_first: of a tenant's waiting sequences, those with the longest cached prefix come first.
        max_queue_requests, max_queue_tokens: requests, and tokens of their prompts, that may wait for their first step.
        look_ahead: how many that do not fit may be passed by (0: strictly first come).
        watermark: share of the pool to spare when one is admitted beside others (0: none).
        speculative_length, speculative_window: of `engine.ngram`; length 0: nothing is guessed.
        max_samples: most tokens drawn in a step, those behind guesses included (0: max_num_seqs).
        seed: of the seeds minted for requests without one (None: new at every start).
        grammars: makes the matchers of requests that have a grammar.
        tracer: is told what happens to each request.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: SequenceOf[int],
        prefix_cache: bool = True,
        chunked_prefill: bool = True,
        reserve_full_length: bool = False,
        longest_prefix_first: bool = False,
        max_queue_requests: int = 16_384,
        max_queue_tokens: int = 16_777_216,
        look_ahead: int = 4,
        watermark: float = WATERMARK,
        speculative_length: int = 0,
        speculative_window: tuple[int, int] = (2, 4),
        max_samples: int = 0,
        seed: int | None = None,
        grammars: Matchers | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.draining = False
        self._grammars = grammars
        self._tracer = tracer
        self._limits = Limits(max_model_len, vocab_size, num_pages * page_size)
        self._cache = KVCache(num_pages, page_size, prefix_cache=prefix_cache)
        self._budget = max_num_batched_tokens
        self._chunked = chunked_prefill
        self._reserve = reserve_full_length
        self._look_ahead = look_ahead
        self._guess = speculative_length, speculative_window
        self._max_samples = max_samples or max_num_seqs
        self._watermark = 0 if reserve_full_length or not watermark else max(1, int(num_pages * watermark))
        self._eos = dict.fromkeys(eos_token_ids, FinishReason.EOS)
        self._random = random.Random(seed)
        self._stats = CoreStats(total_pages=num_pages)
        self._live: dict[str, dict[int, Sequence]] = {}  # unfinished sequences, by request and index
        self._new: dict[str, int] = {}  # live requests of which nothing was scheduled yet: tokens of their prompts
        self._new_tokens = 0  # of all of them
        self._max_new, self._max_new_tokens = max_queue_requests, max_queue_tokens
        self._started: list[tuple[str, int]] = []
        self._num_sequences = 0  # live ones
        self._arrivals = 0
        self._waiting = WaitingQueue(MAX_OVERTAKEN, self._cache.hit if longest_prefix_first else None)
        self._prefilling: dict[Sequence, None] = {}  # running, in the order of admission
        self._decoding: dict[Sequence, None] = {}
        self._leaving: list[Sequence] = []  # no longer running, but used by a step in flight
        self._rows: list[Sequence | None] = [None] * max_num_seqs
        self._asked: dict[int, int] = {}  # rows whose samples have logprobs, and of how many of the likeliest
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._in_flight: dict[int, Step] = {}
        self._next_id = 0
        self._short = False  # the step before lacked pages

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises: RequestRejected.
        """
        try:
            if self.draining:
                raise RequestRejected(RejectReason.DRAINING, "the engine is draining and takes no new requests")
            if request.request_id in self._live:
                message = f"a request {request.request_id!r} is live"
                raise RequestRejected(RejectReason.DUPLICATE_ID, message, "request_id")
            self._limits.check(request)
            self._check_room(len(request.prompt))
            matchers = self._matchers(request)
        except RequestRejected:
            self._stats.requests_rejected += 1
            raise
        self._stats.requests_accepted += 1
        self._arrivals += 1
        params = request.params
        if params.seed is None:
            params = replace(params, seed=self._random.getrandbits(63))
            request = replace(request, params=params)
        stops = dict.fromkeys(params.stop_token_ids, FinishReason.STOP_TOKEN) | ({} if params.ignore_eos else self._eos)
        max_length = len(request.prompt) + params.max_tokens
        guessing = self._guess[0] > 0 and request.speculative
        sequences = [
            Sequence(
                request=request,
                index=index,
                rank=(-request.priority, self._arrivals, index),
                max_length=max_length,
                stops=stops,
                stop_mask=tuple(stops) if params.min_tokens and not request.grammar else (),
                tokens=[],
                num_tokens=len(request.prompt),
                logprobs_from=max_length if index or params.prompt_logprobs is None else 1,
                matcher=matchers[index],
                special=guessing or bool(request.grammar),
            )
            for index in range(params.n)
        ]
        if guessing:
            length, window = self._guess
            runs = PromptRuns(request.prompt, window)
            for sequence in sequences:
                sequence.ngrams = NGrams(sequence.tokens, length, runs)
        self._live[request.request_id] = dict(enumerate(sequences))
        self._new[request.request_id] = len(request.prompt)
        self._new_tokens += len(request.prompt)
        self._waiting.join(request.tenant)
        self._num_sequences += params.n
        if self._tracer:
            before = [("arrived", request.arrival), *request.marks]
            self._tracer.begin(request.request_id, [TraceEvent(at, kind, {}) for kind, at in before])
            ahead = len(self._waiting)
            self._tracer.add(request.request_id, "queued", prompt_tokens=len(request.prompt), n=params.n, ahead=ahead)
        self._enqueue(sequences)

    def _check_room(self, tokens: int) -> None:
        """Raises: RequestRejected, QUEUE_FULL. A prompt of any length is taken while nobody waits."""
        if len(self._new) >= self._max_new:
            raise RequestRejected(RejectReason.QUEUE_FULL, f"{len(self._new)} requests are waiting already")
        if self._new and self._new_tokens + tokens > self._max_new_tokens:
            waiting = f"{len(self._new)} requests with {self._new_tokens} prompt tokens are waiting already"
            raise RequestRejected(RejectReason.QUEUE_FULL, f"{waiting}; {tokens} more are too many")

    def _matchers(self, request: Request) -> list[Matcher | None]:
        """One for each continuation. Raises: RequestRejected where the grammar is not held, or cannot be followed."""
        if not request.grammar:
            return [None] * request.params.n
        source = self._grammars
        try:
            made = [None if source is None else source.matcher(request.grammar) for _ in range(request.params.n)]
        except GrammarError as error:
            raise RequestRejected(RejectReason.INVALID, str(error), "constraint") from error
        if None in made:
            raise RequestRejected(RejectReason.UNKNOWN_GRAMMAR, "the engine does not hold this grammar", "constraint")
        return made

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

    def started(self) -> list[tuple[str, int]]:
        """(request id, cached tokens) of the requests that were first scheduled since the last call."""
        started, self._started = self._started, []
        return started

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
        decode_first = self._chunked or self._short
        if decode_first:
            self._decode(plan, decoding)
        self._prefill(plan)
        self._admit(plan)
        if not decode_first:
            self._decode(plan, decoding)
        if plan.guessing and not plan.short:
            self._speculate(plan)
        self._short = plan.short
        return self._close(plan)

    def _close(self, plan: Plan) -> Step | None:
        if not plan.works:
            return None
        if asked := self._asked:
            rows = enumerate(sample[1] for sample in plan.samples)
            plan.logprobs = tuple((index, asked[row]) for index, row in rows if row in asked)
        step = plan.step()
        self._in_flight[step.step_id] = step
        self._next_id += 1
        return step

    def _decode(self, plan: Plan, decoding: tuple[Sequence, ...]) -> None:
        works, samples, page_size, step_id = plan.works, plan.samples, self._cache.page_size, plan.step_id
        limit, running = len(works) + plan.budget, State.RUNNING
        plan.room = self._max_samples - len(decoding)
        for sequence in decoding:
            if len(works) >= limit:
                break
            # It may just have been preempted, or its last token may be in flight.
            if sequence.state is not running or sequence.num_tokens >= sequence.max_length:
                continue
            special = sequence.special
            if special and self._waits(plan, sequence):
                continue
            position = sequence.num_computed
            if position == len(sequence.pages) * page_size and not self._grow(plan, sequence, 1):
                continue
            row = sequence.row
            # The plain constructor of a tuple: a named one's own takes three times as long, for every token.
            if special:
                if sequence.matcher is not None:
                    self._limit(plan, sequence, sequence.matcher)
                if sequence.ngrams is not None and sequence.num_tokens == len(sequence.tokens):
                    plan.guessing.append(sequence)
            samples.append(_tuple(Sample, (len(works), row)))
            works.append(_tuple(RowWork, (row, position, 1)))
            sequence.num_computed = position + 1
            sequence.num_tokens += 1
            sequence.last_step = step_id
        if self._waiting.contended:
            served = Counter([one.request.tenant for one in decoding if one.last_step == step_id])
            for tenant, count in served.items():
                self._waiting.charge(tenant, DECODE_WORK * count)
        plan.budget = limit - len(works)

    def _waits(self, plan: Plan, sequence: Sequence) -> bool:
        """Whether the sequence has to wait for its last token, or does better to."""
        if sequence.num_tokens == len(sequence.tokens):
            return False
        ngrams, waits = sequence.ngrams, sequence.matcher is not None or sequence.guessed
        if ngrams is not None:
            if not waits and plan.room > 0:
                plan.reading = ngrams.follow(plan.reading)
                waits = ngrams.worth_waiting
            plan.room -= waits * self._guess[0]
        return waits

    def _speculate(self, plan: Plan) -> None:
        """Adds guesses at what follows the tokens that decoding sequences draw."""
        spare = self._cache.available - self._watermark
        for sequence in plan.guessing:
            room = min(plan.budget, self._max_samples - len(plan.samples), sequence.max_length - sequence.num_tokens)
            if sequence.state is not State.RUNNING or sequence.ngrams is None or room <= 0:
                continue
            start, held = sequence.num_computed, len(sequence.pages) * self._cache.page_size
            plan.reading = sequence.ngrams.follow(plan.reading)
            guesses = sequence.ngrams.guesses(min(room, held - start + max(0, spare) * self._cache.page_size))
            missing = self._cache.missing(sequence, start + len(guesses))
            if missing > 0:
                spare -= missing
                plan.page_updates.append(
                    PageUpdate(sequence.row, len(sequence.pages), self._cache.grow(sequence, missing))
                )
            count = self._verify(plan, sequence, guesses)
            if count:
                plan.drafts.append(Draft(sequence.row, start, guesses[:count]))
                sequence.guessed = True

    def _verify(self, plan: Plan, sequence: Sequence, guesses: tuple[int, ...]) -> int:
        """Plans works and samples for guesses up to the first that ends the text, or that its grammar does not allow.

        Returns: how many.
        """
        matcher, row, start = sequence.matcher, sequence.row, sequence.num_computed
        count = accepted = 0
        for guess in guesses:
            if guess in sequence.stops:
                break
            if matcher is not None:
                if not matcher.accept(guess):
                    break
                accepted += 1
                if matcher.terminated:
                    break
                self._limit(plan, sequence, matcher, ahead=accepted)
            plan.samples.append(Sample(len(plan.works), row))
            plan.works.append(RowWork(row, start + count, 1))
            count += 1
        if matcher is not None and accepted:
            matcher.rollback(accepted)
        plan.budget -= count
        self._stats.draft_tokens += count
        if self._waiting.contended:
            self._waiting.charge(sequence.request.tenant, PREFILL_WORK * count)
        return count

    def _prefill(self, plan: Plan) -> None:
        for sequence in tuple(self._prefilling):
            if not plan.budget:
                return
            if sequence.state is State.RUNNING:
                self._compute(plan, sequence)

    def _admit(self, plan: Plan) -> None:
        if not (self._waiting and self._free_rows and plan.budget) or plan.short:
            return
        passed: list[Sequence] = []
        for sequence in self._waiting.candidates():
            if sequence.row >= 0:  # a step in flight uses what it held
                return
            if self._fits(plan, sequence):
                overtaken = {*passed, *self._waiting.remove(sequence)}
                self._start(plan, sequence)
                self._compute(plan, sequence)
                for one in overtaken:
                    one.overtaken += 1
            else:
                passed.append(sequence)
            if len(passed) > self._look_ahead or any(one.overtaken >= MAX_OVERTAKEN for one in passed):
                return
            if not (self._free_rows and plan.budget and plan.moving > 0) or plan.short:
                return

    def _fits(self, plan: Plan, sequence: Sequence) -> bool:
        """Whether the sequence can be admitted; if so, it has its cached prefix."""
        kept = self._watermark if self.num_running else 0
        if self._cache.available <= kept:
            return False
        self._cache.acquire(sequence)
        gap = sequence.num_tokens - sequence.num_computed
        whole = self._chunked or gap <= plan.budget or plan.budget == self._budget
        wanted = sequence.max_length if self._reserve else sequence.num_tokens
        if whole and self._cache.available - self._cache.missing(sequence, wanted) >= kept:
            return True
        self._cache.release(sequence)
        return False

    def _start(self, plan: Plan, sequence: Sequence) -> None:
        """The sequence begins to run; the first time, its request has started."""
        self._occupy(plan, sequence)
        self._prefilling[sequence] = None
        sequence.overtaken = 0
        if self._tracer:
            pages, cached = len(sequence.pages), sequence.num_computed
            self._trace(sequence, "admitted", row=sequence.row, cached_tokens=cached, cached_pages=pages)
        request_id, hit = sequence.request.request_id, sequence.num_computed
        if request_id in self._new:
            self._new_tokens -= self._new.pop(request_id)
            self._started.append((request_id, hit))
            if sequence.node is not None:
                self._stats.prefix_query_tokens += min(sequence.num_tokens, sequence.logprobs_from)
                self._stats.prefix_hit_tokens += hit
                self._cache.count_hit(sequence)

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
            self._cache.grow(sequence, self._cache.missing(sequence, sequence.max_length))
        if sequence.pages:
            plan.page_updates.append(PageUpdate(row, 0, tuple(sequence.pages)))

    def _compute(self, plan: Plan, sequence: Sequence) -> None:
        """A chunk of a sequence that is being prefilled: what budget and pages allow."""
        position = sequence.num_computed
        gap = sequence.num_tokens - position
        chunk = min(gap, plan.budget)
        missing = self._cache.missing(sequence, position + chunk)
        if missing > 0:
            if not self._grow(plan, sequence, missing):
                return
            chunk = min(chunk, len(sequence.pages) * self._cache.page_size - position)
        plan.works.append(RowWork(sequence.row, position, chunk))
        first = max(sequence.logprobs_from, position + 1)
        end = min(position + 1 + chunk, len(sequence.request.prompt))
        if first < end:
            top = sequence.request.params.prompt_logprobs or 0
            plan.prompt_logprobs.append(PromptLogprobs(len(plan.works) - 1, first, end, top))
        plan.budget -= chunk
        self._stats.prefill_tokens += chunk
        if self._tracer:
            pages = len(sequence.pages)
            self._trace(sequence, "prefill", step=plan.step_id, start=position, tokens=chunk, pages_held=pages)
        if self._waiting.contended:
            self._waiting.charge(sequence.request.tenant, PREFILL_WORK * chunk)
        sequence.num_computed += chunk
        sequence.last_step = plan.step_id
        if sequence.ngrams is not None:
            sequence.ngrams.follow(chunk)
        self._cache.publish(sequence)
        if chunk == gap:
            del self._prefilling[sequence]
            self._draw(plan, sequence)
            followers, sequence.followers = sequence.followers, []
            for follower in followers:
                self._fork(plan, sequence, follower)

    def _draw(self, plan: Plan, sequence: Sequence) -> None:
        """The sequence draws its first token in this row, from the work planned last."""
        if sequence.matcher is not None:
            self._limit(plan, sequence, sequence.matcher)
        plan.samples.append(Sample(len(plan.works) - 1, sequence.row))
        sequence.num_tokens += 1
        sequence.last_step = plan.step_id
        self._decoding[sequence] = None

    def _limit(self, plan: Plan, sequence: Sequence, matcher: Matcher, ahead: int = 0) -> None:
        """The next sample of the step, which is the sequence's, `ahead` guesses on, is limited to what may come."""
        request = sequence.request
        early = len(sequence.tokens) + ahead - len(request.prompt) < request.params.min_tokens
        mask = matcher.mask(sequence.stops if early else ())
        if mask is not None:
            plan.masks.append((len(plan.samples), mask))

    def _fork(self, plan: Plan, leader: Sequence, sibling: Sequence) -> None:
        """A sibling goes on from the leader's prompt. It queues on its own where it does not fit in this step."""
        sibling.leader = None
        # Full pages are shared.
        wanted = len(leader.pages) - leader.num_computed // self._cache.page_size if self._reserve else 1
        shared = leader.node is not None  # so that it finds the prompt again
        if self._free_rows and self._cache.available - wanted >= self._watermark and (plan.moving > 0 or not shared):
            plan.copies += self._cache.fork(leader, sibling)
            self._occupy(plan, sibling)
            self._draw(plan, sibling)
        else:
            self._waiting.add(sibling)

    def _grow(self, plan: Plan, sequence: Sequence, wanted: int) -> bool:
        """Up to `wanted` pages more for a running sequence, at least one; others are preempted for that one.

        Returns: False if it must wait for pages that steps in flight still use, or has been preempted itself.
        """
        while not self._cache.available:
            plan.short = True
            if self._leaving:
                return False
            victim = max((*self._decoding, *self._prefilling), key=self._standing)
            self._preempt(victim)
            if victim is sequence:
                return False
        first = len(sequence.pages)
        pages = self._cache.grow(sequence, min(wanted, self._cache.available))
        plan.page_updates.append(PageUpdate(sequence.row, first, pages))
        return True

    def _standing(self, sequence: Sequence) -> tuple[Any, ...]:
        """The last of running sequences in this order is preempted first."""
        priority, arrival, index = sequence.rank
        return priority, self._waiting.work(sequence.request.tenant), arrival, index

    # Sequences leave.

    def _preempt(self, sequence: Sequence) -> None:
        self._stats.preemptions += 1
        if self._tracer:
            self._trace(sequence, "preempted", pages=len(sequence.pages), tokens=len(sequence.tokens))
        self._stop(sequence)
        sequence.state = State.WAITING
        self._waiting.add(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """The sequence is over, in whatever state it was."""
        if self._tracer:
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
        self._num_sequences -= 1
        request_id = sequence.request.request_id
        siblings = self._live[request_id]
        del siblings[sequence.index]
        if not siblings:
            del self._live[request_id]
            self._new_tokens -= self._new.pop(request_id, 0)
            self._waiting.leave(sequence.request.tenant)
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
        if self._tracer:
            self._trace(sequence, "released", pages=len(sequence.pages), cached_tokens=sequence.num_cached)
        self._rows[sequence.row] = None
        self._asked.pop(sequence.row, None)
        self._free_rows.append(sequence.row)
        sequence.row = -1
        sequence.num_tokens = len(sequence.tokens)
        self._cache.release(sequence)

    # A step is collected.

    def update(self, step: Step, result: StepResult) -> list[SequenceUpdate]:
        """Takes in what a step brought: tokens are appended, ends are judged, rows and pages go back."""
        updates: list[SequenceUpdate] = []
        ended: list[tuple[Sequence, FinishReason]] = []
        rows, page_size, tracer, running = self._rows, self._cache.page_size, self._tracer, State.RUNNING
        plain = len(step.samples) - step.num_drafts
        for index in result.failed:
            if index < plain:
                self._spoilt(step, index, updates)
        updates += self._prompt_updates(step, result)
        guessed = _guessed(step, result, plain) if step.drafts else {}
        generated = -len(updates)
        for (_, row), token in zip(step.samples[:plain], result.tokens[:plain], strict=True):
            sequence = rows[row]
            if sequence is None:
                raise IntegrityError(f"row {row} is empty while a step in flight uses it")
            if sequence.state is not running and self._is_void(sequence, step):
                continue
            tokens = sequence.tokens
            tokens.append(token)
            if tracer and len(tokens) == len(sequence.request.prompt) + 1:
                self._trace(sequence, "first_token", step=step.step_id)
            taken: tuple[int, ...] = (token,)
            finish = None
            if sequence.special:
                taken, finish = self._take(sequence, token, guessed.get(row, ()))
                generated += len(taken) - 1
                if finish is FinishReason.ERROR:
                    updates.append(self._fail(sequence, f"its grammar does not allow token {tokens[-1]}"))
                    continue
            elif token in sequence.stops or len(tokens) >= sequence.max_length:
                finish = self._judge(sequence, token)
            if sequence.num_computed - sequence.num_cached >= page_size:
                self._cache.publish(sequence)
            updates.append(SequenceUpdate(sequence.request.request_id, sequence.index, taken, finish))
            if finish is not None:
                ended.append((sequence, finish))
        self._add_logprobs(step, result, updates)
        self._stats.generated_tokens += generated + len(updates)
        for sequence, finish in ended:
            self._end(sequence, finish)
        self._collected(step)
        return updates

    def _trace(self, sequence: Sequence, kind: str, **attributes: int | float | str) -> None:
        assert self._tracer is not None
        self._tracer.add(sequence.request.request_id, kind, index=sequence.index, **attributes)

    def _prompt_updates(self, step: Step, result: StepResult) -> list[SequenceUpdate]:
        """The logprobs of prompts that a step brought."""
        updates = []
        for wanted, records in zip(step.prompt_logprobs, result.prompt_logprobs, strict=True):
            sequence = self._row(step.works[wanted.work].row)
            if not self._is_void(sequence, step):
                request = sequence.request
                sequence.logprobs_from = wanted.end if wanted.end < len(request.prompt) else sequence.max_length
                updates.append(SequenceUpdate(request.request_id, sequence.index, (), None, prompt_logprobs=records))
        return updates

    def _add_logprobs(self, step: Step, result: StepResult, updates: list[SequenceUpdate]) -> None:
        """Gives the updates the logprobs of their tokens, where they are asked for."""
        if not step.logprobs:
            return
        taken = {(update.request_id, update.index): update for update in updates if update.tokens}
        for (index, _), record in zip(step.logprobs, result.logprobs, strict=True):
            sequence = self._row(step.samples[index].row)
            if not self._is_void(sequence, step):
                update = taken[sequence.request.request_id, sequence.index]
                # Of a row with guesses the first samples are its tokens: those behind a wrong guess are none.
                if len(update.logprobs) < len(update.tokens) * len(record):
                    update.logprobs += record

    def _judge(self, sequence: Sequence, token: int) -> FinishReason | None:
        """How the sequence's last token ends it; ERROR where its grammar does not allow the token."""
        tokens, request, matcher = sequence.tokens, sequence.request, sequence.matcher
        if matcher is not None:
            if not matcher.accept(token):
                return FinishReason.ERROR
            if matcher.terminated:
                return FinishReason.EOS
        finish = sequence.stops.get(token)
        if finish is not None and len(tokens) - len(request.prompt) > request.params.min_tokens:
            return finish
        return FinishReason.LENGTH if len(tokens) >= sequence.max_length else None

    def _take(
        self, sequence: Sequence, token: int, guessed: SequenceOf[tuple[int, int]]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """What a step brought a sequence whose last token is `token`: it, and the tokens behind right guesses.

        Args:
            guessed: guesses, each with the token drawn behind it.

        Returns: the tokens, none where its grammar does not allow one; and how it ends.
        """
        taken = [token]
        finish = self._judge(sequence, token)
        for guess, following in guessed:
            if finish is not None or guess != taken[-1]:
                break
            sequence.tokens.append(following)
            taken.append(following)
            finish = self._judge(sequence, following)
        sequence.guessed = False
        accepted = len(taken) - 1
        sequence.num_tokens += accepted
        sequence.num_computed += accepted
        self._stats.accepted_tokens += accepted
        return () if finish is FinishReason.ERROR else tuple(taken), finish

    def _row(self, row: int) -> Sequence:
        """The sequence in a row of a step in flight (rows go back after their last step)."""
        sequence = self._rows[row]
        if sequence is None:
            raise IntegrityError(f"row {row} is empty while a step in flight uses it")
        return sequence

    def _is_void(self, sequence: Sequence, step: Step) -> bool:
        """Whether a sample is surplus: the sequence had ended, or was restarted after a failure."""
        return sequence.state is State.FINISHED or step.step_id <= sequence.void_through

    def _spoilt(self, step: Step, index: int, updates: list[SequenceUpdate]) -> None:
        sequence = self._row(step.samples[index].row)
        # The page that spoilt its logits may be one that it only read. A grammar without a way out spoils none.
        dead_end = any(at == index and not any(mask) for at, mask in step.masks)
        if not dead_end:
            self._cache.withdraw(sequence, 0)
        if not self._is_void(sequence, step):
            message = "its grammar allows no token" if dead_end else "its logits are not finite"
            updates.append(self._fail(sequence, message))

    def _fail(self, sequence: Sequence, message: str) -> SequenceUpdate:
        self._end(sequence, FinishReason.ERROR)
        request_id = sequence.request.request_id
        return SequenceUpdate(request_id, sequence.index, (), FinishReason.ERROR, message=message)

    def fail(self, step: Step, message: str) -> list[SequenceUpdate]:
        """The step raised: its sequences end with ERROR, and what it wrote is trusted no more. All others live on."""
        spoilt: set[int] = set()
        for later in self._in_flight.values():
            if later.step_id >= step.step_id:
                self._taint(later, spoilt, all_of_it=later is step)
        for work in step.works:
            self._cache.withdraw(self._row(work.row), work.start // self._cache.page_size)
        rows = dict.fromkeys([work.row for work in step.works] + [sample.row for sample in step.samples])
        parts = [self._row(row) for row in rows]
        updates = [self._fail(sequence, message) for sequence in parts if not self._is_void(sequence, step)]
        for sequence in self._rows:
            if sequence is not None and not spoilt.isdisjoint(sequence.pages):
                sequence.void_through = sequence.last_step
                if sequence.state is State.RUNNING:
                    self._preempt(sequence)
        self._collected(step)
        return updates

    def _taint(self, step: Step, spoilt: set[int], *, all_of_it: bool) -> None:
        """Adds the pages that a step writes wrongly: a failed one all, a later one those that follow from `spoilt`."""
        for row, start, length in step.works:
            pages = self._row(row).pages
            if all_of_it or not spoilt.isdisjoint(pages):
                spoilt.update(pages[start // self._cache.page_size : -(-(start + length) // self._cache.page_size)])
        spoilt.update(target for source, target in step.copies if source in spoilt)

    def _collected(self, step: Step) -> None:
        del self._in_flight[step.step_id]
        self._sweep()

    def _sweep(self) -> None:
        """Takes back what leaving sequences held, as soon as nothing uses it."""
        leaving, self._leaving = self._leaving, []
        for sequence in leaving:
            if self._in_use(sequence):
                self._leaving.append(sequence)
            else:
                self._release(sequence)

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
        return self._num_sequences - self.num_running

    @property
    def stats(self) -> CoreStats:
        """Counters, and gauges brought up to date; what concerns steps and time is for the core to fill in."""
        stats = self._stats
        stats.running_sequences = self.num_running
        stats.waiting_sequences = self.num_waiting
        stats.live_requests = len(self._live)
        stats.free_pages = self._cache.num_free
        stats.cached_pages = self._cache.num_cached
        stats.used_pages = stats.total_pages - stats.free_pages - stats.cached_pages
        return stats

    def cache_view(self) -> CacheView:
        """What is in the pages and in the tree."""
        return self._cache.view()

    def flush_cache(self) -> int:
        """Forgets every cached prefix, those in use too (their sequences keep the pages until they end).

        Returns: the pages freed.
        """
        return self._cache.flush()

    def check_integrity(self) -> None:
        """Compares all books with one another; O(everything).

        Raises: IntegrityError.
        """
        held = [sequence for sequence in self._rows if sequence is not None]
        running = {*self._decoding, *self._prefilling}
        live = {sequence for siblings in self._live.values() for sequence in siblings.values()}
        queued = {*self._waiting, *(follower for sequence in live for follower in sequence.followers)}
        self._cache.check_integrity(held)
        checks = {
            "a row is lost": len(held) + len(self._free_rows) == len(self._rows),
            "a sequence is not in its row": all(self._rows[sequence.row] is sequence for sequence in held),
            "rows are not those of running and leaving": sorted(map(id, held))
            == sorted(map(id, [*running, *self._leaving])),
            "the queue is out of order": self._waiting.in_order,
            "waiting prompts are miscounted": sum(self._new.values()) == self._new_tokens,
            "live is not running or queued": live == running | queued and not running & queued,
            "live sequences are miscounted": len(live) == self._num_sequences,
            "a state is wrong": all((sequence.state is State.RUNNING) == (sequence in running) for sequence in live),
        }
        wrong = [message for message, right in checks.items() if not right]
        if wrong:
            raise IntegrityError("; ".join(wrong))


def _guessed(step: Step, result: StepResult, first: int) -> dict[int, list[tuple[int, int]]]:
    """By row: the guesses, each with the token drawn behind it, as far as those were drawn from finite logits.

    Where they were not, plain decoding comes to the place itself, if it is on the text's way.

    Args:
        first: index of the first guess's sample.
    """
    failed, guessed = set(result.failed), {}
    for draft in step.drafts:
        end = first + len(draft.tokens)
        good = next((index for index in range(first, end) if index in failed), end)
        guessed[draft.row] = list(zip(draft.tokens, result.tokens[first:good], strict=False))
        first = end
    return guessed
