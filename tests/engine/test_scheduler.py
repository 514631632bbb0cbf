"""The scheduler's rules one by one. The numbered bugs are those that other engines had; each has its test here.

The harness (conftest.py): pages of 4 tokens, 64 of them, 8 rows, 32 tokens a step, a window of 128, 50 token ids.
"""

from itertools import pairwise

import pytest

from engine.cache.radix import RadixTree
from engine.request import FinishReason, RejectReason, Request, RequestRejected, SamplingParams
from engine.scheduler import Scheduler
from engine.step import Sample, StepResult
from engine.waiting import MAX_OVERTAKEN

EOS = FinishReason.EOS


def prompt(length: int, first: int = 0) -> list[int]:
    """Token ids that differ from page to page, and from those of another `first`."""
    return [(first + 7 * position + position // 5) % 50 for position in range(length)]


def rows(step) -> dict[int, int]:
    """Tokens computed, by row."""
    return {work.row: work.length for work in step.works}


class Sure:
    """In the place of `engine.ngram.NGrams`: knows the text."""

    worth_waiting = True

    def __init__(self, text, sequence):
        self.text, self.sequence = text, sequence

    def follow(self, most):
        return most

    def guesses(self, most):
        known = len(self.sequence.tokens) - len(self.sequence.request.prompt)
        return tuple(self.text[known:][: min(most, 4)])


def feed(scheduler: Scheduler, *tokens: int) -> list:
    """Schedules a step and lets its samples be `tokens`; the updates."""
    return scheduler.update(scheduler.schedule(), StepResult(tokens))


# What is refused


@pytest.mark.parametrize(
    ("ids", "settings", "reason", "field"),
    [
        ([], {}, RejectReason.INVALID, "prompt"),
        ([1, 50], {}, RejectReason.INVALID, "prompt"),
        ([-1], {}, RejectReason.INVALID, "prompt"),
        ([1], {"max_tokens": 0}, RejectReason.INVALID, "max_tokens"),
        ([1], {"n": 0}, RejectReason.INVALID, "n"),
        ([1], {"stop_token_ids": (50,)}, RejectReason.INVALID, "stop_token_ids"),
        ([1], {"stop_token_ids": (1,) * 1025}, RejectReason.INVALID, "stop_token_ids"),
        ([1], {"logit_bias": {-1: 1.0}}, RejectReason.INVALID, "logit_bias"),
        ([1], {"logit_bias": {1: -1e39}}, RejectReason.INVALID, "logit_bias"),
        ([1], {"logit_bias": {1: float("nan")}}, RejectReason.INVALID, "logit_bias"),
        ([1], {"logit_bias": {1: float("inf")}}, RejectReason.INVALID, "logit_bias"),
        ([1], {"min_tokens": -1}, RejectReason.INVALID, "min_tokens"),
        ([1], {"temperature": float("nan")}, RejectReason.INVALID, "temperature"),
        ([1], {"temperature": 1e39}, RejectReason.INVALID, "temperature"),
        ([1], {"top_p": 1.5}, RejectReason.INVALID, "top_p"),
        ([1], {"min_p": 2.0}, RejectReason.INVALID, "min_p"),
        ([1], {"repetition_penalty": -1.0}, RejectReason.INVALID, "repetition_penalty"),
        ([1], {"frequency_penalty": float("inf")}, RejectReason.INVALID, "frequency_penalty"),
        ([1], {"top_logprobs": -1}, RejectReason.INVALID, "top_logprobs"),
        ([1], {"prompt_logprobs": 51}, RejectReason.INVALID, "prompt_logprobs"),
        ([1], {"max_tokens": 128}, RejectReason.INVALID, "max_tokens"),
        ([1] * 128, {"max_tokens": 1}, RejectReason.INVALID, "prompt"),
        ([1] * 60, {"max_tokens": 21}, RejectReason.TOO_LARGE, "max_tokens"),
    ],
)
def test_what_can_never_run_is_refused(harness, ids, settings, reason, field):
    """What the window admits but the whole pool does not hold is refused at once, not queued for ever."""
    engine = harness(num_pages=20)
    with pytest.raises(RequestRejected) as caught:
        engine.add("bad", ids, **settings)
    assert (caught.value.reason, caught.value.field) == (reason, field)
    assert not engine.scheduler.has_work
    engine.add("good", [1])
    engine.run().check_idle()
    stats = engine.scheduler.stats
    assert (stats.requests_rejected, stats.requests_accepted, stats.requests_finished) == (1, 1, 1)


def test_a_live_id_is_refused_and_free_again_afterwards(harness):
    engine = harness(depth=1)
    engine.add("a", prompt(5), ignore_eos=True)
    with pytest.raises(RequestRejected) as caught:
        engine.add("a", prompt(6))
    assert caught.value.reason is RejectReason.DUPLICATE_ID
    engine.turn()
    assert engine.abort("a")
    engine.silent.clear()
    engine.cached.clear()
    engine.add("a", prompt(7), max_tokens=3)
    engine.run().check_outputs()


def test_a_draining_scheduler_takes_nothing_new(harness):
    engine = harness()
    engine.add("a", prompt(5))
    engine.scheduler.draining = True
    with pytest.raises(RequestRejected) as caught:
        engine.add("b", prompt(5))
    assert caught.value.reason is RejectReason.DRAINING
    engine.run().check_outputs()


# How sequences end


@pytest.fixture
def scheduler(harness):
    return harness.new_scheduler


@pytest.mark.parametrize(
    ("settings", "tokens", "finish"),
    [
        ({}, [7], EOS),
        ({}, [3, 11], EOS),
        ({"stop_token_ids": (11, 5)}, [11], EOS),
        ({"stop_token_ids": (5,)}, [3, 5], FinishReason.STOP_TOKEN),
        ({"stop_token_ids": (7,), "ignore_eos": True}, [11, 7], FinishReason.STOP_TOKEN),
        ({"ignore_eos": True, "max_tokens": 2}, [7, 11], FinishReason.LENGTH),
        ({"max_tokens": 2}, [3, 7], EOS),
        ({"stop_token_ids": (5,), "max_tokens": 1}, [5], FinishReason.STOP_TOKEN),
        ({"max_tokens": 1}, [3], FinishReason.LENGTH),
        ({"min_tokens": 2}, [3, 3, 7], EOS),
    ],
)
def test_ends_are_judged_in_order(settings, tokens, finish, scheduler):
    """Every end-of-sequence id ends; then stop ids, then the length."""
    engine = scheduler()
    engine.add(Request("a", (1, 2, 3), SamplingParams(**settings)))
    for token in tokens[:-1]:
        assert [(update.tokens, update.finish) for update in feed(engine, token)] == [((token,), None)]
    assert [(update.tokens, update.finish) for update in feed(engine, tokens[-1])] == [((tokens[-1],), finish)]
    assert engine.schedule() is None
    assert not engine.has_work


@pytest.mark.parametrize(
    ("settings", "mask"),
    [
        ({}, ()),
        ({"min_tokens": 1}, (7, 11)),
        ({"min_tokens": 1, "stop_token_ids": (3, 7)}, (3, 7, 11)),
        ({"min_tokens": 1, "stop_token_ids": (3,), "ignore_eos": True}, (3,)),
    ],
)
def test_min_tokens_bars_all_that_would_end_it(settings, mask, scheduler):
    engine = scheduler()
    engine.add(Request("a", (1, 2), SamplingParams(**settings)))
    assert tuple(sorted(engine.schedule().inits[0].stop_mask)) == mask


def test_seeds_are_kept_or_minted_from_the_scheduler_s_own(scheduler):
    minted = []
    for seed in (1, 1, 2):
        engine = scheduler(seed=seed)
        for name, own in (("a", None), ("b", 5), ("c", None)):
            engine.add(Request(name, (1, 2), SamplingParams(seed=own, n=2)))
        inits = engine.schedule().inits
        assert [init.params.seed for init in inits[2:4]] == [5, 5]
        assert inits[0].params.seed == inits[1].params.seed != inits[4].params.seed
        minted.append((inits[0].params.seed, inits[4].params.seed))
    assert minted[0] == minted[1] != minted[2]


# Batching


def test_decodes_come_first_and_prompts_fill_the_budget(harness):
    engine = harness(max_num_batched_tokens=10)
    engine.add("a", prompt(4, 1), ignore_eos=True)
    engine.add("b", prompt(25, 2), ignore_eos=True)
    assert [work.length for work in engine.turn().works] == [4, 6]
    assert [work.length for work in engine.turn().works] == [1, 9]
    assert [work.length for work in engine.turn().works] == [1, 9]
    step = engine.turn()
    assert [work.length for work in step.works] == [1, 1]
    assert [sample.row for sample in step.samples] == [work.row for work in step.works]
    engine.run().check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
def test_without_chunks_a_prompt_waits_for_a_step_that_takes_it_whole(harness, depth):
    engine = harness(max_num_batched_tokens=10, chunked_prefill=False, depth=depth)
    for number in range(6):
        engine.add(str(number), prompt(7, number), ignore_eos=True, max_tokens=8)
    engine.add("long", prompt(23, 9), ignore_eos=True)
    engine.run().check_outputs()
    prefills = [work.length for step in engine.steps for work in step.works if work.length > 1]
    assert prefills == [7] * 6 + [10, 10, 3], "only what is beyond every budget is cut"
    assert engine.order == ["0", "1", "2", "3", "4", "5", "long"]


def test_priority_then_arrival(harness):
    engine = harness(max_num_seqs=1)
    for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", 1), ("e", -1)]:
        engine.add(name, prompt(5), priority=priority, max_tokens=2)
    engine.run()
    assert engine.order == ["b", "d", "a", "c", "e"]


def test_64_equal_prompts_at_once_compute_the_prefix_once(harness):
    engine = harness(max_num_seqs=64, max_num_batched_tokens=1000, num_pages=300)
    for number in range(64):
        engine.add(str(number), prompt(42), max_tokens=2, ignore_eos=True)
    step = engine.turn()
    assert sorted(rows(step).values()) == [2] * 63 + [42]
    assert len(step.samples) == 64
    assert engine.cached == {"0": 0} | {str(number): 40 for number in range(1, 64)}
    engine.run().check_outputs()
    engine.check_idle()


def test_progress_when_nothing_runs(harness):
    """What is left of the pool to the one that waits is the whole pool, watermark and cached pages included."""
    engine = harness(num_pages=8, max_num_batched_tokens=8)
    for number in range(5):
        engine.add(str(number), prompt(20, number), max_tokens=12, ignore_eos=True)
    engine.run().check_outputs()
    assert set(engine.finish.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("n", [1, 3])
def test_a_sequence_as_large_as_the_pool_ends_well(harness, n):
    engine = harness(num_pages=8)
    engine.add("a", prompt(3), max_tokens=29, ignore_eos=True, n=n)
    engine.run().check_outputs()
    engine.check_idle()


def test_the_window_need_not_be_whole_pages(harness):
    """The fake runner's page tables are as wide as the window."""
    engine = harness(max_model_len=13, depth=1)
    engine.add("a", prompt(4), max_tokens=9, ignore_eos=True, n=2)
    engine.run().check_outputs()


# The prefix cache


@pytest.mark.parametrize(
    ("cached", "length", "hit"),
    [(16, 16, 12), (16, 17, 16), (16, 20, 16), (18, 18, 16), (15, 20, 12), (3, 20, 0), (20, 4, 0), (20, 5, 4)],
)
def test_the_hit_is_full_pages_of_all_tokens_but_the_last(harness, cached, length, hit):
    """A prompt that is cached to its last token still has a token computed, and its page is not shared."""
    engine = harness()
    engine.add("first", prompt(20)[:cached], max_tokens=1)
    engine.run()
    engine.add("second", prompt(20)[:length], max_tokens=1)
    step = engine.turn()
    assert engine.cached["second"] == hit
    assert rows(step) == {step.works[0].row: length - hit}
    engine.run().check_outputs()
    stats = engine.scheduler.stats
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (cached + length, hit)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_second_turn_finds_the_answer_of_the_first(harness, depth):
    engine = harness(depth=depth)
    engine.add("one", prompt(10), max_tokens=11, ignore_eos=True)
    engine.run()
    history = prompt(10) + engine.tokens["one", 0]
    engine.add("two", history + prompt(5, 3), max_tokens=2)
    engine.run().check_outputs()
    assert engine.cached["two"] == 20, "the last of 21 tokens has no K and V"


def test_salts_and_bypass_do_not_share(harness):
    engine = harness()
    for name, settings in [("a", {}), ("b", {"salt": "x"}), ("c", {"bypass_cache": True}), ("d", {"salt": "x"})]:
        engine.add(name, prompt(20), max_tokens=1, **settings)
        engine.run()
    engine.check_outputs()
    assert engine.cached == {"a": 0, "b": 0, "c": 0, "d": 16}
    assert engine.scheduler.stats.cached_pages == 10
    assert engine.scheduler.stats.prefix_query_tokens == 60, "what bypasses the cache is not looked up"


def test_flushing_forgets_pages_in_use_too(harness):
    engine = harness()
    engine.add("done", prompt(20, 1), max_tokens=1)
    engine.run()
    engine.add("runs", prompt(20, 2), max_tokens=20, ignore_eos=True)
    engine.turn()
    assert engine.scheduler.cache.flush() == 5
    engine.add("late", prompt(20, 2), max_tokens=1)
    engine.run().check_outputs()
    assert engine.cached["late"] == 0
    engine.check_idle()


# n continuations


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("length", [8, 10])
def test_siblings_share_one_computed_prompt(harness, prefix_cache, depth, length):
    engine = harness(prefix_cache=prefix_cache, depth=depth)
    engine.add("a", prompt(length), n=4, temperature=1.0, seed=3, max_tokens=9)
    step = engine.turn()
    assert [work.length for work in step.works] == [length]
    assert [sample.work for sample in step.samples] == [0] * 4
    assert len({sample.row for sample in step.samples}) == 4
    tables = {update.row: [] for update in step.page_updates}
    for update in step.page_updates:
        tables[update.row] += update.pages
    full = length // 4
    assert len({tuple(table[:full]) for table in tables.values()}) == 1
    assert len(step.copies) == (3 if length % 4 else 0)
    engine.run().check_outputs()
    engine.check_idle()
    assert engine.scheduler.stats.prefill_tokens == length
    assert engine.scheduler.stats.prefix_query_tokens == (length if prefix_cache else 0)
    assert len({tuple(engine.tokens["a", index]) for index in range(4)}) > 1


def test_siblings_without_a_row_wait_for_one(harness):
    engine = harness(max_num_seqs=2)
    engine.add("a", prompt(10), n=5, max_tokens=4, ignore_eos=True)
    engine.add("b", prompt(6, 3), max_tokens=2)
    assert len(engine.turn().samples) == 2
    assert engine.scheduler.num_waiting == 4
    engine.run().check_outputs()
    assert engine.scheduler.stats.prefill_tokens == 10 + 3 * 2 + 6, "the late ones find the prompt in the cache"


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_not_all_siblings_of_a_long_prompt_take_a_row_in_one_step(harness, monkeypatch, prefix_cache, depth):
    """Rows for 40 tokens a step, and one more: the others find the prompt again. Uncached, all begin at once."""
    monkeypatch.setattr("engine.scheduler.MOVING", 40)
    engine = harness(depth=depth, prefix_cache=prefix_cache, max_num_batched_tokens=64, num_pages=256)
    engine.add("a", prompt(30), n=5, temperature=1.0, seed=3, max_tokens=9)
    engine.run().check_outputs()
    begun = [len(step.inits) for step in engine.steps if step.inits]
    assert begun == ([2, 2, 1] if prefix_cache else [5])
    assert engine.scheduler.stats.prefill_tokens == 30 + (3 * 2 if prefix_cache else 0)


def test_not_all_cached_prompts_that_come_together_take_a_row_in_one_step(harness, monkeypatch):
    monkeypatch.setattr("engine.scheduler.MOVING", 40)
    engine = harness()
    engine.add("first", prompt(30), max_tokens=2)
    engine.run()
    del engine.steps[:]
    for name in "abcde":
        engine.add(name, prompt(30), max_tokens=9)
    engine.run().check_outputs()
    assert [len(step.inits) for step in engine.steps if step.inits] == [2, 2, 1]


def test_siblings_go_on_when_their_leader_ends_early(harness):
    engine = harness(max_num_batched_tokens=8)
    engine.add("a", prompt(20), n=3, max_tokens=3)
    engine.turn()
    engine.end_sequence("a", 0)
    engine.end_sequence("a", 2)
    engine.run().check_outputs()
    assert list(engine.finish) == [("a", 1)]
    engine.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("turns", range(6))
def test_aborting_n_leaves_no_sibling(harness, turns, depth):
    engine = harness(max_num_batched_tokens=8, max_num_seqs=2, depth=depth)
    engine.add("a", prompt(20), n=3, max_tokens=30, ignore_eos=True)
    for _ in range(turns):
        engine.turn()
    assert engine.abort("a")
    assert not engine.scheduler.has_work
    engine.run().check_idle()


# Aborts


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("turns", range(7))
def test_an_abort_in_any_state_returns_everything_once(harness, turns, depth):
    """Queued, in mid-prompt, in decode, in flight; a second abort does nothing."""
    engine = harness(max_num_batched_tokens=8, max_num_seqs=2, depth=depth)
    for name in ("a", "b", "c"):
        engine.add(name, prompt(20, ord(name)), max_tokens=20, ignore_eos=True)
    for _ in range(turns):
        engine.turn()
    for name in ("b", "a", "c"):
        assert engine.abort(name)
        assert not engine.abort(name)
        engine.scheduler.check_integrity()
    assert not engine.abort("never")
    assert engine.scheduler.schedule() is None
    engine.run().check_idle()
    assert engine.scheduler.stats.requests_aborted == 3


def test_an_abort_frees_pages_within_the_step(harness):
    engine = harness(max_num_batched_tokens=64)
    for name in ("a", "b"):
        engine.add(name, prompt(20, ord(name)), max_tokens=20, ignore_eos=True, bypass_cache=True)
    engine.turn()
    assert engine.scheduler.stats.used_pages == 10
    engine.abort("a")
    assert engine.scheduler.stats.used_pages == 5
    engine.run().check_outputs()


def test_rows_and_pages_go_back_after_the_last_step_that_uses_them(harness):
    """An abort in flight frees nothing before the step is collected."""
    engine = harness(depth=1, prefix_cache=False)
    engine.add("a", prompt(20), max_tokens=20, ignore_eos=True)
    engine.turn()
    engine.abort("a")
    assert engine.scheduler.stats.used_pages == 5
    engine.add("b", prompt(20, 1), max_tokens=3)
    step = engine.turn()
    assert step.inits[0].row == 1, "the row of a is in use"
    assert engine.scheduler.stats.used_pages == 5, "the pages of a are back, b has its own"
    engine.run().check_outputs()


def test_a_stop_string_ends_one_sequence_without_a_word(harness):
    engine = harness(depth=1)
    engine.add("a", prompt(6), n=2, max_tokens=20, ignore_eos=True)
    engine.turn()
    engine.turn()
    engine.end_sequence("a", 0)
    engine.end_sequence("a", 0)
    engine.end_sequence("a", 9)
    engine.end_sequence("b", 0)
    engine.run().check_outputs()
    assert list(engine.finish) == [("a", 1)]
    assert engine.scheduler.stats.requests_finished == 1


# Out of pages


def test_the_victim_is_of_the_lowest_priority_and_the_youngest(harness):
    """Pages run out, the last of all goes back to the queue and later resumes out of the cache."""
    engine = harness(num_pages=13, max_num_batched_tokens=64)
    for name, priority in [("a", 0), ("low", -1), ("b", 0), ("c", 0)]:
        engine.add(name, prompt(8, ord(name[0])), priority=priority, max_tokens=16, ignore_eos=True)
    engine.turn()
    assert engine.scheduler.num_running == 4
    gone = []
    while len(gone) < 2:
        before = [one.request.request_id for one in engine.scheduler._waiting]
        engine.turn()
        after = [one.request.request_id for one in engine.scheduler._waiting]
        gone += [name for name in after if name not in before]
    assert gone == ["low", "c"]
    assert after == ["c", "low"]
    engine.run().check_outputs()
    stats = engine.scheduler.stats
    assert stats.preemptions >= 2
    assert stats.prefix_query_tokens == 32, "resumed ones are not counted again"
    assert engine.cached == {"a": 0, "low": 0, "b": 0, "c": 0}


@pytest.mark.parametrize("depth", [0, 1])
def test_a_preempted_sequence_finds_its_pages_in_the_tree(harness, depth):
    """Under overlap, too, one victim is enough: its pages are waited for, they come back with the step in flight."""
    engine = harness(num_pages=12, depth=depth)
    engine.add("a", prompt(16, 1), max_tokens=12, ignore_eos=True)
    engine.add("b", prompt(16, 2), max_tokens=12, ignore_eos=True)
    engine.run().check_outputs()
    stats = engine.scheduler.stats
    assert stats.preemptions == 1
    assert 32 < stats.prefill_tokens < 48, "less than b's whole text was computed again"


@pytest.mark.parametrize("depth", [1, 2])
def test_the_token_in_flight_of_a_preempted_sequence_is_kept(harness, depth):
    engine = harness(num_pages=12, depth=depth)
    for name in ("a", "b", "c"):
        engine.add(name, prompt(9, ord(name)), max_tokens=20, ignore_eos=True)
    engine.run().check_outputs()
    assert engine.scheduler.stats.preemptions >= 2
    assert engine.scheduler.stats.generated_tokens == 60, "no token is drawn twice"


def test_a_huge_prompt_is_overtaken_for_a_while_and_then_waited_for(harness):
    """No block by a prompt that does not fit yet, and no starvation of it."""
    engine = harness(num_pages=20, max_num_seqs=4, check=False)
    engine.add("runs", prompt(20, 1), max_tokens=50, ignore_eos=True)
    engine.turn()
    engine.add("huge", prompt(60, 2), max_tokens=2)
    for number in range(200):
        engine.add(str(number), prompt(5, number), max_tokens=3, ignore_eos=True, bypass_cache=True)
        engine.add(f"{number}'", prompt(6, number), max_tokens=3, ignore_eos=True, bypass_cache=True)
        engine.turn()
    engine.run().check_outputs()
    assert 10 < engine.order.index("huge") - 1 <= MAX_OVERTAKEN


def test_a_prompt_that_waits_for_pages_is_not_compared_anew_in_each_step(harness, monkeypatch):
    engine, compared = harness(num_pages=40, check=False), []
    engine.add("first", prompt(80), max_tokens=1)
    engine.run()
    engine.add("runs", prompt(60, 3), max_tokens=20, ignore_eos=True)
    engine.turn()
    engine.add("waits", [*prompt(80), *prompt(40, 5)], max_tokens=1)
    engine.turn()
    key = RadixTree._key
    monkeypatch.setattr(RadixTree, "_key", lambda self, *rest: compared.append(rest) or key(self, *rest))
    engine.turn()
    assert len(compared) <= 2, "20 of its 30 pages are cached"
    engine.run().check_outputs()
    assert engine.order == ["first", "runs", "waits"]
    assert engine.cached["waits"] == 80


def test_without_look_ahead_nobody_is_admitted_past_one_that_does_not_fit(harness):
    engine = harness(num_pages=32, max_num_seqs=6, max_model_len=128, look_ahead=0)
    engine.add("runs", prompt(30, 1), max_tokens=90, ignore_eos=True)
    engine.turn()
    engine.add("huge", prompt(110, 2), max_tokens=2)
    engine.add("small", prompt(5, 3), max_tokens=2, ignore_eos=True)
    engine.run().check_outputs()
    assert engine.order == ["runs", "huge", "small"]


def test_overtaking_is_bounded_however_long_it_does_not_fit(harness):
    engine = harness(num_pages=32, max_num_seqs=6, max_model_len=128)
    engine.add("runs", prompt(30, 1), max_tokens=90, ignore_eos=True)
    engine.turn()
    engine.add("huge", prompt(110, 2), max_tokens=2)
    for number in range(150):
        engine.add(str(number), prompt(5, number), max_tokens=2, ignore_eos=True)
    engine.run().check_outputs()
    assert engine.order.index("huge") - 1 == MAX_OVERTAKEN


# Overlap


def test_what_will_end_by_length_is_not_scheduled_again(harness):
    engine = harness(depth=1)
    engine.add("a", prompt(5), max_tokens=3, ignore_eos=True)
    engine.run().check_outputs()
    assert [step.num_tokens for step in engine.steps] == [5, 1, 1]


def test_the_surplus_token_of_a_finished_sequence_is_dropped(scheduler):
    """One wasted row, no placeholder anywhere, and the token counts nowhere."""
    engine = scheduler()
    engine.add(Request("a", (1, 2, 3), SamplingParams()))
    one = engine.schedule()
    two = engine.schedule()
    assert [work.start for work in two.works] == [3]
    assert engine.schedule() is not None
    assert [update.finish for update in engine.update(one, StepResult((7,)))] == [EOS]
    assert engine.update(two, StepResult((9,))) == []
    assert engine.stats.generated_tokens == 1
    assert engine.schedule() is None


@pytest.mark.parametrize(("max_samples", "guessing"), [(4, 0), (8, 1), (12, 2)])
def test_only_as_many_wait_for_their_last_token_as_all_their_guesses_have_room_for(harness, max_samples, guessing):
    """All would wait, one step ahead: those without room go on in every step, as if nothing were guessed."""
    engine = harness(depth=1, speculative_length=4, max_samples=max_samples, max_num_seqs=4, max_num_batched_tokens=64)
    for number in range(4):
        engine.add(str(number), prompt(9, number), max_tokens=40, ignore_eos=True)
    for sequences in engine.scheduler._live.values():
        sequences[0].ngrams = Sure(sequences[0].ngrams.text, sequences[0])
    assert None not in [engine.turn() for _ in range(7)], "the device is never without a step"
    for step, following in pairwise(engine.steps[1:6]):
        waiting = {*range(4)} - {work.row for work in step.works}
        assert len(waiting) == guessing
        assert {draft.row: len(draft.tokens) for draft in following.drafts} == dict.fromkeys(waiting, 4)
    engine.run().check_outputs()


# Logprobs


@pytest.mark.parametrize("depth", [0, 1])
def test_logprobs_of_a_prompt_need_its_computation(harness, depth):
    """A cached prompt is computed again, in chunks, once for all siblings; without them it is a hit."""
    engine = harness(max_num_batched_tokens=12, depth=depth)
    engine.add("cold", prompt(30), max_tokens=2, prompt_logprobs=1)
    engine.run()
    engine.add("warm", prompt(30), max_tokens=4, prompt_logprobs=1, top_logprobs=2, n=3)
    engine.add("plain", prompt(30), max_tokens=2)
    engine.run().check_outputs()
    assert engine.cached == {"cold": 0, "warm": 0, "plain": 28}
    counts = engine.scheduler.stats
    assert (counts.prefix_query_tokens, counts.prefix_hit_tokens) == (1 + 1 + 30, 28), (
        "what is computed is not asked for"
    )
    assert engine.prompt_logprobs["warm"] == engine.prompt_logprobs["cold"] != b""
    engine.check_idle()


def test_a_preempted_prompt_goes_on_behind_the_logprobs_that_were_reported(harness):
    """What was reported is matched, the rest is computed, and after that all of it is matched."""
    engine = harness(num_pages=16, max_num_batched_tokens=15)
    engine.add("low", prompt(40), max_tokens=9, prompt_logprobs=0, top_logprobs=0, ignore_eos=True)
    engine.turn()  # 15 of 40 tokens, three pages
    [low] = engine.scheduler._live["low"].values()
    engine.scheduler._preempt(low)
    engine.turn()
    assert [(work.start, work.length) for work in engine.steps[-1].works] == [(12, 15)]
    assert engine.steps[-1].prompt_logprobs[0][1:3] == (16, 28)
    while low.num_tokens < 44:
        engine.turn()
    engine.scheduler._preempt(low)
    engine.turn()
    assert [(work.start, work.length) for work in engine.steps[-1].works] == [(40, 4)]
    engine.run().check_outputs()
    assert len(engine.tokens["low", 0]) == 9


# Steps that fail


def test_a_failed_step_ends_its_own_sequences_only(harness):
    """What it wrote is found no more, what was computed before still is."""
    engine = harness(max_num_batched_tokens=12)
    engine.add("kept", prompt(8, 1), max_tokens=1)
    engine.run()
    engine.add("bad", prompt(8, 1) + prompt(12, 2), max_tokens=5)
    engine.add("queued", prompt(8, 3), max_tokens=2)
    engine.turn(broken=True)
    assert engine.finish == {("kept", 0): engine.finish["kept", 0], ("bad", 0): FinishReason.ERROR}
    engine.add("again", prompt(8, 1) + prompt(12, 2), max_tokens=5)
    engine.run().check_outputs()
    assert engine.cached["again"] == 8
    assert FinishReason.ERROR not in (engine.finish["queued", 0], engine.finish["again", 0])
    engine.check_idle()


def test_a_reader_in_flight_of_a_failed_step_s_pages_is_restarted(harness):
    """Under overlap: the second step was launched before the first was known to have failed."""
    engine = harness(depth=1)
    engine.add("bad", prompt(20), max_tokens=5)
    engine.turn(broken=True)
    engine.add("reader", [*prompt(20), 1, 2], n=2, max_tokens=5)
    engine.turn()
    assert engine.cached["reader"] == 20
    assert engine.finish == {("bad", 0): FinishReason.ERROR}
    engine.run().check_outputs()
    assert FinishReason.ERROR not in (engine.finish["reader", 0], engine.finish["reader", 1])
    engine.check_idle()


def test_what_was_copied_or_computed_from_spoilt_pages_is_spoilt(harness):
    """The leader's partial page was begun by the failed step, and copied by the one after it."""
    engine = harness(depth=1)
    engine.add("forks", prompt(11), n=2, max_tokens=6)
    engine.scheduler._budget = 8
    engine.turn()  # tokens 0 to 7
    engine.scheduler._budget = 2
    engine.turn(broken=True)  # tokens 8 and 9
    engine.turn()  # token 10, and the fork; then the failure is known
    assert engine.finish == {("forks", 0): FinishReason.ERROR}
    engine.run().check_outputs()
    assert engine.finish["forks", 1] is not FinishReason.ERROR
    engine.check_idle()


def test_pages_that_follow_from_spoilt_ones_are_spoilt(harness):
    """Computed from a sequence's own spoilt page, cached below another's good one, and read by a third."""
    engine = harness(depth=1)
    engine.add("good", prompt(4), max_tokens=5, ignore_eos=True)
    text = prompt(4) + engine.lone(prompt(4), 5)[:4] + prompt(8, 3)
    engine.turn()
    engine.scheduler._budget = 3
    engine.add("bad", text, max_tokens=3)
    engine.turn()  # its tokens 4 and 5
    engine.scheduler._budget = 1
    while ("good", 0) not in engine.finish:
        engine.turn()  # the good one fills page 1 meanwhile, and in its last step the bad one has token 6
    engine.turn(broken=True)  # token 7: page 1 once more
    engine.scheduler._budget = 32
    engine.add("reader", [*text, 1, 2], max_tokens=3)
    engine.turn()  # tokens 8 to 15, and the reader of them; then the failure is known
    assert engine.cached == {"good": 0, "bad": 4, "reader": 16}
    assert engine.finish["bad", 0] is FinishReason.ERROR
    engine.run().check_outputs()
    assert engine.finish["reader", 0] is not FinishReason.ERROR
    engine.check_idle()


def test_a_launch_that_fails_while_another_step_is_in_flight(harness):
    engine = harness(depth=1, max_num_batched_tokens=8)
    for name in ("a", "b", "c"):
        engine.add(name, prompt(8, ord(name)), max_tokens=6, ignore_eos=True)
    engine.turn()
    engine.turn(broken=True, early=True)
    engine.run().check_outputs()
    assert [key for key, finish in engine.finish.items() if finish is FinishReason.ERROR] == [("a", 0), ("b", 0)]
    engine.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_logits_that_are_not_finite_end_one_sequence_and_leave_no_trace(harness, depth):
    """The spoilt page was read out of the cache, so the reader cannot have been the only one to withdraw it."""
    engine = harness(depth=depth, max_num_batched_tokens=12)
    engine.add("bystander", prompt(4, 7), max_tokens=20, ignore_eos=True)
    engine.add("source", prompt(20), max_tokens=5)
    engine.runner.poison.add(1)
    engine.turn()
    engine.abort("source")  # before it drew a token: its pages are cached, and nobody knows
    engine.add("victim", prompt(20), max_tokens=5)
    while ("victim", 0) not in engine.finish:
        engine.turn()
    assert engine.cached["victim"] == 8
    assert engine.finish["victim", 0] is FinishReason.ERROR
    engine.add("after", prompt(20), max_tokens=5)
    engine.run().check_outputs()
    assert engine.finish["after", 0] is not FinishReason.ERROR
    assert engine.finish["bystander", 0] is FinishReason.LENGTH
    engine.check_idle()


# What is counted


def test_what_is_counted(scheduler):
    engine = scheduler()
    engine.add(Request("a", tuple(prompt(9)), SamplingParams(n=2)))
    engine.add(Request("b", tuple(prompt(9, 3)), SamplingParams()))
    step = engine.schedule()
    assert step.started == (("a", 0), ("b", 0))
    assert step.samples == (Sample(0, 0), Sample(0, 1), Sample(1, 2))
    engine.update(step, StepResult((1, 2, 3)))
    stats = engine.stats
    assert (stats.running_sequences, stats.waiting_sequences, stats.live_requests) == (3, 0, 2)
    assert (stats.total_pages, stats.used_pages, stats.free_pages, stats.cached_pages) == (64, 7, 57, 0)
    assert (stats.prefill_tokens, stats.generated_tokens, stats.prefix_query_tokens) == (18, 3, 18)
