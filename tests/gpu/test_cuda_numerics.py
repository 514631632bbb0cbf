"""Numbers that the engine computes on a CUDA device: logits in every precision and at long contexts against
transformers' in float32, and sampled tokens against the plain-torch sampler and against themselves."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from engine import LLM, SamplingParams
from engine.core import EngineCore
from engine.request import FinishReason, Request
from engine.step import Step, StepResult

VOCAB = 160
WIDE_VOCAB = 4000
# The largest of some thousand errors: five standard deviations, and tokens differ in how large theirs is.
FAR = 8


def tokens(length: int, seed: int, vocab: int = VOCAB) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocab) for _ in range(length)]


PROMPTS = [tokens(length, length) for length in (1, 16, 17, 40, 150)]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def requests(prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
    return [Request(f"r{at}", tuple(prompt), params) for at, prompt in enumerate(prompts)]


class Recorder:
    """A runner that also keeps the logits of every sample, by request, in the order of their tokens."""

    def __init__(self, core: EngineCore) -> None:
        self._runner, self._scheduler = core._runner, core.scheduler
        self.logits: dict[str, list[torch.Tensor]] = {}

    def launch(self, step: Step) -> Any:
        launched = self._runner.launch(step)
        torch.cuda.synchronize()
        logits = self._runner._forward._logits[: len(step.samples)].to("cpu", torch.float32, copy=True)
        for sample, row in zip(step.samples, logits, strict=True):
            request_id = self._scheduler._rows[sample.row].request.request_id
            self.logits.setdefault(request_id, []).append(row)
        return launched

    def collect(self, launched: Any) -> StepResult:
        return self._runner.collect(launched)


def recorded(
    llm: LLM, prompts: Sequence[Sequence[int]], count: int, tools: SimpleNamespace
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy outputs, and the logits (count, V) that each one's tokens were chosen from."""
    core = tools.core_on(llm)
    recorder = Recorder(core)
    watched = EngineCore(core.scheduler, recorder, overlap=core._overlap)
    outcome = tools.drive(watched, requests(prompts, greedy(count)), every=2)
    tools.assert_settled(watched)
    ids = [f"r{at}" for at in range(len(prompts))]
    return [outcome.tokens[each, 0] for each in ids], [torch.stack(recorder.logits[each]) for each in ids]


def assert_near(
    outputs: Sequence[Sequence[int]], got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], bound: float
) -> None:
    """Logits are off by `bound` of their spread (root of the mean square), none by more than FAR times that; and a
    token is transformers' wherever this leaves no doubt."""
    for output, ours, theirs in zip(outputs, got, expected, strict=True):
        spread = theirs.std(-1)
        off = (ours - theirs) / spread[:, None]
        assert off.square().mean().sqrt() < bound, f"logits are off by {off.square().mean().sqrt():.2e} of their spread"
        assert off.abs().max() < FAR * bound, f"a logit is off by {off.abs().max():.2e} of their spread"
        first, second = theirs.topk(2, -1).values.T
        sure = first - second > 2 * FAR * bound * spread
        assert torch.equal(torch.tensor(output)[sure], theirs.argmax(-1)[sure])


def rounding_bound(dtype: torch.dtype, layers: int) -> float:
    """How far logits may be off (root of the mean square) in parts of their spread.

    A layer rounds about a dozen times (both norms, q/k/v, rotation, weights of attention, its output, three products,
    gate, two sums), each time with a relative error that is spread evenly over a unit of rounding u = eps / 2 either
    way: a standard deviation of u / sqrt(3) at most. They are independent, so that their squares add up; softmax and
    gate make them larger, by less than two in models whose weights are not too large.
    """
    return 2 * (torch.finfo(dtype).eps / 2) / 3**0.5 * (12 * layers) ** 0.5


