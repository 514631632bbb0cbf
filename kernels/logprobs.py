"""Log-probabilities of tokens, from logits or from the hidden states before them. Knows no rows and no steps."""

from collections.abc import Callable

import torch
from torch import Tensor

# Positions whose logits are held at once: as many floats for each as the vocabulary has tokens.
SLICE = 128


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """The log-softmax of logits at given tokens, and where it is largest.

    Args:
        logits: (N, V) float32; not changed.
        tokens: (N,) integers.
        top: how many of the likeliest tokens, at most V.

    Returns:
        (N, 1 + 2 top) int32, the record of `engine.logprobs`: the bits of the token's own logprob as a float32; then
        the likeliest tokens, likeliest first, each with its id and the bits of its logprob.
    """
    total = logits.logsumexp(-1, keepdim=True)
    records = torch.empty(len(logits), 1 + 2 * top, dtype=torch.int32, device=logits.device)
    values = records.view(torch.float32)
    values[:, :1] = logits.gather(-1, tokens[:, None].long()) - total
    if top:
        largest, ids = logits.topk(top, dim=-1)
        records[:, 1::2] = ids
        values[:, 2::2] = largest - total
    return records


def hidden_logprobs(hidden: Tensor, tokens: Tensor, top: int, to_logits: Callable[[Tensor], Tensor]) -> Tensor:
    """As `token_logprobs`, of hidden states (N, D): `to_logits` makes (n, V) float32 of them, a slice at a time."""
    slices = zip(torch.split(hidden, SLICE), torch.split(tokens, SLICE), strict=True)
    return torch.cat([token_logprobs(to_logits(part), some, top) for part, some in slices])
