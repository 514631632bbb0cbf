"""The torch path on a GPU: the same tokens, and logits that agree; skipped where there is none."""

import gc

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def clean_device() -> None:
    """What earlier tests held of the device counts against the budget of this process: it is given back first."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 20}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 128, "num_key_value_heads": 1}),
    ],
)
def test_equals_transformers(family, config, model_at, prompts, tools, budget):
    """Float32 on the GPU against transformers on the CPU, in mixed chunked steps, with NaN in every stale page."""
    folder, model = model_at(family, **config)
    runner = tools.make_runner(folder, device="cuda", memory_budget=budget)
    runner.warm_up()
    tools.poison(runner)
    outputs = tools.Driver(runner).generate(prompts, 24, chunk=40, stagger=2)
    assert outputs == [tools.oracle(model, p, o) for p, o in zip(prompts, outputs, strict=True)]


def test_launch_ahead(llama, tools, budget):
    """Steps launched before the ones before them are collected."""
    folder, model = llama
    runner = tools.make_runner(folder, device="cuda", memory_budget=budget)
    output = tools.Driver(runner).generate_ahead([1, 2, 3], 12)
    assert output == tools.oracle(model, [1, 2, 3], output)


def test_budget_covers_all(model_at, tools):
    """In bfloat16, weights, activations of the largest step and the pool stay within the budget."""
    folder, _ = model_at("llama", hidden_size=1024, intermediate_size=2048)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    budget = before + (1 << 30)
    runner = tools.make_runner(folder, device="cuda", dtype="auto", memory_budget=budget, max_num_batched_tokens=2048)
    assert runner.dtype == torch.bfloat16
    prompts = [[1 + row] * 120 for row in range(16)]
    tools.Driver(runner).generate(prompts, 4)
    assert 0.9 * budget < torch.cuda.max_memory_allocated() <= budget
