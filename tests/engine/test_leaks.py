"""Many requests through a tiny random model: at the end every page, row and byte is back. `make soak` sends 100,000."""

import gc
import json
import os
import random
from pathlib import Path

import pytest

from engine.build import build_core
from engine.config import EngineConfig
from engine.ngram import NGrams
from engine.request import Request, SamplingParams
from engine.sequence import Sequence

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "2000"))
LIVE = 96


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(3600)
def test_nothing_leaks(tmp_path):
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
        "eos_token_id": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    core, _ = build_core(
        EngineConfig(
            model=tmp_path, load_format="dummy", device="cpu", dtype="float32", threads=1, memory_budget=96 << 10,
            max_num_seqs=64, speculative="ngram", trace_requests=16,
        ),
        progress=False,
    )  # fmt: skip
    scheduler, draw, live, sent = core.scheduler, random.Random(3), [], 0
    at_half = 0
    while sent < REQUESTS or scheduler.has_work:
        while sent < REQUESTS and len(live) < LIVE:
            prompt = tuple(draw.randrange(4) for _ in range(draw.randint(1, 60)))
            params = SamplingParams(
                temperature=draw.choice([0.0, 1.0]), max_tokens=draw.randint(1, 24), n=draw.choice([1, 1, 2])
            )
            scheduler.add(Request(str(sent), prompt, params, tenant=draw.choice("ab"), salt=draw.choice("xy")))
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
    assert not [one for one in gc.get_objects() if type(one) in (Sequence, NGrams)]
    assert resident() - at_half < 48 << 20, (resident(), at_half)
    scheduler.check_integrity()
    stats = scheduler.stats
    assert stats.requests_finished + stats.requests_aborted == REQUESTS
    assert stats.requests_aborted > REQUESTS // 100
    assert stats.preemptions > 0
    assert (stats.running_sequences, stats.waiting_sequences, stats.used_pages) == (0, 0, 0)
    scheduler.flush_cache()
    assert scheduler.stats.free_pages == scheduler.stats.total_pages
    assert len(scheduler._free_rows) == 64
