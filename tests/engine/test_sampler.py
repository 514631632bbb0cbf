"""The sampler: right distributions, right order of stages, and a row's token that depends on that row alone."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.request import SamplingParams
from engine.sampler import Sampler
from engine.step import RowInit

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, seed=0)


class Rows:
    """A sampler and the token ids of its rows; garbage stands wherever no token is known."""

    def __init__(self, vocab_size, max_num_seqs=8, processors=()):
        self.sampler = Sampler(vocab_size=vocab_size, device=CPU, max_num_seqs=max_num_seqs, processors=processors)
        self.token_ids = torch.full((max_num_seqs, 64), -1, dtype=torch.int32)
        self.length = [0] * max_num_seqs

    def add(self, row, params, prompt=(0,), generated=(), index=0, stop_mask=()):
        tokens = (*prompt, *generated)
        self.sampler.add_row(RowInit(row, tokens, len(prompt), params, index, stop_mask))
        self.token_ids[row] = -1
        self.token_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.length[row] = len(tokens)

    def sample(self, logits, rows):
        before = logits.clone()
        tokens, failed = self.sampler.sample(logits, rows, self.token_ids, [self.length[row] for row in rows])
        assert torch.equal(logits.nan_to_num(7), before.nan_to_num(7)), "the caller's logits were changed"
        assert (tokens.dtype, failed.dtype) == (torch.int64, torch.bool)
        return tokens.tolist(), failed.tolist()


def one(logits, params, **row):
    """The token of a lone row."""
    rows = Rows(len(logits))
    rows.add(3, params, **row)
    tokens, failed = rows.sample(torch.tensor([logits]), [3])
    assert failed == [False]
    return tokens[0]


LOGITS = torch.tensor([1.0, 2.5, 2.0, -1.0, 0.0, 2.0, 1.5, -3.0, 0.5, 2.2, -math.inf, 0.9])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.3),
        SamplingParams(temperature=1.3, top_k=7, top_p=0.9),
        SamplingParams(temperature=0.8, top_p=0.95, min_p=0.1),
        SamplingParams(temperature=1.5, top_k=9, top_p=0.97, min_p=0.05),
        SamplingParams(temperature=1.2, top_k=8, repetition_penalty=1.4),
    ],
)
def test_sampled_distribution_is_the_exact_one(params):
    """Chi-square against transformers' processors in float64: a draw from each of 1,000 seeds at 20 positions."""
    prompt = (1, 9, 3)
    scores = LOGITS.double()[None]
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(torch.tensor([prompt]), scores)
    scores = TemperatureLogitsWarper(params.temperature)(None, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    exact = scores.softmax(-1)[0]
    n, positions = 1000, 20
    rows = Rows(len(LOGITS), max_num_seqs=n)
    counts = torch.zeros(len(LOGITS))
    for row in range(n):
        rows.add(row, replace(params, seed=row), prompt=prompt)
    logits = LOGITS.repeat(n, 1)
    rows.token_ids[:, 3:] = 1  # generated tokens that the repetition penalty knows already
    for position in range(3, 3 + positions):
        rows.length = [position] * n
        tokens, failed = rows.sample(logits, list(range(n)))
        assert not any(failed)
        counts += torch.bincount(torch.tensor(tokens), minlength=len(LOGITS))
    expected = exact * n * positions
    assert not counts[expected == 0].any()
    common = expected >= 5  # the chi-square distribution holds for these; the rarer ones count as one together
    counts = torch.cat((counts[common], counts[~common].sum()[None]))
    expected = torch.cat((expected[common], expected[~common].sum()[None]))
    counts, expected = counts[expected > 0], expected[expected > 0]
    chi = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(expected) - 1) / 2.0, dtype=torch.float64)
    assert torch.special.gammaincc(degrees, chi / 2) > 1e-3, (counts.tolist(), expected.tolist())


