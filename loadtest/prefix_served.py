"""What a running server's prefix cache is worth: its hit rate on a trace, and TTFT by turn of chats, cold and warm."""

import statistics
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from loadtest.records import Chain, LoadTestError, Record
from loadtest.serve import LoadTest
from loadtest.tokens import token_ids
from loadtest.trace import Hits, hit_row


def served_trace(test: LoadTest, page_size: int, pool: int | None, flush: Callable[[], object]) -> dict[str, Any]:
    """Sends a data set of token ids. JSON fields: "rows", a single one (see `trace.hit_row`).

    Args:
        pool: KV tokens that the server has, where that is known.
        flush: called before.

    Raises: LoadTestError when a request failed.
    """
    chains = test.chains()
    flush()
    return {"rows": [hit_row(_hits(_sent(test, chains)), _ids(test, chains), page_size, pool)]}


def served_chats(test: LoadTest, page_size: int, pool: int | None, flush: Callable[[], object]) -> dict[str, Any]:
    """Sends chats twice, turn by turn: cold, each request with a salt of its own; and warm, with one salt for all.

    JSON fields: "turns", with the TTFT of both; "rows" as of a trace, for the warm pass. `flush` is called before each.

    Raises: LoadTestError when a request failed.
    """
    chains, common = test.chains(), uuid.uuid4().hex
    flush()
    cold = _sent(test, [_salted(chain, lambda: uuid.uuid4().hex) for chain in chains])
    flush()
    warm = _sent(test, [_salted(chain, lambda: common) for chain in chains])
    turns = [_turn(turn, cold, warm) for turn in sorted({record.turn for record in warm})]
    return {"turns": turns, "rows": [hit_row(_hits(warm), _ids(test, chains), page_size, pool)]}


def _turn(turn: int, cold: Sequence[Record], warm: Sequence[Record]) -> dict[str, Any]:
    of_turn = [record for record in warm if record.turn == turn]
    fields: dict[str, Any] = {
        "turn": turn + 1,
        "requests": len(of_turn),
        "mean_prompt_tokens": statistics.fmean(record.prompt_tokens for record in of_turn),
        "hit_rate": _hits(of_turn).rate,
    }
    for name, records in (("cold", cold), ("warm", warm)):
        times = [1000 * record.ttft for record in records if record.turn == turn]
        fields |= {f"{name}_p{each}_ttft_ms": float(np.percentile(times, each)) for each in (50, 90)}
    return fields


def _ids(test: LoadTest, chains: Sequence[Chain]) -> list[list[int]]:
    return token_ids(test.tokenizer, [prompt.content for chain in chains for prompt in chain.prompts])


def _salted(chain: Chain, salt: Callable[[], str]) -> Chain:
    return replace(chain, prompts=tuple(replace(prompt, salt=salt()) for prompt in chain.prompts))


def _sent(test: LoadTest, chains: Sequence[Chain]) -> Sequence[Record]:
    run = test.run(chains)
    if run.fields["unfinished"]:
        raise LoadTestError(f"interrupted: {run.fields['unfinished']} requests did not end")
    if errors := [record.error for record in run.records if record.error]:
        raise LoadTestError(f"{len(errors)} requests failed: {errors[0]}")
    return run.records


def _hits(records: Sequence[Record]) -> Hits:
    return Hits(sum(record.prompt_tokens for record in records), sum(record.cached_tokens for record in records))
