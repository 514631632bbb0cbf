"""Choosing tokens from logits on the GPU without sorting them. Twin: `kernels.sampling`.

A row's distribution is a vector of whole numbers ("weights"), as the twin has it: their sums are exact in any order,
so that a token depends on its row alone, never on the batch, on padding or on how the vocabulary is split. The weights
come from a float32 exponential, up to a millionth off the twin's: of a vocabulary of 152,064 up to about one uniform in
a thousand draws another token than there.
Where tokens of different scores round to the weight of top_p's edge and min_p parts them, only those that min_p keeps
compete for the room there (as of the twin that knows which are `eligible`).

The work on a row is split over the vocabulary, into kernels that follow each other (and need no counters that a failed
step could leave wrong):

    maxima   largest logit and its lowest id, in each split
    ladder   how many tokens, and what mass, lie above a few bounds   } twice or thrice, only for rows with top_k or
    narrow   the two bounds that the filter's edge lies between       } top_p, until few tokens lie between them
    gather   the scores of those tokens, side by side
    select   the exact edge: the k-th largest score; the lightest weight of the nucleus
    weigh    mass of what every filter keeps, in each split
    pick     the split that the target lies in, and the token in it

It knows nothing of penalties, of requests or of the model. Shapes: N rows of a step (with padding), V tokens.
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

# Below this a temperature is greedy: dividing by it would only overflow.
_LEAST_TEMPERATURE = tl.constexpr(1e-5)
# Smaller scores weigh nothing.
_LEAST_SCORE = tl.constexpr(-64.0)
# From here on every float32 is a whole number.
_WHOLE = tl.constexpr(8388608.0)


class SamplingConfig(NamedTuple):
    """What is tuned on a device; no token depends on it.

    Args:
        block: tokens that a program works on at a time, where it has one sum to keep; a power of two.
        ladder_block: the same where it keeps one for each bound.
        bounds: of a ladder; a power of two.
        rounds: ladders at most.
        capacity: scores that are gathered from a row; one with more between its bounds is searched as a whole.
        splits: of the vocabulary, a power of two; None chooses by the size of the batch.
    """

    block: int = 2048
    ladder_block: int = 512
    bounds: int = 8
    rounds: int = 3
    capacity: int = 16384
    splits: int | None = None

    def splits_of(self, count: int, vocab_size: int) -> int:
        """How many parts each of `count` rows is cut into: two choices only, as each compiles the kernels anew."""
        useful = triton.next_power_of_2(triton.cdiv(vocab_size, _LEAST_SPLIT))
        return self.splits or min(_MOST_SPLITS if count <= 32 else _LEAST_SPLITS, useful)


_MOST_SPLITS = 128
# Enough that the scan of a single split in the end is short.
_LEAST_SPLITS = 16
# Tokens; shorter ones would be more launches than work.
_LEAST_SPLIT = 256
_CONFIG = SamplingConfig()


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """Room for what the kernels tell each other. Allocated once; no content outlives a call, but zeros must stay zeros.

    Args:
        config: what the kernels were tuned to.
        tops, winners: (N, splits) float32, int32: largest logit (+inf for a NaN) and its lowest id.
        masses, ties: (N, splits) int64, int32: mass of what is kept, and how many tokens weigh just what the edge does.
        ladder_scores, ladder_keys: (N, bounds) float32, the bounds, as scores and as what is compared with them.
        ladder_masses, ladder_counts: (N, bounds) int64, int32: what lies above each bound; zeros between calls.
        between: (N, 3) float32: keys of the lower and the upper bound, score of the upper.
        sums: (N, 4) int64: what the filter needs, mass and count above the upper bound, count to gather.
        cursors: (N,) int32, scores gathered; zeros between calls.
        gathered: (N, capacity) float32.
        edges: (N, 2) float32: score and weight that are just kept.
        rooms: (N,) int64: how many tokens of just that weight are kept.
    """

    config: SamplingConfig
    tops: Tensor
    winners: Tensor
    masses: Tensor
    ties: Tensor
    ladder_scores: Tensor
    ladder_keys: Tensor
    ladder_masses: Tensor
    ladder_counts: Tensor
    between: Tensor
    sums: Tensor
    cursors: Tensor
    gathered: Tensor
    edges: Tensor
    rooms: Tensor

    @classmethod
    def allocate(cls, max_count: int, device: torch.device | str, config: SamplingConfig = _CONFIG) -> Self:
        """For steps of up to `max_count` rows; 66 KB a row."""

        def zeros(width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_count, width, dtype=dtype, device=device)

        splits = config.splits or _MOST_SPLITS
        return cls(
            config,
            tops=zeros(splits, torch.float32),
            winners=zeros(splits, torch.int32),
            masses=zeros(splits, torch.int64),
            ties=zeros(splits, torch.int32),
            ladder_scores=zeros(config.bounds, torch.float32),
            ladder_keys=zeros(config.bounds, torch.float32),
            ladder_masses=zeros(config.bounds, torch.int64),
            ladder_counts=zeros(config.bounds, torch.int32),
            between=zeros(3, torch.float32),
            sums=zeros(4, torch.int64),
            cursors=zeros(1, torch.int32),
            gathered=zeros(config.capacity, torch.float32),
            edges=zeros(2, torch.float32),
            rooms=zeros(1, torch.int64),
        )


def pack_params(
    *, temperature: float, top_p: float, min_p: float, top_k: int, seed: int, index: int
) -> tuple[int, int, int, int, int, int, int, int]:
    """A row of the parameter table: eight 32-bit integers.

    Args:
        temperature: below 1e-5 is greedy.
        top_p: in [0, 1]; 1 is off.
        min_p: in [0, 1]; 0 is off.
        top_k: 0, or less, or V and more is off.
        seed: any integer; its lowest 64 bits count.
        index: in [0, 2**32): which of several continuations.
    """
    # Decided before the rounding to float32, which makes 1e-5 out of a little less, so that the host decides the same.
    temperature = temperature if temperature >= _LEAST_TEMPERATURE.value else 0.0
    floats = struct.unpack("<3i", struct.pack("<3f", temperature, top_p, min_p))
    low, high, which = struct.unpack("<3i", struct.pack("<QI", seed % 2**64, index))
    return (*floats, max(-1, min(top_k, 2**31 - 1)), low, high, which, 0)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 (Salmon et al., SC 2011) of uint32 counters and keys."""
    for _ in tl.static_range(10):
        even = c0.to(tl.uint64) * 0xD2511F53
        odd = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (odd >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (even >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = odd.to(tl.uint32), even.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _uniform(mine, length):
    """The row's random number at this length, as the twin's `uniform` makes it: float64 in [0, 1)."""
    index = tl.load(mine + 6).to(tl.uint32, bitcast=True)
    seed_low, seed_high = tl.load(mine + 4), tl.load(mine + 5)
    zero = tl.full((), 0, tl.uint32)
    first, second, _, _ = _philox(
        length.to(tl.uint32, bitcast=True), index, zero, zero,
        seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True),
    )  # fmt: skip
    bits = ((first >> 5).to(tl.int64) << 26) | (second >> 6).to(tl.int64)
    return bits.to(tl.float64) * (2.0**-53)


@triton.jit
def _open_row(rows, table, params_stride, tops, n, SPLITS: tl.constexpr):
    """Where the row's parameters are, its temperature, its largest logit, and whether its token is drawn."""
    row = tl.load(rows + n)
    mine = table + tl.maximum(row, 0).to(tl.int64) * params_stride
    temperature = tl.load(mine).to(tl.float32, bitcast=True)
    top = tl.max(tl.load(tops + n * SPLITS + tl.arange(0, SPLITS)), 0)
    drawn = (row >= 0) & (temperature >= _LEAST_TEMPERATURE) & (tl.abs(top) < float("inf"))
    return mine, temperature, top, drawn


@triton.jit
def _filters(mine, V: tl.constexpr):
    """top_k and top_p, and whether each is on."""
    top_k, top_p = tl.load(mine + 3), tl.load(mine + 1).to(tl.float32, bitcast=True)
    return top_k, top_p, (top_k > 0) & (top_k < V), top_p < 1.0


@triton.jit
def _scores(logits, token, inside, top, temperature):
    """Scores as the twin's `scale` makes them; -inf outside."""
    score = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32) - top
    if temperature != 1.0:
        # Masked logits take the slow way of a division unless they are made finite; what is below -64 is -64 anyway.
        score = tl.div_rn(tl.maximum(score, -65.0 * temperature), temperature)
    return tl.where(inside, tl.maximum(score, _LEAST_SCORE), float("-inf"))


