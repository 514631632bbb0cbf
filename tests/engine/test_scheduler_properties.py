"""Scheduler, pool and tree under everything at once: arrivals, aborts, failures, pressure, overlap, in any order.

The fake runner (conftest.py) checks each step against a model of what the pages hold; the harness checks the engine's
books after each turn, and in the end that every text is the one of its lone run.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from engine.request import FinishReason, RequestRejected

BASE = [random.Random(5).randrange(50) for _ in range(40)]


def machine(harness, *, static: bool) -> type[RuleBasedStateMachine]:
    """The state machine, over a scheduler of the kind."""

    class SchedulerMachine(RuleBasedStateMachine):
        @initialize(
            depth=st.integers(0, 2),
            num_pages=st.integers(6, 40),
            page_size=st.sampled_from([1, 2, 4, 8]),
            max_num_seqs=st.integers(1, 6),
            max_num_batched_tokens=st.integers(1, 40),
            prefix_cache=st.sampled_from([True, True, False]),
            chunked_prefill=st.booleans(),
            reserve_full_length=st.sampled_from([False, False, True]),
            admission=st.sampled_from(["fcfs", "fcfs", "prefix"]),
            look_ahead=st.sampled_from([4, 4, 0]),
            guessed=st.sampled_from([(0, 0), (1, 0), (3, 5), (8, 40)]),
        )
        def begin(self, guessed, **drawn):
            if not static:
                drawn |= {"speculative_length": guessed[0], "max_samples": guessed[1]}
            self.engine = harness(static=static, grammars=harness.Source(), **drawn)
            self.harmed = False
            self.count = 0

        @rule(
            shared=st.integers(0, 30),
            own=st.lists(st.integers(0, 49), max_size=4),
            max_tokens=st.integers(1, 12),
            n=st.sampled_from([1, 1, 1, 2, 4]),
            priority=st.integers(0, 2),
            salt=st.sampled_from(["", "", "other"]),
            tenant=st.sampled_from(["", "", "other", "third"]),
            bypass_cache=st.sampled_from([False, False, False, True]),
            seed=st.sampled_from([None, None, 3]),
            min_tokens=st.integers(0, 3),
            stop_token_ids=st.sampled_from([(), (), (4,), (4, 7, 21)]),
            ignore_eos=st.booleans(),
            top_logprobs=st.sampled_from([None, None, 0, 2]),
            prompt_logprobs=st.sampled_from([None, None, None, 0, 1]),
            grammar=st.sampled_from(["", "", "", "3", "9", "4 takes=1"]),
        )
        def add(self, shared, own, seed, **drawn):
            prompt = BASE[:shared] + own
            try:
                self.engine.add(str(self.count), prompt, seed=seed, temperature=0.0 if seed is None else 1.0, **drawn)
            except RequestRejected:
                pool = self.engine.runner.num_pages * self.engine.runner.page_size
                assert not prompt or len(prompt) + drawn["max_tokens"] > pool
            self.count += 1

        @rule(turns=st.integers(1, 6))
        def turn(self, turns):
            for _ in range(turns):
                self.engine.turn()

        @precondition(lambda self: self.engine.requests)
        @rule(data=st.data())
        def abort(self, data):
            request_id = data.draw(st.sampled_from(sorted(self.engine.requests)))
            was_live = self.engine.scheduler.is_live(request_id)
            assert self.engine.abort(request_id) == was_live
            assert not self.engine.abort(request_id)

        @precondition(lambda self: self.engine.requests)
        @rule(data=st.data(), index=st.integers(0, 4))
        def end_sequence(self, data, index):
            request_id = data.draw(st.sampled_from(sorted(self.engine.requests)))
            if (request_id, index) not in self.engine.finish:
                self.engine.end_sequence(request_id, index)

        @rule(early=st.booleans())
        def fail(self, early):
            self.harmed = True
            self.engine.turn(broken=True, early=early)

        @precondition(lambda self: not static)
        @rule(row=st.integers(0, 5))
        def poison(self, row):
            self.harmed = True
            self.engine.runner.poison.add(row)

        @rule()
        def flush(self):
            self.engine.scheduler.cache.flush()

        def teardown(self):
            engine = getattr(self, "engine", None)
            if engine is None:
                return
            engine.run()
            engine.check_outputs()
            engine.check_idle()
            assert self.harmed or FinishReason.ERROR not in engine.finish.values()
            counts = engine.scheduler.stats
            assert counts.requests_accepted == len(engine.requests)
            assert counts.requests_finished + counts.requests_aborted == counts.requests_accepted
            assert counts.accepted_tokens <= counts.draft_tokens

    return SchedulerMachine


@pytest.mark.parametrize("static", [False, True], ids=["continuous", "static"])
def test_any_order_of_events(harness, static):
    run_state_machine_as_test(
        machine(harness, static=static),
        settings=settings(max_examples=30 if static else 120, stateful_step_count=40, deadline=None),
    )


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("static", [False, True], ids=["continuous", "static"])
def test_any_order_of_events_for_long(harness, static):
    run_state_machine_as_test(
        machine(harness, static=static),
        settings=settings(max_examples=2000 if static else 10_000, stateful_step_count=60, deadline=None),
    )


def crowd(harness, seed, **fixed):
    """A random crowd of requests on a random engine, run to its end."""
    draw = random.Random(seed)
    given = {
        "num_pages": draw.choice([12, 16, 24, 64]),
        "prefix_cache": draw.random() < 0.8,
        "chunked_prefill": draw.random() < 0.7,
        "max_num_batched_tokens": draw.choice([1, 5, 8, 9, 16, 40]),
        "max_num_seqs": draw.choice([1, 3, 8]),
        **fixed,
    }
    engine = harness(grammars=harness.Source(), **given)
    for number in range(20):
        prompt = BASE[: draw.randrange(1, 30)] + [draw.randrange(50) for _ in range(draw.randrange(3))]
        n, priority, grammar = draw.choice([1, 1, 1, 3]), draw.choice([0, 0, 1]), draw.choice(["", "", "6"])
        engine.add(str(number), prompt, max_tokens=draw.randrange(1, 14), n=n, priority=priority, grammar=grammar)
    engine.run()
    engine.check_outputs()
    engine.check_idle()
    assert len(engine.finish) == len(engine.tokens)
    return engine


@pytest.mark.parametrize("static", [False, True], ids=["continuous", "static"])
def test_texts_are_those_of_lone_runs_at_every_depth(harness, static):
    """Any batching, chunking, preemption, eviction and overlap gives the same texts."""
    preemptions = accepted = 0
    for seed in range(5 if static else 12):
        engines = [crowd(harness, seed, depth=depth, static=static) for depth in (0, 1, 2)]
        if not static:  # and with guesses
            engines += [crowd(harness, seed, depth=depth, speculative_length=5, max_samples=30) for depth in (0, 1)]
            accepted += engines[3].scheduler.stats.accepted_tokens
        assert all(engine.tokens == engines[0].tokens for engine in engines)
        assert all(engine.finish == engines[0].finish for engine in engines)
        preemptions += sum(engine.scheduler.stats.preemptions for engine in engines)
    assert static or preemptions > 50, "the pools were to be too small"
    assert static or accepted > 200, "guesses were to be accepted"


@pytest.mark.full
def test_every_budget(harness):
    """Budgets of 1 to 4,096 tokens."""
    for budget in [*range(1, 70), 127, 128, 129, 1000, 4096]:
        crowd(harness, budget, max_num_batched_tokens=budget, depth=budget % 3)
