"""Who is served next: tenants beside each other (virtual token counters), longest cached prefixes, a bounded queue."""

import tracemalloc

import pytest

from engine.request import RejectReason, Request, RequestRejected, SamplingParams


def crowd(engine, tenants, *, tokens=4, number=0):
    """Adds one-token requests of unlike prompts: "aab" is two of tenant a and one of b; their ids are a0, a1, b2."""
    for position, tenant in enumerate(tenants, number):
        prompt = [position + 1] * (tokens[tenant] if isinstance(tokens, dict) else tokens)
        engine.add(f"{tenant}{position}", prompt, tenant=tenant, max_tokens=1, ignore_eos=True)


@pytest.mark.parametrize(
    ("tenants", "tokens", "expected"),
    [
        # Equal work: in turn, though all of a's came first.
        ("aaaabb", 4, "a b a b a a"),
        # Twice the work each: half as often. a: 4 8 12 16 20, b: 8 16 24; equal counters go by arrival.
        ("aaaaaabbb", {"a": 4, "b": 8}, "a b a a b a a b a"),
        ("aaabbbcc", 4, "a b c a b c a b"),
        ("aaaa", 4, "a a a a"),
    ],
)
def test_tenants_are_served_by_work(harness, tenants, tokens, expected):
    engine = harness(max_num_seqs=1)
    crowd(engine, tenants, tokens=tokens)
    engine.run().check_outputs()
    assert " ".join(name[0] for name in engine.order) == expected
    assert not engine.scheduler._waiting._work, "nothing is kept of tenants when nobody is left"


def test_within_a_tenant_and_between_equals_the_first_comes_first(harness):
    engine = harness(max_num_seqs=1)
    crowd(engine, "aabba")
    engine.run()
    assert engine.order == ["a0", "b2", "a1", "b3", "a4"]


def test_priority_goes_before_fairness(harness):
    engine = harness(max_num_seqs=1)
    crowd(engine, "aab")
    engine.add("urgent", [9, 9], tenant="a", priority=1, max_tokens=8, ignore_eos=True)
    engine.run()
    assert engine.order == ["urgent", "b2", "a0", "a1"]


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(
    ("settings", "steps"), [({"priority": 1}, 1), ({"tenant": "light"}, 2)], ids=["priority", "fairness"]
)
def test_nobody_waits_for_a_long_prompt_whose_turn_comes_first(harness, settings, steps, chunked):
    """The prompt is of 15 steps; the other one goes between two, at once or when the prompt has had more since."""
    engine = harness(max_num_batched_tokens=8, num_pages=100, chunked_prefill=chunked)
    engine.add("long", [5] * 120, max_tokens=2, ignore_eos=True)
    for _ in range(5):
        engine.turn()
    engine.add("short", [1, 2, 3], max_tokens=4, ignore_eos=True, **settings)
    works = [[work.length for work in engine.turn().works] for _ in range(steps)]
    assert works == [[8]] * (steps - 1) + [[3, 5]]
    assert len(engine.tokens["short", 0]) == 1
    engine.run()
    engine.check_outputs()


def test_prompts_that_do_not_fit_together_are_computed_one_by_one(harness):
    """In turns they would fill the pool before one of them is whole, and be computed again."""
    engine = harness(max_num_batched_tokens=8, num_pages=40)  # of 4 tokens
    for number, tenant in enumerate("abcabc"):
        engine.add(f"{tenant}{number}", [number] * 100, tenant=tenant, max_tokens=2, ignore_eos=True)
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats.preemptions == 0


