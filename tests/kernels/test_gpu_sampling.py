"""The GPU sampling kernels against whole-number arithmetic in Python, the torch twin, known answers and softmax."""

import math
import struct

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels import sampling as twin
from kernels.gpu.sampling import SamplingConfig, SamplingScratch, _philox, greedy, pack_params, sample

# Several splits, several blocks in each, and so little room that some rows are searched as a whole.
SMALL = SamplingConfig(block=256, ladder_block=256, capacity=64, splits=2)
NO_FILTER = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0}


def dtypes(device):
    return [torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]


def run(logits, params, *, lengths=None, rows=None, config=SMALL, filters=True, scratch=None):
    """Tokens and failures of a step whose row i has params[i] (each without what is as in NO_FILTER)."""
    device = logits.device
    count = len(logits)
    table = [pack_params(**{"seed": 1, "index": 0, **NO_FILTER, **row}) for row in params]
    tokens, failed = (torch.full((count,), -7, dtype=torch.int32, device=device) for _ in range(2))
    sample(
        logits,
        torch.tensor(list(range(count)) if rows is None else rows, dtype=torch.int32, device=device),
        torch.tensor([5] * count if lengths is None else lengths, dtype=torch.int32, device=device),
        torch.tensor(table, dtype=torch.int32, device=device),
        tokens,
        failed,
        scratch or SamplingScratch.allocate(count, device, config),
        filters=filters,
    )
    return tokens.tolist(), failed.tolist()


def run_greedy(logits, config=SMALL, rows=None):
    count = len(logits)
    tokens, failed = (torch.full((count,), -7, dtype=torch.int32, device=logits.device) for _ in range(2))
    rows = torch.tensor(list(range(count)) if rows is None else rows, dtype=torch.int32, device=logits.device)
    greedy(logits, rows, tokens, failed, SamplingScratch.allocate(count, logits.device, config))
    return tokens.tolist(), failed.tolist()


def python_philox(counter, key):
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def kept_weights(logits, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0):
    """What the filters leave, as Python integers, by sorting. logits: (V,) tensor."""
    x = logits.float().cpu().numpy()
    vocab_size = len(x)
    scores = np.maximum((x - x.max()) / np.float32(temperature), np.float32(-64))
    bits = 53 - (vocab_size - 1).bit_length()
    weights = [round(float(e) * 2.0**bits) for e in np.exp(scores)]
    if 0 < top_k < vocab_size:
        kth = sorted(scores)[-top_k]
        weights = [w if s >= kth else 0 for w, s in zip(weights, scores, strict=True)]
    if top_p < 1:
        mass, before, nucleus = float(np.float32(top_p)) * sum(weights), 0, set()
        for token in sorted(range(vocab_size), key=lambda i: (-weights[i], i)):
            if nucleus and before >= mass:
                break
            nucleus.add(token)
            before += weights[token]
        weights = [w if i in nucleus else 0 for i, w in enumerate(weights)]
    if min_p > 0:
        bound = np.float32(math.log(np.float32(min_p)))
        weights = [w if s >= bound else 0 for w, s in zip(weights, scores, strict=True)]
    return weights


def oracle(logits, *, length=5, seed=1, index=0, **filters):
    x = logits.float()
    if x.isnan().any() or x.max().isinf():
        return 0, 1
    if filters.get("temperature", 1.0) < 1e-5:
        return int(x.cpu().numpy().argmax()), 0
    weights = kept_weights(logits, **filters)
    a, b, _, _ = python_philox((length, index, 0, 0), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    uniform = ((a >> 5) * 2**26 + (b >> 6)) / 2**53
    target = min(math.floor(uniform * sum(weights)), sum(weights) - 1)
    reached = 0
    for token, weight in enumerate(weights):
        reached += weight
        if reached > target:
            return token, 0
    raise AssertionError("the target lies within the sum")


def random_logits(rows, vocab_size, device, dtype=torch.float32, spread=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab_size, generator=generator) * spread).to(dtype).to(device)


