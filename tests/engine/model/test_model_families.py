"""Token-for-token equality with transformers (float32, greedy, 64 tokens, EOS ignored): all families and variations."""

import json

import pytest
import torch

from engine.model.config import ModelConfig

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIATIONS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama without grouping": ("llama", {"num_key_value_heads": 4}),
    "llama multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama explicit head_dim": ("llama", {"head_dim": 32}),
    "llama sharded": ("llama", {"shard": "40KB"}),
    "llama rope theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "llama yarn attention_factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "llama yarn ramp": ("llama", {"rope_parameters": {**YARN, "beta_fast": 8, "beta_slow": 2, "truncate": False}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral sliding window": ("mistral", {"sliding_window": 20, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 sliding window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 tied bias": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 sliding window": (
        "qwen3",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": 33, "max_window_layers": 2},
    ),
}


@pytest.mark.parametrize("variation", VARIATIONS)
def test_equals_transformers(variation, model_at, prompts, tools):
    """Tied and sharded weights, rope scalings, biases, q/k norm, head_dim, in mixed chunked steps."""
    family, config = VARIATIONS[variation]
    folder, model = model_at(family, **config)
    outputs = tools.Driver(tools.make_runner(folder)).generate(prompts, 64, chunk=40, stagger=2)
    assert len({token for output in outputs for token in output}) > 20  # no degenerate model
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == tools.oracle(model, prompt, output)


@pytest.mark.parametrize("variation", ["llama linear", "llama llama3", "llama yarn mscale", "qwen2"])
def test_old_spelling_of_rope(variation, model_at):
    """`rope_theta` beside `rope_scaling` means what transformers 5 writes as `rope_parameters`."""
    family, settings = VARIATIONS[variation]
    folder, _ = model_at(family, **settings)
    new = json.loads((folder / "config.json").read_text())
    old = dict(new)
    scaling = dict(old.pop("rope_parameters"))
    old["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    old["rope_scaling"] = scaling if scaling["type"] != "default" else None
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)


def test_bfloat16_checkpoint_runs_in_float32(model_at, prompts, tools):
    """A checkpoint of another dtype is cast."""
    folder, model = model_at("llama", dtype=torch.bfloat16)
    outputs = tools.Driver(tools.make_runner(folder)).generate(prompts[:4], 16)
    model = model.float()
    assert outputs == [tools.oracle(model, p, o) for p, o in zip(prompts, outputs, strict=False)]


def test_bfloat16_logits_are_near_float32(model_at, tools):
    """bfloat16 keeps 8 bits of mantissa: logits differ by a few parts in a hundred of their spread."""
    folder, model = model_at("qwen2")
    runner = tools.make_runner(folder, dtype="bfloat16")
    prompt = [(7 * i) % 160 for i in range(100)]
    captured = []
    sample = runner._sampler.sample

    def spy(logits, *args):
        captured.append(logits)
        return sample(logits, *args)

    runner._sampler.sample = spy
    tools.Driver(runner).generate([prompt], 1)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    assert captured[0].dtype == torch.float32
    difference = (captured[0][0] - expected).abs()
    assert difference.max() < 0.15 * expected.std()
