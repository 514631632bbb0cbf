"""The gate of a SwiGLU block on the GPU. Twin: `kernels.activation`, whose roundings it repeats."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _silu_mul(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(gate_up + token * 2 * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    gated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * SIZE + at, (gated * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Writes silu(gate) * up into out (T, I), from the (T, 2I) output of the fused projection, gate first."""
    tokens, size = out.shape
    _silu_mul[(tokens, triton.cdiv(size, _BLOCK))](gate_up, out, SIZE=size, BLOCK=_BLOCK, num_warps=4)
