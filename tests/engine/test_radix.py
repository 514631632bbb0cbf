"""The radix tree: longest prefixes, splits, locks, eviction order; and its equality with a flat model page by page."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.cache.pool import IntegrityError, PagePool
from engine.cache.radix import RadixTree

PAGE = 2


class Shelf:
    """A pool and a tree, and what sequences do with them."""

    def __init__(self, num_pages: int = 32) -> None:
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(self.pool, PAGE)

    def put(self, tokens: list[int], salt: str = "") -> list[int]:
        """Computes and caches all full pages of `tokens`, and lets them go. Returns the cached pages of the prefix."""
        end = len(tokens) // PAGE
        node, cached = self.tree.acquire(salt, tokens, end)
        pages, fresh = self.tree.prefix(node), self.pool.take(end - cached)
        node = self.tree.extend(node, salt, tokens, fresh)
        self.tree.unlock(node)
        self.pool.release(fresh)
        return pages + fresh

    def cached(self, tokens: list[int], salt: str = "") -> int:
        """How many pages are found (which makes them the most recently used)."""
        node, pages = self.tree.acquire(salt, tokens, len(tokens) // PAGE)
        self.tree.unlock(node)
        return pages

    def check(self, locked=()) -> None:
        self.tree.check_integrity(list(locked))
        self.pool.check_integrity(self.tree.pages())


def test_the_longest_prefix_is_found_in_full_pages():
    shelf = Shelf()
    pages = shelf.put([1, 2, 3, 4, 5, 6, 7])
    assert shelf.tree.num_idle == 3
    for tokens, found in [([1, 2, 3, 4, 5, 6, 9, 9], 3), ([1, 2, 3, 4, 9, 9], 2), ([1, 2, 3], 1), ([1, 9], 0), ([], 0)]:
        node, got = shelf.tree.acquire("", tokens, len(tokens) // PAGE)
        assert (got, shelf.tree.prefix(node)) == (found, pages[:found])
        shelf.tree.unlock(node)
        shelf.check()


def test_a_limit_cuts_the_match():
    shelf = Shelf()
    pages = shelf.put([1, 2, 3, 4, 5, 6])
    node, _ = shelf.tree.acquire("", [1, 2, 3, 4, 5, 6], 2)
    assert shelf.tree.prefix(node) == pages[:2]
    shelf.check([node])
    shelf.tree.evict(32)
    assert shelf.pool.num_free == 30, "what is locked is just what was matched"


def test_a_partial_match_is_split_before_it_is_locked():
    """The matched part is locked, the rest may be evicted, and the node matched last is not."""
    shelf = Shelf()
    pages = shelf.put([1, 2, 3, 4, 5, 6, 7, 8])
    node, _ = shelf.tree.acquire("", [1, 2, 3, 4, 0, 0], 3)
    shelf.tree.evict(32)
    shelf.check([node])
    assert shelf.tree.prefix(node) == pages[:2]
    assert [shelf.pool.references(page) for page in pages] == [1, 1, 0, 0]
    shelf.tree.unlock(node)
    shelf.tree.evict(32)
    assert shelf.pool.num_free == 32


def test_salts_do_not_share():
    shelf = Shelf()
    shelf.put([1, 2, 3, 4], salt="a")
    assert shelf.cached([1, 2, 3, 4], salt="b") == 0
    assert shelf.cached([1, 2, 3, 4]) == 0
    shelf.put([1, 2, 3, 4], salt="b")
    assert shelf.tree.num_idle == 4
    assert shelf.cached([1, 2, 3, 4], salt="a") == 2
    shelf.check()


def test_the_view_has_hits_locks_and_ages_and_parents_first():
    shelf = Shelf()
    shelf.put([1, 2, 3, 4, 5, 6])
    shelf.put([7, 8])
    node, _ = shelf.tree.acquire("", [1, 2, 3, 4, 9, 9], 3)  # splits 1..4 off
    shelf.tree.count_hit(node)
    assert shelf.tree.most_hit(9) == ([(0, 2, 1, 1, 0), (0, 1, 0, 0, 2), (1, 1, 0, 0, 1)], 3)
    shelf.tree.unlock(node)
    both, _ = shelf.tree.acquire("", [1, 2, 3, 4, 5, 6], 3)
    shelf.tree.count_hit(both)
    shelf.tree.unlock(both)
    shelf.check()
    nodes, total = shelf.tree.most_hit(2)
    assert (nodes, total) == ([(0, 2, 0, 2, 3), (1, 1, 0, 1, 2)], 3)


def test_of_equal_pages_the_first_stays():
    shelf = Shelf()
    one, _ = shelf.tree.acquire("", [1, 2, 3, 4], 2)
    two, _ = shelf.tree.acquire("", [1, 2, 3, 4], 2)
    own, late = shelf.pool.take(2), shelf.pool.take(2)
    one = shelf.tree.extend(one, "", [1, 2, 3, 4], own)
    two = shelf.tree.extend(two, "", [1, 2, 3, 4], late)
    assert list(shelf.tree.pages()) == own
    assert [shelf.pool.references(page) for page in own + late] == [2, 2, 1, 1]
    shelf.tree.unlock(one)
    assert shelf.tree.num_idle == 0, "the second one has its lock on the same pages"
    shelf.tree.unlock(two)
    shelf.pool.release(own)
    shelf.pool.release(late)
    shelf.check()
    assert (shelf.tree.num_idle, shelf.pool.num_free) == (2, 30)


def test_a_leaf_of_one_owner_grows_in_place():
    shelf = Shelf()
    tokens = list(range(20))
    node, _ = shelf.tree.acquire("", tokens, 0)
    for _ in range(10):
        node = shelf.tree.extend(node, "", tokens, shelf.pool.take(1))
    assert node.start == 0
    assert len(node.pages) == 10


def test_the_least_recently_used_leaf_goes_first_from_its_tail():
    shelf = Shelf()
    old = shelf.put([1, 2, 3, 4, 5, 6])
    new = shelf.put([7, 8, 9, 10])
    shelf.tree.evict(1)
    assert [shelf.pool.references(page) for page in old + new] == [1, 1, 0, 1, 1]
    assert shelf.cached([1, 2, 3, 4, 5, 6]) == 2, "and is now the most recently used"
    shelf.tree.evict(1)
    assert [shelf.pool.references(page) for page in old + new] == [1, 1, 0, 1, 0]
    shelf.check()


def test_a_parent_goes_after_its_children():
    shelf = Shelf()
    shelf.put([1, 2, 3, 4])
    shelf.put([1, 2, 5, 6])
    shelf.put([1, 2, 7, 8])
    for left in (3, 2, 1, 0):
        shelf.tree.evict(1)
        shelf.check()
        assert shelf.tree.num_idle == left
        assert shelf.cached([1, 2]) == (left > 0)


def test_eviction_takes_whole_pages_and_no_more_than_asked():
    shelf = Shelf()
    shelf.put(list(range(20)))
    shelf.tree.evict(4)
    assert shelf.pool.num_free == 32 - 6
    assert shelf.cached(list(range(20))) == 6


def test_withdrawn_pages_are_found_no_more_but_stay_with_their_holders():
    """The pages of a failed step leave the tree, and those that continue them."""
    shelf = Shelf()
    tokens = [1, 2, 3, 4, 5, 6]
    pages = shelf.put(tokens)
    branch = shelf.put([1, 2, 3, 4, 9, 9])
    reader, _ = shelf.tree.acquire("", [1, 2, 3, 4, 9, 9], 3)
    got = shelf.tree.prefix(reader)
    shelf.pool.share(got)
    holder, _ = shelf.tree.acquire("", tokens, 3)
    shelf.tree.withdraw(holder, 1)
    shelf.tree.check_integrity([reader, holder])
    assert shelf.cached(tokens) == 1
    assert [shelf.pool.references(page) for page in branch] == [2, 1, 1], "the reader has them still"
    assert [shelf.pool.references(page) for page in pages] == [2, 1, 0]
    assert shelf.tree.extend(reader, "", [1, 2, 3, 4, 9, 9, 8, 8], shelf.pool.take(1)) is reader
    shelf.tree.unlock(reader)
    shelf.tree.unlock(holder)
    shelf.pool.release(got)
    shelf.tree.check_integrity([])
    assert shelf.tree.num_idle == 1


def test_withdrawing_twice_and_above_the_first_time():
    shelf = Shelf()
    tokens = [1, 2, 3, 4, 5, 6]
    shelf.put(tokens)
    one, _ = shelf.tree.acquire("", tokens, 3)
    shelf.tree.withdraw(one, 2)
    shelf.tree.withdraw(one, 2)
    assert shelf.cached(tokens) == 2
    shelf.tree.withdraw(one, 0)
    assert shelf.cached(tokens) == 0
    shelf.tree.withdraw(one, 0)
    shelf.tree.unlock(one)
    shelf.check()
    assert shelf.pool.num_free == 32


def test_clear_forgets_pages_in_use_too():
    shelf = Shelf()
    tokens = [1, 2, 3, 4]
    shelf.put(tokens)
    shelf.put([9, 9])
    node, _ = shelf.tree.acquire("", tokens, 1)
    got = shelf.tree.prefix(node)
    shelf.pool.share(got)
    shelf.tree.clear()
    assert shelf.pool.num_free == 31
    assert shelf.cached(tokens) == 0
    shelf.tree.unlock(node)
    shelf.tree.check_integrity([])


def test_a_prefix_is_looked_up_from_where_it_was_found(monkeypatch):
    """Of 100 pages none is compared again, also when the node was split; what was evicted is, once it is back."""
    shelf, tokens, compared = Shelf(300), list(range(200)), []
    key = RadixTree._key
    monkeypatch.setattr(RadixTree, "_key", lambda self, *rest: compared.append(rest[-1]) or key(self, *rest))
    shelf.put(tokens)
    known = shelf.tree.find("", tokens, 100)

    def looked_up() -> tuple[int, list[int]]:
        compared.clear()
        return shelf.tree.find("", tokens, 100, known).pages, compared

    assert looked_up() == (100, [])
    shelf.put([*tokens[:100], 7, 7])
    assert looked_up() == (100, [])
    shelf.tree.evict(61)  # the 50 of the part split off, the other's one, and 10 of what both began with
    assert looked_up() == (40, [40])
    shelf.put([*tokens[:80], *([7] * 40)])
    assert looked_up() == (40, [40]), "what was cut may go on in another way"
    shelf.put(tokens)
    assert looked_up() == (100, list(range(40, 100)))
    shelf.tree.clear()
    assert looked_up() == (0, [0])


def test_unlocking_more_often_than_locking_is_an_error():
    shelf = Shelf()
    node, _ = shelf.tree.acquire("", [1, 2], 1)
    shelf.tree.unlock(node)
    with pytest.raises(IntegrityError):
        shelf.tree.unlock(node)


EVENTS = ("put", "hold", "go on", "let go", "evict", "withdraw", "clear")
EVENT = st.tuples(st.sampled_from(EVENTS), st.integers(0, 5), st.integers(0, 4), st.integers(1, 5))


@settings(max_examples=500, deadline=None)
@given(st.lists(EVENT, max_size=40))
def test_what_was_found_at_any_time_does_not_change_what_is_found(events):
    """Texts begin with some zeros and go on with some twos or threes, so that they part and meet in the same places."""
    shelf, held = Shelf(), list[tuple]()
    known: dict[tuple[int, ...], list] = {}

    def find(tokens, *earlier):
        return shelf.tree.find("", tokens, len(tokens) // PAGE, *earlier)

    for kind, zeros, others, count in events:
        tokens = (*[0] * zeros * PAGE, *[2 + count % 2] * others * PAGE)
        match kind:
            case "put":
                shelf.put(tokens)
            case "hold":
                held.append((shelf.tree.acquire("", tokens, count).node, tokens))
            case "go on" if held:
                node, tokens = held.pop(0)
                tokens = (*tokens[: node.end * PAGE], *[others] * count * PAGE)
                fresh = shelf.pool.take(count) if shelf.pool.num_free >= count else []
                held.append((shelf.tree.extend(node, "", tokens, fresh), tokens))
                shelf.pool.release(fresh)
            case "let go" if held:
                shelf.tree.unlock(held.pop(0)[0])
            case "evict":
                shelf.tree.evict(count)
            case "withdraw" if held:
                shelf.tree.withdraw(held[0][0], count)
            case "clear" if count == 1:
                shelf.tree.clear()
        known.setdefault(tokens, []).append(find(tokens))
        for begin, earlier in known.items():
            assert all(find(begin, one) == find(begin) for one in earlier)
            assert find((*begin, *tokens), earlier[-1]) == find((*begin, *tokens))


class TreeMachine(RuleBasedStateMachine):
    """The tree against a flat model: a dictionary from each cached prefix to its page, lock count and last use.

    Tokens are 0 and 1 and a page is two of them, so that prefixes meet, split and part all the time.
    """

    tokens = st.lists(st.integers(0, 1), max_size=16).map(tuple)

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(24)
        self.tree = RadixTree(self.pool, PAGE)
        self.pages: dict[tuple[int, ...], int] = {}
        self.locks: dict[tuple[int, ...], int] = {}
        self.used: dict[tuple[int, ...], tuple[int, int]] = {}
        self.clock = 0
        self.holders: list[list] = []  # [node, tokens, how many pages are covered by the lock, still in the tree]

    def _prefixes(self, tokens, pages):
        return [tokens[: PAGE * (index + 1)] for index in range(pages)]

    @rule(tokens=tokens, limit=st.integers(0, 8))
    def acquire(self, tokens, limit):
        limit = min(limit, len(tokens) // PAGE)
        found = self.tree.find("", tokens, limit)
        node, pages = self.tree.acquire("", tokens, limit)
        assert found.pages == pages
        expected = []
        for prefix in self._prefixes(tokens, limit):
            if prefix not in self.pages:
                break
            expected.append(self.pages[prefix])
            self.locks[prefix] += 1
        assert self.tree.prefix(node) == expected
        self.holders.append([node, tokens, pages, True])

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(1, 4))
    def extend(self, data, count):
        holder = data.draw(st.sampled_from(self.holders))
        node, tokens, covered, attached = holder
        count = min(count, len(tokens) // PAGE - covered)
        if count < 1 or self.pool.num_free < count:
            return
        fresh = self.pool.take(count)
        holder[0] = self.tree.extend(node, "", tokens, fresh)
        self.pool.release(fresh)  # the page tables are not modelled: the tree alone holds pages
        if attached:
            holder[2] += count
            for prefix, page in zip(self._prefixes(tokens, holder[2])[covered:], fresh, strict=True):
                self.pages.setdefault(prefix, page)
                self.locks[prefix] = self.locks.get(prefix, 0) + 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def unlock(self, data):
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        node, tokens, covered, _ = holder
        self.tree.unlock(node)
        self.clock += 1
        for prefix in self._prefixes(tokens, covered):
            if prefix in self.pages:
                self.locks[prefix] -= 1
                if not self.locks[prefix]:
                    self.used[prefix] = (self.clock, -len(prefix))

    @rule(count=st.integers(1, 5))
    def evict(self, count):
        self.tree.evict(count)
        for _ in range(count):
            idle = [prefix for prefix in self.pages if not self.locks[prefix]]
            if idle:
                self._forget(min(idle, key=self.used.__getitem__))

    def _forget(self, prefix):
        for book in (self.pages, self.locks, self.used):
            book.pop(prefix, None)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), first=st.integers(0, 7))
    def withdraw(self, data, first):
        node, tokens, covered, _ = data.draw(st.sampled_from(self.holders))
        self.tree.withdraw(node, first)
        if first >= covered:
            return
        root = tokens[: PAGE * (first + 1)]
        for prefix in [prefix for prefix in self.pages if prefix[: len(root)] == root]:
            self._forget(prefix)
        for holder in self.holders:
            if holder[1][: len(root)] == root and holder[2] > first:
                holder[2], holder[3] = first, False

    @invariant()
    def agrees(self):
        assert sorted(self.tree.pages()) == sorted(self.pages.values())
        assert self.tree.num_idle == sum(not count for count in self.locks.values())
        self.pool.check_integrity(self.tree.pages())
        self.tree.check_integrity([holder[0] for holder in self.holders])


def test_it_equals_a_flat_model():
    run_state_machine_as_test(TreeMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


@pytest.mark.full
def test_it_equals_a_flat_model_for_long():
    run_state_machine_as_test(TreeMachine, settings=settings(max_examples=1000, stateful_step_count=80, deadline=None))
