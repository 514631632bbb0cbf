"""The layers' Triton kernels against plain torch in float64, and against their twins."""

import pytest
import torch

from kernels.activation import silu_mul
from kernels.gpu import activation, norm, rows
from kernels.gpu.rope import rope_kv, rope_table

EPS = 1e-6


@pytest.mark.parametrize("size", [64, 96, 576])
def test_add_rms_norm(device: str, size: int) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(5, size, device=device), torch.randn(5, size, device=device)
    weight, out = torch.rand(size, device=device) + 0.5, torch.full((5, size), torch.nan, device=device)
    total = x.double() + residual.double()
    norm.add_rms_norm(x, residual, weight, EPS, out)
    expected = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(residual.double(), total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_embed_rms_norm(device: str) -> None:
    torch.manual_seed(0)
    table, weight = torch.randn(11, 80, device=device), torch.rand(80, device=device)
    tokens = torch.tensor([10, 0, 3, 3], dtype=torch.int32, device=device)
    residual, out = torch.empty(4, 80, device=device), torch.empty(4, 80, device=device)
    norm.embed_rms_norm(tokens, table, residual, weight, EPS, out)
    picked = table[tokens.long()].double()
    assert torch.equal(residual.double(), picked)
    expected = picked / (picked.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_silu_mul(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(3, 2 * 1100, device=device) * 3).to(dtype)
    out = torch.empty(3, 1100, dtype=dtype, device=device)
    activation.silu_mul(gate_up, out)
    gate, up = gate_up.double().chunk(2, -1)
    tolerance = 1e-6 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(out.double(), gate * gate.sigmoid() * up, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out, silu_mul(gate_up), rtol=tolerance, atol=0)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(("bias", "normed"), [(True, False), (False, True), (False, False)])
def test_rope_kv(device: str, head_dim: int, bias: bool, normed: bool) -> None:
    torch.manual_seed(0)
    heads, kv_heads, page, pages, tokens = 3, 2, 4, 3, 5
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, device=device)
    offset = torch.randn((heads + 2 * kv_heads) * head_dim, device=device) if bias else None
    gains = [torch.rand(head_dim, device=device) + 0.5 for _ in range(2)] if normed else [None, None]
    positions = torch.tensor([0, 1, 7, 30, 39], dtype=torch.int32, device=device)
    slots = torch.tensor([11, 0, 5, 6, 3], dtype=torch.int32, device=device)
    inv_freq = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    # A page's heads lie together, as the runner has it.
    pool = torch.full((pages, 2, kv_heads, page, head_dim), torch.nan, device=device).permute(0, 3, 1, 2, 4)
    given = qkv.double()
    if offset is not None:
        given = given + offset.double().view(-1, head_dim)
    q, k, v = given.split([heads, kv_heads, kv_heads], 1)
    if normed:
        q, k = (x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * g for x, g in zip((q, k), gains, strict=True))
    angle = positions.double()[:, None] * inv_freq.double()

    def turned(x: torch.Tensor) -> torch.Tensor:
        # Complex multiplication by exp(i angle), halves as real and imaginary parts.
        pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat((pairs.real, pairs.imag), -1)

    table = rope_table(inv_freq, 40, 1.0)
    rope_kv(qkv, positions, slots, table, pool, bias=offset, q_norm=gains[0], k_norm=gains[1], eps=EPS)
    torch.testing.assert_close(qkv[:, :heads].double(), turned(q), rtol=1e-4, atol=1e-4)
    written = pool[slots.long() // page, slots.long() % page].double()
    torch.testing.assert_close(written[:, 0], turned(k), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(written[:, 1], v, rtol=1e-6, atol=1e-6)
    assert pool.isnan().sum() == (pages * page - tokens) * 2 * kv_heads * head_dim


def test_rows_are_written_read_and_appended_to(device: str) -> None:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    state = torch.full((3 * 10 + 3 * 4,), -7, dtype=torch.int32, device=device)
    token_ids, page_table = state[:30].view(3, 10), state[30:].view(3, 4)
    runs = ints(10, 0, 6, 34, 6, 2, 0, 8, 1).view(3, 3)
    rows.write_runs(runs, ints(1, 2, 3, 4, 5, 6, 8, 9, 77), state, longest=6)
    assert token_ids[1].tolist() == [1, 2, 3, 4, 5, 6, -7, -7, -7, -7]
    assert page_table[1].tolist() == [8, 9, -7, -7]
    assert token_ids[0].tolist() == [77] + [-7] * 9
    tokens, slots = ints(0, 0, 0, 0), ints(0, 0, 0, 0)
    at = ints(1, 1, 0, -1), ints(5, 0, 0, 0)
    page_table[0, 0] = 2
    rows.gather_tokens(*at, token_ids, page_table, tokens, slots, page_size=4, padding_slot=999)
    assert tokens.tolist() == [6, 1, 77, 0]
    assert slots.tolist() == [9 * 4 + 1, 8 * 4, 2 * 4, 999]
    rows.append_tokens(ints(1, -1, 0), ints(6, 0, 1), ints(50, 51, 52), token_ids)
    assert token_ids[1].tolist() == [1, 2, 3, 4, 5, 6, 50, -7, -7, -7]
    assert token_ids[0].tolist() == [77, 52] + [-7] * 8
    assert token_ids[2].tolist() == [-7] * 10


def test_rows_of_hidden_states_and_pages_are_copied(device: str) -> None:
    x = torch.arange(4 * 6.0, device=device).view(4, 6)
    out = torch.empty(3, 6, device=device)
    rows.take_rows(x, torch.tensor([3, 0, 3], dtype=torch.int32, device=device), out)
    assert torch.equal(out, x[[3, 0, 3]])
    pool = torch.randn(2, 5, 3, 7, device=device)
    before = pool.clone()
    rows.copy_pages(torch.tensor([[4, 0], [2, 3]], dtype=torch.int32, device=device), pool)
    assert torch.equal(pool, before[:, [4, 1, 2, 2, 4]])


def test_rms_norm(device: str) -> None:
    torch.manual_seed(0)
    x, weight, out = torch.randn(5, 96, device=device), torch.rand(96, device=device), torch.empty(5, 96, device=device)
    norm.rms_norm(x, weight, EPS, out)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
