"""The rows of `python -m loadtest.suite`: loads, the order that the reference ran them in, and what is aimed at.

Knows no server. Names of loads are those of docs/results/reference-vllm-0.26.0-h200.json.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.records import Chain, LoadTestError, Prompt


@dataclass(frozen=True, slots=True)
class Row:
    """One load."""

    key: str  # its name in --rows and of its files
    load: str  # its name in tables
    dataset: str  # "random" or "sharegpt", as of `fulcrum bench serve`; "mixed": see `mixed_lengths`
    count: int  # requests; fewer where sharegpt has fewer and `oversample` is off; of mixed for each second
    lengths: tuple[int, int] = (0, 0)  # tokens in and out of random; mean and longest sum of both of mixed
    rate: float = math.inf  # requests per second; infinite: all at once
    concurrency: int | None = None
    seed: int = 1
    oversample: bool = False
    fresh: bool = True  # each repeat has a seed of its own, so that no prompt was seen before
    flush: bool = True  # the prefix cache is emptied first
    as_ids: bool = False  # texts are sent as token ids
    options: tuple[str, ...] = ()  # of the server; rows with the same ones share a server
    reference: str | None = None  # the load it is compared with, where that has another name; "": with none

    @property
    def compared_with(self) -> str:
        """A load of the reference, or ""."""
        return self.load if self.reference is None else self.reference


def _random(concurrency: int) -> Row:
    count = max(4, 3 * concurrency)
    load = f"rnd1k, concurrency {concurrency}"
    return Row(
        f"rnd1k-c{concurrency}", load, "random", count, (1024, 256), concurrency=concurrency, seed=concurrency * 1000
    )


def _sharegpt(rate: int, count: int) -> Row:
    return Row(f"sg-{rate}", f"sg, {rate} req/s", "sharegpt", count, rate=rate, fresh=False, flush=False)


def _beyond(rate: int) -> Row:
    """A rate that the reference has no row of: its prompts, repeated, for about twenty seconds."""
    load = f"sg, {rate} req/s, repeated"
    return Row(f"sg-{rate}", load, "sharegpt", 20 * rate, rate=rate, oversample=True, fresh=False, reference="")


_7K = "7,680 in, 64 out, concurrency 1"
_7K_IDS = "7,680 in (token ids), 64 out, concurrency 1"
_LONG = "7,168 in, 512 out, 50 at once"
_2000 = "sg, 2,000 at once, 4 API processes"
_SG_ALL = "sg, 519 at once"
_CARD = "24 GiB, 64 in flight, mean 2,800 tokens, longest 8,192"
_24_GIB = "--memory-budget=24GiB"
# More rows than requests in flight would take room from the KV pool.
_CARD_OPTIONS = (_24_GIB, "--max-num-seqs=64")
_ALL = (
    *(_random(concurrency) for concurrency in (1, 8, 32, 64, 128, 256)),
    Row("rnd7k-text", _7K, "random", 3, (7680, 64), concurrency=1, seed=7000),
    Row("rnd7k-ids", _7K_IDS, "random", 3, (7680, 64), concurrency=1, seed=7500, as_ids=True, reference=_7K),
    Row("long50", _LONG, "random", 50, (7168, 512), seed=90_000),
    # One sample in all rows: from the second on its prompts are mostly cached, as in the reference.
    Row("sg-all", _SG_ALL, "sharegpt", 519, fresh=False),
    *map(_sharegpt, (32, 16, 8, 4, 2, 1), (519, 519, 320, 140, 50, 25)),
    # The reference's ran on a server of its own, so it begins with an empty cache.
    Row("sg-2000", _2000, "sharegpt", 2000, seed=0, oversample=True, fresh=False),
    *map(_beyond, (64, 96, 128)),
    Row("card24", _CARD, "mixed", 16, (2800, 8192), concurrency=64, options=_CARD_OPTIONS, reference=""),
    Row("card24-sg", f"24 GiB, {_SG_ALL}", "sharegpt", 519, fresh=False, options=(_24_GIB,), reference=""),
)
ROWS: dict[str, Row] = {row.key: row for row in _ALL}


_BEYOND = ("sg-64", "sg-96", "sg-128")
_SHAREGPT = tuple(key for key in ROWS if key.startswith("sg") and key not in _BEYOND)
GROUPS: dict[str, tuple[str, ...]] = {
    "rnd1k": tuple(key for key in ROWS if key.startswith("rnd1k")),
    "rnd7k": ("rnd7k-text", "rnd7k-ids"),
    "sg": _SHAREGPT,
    "sg-rates": _SHAREGPT[:-1],
    "sg-beyond": _BEYOND,
}
OBJECTIVES = {"ttft": 200.0, "tpot": 20.0}
"""Milliseconds that a request of ShareGPT is to keep within to be counted as good."""

# The project's goals (a figure, at least or at most): ahead of vLLM 0.26.0 on the same GPU.
TARGETS: tuple[tuple[str, str, str, float], ...] = (
    ("rnd1k-c1", "p50_tpot_ms", "<=", 4.4),
    ("rnd1k-c8", "request_throughput", ">=", 5.8),
    ("rnd1k-c32", "request_throughput", ">=", 16),
    ("rnd1k-c64", "p99_itl_ms", "<=", 60),
    ("rnd1k-c128", "request_throughput", ">=", 27.4),
    ("rnd1k-c128", "p99_itl_ms", "<=", 60),
    ("rnd1k-c256", "request_throughput", ">=", 29.4),
    ("rnd1k-c256", "p99_itl_ms", "<=", 60),
    ("rnd7k-text", "p50_ttft_ms", "<=", 208),
    ("rnd7k-ids", "p50_ttft_ms", "<=", 185),
    ("sg-8", "output_throughput", ">=", 1576),
    ("sg-8", "p50_ttft_ms", "<=", 22.3),
    ("sg-8", "p99_ttft_ms", "<=", 35.6),
    ("sg-8", "p99_itl_ms", "<=", 10),
    ("sg-32", "p99_ttft_ms", "<=", 69),
    ("sg-32", "p99_itl_ms", "<=", 13.7),
    ("sg-2000", "request_throughput", ">=", 105),
    ("sg-2000", "p99_itl_ms", "<=", 60),
)


def select(names: str) -> list[Row]:
    """The rows of these names and groups (between commas), in the table's order. Raises: LoadTestError."""
    wanted: set[str] = set()
    for name in names.split(","):
        if name not in ROWS and name not in GROUPS:
            raise LoadTestError(f"there is no row {name!r}: {', '.join([*ROWS, *GROUPS])}")
        wanted.update(GROUPS.get(name, (name,)))
    return [row for key, row in ROWS.items() if key in wanted]


