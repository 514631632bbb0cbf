"""Sequences with a grammar: when they are scheduled, what limits them, how they end. The grammar is a fake."""

import pytest
import torch

from engine.request import FinishReason, RejectReason, RequestRejected, SamplingParams
from engine.sampler import Sampler
from engine.step import RowInit, Step

EOS = 7
VOCAB = 50
WORDS = 2  # int32, for 50 tokens


def follows(tokens: list[int], length: int) -> bool:
    *text, end = tokens
    return end == EOS and len(text) == length and all(token % 5 == place % 5 for place, token in enumerate(text))


def constrained_rows(step: Step) -> set[int]:
    return {step.samples[index].row for index, _ in step.masks}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_text_follows_its_grammar_and_ends_by_itself(harness, depth):
    h = harness(depth=depth, grammars=harness.Source())
    h.add("a", range(10), max_tokens=50, grammar="12")
    h.run()
    assert follows(h.tokens["a", 0], 12)
    assert h.finish["a", 0] is FinishReason.EOS
    h.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_guesses_go_as_far_as_the_grammar_does(harness, depth):
    """Each place has its own mask, and the matcher is afterwards where the text is."""
    runs = [harness(depth=depth, grammars=harness.Source(), **each) for each in ({}, {"speculative_length": 4})]
    for h in runs:
        h.add("a", [1, 2, 3], max_tokens=50, grammar="30", min_tokens=3)
        if h.guessers:
            (sequence,) = h.scheduler._live["a"].values()
            sequence.ngrams.text = runs[0].tokens["a", 0]
        h.run()
    assert runs[1].tokens == runs[0].tokens
    assert runs[1].finish == runs[0].finish
    assert follows(runs[1].tokens["a", 0], 30)
    assert runs[1].scheduler.stats.accepted_tokens > 8
    assert max(len(step.masks) for step in runs[1].steps) == runs[1].max_samples


@pytest.mark.parametrize("depth", [1, 2])
def test_its_next_token_waits_for_its_last_and_others_go_on(harness, depth):
    h = harness(depth=depth, grammars=harness.Source())
    h.add("bound", [1, 2, 3], max_tokens=30, grammar="10")
    h.add("free", [4, 5, 6], max_tokens=20, ignore_eos=True)
    while h.scheduler.has_work or h.in_flight:
        uncollected = [row for step, _ in h.in_flight for row in constrained_rows(step)]
        step = h.turn()
        if step is not None:
            assert not constrained_rows(step) & set(uncollected), "drawn before the token before it was known"
    assert follows(h.tokens["bound", 0], 10)
    assert h.tokens["free", 0] == h.lone([4, 5, 6], 20)
    # The free one has part in every step until it ends, as if it were alone.
    rows = [len(step.works) for step in h.steps]
    assert sum(len(step.samples) for step in h.steps) == 11 + 20
    assert len(rows) <= 20 + 2 * depth + 11


def alone(harness, prompt, **settings):
    h = harness(depth=0, grammars=harness.Source(), num_pages=200)
    h.add("x", prompt, **settings)
    h.run()
    return [h.tokens["x", index] for index in range(settings.get("n", 1))]


@pytest.mark.parametrize("depth", [0, 1])
def test_batches_mix_and_preemption_changes_nothing(harness, depth):
    h = harness(depth=depth, grammars=harness.Source(), num_pages=14, max_num_seqs=6)
    asked = {
        f"r{number}": (list(range(number, number + 9)), {"max_tokens": 24, "temperature": 1.0, "seed": number}
        | ({"grammar": str(8 + number)} if number % 3 else {"ignore_eos": True}))
        for number in range(8)
    }  # fmt: skip
    for name, (prompt, settings) in asked.items():
        h.add(name, prompt, **settings)
    h.run()
    assert h.scheduler.stats.preemptions > 0
    for name, (prompt, settings) in asked.items():
        assert [h.tokens[name, 0]] == alone(harness, prompt, **settings)
        if "grammar" in settings:
            assert follows(h.tokens[name, 0], int(settings["grammar"]))
    h.check_idle()