@triton.jit
def _weights(scores, SCALE: tl.constexpr):
    """Weights as the twin's `token_weights` makes them, as float32: whole numbers, rounded half to even."""
    weights = tl.exp(scores) * SCALE
    return tl.where(weights < _WHOLE, (weights + _WHOLE) - _WHOLE, weights)


@triton.jit
def _keys(scores, counted, SCALE: tl.constexpr):
    """What bounds are compared with: scores where tokens are counted (top_k), else weights; no bound weighs nothing."""
    return tl.where(counted, scores, tl.maximum(_weights(scores, SCALE), 1.0))


@triton.jit
def _first_bounds(BOUNDS: tl.constexpr):
    """Scores: narrow where tokens are likely, and the last is the least there is."""
    step = (tl.arange(0, BOUNDS) + 1).to(tl.float32)
    return tl.where(step < BOUNDS, -0.25 * step * step, _LEAST_SCORE)


@triton.jit
def _least_mass(top_p, total):
    """The least mass that is top_p of the total or more; one token stays in any case."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _maxima(
    logits, rows, tops, winners, stride, V: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(rows + n) < 0:
        return
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    winner = tl.full((BLOCK,), V, tl.int32)
    end = tl.minimum(split * CHUNK + CHUNK, V)
    for start in range(split * CHUNK, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + n * stride + token, mask=token < end, other=float("-inf")).to(tl.float32)
        logit = tl.where(logit == logit, logit, float("inf"))  # a NaN fails the row as +inf does
        winner = tl.where(logit > best, token, winner)
        best = tl.maximum(best, logit)
    top = tl.max(best, 0)
    tl.store(tops + n * SPLITS + split, top)
    tl.store(winners + n * SPLITS + split, tl.min(tl.where(best == top, winner, V), 0))


@triton.jit
def _ladder(
    logits, rows, table, tops, ladder_keys, ladder_masses, ladder_counts, sums, stride, params_stride,
    FIRST: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    BOUNDS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mine, temperature, top, drawn = _open_row(rows, table, params_stride, tops, n, SPLITS)
    _, _, counted, nuclear = _filters(mine, V)
    needed = drawn & (counted | nuclear)
    if not FIRST:
        needed = needed & (tl.load(sums + n * 4 + 3) > CAPACITY)
    if not needed:
        return
    at = n * BOUNDS + tl.arange(0, BOUNDS)
    bounds = _keys(_first_bounds(BOUNDS), counted, SCALE) if FIRST else tl.load(ladder_keys + at)
    masses = tl.zeros((BOUNDS, BLOCK), tl.int64)
    counts = tl.zeros((BOUNDS, BLOCK), tl.int32)
    end = tl.minimum(split * CHUNK + CHUNK, V)
    for start in range(split * CHUNK, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        # Two dimensions from here on: one change of layout, and no weight computed twice.
        scores = _scores(logits + n * stride, token, token < end, top, temperature)[None, :]
        weights = _weights(scores, SCALE)
        above = tl.where(counted, scores, weights) >= bounds[:, None]
        masses += tl.where(above, weights.to(tl.int64), 0)
        counts += above.to(tl.int32)
    tl.atomic_add(ladder_masses + at, tl.sum(masses, 1), sem="relaxed")
    tl.atomic_add(ladder_counts + at, tl.sum(counts, 1), sem="relaxed")


@triton.jit
def _narrow(
    rows, table, tops, ladder_scores, ladder_keys, ladder_masses, ladder_counts, between, sums, params_stride,
    FIRST: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, SPLITS: tl.constexpr, BOUNDS: tl.constexpr,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    mine, _, _, drawn = _open_row(rows, table, params_stride, tops, n, SPLITS)
    top_k, top_p, counted, nuclear = _filters(mine, V)
    between += n * 3
    sums += n * 4
    needed = drawn & (counted | nuclear)
    if not FIRST:
        needed = needed & (tl.load(sums + 3) > CAPACITY)
    if not needed:
        return
    step = tl.arange(0, BOUNDS) + 1
    at = n * BOUNDS + tl.arange(0, BOUNDS)
    masses, counts = tl.load(ladder_masses + at), tl.load(ladder_counts + at).to(tl.int64)
    if FIRST:
        scores = _first_bounds(BOUNDS)
        keys = _keys(scores, counted, SCALE)
        need = tl.where(counted, top_k.to(tl.int64), _least_mass(top_p, tl.max(masses, 0)))
        high, high_score = tl.full((), float("inf"), tl.float32), tl.full((), 0.0, tl.float32)
        mass_above, count_above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    else:
        scores, keys = tl.load(ladder_scores + at), tl.load(ladder_keys + at)
        high, high_score = tl.load(between + 1), tl.load(between + 2)
        need, mass_above, count_above = tl.load(sums), tl.load(sums + 1), tl.load(sums + 2)
    reached = tl.where(counted, counts, masses) >= need
    low = tl.max(tl.where(reached, keys, float("-inf")), 0)
    low_score = tl.max(tl.where(reached, scores, float("-inf")), 0)
    high = tl.min(tl.where(reached, high, keys), 0)
    high_score = tl.min(tl.where(reached, high_score, scores), 0)
    mass_above = tl.max(tl.where(reached, mass_above, masses), 0)
    count_above = tl.max(tl.where(reached, count_above, counts), 0)
    size = tl.min(tl.where(reached, counts, V), 0)
    if not counted:  # top_p may follow top_k, and then needs all that top_k keeps
        size -= count_above
    tl.store(between, low)
    tl.store(between + 1, high)
    tl.store(between + 2, high_score)
    tl.store(sums, need)
    tl.store(sums + 1, mass_above)
    tl.store(sums + 2, count_above)
    tl.store(sums + 3, size)
    scores = tl.where(step < BOUNDS, high_score + (low_score - high_score) * (step.to(tl.float32) / BOUNDS), low_score)
    tl.store(ladder_scores + at, scores)
    tl.store(ladder_keys + at, tl.where(step < BOUNDS, _keys(scores, counted, SCALE), low))
    tl.store(ladder_masses + at, tl.zeros((BOUNDS,), tl.int64))
    tl.store(ladder_counts + at, tl.zeros((BOUNDS,), tl.int32))


@triton.jit
def _gather(
    logits, rows, table, tops, between, sums, cursors, gathered, stride, params_stride,
    V: tl.constexpr, SCALE: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mine, temperature, top, drawn = _open_row(rows, table, params_stride, tops, n, SPLITS)
    _, _, counted, nuclear = _filters(mine, V)
    needed = drawn & (counted | nuclear) & (tl.load(sums + n * 4 + 3) <= CAPACITY)
    if not needed:
        return
    low, high = tl.load(between + n * 3), tl.load(between + n * 3 + 1)
    high = tl.where(counted, float("inf"), high)
    end = tl.minimum(split * CHUNK + CHUNK, V)
    for start in range(split * CHUNK, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        scores = _scores(logits + n * stride, token, token < end, top, temperature)
        keys = tl.where(counted, scores, _weights(scores, SCALE))
        chosen = (keys >= low) & (keys < high)
        count = tl.sum(chosen.to(tl.int32), 0)
        if count > 0:
            # In any order: all that is computed from them is sums of whole numbers.
            slot = tl.atomic_add(cursors + n, count, sem="relaxed") + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(gathered + n * CAPACITY + slot, scores, mask=chosen & (slot < CAPACITY))


@triton.jit
def _tally(
    logits, gathered, whole, size, top, temperature, floor, bounds,
    BY_MASS: tl.constexpr, SCALE: tl.constexpr, BOUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What lies above each bound: the mass of the tokens of that weight whose score is not below the floor, or the
    number of tokens of that score; of the gathered scores, or of the whole row."""
    sums = tl.zeros((BOUNDS, BLOCK), tl.int64)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        if whole:
            scores = _scores(logits, at, at < size, top, temperature)
        else:
            scores = tl.load(gathered + at, mask=at < size, other=float("-inf"))
        scores = scores[None, :]
        if BY_MASS:
            weights = tl.where(scores >= floor, _weights(scores, SCALE), 0.0)
            sums += tl.where(weights >= bounds[:, None], weights.to(tl.int64), 0)
        else:
            sums += (scores >= bounds[:, None]).to(tl.int64)
    return tl.sum(sums, 1)


