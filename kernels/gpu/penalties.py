"""Logits as a token is chosen from them: bias, penalties, then (behind users' processors) what may not be drawn at all.

Twin: `kernels.sampling.penalize`, whose float32 results these are to the last bit. Only what a row names is touched,
after one copy of its logits to float32: its biased and barred ids, and the tokens of its history. Those are counted in
a row of zeros, whose every count one position of the token takes back, leaving zero, and applies.

Nothing is sent for a step but masks: a row's numbers lie in a table, its tokens and their number on the device. Knows
no sampling. Shapes: N samples of a step (with padding; several may be of one row), V tokens of the vocabulary.
"""

import struct
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

# Integers of a row of the table: a header of eight, two for each biased id, one for each barred id.
TABLE_WIDTH = 4096
_HEADER = tl.constexpr(8)
# Set in a count where the token occurs in the prompt; below it is how often it was generated.
_IN_PROMPT = tl.constexpr(1 << 30)
# Programs that share a row's history or mask, and how much of it one works on at a time.
_SPLITS, _BLOCK = 16, 512
_COPY_BLOCK = 4096


def pack_adjustments(
    *,
    repetition: float,
    presence: float,
    frequency: float,
    prompt_length: int,
    bias: Mapping[int, float],
    barred: Sequence[int],
    barred_until: int,
) -> NDArray[np.int32]:
    """The beginning of a row of the table; what is behind it is not read.

    Args:
        repetition, presence, frequency: penalties, as `kernels.sampling.penalize` has them.
        prompt_length: tokens of the row that are its prompt.
        bias: added to the logits of these ids.
        barred: ids that are not drawn while the row has fewer than `barred_until` tokens; any may be beyond V.

    Raises:
        ValueError: they do not fit.
    """
    if _HEADER.value + 2 * len(bias) + len(barred) > TABLE_WIDTH:
        raise ValueError(f"{len(bias)} biased and {len(barred)} barred token ids are too many for one sequence")
    header = (repetition, presence, frequency, prompt_length, len(bias), len(barred), barred_until, 0)
    # One call: numpy takes several microseconds for each piece.
    octets = struct.pack(f"<3f5i{'if' * len(bias)}{len(barred)}i", *header, *chain.from_iterable(bias.items()), *barred)
    return np.frombuffer(octets, np.int32)


@triton.jit
def _widen(logits, rows, adjusted, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    if tl.load(rows + n) < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + n * stride + token, mask=token < V)
    tl.store(adjusted + n * V + token, values.to(tl.float32), mask=token < V)


@triton.jit
def _penalties(mine):
    """Repetition, presence and frequency, and whether any is on."""
    repetition = tl.load(mine).to(tl.float32, bitcast=True)
    presence = tl.load(mine + 1).to(tl.float32, bitcast=True)
    frequency = tl.load(mine + 2).to(tl.float32, bitcast=True)
    return repetition, presence, frequency, (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)


