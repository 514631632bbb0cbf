"""The whole engine on a CUDA device, its graphs replayed and its steps overlapped: float32, greedy, and whatever
happens on the way (any setting, batch size, prefix hit, preemption, abort or stale NaN), transformers' own tokens."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from engine import LLM, SamplingParams
from engine.core import EngineCore
from engine.request import FinishReason, Request

VOCAB = 160
FAMILIES = {"llama": {}, "mistral": {"sliding_window": 20}, "qwen2": {}, "qwen3": {}}
PAGE = 16


def tokens(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


PROMPTS = [tokens(length, length) for length in (1, 15, 16, 17, 64, 300)]
# More of them than rows: some wait.
MANY = [tokens(length, length) for length in (3, 40, 16, 1, 150, 17, 64, 33, 15, 32, 90, 5)]


def greedy(count: int, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **settings)


def requests(prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
    return [Request(f"r{at}", tuple(prompt), params) for at, prompt in enumerate(prompts)]


def firsts(outcome: Any, count: int) -> list[list[int]]:
    """The first continuation of each request."""
    return [outcome.tokens[f"r{at}", 0] for at in range(count)]


@pytest.fixture(scope="module")
def llama(model_of: Callable[..., Any]) -> Any:
    return model_of("llama")


@pytest.fixture(scope="module")
def llm(llama: Any, tools: SimpleNamespace) -> LLM:
    """An engine of nine rows and 64 tokens a step, whose runner the tests put under schedulers of their own."""
    return tools.engine(llama.folder)


@pytest.mark.parametrize("budget", [2048, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers(
    family: str, budget: int, model_of: Callable[..., Any], tools: SimpleNamespace
) -> None:
    """Each family, prompts whole or in chunks beside decodes; 64 tokens; the second time out of the prefix cache."""
    model = model_of(family, **FAMILIES[family])
    llm = tools.engine(model.folder, max_num_batched_tokens=budget)
    assert llm.core._overlap == 1
    assert len(llm.core._runner._graphs) > 10
    for cached in (False, True):
        results = llm.generate(PROMPTS, greedy(64))
        outputs = [result.completions[0].token_ids for result in results]
        assert [len(output) for output in outputs] == [64] * len(PROMPTS)
        assert len({token for output in outputs for token in output}) > 20  # no degenerate model
        model.assert_greedy(PROMPTS, outputs)
        tools.assert_settled(llm.core)
        assert cached == (results[-1].cached_tokens > 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"cuda_graphs": False},
        {"overlap": False},
        {"cuda_graphs": False, "overlap": False},
        {"prefix_cache": False},
        {"chunked_prefill": False},
        {"attention": "reference"},
        {"attention": "reference", "overlap": False},
        {"scheduler": "static"},
        {"scheduler": "static", "max_num_seqs": 4, "max_num_batched_tokens": 20},
        {"page_size": 1},
        {"page_size": 64},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"reserve_full_length": True},
    ],
    ids=str,
)
def test_no_setting_changes_the_text(settings: dict[str, Any], llama: Any, tools: SimpleNamespace) -> None:
    """Every switch of the engine gives the same tokens, the second time out of the cache where there is one."""
    llm = tools.engine(llama.folder, **settings)
    count = 8 if settings.get("max_num_batched_tokens") == 1 else 24
    for _ in range(2):
        outputs = [each.completions[0].token_ids for each in llm.generate(MANY, greedy(count))]
        assert [len(output) for output in outputs] == [count] * len(MANY)
        llama.assert_greedy(MANY, outputs)
        tools.assert_settled(llm.core)


@pytest.mark.parametrize("size", range(1, 11))
def test_every_batch_size(size: int, llm: LLM, llama: Any, tools: SimpleNamespace) -> None:
    """From one row to one more than there are, so that recorded steps of 1, 2, 4, 8 and 9 rows run with and
    without rows of padding; in whole prompts and in chunks."""
    core = tools.core_on(llm)
    for prompts in (MANY[:size], [tokens(3, at) for at in range(size)]):
        outcome = tools.drive(core, requests(prompts, greedy(12)))
        llama.assert_greedy(prompts, firsts(outcome, size))
        tools.assert_settled(core)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_staggered_arrivals(every: int, llm: LLM, llama: Any, tools: SimpleNamespace) -> None:
    """A request every few steps: chunks of prompts beside decodes, rows and pages taken over from finished ones."""
    core = tools.core_on(llm)
    outcome = tools.drive(core, requests(MANY + PROMPTS, greedy(20)), every=every)
    llama.assert_greedy(MANY + PROMPTS, firsts(outcome, len(MANY + PROMPTS)))
    tools.assert_settled(core)


@pytest.mark.parametrize("penalty", [1.05, 2.0])
def test_repetition_penalty_equals_transformers(penalty: float, llm: LLM, llama: Any, tools: SimpleNamespace) -> None:
    """What Qwen2.5 asks for by itself, over prompt and answer, with steps in flight."""
    core = tools.core_on(llm)
    outcome = tools.drive(core, requests(PROMPTS, greedy(64, repetition_penalty=penalty)), every=1)
    llama.assert_greedy(PROMPTS, firsts(outcome, len(PROMPTS)), RepetitionPenaltyLogitsProcessor(penalty))
    tools.assert_settled(core)


def test_prefix_hits_at_and_off_page_borders(llm: LLM, llama: Any, tools: SimpleNamespace) -> None:
    """One prefix cut at 15 to 33 tokens, one request after the other: hits are whole pages before the last token, as
    counted by hand; then a prompt that goes on from a finished answer finds that answer's pages too."""
    core = tools.core_on(llm)
    stem, lengths = tokens(33, 7), (15, 16, 17, 32, 33)
    for _ in range(2):
        hits = []
        for length in lengths:
            outcome = tools.drive(core, requests([stem[:length]], greedy(40)))
            llama.assert_greedy([stem[:length]], firsts(outcome, 1))
            hits.append(outcome.cached["r0"])
        assert hits == [0, 0, 16, 16, 32]
    # 33 + 40 tokens, of which the last was never computed: four full pages.
    onwards = [*stem, *outcome.tokens["r0", 0], 1, 2, 3]
    outcome = tools.drive(core, requests([onwards], greedy(20)))
    assert outcome.cached["r0"] == 64
    llama.assert_greedy([onwards], firsts(outcome, 1))
    tools.assert_settled(core)


