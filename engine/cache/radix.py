"""The radix tree of cached prefixes: which pages hold the K and V of which token runs. Knows no sequences and no steps.

An edge is a run of full pages; the key of a page is the tuple of its token ids. Edges are split at page borders only.

What holds always:
- A node holds one reference in the pool to each of its pages. So a page in use is safe even when it leaves the tree.
- `locks` of a node is how many sequences end their cached prefix in it or below it. A locked node is never evicted.
- `_idle` lists the unlocked nodes, least recently used first and every child before its parent: a path is unlocked from
  its deepest node upwards, and a node is unlocked only when all below it are. So its first entry is always the least
  recently used leaf (of equally old ones the deepest), and eviction never searches.
- The pages at a place of a node never change: a leaf that was cut by eviction grows no more, a split leaves the end to
  the old node, and what leaves the tree has no pages. So where a prefix was found (`Found`) stays good to begin at.
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from engine.cache.pool import PagePool, check


class NodeView(NamedTuple):
    """A node as an operator sees it.

    Attributes:
        parent: its parent's place among the views, from 1; 0: the root, which is no view.
        pages, locks, hits: as in Node.
        age: its place in the order of eviction, from 1; 0: locked.
    """

    parent: int
    pages: int
    locks: int
    hits: int
    age: int


class Node:
    """A run of cached pages, below the node whose prefix it continues.

    Attributes:
        start: pages before this run, from the root.
        keys, pages: the token ids of each page, and the page.
        children: by their first key.
        locks: sequences whose cached prefix ends here or below.
        hits: requests that began with it, or with its beginning; never more than its parent has.
        detached: not in the tree any more; lives on as the lock of sequences that still have it.
        cut: pages were evicted from its end.
    """

    __slots__ = ("children", "cut", "detached", "hits", "keys", "locks", "pages", "parent", "start")

    def __init__(
        self, parent: "Node | None", start: int, keys: list[Hashable], pages: list[int], locks: int = 0
    ) -> None:
        self.parent = parent
        self.start = start
        self.keys = keys
        self.pages = pages
        self.children: dict[Hashable, Node] = {}
        self.locks = locks
        self.hits = 0
        self.detached = self.cut = False

    @property
    def end(self) -> int:
        """Pages from the root to the end of this run."""
        return self.start + len(self.pages)


class Found(NamedTuple):
    """Where a prefix of so many pages ends: in `node`, which may go on."""

    node: Node
    pages: int


class RadixTree:
    """Prefixes of token ids, shared page by page. Every operation is O(length of the prefix it touches)."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._root = Node(None, 0, [], [])
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self.num_idle = 0  # pages of the unlocked nodes: what `evict` can give back

    def find(self, salt: str, tokens: Sequence[int], limit: int, known: Found | None = None) -> Found:
        """The longest cached prefix of `tokens`, at most `limit` pages; nothing is locked, split or made more recent.

        Args:
            known: what was found of these tokens, or of their beginning, at any time before; it is not compared again.
        """
        node, at = known or (self._root, 0)
        at = min(at, limit)
        while node.parent is not None and (at := min(at, node.end)) <= node.start:
            node = node.parent
        while True:
            keys, start, end = node.keys, node.start, min(limit, node.end)
            while at < end and keys[at - start] == self._key(salt, tokens, at):
                at += 1
            whole = at == node.end and at < limit
            child = node.children.get(self._key(salt, tokens, at)) if whole else None
            if child is None:
                return Found(node, at)
            node, at = child, at + 1

    def acquire(self, salt: str, tokens: Sequence[int], limit: int, known: Found | None = None) -> Found:
        """What `find` finds, locked: give its node, which ends there now, back with `unlock`."""
        node, pages = self.find(salt, tokens, limit, known)
        node = self._split(node, pages - node.start)
        self.lock(node)
        return Found(node, pages)

    def prefix(self, node: Node) -> list[int]:
        """The pages of the prefix that ends in `node`."""
        return [*chain.from_iterable(step.pages for step in reversed([*_upwards(node)]))]

    def extend(self, node: Node, salt: str, tokens: Sequence[int], pages: Sequence[int]) -> Node:
        """Puts the pages that follow the prefix ending in `node` into the tree, and moves the caller's lock to the end.

        `pages` hold `tokens` from the end of `node` on. Where the tree has a page for the same tokens, that one stays
        and the caller's is not taken in. Below a detached node nothing is put in.

        Returns: the node that the caller's lock is on now.
        """
        if node.detached:
            return node
        held, first, at, end = node, node.end, node.end, node.end + len(pages)
        if node.children:
            node, at = self.find(salt, tokens, end, Found(node, first))
            node = self._split(node, at - node.start)
            self.lock(node, held)
        if at < end:
            keys = [self._key(salt, tokens, index) for index in range(at, end)]
            added = list(pages[at - first :])
            self._pool.share(added)
            if node.locks == 1 and not node.children and not node.cut and node is not self._root:
                node.keys += keys  # nobody else ends in this leaf: it grows
                node.pages += added
            else:
                child = Node(node, at, keys, added, locks=1)
                node.children[keys[0]] = child
                node = child
        return node

    def lock(self, node: Node, above: Node | None = None) -> None:
        """One more sequence has its cached prefix end in `node` (and not in `above`, from which on it was locked)."""
        for step in _upwards(node, above):
            if not step.locks and step in self._idle:
                del self._idle[step]
                self.num_idle -= len(step.pages)
            step.locks += 1

    def unlock(self, node: Node) -> None:
        """A sequence lets go of the prefix that ends in `node`; it becomes the most recently used."""
        for step in _upwards(node):
            check(step.locks > 0, "a node is unlocked more often than locked")
            step.locks -= 1
            if not step.locks and not step.detached and step is not self._root:
                self._idle[step] = None
                self.num_idle += len(step.pages)

    def count_hit(self, node: Node) -> None:
        """A request has begun with the prefix that ends in `node`."""
        for step in _upwards(node):
            step.hits += 1

    def evict(self, count: int) -> None:
        """Gives back up to `count` pages: the tails of the least recently used unlocked leaves."""
        while count > 0 and self._idle:
            leaf = next(iter(self._idle))
            kept = len(leaf.pages) - count
            if kept > 0:
                self._pool.release(leaf.pages[kept:])
                self.num_idle -= count
                del leaf.keys[kept:], leaf.pages[kept:]
                leaf.cut = True
                return
            count = -kept
            self._detach(leaf)

    def withdraw(self, node: Node, first: int) -> None:
        """Takes pages `first` and after of the prefix that ends in `node`, with all below them, out of the tree.

        Sequences that have such pages keep them (and their locks); nobody will find them any more.
        """
        while node.parent is not None and node.start > first:
            node = node.parent
        if node.parent is None or first >= node.end:
            return  # it is not there, or not any more (a detached node has no pages)
        if first > node.start:
            self._split(node, first - node.start)
        self._detach(node)

    def clear(self) -> None:
        """Empties the tree. Pages in use stay with the sequences that have them; the others are free."""
        for child in list(self._root.children.values()):
            self._detach(child)

    def _key(self, salt: str, tokens: Sequence[int], index: int) -> Hashable:
        """What page `index` is found by; the first page carries the salt, so that all below belong to one tenant."""
        ids = tuple(tokens[index * self._page_size : (index + 1) * self._page_size])
        return ids if index else (salt, ids)

    def _split(self, node: Node, length: int) -> Node:
        """Parts the first `length` pages off into a new parent of `node`, and returns it; `node` if it has no more.

        `node` keeps its identity and its end, because locks are on ends. If it is unlocked, so is the new node, which
        has no place in `_idle` yet: the caller locks it at once.
        """
        if length == len(node.pages):
            return node
        assert node.parent is not None  # the root has no pages to split
        upper = Node(node.parent, node.start, node.keys[:length], node.pages[:length], node.locks)
        upper.hits = node.hits
        if not node.locks:
            self.num_idle -= length
        node.parent.children[node.keys[0]] = upper
        del node.keys[:length], node.pages[:length]
        node.start += length
        node.parent = upper
        upper.children[node.keys[0]] = node
        return upper

    def _detach(self, node: Node) -> None:
        assert node.parent is not None  # the root stays
        del node.parent.children[node.keys[0]]
        for gone in self._below(node):
            if gone in self._idle:
                del self._idle[gone]
                self.num_idle -= len(gone.pages)
            self._pool.release(gone.pages)
            gone.keys, gone.pages, gone.children, gone.detached = [], [], {}, True

    def _below(self, node: Node) -> Iterator[Node]:
        """The node and all below it (children are looked up before the node is handed out)."""
        stack = [node]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    def most_hit(self, limit: int) -> tuple[list[NodeView], int]:
        """The `limit` most hit nodes, of equally hit ones the nearest to the root: each comes after its parent.

        Returns: them, and how many there are in all. O(nodes of the tree).
        """
        nodes = [node for node in self._below(self._root) if node is not self._root]
        chosen = heapq.nlargest(limit, nodes, key=lambda node: (node.hits, -node.start))
        places: dict[Node | None, int] = {node: place for place, node in enumerate(chosen, 1)}
        ages = {node: age for age, node in enumerate(self._idle, 1)}
        views = [
            NodeView(places.get(node.parent, 0), len(node.pages), node.locks, node.hits, ages.get(node, 0))
            for node in chosen
        ]
        return views, len(nodes)

    def idle_pages(self) -> Iterator[int]:
        """The pages that `evict` can give back."""
        for node in self._idle:
            yield from node.pages

    def pages(self) -> Iterator[int]:
        """Every page that the tree holds."""
        for node in self._below(self._root):
            yield from node.pages

    def check_integrity(self, locked: Sequence[Node]) -> None:
        """Checks the tree against `locked`: the nodes that sequences hold, once for each.

        Raises: IntegrityError.
        """
        locks: dict[Node, int] = {}
        for holder in locked:
            for step in _upwards(holder):
                locks[step] = locks.get(step, 0) + 1
        idle, place = 0, {node: position for position, node in enumerate(self._idle)}
        found = list(self._below(self._root))
        for node in found:
            held = locks.get(node, 0)
            check(node.locks == held, f"a node has {node.locks} locks, its holders are {held}")
            whole = not node.detached and len(node.keys) == len(node.pages)
            check(whole, "a node in the tree is detached or has unequal keys and pages")
            for key, child in node.children.items():
                found_by = child.parent, child.keys[0], child.start
                check(found_by == (node, key, node.end), "a node is not where its parent has it")
                check(child.hits <= node.hits, "a node has more hits than its parent")
            unlocked = not node.locks and node is not self._root
            check((node in place) == unlocked, "unlocked and idle are not the same nodes")
            if unlocked:
                before_its_parent = node.parent not in place or place[node] < place[node.parent]
                check(before_its_parent, "an idle parent would be evicted before its child")
                unshared = all(self._pool.references(page) == 1 for page in node.pages)
                check(unshared, "a page of an unlocked node is held by a sequence")
                idle += len(node.pages)
        right = idle == self.num_idle and place.keys() <= set(found)
        check(right, "the idle pages are not what the idle nodes have")


def _upwards(node: Node | None, above: Node | None = None) -> Iterator[Node]:
    """The node and all above it, up to one that is not among them (None: the root is)."""
    while node is not above and node is not None:
        yield node
        node = node.parent
