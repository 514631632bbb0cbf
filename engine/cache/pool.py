"""The pool of KV pages as the host sees it: page numbers and how many hold each. It does NOT know what is in a page."""

from collections.abc import Iterable, Sequence


class IntegrityError(AssertionError):
    """The books of pool, tree and sequences disagree: a bug in the engine."""


def check(right: bool, message: str) -> None:
    """Raises: IntegrityError where something is not right."""
    if not right:
        raise IntegrityError(message)


class PagePool:
    """Hands out pages 0 to num_pages - 1.

    Everybody who has a page in hand (a sequence's page table, a tree node) holds one reference to it; the page is free
    again when the last one lets go. Taking, sharing and releasing a page are O(1).
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is the warmest

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def references(self, page: int) -> int:
        """How many hold the page."""
        return self._references[page]

    def in_use(self) -> bytearray:
        """A byte for each page: whether anybody holds it."""
        return bytearray(map(bool, self._references))

    def take(self, count: int) -> list[int]:
        """`count` free pages with one reference each.

        Raises: IntegrityError if fewer are free (callers look before they take).
        """
        if count > len(self._free):
            raise IntegrityError(f"{count} pages wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each of these pages."""
        references = self._references
        for page in pages:
            if not references[page]:
                raise IntegrityError(f"page {page} is free and cannot be shared")
            references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less to each of these pages. The last page is released first, so that the first is reused last.

        Raises: IntegrityError if a page is free already.
        """
        references = self._references
        for page in reversed(pages):
            left = references[page] - 1
            if left < 0:
                raise IntegrityError(f"page {page} is released twice")
            references[page] = left
            if not left:
                self._free.append(page)

    def check_integrity(self, holders: Iterable[int]) -> None:
        """Compares the reference counts with `holders`: every page, once for each that holds it.

        Raises: IntegrityError.
        """
        expected = [0] * self.num_pages
        for page in holders:
            expected[page] += 1
        wrong = [page for page in range(self.num_pages) if expected[page] != self._references[page]]
        check(not wrong, f"references are wrong for pages {wrong[:10]}")
        free = [page for page in range(self.num_pages) if not expected[page]]
        check(sorted(self._free) == free, "the free list is not the list of the pages that nobody holds")
