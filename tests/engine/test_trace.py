"""Timelines of requests and steps: what is told, in which order, and how much is kept."""

from types import SimpleNamespace

import pytest

from engine.core import EngineCore
from engine.request import FinishReason
from engine.trace import MAX_EVENTS, STEPS_PER_REQUEST, Tracer


def told(engine, request_id):
    """Kinds and attributes of a request's events, in order."""
    return [(event.kind, event.attributes) for event in engine.scheduler.tracer.request(request_id)]


def test_the_life_of_a_request(harness):
    """10 tokens in chunks of 8 and 2, three tokens out, pages of 4: two full ones and a part of a third."""
    engine = harness(max_num_batched_tokens=8, trace_requests=8)
    engine.add("a", range(10), max_tokens=3, ignore_eos=True, marks=(("tokenized", 0.5),))
    engine.run()
    assert told(engine, "a") == [
        ("arrived", {}),
        ("tokenized", {}),
        ("queued", {"prompt_tokens": 10, "n": 1, "ahead": 0}),
        ("admitted", {"index": 0, "row": 0, "cached_tokens": 0, "cached_pages": 0}),
        ("prefill", {"index": 0, "step": 0, "start": 0, "tokens": 8, "pages_held": 2}),
        ("prefill", {"index": 0, "step": 1, "start": 8, "tokens": 2, "pages_held": 3}),
        ("first_token", {"index": 0, "step": 1}),
        ("finished", {"index": 0, "reason": "LENGTH", "tokens": 3}),
        ("released", {"index": 0, "pages": 3, "cached_tokens": 12}),
    ]
    engine.add("b", [*range(8), 40, 41], max_tokens=1, ignore_eos=True)
    engine.run()
    assert ("admitted", {"index": 0, "row": 0, "cached_tokens": 8, "cached_pages": 2}) in told(engine, "b")


def test_preemption_and_abort_are_told(harness):
    engine = harness(num_pages=8, max_num_batched_tokens=64, prefix_cache=False, trace_requests=8)
    for name in ("a", "b"):
        engine.add(name, [1] * 10, max_tokens=16, ignore_eos=True)
    while not engine.scheduler.stats.preemptions:
        engine.turn()
    engine.abort("a")
    engine.run()
    kinds = [kind for kind, _ in told(engine, "b")]
    assert kinds[kinds.index("preempted") :] == ["preempted", "released", "admitted", "prefill", "finished", "released"]
    assert dict(told(engine, "a"))["finished"]["reason"] == "ABORT"


def test_siblings_are_told_apart(harness):
    engine = harness(trace_requests=8)
    engine.add("a", range(6), n=2, max_tokens=2, ignore_eos=True)
    engine.run()
    ends = [attributes["index"] for kind, attributes in told(engine, "a") if kind == "finished"]
    assert sorted(ends) == [0, 1]
    assert [kind for kind, _ in told(engine, "a")].count("prefill") == 1, "the prompt is computed once"


def test_little_is_kept():
    tracer = Tracer(2)
    for name in ("a", "b", "c"):
        tracer.begin(name, [])
        for _ in range(MAX_EVENTS + 5):
            tracer.add(name, "prefill", index=0)
        tracer.add(name, "finished", index=0)
    assert tracer.request("a") == []
    assert [event.kind for event in tracer.request("b")] == ["prefill"] * MAX_EVENTS + ["finished"]
    tracer.add("a", "released", index=0)
    assert tracer.request("a") == [], "what is forgotten stays forgotten"
    assert tracer.steps.maxlen == 2 * STEPS_PER_REQUEST


@pytest.mark.parametrize("overlap", [0, 1])
def test_steps_are_told_with_their_times(harness, overlap):
    engine = harness(max_num_batched_tokens=8, trace_requests=8, check=False)
    engine.add("a", range(10), max_tokens=3, ignore_eos=True)

    def launch(step):
        if step.step_id == 3:
            raise RuntimeError("broken")
        result = engine.runner.execute(step)
        return SimpleNamespace(result=result)

    def collect(launched):
        engine.runner.uncollected.popleft()
        return launched.result

    core = EngineCore(engine.scheduler, SimpleNamespace(launch=launch, collect=collect), overlap=overlap)
    updates = []
    while core.has_work:
        updates += core.turn().updates
    assert updates[-1].finish is FinishReason.ERROR
    steps = sorted(engine.scheduler.tracer.steps, key=lambda step: step.step_id)
    assert [(step.rows, step.tokens, step.samples, step.admitted, step.error) for step in steps] == [
        (1, 8, 0, 1, ""), (1, 2, 1, 0, ""), (1, 1, 1, 0, ""), (1, 1, 1, 0, "broken"),
    ]  # fmt: skip
    for step in steps:
        times = (step.scheduling, step.scheduled, step.launched, step.collecting, step.collected, step.processed)
        assert times == tuple(sorted(times))
    if overlap:
        assert steps[1].launched <= steps[0].collecting, "the next step is launched before this one is waited for"