@pytest.mark.parametrize(
    ("family", "dtype", "head_dim", "budget"),
    [
        ("llama", "bfloat16", 32, 64),
        ("qwen3", "bfloat16", 32, 64),
        ("llama", "float16", 32, 64),
        ("qwen3", "bfloat16", 128, 64),
        ("llama", "float16", 128, 320),
    ],
)
def test_logits_of_short_dtypes(
    family: str, dtype: str, head_dim: int, budget: int, model_of: Callable[..., Any], tools: SimpleNamespace
) -> None:
    """bfloat16 and float16 against transformers in float32 with the same, rounded weights; chunks, prefill, decode.

    Heads of 128 have a prefill kernel of their own on Hopper.
    """
    model = model_of(family, dtype=getattr(torch, dtype), std=0.1, head_dim=head_dim)
    llm = tools.engine(model.folder, dtype=dtype, max_num_batched_tokens=budget)
    prompts = [*PROMPTS, tokens(300, 300)]
    outputs, got = recorded(llm, prompts, 24, tools)
    bound = rounding_bound(getattr(torch, dtype), 3)
    assert_near(outputs, got, model.logits(prompts, outputs), bound)


def test_logits_in_float32(model_of: Callable[..., Any], tools: SimpleNamespace) -> None:
    """No TF32 anywhere: that would be off by some 1e-3."""
    model = model_of("llama")
    outputs, got = recorded(tools.engine(model.folder), PROMPTS, 24, tools)
    assert_near(outputs, got, model.logits(PROMPTS, outputs), 2e-5)


def test_logits_of_tuned_products(tmp_path: Path, tools: SimpleNamespace) -> None:
    """Two layers of Qwen2.5-0.5B's shape in bfloat16, the products of which are this project's own kernels where they
    were tuned (all of them on an H200), for steps of 1 to 5 rows and of 16 tokens; a group of seven; 151,936 tokens."""
    shape = {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 2,
        "num_attention_heads": 14,
        "tie_word_embeddings": True,
    }
    model = tools.make_model(tmp_path, "qwen2", dtype=torch.bfloat16, std=0.03, **shape)
    llm = tools.engine(model.folder, dtype="bfloat16", max_num_seqs=5, max_num_batched_tokens=16)
    prompts = [tokens(length, length, 151_936) for length in (1, 16, 17, 40, 70)]
    outputs, got = recorded(llm, prompts, 8, tools)
    model.oracle.to(tools.device)
    assert_near(outputs, got, model.logits(prompts, outputs), rounding_bound(torch.bfloat16, 2))


LENGTH = 32_768
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 5.0, "original_max_position_embeddings": 8192},
}


