"""Prefill attention for Hopper GPUs, in Gluon: Triton's language with layouts, barriers and roles of warps written out.

What `prefill_attention` computes, the way of FlashAttention-3 (Shah et al., 2024). One warp does nothing but have keys
and values copied, page by page, into a ring of blocks in shared memory. Two groups of four warps each attend 64 queries
of a tile to them: the values of one block are multiplied while the softmax of the next one's scores is taken, and while
one group is at its softmax, the other's products fill the tensor cores. Each multiprocessor runs one program, which has
the first blocks of its next tile copied while it ends one.

Gluon is not interpreted: without a GPU this is only compiled. Its twin is `prefill_attention`'s own kernel, which takes
what this one does not (`serves`).
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_M = 128
"""Queries of a tile."""

_HEAD_DIM = 128
_BLOCK_N = 128
_STAGES = 2
_GROUP_M = gl.constexpr(BLOCK_M // 2)
# A row of a copy has 128 bytes at most, the width of the swizzle: heads lie in shared memory as two halves.
_HALF = gl.constexpr(_HEAD_DIM // 2)


def serves(q: Tensor, kv_cache: Tensor, window: int | None) -> bool:
    """Whether `hopper_prefill` takes these: heads of 128 in 16 bits, whole pages of a head in one piece, no window.

    Args:
        q, kv_cache, window: of `prefill_attention`.
    """
    _, page_size, _, _, head_dim = kv_cache.shape
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype in (torch.bfloat16, torch.float16)
        and head_dim == _HEAD_DIM
        # Eight rows are one period of the swizzle.
        and 8 <= page_size <= _BLOCK_N
        and kv_cache.permute(0, 2, 3, 1, 4).is_contiguous()
        and window is None
    )


def hopper_prefill(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    tiles: Tensor,
    num_tiles: Tensor,
    out: Tensor,
    scale: float,
    programs: int | None = None,
) -> None:
    """Causal attention of the tiles' queries.

    Args:
        q, kv_cache, page_table, tiles, num_tiles, out: of `prefill_attention`, where `serves` says so; tiles are of
            BLOCK_M queries.
        scale: of the scores, times log2(e).
        programs: that share the tiles of all heads (None: as many as the device has multiprocessors).
    """
    programs = programs or torch.cuda.get_device_properties(q.device).multi_processor_count
    heads, head_dim = q.shape[1:]
    page_size, kv_heads = kv_cache.shape[1], kv_cache.shape[3]
    lines = kv_cache.permute(0, 2, 3, 1, 4).view(-1, head_dim)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    _hopper_kernel[(programs,)](
        q,
        TensorDescriptor.from_tensor(lines, [page_size, head_dim // 2], layout),
        page_table,
        tiles,
        num_tiles,
        out,
        scale,
        page_table.stride(0),
        *q.stride()[:2],
        *out.stride()[:2],
        HEADS=heads,
        KV_HEADS=kv_heads,
        PAGE=page_size,
        BLOCK_N=_BLOCK_N,
        STAGES=_STAGES,
        num_warps=4,
    )


@gluon.jit(do_not_specialize=["table_stride"])
def _hopper_kernel(
    q,
    kv,
    table,
    tiles,
    num_tiles,
    out,
    scale,
    table_stride,
    Q_TOKEN: gl.constexpr,
    Q_HEAD: gl.constexpr,
    OUT_TOKEN: gl.constexpr,
    OUT_HEAD: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    units = gl.load(num_tiles) * HEADS
    if gl.program_id(0) >= units:
        return
    first_q = gl.allocate_shared_memory(kv.dtype, [2, _GROUP_M, _HALF], kv.layout)
    second_q = gl.allocate_shared_memory(kv.dtype, [2, _GROUP_M, _HALF], kv.layout)
    # Rings: blocks (two halves each), and barriers that say that a block is full, or read by both groups.
    k = _ring(kv, BLOCK_N, STAGES)
    v = _ring(kv, BLOCK_N, STAGES)
    fence_async_shared()
    q, out = (q, Q_TOKEN, Q_HEAD), (out, OUT_TOKEN, OUT_HEAD)
    gl.warp_specialize(
        [
            (_attend, (0, first_q, q, out, tiles, units, scale, k, v, HEADS, BLOCK_N, STAGES)),
            (_attend, (1, second_q, q, out, tiles, units, scale, k, v, HEADS, BLOCK_N, STAGES)),
            (_copy, (kv, tiles, units, table, table_stride, k, v, HEADS, KV_HEADS, PAGE, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _rounds(units):
    """How many units this program has; of those of a round it takes one, in every other round from the end.

    Units are the tiles of all heads, longest first: so programs have about the same to do.
    """
    programs = gl.num_programs(0)
    whole = units // programs
    return whole + (_unit(whole) < units).to(gl.int32)


@gluon.jit
def _unit(turn):
    program, programs = gl.program_id(0), gl.num_programs(0)
    return turn * programs + program + (turn & 1) * (programs - 1 - 2 * program)


@gluon.jit
def _ring(kv, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    blocks = gl.allocate_shared_memory(kv.dtype, [2 * STAGES, BLOCK_N, _HALF], kv.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(read.index(stage), count=2)
    return blocks, full, read


@gluon.jit
def _copy(
    kv,
    tiles,
    units,
    table,
    table_stride,
    k,
    v,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The copying warp: all blocks of all tiles, as soon as there is room."""
    turn = 0
    for i in range(_rounds(units)):
        tile = _unit(i) // HEADS
        kv_head = _unit(i) % HEADS // (HEADS // KV_HEADS)
        row = gl.load(tiles + 4 * tile + 1)
        end = gl.load(tiles + 4 * tile + 2) + gl.load(tiles + 4 * tile + 3)
        pages = table + row.to(gl.int64) * table_stride
        for start in range(0, end, BLOCK_N):
            _copy_block(kv, pages, start, end, kv_head, k, turn, KV_HEADS, PAGE, BLOCK_N, STAGES)
            _copy_block(kv, pages, start, end, KV_HEADS + kv_head, v, turn, KV_HEADS, PAGE, BLOCK_N, STAGES)
            turn += 1