@triton.jit
def _count(
    rows, lengths, token_ids, table, adjusted, counts, ids_stride, table_stride,
    V: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the bias; counts the history."""
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + n).to(tl.int64)
    if row < 0:
        return
    mine = table + row * table_stride
    biased = tl.load(mine + 4)
    for start in range(split * BLOCK, biased, SPLITS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        pair = mine + _HEADER + 2 * at
        place = adjusted + n * V + tl.load(pair, mask=at < biased, other=0)
        bias = tl.load(pair + 1, mask=at < biased, other=0).to(tl.float32, bitcast=True)
        tl.store(place, tl.load(place, mask=at < biased) + bias, mask=at < biased)
    _, _, _, needed = _penalties(mine)
    if not needed:
        return
    length, prompt = tl.load(lengths + n), tl.load(mine + 3)
    for start in range(split * BLOCK, length, SPLITS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        place = counts + n * V + tl.load(token_ids + row * ids_stride + at, mask=at < length, other=0)
        tl.atomic_or(place, _IN_PROMPT, mask=at < tl.minimum(prompt, length), sem="relaxed")
        tl.atomic_add(place, 1, mask=(at >= prompt) & (at < length), sem="relaxed")


@triton.jit
def _penalize(
    rows, lengths, token_ids, table, adjusted, counts, ids_stride, table_stride,
    V: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + n).to(tl.int64)
    if row < 0:
        return
    repetition, presence, frequency, needed = _penalties(table + row * table_stride)
    if not needed:
        return
    length = tl.load(lengths + n)
    for start in range(split * BLOCK, length, SPLITS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        place = n * V + tl.load(token_ids + row * ids_stride + at, mask=at < length, other=0)
        count = tl.atomic_xchg(counts + place, 0, mask=at < length, sem="relaxed")
        mine = (at < length) & (count != 0)  # else another position of the token was faster
        logit = tl.load(adjusted + place, mask=mine, other=0.0)
        times = (count & (_IN_PROMPT - 1)).to(tl.float32)
        logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
        logit = logit - frequency * times - tl.where(times > 0, presence, 0.0)
        tl.store(adjusted + place, logit, mask=mine)


@triton.jit
def _bar(
    rows, lengths, table, mask_of, masks, logits, table_stride, mask_stride,
    V: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + n).to(tl.int64)
    if row < 0:
        return
    mine = table + row * table_stride
    nothing = tl.full((BLOCK,), float("-inf"), tl.float32)
    barred = tl.where(tl.load(lengths + n) < tl.load(mine + 6), tl.load(mine + 5), 0)
    ids = mine + _HEADER + 2 * tl.load(mine + 4)
    for start in range(split * BLOCK, barred, SPLITS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        token = tl.load(ids + at, mask=at < barred, other=-1)
        tl.store(logits + n * V + token, nothing, mask=(token >= 0) & (token < V))
    mask = tl.load(mask_of + n).to(tl.int64)
    if mask < 0:
        return
    for start in range(split * BLOCK, V, SPLITS * BLOCK):
        token = start + tl.arange(0, BLOCK)
        word = tl.load(masks + mask * mask_stride + token // 32, mask=token < V, other=0)
        tl.store(logits + n * V + token, nothing, mask=(token < V) & ((word >> token % 32 & 1) == 0))


def adjust(
    logits: Tensor,
    rows: Tensor,
    lengths: Tensor,
    token_ids: Tensor,
    table: Tensor,
    adjusted: Tensor,
    counts: Tensor,
) -> None:
    """Logits with the bias added, then penalized.

    Args:
        logits: (N, V) bfloat16, float16 or float32 with contiguous rows.
        rows: (N,) int32, into `token_ids` and `table`; -1 is padding, of which nothing is read or written.
        lengths: (N,) int32, tokens of the row that are known.
        token_ids: (R, L) int32, prompt first; those that are known in [0, V).
        table: (R, TABLE_WIDTH) int32, each from `pack_adjustments`.
        adjusted: (N or more, V) float32, written.
        counts: (N or more, V) int32, zeros, and zeros again afterwards.
    """
    count, vocab_size = logits.shape
    _widen[(count, triton.cdiv(vocab_size, _COPY_BLOCK))](
        logits, rows, adjusted, logits.stride(0), V=vocab_size, BLOCK=_COPY_BLOCK, num_warps=8
    )
    for kernel in (_count, _penalize):
        # A product and a sum that are rounded at once would not be what the twin has.
        kernel[(count, _SPLITS)](
            rows, lengths, token_ids, table, adjusted, counts, token_ids.stride(0), table.stride(0),
            V=vocab_size, SPLITS=_SPLITS, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def bar(logits: Tensor, rows: Tensor, lengths: Tensor, table: Tensor, mask_of: Tensor, masks: Tensor) -> None:
    """Leaves -inf where a row's barred ids are, and where a mask has no bit.

    Args:
        logits: (N, V) float32, contiguous; changed.
        rows, lengths, table: as in `adjust`.
        mask_of: (N,) int32, which mask is each sample's, -1 for none.
        masks: (M, V / 32 or more) int32: a bit for each token that may be drawn, least significant first.
    """
    count, vocab_size = logits.shape
    _bar[(count, _SPLITS)](
        rows, lengths, table, mask_of, masks, logits, table.stride(0), masks.stride(0),
        V=vocab_size, SPLITS=_SPLITS, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
