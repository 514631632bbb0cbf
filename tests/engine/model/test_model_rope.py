"""Rotary embeddings against transformers' own, far beyond 4k positions."""

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.model.config import ModelConfig
from engine.model.rope import inverse_frequencies
from kernels.rope import rope_angles, rotate

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotation_equals_transformers(kind, head_dim):
    """At positions up to 131,071, float32 results agree to the rounding of the sines' arguments."""
    theirs = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=dict(ROPES[kind]),
        architectures=["LlamaForCausalLM"],
    )
    ours = ModelConfig.from_hf(theirs.to_dict())
    positions = torch.tensor([0, 1, 4095, 4096, 4097, 8191, 32767, 32768, 131071])
    torch.manual_seed(0)
    x = torch.randn(len(positions), 3, head_dim)
    cos, sin = LlamaRotaryEmbedding(theirs)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    angles = rope_angles(positions, inverse_frequencies(ours.rope, head_dim), ours.rope.attention_factor)
    torch.testing.assert_close(rotate(x, *angles), expected[0].transpose(0, 1), rtol=0, atol=1e-2 / 100)


def test_bfloat16_is_rotated_in_float32():
    """With bfloat16 angles position 32,767 would be off by whole turns; here only the result is rounded."""
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, 64, 2).double() / 64)
    positions = torch.tensor([4097, 32767])
    x = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    angles = positions.double()[:, None, None] * inv_freq
    first, second = x.double().chunk(2, -1)
    expected = torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
    )
    actual = rotate(x, *rope_angles(positions, inv_freq.float(), 1.0))
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=0.01)


def test_long_context_equals_transformers(tmp_path, tools):
    """Greedy tokens at positions beyond 4k."""
    folder, model = tools.make_model(
        tmp_path / "long", "llama", max_position_embeddings=8192, num_hidden_layers=1, hidden_size=32
    )
    prompt = [(11 * i * i + 3 * i) % 160 for i in range(4200)]
    runner = tools.make_runner(folder, memory_budget=16 << 20)
    output = tools.Driver(runner).generate([prompt], 6, chunk=1000)[0]
    model.set_attn_implementation("sdpa")
    assert output == tools.oracle(model, prompt, output)
