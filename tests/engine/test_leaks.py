"""Many requests of all kinds through a tiny random model: at the end every page, row and byte is back.

`make soak` sends 100,000.
"""

import ctypes
import gc
import json
import logging
import os
import random
import time
from pathlib import Path

import pytest
import xgrammar

from engine.build import build_core
from engine.cache.radix import RadixTree
from engine.config import EngineConfig
from engine.grammar import GrammarMatcher, Vocabulary, tokenizer_info
from engine.ngram import NGrams
from engine.request import Request, SamplingParams
from engine.sequence import Sequence

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "1000"))
LIVE = 96
VOCAB = 64


def resident() -> int:
    """Bytes of this process that are in memory."""
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps of other tests' memory is nobody's
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def request(draw: random.Random, number: int) -> Request:
    grammar = draw.choice(["", "", "", "letters"])
    params = SamplingParams(
        temperature=draw.choice([0.0, 1.0]),
        top_k=draw.choice([0, 8]),
        top_p=draw.choice([1.0, 0.9]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
        logit_bias=draw.choice([{}, {}, {3: 2.0}]),
        max_tokens=draw.randint(1, 24),
        min_tokens=draw.choice([0, 0, 3]),
        stop_token_ids=draw.choice([(), (), (5, 6)]),
        ignore_eos=draw.random() < 0.2,
        n=draw.choice([1, 1, 2]),
        top_logprobs=draw.choice([None, None, None, 0, 3]),
        prompt_logprobs=draw.choice([None, None, None, None, 2]),
    )
    return Request(
        str(number),
        tuple(draw.randrange(4) for _ in range(draw.randint(1, 60))),
        params,
        priority=draw.choice([0, 0, 1]),
        tenant=draw.choice("ab"),
        salt=draw.choice("xy"),
        bypass_cache=draw.random() < 0.1,
        grammar=grammar,
        speculative=draw.random() < 0.8,
    )


@pytest.mark.timeout(3600)
def test_nothing_leaks(tmp_path, monkeypatch):
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCAB,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
        "eos_token_id": [2, VOCAB],  # one is no token
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    core, _ = build_core(
        EngineConfig(
            model=tmp_path, load_format="dummy", device="cpu", dtype="float32", threads=1, memory_budget=48 << 10,
            max_num_seqs=64, speculative="ngram", trace_requests=16,
        ),
        progress=False,
    )  # fmt: skip
    scheduler, draw, live, sent = core.scheduler, random.Random(3), [], 0
    words = Vocabulary(tuple(bytes([64 + token]) for token in range(VOCAB)), (2,))
    compiled = xgrammar.GrammarCompiler(tokenizer_info(words), max_threads=1).compile_regex("[a-z]{1,12}")
    scheduler.grammars.load("letters", compiled.serialize_json().encode(), words)
    evict, evicted = RadixTree.evict, [0]

    def counted(tree: RadixTree, count: int) -> None:
        evicted[0] += count
        evict(tree, count)

    monkeypatch.setattr(RadixTree, "evict", counted)
    at_half, began = 0, time.monotonic()
    while sent < REQUESTS or scheduler.has_work:
        while sent < REQUESTS and len(live) < LIVE:
            scheduler.add(request(draw, sent))
            live.append(str(sent))
            sent += 1
        if draw.random() < 0.2:
            scheduler.abort(draw.choice(live))
        core.turn()
        live = [name for name in live if scheduler.is_live(name)]
        if not at_half and sent >= REQUESTS // 2:
            gc.collect()
            at_half = resident()
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) in (Sequence, NGrams, GrammarMatcher)]
    grown = (resident() - at_half) / 2**20
    scheduler.check_integrity()
    stats = scheduler.stats
    assert stats.requests_finished + stats.requests_aborted == REQUESTS
    assert stats.requests_aborted > REQUESTS // 100
    told = f"{REQUESTS} requests in {time.monotonic() - began:.0f} s, {stats.requests_aborted} of them aborted"
    told += f", {stats.preemptions} preemptions, {evicted[0]} pages evicted, {stats.accepted_tokens} guesses accepted"
    logging.getLogger(__name__).info("%s; memory grew from %.0f MB by %.1f MB", told, at_half / 2**20, grown)
    assert grown < 48
    assert min(stats.preemptions, evicted[0], stats.accepted_tokens) > REQUESTS // 100
    assert (stats.running_sequences, stats.waiting_sequences, stats.used_pages) == (0, 0, 0)
    scheduler.cache.flush()
    assert scheduler.stats.free_pages == scheduler.stats.total_pages
    assert len(scheduler._free_rows) == 64
