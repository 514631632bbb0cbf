"""`LLM`: scheduler and runner together, on real models. Whatever the settings, the text is transformers'."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.request import FinishReason

EACH = {"dtype": "float32", "device": "cpu", "threads": 1, "progress": False}


def greedy(count: int, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **settings)


def texts(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """The first continuation of each prompt; afterwards no page is lost."""
    generations = llm.generate(prompts, params)
    llm.core.scheduler.check_integrity()
    assert llm.core.stats().used_pages == 0
    return [generation.completions[0].token_ids for generation in generations]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scheduler": "static"},
        {"page_size": 1},
        {"page_size": 64},
        {"max_num_seqs": 1},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 7},
        {"max_num_seqs": 8, "max_num_batched_tokens": 40, "prefix_cache": False},
        {"max_num_seqs": 8, "max_num_batched_tokens": 40, "chunked_prefill": False},
        {"scheduler": "static", "max_num_seqs": 3, "max_num_batched_tokens": 20},
    ],
    ids=str,
)
def test_no_setting_changes_the_text(settings, llama, prompts, tools):
    folder, model = llama
    llm = LLM(folder, **EACH, **{"memory_budget": 4 << 20, "max_num_seqs": 16, **settings})
    for _ in range(2):  # the second time out of the cache
        outputs = texts(llm, prompts, greedy(20))
        assert outputs == [tools.oracle(model, p, o) for p, o in zip(prompts, outputs, strict=True)]


@pytest.mark.parametrize("page_size", [1, 16])
def test_preemption_and_eviction_change_no_text(page_size, llama, prompts, tools):
    """A pool that holds the longest sequence and little more."""
    folder, model = llama
    page_bytes = 2 * 3 * 2 * 16 * 4 * page_size
    llm = LLM(folder, **EACH, page_size=page_size, max_num_seqs=8, memory_budget=page_bytes * (192 // page_size))
    outputs = texts(llm, prompts, greedy(40, n=2))
    assert outputs == [tools.oracle(model, p, o) for p, o in zip(prompts, outputs, strict=True)]
    assert llm.core.stats().preemptions > 0


def test_all_prompts_may_wait(llama):
    """An engine of one's own has no queue to bound: it takes a whole data set, as vLLM's LLM does."""
    llm = LLM(llama[0], **EACH, memory_budget=4 << 20, max_queue_requests=1, max_queue_tokens=1)
    generations = llm.generate([[one, 5] for one in range(100)], greedy(1))
    assert all(len(generation.completions[0].token_ids) == 1 for generation in generations)


def test_non_finite_logits_end_their_own_sequence(llama, prompts, tools):
    """A page that goes bad in mid-run ends the one sequence that reads it, and is never served from the cache."""
    folder, model = llama
    llm = LLM(folder, **EACH, memory_budget=4 << 20)
    one, two = prompts[3], prompts[5]
    turns = iter(llm._turns([llm._request(one, greedy(10)), llm._request(two, greedy(10))]))
    next(turns)
    bad = llm.core.scheduler._rows[0].pages[0]
    tools.poison(llm.core._runner, slice(None), bad, 0)
    updates = [update for turn in turns for update in turn.updates]
    ends = {update.request_id: update for update in updates if update.finish is not None}
    assert sorted(update.finish for update in ends.values()) == [FinishReason.LENGTH, FinishReason.ERROR]
    assert [update.message for update in ends.values() if update.finish is FinishReason.ERROR] == [
        "its logits are not finite"
    ]
    outputs = texts(llm, [one, two], greedy(10))
    assert outputs == [tools.oracle(model, p, o) for p, o in zip([one, two], outputs, strict=True)]


@pytest.mark.parametrize("within", ["schedule", "launch", "collect"])
def test_after_an_interrupt_it_goes_on(within, llama, prompts, tools, monkeypatch):
    """Ctrl-C comes when a call has had its effects, before anybody hears of them."""
    folder, model = llama
    llm = LLM(folder, **EACH, memory_budget=4 << 20, max_num_seqs=3)
    owner = llm.core.scheduler if within == "schedule" else llm.core._runner
    call, calls = getattr(owner, within), []

    def interrupted(*given: Any) -> Any:
        calls.append(given)
        result = call(*given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, within, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, greedy(8))
    assert not llm.core.has_work
    assert llm.core.stats().used_pages == 0
    outputs = texts(llm, prompts, greedy(8))
    assert outputs == [tools.oracle(model, p, o) for p, o in zip(prompts, outputs, strict=True)]


class Raises:
    """A logits processor that raises while a row has bias."""

    def __init__(self, *, vocab_size, device):
        pass

    def __call__(self, logits, rows):
        if any(row.params.logit_bias for row in rows):
            raise KeyError("mine")
        return logits


def test_a_raising_processor_ends_the_rows_of_its_step(llama, prompts, tools, monkeypatch, caplog):
    folder, model = llama
    monkeypatch.syspath_prepend(Path(__file__).parent)
    llm = LLM(folder, **EACH, memory_budget=4 << 20, logits_processors=("test_llm:Raises",))
    [failed] = llm.generate(prompts[3:4], greedy(4, logit_bias={1: 1.0}, n=2))
    assert [one.finish for one in failed.completions] == [FinishReason.ERROR] * 2
    assert "2 sequences end with an error" in caplog.text
    outputs = texts(llm, prompts, greedy(4))
    assert outputs == [tools.oracle(model, p, o) for p, o in zip(prompts, outputs, strict=True)]


@pytest.mark.parametrize("settings", [{"scheduler": "static"}, {"memory_budget": 8 * 16 * 46080}], ids=str)
def test_smollm2(settings, default_model, own_data):
    """The golden prompts under the static baseline, and in a pool of eight pages that has them preempt one another."""
    golden = json.loads((own_data / "smollm2_golden.json").read_text())["prompts"]
    llm = LLM(default_model, **EACH, **settings)
    outputs = texts(llm, [case["prompt_ids"] for case in golden], greedy(24))
    assert outputs == [case["output_ids"][:24] for case in golden]
    if "memory_budget" in settings:
        assert llm.core.stats().preemptions > 0
