"""Normalisation, activation and the packed product against their formulas in float64."""

import pytest
import torch

from kernels.activation import silu_mul
from kernels.linear import Linear, padded_rows
from kernels.norm import add_rms_norm, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype):
    """x / sqrt(mean(x^2) + eps) * weight; the residual stream takes the sum."""
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 48).to(dtype), torch.randn(5, 48).to(dtype), torch.rand(48).to(dtype)
    tolerance = {"rtol": 2**-7, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}

    def exact(x):
        x = x.double()
        return (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()).to(dtype)

    torch.testing.assert_close(rms_norm(x, weight, 1e-5), exact(x), **tolerance)
    total = x + residual
    torch.testing.assert_close(add_rms_norm(x, residual, weight, 1e-5), exact(total), **tolerance)
    assert torch.equal(residual, total)


def test_silu_mul():
    """gate * sigmoid(gate) * up."""
    gate_up = torch.randn(7, 20, generator=torch.Generator().manual_seed(0))
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(silu_mul(gate_up).double(), gate / (1 + (-gate).exp()) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 17, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_product(rows, bias):
    """Packing changes the layout of the weight and nothing else, whatever the number of rows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 33, generator=generator)
    add = torch.randn(50, generator=generator) if bias else None
    x = torch.randn(rows, 66, generator=generator)[:, :33]
    linear = Linear(weight.clone(), add)
    expected = (x.double() @ weight.double().T + (add.double() if add is not None else 0)).float()
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        linear.pack()
        torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)


def test_few_numbers_of_rows_are_compiled_for():
    """By hand: 15, 16 and 18 stay, 17 becomes 18, 100 becomes 104, 2,047 becomes 2,048; at most an eighth more."""
    assert [padded_rows(rows) for rows in (0, 1, 15, 16, 17, 18, 100, 2047)] == [0, 1, 15, 16, 18, 18, 104, 2048]
    sizes = [padded_rows(rows) for rows in range(1, 2049)]
    assert len(set(sizes)) <= 16 + 8 * 7
    assert all(rows <= size <= rows * 9 / 8 for rows, size in enumerate(sizes, 1))
