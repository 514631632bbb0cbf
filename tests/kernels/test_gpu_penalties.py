"""The GPU's bias, penalties and bars against the torch twin to the last bit, transformers, and hand computations."""

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from kernels import sampling as twin
from kernels.gpu.penalties import TABLE_WIDTH, adjust, bar, pack_adjustments

V = 1000
OFF = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0, "prompt_length": 4, "bias": {}, "barred": ()}


def table_of(settings, device):
    table = torch.full((len(settings), TABLE_WIDTH), 77, dtype=torch.int32)
    for row, each in zip(table, settings, strict=True):
        packed = pack_adjustments(**{**OFF, "barred_until": 0, **each})
        row[: len(packed)] = torch.tensor(packed)
    return table.to(device)


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def adjusted(logits, rows, lengths, token_ids, settings):
    """What `adjust` makes of the logits, NaN where it writes nothing; it leaves its counts at zero."""
    device = logits.device
    out = torch.full((len(rows), logits.shape[1]), torch.nan, device=device)
    counts = torch.zeros(len(rows) + 1, logits.shape[1], dtype=torch.int32, device=device)
    ids = token_ids.to(device, torch.int32)
    adjust(logits, ints(rows, device), ints(lengths, device), ids, table_of(settings, device), out, counts)
    assert counts.count_nonzero() == 0
    return out


SETTINGS = [
    {"repetition": 1.05},
    {"repetition": 0.7, "presence": 0.3, "frequency": 0.1, "prompt_length": 700},
    {"presence": -1.1, "bias": {0: 3.3, 5: -100.0, V - 1: 0.1}},
    {"frequency": 1.7, "prompt_length": 8192},
    {"repetition": 1e-5, "frequency": -0.9, "bias": {token: token / 7 for token in range(700)}},
    {"bias": {}},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_equal_the_twins(dtype, device):
    """Histories of one token and of several turns of every program; of one row several samples, beside padding."""
    if dtype is torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter rounds it wrongly")
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, V, (len(SETTINGS), 9000), generator=generator)
    token_ids[1] %= 3  # one token, thousands of times
    samples = [(5, 40), (-1, 0), (0, 1), (0, 9000), (4, 600), (1, 8999), (3, 9000), (-1, 7), (2, 513), (1, 701), (1, 2)]
    rows, lengths = (list(column) for column in zip(*samples, strict=True))
    logits = (4 * torch.randn(len(rows), V + 8, generator=generator)).to(dtype)[:, :V].to(device)
    logits[8, 5], logits[8, 6] = -torch.inf, torch.nan
    out = adjusted(logits, rows, lengths, token_ids, SETTINGS)
    for at, (row, length) in enumerate(samples):
        if row < 0:
            assert out[at].isnan().all()
            continue
        each = {**OFF, **SETTINGS[row]}
        expected = logits[at : at + 1].float()
        for token, value in each["bias"].items():
            expected[0, token] += value
        expected = twin.penalize(
            expected,
            token_ids[row : row + 1].to(device),
            torch.tensor([each["prompt_length"]], device=device),
            torch.tensor([length], device=device),
            **{name: torch.tensor([each[name]], device=device) for name in ("repetition", "presence", "frequency")},
        )
        assert torch.equal(out[at].view(torch.int32), expected[0].view(torch.int32)), (row, length)


def test_repetition_equals_transformers(device):
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(2)).to(device)
    ids = torch.arange(600)[None] % 300
    out = adjusted(logits, [0], [600], ids, [{"repetition": 1.3}])
    # On the CPU: there a division by a number is no product with its reciprocal.
    assert torch.equal(out.cpu(), RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.cpu()))


def test_order_by_hand(device):
    """Bias, then repetition, then presence and frequency of what was generated."""
    settings = {"repetition": 2.0, "presence": 1.0, "frequency": 0.5, "prompt_length": 1, "bias": {0: 5.0, 2: -3.0}}
    out = adjusted(
        torch.tensor([[3.0, -3.0, 1.0, 2.0]], device=device), [0], [4], ints([[0, 1, 1, 2]], "cpu"), [settings]
    )
    assert out.tolist() == [[8 / 2, -3 * 2 - 2 * 0.5 - 1, -2 * 2 - 0.5 - 1, 2.0]]


def test_what_may_not_be_drawn(device):
    """Stop tokens until the row is long enough, NaN or not; tokens that have no bit in the sample's mask."""
    size, width = 9000, 282
    settings = [
        {"barred": range(3, 1003), "barred_until": 6, "bias": {1: 1.0, 2: 2.0}},
        {"barred": (1, 2**31 - 1, size), "barred_until": 9},
    ]
    draw = np.random.default_rng(3)
    allowed = draw.random((2, 32 * width)) < 0.5
    masks = torch.from_numpy(np.packbits(allowed, axis=-1, bitorder="little").view(np.int32)).to(device)
    samples = [(0, 5, -1), (0, 6, -1), (-1, 0, -1), (1, 8, 1), (1, 9, 0)]
    rows, lengths, mask_of = (ints(column, device) for column in zip(*samples, strict=True))
    logits = torch.zeros(5, size, device=device)
    logits[0, 3] = logits[3, 1] = torch.nan
    bar(logits, rows, lengths, table_of(settings, device), mask_of, masks)
    expected = np.zeros((5, size), bool)
    expected[0, 3:1003] = True
    expected[3] = ~allowed[1, :size]
    expected[3, 1] = True
    expected[4] = ~allowed[0, :size]
    assert np.array_equal(logits.cpu().numpy(), np.where(expected, -np.inf, 0))


def test_a_row_of_the_table():
    packed = pack_adjustments(
        repetition=1.0,
        presence=0.5,
        frequency=-2.0,
        prompt_length=9,
        bias={7: 1.0, 3: -0.5},
        barred=(4, 2),
        barred_until=12,
    )
    one, half, minus_two, minus_half = 0x3F800000, 0x3F000000, -0x40000000, -0x41000000
    assert packed.tolist() == [one, half, minus_two, 9, 2, 2, 12, 0, 7, one, 3, minus_half, 4, 2]
    with pytest.raises(ValueError, match="2044 biased and 1 barred token ids are too many"):
        pack_adjustments(**{**OFF, "bias": dict.fromkeys(range(2044), 1.0), "barred": (1,), "barred_until": 0})
