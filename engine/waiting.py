"""Who waits, how many may, and who is next: by priority, then between tenants fairly, then first come first served.

Fairness is that of virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024):
each tenant's counter tells the work done for it, and the tenant with the lowest is served first. A tenant that comes
back from idleness is lifted to the lowest counter of those that are active, so that nobody saves up credit. With one
tenant the order is that of the ranks alone. Knows no pages and no steps.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Final

from engine.config import EngineConfig
from engine.request import RejectReason, Request, RequestRejected
from engine.sequence import Sequence

# A sequence that so many later ones have overtaken goes before all of its tenant that have not waited as long. Where it
# was passed by because it did not fit, nobody of a later rank is admitted before it any more.
MAX_OVERTAKEN: Final = 64
# Work per token, as in the paper: a decoded token costs more than one of a prompt.
PREFILL_WORK: Final = 1
DECODE_WORK: Final = 2
# With `hits`: only so many of a tenant's first are compared, so that a step's cost does not grow with the queue.
COMPARED: Final = 32

Turn = tuple[int, int]  # (-priority, work done for the tenant)

_rank = attrgetter("rank")


class WaitingQueue:
    """Sequences by tenant and rank.

    Args:
        config: max_queue_requests and max_queue_tokens, which `check_room` holds.
        hits: how many tokens of a sequence are cached; with it, of a tenant's sequences of one priority those with the
            longest cached prefix come first.
    """

    def __init__(self, config: EngineConfig, hits: Callable[[Sequence], int] | None = None) -> None:
        self._config = config
        self._hits = hits
        self._queues: dict[str, list[Sequence]] = {}  # of the tenants that have sequences waiting
        self._new: dict[str, int] = {}  # live requests of which nothing was scheduled yet: tokens of their prompts
        self._new_tokens = 0  # of all of them
        self._live: Counter[str] = Counter()  # requests of each active tenant
        self._work: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no order between tenants."""
        for queue in self._queues.values():
            yield from queue

    # Requests and tenants.

    def check_room(self, tokens: int) -> None:
        """Whether a prompt may wait; one of any length may while nobody does. Raises: RequestRejected, QUEUE_FULL."""
        new = len(self._new)
        if new >= self._config.max_queue_requests:
            raise RequestRejected(RejectReason.QUEUE_FULL, f"{new} requests are waiting already")
        if new and self._new_tokens + tokens > self._config.max_queue_tokens:
            waiting = f"{new} requests with {self._new_tokens} prompt tokens are waiting already"
            raise RequestRejected(RejectReason.QUEUE_FULL, f"{waiting}; {tokens} more are too many")

    @property
    def contended(self) -> bool:
        """Whether several tenants are active: only then is their work counted."""
        return len(self._live) > 1

    def join(self, request: Request) -> None:
        """The request is live, and waits."""
        tenant = request.tenant
        if tenant not in self._live:
            least = min((self._work.get(other, 0) for other in self._live), default=0)
            self._work[tenant] = max(self._work.get(tenant, 0), least)
        self._live[tenant] += 1
        self._new[request.request_id] = len(request.prompt)
        self._new_tokens += len(request.prompt)

    def begin(self, request: Request) -> bool:
        """A sequence of the request runs. Returns: whether it is the first time."""
        tokens = self._new.pop(request.request_id, 0)
        self._new_tokens -= tokens
        return tokens > 0

    def leave(self, request: Request) -> None:
        """The request is over."""
        self.begin(request)
        self._live[request.tenant] -= 1
        if self._live[request.tenant]:
            return
        del self._live[request.tenant]
        # What an idle tenant has had counts on only while it is ahead of somebody.
        least = min((self._work[other] for other in self._live), default=None)
        gone = [one for one in self._work if one not in self._live and (least is None or self._work[one] <= least)]
        for one in gone:
            del self._work[one]

    def charge(self, tenant: str, work: int) -> None:
        """So much has been done for the tenant; counted while others are active."""
        if self.contended:
            self._work[tenant] += work

    def turn(self, sequence: Sequence) -> Turn:
        """Whose turn it is: the lowest is served first."""
        return sequence.rank[0], self._work[sequence.request.tenant]

    # Sequences.

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence at the place of its rank."""
        insort(self._queues.setdefault(sequence.request.tenant, []), sequence, key=_rank)

    def remove(self, sequence: Sequence) -> list[Sequence]:
        """Takes a sequence out. Returns: the first of its tenant that were before it."""
        tenant = sequence.request.tenant
        queue = self._queues[tenant]
        at = bisect_left(queue, sequence.rank, key=_rank)
        del queue[at]
        if not queue:
            del self._queues[tenant]
        return queue[: min(at, COMPARED)]

    def candidates(self, goes: Callable[[Sequence], bool] = lambda _: True) -> Iterator[Sequence]:
        """The sequences in the order of service, of each tenant until one that may not go.

        The one handed out last may be removed, and work be charged.
        """
        served = {one: self._served(queue) for one, queue in self._queues.items() if goes(queue[0])}
        heads = [self._entry(tenant, one) for tenant, order in served.items() if goes(one := next(order))]
        heapq.heapify(heads)
        while heads:
            _, _, sequence, tenant = heads[0]
            yield sequence
            following = next(served[tenant], None)
            if following is None or not goes(following):
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, self._entry(tenant, following))

    def _entry(self, tenant: str, sequence: Sequence) -> tuple[Turn, tuple[int, int, int], Sequence, str]:
        return self.turn(sequence), sequence.rank, sequence, tenant

    def _served(self, queue: list[Sequence]) -> Iterator[Sequence]:
        """A tenant's sequences in the order of service, also while they are taken out."""
        if self._hits is not None:
            cached = {one: self._hits(one) for one in queue[:COMPARED]}
            yield from sorted(
                cached, key=lambda one: (one.rank[0], one.overtaken < MAX_OVERTAKEN, -cached[one], one.rank)
            )
            return
        yield from queue.copy()

    @property
    def in_order(self) -> bool:
        """Whether every queue is sorted, holds its own tenant's sequences alone, and belongs to an active tenant."""
        return sum(self._new.values()) == self._new_tokens and all(
            tenant in self._live
            and queue == sorted(queue, key=_rank)
            and all(one.request.tenant == tenant for one in queue)
            for tenant, queue in self._queues.items()
        )
