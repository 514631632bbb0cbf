"""Traces as token ids, the names of their pages, and the hit rates that a cache could have. Knows no engine, no server.

A hit is counted as vLLM counts it: the longest run of cached full pages from the start of the prompt, but for its last
token, whose logits are wanted: floor(min(run, n - 1) / page) * page tokens of a prompt of n.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from loadtest.datasets import Sampling, trace_rows
from loadtest.records import Job

GENERATED = 0
"""What a model-free runner generates; no token of a trace's prompt."""


@dataclass(frozen=True, slots=True)
class Hits:
    """Prompt tokens that were looked up, and those of them that were found in the cache."""

    queried: int
    cached: int

    @property
    def rate(self) -> float:
        """Cached tokens for each token queried."""
        return self.cached / self.queried if self.queried else 0.0


class PageNames:
    """Numbers for pages: equal ones for equal tokens after equal pages. Exact, where an engine hashes."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._names: dict[tuple[int, tuple[int, ...]], int] = {}

    def extend(self, names: list[int], tokens: Sequence[int]) -> list[int]:
        """Appends the names of the full pages of `tokens` that `names` does not reach yet; returns it."""
        for end in range((len(names) + 1) * self._size, len(tokens) + 1, self._size):
            key = (names[-1] if names else -1, tuple(tokens[end - self._size : end]))
            names.append(self._names.setdefault(key, len(self._names)))
        return names


def read_trace(sampling: Sampling) -> list[Job]:
    """The first `count` requests of a trace file (see `datasets.prefix_trace`), for runs without a model.

    Every token of a block is the block's hash id + 1: what is equal or differs is what the trace says.

    Raises: LoadTestError.
    """
    return [
        Job(
            tuple(hash_id + 1 for hash_id in row.hash_ids for _ in range(sampling.block))[: row.input_length],
            row.output_length,
        )
        for row in trace_rows(sampling)
    ]


def ideal(prompts: Iterable[Sequence[int]], page_size: int, pages: int | None = None) -> Hits:
    """What a cache of so many pages (None: infinite) finds that evicts the least recently used page.

    Prompts come one after another; of one prompt the later page counts as the less recent.
    """
    names, cached = PageNames(page_size), OrderedDict[int, None]()
    queried = found = 0
    for prompt in prompts:
        keys = names.extend([], prompt)
        queried += len(prompt)
        found += page_size * len([*takewhile(cached.__contains__, keys[: (len(prompt) - 1) // page_size])])
        for key in reversed(keys):
            cached[key] = None
            cached.move_to_end(key)
        while pages is not None and len(cached) > pages:
            cached.popitem(last=False)
    return Hits(queried, found)


def hit_row(hits: Hits, prompts: Sequence[Sequence[int]], page_size: int, pool: int | None) -> dict[str, Any]:
    """JSON fields of a hit rate, with those of an infinite cache and (of a pool of so many tokens) of an LRU beside."""
    pages = None if pool is None else pool // page_size
    return {
        "page_size": page_size,
        "pool_tokens": pool,
        "num_pages": pages,
        "queried_tokens": hits.queried,
        "cached_tokens": hits.cached,
        "hit_rate": hits.rate,
        "ideal_hit_rate": ideal(prompts, page_size).rate,
        "lru_hit_rate": None if pages is None else ideal(prompts, page_size, pages).rate,
    }