def test_bug_21_seeded_rows_give_the_same_tokens_in_any_company():
    v, steps = 500, 12
    logits = torch.randn(steps, v, generator=torch.Generator().manual_seed(1)) * 2
    noise = torch.randn(32, v, generator=torch.Generator().manual_seed(2)) * 2
    params = SamplingParams(temperature=0.9, top_k=200, top_p=0.95, min_p=0.001, seed=2**64 - 5)
    prompt = (5, 6, 7)

    def run(company, place, row=0, index=0, params=params):
        rows = Rows(v, max_num_seqs=32)
        others = [r for r in range(32) if r != row][:company]
        for other in others:  # as if unseeded: the engine minted these seeds; and a quarter of them greedy
            plain = SamplingParams(
                temperature=other % 4 / 2, top_p=1 - other % 3 / 4, top_k=other % 5, seed=1000 + other
            )
            rows.add(other, plain, prompt=(1,) * (1 + other % 7))
        rows.add(row, params, prompt=prompt, index=index)
        order = [*others[:place], row, *others[place:]]
        out = []
        for step in range(steps):
            batch = noise[: len(order)].roll(step, 0).clone()
            batch[place] = logits[step]
            token = rows.sample(batch, order)[0][place]
            rows.token_ids[row, rows.length[row]] = token
            rows.length[row] += 1
            out.append(token)
        return out

    alone = run(0, 0)
    assert run(31, 0) == alone
    assert run(31, 17, row=20) == alone
    assert run(3, 3, row=31) == alone
    assert run(0, 0, index=1) != alone
    assert run(31, 4, index=1) == run(0, 0, index=1)
    assert run(0, 0, params=replace(params, seed=params.seed - 1)) != alone
    assert run(0, 0, params=replace(params, seed=params.seed % 2**32)) != alone  # all 64 bits count
    assert len(set(alone)) > 6

    # A preempted sequence comes back with its tokens in another row, and goes on as before.
    rows = Rows(v, max_num_seqs=32)
    rows.add(9, params, prompt=prompt, generated=alone[:5])
    assert rows.sample(logits[5:6], [9])[0][0] == alone[5]


def test_bug_22_tiny_and_zero_temperatures_are_greedy():
    logits = [0.0, 1e-4, 3.0, 3.0, 2.9999]
    for temperature in (0.0, 1e-40, 1e-6, 9.9e-6):
        for seed in range(5):
            assert (
                one(logits, SamplingParams(temperature=temperature, seed=seed, top_p=0.1, top_k=3)) == 2
            )  # of ties the first
    # The smallest that is divided by: huge logits overflow nothing, and ties are drawn from.
    huge = [-3.4e38, 3.4e38, 3.4e38, 0.0]
    assert {one(huge, SamplingParams(temperature=1e-5, seed=seed)) for seed in range(30)} == {1, 2}
    assert one([-3e38, 2.0, 1.999, -math.inf], SamplingParams(temperature=1e-5, seed=1)) == 1


def test_bug_23_filters_that_are_off_and_filters_at_their_limits():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)).tolist()
    best = logits.index(max(logits))
    for seed in range(12):
        plain = one(logits, SamplingParams(temperature=1.5, seed=seed))
        for off in ({"top_k": 0}, {"top_k": -1}, {"top_k": 50}, {"top_k": 2**32 - 1}, {"top_p": 1.0}, {"min_p": 0.0}):
            assert one(logits, SamplingParams(temperature=1.5, seed=seed, **off)) == plain
        for lone in ({"top_k": 1}, {"top_p": 1e-12}, {"top_p": 0.0}, {"min_p": 1.0}):
            assert one(logits, SamplingParams(temperature=1.5, seed=seed, **lone)) == best
    ties = [0.0, 1.0, 1.0, 0.5, 1.0]
    assert {one(ties, SamplingParams(seed=seed, min_p=1.0)) for seed in range(40)} == {1, 2, 4}
    assert {one(ties, SamplingParams(seed=seed, top_k=1)) for seed in range(40)} == {1, 2, 4}
    assert {one(ties, SamplingParams(seed=seed, top_p=0.01)) for seed in range(40)} == {1}


def test_bug_24_penalties_count_the_token_of_the_step_just_before():
    """The host knows no tokens: only the device's history tells that the favourite has just been sampled."""
    logits = torch.tensor([[0.0, 1.0, 0.9, 0.8]])
    for params, expected in (
        (replace(GREEDY, presence_penalty=0.5), [1, 2, 3, 1, 1]),
        (replace(GREEDY, frequency_penalty=0.15), [1, 2, 1, 3, 2]),
        (replace(GREEDY, repetition_penalty=1.5), [1, 2, 3, 1, 1]),
    ):
        rows = Rows(4)
        rows.add(2, params, prompt=(0,))
        out = []
        for _ in range(5):
            token = rows.sample(logits, [2])[0][0]
            rows.token_ids[2, rows.length[2]] = token
            rows.length[2] += 1
            out.append(token)
        assert out == expected