@triton.jit
def _search(
    logits, gathered, whole, size, top, temperature, floor, need, low, high,
    BY_MASS: tl.constexpr, SCALE: tl.constexpr, SCALE_BITS: tl.constexpr, BOUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest bound above which `need` lies, among all float32 from `low` down to `high`, which surely has it.

    The codes of weights and of scores grow as what they stand for gets smaller. BOUNDS of them are tried at a time.
    """
    if BY_MASS:
        low, high = SCALE_BITS - low.to(tl.int32, bitcast=True), SCALE_BITS - high.to(tl.int32, bitcast=True)
    else:
        low, high = tl.abs(low).to(tl.int32, bitcast=True), tl.abs(high).to(tl.int32, bitcast=True)
    while low < high:
        step = (high - low + BOUNDS) // (BOUNDS + 1)
        code = tl.minimum(low + (tl.arange(0, BOUNDS) + 1) * step - 1, high - 1)
        bounds = (SCALE_BITS - code).to(tl.float32, bitcast=True) if BY_MASS else -code.to(tl.float32, bitcast=True)
        sums = _tally(
            logits, gathered, whole, size, top, temperature, floor, bounds, BY_MASS, SCALE, BOUNDS, BLOCK
        )  # fmt: skip
        reached = sums >= need
        low = tl.max(tl.where(reached, low, code + 1), 0)
        high = tl.min(tl.where(reached, code, high), 0)
    return (SCALE_BITS - low).to(tl.float32, bitcast=True) if BY_MASS else -low.to(tl.float32, bitcast=True)


@triton.jit
def _select(
    logits, rows, table, tops, between, sums, cursors, gathered, edges, rooms, stride, params_stride,
    V: tl.constexpr, SCALE: tl.constexpr, SCALE_BITS: tl.constexpr, SPLITS: tl.constexpr, BOUNDS: tl.constexpr,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    mine, temperature, top, drawn = _open_row(rows, table, params_stride, tops, n, SPLITS)
    _, top_p, counted, nuclear = _filters(mine, V)
    needed = drawn & (counted | nuclear)
    if not needed:
        return
    tl.store(cursors + n, 0)
    logits += n * stride
    gathered += n * CAPACITY
    need, above, count = tl.load(sums + n * 4), tl.load(sums + n * 4 + 1), tl.load(sums + n * 4 + 3)
    low, high, high_score = tl.load(between + n * 3), tl.load(between + n * 3 + 1), tl.load(between + n * 3 + 2)
    high = tl.minimum(high, SCALE)
    whole = count > CAPACITY
    size = tl.where(whole, V, count).to(tl.int32)
    floor = tl.full((), float("-inf"), tl.float32)
    edge = tl.full((), 0.0, tl.float32)
    room = tl.full((), 0, tl.int64)
    if counted:
        floor = _search(
            logits, gathered, whole, size, top, temperature, floor, need, high_score, low,
            False, SCALE, SCALE_BITS, BOUNDS, BLOCK,
        )  # fmt: skip
    if nuclear:
        if counted:
            sums_above = _tally(
                logits, gathered, whole, size, top, temperature, floor, tl.zeros((BOUNDS,), tl.float32), True, SCALE,
                BOUNDS, BLOCK,
            )  # fmt: skip
            need = _least_mass(top_p, tl.max(sums_above, 0))
            low, high = tl.full((), 1.0, tl.float32), tl.full((), SCALE, tl.float32)
        elif not whole:
            need -= above
        edge = _search(
            logits, gathered, whole, size, top, temperature, floor, need, high, low,
            True, SCALE, SCALE_BITS, BOUNDS, BLOCK,
        )  # fmt: skip
        heavier = tl.full((BOUNDS,), 1, tl.int32) + edge.to(tl.int32, bitcast=True)
        sums_above = _tally(
            logits, gathered, whole, size, top, temperature, floor, heavier.to(tl.float32, bitcast=True), True, SCALE,
            BOUNDS, BLOCK,
        )  # fmt: skip
        weight = edge.to(tl.int64)
        room = (need - tl.max(sums_above, 0) + weight - 1) // weight
    tl.store(edges + n * 2, floor)
    tl.store(edges + n * 2 + 1, edge)
    tl.store(rooms + n, room)


@triton.jit
def _kept(mine, edges, rooms, n, V: tl.constexpr, FILTERS: tl.constexpr):
    """The least score and the least weight that are kept, and how many tokens of that weight; weight 0 keeps all."""
    floor, edge, room = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32), tl.full((), 0, tl.int64)
    if FILTERS:
        _, _, counted, nuclear = _filters(mine, V)
        if counted | nuclear:
            floor, edge, room = tl.load(edges + n * 2), tl.load(edges + n * 2 + 1), tl.load(rooms + n)
    min_p = tl.load(mine + 2).to(tl.float32, bitcast=True)
    if min_p > 0:
        floor = tl.maximum(floor, tl.log(min_p.to(tl.float64)).to(tl.float32))
    return floor, edge, room


@triton.jit
def _weigh(
    logits, rows, table, tops, edges, rooms, masses, ties, stride, params_stride,
    FILTERS: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mine, temperature, top, drawn = _open_row(rows, table, params_stride, tops, n, SPLITS)
    if not drawn:
        return
    floor, edge, _ = _kept(mine, edges, rooms, n, V, FILTERS)
    mass = tl.zeros((BLOCK,), tl.int64)
    tied = tl.zeros((BLOCK,), tl.int32)
    end = tl.minimum(split * CHUNK + CHUNK, V)
    for start in range(split * CHUNK, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        scores = _scores(logits + n * stride, token, token < end, top, temperature)
        weights = tl.where(scores >= floor, _weights(scores, SCALE), 0.0)
        if FILTERS:
            tied += ((weights == edge) & (weights > 0.0)).to(tl.int32)
            weights = tl.where(weights > edge, weights, 0.0)
        mass += weights.to(tl.int64)
    tl.store(masses + n * SPLITS + split, tl.sum(mass, 0))
    if FILTERS:
        tl.store(ties + n * SPLITS + split, tl.sum(tied, 0))


@triton.jit
def _pick(
    logits, rows, lengths, table, tops, winners, edges, rooms, masses, ties, tokens, failed, stride, params_stride,
    RANDOM: tl.constexpr, FILTERS: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n)
    if row < 0:
        tl.store(tokens + n, 0)
        tl.store(failed + n, 0)
        return
    part = tl.arange(0, SPLITS)
    tops_here = tl.load(tops + n * SPLITS + part)
    top = tl.max(tops_here, 0)
    token = tl.min(tl.where(tops_here == top, tl.load(winners + n * SPLITS + part), V), 0)
    fails = tl.abs(top) == float("inf")
    if RANDOM:
        mine, temperature, _, drawn = _open_row(rows, table, params_stride, tops, n, SPLITS)
        if not FILTERS:
            _, _, counted, nuclear = _filters(mine, V)
            fails = fails | (drawn & (counted | nuclear))  # the caller said that there was no such row
        if drawn:
            floor, edge, room = _kept(mine, edges, rooms, n, V, FILTERS)
            mass = tl.load(masses + n * SPLITS + part)
            tied = tl.zeros((SPLITS,), tl.int64)
            if FILTERS:
                tied = tl.load(ties + n * SPLITS + part).to(tl.int64)
                left = room - (tl.cumsum(tied, 0) - tied)
                mass += edge.to(tl.int64) * tl.minimum(tl.maximum(left, 0), tied)
            reached = tl.cumsum(mass, 0)
            total = tl.sum(mass, 0)
            uniform = _uniform(mine, tl.load(lengths + n))
            target = tl.minimum(tl.floor(uniform * total.to(tl.float64)).to(tl.int64), total - 1)
            split = tl.sum((reached <= target).to(tl.int32), 0)
            base = tl.sum(tl.where(part < split, mass, 0), 0)
            room -= tl.sum(tl.where(part < split, tied, 0), 0)
            start = split * CHUNK
            end = tl.minimum(start + CHUNK, V)
            token = tl.full((), V, tl.int32)
            while (token == V) & (start < end):
                at = start + tl.arange(0, BLOCK)
                scores = _scores(logits + n * stride, at, at < end, top, temperature)
                weights = tl.where(scores >= floor, _weights(scores, SCALE), 0.0)
                if FILTERS:
                    equal = ((weights == edge) & (weights > 0.0)).to(tl.int64)
                    fits = (weights > edge) | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
                    weights = tl.where(fits, weights, 0.0)
                    room -= tl.sum(equal, 0)
                whole = weights.to(tl.int64)
                token = tl.min(tl.where(base + tl.cumsum(whole, 0) > target, at, V), 0)
                base += tl.sum(whole, 0)
                start += BLOCK
    tl.store(tokens + n, tl.where(fails, 0, token))
    tl.store(failed + n, fails.to(tl.int32))


def greedy(logits: Tensor, rows: Tensor, tokens: Tensor, failed: Tensor, scratch: SamplingScratch) -> None:
    """The likeliest token of each row, the lowest id of ties.

    Two small kernels rather than one whose last program finishes: nothing to reset, and no fence in the hot loop.

    Args:
        logits: (N, V) bfloat16, float16 or float32 with contiguous rows.
        rows: (N,) int32; -1 is padding, whose token is 0.
        tokens, failed: (N,) int32, written: 1 in `failed` (and token 0) where the logits hold a NaN or +inf, or
            nothing above -inf.
        scratch: for at least N rows.
    """
    count, vocab_size, splits, chunk = _shape(logits, scratch)
    s, block = scratch, scratch.config.block
    _maxima[(count, splits)](
        logits, rows, s.tops, s.winners, logits.stride(0), V=vocab_size, CHUNK=chunk, SPLITS=splits, BLOCK=block
    )
    _pick[(count,)](
        logits, rows, rows, rows, s.tops, s.winners, s.edges, s.rooms, s.masses, s.ties, tokens, failed,
        logits.stride(0), 0, RANDOM=False, FILTERS=False, V=vocab_size, SCALE=1.0, CHUNK=chunk, SPLITS=splits,
        BLOCK=block,
    )  # fmt: skip


def sample(
    logits: Tensor,
    rows: Tensor,
    lengths: Tensor,
    params: Tensor,
    tokens: Tensor,
    failed: Tensor,
    scratch: SamplingScratch,
    *,
    filters: bool = True,
) -> None:
    """A token for each row: temperature, top_k, top_p, min_p, and a draw with the number of (seed, index, length).

    Nothing here waits for the device or allocates on it.

    Args:
        logits: (N, V) bfloat16, float16 or float32 with contiguous rows.
        rows: (N,) int32, into `params`; -1 is padding, whose token is 0.
        lengths: (N,) int32, tokens of the row that are known.
        params: (R, 8) int32 with contiguous rows, each from `pack_params`.
        tokens, failed: (N,) int32, written as `greedy` writes them.
        scratch: for at least N rows.
        filters: False saves half of the kernels in a step where no row has top_k or top_p; a row that has one fails.
    """
    count, vocab_size, splits, chunk = _shape(logits, scratch)
    s, config = scratch, scratch.config
    bits = 53 - (vocab_size - 1).bit_length()
    strides = (logits.stride(0), params.stride(0))
    row = {"V": vocab_size, "SCALE": 2.0**bits, "SPLITS": splits}
    block = {**row, "CHUNK": chunk, "BLOCK": config.block}
    bounds = {**row, "BOUNDS": config.bounds, "CAPACITY": config.capacity}
    _maxima[(count, splits)](
        logits, rows, s.tops, s.winners, strides[0], V=vocab_size, CHUNK=chunk, SPLITS=splits, BLOCK=config.block
    )
    if filters:
        ladder = (s.ladder_keys, s.ladder_masses, s.ladder_counts)
        for turn in range(config.rounds):
            first = turn == 0
            _ladder[(count, splits)](
                logits, rows, params, s.tops, *ladder, s.sums, *strides, FIRST=first, CHUNK=chunk,
                BLOCK=config.ladder_block, **bounds,
            )  # fmt: skip
            _narrow[(count,)](
                rows, params, s.tops, s.ladder_scores, *ladder, s.between, s.sums, strides[1], FIRST=first,
                num_warps=1, **bounds,
            )  # fmt: skip
        _gather[(count, splits)](
            logits, rows, params, s.tops, s.between, s.sums, s.cursors, s.gathered, *strides,
            CAPACITY=config.capacity, CHUNK=chunk, BLOCK=2 * config.ladder_block, **row,
        )  # fmt: skip
        _select[(count,)](
            logits, rows, params, s.tops, s.between, s.sums, s.cursors, s.gathered, s.edges, s.rooms, *strides,
            SCALE_BITS=(127 + bits) << 23, BLOCK=2 * config.ladder_block, num_warps=8, **bounds,
        )  # fmt: skip
    _weigh[(count, splits)](
        logits, rows, params, s.tops, s.edges, s.rooms, s.masses, s.ties, *strides, FILTERS=filters, **block
    )
    _pick[(count,)](
        logits, rows, lengths, params, s.tops, s.winners, s.edges, s.rooms, s.masses, s.ties, tokens, failed, *strides,
        RANDOM=True, FILTERS=filters, num_warps=8, **block,
    )  # fmt: skip


def _shape(logits: Tensor, scratch: SamplingScratch) -> tuple[int, int, int, int]:
    """N, V, the number of splits and how many tokens each has: whole blocks of 32 bytes."""
    count, vocab_size = logits.shape
    splits = scratch.config.splits_of(count, vocab_size)
    return count, vocab_size, splits, triton.cdiv(triton.cdiv(vocab_size, splits), 16) * 16
