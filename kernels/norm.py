"""Root-mean-square normalisation (arXiv:1910.07467). Knows nothing of the model around it."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight over the last dimension, in x's dtype; the mean is taken in float32.

    Args:
        x: (..., D).
        weight: (D,).
    """
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to the residual stream in place, and returns the normalised sum.

    Args:
        x: (T, D), what the last block computed.
        residual: (T, D), changed.
        weight: (D,).
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps)