def test_bug_25_placeholders_behind_the_known_tokens_mean_nothing():
    params = replace(GREEDY, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0)
    for garbage in (-1, 2, 2**31 - 1):
        rows = Rows(5)
        rows.add(0, params, prompt=(1,), generated=(3,))
        rows.add(1, params, prompt=(1, 4, 4, 4, 4, 4), generated=(4, 4))  # a longer neighbour
        rows.token_ids[0, 2:] = garbage
        rows.token_ids[1, 8:] = garbage
        tokens, failed = rows.sample(torch.tensor([[0.0, 3.0, 2.0, 9.0, 1.0]] * 2), [0, 1])
        # By hand, row 0: 1 -> 3 / 2, 3 -> 9 / 2 - 2 - 2; row 1: 1 -> 3 / 2, 4 -> 1 / 2 - 4 - 2.
        assert (tokens, failed) == ([2, 3], [False, False])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_bug_17_rows_that_are_not_finite_fail_alone(bad, filters):
    logits = torch.tensor(
        [
            [0.0, 5.0, -math.inf, 1.0],
            [0.0, bad, 1.0, 2.0],
            [-math.inf] * 4,
            [-math.inf, -math.inf, -7.0, -math.inf],
            [bad] * 4,
        ]
    )
    for temperature in (0.0, 1e-5, 0.3):
        rows = Rows(4)
        for row in range(5):
            rows.add(row, SamplingParams(temperature=temperature, seed=4, **filters))
        tokens, failed = rows.sample(logits, [0, 1, 2, 3, 4])
        assert failed == [False, True, True, False, True]
        assert tokens == [1, 0, 0, 2, 0]


def test_min_p_leaves_a_token_of_a_nucleus_of_ties():
    """Logits so close that their weights are one; min_p 1 keeps only the largest, and top_p one of the three."""
    logits = [-math.inf, 0.0, 5e-9, 1e-8]
    assert {one(logits, SamplingParams(top_p=0.1, min_p=1.0, seed=seed)) for seed in range(20)} == {3}
    assert {one(logits, SamplingParams(top_p=0.1, seed=seed)) for seed in range(20)} == {1}


def test_bug_17_masks_that_leave_nothing_fail_the_row():
    rows = Rows(3)
    rows.add(0, replace(GREEDY, min_tokens=1), stop_mask=(0, 1, 2))
    rows.add(1, replace(GREEDY, min_tokens=1), stop_mask=(1, 2))
    assert rows.sample(torch.tensor([[0.0, 1.0, 2.0]] * 2), [0, 1]) == ([0, 0], [True, False])


def test_min_tokens_masks_every_stop_until_they_are_generated():
    logits = torch.tensor([[1.0, 5.0, 4.0, 3.0]])
    for params in (GREEDY, SamplingParams(seed=1, top_k=1)):
        rows = Rows(4)
        for generated, expected in ((), 3), ((3,), 3), ((3, 3), 1):
            rows.add(0, replace(params, min_tokens=2), prompt=(1, 1, 1), generated=generated, stop_mask=(1, 2))
            assert rows.sample(logits, [0])[0] == [expected]


def test_logit_bias_by_hand():
    assert one([0.0, 1.0, 2.0], replace(GREEDY, logit_bias={0: 1.5, 2: -1.5})) == 0
    assert one([0.0, 1.0, 2.0], replace(GREEDY, logit_bias={1: 0.5, 0: 1.5})) == 2
    assert one([0.0, 1.0, 2.0], replace(GREEDY, logit_bias={0: 100.0, 2: -100.0})) == 0
    assert {one([0.0, 1.0, 2.0], SamplingParams(logit_bias={2: -100.0}, seed=seed)) for seed in range(40)} == {0, 1}


def test_bias_comes_before_the_repetition_penalty():
    # 1 with bias is 4, halved 2 < 3; were the bias added afterwards it would be 0.5 + 3 > 3.
    assert one([3.0, 1.0], replace(GREEDY, logit_bias={1: 3.0}, repetition_penalty=2.0), prompt=(1,)) == 0


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e-6])
def test_a_tiny_repetition_penalty_overflows_nothing(penalty):
    params = SamplingParams(repetition_penalty=penalty, seed=1)
    assert one([3.0, 200.0, -300.0, 100.0], params, prompt=(0, 2)) == 0


def test_rows_with_and_without_features_do_not_touch_each_other():
    logits = [0.0, 3.0, 2.9, 1.0, 2.8]
    rows = Rows(5)
    rows.add(6, replace(GREEDY, logit_bias={1: -5.0, 4: 1.0}))
    rows.add(1, GREEDY)
    rows.add(4, replace(GREEDY, frequency_penalty=1.0), generated=(1,))
    rows.add(2, replace(GREEDY, min_tokens=3), stop_mask=(1, 2))
    rows.add(0, SamplingParams(seed=1, top_k=1))
    rows.add(5, replace(GREEDY, logit_bias={0: 10.0}))
    assert rows.sample(torch.tensor([logits] * 6), [6, 1, 4, 2, 0, 5])[0] == [4, 1, 2, 4, 1, 0]
    rows.add(6, GREEDY)  # the row's next sequence has nothing of the last one
    rows.add(2, GREEDY)
    assert rows.sample(torch.tensor([logits] * 2), [6, 2])[0] == [1, 1]


