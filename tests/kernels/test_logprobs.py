"""Logprobs: values worked out by hand, the order of the likeliest, and slices that change nothing."""

import math

import pytest
import torch

from kernels.logprobs import SLICE, hidden_logprobs, token_logprobs


def test_values_by_hand():
    """Shares of 1/8, 1/2, 0, 1/4 and 1/8, shifted by constants that the softmax does not see."""
    shares = torch.tensor([[0.125, 0.5, 0.0, 0.25, 0.125]] * 3)
    logits = shares.log() + torch.tensor([[0.0], [1000.0], [-1000.0]])
    records = token_logprobs(logits, torch.tensor([3, 2, 1]), 3)
    values = records.view(torch.float32)
    half = math.log(0.5)
    assert values[:, 0].tolist() == pytest.approx([2 * half, -math.inf, half], abs=1e-4)
    assert records[:, 1:5:2].tolist() == [[1, 3]] * 3
    assert set(records[:, 5].tolist()) <= {0, 4}  # they are equally likely
    for row in values[:, 2::2].tolist():
        assert row == pytest.approx([half, 2 * half, 3 * half], abs=1e-4)
    assert token_logprobs(logits, torch.tensor([3, 2, 1], dtype=torch.int32), 0).tolist() == records[:, :1].tolist()


def test_slices_change_nothing():
    torch.manual_seed(0)
    count = 2 * SLICE + 3
    hidden, weight, tokens = torch.randn(count, 8), torch.randn(30, 8), torch.randint(30, (count,))
    seen = []

    def to_logits(part):
        seen.append(len(part))
        return part @ weight.T

    records = hidden_logprobs(hidden, tokens, 2, to_logits)
    assert seen == [SLICE, SLICE, 3]
    expected = (hidden.double() @ weight.double().T).log_softmax(-1)
    values = records.view(torch.float32)
    torch.testing.assert_close(values[:, 0].double(), expected[torch.arange(count), tokens], atol=1e-5, rtol=0)
    best, ids = expected.topk(2)
    assert torch.equal(records[:, 1::2].long(), ids)
    torch.testing.assert_close(values[:, 2::2].double(), best, atol=1e-5, rtol=0)
