"""Logprobs from the engine equal transformers' log-softmax of the raw logits, however they are computed."""

import msgspec
import pytest
import torch

from engine import LLM, SamplingParams
from engine.build import new_scheduler
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import load_model
from engine.gpu.runner import GpuRunner
from engine.logprobs import TokenLogprob

TOP = 5
EACH = {"dtype": "float32", "device": "cpu", "threads": 1, "progress": False, "memory_budget": 4 << 20}
# None of it changes the raw distribution.
BENT = {
    "temperature": 1.5,
    "seed": 3,
    "top_k": 9,
    "repetition_penalty": 1.8,
    "logit_bias": {5: 9.0},
    "ignore_eos": True,
}


def check(found: list[TokenLogprob], model, tokens: list[int], first: int) -> None:
    """`found` are those of tokens[first:], within 1e-3; the likeliest in order, and the token itself if it is one."""
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
    assert len(found) == len(tokens) - first
    for at, (own, top) in enumerate(found, first):
        row = expected[at - 1]
        assert own == pytest.approx(row[tokens[at]].item(), abs=1e-3)
        values = [value for _, value in top]
        assert values == pytest.approx(row.topk(TOP).values.tolist(), abs=1e-3)
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx([row[token].item() for token, _ in top], abs=1e-3)
        assert len({token for token, _ in top}) == TOP
        assert own < values[-1] or (tokens[at], own) in top


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scheduler": "static"},
        {"speculative": "ngram"},
        {"max_num_seqs": 3, "max_num_batched_tokens": 7, "page_size": 4},
        {"max_num_seqs": 8, "memory_budget": 2 * 3 * 2 * 16 * 4 * 16 * 12},  # 12 pages: they preempt one another
    ],
    ids=str,
)
def test_equal_transformers_cold_and_warm(settings, llama, prompts):
    """Of the raw distribution; a warm cache gives what a cold one did."""
    folder, model = llama
    llm = LLM(folder, **EACH | settings)
    params = SamplingParams(**BENT, max_tokens=12, n=2, top_logprobs=TOP, prompt_logprobs=TOP)
    generations = llm.generate(prompts, params)
    again = llm.generate(prompts, params)
    for one, two in zip(generations, again, strict=True):
        check(one.prompt_logprobs, model, list(one.prompt), 1)
        assert two.cached_tokens == 0
        for each, other in zip(one.completions, two.completions, strict=True):
            check(each.logprobs, model, [*one.prompt, *each.token_ids], len(one.prompt))
            assert other.token_ids == each.token_ids
        flat = [
            [value for own, top in each.prompt_logprobs for value in (own, *dict(top).values())] for each in (one, two)
        ]
        assert flat[0] == pytest.approx(flat[1], abs=1e-4)
    stats = llm.core.stats()
    assert (stats.preemptions > 0) == ("memory_budget" in settings)
    assert (stats.accepted_tokens > 0) == ("speculative" in settings)


def test_only_what_was_asked_for(llama, prompts):
    """Requests with and without them, and with other widths, share their steps; the tokens are the same."""
    llm = LLM(llama[0], **EACH)
    params = [SamplingParams(**BENT, max_tokens=6, top_logprobs=top) for top in (None, 0, 2, None, 160)]
    results = [each.completions[0] for each in llm.generate([prompts[4]] * 5, params)]
    assert [[len(top) for _, top in each.logprobs] for each in results] == [[], [0] * 6, [2] * 6, [], [160] * 6]
    assert [own for own, _ in results[1].logprobs] == pytest.approx([own for own, _ in results[4].logprobs], abs=1e-5)
    assert all(each.token_ids == results[0].token_ids for each in results)
    streamed = list(llm.stream(prompts[4], params[2]))
    assert [len(each.logprobs) for each in streamed] == [1] * 6


def test_the_cuda_runner(model_at, prompts, budget):
    """Its kernels interpreted where there is no such device: chunks of prompts mixed with decodes, one step ahead, and
    seen through windows."""
    folder, model = model_at("mistral", num_hidden_layers=2, sliding_window=6)
    llm = LLM(folder, **EACH)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 20, "memory_budget": budget}
    config = EngineConfig(model=folder, dtype="float32", device=device, threads=1, **settings)
    runner = GpuRunner(config, load_model(config, progress=False))
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 20, "num_pages": runner.num_pages}
    llm.core = EngineCore(new_scheduler(config, msgspec.structs.replace(llm.info, **limits)), runner, overlap=1)
    params = SamplingParams(**BENT, max_tokens=2, n=2, top_logprobs=TOP, prompt_logprobs=TOP)
    for one in llm.generate([prompts[0], prompts[6]], params):
        check(one.prompt_logprobs, model, list(one.prompt), 1)
        for each in one.completions:
            check(each.logprobs, model, [*one.prompt, *each.token_ids], len(one.prompt))
