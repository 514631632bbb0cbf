"""The prefix hit rate of a real trace, against vLLM 0.26.0's measured on the same trace with pages of 16 tokens."""

import json
import random
from functools import cache
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.messages import CoreInfo, CoreStats
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.step import StepResult

VOCAB = 50_000


@cache
def block(hash_id: int) -> tuple[int, ...]:
    """The tokens of a block of the trace: lengths are divided by 32, so that one of 512 tokens is one page."""
    return tuple(random.Random(hash_id).choices(range(VOCAB), k=16))


def replay(path, num_pages: int) -> CoreStats:
    """All requests of the trace in order, one at a time, one token each."""
    info = CoreInfo(
        vocab_size=VOCAB,
        max_model_len=8192,
        eos_token_ids=[],
        page_size=16,
        num_pages=num_pages,
        max_num_seqs=8,
        max_num_batched_tokens=8192,
    )
    scheduler = Scheduler(EngineConfig(Path()), info)
    for number, line in enumerate(path.read_text().splitlines()):
        entry = json.loads(line)
        tokens = [token for hash_id in entry["hash_ids"] for token in block(hash_id)]
        prompt = tuple(tokens[: entry["input_length"] // 32])
        scheduler.add(Request(str(number), prompt, SamplingParams(max_tokens=1)))
        while scheduler.has_work:
            step = scheduler.schedule()
            scheduler.update(step, StepResult((2,) * len(step.samples)))
    scheduler.check_integrity()
    return scheduler.stats


def test_with_an_ample_pool_every_hit_is_found(data_file):
    stats = replay(data_file("prefix_trace.jsonl"), 60_000)
    assert (stats.prefix_hit_tokens, stats.prefix_query_tokens) == (252_032, 856_614)  # 0.2942


def test_with_4000_pages_eviction_keeps_what_is_used(data_file):
    stats = replay(data_file("prefix_trace.jsonl"), 4_000)
    assert stats.prefix_hit_tokens / stats.prefix_query_tokens == pytest.approx(0.0952, rel=0.05)
