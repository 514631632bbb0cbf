"""Causal attention of chunks of queries over a paged KV cache: prefill, with or without a cached prefix.

The chunks are cut into tiles of queries on the host; a program attends one query head of a tile to all its keys, block
by block with a running softmax (FlashAttention-2, Dao, 2023). Only blocks that cross the diagonal or the border of the
window are masked. Grid and shapes are fixed and the list of tiles lies on the device: it fits into a CUDA graph.

What `hopper_attention` serves goes there. It does not write K and V; `decode_attention` is faster for single queries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kernels.gpu.hopper_attention import hopper_prefill, serves

_LOG2_E = 1.4426950408889634


class PrefillConfig(NamedTuple):
    """What is tuned on a device.

    Args:
        block_m: queries of a tile, a power of two >= 16.
        block_n: keys of one step, a power of two >= 16.
        num_warps: of a program; four share a matrix instruction of 64 queries.
        num_stages: steps whose K and V are loaded ahead, one more than those in flight.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_config(head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """The constants for an H200."""
    if dtype == torch.float32:
        return PrefillConfig(64, 32 if head_dim <= 128 else 16, 8, 2)
    return PrefillConfig(128, 64, 8, 3) if head_dim <= 128 else PrefillConfig(64, 32, 4, 3)


def max_tiles(max_tokens: int, max_queries: int, block_m: int) -> int:
    """The most tiles that max_tokens tokens of max_queries chunks make."""
    return (max_tokens + max_queries * (block_m - 1)) // block_m


def prefill_tiles(queries: Sequence[tuple[int, int, int, int]], block_m: int) -> NDArray[np.int32]:
    """Cuts chunks into tiles, those with the longest context first.

    Args:
        queries: (first flat token, row of the page table, position of the first query, how many queries) of each chunk.
        block_m: queries of a tile, as the kernel's config says.

    Returns:
        (tiles, 4): the same four of each tile.
    """
    tokens, rows, starts, lengths = np.array(queries, np.int64).reshape(-1, 4).T
    counts = -(-lengths // block_m)
    offsets = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * block_m
    sizes = np.minimum(np.repeat(lengths, counts) - offsets, block_m)
    firsts = np.repeat(starts, counts) + offsets
    tiles = np.stack((np.repeat(tokens, counts) + offsets, np.repeat(rows, counts), firsts, sizes), 1)
    return tiles[np.argsort(-(firsts + sizes), kind="stable")].astype(np.int32)


def prefill_attention(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    tiles: Tensor,
    num_tiles: Tensor,
    out: Tensor,
    *,
    programs: int,
    window: int | None = None,
    scale: float | None = None,
    config: PrefillConfig | None = None,
) -> None:
    """Causal attention of the tiles' queries. K and V of the step must have been written.

    Args:
        q: (T, heads, head_dim), the last dimension contiguous; query head h reads KV head h // (heads / kv_heads).
        kv_cache: (pages, page_size, 2, kv_heads, head_dim) of one layer, the last dimension contiguous; what no query
            sees may hold anything. The page size is a power of two.
        page_table: (rows, max_pages) int32, the last dimension contiguous.
        tiles: (max_tiles, 4) int32, made by `prefill_tiles` for the config's block_m.
        num_tiles: (2,) int32, how many of them are tiles; and a zero, by which the kernel may count. It leaves a zero:
            launches that share it follow one another.
        out: (T, heads, head_dim), the last dimension contiguous; only rows of the tiles' queries are written.
        programs: for each head; they share the tiles (`hopper_attention` has its own number).
        window: how many tokens back a query sees, itself included.
        scale: of the scores (None: head_dim ** -0.5).
        config: of the kernel of this file, which then serves in any case (None: `prefill_config`).

    Raises:
        ValueError: for shapes that do not fit together.
    """
    heads, head_dim = q.shape[1:]
    page_size, kv_heads = kv_cache.shape[1], kv_cache.shape[3]
    if heads % kv_heads or kv_cache.shape[4] != head_dim or out.shape != q.shape or page_size & (page_size - 1):
        raise ValueError(f"q {tuple(q.shape)}, KV cache {tuple(kv_cache.shape)} and out {tuple(out.shape)} do not fit")
    scale = (head_dim**-0.5 if scale is None else scale) * _LOG2_E
    if config is None and serves(q, kv_cache, window):
        hopper_prefill(q, kv_cache, page_table, tiles, num_tiles, out, scale)
        return
    config = config or prefill_config(head_dim, q.dtype)
    # Heads vary fastest: the longest tiles of all heads start first, and heads of a group share K and V in L2.
    _prefill_kernel[(heads, programs)](
        q,
        kv_cache,
        page_table,
        tiles,
        num_tiles,
        out,
        scale,
        page_table.stride(0),
        *q.stride()[:2],
        *kv_cache.stride()[:4],
        *out.stride()[:2],
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        WINDOW=window or 0,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=triton.next_power_of_2(head_dim),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q,
    kv,
    table,
    tiles,
    num_tiles,
    out,
    scale,
    table_stride,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    KV_PAGE: tl.constexpr,
    KV_TOKEN: tl.constexpr,
    KV_KIND: tl.constexpr,
    KV_HEAD: tl.constexpr,
    OUT_TOKEN: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    steps = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    cache = kv + head // GROUP * KV_HEAD
    for tile in range(tl.program_id(1), tl.load(num_tiles), tl.num_programs(1)):
        token = tl.load(tiles + 4 * tile)
        row = tl.load(tiles + 4 * tile + 1)
        first = tl.load(tiles + 4 * tile + 2)
        count = tl.load(tiles + 4 * tile + 3)
        mask = (steps[:, None] < count) & (dims[None, :] < HEAD_DIM)
        tokens = (token + steps).to(tl.int64)[:, None]
        queries = tl.load(q + head * Q_HEAD + tokens * Q_TOKEN + dims[None, :], mask=mask, other=0.0)
        pages = table + row.to(tl.int64) * table_stride
        # Queries beyond the count see what the last one sees; their results are not stored.
        position = first + tl.minimum(steps, count - 1)
        end = first + count
        # Keys [start, inner) cross the window's border, [inner, diagonal) are seen by all queries, the rest by some.
        start = 0
        inner = 0
        if WINDOW > 0:
            start = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            inner = tl.minimum((tl.maximum(end - WINDOW, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N, end)
        diagonal = tl.maximum((first + 1) // BLOCK_N * BLOCK_N, inner)

        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if WINDOW > 0:
            best, weight, acc = _attend(
                best, weight, acc, queries, position, cache, pages, start, inner, scale, KV_PAGE, KV_TOKEN,
                KV_KIND, HEAD_DIM, PAGE, WINDOW, BLOCK_N, BLOCK_D, PRECISION, True,
            )  # fmt: skip
        best, weight, acc = _attend(
            best, weight, acc, queries, position, cache, pages, inner, diagonal, scale, KV_PAGE, KV_TOKEN,
            KV_KIND, HEAD_DIM, PAGE, WINDOW, BLOCK_N, BLOCK_D, PRECISION, False,
        )  # fmt: skip
        best, weight, acc = _attend(
            best, weight, acc, queries, position, cache, pages, diagonal, end, scale, KV_PAGE, KV_TOKEN,
            KV_KIND, HEAD_DIM, PAGE, WINDOW, BLOCK_N, BLOCK_D, PRECISION, True,
        )  # fmt: skip
        at_out = out + head * OUT_HEAD + tokens * OUT_TOKEN + dims[None, :]
        tl.store(at_out, (acc / weight[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    best,
    weight,
    acc,
    queries,
    position,
    cache,
    pages,
    start,
    stop,
    scale,
    KV_PAGE: tl.constexpr,
    KV_TOKEN: tl.constexpr,
    KV_KIND: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attends a tile to the keys [start, stop): whole blocks if not masked."""
    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    # Page numbers are loaded one block ahead: the pipeliner then needs no stages for them.
    page = tl.load(pages + (start + keys) // PAGE, mask=start + keys < stop, other=0)
    for at in range(start, stop, BLOCK_N):
        key = at + keys
        slot = page.to(tl.int64) * KV_PAGE + (key % PAGE) * KV_TOKEN
        page = tl.load(pages + (key + BLOCK_N) // PAGE, mask=key + BLOCK_N < stop, other=0)
        block = cache + slot[:, None] + dims[None, :]
        mask = (key < stop)[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(block, mask=mask, other=0.0) if MASKED or HEAD_DIM < BLOCK_D else tl.load(block)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1) * scale)
        base = new_best
        if MASKED and WINDOW > 0:
            # A query may see no key of the first blocks: -inf - -inf would be NaN.
            base = tl.where(new_best == float("-inf"), 0.0, new_best)
        fade = tl.exp2(best - base)
        p = tl.exp2(scores * scale - base[:, None])
        weight = weight * fade + tl.sum(p, 1)
        block += KV_KIND
        v = tl.load(block, mask=mask, other=0.0) if MASKED or HEAD_DIM < BLOCK_D else tl.load(block)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        best = new_best
    return best, weight, acc