def gate(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each target of a row that was run (by key), and a count."""
    lines, met = [], 0
    for key, name, sign, limit in TARGETS:
        if key in figures:
            value = figures[key][name]
            good = value >= limit if sign == ">=" else value <= limit
            met += good
            lines.append(f"{'met   ' if good else 'MISSED'}  {key:11} {name:19} {value:10,.2f} {sign} {limit:,}")
    return [*lines, f"{met} of {len(lines)} targets are met"]


def mixed_lengths(count: int, mean: int, longest: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, completion) tokens: the sums of one in a hundred are `longest`, those of the others log-normal.

    Completions are drawn apart from the sums, so that long requests stay no longer than others: what runs together has
    the mean of what is sent.
    """
    generator = np.random.default_rng(seed)
    share, sigma = 0.01, 0.3
    others = (mean - share * longest) / (1 - share)
    # A log-normal's mean is exp(mu + sigma^2 / 2).
    sums = np.exp(generator.normal(math.log(others) - sigma**2 / 2, sigma, count)).clip(longest / 64, longest)
    sums[generator.random(count) < share] = longest
    outputs = generator.uniform(longest / 64, longest / 16, count).clip(1, sums / 2)
    return [(int(total) - int(output), int(output)) for total, output in zip(sums, outputs, strict=True)]


def mixed_prompts(ids: Sequence[int], count: int, lengths: tuple[int, int], seed: int) -> list[Chain]:
    """Prompts of random ids out of `ids`, of `mixed_lengths` of this mean and longest sum."""
    generator, known = np.random.default_rng(seed), np.asarray(ids)
    return [
        Chain((Prompt(known[generator.integers(0, len(known), size)].tolist(), output, size),))
        for size, output in mixed_lengths(count, *lengths, seed=seed)
    ]