@torch.no_grad()
def long_logits(oracle: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """As `Model.logits` of one prompt, by pieces of it, so that no mask is of the prompt's length squared."""
    cache = DynamicCache(config=oracle.config)
    ids = torch.tensor([[*prompt, *output[:-1]]], device=oracle.device)
    last = len(prompt) - 1
    for start in range(0, last, 2048):
        piece = ids[:, start : min(start + 2048, last)]
        oracle(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return oracle(ids[:, last:], past_key_values=cache, use_cache=True).logits[0].cpu()


@pytest.mark.parametrize("rope", ROPES)
def test_long_prompt(rope: str, model_of: Callable[..., Any], tools: SimpleNamespace) -> None:
    """After 32,768 tokens, computed over 16 steps and more beside another sequence's decodes, the logits of the
    first and of further tokens agree with transformers'. Angles in bfloat16 would be off by whole turns."""
    model = model_of("llama", num_hidden_layers=2, max_position_embeddings=40_960, rope_parameters=ROPES[rope])
    prompts = [tokens(LENGTH, 1), tokens(100, 2)]
    llm = tools.engine(model.folder, max_num_seqs=2, max_num_batched_tokens=2048)
    outputs, got = recorded(llm, prompts, 6, tools)
    assert llm.core._runner.num_pages * llm.info.page_size > LENGTH
    model.oracle.to(tools.device).set_attn_implementation("sdpa")
    expected = [long_logits(model.oracle, *each) for each in zip(prompts, outputs, strict=True)]
    assert_near(outputs, got, expected, 1e-4)


# Sampling.


def mixed_params(count: int) -> list[SamplingParams]:
    """Parameters of every kind, in every mixture; a third of the rows need their logits changed first."""
    draw = random.Random(0)
    mixture = []
    for at in range(count):
        params = SamplingParams(
            temperature=draw.choice((0.0, 0.5, 0.8, 1.0, 1.5)),
            top_k=draw.choice((0, 0, 1, 5, 50, WIDE_VOCAB)),
            top_p=draw.choice((1.0, 1.0, 0.95, 0.6, 0.05)),
            min_p=draw.choice((0.0, 0.0, 0.02, 0.3)),
            seed=draw.choice((0, 1, 2**40 + 3, 2**63, 2**64 - 1)) + (at if at % 2 else 0),
            max_tokens=24,
            ignore_eos=True,
            n=draw.choice((1, 1, 2, 3)),
        )
        if at % 3 == 0:
            params = replace(
                params,
                repetition_penalty=draw.choice((1.0, 1.3, 0.8)),
                presence_penalty=draw.choice((0.0, 0.7)),
                frequency_penalty=draw.choice((0.0, 0.4, -0.4)),
                logit_bias=draw.choice(({}, {draw.randrange(WIDE_VOCAB): 5.0, 7: -100.0})),
                stop_token_ids=tuple(range(100)),
                min_tokens=draw.choice((0, 10, 24)),
            )
        mixture.append(params)
    return mixture


PARAMS = mixed_params(110)
SAMPLED = [Request(f"r{at}", tuple(tokens(1 + at % 60, at, WIDE_VOCAB)), params) for at, params in enumerate(PARAMS)]
Texts = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def wide(model_of: Callable[..., Any]) -> Any:
    """A model of 4,000 tokens."""
    return model_of("llama", vocab_size=WIDE_VOCAB)


@pytest.fixture(scope="module")
def llm(wide: Any, tools: SimpleNamespace) -> LLM:
    """An engine of 72 rows: more than are adjusted at once, and than one way of splitting the vocabulary serves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.gpu.runner._ADJUSTED", 40)
        return tools.engine(wide.folder, max_num_seqs=72, max_num_batched_tokens=512)


@pytest.fixture(scope="module")
def together(llm: LLM, tools: SimpleNamespace) -> Texts:
    """What all requests give at once."""
    core = tools.core_on(llm)
    texts: Texts = tools.drive(core, SAMPLED).tokens
    tools.assert_settled(core)
    return texts


def first_difference(text: list[int], other: list[int]) -> int | None:
    """Where the texts part; None: they are equal."""
    if text == other:
        return None
    pairs = enumerate(zip(text, other, strict=False))
    return next((at for at, (one, two) in pairs if one != two), min(len(text), len(other)))


def assert_same_draws(runs: Sequence[Texts], expected: Texts) -> None:
    """At most one draw in a thousand differs, or one of few: a sum that is rounded otherwise can move a bound across
    its random number, and then does so in several runs. A text is compared up to there."""
    compared, differing = 0, set()
    for texts in runs:
        for key, text in texts.items():
            at = first_difference(text, expected[key])
            compared += len(text) if at is None else at + 1
            if at is not None:
                differing.add(key)
    assert len(differing) <= 1 + compared // len(runs) // 1000, f"{differing} differ, of {compared} draws"


def test_sampling_equals_the_torch_sampler(wide: Any, together: Texts, tools: SimpleNamespace) -> None:
    """All mixtures of parameters against the plain-torch runner on the same device."""
    reference = tools.engine(wide.folder, max_num_seqs=72, max_num_batched_tokens=512, attention="reference")
    assert sum(map(len, together.values())) > 3000
    expected = tools.drive(reference.core, SAMPLED).tokens
    assert together.keys() == expected.keys()
    assert_same_draws([together], expected)


def test_sampling_alone_equals_sampling_together(llm: LLM, together: Texts, tools: SimpleNamespace) -> None:
    """A request's tokens are the same with no other beside it, recorded steps of one row or few."""
    alone: Texts = {}
    for request in SAMPLED[:40]:
        alone |= tools.drive(tools.core_on(llm), [request]).tokens
    assert_same_draws([alone], together)


def test_sampling_after_preemption_and_with_prefix_hits(llm: LLM, together: Texts, tools: SimpleNamespace) -> None:
    """Bugs 21 and 24: so they are in a pool that has them preempt one another all the time, arriving one by one, and
    the second time, out of the cache."""
    small = tools.core_on(llm, num_pages=40)
    assert_same_draws([tools.drive(small, SAMPLED).tokens], together)
    assert small.stats().preemptions > 10
    tools.assert_settled(small)
    core = tools.core_on(llm)
    for _ in range(2):
        outcome = tools.drive(core, SAMPLED, every=1)
        assert_same_draws([outcome.tokens], together)
    assert sum(outcome.cached.values()) > 300
    tools.assert_settled(core)


@pytest.mark.parametrize("kind", [{}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.05, "presence_penalty": 0.5}], ids=str)
def test_sampling_in_every_batch_size(kind: dict[str, Any], llm: LLM, tools: SimpleNamespace) -> None:
    """Recorded steps with and without rows of padding: 1 to 9 rows, and around the borders at 16, 32, 48 and 64."""
    params = [SamplingParams(temperature=0.9, seed=at, max_tokens=4, ignore_eos=True, **kind) for at in range(72)]
    prompts = [tuple(tokens(5, at, WIDE_VOCAB)) for at in range(72)]
    asked = [Request(f"r{at}", *each) for at, each in enumerate(zip(prompts, params, strict=True))]
    alone: Texts = {}
    for request in asked:
        alone |= tools.drive(tools.core_on(llm), [request]).tokens
    sizes = (*range(1, 10), 16, 17, 31, 32, 33, 48, 49, 64, 65, 72)
    assert_same_draws([tools.drive(tools.core_on(llm), asked[:size]).tokens for size in sizes], alone)


def test_siblings(llm: LLM, tools: SimpleNamespace) -> None:
    """Each of n siblings draws its own text; of n = 8 the first is what n = 1 gives, and so on."""
    prompt = tuple(tokens(37, 5, WIDE_VOCAB))

    def drawn(n: int) -> list[list[int]]:
        params = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True, n=n)
        texts = tools.drive(tools.core_on(llm), [Request("r", prompt, params)]).tokens
        return [texts["r", index] for index in range(n)]

    eight = drawn(8)
    assert len({tuple(text) for text in eight}) == 8
    assert drawn(1) == eight[:1]
    assert drawn(3) == eight[:3]


