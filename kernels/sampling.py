"""Choosing tokens from logits, batched: the plain-torch reference, on any device.

Every row of a batch is computed by itself, so that a row's token does not depend on the rest of the batch. From the
scores on, a distribution is a vector of integers ("weights", kept in float64) whose sum is at most 2**53: sums of them
are exact in any order, so that filters and draw agree on every device, and a token of weight 0 can never be drawn.

Knows nothing of requests, rows or the order in which the stages are applied.
Shapes: N rows, V tokens of the vocabulary, L positions.
"""

from typing import Final

import torch
from torch import Tensor

_WORD: Final = 0xFFFFFFFF
_PHILOX_ROUNDS: Final = 10
_PHILOX_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
# Most nuclei are this small; finding the heaviest few costs a tenth of sorting them all.
_FIRST_CANDIDATES: Final = 256


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10: 128 random bits that are a function of (counter, key) alone.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Args:
        counter: (N, 4) int64, each a 32-bit word.
        key: (N, 2) int64, each a 32-bit word.

    Returns:
        (N, 4) int64, each a 32-bit word.
    """
    device = counter.device
    multipliers = torch.tensor(_PHILOX_MULTIPLIERS, device=device)
    rounds = torch.arange(_PHILOX_ROUNDS, device=device)[:, None, None]
    keys = (key + rounds * torch.tensor(_PHILOX_WEYL, device=device)) & _WORD  # (rounds, N, 2)
    even, odd = counter[:, 0::2], counter[:, 1::2]
    for round_key in keys.unbind(0):
        # The product may wrap around int64: its 64 bits are right, and the mask takes off the sign of the shift.
        product = (even * multipliers).flip(-1)
        even, odd = ((product >> 32) & _WORD) ^ odd ^ round_key, product & _WORD
    return torch.stack((even, odd), dim=-1).flatten(-2)


def uniform(seed: Tensor, index: Tensor, position: Tensor) -> Tensor:
    """One random number for each row, a function of (seed, index, position) alone.

    Args:
        seed: (N,) int64, read as 64 bits without sign.
        index: (N,) int64 in [0, 2**32).
        position: (N,) int64 in [0, 2**32).

    Returns:
        (N,) float64, multiples of 2**-53 in [0, 1).
    """
    zero = torch.zeros_like(index)
    counter = torch.stack((position, index, zero, zero), dim=-1)
    key = torch.stack((seed & _WORD, (seed >> 32) & _WORD), dim=-1)
    words = philox4x32(counter, key)
    bits = ((words[:, 0] >> 5) << 26) | (words[:, 1] >> 6)
    return bits.to(torch.float64) * 2.0**-53


def penalize(
    logits: Tensor,
    token_ids: Tensor,
    prompt_length: Tensor,
    length: Tensor,
    *,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Penalties for tokens that occurred: repetition over all, presence and frequency over the generated.

    Repetition divides a positive logit by the penalty and multiplies any other by it (CTRL, arXiv:1909.05858, section
    4.1; negative logits as in transformers and vLLM). Then presence is taken off once, and frequency for every
    occurrence (OpenAI API reference).

    Args:
        logits: (N, V) float32.
        token_ids: (N, L) integers, prompt first; those before `length` in [0, V), anything from there on.
        prompt_length, length: (N,) int64, at most L.
        repetition: (N,) float32, above 0; 1 is off.
        presence, frequency: (N,) float32; 0 is off.

    Returns:
        (N, V) float32.
    """
    position = torch.arange(token_ids.shape[1], device=token_ids.device)
    known = position < length[:, None]
    generated = known & (position >= prompt_length[:, None])
    # Token 0 stands in where nothing is known: what a token gets depends on its counts alone, so that it does no harm
    # to compute and write the same token more than once.
    ids = torch.where(known, token_ids, 0).to(torch.int64)

    def count(counted: Tensor) -> Tensor:
        counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
        return counts.scatter_add_(1, ids, counted.to(torch.int32)).gather(1, ids)

    values = logits.gather(1, ids)
    factor = torch.where(count(known) > 0, repetition[:, None], 1.0)
    values = torch.where(values > 0, values / factor, values * factor)
    times = count(generated)
    values = values - frequency[:, None] * times - presence[:, None] * (times > 0)
    return logits.scatter(1, ids, values)


