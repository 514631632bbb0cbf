"""The page pool: every page is free or held, and the counts say by how many."""

import pytest

from engine.cache.pool import IntegrityError, PagePool


def test_pages_are_taken_shared_and_released():
    pool = PagePool(4)
    first = pool.take(3)
    assert len(set(first)) == 3
    assert pool.num_free == 1
    pool.share(first[:1])
    pool.release(first)
    assert pool.num_free == 3
    assert [pool.references(page) for page in first] == [1, 0, 0]
    pool.release(first[:1])
    assert pool.num_free == 4
    assert sorted(pool.take(4)) == [0, 1, 2, 3]


def test_the_first_page_of_a_table_is_reused_first():
    pool = PagePool(8)
    pages = pool.take(3)
    pool.release(pages)
    assert pool.take(3) == pages


def test_more_than_there_is_cannot_be_taken():
    pool = PagePool(2)
    pool.take(1)
    with pytest.raises(IntegrityError, match="2 pages wanted, 1 free"):
        pool.take(2)
    assert pool.num_free == 1


def test_a_page_cannot_be_released_twice():
    """A double free is an error at once, not a page that two sequences get."""
    pool = PagePool(2)
    pages = pool.take(1)
    pool.release(pages)
    with pytest.raises(IntegrityError, match="released twice"):
        pool.release(pages)
    with pytest.raises(IntegrityError, match="cannot be shared"):
        pool.share(pages)


def test_integrity_compares_with_the_holders():
    pool = PagePool(4)
    pages = pool.take(2)
    pool.share(pages[:1])
    pool.check_integrity([pages[0], pages[0], pages[1]])
    with pytest.raises(IntegrityError, match="references are wrong"):
        pool.check_integrity(pages)
    pool._free.append(pages[0])
    with pytest.raises(IntegrityError, match="free list"):
        pool.check_integrity([pages[0], pages[0], pages[1]])
