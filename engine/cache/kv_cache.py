"""What each sequence holds of the KV pool: its page table, and its lock on the prefix tree. Knows no rows and no queue.

A page table holds one reference to each of its pages, whether they came from the tree, from a sibling or fresh. When
the tree already has a page that a sequence has filled, the sequence keeps its own and frees it at its end: page tables
are only ever appended to.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from engine.cache.pool import PagePool, check
from engine.cache.radix import Node, NodeView, RadixTree
from engine.sequence import Sequence

_MAX_VIEWS = 1000


class CacheView(NamedTuple):
    """The cache as an operator sees it.

    Attributes:
        pages: a byte for each: 0 free, 1 used, 2 cached (only the tree holds it).
        nodes: of the tree, the most hit.
        total_nodes: of the whole tree.
    """

    pages: bytes
    nodes: list[NodeView]
    total_nodes: int


class KVCache:
    """Gives pages to sequences, from the free ones first, then from the least recently used of the cached."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool) -> None:
        self.page_size = page_size
        self._pool = PagePool(num_pages)
        self._tree = RadixTree(self._pool, page_size)
        self._prefix_cache = prefix_cache

    @property
    def num_free(self) -> int:
        """Pages that hold nothing of use."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Pages that only the tree holds."""
        return self._tree.num_idle

    @property
    def available(self) -> int:
        """Pages that sequences can get now."""
        return self._pool.num_free + self._tree.num_idle

    def missing(self, sequence: Sequence, tokens: int) -> int:
        """Pages that the sequence lacks to hold its first `tokens` tokens (not positive: none)."""
        return -(-tokens // self.page_size) - len(sequence.pages)

    def lock(self, sequence: Sequence) -> None:
        """Locks the longest cached prefix of all tokens before the first whose logits are wanted, for `acquire`."""
        if self._uses_tree(sequence):
            sequence.found = found = self._tree.acquire(*self._prefix(sequence), sequence.found)
            sequence.node = found.node
            sequence.num_computed = sequence.num_cached = found.pages * self.page_size

    def acquire(self, sequence: Sequence) -> None:
        """Begins a page table with the prefix that has been locked."""
        if sequence.node is not None:
            sequence.pages = self._tree.prefix(sequence.node)
            self._pool.share(sequence.pages)

    def hit(self, sequence: Sequence) -> int:
        """Tokens that `lock` would find cached."""
        if not self._uses_tree(sequence):
            return 0
        sequence.found = self._tree.find(*self._prefix(sequence), sequence.found)
        return sequence.found.pages * self.page_size

    def _uses_tree(self, sequence: Sequence) -> bool:
        return self._prefix_cache and not sequence.request.bypass_cache

    def _prefix(self, sequence: Sequence) -> tuple[str, SequenceOf[int], int]:
        """Salt and tokens of the sequence, and the pages of those before the first whose logits are wanted."""
        request, wanted = sequence.request, min(sequence.num_tokens, sequence.logprobs_from)
        return request.salt, sequence.tokens or request.prompt, (wanted - 1) // self.page_size

    def grow(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """Appends `count` pages (there must be as many available) to the page table, and returns them."""
        if self._pool.num_free < count:
            self._tree.evict(count - self._pool.num_free)
        pages = self._pool.take(count)
        sequence.pages += pages
        return tuple(pages)

    def fork(self, leader: Sequence, sibling: Sequence) -> list[tuple[int, int]]:
        """Shares the leader's full pages with a sibling that has none, and gives it a page for the last, partial one.

        Returns: the page to be copied, if there is one: [(source, destination)].
        """
        full, partial = divmod(leader.num_computed, self.page_size)
        sibling.pages = leader.pages[:full]
        self._pool.share(sibling.pages)
        if leader.node is not None:
            self._tree.lock(leader.node)
        sibling.node = leader.node
        sibling.num_computed, sibling.num_cached = leader.num_computed, leader.num_cached
        return [(leader.pages[full], page) for page in self.grow(sibling, 1)] if partial else []

    def count_hit(self, node: Node) -> None:
        """A request begins with the prefix that ends in `node`."""
        self._tree.count_hit(node)

    def publish(self, sequence: Sequence) -> None:
        """Offers the pages that have become full, of known tokens, to the tree."""
        first = sequence.num_cached // self.page_size
        end = min(sequence.num_computed, len(sequence.tokens)) // self.page_size
        if end > first:
            sequence.num_cached = end * self.page_size
            if sequence.node is not None:
                pages = sequence.pages[first:end]
                sequence.node = self._tree.extend(sequence.node, sequence.request.salt, sequence.tokens, pages)

    def withdraw(self, sequence: Sequence, first: int) -> None:
        """Takes the sequence's prefix from page `first` on, and all that continues it, out of the tree."""
        if sequence.node is not None:
            self._tree.withdraw(sequence.node, first)

    def release(self, sequence: Sequence) -> None:
        """The sequence lets go of everything; what it published stays cached."""
        if sequence.node is not None:
            self._tree.unlock(sequence.node)
        self._pool.release(sequence.pages)
        sequence.node, sequence.pages = None, []
        sequence.num_computed = sequence.num_cached = 0

    def flush(self) -> int:
        """Forgets all cached prefixes; pages in use stay with their sequences. Returns the pages freed."""
        free = self._pool.num_free
        self._tree.clear()
        return self._pool.num_free - free

    def view(self) -> CacheView:
        """What is in the pages and in the tree. O(pages)."""
        pages = self._pool.in_use()
        for page in self._tree.idle_pages():
            pages[page] = 2
        return CacheView(bytes(pages), *self._tree.most_hit(_MAX_VIEWS))

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Checks pool and tree against the sequences that hold pages.

        Raises: IntegrityError.
        """
        holders = list(holders)
        tables = [page for sequence in holders for page in sequence.pages]
        self._pool.check_integrity([*self._tree.pages(), *tables])
        self._tree.check_integrity([sequence.node for sequence in holders if sequence.node is not None])
        held = len({*tables, *self._tree.pages()})
        check(held + self._pool.num_free == self._pool.num_pages, "free, cached and used pages are not all pages")
        covered = all(self.missing(sequence, sequence.num_computed) <= 0 for sequence in holders)
        check(covered, "a sequence has computed tokens without pages")