@triton.jit
def _philox_words(words, out):
    c0, c1, c2, c3, k0, k1 = (
        tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3), tl.load(words + 4),
        tl.load(words + 5),
    )  # fmt: skip
    a, b, c, d = _philox(
        c0.to(tl.uint32, bitcast=True), c1.to(tl.uint32, bitcast=True), c2.to(tl.uint32, bitcast=True),
        c3.to(tl.uint32, bitcast=True), k0.to(tl.uint32, bitcast=True), k1.to(tl.uint32, bitcast=True),
    )  # fmt: skip
    tl.store(out, a.to(tl.int32, bitcast=True))
    tl.store(out + 1, b.to(tl.int32, bitcast=True))
    tl.store(out + 2, c.to(tl.int32, bitcast=True))
    tl.store(out + 3, d.to(tl.int32, bitcast=True))


@pytest.mark.parametrize(
    ("words", "answer"),
    [  # kat_vectors of the Random123 distribution, "philox4x32 10": counter and key
        ("00000000 00000000 00000000 00000000 00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(words, answer, device):
    inputs = [int(word, 16) for word in words.split()]
    expected = [int(word, 16) for word in answer.split()]
    assert list(python_philox(inputs[:4], inputs[4:])) == expected
    out = torch.zeros(4, dtype=torch.int32, device=device)
    signed = torch.tensor(inputs, dtype=torch.int64).to(torch.int32).to(device)
    _philox_words[(1,)](signed, out)
    assert [word & 0xFFFFFFFF for word in out.tolist()] == expected


def test_a_row_of_parameters():
    packed = pack_params(temperature=1.0, top_p=0.5, min_p=0.25, top_k=40, seed=2**63 + 5, index=2**32 - 1)
    assert packed == (0x3F800000, 0x3F000000, 0x3E800000, 40, 5, -(2**31), -1, 0)
    packed = pack_params(temperature=0.7, top_p=0.0, min_p=1.0, top_k=2**40, seed=-1, index=3)
    assert packed == (struct.unpack("<i", struct.pack("<f", 0.7))[0], 0, 0x3F800000, 2**31 - 1, -1, -1, 3, 0)


@pytest.mark.parametrize("vocab_size", [37, 1000, 5000])
def test_greedy_is_argmax_and_of_ties_the_lowest_id(vocab_size, device):
    for dtype in dtypes(device):
        logits = random_logits(6, vocab_size, device, dtype)
        tied = (logits / 4).round()  # a few distinct values: the largest comes many times
        tied[0] = 0.0
        tied[1, 1::2], tied[1, ::2] = -0.0, 0.0
        logits[2, : vocab_size // 2] = -torch.inf
        for values in (logits, tied) if vocab_size > 37 else (tied,):
            expected = [int(row.float().cpu().numpy().argmax()) for row in values]
            assert [int(row.float().cpu().argmax()) for row in values] == expected
            assert run_greedy(values) == (expected, [0] * 6)
    cold = [{"temperature": 1e-6, "top_p": 0.1, "top_k": 3, "min_p": 1.0}] * 6
    assert run(values, cold)[0] == expected


FILTERS = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_p": 0.9, "top_k": 50, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 50},
    {"min_p": 0.05},
    {"temperature": 0.01, "top_p": 0.999},
    {"temperature": 100.0, "top_p": 0.6},
    {"temperature": 100.0, "top_k": 300, "top_p": 0.5},
    {"top_p": 1e-7},
    {"top_p": 0.0},
    {"top_p": 0.99999},
    {"top_k": 1},
    {"top_k": 36, "top_p": 0.97},
    {"top_k": 1 << 20},
    {"top_k": -1, "min_p": 1.0},
    {"temperature": 1e-6, "top_k": 5},
]


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "spread", "some", "config"),
    [  # half precision and a narrow spread: ties by the dozen
        (37, torch.float16, 0.5, slice(None), SamplingConfig(16, 16, bounds=4, capacity=8, splits=2)),
        (1000, torch.float32, 3.0, slice(None), SMALL),
        (5000, torch.float16, 0.5, slice(1, 4), SamplingConfig(2048, 1024, capacity=512, splits=2)),
    ],
)
def test_tokens_equal_whole_number_arithmetic(vocab_size, dtype, spread, some, config, device):
    rows = [{**row, "seed": 2**63 + 977 * i, "index": i} for i, row in enumerate(FILTERS)][some]
    logits = random_logits(len(rows), vocab_size, device, dtype, spread, seed=vocab_size)
    logits[1:4, ::3] = -torch.inf  # as a grammar masks
    lengths = [7 * i for i in range(len(rows))]
    expected = [oracle(x, length=n, **row)[0] for x, n, row in zip(logits, lengths, rows, strict=True)]
    assert run(logits, rows, lengths=lengths, config=config) == (expected, [0] * len(rows))


def test_tokens_equal_the_twins(device):
    rows = [{**row, "seed": 40 + i} for i, row in enumerate(FILTERS) if row.get("temperature", 1.0) > 1e-5]
    logits = random_logits(len(rows), 1000, device, seed=9)
    expected = []
    for x, row in zip(logits[:, None], rows, strict=True):
        full = {**NO_FILTER, **row}
        scores = twin.scale(x, x.amax(-1), torch.tensor([full["temperature"]], device=device))
        weights = twin.token_weights(scores)
        if 0 < full["top_k"] < 1000:
            top_k = torch.tensor([full["top_k"]], device=device)
            weights = twin.top_k_filter(weights, scores, top_k, full["top_k"])
        if full["top_p"] < 1:
            top_p = torch.tensor([full["top_p"]], dtype=torch.float32, device=device)
            weights = twin.top_p_filter(weights, top_p.double())
        if full["min_p"] > 0:
            weights = twin.min_p_filter(weights, scores, torch.tensor([full["min_p"]], device=device))
        seed, index, length = (torch.tensor([n], device=device) for n in (full["seed"], 0, 5))
        expected.append(twin.draw(weights, twin.uniform(seed, index, length)).item())
    assert run(logits, rows)[0] == expected


def test_a_token_depends_on_its_row_alone(device):
    chosen = [1, 2, 3, 7]
    rows = [{**FILTERS[i], "seed": i} for i in chosen]
    logits = random_logits(4, 1000, device, seed=4)
    reference = run(logits, rows)[0]
    # Other rows of the table, padding, and another order.
    batch = torch.full((7, 1000), torch.nan, device=device)
    order = [2, -1, 0, 3, -1, 1, -1]
    for at, row in enumerate(order):
        if row >= 0:
            batch[at] = logits[row]
    expected = [reference[row] if row >= 0 else 0 for row in order]
    assert run(batch, rows, rows=order) == (expected, [0] * 7)
    for config in (
        SamplingConfig(block=1024, ladder_block=1024, capacity=1024, splits=1),
        SamplingConfig(block=256, ladder_block=256, bounds=4, rounds=1, capacity=16, splits=4),
    ):
        assert run(logits, rows, config=config)[0] == reference
    # Rows of a wider tensor, and scratch that has served before.
    wide = torch.full((4, 1500), 50.0, device=device)
    wide[:, :1000] = logits
    scratch = SamplingScratch.allocate(9, device, SMALL)
    for _ in range(2):  # zeros that it left behind
        assert run(wide[:, :1000], rows, scratch=scratch)[0] == reference


def test_ties_at_the_edges(device):
    """What may be drawn, by hand: ties with the k-th stay, of top_p's ties the lowest ids, ties with min_p's bound."""
    flat = torch.zeros(37, device=device)
    three = torch.full((37,), -3.0, device=device)
    three[[30, 4, 17]] = 2.0
    cases = [
        (flat, {"top_k": 1}, set(range(37))),
        (flat, {"top_p": 0.25}, set(range(10))),  # 9.25 of 37
        (flat, {"top_p": 0.0}, {0}),
        (flat, {"min_p": 1.0}, set(range(37))),
        (three, {"top_k": 2}, {4, 17, 30}),
        (three, {"top_k": 3, "top_p": 0.5}, {4, 17}),
        (three, {"top_p": 0.1}, {4}),
        (three, {"min_p": 1.0}, {4, 17, 30}),
        (three, {"top_p": 0.1, "min_p": 1.0, "top_k": 36}, {4}),
    ]
    rows, batch = [], []
    for logits, filters, allowed in cases:
        assert {i for i, weight in enumerate(kept_weights(logits, **filters)) if weight} == allowed
        assert {oracle(logits, seed=seed, **filters)[0] for seed in range(15 * len(allowed))} == allowed
        rows += [{**filters, "seed": seed} for seed in range(2)]
        batch += [logits] * 2
    tokens, _ = run(torch.stack(batch), rows, config=SamplingConfig(block=64, ladder_block=64, splits=1))
    assert tokens == [oracle(logits, **row)[0] for logits, row in zip(batch, rows, strict=True)]


def test_min_p_leaves_a_token_of_a_nucleus_of_ties(device):
    logits = torch.tensor([[-torch.inf, 0.0, 5e-9, 1e-8]] * 2, device=device)
    rows = [{"top_p": 0.1, "min_p": 1.0}, {"top_p": 0.1}]
    assert run(logits, rows, config=SamplingConfig(block=16, ladder_block=16, splits=1)) == ([3, 1], [0, 0])


def test_bad_rows_fail_alone(device):
    logits = random_logits(7, 1000, device, seed=6)
    rows = [{**FILTERS[i % 3], "seed": i} for i in range(7)]
    good = run(logits, rows)[0]
    best = run_greedy(logits)[0]
    logits[1] = -torch.inf
    logits[3, 777] = torch.nan
    logits[5, 0] = torch.inf
    failed = [0, 1, 0, 1, 0, 1, 0]
    for reference, (tokens, failures) in (
        (good, run(logits, rows)),
        (best, run_greedy(logits)),
        (best, run(logits, [{"temperature": 0.0}] * 7)),
    ):
        assert failures == failed
        assert tokens == [0 if bad else token for token, bad in zip(reference, failed, strict=True)]


def test_without_the_filters_kernels_a_filtered_row_fails(device):
    logits = random_logits(5, 1000, device, seed=8)
    rows = [{}, {"min_p": 0.1}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0, "top_p": 0.5}]
    full = run(logits, rows)[0]
    assert run(logits, rows, filters=False) == ([full[0], full[1], 0, 0, full[4]], [0, 0, 1, 1, 0])


