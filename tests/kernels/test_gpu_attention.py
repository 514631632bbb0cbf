"""Triton attention against attention written out for each query in float64; on a CUDA device also at larger shapes."""

import random

import pytest
import torch

import kernels.attention
from kernels.attention import Query
from kernels.gpu.decode_attention import DecodeConfig, DecodePlan, decode_attention, decode_config, plan_decode
from kernels.gpu.hopper_attention import BLOCK_M, serves
from kernels.gpu.prefill_attention import PrefillConfig, max_tiles, prefill_attention, prefill_config, prefill_tiles

CUDA = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Splits of 16 keys, so that few keys already make several.
FINE = DecodeConfig(block_n=16, num_warps=4, num_stages=3, programs_per_processor=1, units_per_program=1, min_chunk=16)
SMALL = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)


class Pool:
    """Sequences of random K and V in the pages of a pool whose every other slot is NaN.

    Page p of head h is one contiguous piece; the tensor is a permuted view of that, as an engine holds it.
    """

    def __init__(self, lengths, *, kv_heads, head_dim, page, dtype, device, permuted=True):
        torch.manual_seed(0)
        per_row = [-(-length // page) for length in lengths]
        pages = list(range(sum(per_row) + 3))
        random.Random(0).shuffle(pages)
        shape = (len(pages), 2, kv_heads, page, head_dim)
        cache = torch.full(shape, torch.nan, dtype=dtype).permute(0, 3, 1, 2, 4)
        self.cache = cache if permuted else cache.contiguous()
        self.table = torch.full((len(lengths), max(per_row) + 2), pages.pop(), dtype=torch.int32)
        for row, (length, count) in enumerate(zip(lengths, per_row, strict=True)):
            for slot in range(count):
                self.table[row, slot] = pages.pop()
            at = torch.arange(length)
            self.cache[self.table[row, at // page].long(), at % page] = torch.randn(length, 2, kv_heads, head_dim).to(
                dtype
            )
        self.page = page
        cache = self.cache
        self.device_cache = torch.empty_strided(cache.shape, cache.stride(), dtype=dtype, device=device).copy_(cache)
        self.device_table = self.table.to(device)

    def exact(self, q, row, position, window, scale):
        """Attention of one query (heads, head_dim), in float64."""
        first = 0 if window is None else max(0, position - window + 1)
        at = torch.arange(first, position + 1, device=q.device)
        kv = self.device_cache[self.device_table[row, at // self.page].long(), at % self.page].double()
        k, v = kv.unbind(1)  # (S, kv_heads, head_dim) each
        grouped = q.double().unflatten(0, (k.shape[1], -1))
        scores = torch.einsum("kgd,skd->kgs", grouped, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        return torch.einsum("kgs,skd->kgd", torch.softmax(scores, 2), v).flatten(0, 1)


def fused(tokens, heads, kv_heads, head_dim, dtype):
    """The queries as the first heads of a fused (tokens, heads + 2 * kv_heads, head_dim) product."""
    return torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)[:, :heads]


def on(device, view):
    """A copy on the device with the same strides."""
    return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=device).copy_(view)


def check_decode(
    device,
    lengths,
    *,
    group=7,
    kv_heads=2,
    head_dim=64,
    page=16,
    dtype=torch.float32,
    window=None,
    plan_window=None,
    scale=None,
    config=FINE,
    programs=5,
    padding=2,
    permuted=True,
):
    pool = Pool(lengths, kv_heads=kv_heads, head_dim=head_dim, page=page, dtype=dtype, device=device, permuted=permuted)
    heads, count = group * kv_heads, len(lengths)
    q = on(device, fused(count + padding, heads, kv_heads, head_dim, dtype))
    rows = torch.tensor(random.Random(1).sample(range(count), count) + [0] * padding, dtype=torch.int32)
    positions = torch.tensor([lengths[row] - 1 for row in rows[:count]] + [10**6] * padding, dtype=torch.int32)
    plan = DecodePlan.allocate(
        count + padding,
        heads,
        kv_heads,
        head_dim,
        dtype,
        device,
        window=plan_window,
        programs=programs,
        config=config,
    )
    plan_decode(plan, rows.to(device), positions.to(device), torch.tensor([count], dtype=torch.int32, device=device))
    results = []
    for _ in range(2):
        out = torch.full((count + padding, heads, head_dim), 7.0, dtype=dtype, device=device)
        decode_attention(q, pool.device_cache, pool.device_table, plan, out, window=window, scale=scale)
        assert not plan.arrivals.any()
        results.append(out.cpu())
    assert torch.equal(*results)
    assert (results[0][count:] == 7).all()
    expected = [pool.exact(q[i], int(rows[i]), int(positions[i]), window, scale).cpu() for i in range(count)]
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(results[0][:count].double(), torch.stack(expected), rtol=tolerance, atol=tolerance)
    return plan


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 4, 7, 16])
def test_decode_packs_the_heads_of_a_group(device, dtype, group):
    check_decode(device, [1, 37], group=group, dtype=dtype)


@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_decode_head_dims(device, head_dim):
    check_decode(device, [35], group=3, kv_heads=1, head_dim=head_dim)


@pytest.mark.parametrize("page", [1, 4, 16, 64])
def test_decode_page_sizes_and_lengths_around_borders(device, page):
    plan = check_decode(device, [1, 15, 16, 17, 31, 32, 33, 70], group=2, kv_heads=1, page=page, programs=32)
    assert plan.header.tolist() == [1 + 1 + 1 + 2 + 2 + 2 + 3 + 5, 16]


@pytest.mark.parametrize(("window", "plan_window"), [(1, None), (20, None), (20, 20), (33, 33), (1000, 1000)])
def test_decode_windows(device, window, plan_window):
    check_decode(device, [1, 19, 20, 21, 70], group=2, kv_heads=1, window=window, plan_window=plan_window, programs=32)


def test_decode_merges_splits_that_lie_before_the_window(device):
    # Four splits of 16 heads of 64 are merged at once: the first four of nine have seen nothing.
    check_decode(device, [144], group=16, kv_heads=1, window=20, programs=32)


def test_a_plan_for_a_window_splits_what_the_window_shows(device):
    plan = check_decode(device, [90, 5], group=1, kv_heads=1, window=32, plan_window=32, programs=32)
    assert plan.header.tolist() == [3, 16]


def test_a_plan_for_a_window_serves_no_other(device):
    with pytest.raises(ValueError, match="window 8, not None"):
        check_decode(device, [3], plan_window=8)


def test_decode_splits_share_the_work_out(device):
    # 64 + 32 keys of 2 KV heads for 6 programs: 32 keys each.
    plan = check_decode(device, [64, 32], group=1, programs=6)
    assert plan.header.tolist() == [3, 32]
    listed = [tuple(item[:2]) for item in plan.items[:3].tolist()]
    lengths = [item[3] + 1 for item in plan.items[:3].tolist()]
    assert sorted(zip(lengths, (split for _, split in listed), strict=True)) == [(32, 0), (64, 0), (64, 1)]


def test_decode_with_fewer_programs_than_units_and_more(device):
    for programs in (1, 40):
        check_decode(device, [50, 3, 33], group=2, programs=programs)


def test_decode_merges_more_splits_than_it_loads_at_once(device):
    # Four splits of 16 heads of 64, and seven or nine are merged.
    check_decode(device, [100, 144], group=16, kv_heads=1, programs=32)


def test_decode_of_no_query_and_of_all(device):
    plan = DecodePlan.allocate(2, 2, 1, 64, torch.float32, device, programs=3, config=FINE)
    pool = Pool([5], kv_heads=1, head_dim=64, page=16, dtype=torch.float32, device=device)
    ints = torch.zeros(2, dtype=torch.int32, device=device)
    plan_decode(plan, ints, ints, ints[:1])
    out = torch.full((2, 2, 64), 7.0, device=device)
    decode_attention(torch.zeros_like(out), pool.device_cache, pool.device_table, plan, out)
    assert (out == 7).all()
    check_decode(device, [5, 18], padding=0)


def test_decode_scale_and_contiguous_pool(device):
    check_decode(device, [40], scale=0.3, permuted=False)


def test_decode_refuses_what_does_not_fit_the_plan(device):
    with pytest.raises(ValueError, match="at most 16"):
        DecodePlan.allocate(1, 17, 1, 64, torch.float32, device)
    plan = DecodePlan.allocate(1, 2, 1, 64, torch.float32, device)
    q = torch.zeros(1, 2, 32, device=device)
    with pytest.raises(ValueError, match="do not fit the plan"):
        decode_attention(q, torch.zeros(1, 16, 2, 1, 32, device=device), q, plan, q)
    ints = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="2 rows"):
        plan_decode(plan, ints, ints, ints)


def check_prefill(
    device,
    shapes,
    *,
    group=2,
    kv_heads=1,
    head_dim=64,
    page=16,
    dtype=torch.float32,
    window=None,
    config=SMALL,
    programs=3,
    padding=2,
    twin=False,
):
    """shapes: (start, length) of the chunk of each row; the pool holds start + length keys of it."""
    lengths = [start + length for start, length in shapes]
    pool = Pool(lengths, kv_heads=kv_heads, head_dim=head_dim, page=page, dtype=dtype, device=device)
    heads, count = group * kv_heads, sum(length for _, length in shapes)
    q = on(device, fused(count + padding, heads, kv_heads, head_dim, dtype))
    queries, first = [], 0
    for row, (start, length) in enumerate(shapes):
        queries.append((first, row, start, length))
        first += length
    block_m = (config or prefill_config(head_dim, dtype)).block_m
    tiles = prefill_tiles(queries, block_m)
    room = max_tiles(count, len(shapes), block_m)
    assert len(tiles) <= room
    device_tiles = torch.zeros(room + 1, 4, dtype=torch.int32, device=device)
    device_tiles[: len(tiles)] = torch.from_numpy(tiles)
    num_tiles = torch.tensor([len(tiles), 0], dtype=torch.int32, device=device)
    out = torch.full((count + padding, heads, head_dim), 7.0, dtype=dtype, device=device)
    options = {"window": window, "programs": programs, "config": config}
    prefill_attention(q, pool.device_cache, pool.device_table, device_tiles, num_tiles, out, **options)
    assert num_tiles.tolist() == [len(tiles), 0]
    out = out.cpu()
    assert (out[count:] == 7).all()
    if twin:
        of_rows = [Query(row, start, length) for _, row, start, length in queries]
        plan = kernels.attention.plan_attention(
            of_rows, pool.table, page_size=page, group=group, dtype=dtype, windows=(window,)
        )
        expected = kernels.attention.paged_attention(q[:count].cpu(), pool.cache, plan, window=window)
    else:
        at = [(row, start + step) for row, (start, length) in enumerate(shapes) for step in range(length)]
        expected = torch.stack([pool.exact(q[i], *one, window, None).cpu() for i, one in enumerate(at)])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out[:count].double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_of_several_sequences_with_and_without_a_prefix(device, dtype):
    check_prefill(device, [(0, 1), (0, 16), (33, 18), (0, 47), (50, 1)], dtype=dtype)


@pytest.mark.parametrize("start", [0, 1, 15, 16, 31])
def test_prefill_around_borders(device, start):
    check_prefill(device, [(start, 15), (start, 17), (0, start + 1)], group=1)


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 2), (4, 1), (7, 1), (16, 1)])
def test_prefill_groups(device, group, kv_heads):
    check_prefill(device, [(5, 20)], group=group, kv_heads=kv_heads)


