"""Reserving KV at full length: how few sequences then run in a pool where paging runs all.

The harness (conftest.py): pages of 4 tokens, 64 of them, 8 rows, 32 tokens a step, a window of 128, 50 token ids.
"""

import pytest


def prompt(length: int, first: int) -> list[int]:
    return [(first + 7 * position + position // 5) % 50 for position in range(length)]


def peak(engine, *, length: int) -> int:
    """Most sequences that ran together while each is ended from outside after `length` tokens."""
    most = 0
    while engine.scheduler.has_work or engine.in_flight:
        engine.turn()
        most = max(most, engine.scheduler.num_running)
        for key, tokens in engine.tokens.items():
            if len(tokens) >= length and key not in engine.silent:
                engine.end_sequence(*key)
    return most


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("reserve", "running"), [(True, 4), (False, 8)])
def test_how_many_run_in_the_same_pool(harness, reserve, running, depth):
    """8 prompt tokens and max_tokens 56 are 16 of 64 pages: four fit. Answers of 4 tokens need 3: all eight fit."""
    engine = harness(reserve_full_length=reserve, prefix_cache=False, max_num_batched_tokens=64, depth=depth)
    for number in range(8):
        engine.add(str(number), prompt(8, number), max_tokens=56, ignore_eos=True)
    assert peak(engine, length=4) == running
    engine.check_outputs()
    engine.check_idle()
    assert engine.scheduler.stats.preemptions == 0


def test_all_pages_are_taken_at_admission_and_given_back_at_the_end(harness):
    engine = harness(reserve_full_length=True, prefix_cache=False)
    engine.add("a", prompt(6, 1), max_tokens=13, ignore_eos=True)
    used = set()
    while engine.scheduler.has_work:
        engine.turn()
        used.add(engine.scheduler.stats.used_pages)
    assert used == {5, 0}, "19 tokens are 5 pages, from the first step to the last"
    assert [len(update.pages) for step in engine.steps for update in step.page_updates] == [5]
    engine.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
def test_who_has_pages_never_lacks_one(harness, depth):
    """Without reservation this pool preempts; with it, sequences wait instead."""
    preemptions = {}
    for reserve in (False, True):
        engine = harness(reserve_full_length=reserve, num_pages=16, depth=depth)
        for number in range(6):
            engine.add(str(number), prompt(8, number), max_tokens=20, ignore_eos=True)
        engine.run().check_outputs()
        engine.check_idle()
        preemptions[reserve] = engine.scheduler.stats.preemptions
    assert preemptions[False] > 0
    assert preemptions[True] == 0


def test_cached_prefixes_are_shared_and_only_the_rest_is_reserved(harness):
    engine = harness(reserve_full_length=True, num_pages=12)
    for number in range(3):
        engine.add(str(number), [*prompt(16, 1), number], max_tokens=11, ignore_eos=True)
    engine.turn()
    assert engine.scheduler.num_running == 2, "7 pages, then 4 shared and 3 more; the third lacks one"
    engine.run().check_outputs()
    assert list(engine.cached.values()) == [0, 16, 16]


@pytest.mark.parametrize("length", [8, 10])
def test_siblings_reserve_what_they_do_not_share(harness, length):
    """Two full pages are shared. Of 14 pages the leader has 6 (24 tokens), two siblings 4 each, the last waits."""
    engine = harness(reserve_full_length=True, num_pages=14)
    engine.add("a", prompt(length, 1), n=4, max_tokens=24 - length, ignore_eos=True)
    step = engine.turn()
    assert len(step.samples) == 3
    assert engine.scheduler.stats.used_pages == 14
    engine.run().check_outputs()
    engine.check_idle()
