"""Sampling kernels: the Philox known answers, filters and penalties equal to transformers', the draw exact."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.sampling import (
    draw,
    min_p_filter,
    penalize,
    philox4x32,
    scale,
    token_weights,
    top_k_filter,
    top_p_filter,
    uniform,
)

V = 3000


def _scores(logits, temperature=1.0):
    return scale(logits, logits.amax(-1), torch.full((len(logits),), temperature))


def _logits(seed, rows=8, spread=3.0):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * spread


def _double(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # kat_vectors of the Random123 distribution, "philox4x32 10"
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter, key, answer):
    words = [torch.tensor([[int(word, 16) for word in text.split()]]) for text in (counter, key, answer)]
    assert torch.equal(philox4x32(words[0], words[1]), words[2])
    batch = philox4x32(words[0].repeat(5, 1), words[1].repeat(5, 1))
    assert torch.equal(batch, words[2].repeat(5, 1))


def test_uniform_is_53_bits_of_philox():
    # Seed 0x299f31d0a4093822: low word first. Expected by hand from philox4x32 of counter (position, index, 0, 0).
    seed, index, position = torch.tensor([0x299F31D0A4093822]), torch.tensor([3]), torch.tensor([70_000])
    words = philox4x32(torch.tensor([[70_000, 3, 0, 0]]), torch.tensor([[0xA4093822, 0x299F31D0]]))[0].tolist()
    expected = ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53
    assert uniform(seed, index, position).item() == expected
    # A seed of 64 bits whose sign bit is set is still two words without sign.
    negative = uniform(torch.tensor([-1]), index, position)
    words = philox4x32(torch.tensor([[70_000, 3, 0, 0]]), torch.tensor([[0xFFFFFFFF, 0xFFFFFFFF]]))[0].tolist()
    assert negative.item() == ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


def test_uniforms_are_uniform_and_uncorrelated():
    n = 100_000
    position = torch.arange(n)
    zero = torch.zeros(n, dtype=torch.int64)
    streams = [uniform(zero + seed, zero + index, position) for seed, index in ((0, 0), (0, 1), (1, 0), (2**63 - 1, 0))]
    for u in streams:
        assert u.min() >= 0
        assert u.max() < 1
        counts = torch.histc(u, 100, 0, 1)
        chi = ((counts - n / 100) ** 2 / (n / 100)).sum()
        assert 50 < chi < 170  # 99 degrees of freedom: p of either end below 1e-5
    for i, a in enumerate(streams):
        assert torch.corrcoef(torch.stack((a[1:], a[:-1])))[0, 1].abs() < 0.015
        for b in streams[:i]:
            assert torch.corrcoef(torch.stack((a, b)))[0, 1].abs() < 0.015


@pytest.mark.parametrize("k", [1, 2, 50, V - 1, V])
def test_top_k_equals_transformers(k):
    logits = _logits(k)
    logits[:, ::7] = logits[:, 1::7][:, : logits[:, ::7].shape[1]]  # ties
    scores = _scores(logits)
    weights = torch.ones(scores.shape, dtype=torch.float64)  # told from 0 whatever the score
    kept = top_k_filter(weights, scores, torch.full((8,), k), k) > 0
    assert torch.equal(kept, TopKLogitsWarper(k)(None, logits).isfinite())


def test_top_k_of_several_rows():
    logits = _logits(1, rows=3)
    kept = top_k_filter(torch.ones(3, V).double(), _scores(logits), torch.tensor([1, 40, 7]), 40) > 0
    assert kept.sum(-1).tolist() == [1, 40, 7]


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("spread", [0.3, 3.0, 10.0])  # nuclei of thousands, of hundreds, and of a few
def test_top_p_equals_transformers(p, spread):
    logits = _logits(2, spread=spread)
    kept = top_p_filter(token_weights(_scores(logits)), torch.full((8,), p).double()) > 0
    reference = TopPLogitsWarper(p)(None, logits.double()).isfinite()
    assert torch.equal(kept, reference)


def test_top_p_of_several_rows_needs_different_sizes():
    logits = torch.cat([_logits(3, rows=1, spread=spread) for spread in (10.0, 0.1, 3.0, 0.0)])
    ps = (0.5, 0.99, 0.9, 0.5)
    kept = top_p_filter(token_weights(_scores(logits)), _double(*ps)) > 0
    for i in range(3):
        assert torch.equal(kept[i], TopPLogitsWarper(ps[i])(None, logits[i : i + 1].double()).isfinite()[0])
    assert kept[3].nonzero()[:, 0].tolist() == list(range(V // 2))  # all alike: the lowest ids


def test_bug_23_top_p_keeps_the_smallest_set_and_of_ties_the_lowest_ids():
    weights = token_weights(_scores(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]).repeat(4, 1)))
    e = [math.exp(x) for x in (1, 2, 2, 2, 0)]
    two_of_three = 1.5 * e[1] / sum(e)
    all_three = 3 * e[1] / sum(e)
    kept = top_p_filter(weights, _double(0.0, two_of_three, all_three - 1e-6, all_three + 1e-6)) > 0
    assert [row.nonzero()[:, 0].tolist() for row in kept] == [[1], [1, 2], [1, 2, 3], [0, 1, 2, 3]]


def test_top_p_reached_exactly_needs_no_further_token():
    kept = top_p_filter(token_weights(torch.zeros(3, 4)), _double(0.5, 0.75, 0.5 + 1e-12)) > 0
    assert kept.sum(-1).tolist() == [2, 3, 3]


def test_top_p_whose_ties_go_on_behind_the_first_candidates():
    kept = top_p_filter(token_weights(torch.zeros(1, 1024)), _double(0.25)) > 0
    assert kept[0].nonzero()[:, 0].tolist() == list(range(256))


@pytest.mark.parametrize("p", [1e-6, 0.05, 0.5, 1.0])
def test_min_p_equals_transformers(p):
    logits = _logits(4)
    kept = min_p_filter(torch.ones(8, V).double(), _scores(logits), torch.full((8,), p)) > 0
    assert torch.equal(kept, MinPLogitsWarper(p)(None, logits.double()).isfinite())


def test_bug_23_min_p_keeps_ties():
    scores = torch.tensor([[0.0, math.log(0.5), 0.0, math.log(0.49), -math.inf]]).repeat(3, 1)
    kept = min_p_filter(torch.ones(3, 5).double(), scores, torch.tensor([1.0, 0.5, 0.0])) > 0
    assert kept.tolist() == [[True, False, True, False, False], [True, True, True, False, False], [True] * 5]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 2.0])
def test_repetition_penalty_equals_transformers(penalty):
    logits = _logits(5, rows=4)
    ids = torch.randint(0, V, (4, 200), generator=torch.Generator().manual_seed(5))
    ids[:, 100:] = ids[:, :100]  # occurring twice counts once
    zero, length = torch.zeros(4), torch.full((4,), 200)
    prompt = torch.tensor([1, 50, 100, 200])  # makes no difference
    result = penalize(logits, ids, prompt, length, repetition=zero + penalty, presence=zero, frequency=zero)
    assert torch.equal(result, RepetitionPenaltyLogitsProcessor(penalty)(ids, logits))


def test_presence_and_frequency_by_hand():
    logits = torch.zeros(2, 6)
    ids = torch.tensor([[5, 5, 1, 2, 2, 2, 0, 0], [5, 4, 4, 1, -1, -1, 99, 3]], dtype=torch.int32)
    result = penalize(
        logits,
        ids,
        torch.tensor([2, 3]),
        torch.tensor([6, 3]),
        repetition=torch.ones(2),
        presence=torch.tensor([0.5, 1.0]),
        frequency=torch.tensor([0.25, 1.0]),
    )
    # Row 0 generated 1, 2, 2, 2; row 1 has generated nothing yet, and what stands behind its length is no token.
    assert result.tolist() == [[0, -0.75, -1.25, 0, 0, 0], [0] * 6]


def test_repetition_comes_before_presence_and_frequency():
    one = torch.ones(1)
    ids = torch.tensor([[0, 1, 1]])
    result = penalize(
        torch.tensor([[3.0, -3.0, 1.0]]),
        ids,
        torch.tensor([1]),
        torch.tensor([3]),
        repetition=one * 2,
        presence=one,
        frequency=one * 0.5,
    )
    assert result.tolist() == [[1.5, -3.0 * 2 - 0.5 * 2 - 1, 1.0]]


def test_weights_are_probabilities_as_integers():
    logits = _logits(6)
    weights = token_weights(_scores(logits, 0.7))
    assert torch.equal(weights, weights.round())
    assert (weights.sum(-1) <= 2.0**53).all()
    exact = (logits.double() / 0.7).softmax(-1)
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), exact, rtol=2e-6, atol=1e-10)
    # The worst case, all tokens alike in the widest of vocabularies, is still exact.
    assert token_weights(torch.zeros(1, 262_144)).sum() == 2.0**53


def test_draw_inverts_the_distribution_function():
    weights = _double(0, 3, 0, 1, 4, 0)
    edges = [0.0, 3 / 8 - 1e-9, 3 / 8, 0.5 - 1e-9, 0.5, 1 - 2**-53]
    assert draw(weights.repeat(6, 1), _double(*edges)).tolist() == [1, 1, 3, 3, 4, 4]


@settings(deadline=None)
@given(
    weights=st.lists(st.integers(0, 3) | st.integers(0, 2**40), min_size=1, max_size=40).filter(any),
    u=st.floats(0, 1 - 2**-53) | st.sampled_from([0.0, 1 - 2**-53]),
)
def test_draw_never_takes_a_token_of_weight_zero(weights, u):
    token = int(draw(torch.tensor([weights], dtype=torch.float64), _double(u)))
    assert weights[token] > 0
    # Exact rational arithmetic agrees.
    numerator, denominator = u.as_integer_ratio()
    below = sum(weights[:token])
    total = sum(weights)
    assert below * denominator <= numerator * total + denominator
    assert (below + weights[token]) * denominator >= numerator * total


def test_a_token_too_rare_to_weigh_anything_is_not_drawn_at_the_end():
    logits = torch.tensor([[0.0, -500.0, -math.inf, -torch.finfo(torch.float32).max]])
    weights = token_weights(_scores(logits, 1e-5))
    assert draw(weights, _double(1 - 2**-53)).item() == 0


def test_filters_together_equal_transformers():
    logits = _logits(7)
    scores = _scores(logits, 0.8)
    kept = top_k_filter(token_weights(scores), scores, torch.full((8,), 100), 100)
    kept = min_p_filter(top_p_filter(kept, torch.full((8,), 0.9).double()), scores, torch.full((8,), 0.02))
    reference = logits.double()
    for warper in (TemperatureLogitsWarper(0.8), TopKLogitsWarper(100), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)):
        reference = warper(None, reference)
    torch.testing.assert_close(kept / kept.sum(-1, keepdim=True), reference.softmax(-1), rtol=2e-6, atol=1e-10)
