"""The simulation of a light tenant beside a flood: against what can be said by hand."""

import pytest

from loadtest.fairness import FLOOD_AT, STEP_SECONDS, TOKEN_SECONDS, queue_seconds, read_lengths

LIGHT = [(FLOOD_AT + 0.5 * number, 100, 10) for number in range(1, 40)]
FLOOD = [(0.0, 2000, 20)] * 300
PREFILL = 300 * 2000 * TOKEN_SECONDS  # seconds of the flood's prompts alone


def test_in_one_queue_the_light_tenant_waits_for_the_flood():
    waited = queue_seconds(LIGHT, FLOOD, apart=False)
    assert len(waited) == len(LIGHT)
    assert PREFILL - 0.5 < waited[0] < 2 * PREFILL
    assert waited == sorted(waited, reverse=True), "the later it came, the less of the flood was left"


def test_apart_it_waits_for_a_few_steps():
    full_step = STEP_SECONDS + 1152 * TOKEN_SECONDS
    assert max(queue_seconds(LIGHT, FLOOD, apart=True)) < 4 * full_step


def test_alone_it_never_waits_longer_than_a_step():
    lone = STEP_SECONDS + 110 * TOKEN_SECONDS
    assert max(queue_seconds(LIGHT, [], apart=True)) <= lone


def test_traces_are_read_up_to_a_time(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,context_tokens,generated_tokens\n0.5,10,2\n1.5,0,0\n9.0,5,5\n")
    assert read_lengths(path, until=2) == [(0.5, 10, 2), (1.5, 1, 1)]
    with pytest.raises(FileNotFoundError):
        read_lengths(tmp_path / "none.csv")
