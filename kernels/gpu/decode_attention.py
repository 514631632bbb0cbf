"""Attention of single queries over a paged KV cache: the decode step.

The keys of a query are cut into splits, so that a few long sequences fill the device as well as many short ones do
(FlashDecoding, Dao et al., 2023). `plan_decode` lists the splits; `decode_attention` walks the list with a fixed number
of programs in each layer that has these queries. All that varies by step lies in device tensors: both fit into a CUDA
graph.

It does not write K and V, and knows nothing of prompts (`prefill_attention` does those).
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launching import after_previous, early

_LOG2_E = 1.4426950408889634
# Programs that write the list of splits together.
_PLANNERS = 16
# Splits whose statistics are looked at together, elements of partial sums that are loaded at once, and of how many
# splits at most: each is code of its own, and 32 of them were half a minute's work for the compiler.
_MERGED_STATS = 64
_MERGED = 4096
_MERGED_SPLITS = 8


class DecodeConfig(NamedTuple):
    """What is tuned on a device.

    Args:
        block_n: keys of one step of a program, a power of two >= 16.
        num_warps: of a program.
        num_stages: steps whose K and V are loaded ahead, one more than those in flight.
        programs_per_processor: how many programs a multiprocessor runs.
        units_per_program: pieces of work (a split of one KV head) that a program gets at most on average.
        min_chunk: tokens that a split has at least.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_processor: int
    units_per_program: int
    min_chunk: int