def test_equal_prompts_of_several_tenants_are_computed_one_after_the_other(harness):
    """Each is of three steps. In turns all would be whole only at the end: after 7, 8 and 9 steps."""
    engine = harness(max_num_batched_tokens=8, num_pages=100)
    for number, tenant in enumerate("abc"):
        engine.add(tenant, [number] * 24, tenant=tenant, max_tokens=1, ignore_eos=True)
    whole = []
    for _ in range(9):
        engine.turn()
        whole.append(sum(map(len, engine.tokens.values())))
    assert whole == [0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_what_a_prompt_still_lacks_is_not_kept_from_a_higher_priority(harness):
    """The prompt would fill the pool but for a page; without its end the pool has room."""
    engine = harness(max_num_batched_tokens=8, num_pages=30)  # of 4 tokens
    engine.add("long", [5] * 110, max_tokens=2, ignore_eos=True)
    engine.turn()
    engine.add("urgent", [1] * 8, max_tokens=4, ignore_eos=True, priority=1)
    engine.turn()
    assert len(engine.tokens["urgent", 0]) == 1
    engine.run()
    engine.check_outputs()


def test_idleness_earns_no_credit(harness):
    """c comes when a and b have had 8 each: it begins there, and is served in turn instead of thrice at once."""
    engine = harness(max_num_seqs=1)
    crowd(engine, "aaaabbbb")
    while len(engine.order) < 4:
        engine.turn()
    crowd(engine, "ccc", number=8)
    engine.run()
    assert " ".join(name[0] for name in engine.order) == "a b a b a b c a b c c"


def test_decoded_tokens_count_twice(harness):
    """a's second request waits until b has had as much: 2 of prompt and 3 decoded are 2 + 6, b's four are 2 each."""
    engine = harness(max_num_seqs=1)
    for name in ("a0", "a1"):
        engine.add(name, [1, 2], tenant="a", max_tokens=4, ignore_eos=True)
    crowd(engine, "bbbbbb", tokens=2)
    engine.run()
    assert " ".join(name[0] for name in engine.order) == "a b b b b a b b"


def test_out_of_pages_the_tenant_that_had_most_gives_way(harness):
    engine = harness(num_pages=8, max_num_batched_tokens=64, prefix_cache=False)
    engine.add("a", [1] * 12, tenant="a", max_tokens=16, ignore_eos=True)
    engine.add("b", [2] * 8, tenant="b", max_tokens=16, ignore_eos=True)
    while not engine.scheduler.stats.preemptions:
        engine.turn()
    assert [one.request.request_id for one in engine.scheduler._waiting] == ["a"], "b came last, but a had more"
    engine.run().check_outputs()


@pytest.mark.parametrize(
    ("limit", "prompts", "refused", "message"),
    [
        ({"max_queue_requests": 2}, [3, 3], 1, "2 requests are waiting already"),
        ({"max_queue_tokens": 10}, [4, 6], 1, "2 requests with 10 prompt tokens are waiting already; 1 more"),
        ({"max_queue_tokens": 10}, [20], 1, "1 requests with 20 prompt tokens"),
    ],
)
def test_a_full_queue_takes_nothing_more(harness, limit, prompts, refused, message):
    engine = harness(**limit)
    for number, length in enumerate(prompts):
        engine.add(str(number), [1] * length)
    with pytest.raises(RequestRejected, match=message) as caught:
        engine.add("refused", [1] * refused)
    assert caught.value.reason is RejectReason.QUEUE_FULL
    engine.abort("0")
    engine.add("after an abort", [1] * refused)
    engine.turn()
    engine.add("after a step", [1] * prompts[0])
    assert engine.scheduler.stats.requests_rejected == 1
    engine.run().check_outputs()


def test_the_longest_cached_prefix_goes_first_but_nobody_waits_for_ever(harness, monkeypatch):
    monkeypatch.setattr("engine.waiting.MAX_OVERTAKEN", 3)
    engine = harness(max_num_seqs=1, admission="prefix")
    cached = list(range(1, 9))
    engine.add("warm", cached, max_tokens=1, ignore_eos=True)
    engine.run()
    engine.add("cold", [40] * 4, max_tokens=1, ignore_eos=True)
    # All of it is cached, and none of it is of use.
    engine.add("logprobs", cached, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    for number in range(5):
        length = 8 if number == 2 else 4
        engine.add(f"{length}-{number}", [*cached[:length], 30 + number], max_tokens=1, ignore_eos=True)
    engine.run().check_outputs()
    assert engine.order == ["warm", "8-2", "4-0", "4-1", "cold", "logprobs", "4-3", "4-4"]


def test_continuations_that_wait_hold_little(harness):
    """With as many stop ids as are taken: were these kept for each of them, a full queue would take 80 GB."""
    engine = harness.new_scheduler(vocab_size=2000)
    request = Request("a", (1,), SamplingParams(n=128, stop_token_ids=tuple(range(1024))))
    tracemalloc.start()
    try:
        engine.add(request)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 256 << 10
