"""Prefill attention for Hopper GPUs, in Gluon: Triton's language with layouts, barriers and roles of warps written out.

What `prefill_attention` computes, the way of FlashAttention-3 (Shah et al., 2024). One warp does nothing but have keys
and values copied, page by page, into a ring of blocks in shared memory. Two groups of four warps each attend 64 queries
of a tile to them: while one group is at its softmax, the other's products fill the tensor cores. The product with the
values of one block is begun before the softmax of the next one's scores, too; but ptxas, which Triton 3.6.0 and 3.7.1
bring along, puts the exponentials behind the wait for it. Each multiprocessor runs one program, which has the first
blocks of its next tile copied while it ends one; the tiles, longest first, are drawn by the program that is free next.

Gluon has no interpreter: without a GPU the tests compile this, and run it in plain Python with threads for warps. Its
twin is `prefill_attention`'s own kernel, which takes what this one does not (`serves`).
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
_BLOCK_N = gl.constexpr(128)
_STAGES = gl.constexpr(2)
_GROUP_M = gl.constexpr(BLOCK_M // 2)
# A row of a copy has 128 bytes at most, the width of the swizzle: heads lie in shared memory as two halves.
_HALF = gl.constexpr(_HEAD_DIM // 2)
# Layouts: of a group's scores, of one half of its results, and of what is loaded, 16 bytes a thread.
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N.value, 16]))
_OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF.value, 16]))
_LOADED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Of one integer: in shared memory, in the copying warp, and in a group of warps.
_KEPT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_OF_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
_OF_GROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


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
        and 8 <= page_size <= _BLOCK_N.value
        and kv_cache.permute(0, 2, 3, 1, 4).is_contiguous()
        and kv_cache.data_ptr() % 16 == 0
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
):
    units = gl.load(num_tiles) * HEADS
    if gl.program_id(0) >= units:
        return
    # Queries, and blocks of keys and of values: two halves each.
    first_q = gl.allocate_shared_memory(kv.dtype, [2, _GROUP_M, _HALF], kv.layout)
    second_q = gl.allocate_shared_memory(kv.dtype, [2, _GROUP_M, _HALF], kv.layout)
    k = _ring(gl.allocate_shared_memory(kv.dtype, [2 * _STAGES, _BLOCK_N, _HALF], kv.layout))
    v = _ring(gl.allocate_shared_memory(kv.dtype, [2 * _STAGES, _BLOCK_N, _HALF], kv.layout))
    # No more units are copied ahead than there is room for blocks, since each has one at least.
    drawn = _ring(gl.allocate_shared_memory(gl.int32, [_STAGES, 1], _KEPT))
    fence_async_shared()
    q, out = (q, Q_TOKEN, Q_HEAD), (out, OUT_TOKEN, OUT_HEAD)
    gl.warp_specialize(
        [
            (_attend, (0, first_q, q, out, tiles, units, scale, drawn, k, v, HEADS)),
            (_attend, (1, second_q, q, out, tiles, units, scale, drawn, k, v, HEADS)),
            (_copy, (kv, tiles, units, num_tiles + 1, table, table_stride, drawn, k, v, HEADS, KV_HEADS, PAGE)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _ring(places):
    """What is handed to the groups in shared memory; of each place the barriers "full" and "read by both groups"."""
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(read.index(stage), count=2)
    return places, full, read


@gluon.jit
def _draw(counter, units):
    """The next unit, a tile of a head, that no program has; from `units` on there is none.

    A program begins with the unit of its number, and draws once after each of its units. So the draws of a launch are
    as many as its units, and the last of them leaves the counter as the first one found it.
    """
    # Nothing else is told by the counter, so that its order among other accesses does not matter.
    draw = gl.atomic_add(counter, 1, sem="relaxed")
    if draw == units - 1:
        gl.store(counter, 0)
    return gl.num_programs(0) + draw


@gluon.jit
def _hand_over(drawn, turn, unit):
    """Tells both groups their next unit."""
    units, full, read = drawn
    stage = turn % _STAGES
    mbarrier.wait(read.index(stage), (turn // _STAGES + 1) & 1)
    # No fence: warps store and load it themselves, and barriers order that; fences are for copies and products.
    units.index(stage).store(gl.full([1], unit, gl.int32, _OF_WARP))
    mbarrier.arrive(full.index(stage))


@gluon.jit
def _receive(drawn, turn):
    """The next unit, once it is handed over."""
    units, full, read = drawn
    stage = turn % _STAGES
    mbarrier.wait(full.index(stage), (turn // _STAGES) & 1)
    unit = gl.max(units.index(stage).load(_OF_GROUP), 0)
    mbarrier.arrive(read.index(stage))
    return unit


@gluon.jit
def _copy(
    kv,
    tiles,
    units,
    counter,
    table,
    table_stride,
    drawn,
    k,
    v,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
):
    """The copying warp: all blocks of all tiles, as soon as there is room."""
    unit = gl.program_id(0)
    done = 0
    turn = 0
    while unit < units:
        tile = unit // HEADS
        kv_head = unit % HEADS // (HEADS // KV_HEADS)
        row = gl.load(tiles + 4 * tile + 1)
        end = gl.load(tiles + 4 * tile + 2) + gl.load(tiles + 4 * tile + 3)
        pages = table + row.to(gl.int64) * table_stride
        for start in range(0, end, _BLOCK_N):
            _copy_block(kv, pages, start, end, kv_head, k, turn, KV_HEADS, PAGE)
            _copy_block(kv, pages, start, end, KV_HEADS + kv_head, v, turn, KV_HEADS, PAGE)
            turn += 1
        unit = _draw(counter, units)
        _hand_over(drawn, done, unit)
        done += 1


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
):
    """A block of keys or values from start on; what is copied behind the end, of page 0, is masked where it is used."""
    blocks, full, read = ring
    stage = turn % _STAGES
    mbarrier.wait(read.index(stage), (turn // _STAGES + 1) & 1)
    mbarrier.expect(full.index(stage), 2 * _BLOCK_N * _HALF * 2)  # bytes: two halves, 16 bits each
    for i in gl.static_range(_BLOCK_N // PAGE):
        page = gl.load(pages + start // PAGE + i, mask=start + i * PAGE < end, other=0)
        line = (page * (2 * KV_HEADS) + head) * PAGE
        for half in gl.static_range(2):
            block = blocks.index(2 * stage + half)
            part = block._reinterpret(blocks.dtype, [_BLOCK_N // PAGE, PAGE, _HALF], blocks.layout).index(i)
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
    drawn,
    k,
    v,
    HEADS: gl.constexpr,
):
    """A group of warps: its half of the queries of all tiles."""
    q, q_token, q_head = q
    out, out_token, out_head = out
    values, values_full, values_read = v
    unit = gl.program_id(0)
    done = 0
    turn = 0
    while unit < units:
        tile, head = unit // HEADS, unit % HEADS
        token = gl.load(tiles + 4 * tile) + GROUP_OF_WARPS * _GROUP_M
        first = gl.load(tiles + 4 * tile + 2) + GROUP_OF_WARPS * _GROUP_M
        count = gl.load(tiles + 4 * tile + 3) - GROUP_OF_WARPS * _GROUP_M  # not positive: none of the queries is stored
        end = first + count
        steps = gl.arange(0, _GROUP_M, gl.SliceLayout(1, _LOADED))
        at = (token + steps).to(gl.int64)[:, None] * q_token + gl.arange(0, _HALF, gl.SliceLayout(0, _LOADED))[None, :]
        for half in gl.static_range(2):
            queries = gl.load(q + head * q_head + at + half * _HALF, mask=(steps < count)[:, None], other=0.0)
            own_q.index(half).store(queries)
        fence_async_shared()
        # Queries beyond the count see what the last one sees.
        position = first + gl.minimum(gl.arange(0, _GROUP_M, gl.SliceLayout(1, _SCORES)), count - 1)
        best = gl.full([_GROUP_M], float("-inf"), gl.float32, gl.SliceLayout(1, _SCORES))
        weight = gl.zeros([_GROUP_M], gl.float32, gl.SliceLayout(1, _SCORES))
        left = gl.zeros([_GROUP_M, _HALF], gl.float32, _OUT)
        right = gl.zeros([_GROUP_M, _HALF], gl.float32, _OUT)

        blocks = (end + _BLOCK_N - 1) // _BLOCK_N
        # Blocks up to this one are seen whole by all queries; the first is masked all the same, so that there is one.
        whole = gl.maximum(gl.minimum((first + 1) // _BLOCK_N, blocks), 1)
        scores = warpgroup_mma_wait(0, deps=(_scores(own_q, k, turn),))
        mbarrier.arrive(k[2].index(turn % _STAGES))
        p, _, best, weight = _softmax(scores, best, weight, position, 0, scale, True)
        p = gl.convert_layout(p.to(values.dtype), gl.DotOperandLayout(0, _OUT, 2))
        for block in range(1, whole):
            p, left, right, best, weight = _turn(
                own_q, k, v, turn + block, block * _BLOCK_N, p, left, right, best, weight, position, scale, False
            )
        for block in range(whole, blocks):
            p, left, right, best, weight = _turn(
                own_q, k, v, turn + block, block * _BLOCK_N, p, left, right, best, weight, position, scale, True
            )

        turn += blocks
        stage = (turn - 1) % _STAGES
        mbarrier.wait(values_full.index(stage), ((turn - 1) // _STAGES) & 1)
        if end % _BLOCK_N > 0:
            # What lies behind the last key may be NaN, and 0 * NaN is NaN. Both groups write the same, real
            # values as they were: neither minds when the other does.
            real = (gl.arange(0, _BLOCK_N, gl.SliceLayout(1, _LOADED)) < end % _BLOCK_N)[:, None]
            for half in gl.static_range(2):
                last = values.index(2 * stage + half)
                last.store(gl.where(real, last.load(_LOADED), 0.0).to(values.dtype))
            fence_async_shared()
        left = warpgroup_mma(p, values.index(2 * stage), left, is_async=True)
        right = warpgroup_mma(p, values.index(2 * stage + 1), right, is_async=True)
        left, right = warpgroup_mma_wait(0, deps=(left, right))
        mbarrier.arrive(values_read.index(stage))

        share = gl.convert_layout(1.0 / weight, gl.SliceLayout(1, _OUT))[:, None]
        steps = gl.arange(0, _GROUP_M, gl.SliceLayout(1, _OUT))
        at = (token + steps).to(gl.int64)[:, None] * out_token + gl.arange(0, _HALF, gl.SliceLayout(0, _OUT))[None, :]
        at_out = out + head * out_head + at
        here = (steps < count)[:, None]
        gl.store(at_out, (left * share).to(out.dtype.element_ty), mask=here)
        gl.store(at_out + _HALF, (right * share).to(out.dtype.element_ty), mask=here)
        unit = _receive(drawn, done)
        done += 1


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
):
    """The softmax of a block, whose keys begin at start, and the product of the block before with its p."""
    values, values_full, values_read = v
    before = (turn - 1) % _STAGES
    scores = _scores(own_q, k, turn)
    mbarrier.wait(values_full.index(before), ((turn - 1) // _STAGES) & 1)
    left = warpgroup_mma(p, values.index(2 * before), left, is_async=True)
    right = warpgroup_mma(p, values.index(2 * before + 1), right, is_async=True)
    scores = warpgroup_mma_wait(2, deps=(scores,))
    mbarrier.arrive(k[2].index(turn % _STAGES))
    p, fade, best, weight = _softmax(scores, best, weight, position, start, scale, MASKED)
    left, right = warpgroup_mma_wait(0, deps=(left, right))
    mbarrier.arrive(values_read.index(before))
    fade = gl.convert_layout(fade, gl.SliceLayout(1, _OUT))[:, None]
    p = gl.convert_layout(p.to(values.dtype), gl.DotOperandLayout(0, _OUT, 2))
    return p, left * fade, right * fade, best, weight


@gluon.jit
def _scores(own_q, k, turn):
    """Begins the product of the queries with a block of keys."""
    keys, full, _ = k
    stage = turn % _STAGES
    mbarrier.wait(full.index(stage), (turn // _STAGES) & 1)
    scores = gl.zeros([_GROUP_M, _BLOCK_N], gl.float32, _SCORES)
    left = keys.index(2 * stage).permute((1, 0))
    right = keys.index(2 * stage + 1).permute((1, 0))
    scores = warpgroup_mma(own_q.index(0), left, scores, use_acc=False, is_async=True)
    return warpgroup_mma(own_q.index(1), right, scores, is_async=True)


@gluon.jit
def _softmax(scores, best, weight, position, start, scale, MASKED: gl.constexpr):
    """Of a block, with what was seen before: (weights, factor of earlier sums, greatest score, sum of weights)."""
    if MASKED:
        key = start + gl.arange(0, _BLOCK_N, gl.SliceLayout(0, _SCORES))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_best = gl.maximum(best, gl.max(scores, 1) * scale)
    fade = gl.exp2(best - new_best)
    p = gl.exp2(scores * scale - new_best[:, None])
    return p, fade, new_best, weight * fade + gl.sum(p, 1)
