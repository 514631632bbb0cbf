"""Root-mean-square normalisation on the GPU, with what comes just before it in the same pass. Twin: `kernels.norm`.

One program for each token. The sum of squares is taken in float32 of the residual stream as it is stored.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launching import after_previous, early


@triton.jit
def _normalised(row, weight, at, inside, eps, D: tl.constexpr):
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    return wide * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rms_norm(x, weight, out, eps, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    at = tl.arange(0, BLOCK)
    inside = at < D
    row = tl.program_id(0).to(tl.int64) * D + at
    given = tl.load(x + row, mask=inside, other=0.0)
    tl.store(out + row, _normalised(given, weight, at, inside, eps, D).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm(x, residual, weight, out, eps, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    at = tl.arange(0, BLOCK)
    inside = at < D
    row = tl.program_id(0).to(tl.int64) * D + at
    added = tl.load(residual + row, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(x + row, mask=inside, other=0.0).to(tl.float32)
    total = added.to(residual.dtype.element_ty)
    tl.store(residual + row, total, mask=inside)
    tl.store(out + row, _normalised(total, weight, at, inside, eps, D).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _embed_rms_norm(tokens, table, residual, weight, out, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < D
    embedded = tl.load(table + tl.load(tokens + token).to(tl.int64) * D + at, mask=inside, other=0.0)
    tl.store(residual + token * D + at, embedded, mask=inside)
    normalised = _normalised(embedded, weight, at, inside, eps, D)
    tl.store(out + token * D + at, normalised.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Writes x / rms(x) * weight of every row of x (T, D) into out; weight is (D,)."""
    tokens, size = x.shape
    block = triton.next_power_of_2(size)
    options = {"num_warps": _warps(size), **early(tokens, x.device)}
    _rms_norm[(tokens,)](x, weight, out, eps, D=size, BLOCK=block, **options)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Adds x to the residual stream in place, and writes the normalised sum.

    Args:
        x: (T, D), what the last block computed.
        residual: (T, D), changed.
        weight: (D,).
        out: (T, D), written.
    """
    tokens, size = x.shape
    block = triton.next_power_of_2(size)
    options = {"num_warps": _warps(size), **early(tokens, x.device)}
    _add_rms_norm[(tokens,)](x, residual, weight, out, eps, D=size, BLOCK=block, **options)


def embed_rms_norm(tokens: Tensor, table: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Looks the tokens up, which begins the residual stream, and writes them normalised.

    Args:
        tokens: (T,) int32.
        table: (V, D).
        residual, out: (T, D), written.
        weight: (D,).
    """
    count, size = residual.shape
    block = triton.next_power_of_2(size)
    _embed_rms_norm[(count,)](tokens, table, residual, weight, out, eps, D=size, BLOCK=block, num_warps=_warps(size))


def _warps(size: int) -> int:
    return 8 if size >= 2048 else 4