def scale(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """Scores: logits relative to the row's largest (so that nothing overflows) over the temperature, between -64 and 0.

    A token of score -64 weighs 0 below; smaller scores would become denormal numbers, thirty times slower on a CPU.

    Args:
        logits: (N, V) float32.
        largest: (N,) float32, the largest logit of each row.
        temperature: (N,) float32, above 0.
    """
    return (logits - largest[:, None]).div_(temperature[:, None]).clamp_(min=-64.0)


def token_weights(scores: Tensor) -> Tensor:
    """Probabilities as integers: exp(score) times the power of two that keeps every sum within 2**53, rounded.

    A token less than about V * 2**-54 times as likely as the likeliest weighs 0.

    Args:
        scores: (N, V) float32 from `scale`.

    Returns:
        (N, V) float64, integers.
    """
    bits = 53 - (scores.shape[-1] - 1).bit_length()
    weights = torch.empty(scores.shape, dtype=torch.float64, device=scores.device)
    return torch.exp(scores, out=weights).mul_(2.0**bits).round_()


def top_k_filter(weights: Tensor, scores: Tensor, top_k: Tensor, largest_k: int) -> Tensor:
    """Drops tokens whose score is below the row's k-th largest; ties with it stay (as in transformers and vLLM).

    Args:
        weights: (N, V) float64; changed in place and returned.
        scores: (N, V) float32 from `scale`.
        top_k: (N,) int64 in [1, largest_k].
        largest_k: at most V.
    """
    threshold = scores.topk(largest_k, dim=-1).values.gather(-1, top_k[:, None] - 1)
    return weights.masked_fill_(scores < threshold, 0.0)


def top_p_filter(weights: Tensor, top_p: Tensor, eligible: Tensor | None = None) -> Tensor:
    """Drops all but the smallest set of tokens whose share of the mass reaches top_p; of ties the lowest ids stay.

    Source: nucleus sampling, arXiv:1904.09751.

    Args:
        weights: (N, V) float64, integers; changed in place and returned.
        top_p: (N,) float64 in [0, 1]; one token stays in any case.
        eligible: (N, V) bool, what `min_p_filter` will keep: scores that it parts may have one weight, and where that
            is the lightest of the nucleus, it must be left some of them. None: all.
    """
    vocab_size = weights.shape[-1]
    mass = top_p[:, None] * weights.sum(-1, keepdim=True)
    size = min(_FIRST_CANDIDATES, vocab_size)
    edge, room = _nucleus(weights, mass, size)
    while size < vocab_size and bool((short := edge == 0).any()):
        size = min(8 * size, vocab_size)
        rows = short.nonzero()[:, 0]
        edge[rows], room[rows] = _nucleus(weights[rows], mass[rows], size)
    crowded = (room < vocab_size).nonzero()[:, 0]
    if len(crowded):
        tied = weights[crowded] == edge[crowded]
        if eligible is not None:
            tied &= eligible[crowded]
        weights[crowded] *= ~(tied & (tied.cumsum(-1) > room[crowded]))
    return weights.masked_fill_(weights < edge, 0.0)


def _nucleus(weights: Tensor, mass: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The nucleus, looked for among the `size` heaviest tokens.

    Returns:
        (N, 1) float64, the lightest weight in it, 0 if it needs more tokens than these; and (N, 1) int64, how many
        tokens of just that weight belong to it, V if all do.
    """
    values = weights.topk(size, dim=-1).values
    reached = values.cumsum(-1)
    count = (reached - values < mass).sum(-1, keepdim=True).clamp_(min=1)
    edge = values.gather(-1, count - 1)
    room = count - (values > edge).sum(-1, keepdim=True)
    # All tokens of the edge's weight are in sight if a lighter one is.
    all_fit = ((values == edge).sum(-1, keepdim=True) == room) & (values[:, -1:] < edge)
    short = reached[:, -1:] < mass
    return edge.masked_fill_(short, 0.0), room.masked_fill_(all_fit, weights.shape[-1])


def min_p_filter(weights: Tensor, scores: Tensor, min_p: Tensor) -> Tensor:
    """Drops tokens less than min_p times as likely as the likeliest; ties with the bound stay.

    Source: arXiv:2407.01082.

    Args:
        weights: (N, V) float64; changed in place and returned.
        scores: (N, V) float32 from `scale`.
        min_p: (N,) float32 in [0, 1].
    """
    return weights.masked_fill_(scores < min_p_bound(min_p), 0.0)


def min_p_bound(min_p: Tensor) -> Tensor:
    """The least score (N, 1), from `scale`, that min_p (N,) keeps: the likeliest token's is 0."""
    return min_p.log()[:, None]


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One token for each row with probability weight / sum: the distribution function, in token-id order, inverted.

    Args:
        weights: (N, V) float64, integers, not all 0; overwritten.
        uniforms: (N,) float64 in [0, 1].

    Returns:
        (N,) int64, always a token of weight above 0.
    """
    reached = weights.cumsum_(-1)
    total = reached[:, -1:]
    target = torch.minimum((uniforms[:, None] * total).floor_(), total - 1)
    return torch.searchsorted(reached, target, right=True).squeeze(-1)