def test_a_temperature_that_rounds_to_the_least_is_greedy(device):
    """A message's float of 1e-5 is a little less: the host looks for no filters of such a row."""
    logits = random_logits(2, 1000, device, seed=8)
    least = float(np.float32(1e-5))
    assert least < 1e-5
    tokens, failed = run(logits, [{}, {"temperature": least, "top_p": 0.9}], filters=False)
    assert (tokens[1], failed) == (run_greedy(logits)[0][1], [0, 0])


@pytest.mark.parametrize(("filters", "interpreted"), [({}, 100), ({"top_p": 0.8}, 16)])
def test_frequencies_are_those_of_softmax(filters, interpreted, device):
    """The whole-number arithmetic over thousands of positions; the kernels draw the very same tokens."""
    logits = random_logits(1, 8, device, seed=3, spread=1.5)[0]
    draws = 3000
    drawn = [oracle(logits, length=n, temperature=1.5, **filters)[0] for n in range(draws)]
    count = draws if device == "cuda" else interpreted
    config = SamplingConfig(block=8, ladder_block=8, capacity=8, splits=1)
    rows = [{"temperature": 1.5, **filters}] * count
    assert run(logits.expand(count, 8), rows, lengths=list(range(count)), config=config, filters=bool(filters)) == (
        drawn[:count],
        [0] * count,
    )
    p = torch.softmax(logits.double().cpu() / 1.5, 0)
    if filters:
        order = p.argsort(descending=True)
        kept = order[(p[order].cumsum(0) - p[order]) < filters["top_p"]]
        assert 1 < len(kept) < 8
        p = torch.zeros_like(p).index_copy(0, kept, p[kept])
        p /= p.sum()
    counts = torch.bincount(torch.tensor(drawn), minlength=8).double()
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * draws
    chi = ((counts[p > 0] - expected) ** 2 / expected).sum()
    assert chi < 29.9  # 7 degrees of freedom (fewer with top_p): p below 1e-4
