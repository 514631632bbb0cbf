"""The time to launch is worked out by hand: began + 0.97 x seconds seen - seconds to launch - 0.5 ms."""

import pytest

from engine.pacing import Pacer
from engine.step import RowWork, Step


def step(*lengths: int) -> Step:
    return Step(0, (), (), tuple(RowWork(row, 0, length) for row, length in enumerate(lengths)), ())


def run(pacer: Pacer, at: float, one: Step, busy: float, launch: float = 0.001) -> float:
    """A step launched alone at `at` and collected; returns when."""
    pacer.launched(one, at, at + launch)
    pacer.collected(busy, at + launch + busy)
    return at + launch + busy


def test_nothing_is_held_while_nothing_is_known():
    pacer = Pacer()
    assert pacer.hold(0.0) == 0
    pacer.launched(step(1, 1), 0.0, 0.001)
    assert pacer.hold(0.001) == 0


def test_held_until_shortly_before_the_end():
    pacer = Pacer()
    now = run(pacer, 0.0, step(1, 1), busy=0.010)
    pacer.launched(step(1, 1), now, now + 0.001)
    assert pacer.hold(now + 0.001) == pytest.approx(0.97 * 0.010 - 0.001 - 0.0005)
    assert pacer.hold(now + 0.009) == pytest.approx(0.97 * 0.010 - 0.009 + 0.001 - 0.001 - 0.0005)
    assert pacer.hold(now + 0.0095) == 0
    # With a second one in flight the device has its work.
    pacer.launched(step(1, 1), now + 0.0095, now + 0.0101)
    assert pacer.hold(now + 0.0102) == 0
    # That one began when the first ended.
    pacer.collected(0.010, now + 0.011)
    assert pacer.hold(now + 0.011) == pytest.approx(0.97 * 0.010 - 0.001 * 0.9 - 0.0005)


def test_kinds_differ_by_tokens_and_chunks():
    pacer = Pacer()
    now = run(pacer, 0.0, step(*[1] * 64), busy=0.010)
    for other in (step(*[1] * 128), step(64), step(*[1] * 63)):
        pacer.launched(other, now, now)
        assert pacer.hold(now) == 0
        pacer.collected(0.0, now)
    pacer.launched(step(*[1] * 65), now, now)
    assert pacer.hold(now) > 0


def test_an_estimate_falls_at_once_and_rises_slowly():
    pacer = Pacer()
    now = run(pacer, 0.0, step(1), busy=0.010, launch=0.0)
    now = run(pacer, now, step(1), busy=0.005, launch=0.0)
    now = run(pacer, now, step(1), busy=0.010, launch=0.0)
    pacer.launched(step(1), now, now)
    assert pacer.hold(now) == pytest.approx(0.97 * 0.005 * 1.02 - 0.0005)


def test_a_slow_launch_is_allowed_for_and_forgotten_slowly():
    pacer = Pacer()
    now = run(pacer, 0.0, step(1), busy=0.010, launch=0.004)
    now = run(pacer, now, step(1), busy=0.010, launch=0.0)
    pacer.launched(step(1), now, now)
    assert pacer.hold(now) == pytest.approx(0.97 * 0.010 - 0.9 * 0.9 * 0.004 - 0.0005)


def test_a_failed_step_is_forgotten():
    pacer = Pacer()
    now = run(pacer, 0.0, step(1), busy=0.010)
    pacer.launched(step(1), now, now)
    pacer.collected(0.0, now)
    assert pacer.hold(now) == 0
