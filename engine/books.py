"""Who is live, who waits, who runs in which row and on which pages. Decides nothing; knows no torch and no text.

Rules kept here:
- Row and pages of a sequence that leaves (finished, aborted, preempted) go back when no step in flight uses them; until
  then it is not admitted again.
- Of the n continuations of a prompt the first is queued; the others follow it until it has the prompt computed, and the
  next of them leads when it ends before.
- What is preempted goes back to the place of its rank in the queue, and its pages stay in the tree.
"""

import random
from dataclasses import replace

from engine.cache.kv_cache import KVCache
from engine.cache.pool import check
from engine.config import EngineConfig
from engine.grammar import GrammarMatcher, Grammars
from engine.limits import check_limits
from engine.messages import CoreInfo, CoreStats
from engine.ngram import PromptRuns
from engine.request import FinishReason, RejectReason, Request, RequestRejected
from engine.sequence import Sequence, State
from engine.step import Step
from engine.trace import TraceEvent, Tracer
from engine.waiting import WaitingQueue


class Books:
    """Requests, their sequences, and what these hold.

    Args:
        config: how requests are queued, guessed for and traced.
        info: the pool, and the most that a step and a sequence may hold.

    Attributes:
        grammars: makes the matchers of requests that have a grammar.
        tracer: is told what happens to each request.
        cache: the pages and the tree.
        counts: what has happened; those of steps and time are for the core to count.
        draining: no new request is taken.
    """

    def __init__(self, config: EngineConfig, info: CoreInfo) -> None:
        self.draining = False
        self.grammars = Grammars()
        self.tracer = Tracer(config.trace_requests)
        self.cache = KVCache(info.num_pages, info.page_size, prefix_cache=config.prefix_cache)
        self._config, self._info = config, info
        self._guess = 0 if config.speculative == "off" else config.speculative_length
        self._eos = dict.fromkeys(info.eos_token_ids, FinishReason.EOS)
        self._random = random.Random(config.seed)
        self.counts = CoreStats(total_pages=info.num_pages)
        self._live: dict[str, dict[int, Sequence]] = {}  # unfinished sequences, by request and index
        self._waiting = WaitingQueue(config, self.cache.hit if config.admission == "prefix" else None)
        self._prefilling: dict[Sequence, None] = {}  # running, in the order of admission
        self._decoding: dict[Sequence, None] = {}
        self._leaving: list[Sequence] = []  # no longer running, but used by a step in flight
        self._rows: dict[int, Sequence] = {}  # of those running and leaving
        self._free_rows = list(range(info.max_num_seqs - 1, -1, -1))
        self._asked: dict[int, int] = {}  # rows whose samples have logprobs, and of how many of the likeliest
        self._in_flight: dict[int, Step] = {}  # in the order of their ids
        self._next_id = 0

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises: RequestRejected.
        """
        try:
            matchers = self._check(request)
        except RequestRejected as refused:
            # Without its grammar it comes again, when that is loaded.
            self.counts.requests_rejected += refused.reason is not RejectReason.UNKNOWN_GRAMMAR
            raise
        self.counts.requests_accepted += 1
        params, arrival = request.params, self.counts.requests_accepted
        if params.seed is None:
            request = replace(request, params=replace(params, seed=self._random.getrandbits(63)))
        guessing = self._guess > 0 and request.speculative
        guess = (self._guess, PromptRuns(request.prompt, self._config.speculative_window)) if guessing else None
        stops = dict.fromkeys(params.stop_token_ids, FinishReason.STOP_TOKEN) | ({} if params.ignore_eos else self._eos)
        sequences = [
            Sequence(request, index, (-request.priority, arrival, index), matcher, stops, guess)
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
        return [self.grammars.matcher(request.grammar) for _ in range(request.params.n)]

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

    # Sequences leave.

    def _preempt(self, sequence: Sequence) -> None:
        self.counts.preemptions += 1
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
                self.counts.requests_aborted += 1
            else:
                self.counts.requests_finished += 1

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
        """The counts, with gauges of this moment."""
        stats = self.counts
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