def test_each_of_n_has_a_matcher_of_its_own(harness):
    source = harness.Source()
    h = harness(depth=1, grammars=source)
    h.add("a", range(6), n=4, temperature=1.0, seed=3, max_tokens=20, grammar="9")
    h.run()
    texts = [h.tokens["a", index] for index in range(4)]
    assert all(follows(text, 9) for text in texts)
    assert len({tuple(text) for text in texts}) > 1
    assert sorted(matcher.tokens for matcher in source.made) == sorted(texts)


def test_length_and_the_services_own_end_cut_it(harness):
    h = harness(grammars=harness.Source())
    h.add("short", range(5), max_tokens=4, grammar="9")
    h.run()
    assert h.finish["short", 0] is FinishReason.LENGTH
    assert [token % 5 for token in h.tokens["short", 0]] == [0, 1, 2, 3]
    h.add("stopped", range(5), max_tokens=9, grammar="9")
    h.turn()
    h.end_sequence("stopped", 0)
    h.run().check_idle()


@pytest.mark.parametrize(
    "settings", [{"min_tokens": 20}, {"ignore_eos": True}, {"min_tokens": 20, "ignore_eos": True}, {}]
)
def test_the_grammar_alone_says_when_it_ends(harness, settings):
    h = harness(grammars=harness.Source())
    h.add("a", range(5), max_tokens=30, grammar="6", **settings)
    h.run()
    assert (follows(h.tokens["a", 0], 6), h.finish["a", 0]) == (True, FinishReason.EOS)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("fault", "end"),
    [("broken_at=3", FinishReason.ERROR), ("empty_at=3", FinishReason.GRAMMAR)],
    ids=["broken", "empty"],
)
def test_a_matcher_that_fails_ends_its_sequence_alone(harness, depth, fault, end):
    h = harness(depth=depth, grammars=harness.Source())
    h.add("bad", [1, 2, 3], max_tokens=20, grammar=f"9 {fault}")
    h.add("good", [4, 5, 6], max_tokens=20, grammar="9")
    h.add("free", [7, 8, 9], max_tokens=12, ignore_eos=True)
    h.run()
    assert h.finish["bad", 0] is end
    assert len(h.tokens["bad", 0]) == 3
    assert follows(h.tokens["good", 0], 9)
    assert h.tokens["free", 0] == h.lone([7, 8, 9], 12)
    h.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_step_leaves_the_matchers_of_others_as_they_are(harness, depth):
    h = harness(depth=depth, grammars=harness.Source(), max_num_batched_tokens=8)
    h.add("a", range(6), max_tokens=30, grammar="15")
    for _ in range(6):
        h.turn()
    h.add("b", range(20, 28), max_tokens=30, grammar="5")
    h.turn(broken=True)
    h.run()
    for name, length in (("a", 15), ("b", 5)):
        assert h.finish[name, 0] is FinishReason.ERROR or follows(h.tokens[name, 0], length)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("guessed", [0, 3])
def test_grammars_that_take_long_share_the_time_of_a_step(harness, depth, guessed):
    """A mask takes a second: each step makes one, and whoever has no grammar goes on in every step."""
    h = harness(depth=depth, grammars=harness.Source(), num_pages=200, speculative_length=guessed)
    for number in range(3):
        h.add(f"r{number}", range(number, number + 5), n=2, seed=number, max_tokens=20, grammar="5 takes=1")
    h.add("free", range(20, 30), max_tokens=20, ignore_eos=True)
    h.run().check_outputs()
    drafted = [sum(len(draft.tokens) for draft in step.drafts) for step in h.steps]
    assert max(len(step.masks) - more for step, more in zip(h.steps, drafted, strict=True)) == 1
    assert sum(len(step.masks) for step in h.steps) > 3 * 2 * 5
    rows = {init.row for step in h.steps for init in step.inits if 20 in init.tokens}
    taking_part = [not rows.isdisjoint(work.row for work in step.works) for step in h.steps]
    assert taking_part[0]
    if not guessed:
        assert taking_part[:20] == [True] * 20