def test_a_row_keeps_no_tokens_on_the_host():
    """They would stay there long after their request has ended, until another has the row."""
    tokens = tuple(range(64))
    held, sampler = sys.getrefcount(tokens), Rows(4).sampler
    sampler.add_row(RowInit(0, tokens, len(tokens), GREEDY, 0, ()))
    assert sys.getrefcount(tokens) == held


def test_an_empty_step_samples_nothing():
    assert Rows(5).sample(torch.empty(0, 5), []) == ([], [])


def test_a_greedy_batch_costs_one_reduction():
    """No other operation than the search for the largest sees the (N, V) logits."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(isinstance(arg, torch.Tensor) and arg.numel() == logits.numel() for arg in args):
                seen.append(func)
            return func(*args, **(kwargs or {}))

    rows = Rows(1000)
    for row in range(4):
        rows.add(row, replace(GREEDY, top_k=5, top_p=0.5, min_p=0.1))
    logits = torch.randn(4, 1000)
    with Watch():
        rows.sampler.sample(logits, [0, 1, 2, 3], rows.token_ids, [1] * 4)
    assert seen == [torch.ops.aten.max.dim]


def allowed(logits, params):
    """Tokens that may be drawn, in float64 by the definitions; borderline tokens of float32 are given the doubt."""
    scaled = [(x - max(logits)) / params.temperature for x in logits]
    alive = {i for i, x in enumerate(logits) if x > -math.inf}
    if 0 < params.top_k < len(logits):
        bound = sorted(scaled, reverse=True)[params.top_k - 1]
        alive &= {i for i, x in enumerate(scaled) if x >= bound}
    mass = {i: math.exp(scaled[i]) for i in alive}
    total, reached, nucleus = sum(mass.values()), 0.0, set()
    for i in sorted(mass, key=lambda i: (-mass[i], i)):
        if nucleus and reached >= (params.top_p + 1e-5) * total:
            break
        nucleus.add(i)
        reached += mass[i]
    # The likeliest of those within float32's rounding of each other may change places.
    edge = min((mass[i] for i in nucleus), default=0.0) * (1 - 1e-5)
    return {
        i
        for i in alive
        if (i in nucleus or edge <= mass[i] < edge * (1 + 3e-5)) and mass[i] >= params.min_p * (1 - 1e-5)
    }


@settings(deadline=None, max_examples=120)
@given(
    logits=st.lists(st.integers(-30, 30).map(lambda x: x / 4) | st.just(-math.inf), min_size=1, max_size=30).filter(
        lambda xs: max(xs) > -math.inf
    ),
    params=st.builds(
        SamplingParams,
        temperature=st.floats(1e-5, 2),
        top_k=st.integers(0, 40),
        top_p=st.floats(0, 1),
        min_p=st.floats(0, 1),
        seed=st.integers(0, 2**64 - 1),
    ),
)
def test_a_token_is_always_one_of_the_allowed(logits, params):
    rows = Rows(len(logits), max_num_seqs=4)
    for row in range(4):
        rows.add(row, replace(params, seed=(params.seed + row) % 2**64), index=row)
    tokens, failed = rows.sample(torch.tensor([logits] * 4), [0, 1, 2, 3])
    assert not any(failed)
    assert set(tokens) <= allowed(logits, params)


@settings(deadline=None, max_examples=80)
@given(
    params=st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        top_k=st.integers(0, 2**32 - 1),
        top_p=st.floats(0, 1, exclude_min=True),
        min_p=st.floats(0, 1),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.01, 2),
        seed=st.integers(0, 2**64 - 1),
        logit_bias=st.dictionaries(st.integers(0, 19), st.floats(-100, 100), max_size=20),
        min_tokens=st.integers(0, 5),
    ),
    stop_mask=st.lists(st.integers(0, 19), max_size=19).map(tuple),
    generated=st.lists(st.integers(0, 19), max_size=10).map(tuple),
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=20, max_size=20),
)
def test_validated_parameters_never_fail(params, stop_mask, generated, logits):
    rows = Rows(20)
    rows.add(7, params, generated=generated, stop_mask=stop_mask)
    rows.add(0, GREEDY)
    tokens, failed = rows.sample(torch.tensor([logits, logits]), [7, 0])
    assert failed == [False, False]
    assert 0 <= tokens[0] < 20
    assert tokens[1] == logits.index(max(logits))
    if len(generated) < params.min_tokens:
        assert tokens[0] not in stop_mask
