"""How long a light tenant waits beside a flood, on a simulated clock: by hand, and with traces of a chat service.

A step takes 4 ms and 22 us a token, as Qwen2.5-7B's do on an H200. The flood arrives at once, one minute in.
"""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import CoreInfo
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.step import StepResult

STEP_SECONDS, TOKEN_SECONDS = 4e-3, 22e-6
FLOOD_AT = 60.0
ANY = 1 << 40
FIGURES = Path(__file__).parents[2] / "docs" / "results" / "fairness.json"

LIGHT = [(FLOOD_AT + 0.5 * number, 100, 10) for number in range(1, 40)]  # arrival, tokens in, tokens out
FLOOD = [(0.0, 2000, 20)] * 300
LONG = [(0.0, 100_000, 20)] * 6  # 87 steps each
PREFILL = 300 * 2000 * TOKEN_SECONDS  # seconds of the flood's prompts alone


class NoModel:
    def launch(self, step):
        return StepResult((0,) * len(step.samples))

    def collect(self, launched):
        return launched


def queue_seconds(light, flood, *, apart):
    """Seconds from arrival to first step of the light tenant's requests; `apart`: the two are tenants of their own."""
    limits = {"num_pages": 65_536, "page_size": 16, "max_num_seqs": 256, "max_num_batched_tokens": 1152}
    info = CoreInfo(max_model_len=ANY, vocab_size=ANY, eos_token_ids=[], **limits)
    scheduler = Scheduler(EngineConfig(Path(), prefix_cache=False), info)
    core = EngineCore(scheduler, NoModel())
    coming = [(at, f"light-{number}", tokens, out) for number, (at, tokens, out) in enumerate(light)]
    coming += [(FLOOD_AT, f"flood-{number}", tokens, out) for number, (_, tokens, out) in enumerate(flood)]
    coming.sort(reverse=True)
    arrivals, waited, now = {}, [], 0.0
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            at, name, tokens, out = coming.pop()
            params = SamplingParams(temperature=0.0, seed=0, max_tokens=out)
            tenant = name.partition("-")[0] if apart else ""
            scheduler.add(Request(name, (0,) * tokens, params, tenant=tenant))
            arrivals[name] = at
        started = [start.request_id for start in core.turn().started]
        waited += [now - arrivals[name] for name in started if name.startswith("light")]
        now += STEP_SECONDS + TOKEN_SECONDS * scheduler.stats.last_step_tokens
    return waited


def test_in_one_queue_the_light_tenant_waits_for_the_flood():
    waited = queue_seconds(LIGHT, FLOOD, apart=False)
    assert len(waited) == len(LIGHT)
    assert PREFILL - 0.5 < waited[0] < 2 * PREFILL
    assert waited == sorted(waited, reverse=True), "the later it came, the less of the flood was left"


@pytest.mark.parametrize("flood", [FLOOD, LONG], ids=["many", "long"])
def test_apart_it_waits_for_a_few_steps(flood):
    full_step = STEP_SECONDS + 1152 * TOKEN_SECONDS
    assert max(queue_seconds(LIGHT, flood, apart=True)) < 4 * full_step


def test_alone_it_never_waits_longer_than_a_step():
    lone = STEP_SECONDS + 110 * TOKEN_SECONDS
    assert max(queue_seconds(LIGHT, [], apart=True)) <= lone


@pytest.mark.full
def test_traces_of_a_chat_service_wait_as_the_figures_say(data_file):
    """Five minutes of conversations beside all code completions of the Azure traces of Splitwise (ISCA 2024)."""

    def read(name):
        rows = csv.DictReader(data_file(name).read_text().splitlines())
        columns = ("arrival_s", "context_tokens", "generated_tokens")
        return [(float(at), max(1, int(n)), max(1, int(out))) for at, n, out in (map(row.get, columns) for row in rows)]

    light, flood = [row for row in read("azure_conv.csv") if row[0] <= 300], read("azure_code.csv")
    for row in json.loads(FIGURES.read_text())["rows"]:
        beside = flood if row["flood_requests"] else []
        assert (len(light), len(beside)) == (row["light_requests"], row["flood_requests"])
        waited = queue_seconds(light, beside, apart=row["tenants"] != "one queue for all")
        p50, p99 = np.percentile(waited, (50, 99))
        assert (p50, p99) == pytest.approx((row["queued_p50_s"], row["queued_p99_s"]), rel=0.2), row["tenants"]