def test_equal_prompts_at_once(llm: LLM, llama: Any, tools: SimpleNamespace) -> None:
    """Nine equal prompts in one step: all but the first read pages that it fills in that very step."""
    core = tools.core_on(llm)
    prompts = [tokens(40, 3)] * 9
    outcome = tools.drive(core, requests(prompts, greedy(12)))
    assert [outcome.cached[f"r{at}"] for at in range(9)] == [0] + [32] * 8
    llama.assert_greedy(prompts, firsts(outcome, 9))
    tools.assert_settled(core)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_changes_no_text(prefix_cache: bool, llm: LLM, llama: Any, tools: SimpleNamespace) -> None:
    """A pool of 13 pages, one more than the longest sequence needs, for twelve prompts of two siblings each."""
    core = tools.core_on(llm, num_pages=13, prefix_cache=prefix_cache)
    outcome = tools.drive(core, requests(MANY, greedy(40, n=2)), each_turn=lambda _: core.scheduler.check_integrity())
    assert core.stats().preemptions > 0
    for index in range(2):
        outputs = [outcome.tokens[f"r{at}", index] for at in range(len(MANY))]
        assert [len(output) for output in outputs] == [40] * len(MANY)
        llama.assert_greedy(MANY, outputs)
    tools.assert_settled(core)


def test_aborts_in_every_state(llm: LLM, llama: Any, tools: SimpleNamespace) -> None:
    """Requests that wait, are in the middle of their prompt, decode, have siblings waiting, or were preempted are
    aborted with steps in flight; the others' tokens are right and no page is lost."""
    core = tools.core_on(llm, num_pages=24)
    scheduler = core.scheduler
    prompts = [*MANY, tokens(300, 1), *MANY[:6]]
    asked = requests(prompts, greedy(30))
    asked[4] = Request("r4", tuple(prompts[4]), greedy(30, n=3))
    seen: dict[str, str] = {}

    def state(request_id: str) -> str:
        each = next(iter(scheduler._live[request_id].values()))
        if each in scheduler._waiting:
            return "preempted" if len(each.tokens) > len(each.request.prompt) else "waiting"
        if each in scheduler._prefilling:
            return "siblings wait" if each.followers else "chunk"
        return "decoding"

    def aborts(_: int) -> list[str]:
        """One request in each state that none was aborted in yet; the last of its state."""
        found = {state(request_id): request_id for request_id in scheduler._live}
        new = {kind: request_id for kind, request_id in found.items() if kind not in seen}
        seen.update(new)
        return list(new.values())

    outcome = tools.drive(core, asked, aborts=aborts, each_turn=lambda _: scheduler.check_integrity())
    assert set(seen) == {"preempted", "waiting", "siblings wait", "chunk", "decoding"}
    left = [at for at in range(len(prompts)) if f"r{at}" not in seen.values()]
    assert {request_id for request_id, _ in outcome.finish} == {f"r{at}" for at in left}
    llama.assert_greedy([prompts[at] for at in left], [outcome.tokens[f"r{at}", 0] for at in left])
    assert core.stats().requests_aborted == len(seen)
    tools.assert_settled(core)


