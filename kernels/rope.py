"""Rotary position embeddings (arXiv:2104.09864), and the write of new K and V into their pages.

Halves of a head are rotated against each other (element i with i + head_dim / 2), as Hugging Face checkpoints have it.
"""

import torch
from torch import Tensor


def rope_angles(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines for a step, computed once and used by every layer; float32 whatever the model's dtype is.

    Args:
        positions: (T,) integers.
        inv_freq: (head_dim / 2,) float32, radians a token.
        scale: a factor on both (yarn's attention factor).

    Returns:
        cos (T, 1, head_dim), and sin with its first half negated, so that rotation is x * cos + swap_halves(x) * sin.
    """
    angles = positions.float()[:, None] * inv_freq  # (T, head_dim / 2)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the heads x (T, heads, head_dim) by the angles of `rope_angles`; computed in float32, in x's dtype."""
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin).to(x.dtype)


def write_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Writes the K and V of T tokens into their slots.

    Args:
        k, v: (T, kv_heads, head_dim).
        kv_cache: (pages, page_size, 2, kv_heads, head_dim) of one layer, contiguous, changed.
        slots: (T,) int64, page * page_size + offset; all different, but for padding, which goes to a page of its own.
    """
    kv_cache.flatten(0, 1).index_copy_(0, slots, torch.stack((k, v), 1))
