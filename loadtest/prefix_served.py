"""What a running server's prefix cache is worth: its hit rate on a trace, and TTFT by turn of chats, cold and warm."""

import itertools
import statistics
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from loadtest.records import Chain, Fields, LoadTestError, Record
from loadtest.serve import LoadTest
from loadtest.tokens import token_ids
from loadtest.trace import Hits, hit_row


def served(test: LoadTest, page_size: int, pool: int | None, flush: Callable[[], object]) -> Fields:
    """Sends a data set and counts its hits: JSON field "rows", a single one (see `trace.hit_row`).

    Chats are sent twice, turn by turn: cold, each request with a salt of its own, and warm, with one salt for all;
    "turns" has the TTFT of both, and "rows" is of the warm pass.

    Args:
        pool: KV tokens that the server has, where that is known.
        flush: called before each pass.

    Raises: LoadTestError when a request failed.
    """
    chains, cold = test.chains(), list[Record]()
    if test.dataset == "multi-turn":
        cold = _sent(test, _salted(chains, iter(lambda: uuid.uuid4().hex, "")), flush)
        chains = _salted(chains, itertools.repeat(uuid.uuid4().hex))
    warm = _sent(test, chains, flush)
    ids = token_ids(test.tokenizer, [prompt.content for chain in chains for prompt in chain.prompts])
    rows: Fields = {"rows": [hit_row(_hits(warm), ids, page_size, pool)]}
    numbers = sorted({record.turn for record in cold})
    return rows | ({"turns": [_turn(number, cold, warm) for number in numbers]} if cold else {})


def _turn(number: int, cold: Iterable[Record], warm: Iterable[Record]) -> Fields:
    before, after = ([record for record in records if record.turn == number] for records in (cold, warm))
    fields: Fields = {
        "turn": number + 1,
        "requests": len(after),
        "mean_prompt_tokens": statistics.fmean(record.prompt_tokens for record in after),
        "hit_rate": _hits(after).rate,
    }
    for name, records in (("cold", before), ("warm", after)):
        p50, p90 = np.percentile([1000 * record.ttft for record in records], (50, 90)).tolist()
        fields |= {f"{name}_p50_ttft_ms": p50, f"{name}_p90_ttft_ms": p90}
    return fields


def _salted(chains: Iterable[Chain], salts: Iterator[str]) -> list[Chain]:
    return [
        replace(chain, prompts=tuple(replace(prompt, salt=next(salts)) for prompt in chain.prompts)) for chain in chains
    ]


def _sent(test: LoadTest, chains: Sequence[Chain], flush: Callable[[], object]) -> list[Record]:
    flush()
    run = test.run(chains)
    if run.fields["unfinished"]:
        raise LoadTestError(f"interrupted: {run.fields['unfinished']} requests did not end")
    if errors := [record.error for record in run.records if record.error]:
        raise LoadTestError(f"{len(errors)} requests failed: {errors[0]}")
    return list(run.records)


def _hits(records: Iterable[Record]) -> Hits:
    return Hits(sum(record.prompt_tokens for record in records), sum(record.cached_tokens for record in records))