@pytest.mark.parametrize("turn", range(12))
def test_abort_of_all_at_any_turn(turn: int, llm: LLM, tools: SimpleNamespace) -> None:
    """Everything is aborted at once, at each of the first turns: nothing more comes, and no page is lost."""
    core = tools.core_on(llm, num_pages=30)
    asked = requests(MANY, greedy(30, n=2))
    outcome = tools.drive(
        core, asked, aborts=lambda at: [request.request_id for request in asked] if at == turn else ()
    )
    assert outcome.finish == {}
    tools.assert_settled(core)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_stale_nan_does_not_matter(family: str, model_of: Callable[..., Any], tools: SimpleNamespace) -> None:
    """Bugs 16 and 18: NaN in the whole pool before the first request, the padding's page included; then in every page
    that is not cached, while the cached ones are read again; then everywhere once nothing is cached."""
    model = model_of(family, **FAMILIES[family])
    llm = tools.engine(model.folder)
    core = tools.core_on(llm)
    for cached in (False, True, False):
        if not cached:
            core.scheduler.cache.flush()
        tools.poison(llm, but=core.scheduler.cache._tree.pages())
        outcome = tools.drive(core, requests(MANY, greedy(20)), every=2)
        model.assert_greedy(MANY, firsts(outcome, len(MANY)))
        assert (sum(outcome.cached.values()) > 0) == cached
        tools.assert_settled(core)


def test_a_page_that_goes_bad_ends_its_own_sequence(llm: LLM, llama: Any, tools: SimpleNamespace) -> None:
    """NaN under a running sequence ends it with an error while the next step is in flight already; its
    neighbour's text is right, and nothing of what it computed is ever read again."""
    core = tools.core_on(llm)
    prompts = [tokens(40, 1), tokens(40, 2)]
    for request in requests(prompts, greedy(12)):
        core.scheduler.add(request)
    updates = [update for _ in range(3) for update in core.turn().updates]
    [bad] = core.scheduler._live["r0"].values()
    tools.poison(llm, but=set(range(llm.info.num_pages + 1)) - {bad.pages[0]})
    while core.has_work:
        updates += core.turn().updates
    ends = {update.request_id: update for update in updates if update.finish is not None}
    assert (ends["r0"].finish, ends["r1"].finish) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert ends["r0"].message == "its logits are not finite"
    output = [token for update in updates if update.request_id == "r1" for token in update.tokens]
    llama.assert_greedy(prompts[1:], [output])
    outcome = tools.drive(core, requests(prompts, greedy(12)))
    assert (outcome.cached["r0"], outcome.cached["r1"]) == (0, 32)
    llama.assert_greedy(prompts, firsts(outcome, 2))
    tools.assert_settled(core)


def test_warm_up_leaves_the_pool_at_zero(llama: Any, tools: SimpleNamespace) -> None:
    """Neither recording nor warming up leaves anything that could be read later, and a page is padding's."""
    runner = tools.engine(llama.folder).core._runner
    torch.cuda.synchronize()
    assert runner._kv_cache.shape[1] == runner.num_pages + 1
    assert runner._kv_cache.count_nonzero() == 0


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.7, "repetition_penalty": 1.2, "logit_bias": {9: 1.0}, "min_tokens": 4, "n": 2},
]


@pytest.mark.parametrize("budget", [4 << 30, 0.25], ids=str)
def test_the_driver_sees_no_more_than_the_budget(
    budget: int | float, model_of: Callable[..., Any], tools: SimpleNamespace
) -> None:
    """Weights, activations, graphs, pool, and all that torch, cuBLAS and CUDA keep, after the largest steps of every
    kind, stay within bytes or a fraction of the device; and most of the budget is put to use."""
    total = torch.cuda.get_device_properties(0).total_memory
    allowed = budget * total if isinstance(budget, float) else budget
    before = tools.taken()
    assert before < 0.8 * allowed, "something else holds the device's memory"
    model = model_of("llama", vocab_size=4000)
    settings = {"memory_budget": budget, "max_num_seqs": 72, "max_num_batched_tokens": 2048}
    llm = tools.engine(model.folder, **settings)
    started = tools.taken()
    prompts = [tokens(length, length) for length in range(100, 244)]
    for params in KINDS:
        llm.generate(prompts, SamplingParams(seed=1, max_tokens=8, ignore_eos=True, **params))
    llm.generate(prompts, [SamplingParams(seed=1, max_tokens=8, **KINDS[at % 4]) for at in range(len(prompts))])
    assert started <= allowed
    assert tools.taken() <= allowed
    assert started > 0.75 * allowed
    tools.assert_settled(llm.core)


def test_overlap_launches_ahead(llm: LLM, tools: SimpleNamespace) -> None:
    """The default engine really has a step in flight when it launches the next one, decodes included."""
    runner, pending, most = llm.core._runner, [0], [0]

    class Counted:
        def launch(self, step: Any) -> Any:
            pending[0] += 1
            most[0] = max(most[0], pending[0])
            return runner.launch(step)

        def collect(self, launched: Any) -> Any:
            pending[0] -= 1
            return runner.collect(launched)

    core = tools.core_on(llm)
    tools.drive(EngineCore(core.scheduler, Counted(), overlap=core._overlap), requests(MANY[:2], greedy(8)))
    assert most == [2]
    tools.assert_settled(core)
