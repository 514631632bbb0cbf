"""Paged attention against attention written out for each query in float64."""

import random

import pytest
import torch

import kernels.attention
from kernels.attention import Query, paged_attention, plan_attention
from kernels.rope import write_kv

PAGE = 16


def exact(q, k, v, position, window):
    """One query (heads, d) over the K and V (S, kv_heads, d) of its sequence."""
    first = 0 if window is None else max(0, position - window + 1)
    k, v = k[first : position + 1].double(), v[first : position + 1].double()
    group = q.shape[0] // k.shape[1]
    out = []
    for head, query in enumerate(q.double()):
        weights = torch.softmax(k[:, head // group] @ query / q.shape[-1] ** 0.5, 0)
        out.append(weights @ v[:, head // group])
    return torch.stack(out)


def check(shapes, *, head_dim=64, group=3, kv_heads=2, window=None, fill=torch.nan, device="cpu"):
    """shapes: (start, length) of each row. Keys before `start` are in the cache, the rest is written now."""
    torch.manual_seed(0)
    draw = random.Random(0)
    pages = list(range(sum(-(-(start + length) // PAGE) for start, length in shapes) + 3))
    draw.shuffle(pages)
    widest = max(-(-(start + length) // PAGE) for start, length in shapes)
    cache = torch.full((len(pages), PAGE, 2, kv_heads, head_dim), fill)
    table = torch.full((len(shapes), widest + 2), pages.pop(), dtype=torch.int32)
    sequences = []
    for row, (start, length) in enumerate(shapes):
        for slot in range(-(-(start + length) // PAGE)):
            table[row, slot] = pages.pop()
        k, v = torch.randn(2, start + length, kv_heads, head_dim)
        slots = table[row, torch.arange(start) // PAGE].long() * PAGE + torch.arange(start) % PAGE
        write_kv(k[:start], v[:start], cache, slots)
        sequences.append((k, v))
    queries = [Query(row, start, length) for row, (start, length) in enumerate(shapes)]
    cache, table = cache.to(device), table.to(device)
    plan = plan_attention(queries, table, page_size=PAGE, group=group, dtype=torch.float32, windows=(None, window))
    new_k = torch.cat([k[start:] for (start, _), (k, _) in zip(shapes, sequences, strict=True)])
    new_v = torch.cat([v[start:] for (start, _), (_, v) in zip(shapes, sequences, strict=True)])
    write_kv(new_k.to(device), new_v.to(device), cache, plan.slots)
    q = torch.randn(len(new_k), group * kv_heads, head_dim)
    out = paged_attention(q.to(device), cache, plan, window=window).cpu()
    expected = [
        exact(q[at], k, v, position, window)
        for at, (k, v, position) in enumerate(
            (k, v, position)
            for (start, length), (k, v) in zip(shapes, sequences, strict=True)
            for position in range(start, start + length)
        )
    ]
    torch.testing.assert_close(out.double(), torch.stack(expected), rtol=1e-4, atol=1e-5)
    return plan


MIXED = [(0, 1), (14, 1), (15, 1), (16, 1), (30, 1), (31, 1), (200, 1), (0, 15), (0, 17), (16, 33), (5, 70), (129, 2)]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 16])
def test_mixed_batch(head_dim, group):
    """Decodes and chunks of any length together, with NaN wherever no row has written."""
    check(MIXED, head_dim=head_dim, group=group, kv_heads=1)


@pytest.mark.parametrize("window", [1, 5, 16, 40, 1000])
def test_window(window):
    """A sliding window, narrower and wider than the contexts."""
    check(MIXED, window=window)


@pytest.mark.parametrize("limit", [1 << 10, 1 << 14])
def test_small_limits(limit, monkeypatch):
    """Tiles, split buckets and masks made on the fly give the same; no mask or gather is larger than the limits say."""
    monkeypatch.setattr(kernels.attention, "_MAX_PAIRS", limit)
    monkeypatch.setattr(kernels.attention, "_MAX_GATHERED", 64)
    monkeypatch.setattr(kernels.attention, "_KEPT_MASK", 100)
    for window in (None, 20):
        plan = check([*MIXED, (0, 300)], window=window)
        assert max(bucket.tokens.shape[1] for bucket in plan.buckets[None]) < 300


def test_buckets_bound_the_waste():
    """256 decodes of lengths 1 to 8,192 make few buckets, and at most double the pages that they need."""
    lengths = [1 + (8191 * i * i) // (255 * 255) for i in range(256)]
    table = torch.zeros(256, 512, dtype=torch.int32)
    queries = [Query(row, length - 1, 1) for row, length in enumerate(lengths)]
    buckets = plan_attention(queries, table, page_size=PAGE, group=3, dtype=torch.float32).buckets[None]
    gathered = sum(bucket.pages.numel() for bucket in buckets)
    needed = sum(max(8, -(-length // PAGE)) for length in lengths)
    assert gathered <= 2 * needed
    assert max(bucket.pages.numel() * PAGE for bucket in buckets) <= 1 << 16
    assert len(buckets) <= 7 + gathered * PAGE / (1 << 15)


def test_a_window_reads_only_its_pages():
    """A row's pages before the window are not gathered."""
    table = torch.zeros(1, 512, dtype=torch.int32)
    plan = plan_attention([Query(0, 8000, 1)], table, page_size=PAGE, group=1, dtype=torch.float32, windows=(100, None))
    assert plan.buckets[100][0].pages.shape[1] <= 8
    assert plan.buckets[None][0].pages.shape[1] == 501


def test_plan_is_for_all_layers():
    """A plan holds nothing that a layer changes."""
    plan = check(MIXED)
    with pytest.raises(AttributeError):
        plan.slots = None
