"""The gate of a SwiGLU block (arXiv:2002.05202)."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, (T, I), from the (T, 2I) output of the fused projection, gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