def test_masks_behind_guesses_are_of_the_time_of_a_step(harness):
    """The slow one is not the last of them."""
    source = harness.Source()
    h = harness(grammars=source, num_pages=200, max_samples=64, speculative_length=3)
    for number in range(8):
        h.add(f"r{number}", range(number, number + 3), max_tokens=20, grammar="9 slow_at=3")
    taken = 0
    while h.scheduler.has_work:
        h.turn()
        before, taken = taken, sum(matcher.taken for matcher in source.made)
        assert taken - before <= 1
    h.check_outputs()
    assert any(draft.tokens[1:] for step in h.steps for draft in step.drafts)


def test_a_static_batch_follows_its_grammars_too(harness):
    h = harness(static=True, grammars=harness.Source())
    h.add("a", range(5), max_tokens=20, grammar="4")
    h.add("b", range(9), max_tokens=20, grammar="8")
    h.run()
    assert follows(h.tokens["a", 0], 4)
    assert follows(h.tokens["b", 0], 8)


def test_a_grammar_that_is_not_held_is_refused(harness):
    h = harness()
    with pytest.raises(RequestRejected) as caught:
        h.add("a", [1], max_tokens=2, grammar="forgotten")
    assert (caught.value.reason, caught.value.field) == (RejectReason.UNKNOWN_GRAMMAR, "constraint")
    assert not h.scheduler.stats.requests_rejected, "it comes again"
    assert not h.scheduler.has_work


# --------------------------------------------------------------------------------------------------------- the sampler


def bits(*tokens: int) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(4 * WORDS, "little")


def draw(logits: torch.Tensor, params: list[SamplingParams], masks: list[tuple[int, bytes]]) -> tuple[list, list]:
    sampler = Sampler(vocab_size=VOCAB, device=torch.device("cpu"), max_num_seqs=len(params), processors=())
    for row, one in enumerate(params):
        sampler.add_row(RowInit(row, (1, 2), 1, one, 0, ()))
    known = torch.tensor([[1, 2, 0]] * len(params), dtype=torch.int32)
    tokens, failed = sampler.sample(logits, range(len(params)), known, [2] * len(params), masks)
    return tokens.tolist(), failed.tolist()


def test_a_mask_limits_its_row_alone():
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(4, 1)
    greedy = SamplingParams(temperature=0.0, seed=0)
    tokens, failed = draw(logits, [greedy] * 4, [(0, bits(3, 40)), (2, bits(31)), (3, bits(32, 49, 0))])
    assert (tokens, failed) == ([40, 49, 31, 49], [False] * 4)


def test_a_mask_comes_after_bias_and_penalties_and_before_the_filters():
    logits = torch.zeros(3, VOCAB)
    logits[:, 9] = 5
    params = [
        SamplingParams(temperature=0.0, seed=0, logit_bias={9: 100.0, 5: 1.0}),  # what is barred stays barred
        SamplingParams(temperature=0.0, seed=0, presence_penalty=1.0),  # of two allowed, 2 has occurred
        SamplingParams(temperature=1.0, seed=0, top_k=1, top_p=0.1),  # the likeliest of what is allowed
    ]
    assert draw(logits, params, [(0, bits(4, 5)), (1, bits(2, 3)), (2, bits(44))]) == ([5, 3, 44], [False] * 3)


def test_a_mask_without_a_token_fails_its_row():
    greedy = SamplingParams(temperature=0.0, seed=0)
    assert draw(torch.ones(2, VOCAB), [greedy, greedy], [(1, bits())]) == ([0, 0], [False, True])
