"""vLLM 0.26's prefix cache and its scheduling, as far as they decide what is a hit: a reference to compare with.

Rules of its block pool: one block is reserved. A block can be found from when it is allocated for tokens of a scheduled
step, generated ones too. Equal blocks are not merged. Allocation takes the head of the free queue and then forgets what
that block held. The blocks of a request are freed last one first: to the tail of the queue those that can be found, to
its head those that cannot (its partial one). A cached block in use leaves the queue.

Rules of its scheduler: running requests first, in order of admission; out of blocks, the last is preempted to the head
of the queue. Then waiting ones, first come first served, each when the blocks of all its tokens are free, and none in a
step that preempted. Hits are counted once a request, at its first admission (0.26 itself counts every lookup).
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from loadtest.records import LoadTestError
from loadtest.trace import GENERATED, Hits, PageNames, TraceRequest


@dataclass(eq=False, slots=True)
class _Sequence:
    tokens: list[int]
    prompt_len: int
    max_len: int
    names: list[int] = field(default_factory=list)  # of the full blocks of `tokens`
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    counted: bool = False


class VllmCache:
    """The block pool. `num_blocks` includes the reserved one."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._size = block_size
        self._names = PageNames(block_size)
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._users = [0] * num_blocks
        self._found_by: dict[int, int] = {}  # block: name
        self._cached: dict[int, dict[int, None]] = {}  # name: blocks

    def lookup(self, sequence: _Sequence) -> list[int]:
        """The cached blocks of all tokens but the last."""
        hits: list[int] = []
        self._names.extend(sequence.names, sequence.tokens)
        for name in sequence.names[: (len(sequence.tokens) - 1) // self._size]:
            if name not in self._cached:
                break
            hits.append(next(iter(self._cached[name])))
        return hits

    def fits(self, hits: list[int], tokens: int) -> bool:
        """Whether a new sequence of so many tokens, with these hits, can have all its blocks."""
        idle = sum(not self._users[block] for block in hits)
        return -(-tokens // self._size) - len(hits) + idle <= len(self._free)

    def take(self, sequence: _Sequence, hits: list[int]) -> None:
        """Gives the sequence its hits."""
        for block in hits:
            self._free.pop(block, None)
            self._users[block] += 1
        sequence.blocks, sequence.computed = list(hits), len(hits) * self._size

    def compute(self, sequence: _Sequence, count: int) -> bool:
        """Schedules `count` tokens, and lets their full blocks be found; False if blocks are lacking."""
        blocks, end = sequence.blocks, sequence.computed + count
        missing = -(-end // self._size) - len(blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._users[block] = 1
            blocks.append(block)
        self._names.extend(sequence.names, sequence.tokens)
        for index in range(sequence.computed // self._size, end // self._size):
            self._found_by[blocks[index]] = sequence.names[index]
            self._cached.setdefault(sequence.names[index], {})[blocks[index]] = None
        sequence.computed = end
        return True

    def free(self, sequence: _Sequence) -> None:
        """Takes back all that the sequence has."""
        for block in reversed(sequence.blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                if block not in self._found_by:
                    self._free.move_to_end(block, last=False)
        sequence.blocks, sequence.computed = [], 0

    def _forget(self, block: int) -> None:
        name = self._found_by.pop(block, None)
        if name is not None:
            del self._cached[name][block]
            if not self._cached[name]:
                del self._cached[name]


def vllm_hits(
    requests: Iterable[TraceRequest], *, num_pages: int, page_size: int, concurrency: int, max_batched_tokens: int
) -> Hits:
    """Replays a trace, `concurrency` requests at a time, the next one as soon as one has ended.

    Raises: LoadTestError when a request is larger than the pool.
    """
    cache, coming = VllmCache(num_pages, page_size), iter(requests)
    waiting, running = deque[_Sequence](), list[_Sequence]()
    queried = cached = 0
    while True:
        while len(waiting) + len(running) < concurrency and (request := next(coming, None)) is not None:
            length, end = len(request.prompt), len(request.prompt) + request.output_len
            if end > (num_pages - 1) * page_size:
                raise LoadTestError(f"a request of {end} tokens is larger than {num_pages - 1} blocks of {page_size}")
            waiting.append(_Sequence(list(request.prompt), length, end))
        if not waiting and not running:
            return Hits(queried, cached)
        budget = _run(cache, running, waiting, max_batched_tokens)
        while waiting and budget:
            sequence = waiting[0]
            hits = cache.lookup(sequence)
            if not cache.fits(hits, len(sequence.tokens)):
                break
            running.append(waiting.popleft())
            cache.take(sequence, hits)
            if not sequence.counted:
                sequence.counted = True
                queried, cached = queried + sequence.prompt_len, cached + sequence.computed
            count = min(len(sequence.tokens) - sequence.computed, budget)
            cache.compute(sequence, count)
            budget -= count
        _update(cache, running)


def _run(cache: VllmCache, running: list[_Sequence], waiting: deque[_Sequence], budget: int) -> int:
    """Schedules what runs; returns the tokens that are left for admissions: none if it had to preempt."""
    scheduled, preempted = 0, False
    while scheduled < len(running) and budget:
        sequence = running[scheduled]
        count = min(len(sequence.tokens) - sequence.computed, budget)
        if cache.compute(sequence, count):
            budget -= count
            scheduled += 1
        else:
            preempted = True
            victim = running.pop()
            cache.free(victim)
            waiting.appendleft(victim)
    return 0 if preempted else budget


def _update(cache: VllmCache, running: list[_Sequence]) -> None:
    """Whoever's tokens are all computed gets one more, and leaves with its last."""
    for sequence in tuple(running):
        if sequence.computed == len(sequence.tokens):
            sequence.tokens.append(GENERATED)
            if len(sequence.tokens) == sequence.max_len:
                running.remove(sequence)
                cache.free(sequence)