@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_prefill_head_dims(device, head_dim):
    check_prefill(device, [(20, 17)], head_dim=head_dim)


@pytest.mark.parametrize("page", [1, 4, 64])
def test_prefill_page_sizes(device, page):
    check_prefill(device, [(20, 17), (0, 66)], group=1, page=page)


@pytest.mark.parametrize("window", [1, 7, 16, 20, 40, 1000])
def test_prefill_windows(device, window):
    check_prefill(device, [(0, 37), (37, 20), (3, 2)], group=1, window=window)


@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32)])
@pytest.mark.parametrize("window", [None, 18])
def test_prefill_block_shapes(device, block_m, block_n, window):
    config = PrefillConfig(block_m=block_m, block_n=block_n, num_warps=4, num_stages=2)
    check_prefill(device, [(0, 33), (40, 35)], group=1, config=config, window=window)


@pytest.mark.parametrize("window", [None, 9])
def test_prefill_agrees_with_its_twin(device, window):
    check_prefill(device, [(0, 21), (30, 5)], kv_heads=2, window=window, twin=True)


def test_decode_agrees_with_its_twin(device):
    lengths, page, group = [18, 33], 16, 3
    pool = Pool(lengths, kv_heads=2, head_dim=64, page=page, dtype=torch.float32, device=device)
    q = torch.randn(2, group * 2, 64)
    queries = [Query(row, length - 1, 1) for row, length in enumerate(lengths)]
    twin = kernels.attention.plan_attention(queries, pool.table, page_size=page, group=group, dtype=torch.float32)
    plan = DecodePlan.allocate(2, group * 2, 2, 64, torch.float32, device, programs=7, config=FINE)
    ints = torch.tensor([[0, 1], [17, 32], [2, 0]], dtype=torch.int32, device=device)
    plan_decode(plan, ints[0], ints[1], ints[2, :1])
    out = torch.empty_like(q, device=device)
    decode_attention(q.to(device), pool.device_cache, pool.device_table, plan, out)
    expected = kernels.attention.paged_attention(q, pool.cache, twin)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_tiles_cover_each_query_once_and_the_longest_context_comes_first():
    tiles = prefill_tiles([(10, 3, 100, 130), (0, 1, 0, 5), (5, 2, 400, 5)], 64)
    assert tiles.tolist() == [[5, 2, 400, 5], [138, 3, 228, 2], [74, 3, 164, 64], [10, 3, 100, 64], [0, 1, 0, 5]]
    assert prefill_tiles([], 64).shape == (0, 4)


