"""Frequencies of the rotary position embeddings, and how each way of stretching a context changes them."""

import math

import torch
from torch import Tensor

from engine.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Returns (head_dim / 2,) float32, radians a token: theta ** (-2i / head_dim), stretched as `rope` says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case "linear":
            frequencies = frequencies / rope.factor
        case "llama3":
            frequencies = _llama3(frequencies, rope)
        case "yarn":
            frequencies = _yarn(frequencies, rope, head_dim)
    return frequencies / torch.tensor(rope.divisors) if rope.divisors else frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
    rotations = rope.original_max_len * frequencies / (2 * math.pi)
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blend(frequencies, rope.factor, kept.clamp(0, 1))


def _yarn(frequencies: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """arXiv:2309.00071, section 3.2: a ramp over the dimensions between beta_fast and beta_slow rotations."""

    def dimension(rotations: float) -> float:
        length = rope.original_max_len / (rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # A ramp without width would divide by zero.
    ramp = (torch.arange(head_dim // 2) - low) / (high - low if high != low else 0.001)
    return _blend(frequencies, rope.factor, 1 - ramp.clamp(0, 1))


def _blend(frequencies: Tensor, factor: float, kept: Tensor) -> Tensor:
    return frequencies * kept + frequencies / factor * (1 - kept)
