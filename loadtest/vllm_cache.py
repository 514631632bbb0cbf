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
from itertools import takewhile

from loadtest.records import Job, LoadTestError
from loadtest.trace import GENERATED, Hits, PageNames


@dataclass(eq=False, slots=True)
class _Sequence:
    tokens: list[int]
    prompt_len: int
    max_len: int
    names: list[int] = field(default_factory=list)  # of the full blocks of `tokens`
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    counted: bool = False

    @property
    def left(self) -> int:
        return len(self.tokens) - self.computed


class _Pool:
    """The block pool. `num_blocks` includes the reserved one."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._size = block_size
        self._names = PageNames(block_size)
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._users = [0] * num_blocks
        self._found_by: dict[int, int] = {}  # block: name
        self._cached: dict[int, dict[int, None]] = {}  # name: blocks

    def admit(self, sequence: _Sequence) -> bool:
        """Gives the sequence the cached blocks of all its tokens but the last, if it can have the others too."""
        names = self._names.extend(sequence.names, sequence.tokens)[: (len(sequence.tokens) - 1) // self._size]
        hits = [next(iter(self._cached[name])) for name in takewhile(self._cached.__contains__, names)]
        idle = sum(not self._users[block] for block in hits)
        if -(-len(sequence.tokens) // self._size) - len(hits) + idle > len(self._free):
            return False
        for block in hits:
            self._free.pop(block, None)
            self._users[block] += 1
        sequence.blocks, sequence.computed = hits, len(hits) * self._size
        return True

    def compute(self, sequence: _Sequence, count: int) -> bool:
        """Schedules `count` tokens, and lets their full blocks be found; False if blocks are lacking."""
        blocks, end = sequence.blocks, sequence.computed + count
        missing = -(-end // self._size) - len(blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block, _ = self._free.popitem(last=False)
            if (name := self._found_by.pop(block, None)) is not None:
                del self._cached[name][block]
                if not self._cached[name]:
                    del self._cached[name]
            self._users[block] = 1
            blocks.append(block)
        names = self._names.extend(sequence.names, sequence.tokens)
        for index in range(sequence.computed // self._size, end // self._size):
            self._found_by[blocks[index]] = names[index]
            self._cached.setdefault(names[index], {})[blocks[index]] = None
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


def vllm_hits(
    requests: Iterable[Job], *, num_pages: int, page_size: int, concurrency: int, max_batched_tokens: int
) -> Hits:
    """Replays a trace, `concurrency` requests at a time, the next one as soon as one has ended.

    Raises: LoadTestError when a request is larger than the pool.
    """
    pool, coming = _Pool(num_pages, page_size), iter(requests)
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
        budget = _run(pool, running, waiting, max_batched_tokens)
        while waiting and budget and pool.admit(waiting[0]):
            sequence = waiting.popleft()
            running.append(sequence)
            if not sequence.counted:
                sequence.counted = True
                queried, cached = queried + sequence.prompt_len, cached + sequence.computed
            count = min(sequence.left, budget)
            pool.compute(sequence, count)
            budget -= count
        for sequence in [each for each in running if not each.left]:  # it gets one more, and leaves with its last
            sequence.tokens.append(GENERATED)
            if len(sequence.tokens) == sequence.max_len:
                running.remove(sequence)
                pool.free(sequence)


def _run(pool: _Pool, running: list[_Sequence], waiting: deque[_Sequence], budget: int) -> int:
    """Schedules what runs; returns the tokens that are left for admissions: none if it had to preempt."""
    scheduled, preempted = 0, False
    while scheduled < len(running) and budget:
        count = min(running[scheduled].left, budget)
        if pool.compute(running[scheduled], count):
            budget -= count
            scheduled += 1
        else:
            preempted = True
            waiting.appendleft(running.pop())
            pool.free(waiting[0])
    return 0 if preempted else budget