def test_rules_of_sampling(llm: LLM, tools: SimpleNamespace) -> None:
    """What needs no reference, with 70 plain rows beside: a great bias always wins; a bar until min_tokens holds for as
    long, and not longer; penalties count the token whose step is still in flight: of twenty favoured tokens
    none comes twice, and two favourites alternate; top_k = 1 and a vanishing top_p are greedy."""
    prompt = tuple(tokens(20, 9, WIDE_VOCAB))
    plain = SamplingParams(temperature=0.0, seed=1, max_tokens=30, ignore_eos=True)
    asked = {
        "biased": replace(plain, temperature=1.0, logit_bias={77: 1000.0}),
        "barred": replace(plain, logit_bias={77: 1000.0}, stop_token_ids=(77,), min_tokens=5),
        "distinct": replace(plain, logit_bias=dict.fromkeys(range(20), 500.0), presence_penalty=1000.0, max_tokens=20),
        "alternating": replace(plain, logit_bias={5: 5000.0, 6: 4950.0}, frequency_penalty=100.0, max_tokens=20),
        "greedy": plain,
        "one": replace(plain, temperature=1.0, top_k=1),
        "none": replace(plain, temperature=1.0, top_p=1e-6),
    }
    requests = [Request(name, prompt, params) for name, params in asked.items()]
    requests += [Request(f"r{at}", tuple(tokens(10, at, WIDE_VOCAB)), plain) for at in range(70)]
    outcome = tools.drive(tools.core_on(llm), requests)
    texts = {name: outcome.tokens[name, 0] for name in asked}
    assert texts["biased"] == [77] * 30
    assert texts["barred"][5:] == [77]
    assert 77 not in texts["barred"][:5]
    assert outcome.finish["barred", 0] is FinishReason.STOP_TOKEN
    assert sorted(texts["distinct"]) == list(range(20))
    assert texts["alternating"] == [5, 6] * 10
    assert texts["one"] == texts["none"] == texts["greedy"]
