"""Triton attention against attention written out for each query in float64; on a CUDA device also at larger shapes."""

import random

import pytest
import torch

import kernels.attention
from kernels.attention import Query
from kernels.gpu.decode_attention import DecodeConfig, DecodePlan, decode_attention, decode_config, plan_decode

CUDA = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Splits of 16 keys, so that few keys already make several.
FINE = DecodeConfig(block_n=16, num_warps=4, num_stages=3, programs_per_processor=1, units_per_program=1, min_chunk=16)


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
        at = torch.arange(0 if window is None else max(0, position - window + 1), position + 1)
        kv = self.cache[self.table[row, at // self.page].long(), at % self.page].double()  # (S, 2, kv_heads, head_dim)
        k, v = kv.repeat_interleave(q.shape[0] // kv.shape[2], 2).unbind(1)
        scores = torch.einsum("hd,shd->hs", q.double(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        return torch.einsum("hs,shd->hd", torch.softmax(scores, 1), v)


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
    q = fused(count + padding, heads, kv_heads, head_dim, dtype)
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
        decode_attention(on(device, q), pool.device_cache, pool.device_table, plan, out, window=window, scale=scale)
        assert not plan.arrivals.any()
        results.append(out.cpu())
    assert torch.equal(*results)
    assert (results[0][count:] == 7).all()
    expected = [pool.exact(q[i], int(rows[i]), int(positions[i]), window, scale) for i in range(count)]
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