def decode_config(head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    """The constants for an H200: K and V of three steps of two programs fit into a multiprocessor's shared memory."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    return DecodeConfig(64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16, 4, 3, 2, 1, 192)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The list of splits, and room for their partial results. Allocated once; layers with the same queries share it.

    Args:
        config: what the kernels were tuned to.
        window: of the layers that it serves; None serves any.
        programs: of the grid.
        units: pieces of work that the splits aim at.
        items: (N, 4) int32, (query, split, row of the page table, position).
        header: (2,) int32: how many items there are, and how many tokens a split has.
        sums: (N, heads, head_dim) float32, weighted sums of V by split.
        stats: (2, N, heads) float32: maximum of the scores in powers of two, and sum of the weights.
        arrivals: (max_queries, kv_heads) int32, splits that are done; zero between kernels.
    """

    config: DecodeConfig
    window: int | None
    programs: int
    units: int
    items: Tensor
    header: Tensor
    sums: Tensor
    stats: Tensor
    arrivals: Tensor

    @classmethod
    def allocate(
        cls,
        max_queries: int,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        window: int | None = None,
        programs: int | None = None,
        config: DecodeConfig | None = None,
    ) -> Self:
        """Room for up to max_queries queries (at most 1,024) of a step.

        Args:
            dtype: of the queries and the cache.
            window: given, the plan fits layers of this window alone, and splits only what they see.
            programs: of the grid (None: as many as the device holds at once).

        Raises:
            ValueError: for sizes that the kernels do not support.
        """
        if not 1 <= max_queries <= 1024:
            raise ValueError(f"max_queries must be 1..1024, not {max_queries}")
        if num_heads % kv_heads or num_heads > 16 * kv_heads:
            raise ValueError(f"{num_heads} query heads for {kv_heads} KV heads: must be a multiple, at most 16")
        config = config or decode_config(head_dim, dtype)
        if programs is None:
            cuda = torch.device(device).type == "cuda"
            processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1
            programs = processors * config.programs_per_processor
        units = programs * config.units_per_program
        # A split has at least total * kv_heads / units tokens; each query's last one may be shorter.
        capacity = units // kv_heads + max_queries + 1
        return cls(
            config=config,
            window=window,
            programs=programs,
            units=units,
            items=torch.zeros(capacity, 4, dtype=torch.int32, device=device),
            header=torch.zeros(2, dtype=torch.int32, device=device),
            sums=torch.empty(capacity, num_heads, head_dim, dtype=torch.float32, device=device),
            stats=torch.empty(2, capacity, num_heads, dtype=torch.float32, device=device),
            arrivals=torch.zeros(max_queries, kv_heads, dtype=torch.int32, device=device),
        )


def plan_decode(plan: DecodePlan, rows: Tensor, positions: Tensor, num_decodes: Tensor) -> None:
    """Lists the splits of a step's queries in the plan, in place of those that it had.

    Args:
        rows: (B,) int32, the page-table row of each query; B is at most the plan's max_queries.
        positions: (B,) int32, of the queries: each sees the keys 0..position.
        num_decodes: (1,) int32, how many of the B are queries; at most B.

    Raises:
        ValueError: for too many queries.
    """
    max_queries, kv_heads = plan.arrivals.shape
    if len(rows) != len(positions) or len(rows) > max_queries:
        raise ValueError(f"{len(rows)} rows and {len(positions)} positions in a plan for {max_queries} queries")
    _plan_kernel[(_PLANNERS,)](
        plan.items,
        plan.header,
        rows,
        positions,
        num_decodes,
        plan.units,
        plan.config.min_chunk,
        KV_HEADS=kv_heads,
        BLOCK_N=plan.config.block_n,
        WINDOW=plan.window or 0,
        QUERIES=triton.next_power_of_2(max_queries),
        num_warps=4,
    )


def decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    plan: DecodePlan,
    out: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> None:
    """Attention of the planned queries; query i is token i of q and out. K and V of the step must have been written.

    Args:
        q: (T, heads, head_dim), the last dimension contiguous.
        kv_cache: (pages, page_size, 2, kv_heads, head_dim) of one layer, the last dimension contiguous; what no query
            sees may hold anything. The page size is a power of two.
        page_table: (rows, max_pages) int32, the last dimension contiguous.
        plan: made by `plan_decode` for these queries.
        out: (T, heads, head_dim), the last dimension contiguous; only rows of planned queries are written.
        window: how many tokens back a query sees, itself included.
        scale: of the scores (None: head_dim ** -0.5).

    Raises:
        ValueError: for shapes that differ from the plan's, or another window than the plan's.
    """
    capacity, heads, head_dim = plan.sums.shape
    kv_heads = plan.arrivals.shape[1]
    page_size = kv_cache.shape[1]
    if q.shape[1:] != (heads, head_dim) or kv_cache.shape[3:] != (kv_heads, head_dim) or page_size & (page_size - 1):
        raise ValueError(f"q {tuple(q.shape)} and KV cache {tuple(kv_cache.shape)} do not fit the plan")
    if plan.window is not None and plan.window != window:
        raise ValueError(f"the plan was made for window {plan.window}, not {window}")
    group = heads // kv_heads
    padded_dim = triton.next_power_of_2(head_dim)
    padded_group = triton.next_power_of_2(group)
    config = plan.config
    _decode_kernel[(plan.programs,)](
        q,
        kv_cache,
        page_table,
        plan.items,
        plan.header,
        plan.sums,
        plan.stats,
        plan.arrivals,
        out,
        (head_dim**-0.5 if scale is None else scale) * _LOG2_E,
        page_table.stride(0),
        capacity,
        *q.stride()[:2],
        *kv_cache.stride()[:4],
        *out.stride()[:2],
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        WINDOW=window or 0,
        PLAN_WINDOW=plan.window or 0,
        BLOCK_N=config.block_n,
        BLOCK_G=padded_group,
        BLOCK_D=padded_dim,
        BLOCK_S=_MERGED_STATS,
        UNROLL=max(1, min(_MERGED_SPLITS, _MERGED // (padded_group * padded_dim))),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **early(len(q), q.device),
    )


@triton.jit(do_not_specialize=["units", "min_chunk"])
def _plan_kernel(
    items,
    header,
    rows,
    positions,
    num_decodes,
    units,
    min_chunk,
    KV_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Every program sums all lengths up; each writes every so manyth split of all queries."""
    query = tl.arange(0, QUERIES)
    live = query < tl.load(num_decodes)
    row = tl.load(rows + query, mask=live, other=0)
    position = tl.load(positions + query, mask=live, other=-1)
    length = position + 1
    if WINDOW > 0:
        length = tl.minimum(length, WINDOW)
    work = tl.sum(length.to(tl.int64), 0) * KV_HEADS
    chunk = tl.maximum((work + units - 1) // units, min_chunk).to(tl.int32)
    chunk = (chunk + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    splits = (length + chunk - 1) // chunk
    first = tl.cumsum(splits, 0) - splits
    if tl.program_id(0) == 0:
        tl.store(header, tl.sum(splits, 0))
        tl.store(header + 1, chunk)
    for split in range(tl.program_id(0), tl.max(splits, 0), tl.num_programs(0)):
        item = items + 4 * (first + split)
        tl.store(item, query, mask=split < splits)
        tl.store(item + 1, split, mask=split < splits)
        tl.store(item + 2, row, mask=split < splits)
        tl.store(item + 3, position, mask=split < splits)


@triton.jit(do_not_specialize=["table_stride", "capacity"])
def _decode_kernel(
    q,
    kv,
    table,
    items,
    header,
    sums,
    stats,
    arrivals,
    out,
    scale,
    table_stride,
    capacity,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    KV_PAGE: tl.constexpr,
    KV_TOKEN: tl.constexpr,
    KV_KIND: tl.constexpr,
    KV_HEAD: tl.constexpr,
    OUT_TOKEN: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    PLAN_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    UNROLL: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A unit is an item and a KV head. The heads of a group are the first rows of a tile of 16, the least of a dot."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    heads = tl.arange(0, 16)
    dims = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_N)
    tile_mask = (heads[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    programs = tl.num_programs(0)
    after_previous(PDL)
    # The next unit's item is loaded while this one is worked on; beyond the list it is read but not used.
    item = tl.minimum(tl.program_id(0) // KV_HEADS, capacity - 1)
    next_query = tl.load(items + 4 * item)
    next_split = tl.load(items + 4 * item + 1)
    next_row = tl.load(items + 4 * item + 2)
    next_position = tl.load(items + 4 * item + 3)
    chunk = tl.load(header + 1)
    for unit in range(tl.program_id(0), tl.load(header) * KV_HEADS, programs):
        item = unit // KV_HEADS
        kv_head = unit % KV_HEADS
        query = next_query
        split = next_split
        row = next_row
        position = next_position
        next_item = tl.minimum((unit + programs) // KV_HEADS, capacity - 1)
        next_query = tl.load(items + 4 * next_item)
        next_split = tl.load(items + 4 * next_item + 1)
        next_row = tl.load(items + 4 * next_item + 2)
        next_position = tl.load(items + 4 * next_item + 3)

        end = position + 1
        first = 0
        if PLAN_WINDOW > 0:
            first = tl.maximum(end - PLAN_WINDOW, 0)
        splits = (end - first + chunk - 1) // chunk
        start = first + split * chunk
        stop = tl.minimum(start + chunk, end)
        if WINDOW > 0:
            start = tl.maximum(start, end - WINDOW)

        tile = heads[:, None] * Q_HEAD + dims[None, :]
        queries = tl.load(q + query.to(tl.int64) * Q_TOKEN + kv_head * GROUP * Q_HEAD + tile, mask=tile_mask, other=0.0)
        pages = table + row.to(tl.int64) * table_stride
        cache = kv + kv_head * KV_HEAD + dims[None, :]
        best = tl.full([16], float("-inf"), tl.float32)
        weight = tl.zeros([16], tl.float32)
        acc = tl.zeros([16, BLOCK_D], tl.float32)
        # Page numbers are loaded one block ahead: the pipeliner then needs no stages for them.
        page = tl.load(pages + (start + keys) // PAGE, mask=start + keys < stop, other=0)
        for at in range(start, stop, BLOCK_N):
            key = at + keys
            seen = key < stop
            slot = page.to(tl.int64) * KV_PAGE + (key % PAGE) * KV_TOKEN
            page = tl.load(pages + (key + BLOCK_N) // PAGE, mask=key + BLOCK_N < stop, other=0)
            block = cache + slot[:, None]
            mask = seen[:, None] & (dims[None, :] < HEAD_DIM)
            k = tl.load(block, mask=mask, other=0.0)
            scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            fade = tl.exp2(best - new_best)
            p = tl.exp2(scores - new_best[:, None])
            weight = weight * fade + tl.sum(p, 1)
            v = tl.load(block + KV_KIND, mask=mask, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
            best = new_best

        target = out + query.to(tl.int64) * OUT_TOKEN + kv_head * GROUP * OUT_HEAD
        if splits == 1:
            at_out = target + heads[:, None] * OUT_HEAD + dims[None, :]
            tl.store(at_out, (acc / weight[:, None]).to(out.dtype.element_ty), mask=tile_mask)
        else:
            part = item * HEADS + kv_head * GROUP
            tl.store(stats + part + heads, best, mask=heads < GROUP)
            tl.store(stats + capacity * HEADS + part + heads, weight, mask=heads < GROUP)
            at_part = sums + part.to(tl.int64) * HEAD_DIM + heads[:, None] * HEAD_DIM + dims[None, :]
            tl.store(at_part, acc, mask=tile_mask)
            # The stores of all threads come before the arrival of the one that counts it.
            tl.debug_barrier()
            arrival = arrivals + query * KV_HEADS + kv_head
            if tl.atomic_add(arrival, 1, sem="acq_rel") == splits - 1:
                tl.store(arrival, 0)
                first_part = (item - split) * HEADS + kv_head * GROUP
                _merge(
                    sums + first_part.to(tl.int64) * HEAD_DIM,
                    stats + first_part,
                    splits,
                    capacity,
                    target,
                    OUT_HEAD,
                    HEADS,
                    GROUP,
                    HEAD_DIM,
                    BLOCK_S,
                    UNROLL,
                    BLOCK_G,
                    BLOCK_D,
                )


@triton.jit
def _merge(
    sums,
    stats,
    splits,
    capacity,
    target,
    OUT_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Adds up the splits of one query and KV head, always in the same order. L1 is passed by: others wrote them."""
    part = tl.arange(0, BLOCK_S)
    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    inside = (heads[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    best = tl.full([BLOCK_G], float("-inf"), tl.float32)
    for at in range(0, splits, BLOCK_S):
        split = at + part
        mask = (split < splits)[:, None] & (heads < GROUP)[None, :]
        bests = tl.load(stats + split[:, None] * HEADS + heads[None, :], mask, float("-inf"), cache_modifier=".cg")
        best = tl.maximum(best, tl.max(bests, 0))
    # Splits outside the window have seen nothing, and padding heads never do: -inf - -inf would be NaN.
    best = tl.where(best == float("-inf"), 0.0, best)
    weight = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for at in range(0, splits, UNROLL):
        for ahead in tl.static_range(UNROLL):
            split = at + ahead
            mask = (heads < GROUP) & (split < splits)
            stat = stats + split * HEADS + heads
            share = tl.exp2(tl.load(stat, mask, float("-inf"), cache_modifier=".cg") - best)
            weight += share * tl.load(stat + capacity * HEADS, mask, 0.0, cache_modifier=".cg")
            cell = sums + (split * HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
            acc += share[:, None] * tl.load(cell, inside & (split < splits), 0.0, cache_modifier=".cg")
    weight = tl.where(heads < GROUP, weight, 1.0)
    at_out = target + heads[:, None] * OUT_HEAD + dims[None, :]
    tl.store(at_out, (acc / weight[:, None]).to(target.dtype.element_ty), mask=inside)
