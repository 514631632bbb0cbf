"""Soak: random requests on a CUDA device in a pool so small that preemption and eviction never end.

Greedy texts must be transformers' own, and every other one what the request gives alone; ends must be where stop tokens
and lengths put them; all books must agree. `pytest -m full tests/gpu` runs for FULCRUM_SOAK_SECONDS (600).
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.request import FinishReason, Request

VOCAB = 160
EOS = 3
PAGES = 24  # of 16 tokens; the longest sequence takes seven
ROUND = 300  # requests between two looks at everything
ALONE = 20  # of a round's requests, how many run again alone
MOST_TURNS = 20_000  # of a round; there is no livelock


class Round:
    """Random requests, and which of them are aborted when."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.stems = [self.tokens(60) for _ in range(4)]
        self.requests = [self.request(f"r{at}") for at in range(ROUND)]
        self.aborted = {each.request_id for each in self.requests if draw.random() < 0.12}

    def tokens(self, length: int) -> list[int]:
        return [self.draw.randrange(VOCAB) for _ in range(length)]

    def request(self, request_id: str) -> Request:
        draw = self.draw
        shared = draw.choice(self.stems)[: draw.choice((0, 15, 16, 17, 32, 60))]
        prompt = (*shared, *self.tokens(draw.choice((1, 2, 15, 16, 20))))
        return Request(
            request_id,
            prompt,
            self.params(),
            priority=draw.choice((0, 0, 0, 1, -1)),
            salt=draw.choice(("", "", "tenant")),
            bypass_cache=draw.random() < 0.05,
        )

    def params(self) -> SamplingParams:
        draw = self.draw
        params = SamplingParams(
            temperature=0.0,
            seed=draw.getrandbits(64),
            max_tokens=draw.choice((1, 2, 8, 16, 31)),
            stop_token_ids=draw.choice(((), (), tuple(range(20, 30)))),
            ignore_eos=draw.random() < 0.5,
            n=draw.choice((1, 1, 1, 2, 4)),
        )
        if draw.random() < 0.4:
            return params
        params = replace(
            params,
            temperature=draw.choice((0.0, 0.7, 1.0)),
            top_p=draw.choice((1.0, 0.9)),
            top_k=draw.choice((0, 20)),
            min_p=draw.choice((0.0, 0.05)),
            min_tokens=draw.choice((0, 0, 6)),
        )
        if draw.random() < 0.5:
            params = replace(params, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={9: 2.0})
        return params


def is_plain(params: SamplingParams) -> bool:
    """Whether transformers' likeliest token is the answer."""
    changed = params.logit_bias or params.min_tokens or params.repetition_penalty != 1.0
    return params.temperature == 0.0 and not changed


def expected_end(params: SamplingParams, text: list[int]) -> FinishReason | None:
    """How a text that ends here has ended; None: it should have gone on."""
    stops = dict.fromkeys(params.stop_token_ids, FinishReason.STOP_TOKEN)
    if not params.ignore_eos:
        stops[EOS] = FinishReason.EOS
    counted = [token for token in text if token in stops]
    if len(counted) > 1 or (counted and text[-1] != counted[0]):
        return None
    return stops.get(text[-1], FinishReason.LENGTH if len(text) == params.max_tokens else None)


def soak_round(seed: int, llm: LLM, model: Any, tools: SimpleNamespace, core: Any) -> tuple[int, int]:
    """One round; returns how many tokens were compared with those of lone runs, and how many texts differed there."""
    plan = Round(seed)
    draw, doomed = random.Random(seed), set(plan.aborted)
    scheduler = core.scheduler

    def aborts(turn: int) -> list[str]:
        """Now and then one that is live, in whatever state."""
        assert turn < MOST_TURNS
        live = [each for each in doomed if scheduler.is_live(each)] if turn % 3 == 0 else []
        chosen = [draw.choice(sorted(live))] if live else []
        doomed.difference_update(chosen)
        return chosen

    def look(turn: int) -> None:
        if turn % 50 == 0:
            scheduler.check_integrity()
            stats = core.stats()
            assert stats.free_pages + stats.cached_pages + stats.used_pages == stats.total_pages

    outcome = tools.drive(core, plan.requests, every=draw.choice((0, 1, 3)), aborts=aborts, each_turn=look)
    tools.assert_settled(core)
    # What is not cached may hold anything by the next round.
    tools.poison(llm, but=scheduler.cache._tree.pages())

    whole = [each for each in plan.requests if (each.request_id, 0) in outcome.finish]
    whole = [each for each in whole if each.request_id not in plan.aborted]
    assert {each.request_id for each in plan.requests} - plan.aborted == {each.request_id for each in whole}
    prompts, texts, others = [], [], []
    for request in whole:
        for index in range(request.params.n):
            text = outcome.tokens[request.request_id, index]
            assert outcome.finish[request.request_id, index] is expected_end(request.params, text)
            assert len(text) > min(request.params.min_tokens, request.params.max_tokens - 1)
            if is_plain(request.params):
                prompts.append(request.prompt)
                texts.append(text)
        if not is_plain(request.params):
            others.append(request)
    assert len(texts) > ROUND // 5
    model.assert_greedy(prompts, texts)

    compared = differing = 0
    for request in draw.sample(others, ALONE):
        alone = tools.drive(tools.core_on(llm, prefix_cache=False), [request]).tokens
        ours = {key: outcome.tokens[key] for key in alone}
        compared += sum(map(len, ours.values()))
        differing += sum(ours[key] != alone[key] for key in alone)
    return compared, differing


def soak(llm: LLM, model: Any, tools: SimpleNamespace, *, rounds: int | None = None, seconds: float = 0.0) -> None:
    """That many rounds, or that many seconds of them, on one pool and one tree."""
    core = tools.core_on(llm, num_pages=PAGES)
    until = time.monotonic() + seconds
    compared = differing = number = 0
    while number < rounds if rounds is not None else time.monotonic() < until:
        more, wrong = soak_round(number, llm, model, tools, core)
        compared, differing, number = compared + more, differing + wrong, number + 1
    stats = core.stats()
    assert stats.preemptions > 10 * number
    assert stats.prefix_hit_tokens > 1000 * number
    assert stats.requests_accepted == ROUND * number
    assert stats.requests_finished + stats.requests_aborted == stats.requests_accepted
    # A draw in many thousands may fall between two roundings of a sum.
    assert differing <= compared // 2000, f"{differing} texts differ from their lone runs, of {compared} tokens"


@pytest.fixture(scope="module")
def model(model_of: Callable[..., Any], tools: SimpleNamespace) -> Any:
    """A model whose oracle is on the device too: it checks some ten thousand tokens a round."""
    found = model_of("llama", eos_token_id=EOS)
    found.oracle.to(tools.device)
    return found


@pytest.fixture(scope="module")
def llm(model: Any, tools: SimpleNamespace) -> LLM:
    """An engine of nine rows and 64 tokens a step."""
    return tools.engine(model.folder)


def test_soak(llm: LLM, model: Any, tools: SimpleNamespace) -> None:
    """Eight rounds: 2,400 requests."""
    soak(llm, model, tools, rounds=8)


@pytest.mark.full
@pytest.mark.timeout(0)
def test_soak_for_long(llm: LLM, model: Any, tools: SimpleNamespace) -> None:
    """As long as FULCRUM_SOAK_SECONDS says."""
    soak(llm, model, tools, seconds=float(os.environ.get("FULCRUM_SOAK_SECONDS", "600")))
