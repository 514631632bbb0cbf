"""The static baseline: batches run to their end, padding is really computed, pages are reserved at full length."""

import pytest

from engine.request import FinishReason


def prompt(length: int, first: int) -> list[int]:
    return [(first + 3 * position) % 50 for position in range(length)]


def batch(harness, depth=0, **settings):
    """Three prompts of 10, 4 and 7 tokens that go on for 2, 5 and 3; a fourth has no row."""
    engine = harness(static=True, depth=depth, max_num_seqs=3, **settings)
    for name, length, max_tokens in [("a", 10, 2), ("b", 4, 5), ("c", 7, 3), ("d", 6, 2)]:
        engine.add(name, prompt(length, ord(name)), max_tokens=max_tokens, ignore_eos=True)
    return engine


def test_prompts_are_padded_to_the_longest_and_ended_rows_to_the_last(harness):
    engine = batch(harness).run()
    engine.check_outputs()
    tokens = [step.num_tokens for step in engine.steps]
    assert tokens == [30, 3, 3, 3, 3, 6, 1], "3 x 10, then three rows a step until b has its five, then d alone"
    assert [len(step.samples) for step in engine.steps] == [3, 3, 2, 1, 1, 1, 1]


def test_padding_takes_its_share_of_the_budget(harness):
    engine = batch(harness, max_num_batched_tokens=8).run()
    engine.check_outputs()
    assert [step.num_tokens for step in engine.steps] == [8, 8, 8, 6, 3, 3, 3, 3, 6, 1]


def test_the_next_batch_waits_for_the_last_of_this_one(harness):
    engine = batch(harness)
    while ("b", 0) not in engine.finish:
        assert "d" not in engine.cached
        engine.turn()
    engine.run()
    assert list(engine.cached.values()) == [0, 0, 0, 0]


def test_pages_are_reserved_at_full_length_until_the_batch_is_over(harness):
    engine = batch(harness)
    used = set()
    while ("b", 0) not in engine.finish:
        used.add(engine.scheduler.stats.used_pages)
        engine.turn()
    assert used == {0, 3 + 3 + 3}
    assert engine.scheduler.stats.used_pages == 0


def test_a_batch_has_the_sequences_whose_pages_fit(harness):
    engine = batch(harness, num_pages=7).run()
    engine.check_outputs()
    assert [len(step.inits) for step in engine.steps if step.inits] == [2, 2]


@pytest.mark.parametrize("depth", [0, 1])
def test_siblings_compute_their_prompt_each(harness, depth):
    engine = harness(static=True, depth=depth)
    engine.add("a", prompt(6, 1), n=3, max_tokens=4, seed=1, temperature=1.0)
    engine.run().check_outputs()
    assert engine.scheduler.stats.prefill_tokens == 18
    engine.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("turns", range(4))
def test_aborts_and_failures_leave_nothing(harness, turns, depth):
    engine = batch(harness, depth, max_num_batched_tokens=8)
    for _ in range(turns):
        engine.turn()
    engine.abort("a")
    engine.turn(broken=True)
    engine.abort("b")
    engine.abort("c")
    engine.run().check_outputs()
    engine.check_idle()
    assert engine.finish.get(("d", 0)) in (FinishReason.LENGTH, FinishReason.ERROR)


def test_the_longest_prompt_is_aborted_while_it_is_computed(harness):
    """The others have no padding to wait for any more: the very next step decodes."""
    engine = harness(static=True, max_num_batched_tokens=8)
    engine.add("a", prompt(4, 1), max_tokens=3, ignore_eos=True)
    engine.add("b", prompt(10, 2), max_tokens=3, ignore_eos=True)
    engine.turn()
    engine.abort("b")
    assert len(engine.turn().samples) == 1
    engine.run().check_outputs()
    engine.check_idle()


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("turns", range(1, 7))
def test_a_batch_that_all_leave_while_its_steps_run_is_over(harness, turns, broken):
    """Its rows go back: none is padded any more, and a step that fails then finds those that it began."""
    engine = harness(static=True, depth=1, max_num_batched_tokens=8)
    engine.add("a", prompt(8, 1), max_tokens=3, ignore_eos=True)
    engine.add("b", prompt(16, 2), n=2, max_tokens=3, ignore_eos=True)
    for turn in range(1, turns + 1):
        engine.turn(broken=broken and turn == turns)
    engine.abort("a")
    engine.abort("b")
    engine.add("c", prompt(6, 3), max_tokens=3, ignore_eos=True)
    engine.run().check_outputs()
    engine.check_idle()
    assert engine.finish["c", 0] is FinishReason.LENGTH
    assert all(work.row >= 0 for step in engine.steps for work in step.works)
