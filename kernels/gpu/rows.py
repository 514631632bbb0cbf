"""The runner's rows on the device: what a step changes in them, what it reads from them, what it appends to them.

All of a row (its token ids, its page table, its sampling parameters) lies in one int32 array, so that one kernel brings
every change of a step. Twin: plain indexing, as the tests write it.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256
_RUN_BLOCK = 1024


@triton.jit
def _write_runs(runs, payload, state, BLOCK: tl.constexpr):
    run = runs + tl.program_id(0) * 3
    to, first, length = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    begin = tl.program_id(1) * BLOCK
    if begin < length:
        at = begin + tl.arange(0, BLOCK)
        inside = at < length
        tl.store(state + to + at, tl.load(payload + first + at, mask=inside), mask=inside)


def write_runs(runs: Tensor, payload: Tensor, state: Tensor, longest: int) -> None:
    """Copies runs of integers into the state.

    Args:
        runs: (R, 3) int32: where in the state, where in the payload, how many. No two overlap in the state.
        payload: int32.
        state: int32, fewer than 2**31 of them; changed.
        longest: at least the longest run.
    """
    _write_runs[(runs.shape[0], triton.cdiv(longest, _RUN_BLOCK))](runs, payload, state, BLOCK=_RUN_BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["count", "padding_slot"])
def _gather_tokens(
    rows, positions, token_ids, page_table, tokens, slots, count, row_stride, table_stride, padding_slot,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, mask=inside, other=-1).to(tl.int64)
    position = tl.load(positions + at, mask=inside, other=0)
    real = row >= 0
    token = tl.load(token_ids + row * row_stride + position, mask=real, other=0)
    page = tl.load(page_table + row * table_stride + position // PAGE, mask=real, other=0)
    tl.store(tokens + at, token, mask=inside)
    tl.store(slots + at, tl.where(real, page * PAGE + position % PAGE, padding_slot), mask=inside)


def gather_tokens(
    rows: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    page_table: Tensor,
    tokens: Tensor,
    slots: Tensor,
    *,
    page_size: int,
    padding_slot: int,
) -> None:
    """Looks up the ids of a step's tokens, and the slots of their K and V.

    Args:
        rows, positions: (T,) int32; row -1 is padding.
        token_ids: (rows, L) int32.
        page_table: (rows, P) int32.
        tokens, slots: (T,) int32, written; padding is token 0 in `padding_slot`.
    """
    count = tokens.shape[0]
    _gather_tokens[(triton.cdiv(count, _BLOCK),)](
        rows,
        positions,
        token_ids,
        page_table,
        tokens,
        slots,
        count,
        token_ids.stride(0),
        page_table.stride(0),
        padding_slot,
        PAGE=page_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["count"])
def _append_tokens(rows, lengths, tokens, token_ids, count, row_stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + at, mask=at < count, other=-1).to(tl.int64)
    length = tl.load(lengths + at, mask=at < count, other=0)
    token = tl.load(tokens + at, mask=at < count, other=0)
    tl.store(token_ids + row * row_stride + length, token, mask=row >= 0)


def append_tokens(rows: Tensor, lengths: Tensor, tokens: Tensor, token_ids: Tensor) -> None:
    """Appends a sampled token to each row.

    Args:
        rows: (N,) int32; -1 is padding.
        lengths: (N,) int32, tokens that the row has.
        tokens: (N,) int32.
        token_ids: (rows, L) int32, changed.
    """
    count = rows.shape[0]
    _append_tokens[(triton.cdiv(count, _BLOCK),)](
        rows, lengths, tokens, token_ids, count, token_ids.stride(0), BLOCK=_BLOCK, num_warps=4
    )


@triton.jit
def _take_rows(x, index, out, D: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    taken = tl.load(index + row).to(tl.int64)
    tl.store(out + row * D + at, tl.load(x + taken * D + at, mask=at < D), mask=at < D)


def take_rows(x: Tensor, index: Tensor, out: Tensor) -> None:
    """Writes x[index] into out; x (T, D), index (N,) int32, out (N, D)."""
    count, size = out.shape
    _take_rows[(count,)](x, index, out, D=size, BLOCK=triton.next_power_of_2(size), num_warps=4)


@triton.jit
def _copy_pages(pairs, kv_cache, layer_stride, page_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    pair = pairs + tl.program_id(0) * 2
    layer = kv_cache + tl.program_id(1).to(tl.int64) * layer_stride
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = layer + tl.load(pair).to(tl.int64) * page_stride
    target = layer + tl.load(pair + 1).to(tl.int64) * page_stride
    tl.store(target + at, tl.load(source + at, mask=at < SIZE), mask=at < SIZE)


def copy_pages(pairs: Tensor, kv_cache: Tensor) -> None:
    """Copies whole pages in every layer.

    Args:
        pairs: (C, 2) int32, source and destination; no page is both.
        kv_cache: (layers, pages, ...) with contiguous pages, changed.
    """
    size = kv_cache[0, 0].numel()
    grid = (pairs.shape[0], kv_cache.shape[0], triton.cdiv(size, _RUN_BLOCK))
    _copy_pages[grid](pairs, kv_cache, kv_cache.stride(0), kv_cache.stride(1), SIZE=size, BLOCK=_RUN_BLOCK, num_warps=4)