def test_room_for_tiles_is_what_the_worst_chunks_need():
    # 130 tokens in two chunks: 129 + 1 make 3 + 1 tiles of 64, and nothing makes five.
    assert max_tiles(130, 2, 64) == 4
    worst = max(len(prefill_tiles([(0, 0, 0, a), (a, 1, 0, 130 - a)], 64)) for a in range(1, 130))
    assert worst == 4


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="there is no CUDA device")
@pytest.mark.parametrize(
    ("head_dim", "group", "page", "dtype"),
    [
        (128, 7, 16, BF16),
        (64, 7, 1, BF16),
        (96, 1, 128, BF16),
        (256, 8, 64, BF16),
        (128, 4, 16, FP16),
        (128, 4, 16, FP32),
    ],
)
def test_served_shapes(device, head_dim, group, page, dtype):
    draw = random.Random(2)
    served = {"head_dim": head_dim, "group": group, "kv_heads": 4, "page": page, "dtype": dtype}
    config = decode_config(head_dim, dtype)
    for lengths in ([5000], [draw.randint(1, 1500) for _ in range(200)], [4999, 1, 64, 65, 2048, 700]):
        check_decode(device, lengths, config=config, programs=None, **served)
    check_decode(device, [3000, 40, 900], config=config, programs=None, window=512, plan_window=512, **served)
    config = prefill_config(head_dim, dtype)
    for window in (None, 300):
        shapes = [(0, 300), (1000, 257), (0, 1), (4000, 130)]
        check_prefill(device, shapes, config=config, programs=40, window=window, **served)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA or torch.cuda.get_device_capability() != (9, 0), reason="there is no Hopper GPU")
@pytest.mark.parametrize(
    ("group", "kv_heads", "page", "dtype"), [(7, 4, 16, BF16), (1, 3, 8, BF16), (4, 2, 128, FP16), (16, 1, 64, FP16)]
)
def test_hopper_prefill(device, group, kv_heads, page, dtype):
    """Chunks that end in each half of a tile and of a block, some before a border and some behind it."""
    cache = Pool([1], kv_heads=kv_heads, head_dim=128, page=page, dtype=dtype, device=device).device_cache
    assert serves(torch.empty(1, group * kv_heads, 128, dtype=dtype, device=device), cache, None)
    assert prefill_config(128, dtype).block_m == BLOCK_M
    served = {"group": group, "kv_heads": kv_heads, "head_dim": 128, "page": page, "dtype": dtype, "config": None}
    for shapes in (
        [(0, 300), (1000, 257), (0, 1), (4000, 130), (127, 1), (128, 1)],
        [(0, 64), (0, 65), (1, 127), (64, 63), (127, 129), (56, 200), (200, 56)],
    ):
        check_prefill(device, shapes, **served)
