"""The waiting sequences, and who is next: by priority, then between tenants fairly, then first come first served.

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

from engine.sequence import Sequence

# Work per token, as in the paper: a decoded token costs more than one of a prompt.
PREFILL_WORK: Final = 1
DECODE_WORK: Final = 2
# With `hits`: only so many of a tenant's first are compared, so that a step's cost does not grow with the queue.
COMPARED: Final = 32

_rank = attrgetter("rank")


class WaitingQueue:
    """Sequences by tenant and rank.

    Args:
        max_overtaken: a sequence that so many later ones have overtaken goes before all of its tenant that have not
            waited as long; also the bound for those that are passed by because they do not fit.
        hits: how many tokens of a sequence are cached; with it, of a tenant's sequences of one priority those with the
            longest cached prefix come first.
    """

    def __init__(self, max_overtaken: int, hits: Callable[[Sequence], int] | None = None) -> None:
        self._max_overtaken = max_overtaken
        self._hits = hits
        self._queues: dict[str, list[Sequence]] = {}  # of the tenants that have sequences waiting
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

    # Tenants.

    @property
    def contended(self) -> bool:
        """Whether several tenants are active: only then is their work counted."""
        return len(self._live) > 1

    def join(self, tenant: str) -> None:
        """A request of the tenant is live."""
        if tenant not in self._live:
            least = min((self._work.get(other, 0) for other in self._live), default=0)
            self._work[tenant] = max(self._work.get(tenant, 0), least)
        self._live[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of the tenant is over."""
        self._live[tenant] -= 1
        if self._live[tenant]:
            return
        del self._live[tenant]
        # What an idle tenant has had counts on only while it is ahead of somebody.
        least = min((self._work[other] for other in self._live), default=None)
        gone = [one for one in self._work if one not in self._live and (least is None or self._work[one] <= least)]
        for one in gone:
            del self._work[one]

    def charge(self, tenant: str, work: int) -> None:
        """So much has been done for the tenant."""
        self._work[tenant] += work

    def work(self, tenant: str) -> int:
        """What has been done for an active tenant."""
        return self._work[tenant]

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

    def candidates(self) -> Iterator[Sequence]:
        """The sequences in the order of service. The one handed out last may be removed, and work be charged."""
        served = {tenant: self._served(queue) for tenant, queue in self._queues.items()}
        heads = [self._entry(tenant, next(order)) for tenant, order in served.items()]
        heapq.heapify(heads)
        while heads:
            _, _, _, sequence, tenant = heads[0]
            yield sequence
            following = next(served[tenant], None)
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, self._entry(tenant, following))

    def _entry(self, tenant: str, sequence: Sequence) -> tuple[int, int, tuple[int, int, int], Sequence, str]:
        return sequence.rank[0], self._work[tenant], sequence.rank, sequence, tenant

    def _served(self, queue: list[Sequence]) -> Iterator[Sequence]:
        """A tenant's sequences in the order of service, also while they are taken out."""
        if self._hits is not None:
            yield from self._by_hits(queue[:COMPARED], self._hits)
            return
        at = 0
        while at < len(queue):
            sequence = queue[at]
            yield sequence
            if at < len(queue) and queue[at] is sequence:
                at += 1

    def _by_hits(self, first: list[Sequence], hits: Callable[[Sequence], int]) -> Iterator[Sequence]:
        cached = {one: hits(one) for one in first}
        yield from sorted(
            first, key=lambda one: (one.rank[0], one.overtaken < self._max_overtaken, -cached[one], one.rank)
        )

    @property
    def in_order(self) -> bool:
        """Whether every queue is sorted, holds its own tenant's sequences alone, and belongs to an active tenant."""
        return all(
            tenant in self._live
            and queue == sorted(queue, key=_rank)
            and all(one.request.tenant == tenant for one in queue)
            for tenant, queue in self._queues.items()
        )