@gluon.jit
def _copy_block(
    kv,
    pages,
    start,
    end,
    head,
    ring,
    turn,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Keys or values [start, start + BLOCK_N); what is copied behind the end, of page 0, is masked where it is used."""
    blocks, full, read = ring
    stage = turn % STAGES
    mbarrier.wait(read.index(stage), (turn // STAGES + 1) & 1)
    mbarrier.expect(full.index(stage), 2 * BLOCK_N * _HALF * 2)
    for i in gl.static_range(BLOCK_N // PAGE):
        page = gl.load(pages + start // PAGE + i, mask=start + i * PAGE < end, other=0)
        line = (page * (2 * KV_HEADS) + head) * PAGE
        for half in gl.static_range(2):
            block = blocks.index(2 * stage + half)
            part = block._reinterpret(blocks.dtype, [BLOCK_N // PAGE, PAGE, _HALF], blocks.layout).index(i)
            tma.async_copy_global_to_shared(kv, [line, half * _HALF], full.index(stage), part)


@gluon.jit
def _attend(
    GROUP_OF_WARPS: gl.constexpr,
    own_q,
    q,
    out,
    tiles,
    units,
    scale,
    k,
    v,
    HEADS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A group of warps: its half of the queries of all tiles."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q, q_token, q_head = q
    out, out_token, out_head = out
    values, values_full, values_read = v
    turn = 0
    for i in range(_rounds(units)):
        tile, head = _unit(i) // HEADS, _unit(i) % HEADS
        token = gl.load(tiles + 4 * tile) + GROUP_OF_WARPS * _GROUP_M
        first = gl.load(tiles + 4 * tile + 2) + GROUP_OF_WARPS * _GROUP_M
        count = gl.load(tiles + 4 * tile + 3) - GROUP_OF_WARPS * _GROUP_M  # not positive: none of the queries is stored
        end = first + count
        steps = gl.arange(0, _GROUP_M, gl.SliceLayout(1, LOADED))
        at = (token + steps).to(gl.int64)[:, None] * q_token + gl.arange(0, _HALF, gl.SliceLayout(0, LOADED))[None, :]
        for half in gl.static_range(2):
            queries = gl.load(q + head * q_head + at + half * _HALF, mask=(steps < count)[:, None], other=0.0)
            own_q.index(half).store(queries)
        fence_async_shared()
        # Queries beyond the count see what the last one sees.
        position = first + gl.minimum(gl.arange(0, _GROUP_M, gl.SliceLayout(1, SCORES)), count - 1)
        best = gl.full([_GROUP_M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        weight = gl.zeros([_GROUP_M], gl.float32, gl.SliceLayout(1, SCORES))
        left = gl.zeros([_GROUP_M, _HALF], gl.float32, HALF)
        right = gl.zeros([_GROUP_M, _HALF], gl.float32, HALF)

        blocks = (end + BLOCK_N - 1) // BLOCK_N
        # Blocks up to this one are seen whole by all queries; the first is masked all the same, so that there is one.
        whole = gl.maximum(gl.minimum((first + 1) // BLOCK_N, blocks), 1)
        scores = warpgroup_mma_wait(0, deps=(_scores(own_q, k, turn, SCORES, BLOCK_N, STAGES),))
        mbarrier.arrive(k[2].index(turn % STAGES))
        p, _, best, weight = _softmax(scores, best, weight, position, 0, scale, True, SCORES, BLOCK_N)
        p = gl.convert_layout(p.to(values.dtype), gl.DotOperandLayout(0, HALF, 2))
        for block in range(1, whole):
            p, left, right, best, weight = _turn(
                own_q, k, v, turn + block, block * BLOCK_N, p, left, right, best, weight, position, scale,
                False, SCORES, HALF, BLOCK_N, STAGES,
            )  # fmt: skip
        for block in range(whole, blocks):
            p, left, right, best, weight = _turn(
                own_q, k, v, turn + block, block * BLOCK_N, p, left, right, best, weight, position, scale,
                True, SCORES, HALF, BLOCK_N, STAGES,
            )  # fmt: skip

        turn += blocks
        stage = (turn - 1) % STAGES
        mbarrier.wait(values_full.index(stage), ((turn - 1) // STAGES) & 1)
        if end % BLOCK_N > 0:
            # What lies behind the last key may be NaN, and 0 * NaN is NaN. Both groups write the same.
            real = (gl.arange(0, BLOCK_N, gl.SliceLayout(1, LOADED)) < end % BLOCK_N)[:, None]
            for half in gl.static_range(2):
                last = values.index(2 * stage + half)
                last.store(gl.where(real, last.load(LOADED), 0.0).to(values.dtype))
            fence_async_shared()
        left = warpgroup_mma(p, values.index(2 * stage), left, is_async=True)
        right = warpgroup_mma(p, values.index(2 * stage + 1), right, is_async=True)
        left, right = warpgroup_mma_wait(0, deps=(left, right))
        mbarrier.arrive(values_read.index(stage))

        share = gl.convert_layout(1.0 / weight, gl.SliceLayout(1, HALF))[:, None]
        steps = gl.arange(0, _GROUP_M, gl.SliceLayout(1, HALF))
        at = (token + steps).to(gl.int64)[:, None] * out_token + gl.arange(0, _HALF, gl.SliceLayout(0, HALF))[None, :]
        at_out = out + head * out_head + at
        here = (steps < count)[:, None]
        gl.store(at_out, (left * share).to(out.dtype.element_ty), mask=here)
        gl.store(at_out + _HALF, (right * share).to(out.dtype.element_ty), mask=here)


@gluon.jit
def _turn(
    own_q,
    k,
    v,
    turn,
    start,
    p,
    left,
    right,
    best,
    weight,
    position,
    scale,
    MASKED: gl.constexpr,
    SCORES: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The softmax of a block, whose keys begin at start, beside the product of the block before with its p."""
    values, values_full, values_read = v
    before = (turn - 1) % STAGES
    scores = _scores(own_q, k, turn, SCORES, BLOCK_N, STAGES)
    mbarrier.wait(values_full.index(before), ((turn - 1) // STAGES) & 1)
    left = warpgroup_mma(p, values.index(2 * before), left, is_async=True)
    right = warpgroup_mma(p, values.index(2 * before + 1), right, is_async=True)
    scores = warpgroup_mma_wait(2, deps=(scores,))
    mbarrier.arrive(k[2].index(turn % STAGES))
    p, fade, best, weight = _softmax(scores, best, weight, position, start, scale, MASKED, SCORES, BLOCK_N)
    left, right = warpgroup_mma_wait(0, deps=(left, right))
    mbarrier.arrive(values_read.index(before))
    fade = gl.convert_layout(fade, gl.SliceLayout(1, HALF))[:, None]
    p = gl.convert_layout(p.to(values.dtype), gl.DotOperandLayout(0, HALF, 2))
    return p, left * fade, right * fade, best, weight


@gluon.jit
def _scores(own_q, k, turn, SCORES: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Begins the product of the queries with a block of keys."""
    keys, full, _ = k
    stage = turn % STAGES
    mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
    scores = gl.zeros([_GROUP_M, BLOCK_N], gl.float32, SCORES)
    left = keys.index(2 * stage).permute((1, 0))
    right = keys.index(2 * stage + 1).permute((1, 0))
    scores = warpgroup_mma(own_q.index(0), left, scores, use_acc=False, is_async=True)
    return warpgroup_mma(own_q.index(1), right, scores, is_async=True)


@gluon.jit
def _softmax(
    scores, best, weight, position, start, scale, MASKED: gl.constexpr, SCORES: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Of a block, with what was seen before: (weights, factor of earlier sums, greatest score, sum of weights)."""
    if MASKED:
        key = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_best = gl.maximum(best, gl.max(scores, 1) * scale)
    fade = gl.exp2(best - new_best)
    p = gl.exp2(scores * scale - new_best[:, None])
    return p, fade, new_best, weight * fade + gl.sum(p, 1)
