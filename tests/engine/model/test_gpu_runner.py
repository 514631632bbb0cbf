"""The CUDA device's runner against transformers, its kernels interpreted where there is no such device."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.device import load_model
from engine.gpu import forward
from engine.gpu import inputs as inputs_module
from engine.gpu import runner as runner_module
from engine.gpu.inputs import StepInputs
from engine.gpu.runner import GpuRunner
from engine.request import SamplingParams
from engine.step import PageUpdate, RowInit, RowWork, Sample, Step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[(7 * i + 3 * j) % 160 for j in range(length)] for i, length in enumerate((1, 16, 21))]


@pytest.fixture
def gpu_runner(budget: int) -> Callable[..., GpuRunner]:
    def make(folder: Path, **settings: Any) -> GpuRunner:
        settings = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "memory_budget": budget, **settings}
        config = EngineConfig(model=folder, dtype="float32", device=DEVICE, threads=1, **settings)
        return GpuRunner(config, load_model(config, progress=False))

    return make


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"num_hidden_layers": 2}),
        ("llama", {"num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"num_hidden_layers": 2, "sliding_window": 6}),
        ("qwen2", {"num_hidden_layers": 2}),
        ("qwen3", {"num_hidden_layers": 2, "head_dim": 32}),
    ],
)
def test_tokens_equal_transformers(family, config, model_at, tools, monkeypatch, gpu_runner):
    """Prefill in chunks mixed with decode, staggered; pages hold NaN wherever nothing was written."""
    monkeypatch.setattr(forward, "_SKINNY", 8)  # so that steps of both kinds occur
    folder, model = model_at(family, **config)
    runner = gpu_runner(folder)
    tools.poison(runner)
    outputs = tools.Driver(runner).generate(PROMPTS, 3, chunk=10, stagger=1)
    assert outputs == [tools.oracle(model, p, o) for p, o in zip(PROMPTS, outputs, strict=True)]


def test_prefix_pages_filled_in_the_same_step(model_at, tools, gpu_runner):
    """Rows share pages of a prefix that a third fills in that very step."""
    folder, model = model_at("llama", num_hidden_layers=2)
    runner = gpu_runner(folder)
    prefix = [(5 * i + 2) % 160 for i in range(32)]
    prompts = [[*prefix, 1], [*prefix, 2, 3], [*prefix[:16], 4]]
    step = Step(
        0,
        tuple(tools.row_init(row, prompt) for row, prompt in enumerate(prompts)),
        (PageUpdate(0, 0, (9, 4, 7)), PageUpdate(1, 0, (9, 4, 2)), PageUpdate(2, 0, (9, 11))),
        (RowWork(1, 32, 2), RowWork(2, 16, 1), RowWork(0, 0, 33)),
        (Sample(0, 1), Sample(1, 2), Sample(2, 0)),
    )
    one, two, zero = runner.collect(runner.launch(step)).tokens
    assert [[zero], [one], [two]] == [tools.oracle(model, prompt, [0]) for prompt in prompts]


def test_fork_and_steps_launched_ahead(model_at, tools, gpu_runner):
    """A sibling samples from another row's prompt and goes on in a copy of its last page, with nothing read back."""
    folder, model = model_at("llama", num_hidden_layers=1)
    runner = gpu_runner(folder)
    prompt = [(3 * i + 1) % 160 for i in range(21)]
    inits = (tools.row_init(0, prompt), tools.row_init(1, prompt))
    updates = (PageUpdate(0, 0, (5, 6)), PageUpdate(1, 0, (5, 8)))
    samples = (Sample(0, 0), Sample(0, 1))
    first = runner.launch(Step(0, inits, updates, (RowWork(0, 0, 21),), samples, copies=((6, 8),)))
    tools.poison(runner, slice(None), 6)
    later = [runner.launch(Step(at, (), (), (RowWork(1, at, 1),), (Sample(0, 1),))) for at in range(21, 25)]
    tokens = runner.collect(first).tokens
    output = [tokens[1], *(runner.collect(step).tokens[0] for step in later)]
    assert tokens[0] == tokens[1]
    assert output == tools.oracle(model, prompt, output)
    copy = runner.collect(runner.launch(Step(30, (), (), (), (), copies=((5, 0),))))
    assert copy.tokens == ()
    assert torch.equal(runner._kv_cache[:, 0], runner._kv_cache[:, 5])


class Rolled:
    """A user's processor: moves a row's logits by as many places as its tokens sum up to."""

    def __init__(self, **_: Any) -> None: ...

    def __call__(self, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        return torch.stack([each.roll(int(row.token_ids.sum())) for each, row in zip(logits, rows, strict=True)])


@pytest.mark.parametrize("processors", [(), (f"{__name__}:Rolled",)], ids=["plain", "processor"])
def test_sampling_equals_the_reference_and_failures_stay_alone(processors, model_at, tools, monkeypatch, gpu_runner):
    """Rows with seeds, filters, penalties, bias, barred stop tokens and masks, adjusted in slices, draw what the
    plain-torch runner draws; a NaN fails its own row."""
    monkeypatch.setattr(runner_module, "_ADJUSTED", 4)
    monkeypatch.setattr(runner_module, "_PROCESSED", 2)
    folder, _ = model_at("llama", num_hidden_layers=1)
    settings = [
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.3, "seed": 2**40 + 1, "top_p": 0.8},
        {"temperature": 1.0, "seed": 7, "top_k": 5, "min_p": 0.01},
        {"temperature": 0.7, "seed": 8, "repetition_penalty": 1.4, "logit_bias": {9: 4.0}},
        {"temperature": 0.0, "seed": 9, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": 10, "min_tokens": 2},
    ]
    even = tuple(range(0, 160, 2))
    only_thirds = np.packbits(np.arange(160) % 3 == 0, bitorder="little").tobytes()

    def drawn(runner: Any) -> list[tuple[int, ...]]:
        prompts = [tuple((11 * row + at) % 160 for at in range(4)) for row in range(6)]
        params = [SamplingParams(**each) for each in settings]
        inits = tuple(RowInit(row, prompts[row], 4, params[row], 0, even if row == 5 else ()) for row in range(6))
        updates = tuple(PageUpdate(row, 0, (row,)) for row in range(6))
        samples = tuple(Sample(row, row) for row in range(6))
        steps = [
            Step(0, inits, updates, tuple(RowWork(row, 0, 4) for row in range(6)), samples),
            Step(1, (), (), tuple(RowWork(row, 4, 1) for row in range(6)), samples, masks=((1, only_thirds),)),
            Step(2, (), (), tuple(RowWork(row, 5, 1) for row in range(3)), samples[:3]),  # none is adjusted
            Step(3, (), (), tuple(RowWork(row, 5 + (row < 3), 1) for row in range(6)), samples),
        ]
        return [runner.collect(runner.launch(step)).tokens for step in steps]

    runner = gpu_runner(folder, logits_processors=processors)
    if DEVICE == "cuda":
        runner.warm_up()  # records the graphs
    tokens = drawn(runner)
    assert tokens == drawn(tools.make_runner(folder, logits_processors=processors))
    assert [tokens[0][5] % 2, tokens[1][5] % 2, tokens[1][1] % 3] == [1, 1, 0]
    tools.poison(runner, slice(None), 3, 0)
    # Without row 3, whose parameters adjust the logits, and with it.
    for works in ((0, 1), (1, 3)):
        step = Step(
            9, (), (), tuple(RowWork(row, 8, 1) for row in works), tuple(Sample(i, r) for i, r in enumerate(works))
        )
        failed = runner.collect(runner.launch(step)).failed
        assert failed == tuple(index for index, row in enumerate(works) if row == 3)


def test_a_row_that_never_may_end_and_one_with_a_barred_token(model_at, gpu_runner):
    """However large min_tokens is (here beyond the table's integers), and where a bias is -inf."""
    folder, _ = model_at("llama", num_hidden_layers=1)
    runner, even = gpu_runner(folder), tuple(range(0, 160, 2))
    params = SamplingParams(temperature=1.0, seed=4, min_tokens=1 << 40, max_tokens=6)
    bias = SamplingParams(temperature=1.0, seed=4, logit_bias=dict.fromkeys(even, -float("inf")))
    inits = (RowInit(0, (5, 9), 2, params, 0, even), RowInit(1, (5, 9), 2, bias, 0, ()))
    updates, samples = (PageUpdate(0, 0, (1,)), PageUpdate(1, 0, (2,))), (Sample(0, 0), Sample(1, 1))
    steps = [Step(0, inits, updates, (RowWork(0, 0, 2), RowWork(1, 0, 2)), samples)]
    steps += [Step(at, (), (), (RowWork(0, at, 1), RowWork(1, at, 1)), samples) for at in range(2, 7)]
    tokens = [runner.collect(runner.launch(step)).tokens for step in steps]
    assert [(one % 2, other % 2, one == other) for one, other in tokens] == [(1, 1, True)] * 6


def test_guesses_are_sampled_as_plain_decoding_would(model_at, tools, gpu_runner):
    """They are decodes like others: also in a step that is full of them, and where penalties look at them."""
    folder, _ = model_at("llama", num_hidden_layers=1)
    params = [SamplingParams(**each) for each in tools.SAMPLING[3:]]
    runner = gpu_runner(folder, max_num_seqs=3, max_num_batched_tokens=15, speculative="ngram")
    tools.poison(runner)
    tools.verify(runner, params, 2, length=3)


def test_more_single_tokens_than_rows_and_the_window_filled(model_at, tools, gpu_runner):
    """Static batching computes single tokens of one row again beside its others; the last position can be computed."""
    folder, model = model_at("llama", num_hidden_layers=1)
    runner = gpu_runner(folder, max_num_seqs=2, max_model_len=20)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
    works = (*(RowWork(0, at, 1) for at in range(1, 5)), RowWork(0, 0, 18))
    step = Step(0, (tools.row_init(0, prompt),), (PageUpdate(0, 0, (1, 3)),), works, (Sample(4, 0),))
    output = list(runner.collect(runner.launch(step)).tokens)
    for at in (18, 19):
        output += runner.collect(runner.launch(Step(at, (), (), (RowWork(0, at, 1),), (Sample(0, 0),)))).tokens
    assert output == tools.oracle(model, prompt, output)


@pytest.mark.parametrize(("seqs", "tokens", "page"), [(2, 16, 16), (4, 8, 16), (1, 1, 16), (2, 8, 1)])
def test_warm_up_leaves_the_pool_at_zero(seqs, tokens, page, model_at, gpu_runner):
    """Nothing of it can be read later, however small a step may be."""
    folder, _ = model_at("llama", num_hidden_layers=1)
    runner = gpu_runner(folder, max_num_seqs=seqs, max_num_batched_tokens=tokens, page_size=page)
    runner.warm_up()
    assert runner._kv_cache.shape[1] == runner.num_pages + 1
    assert runner._kv_cache.count_nonzero() == 0


def test_fewer_tokens_than_rows(model_at, tools, gpu_runner):
    """Static batching may have them. No step draws more tokens than it computes, and no buffer is made to fit."""
    folder, model = model_at("llama", num_hidden_layers=2)
    prompts = [[5, 9], [7], [2, 4, 6]]
    torch.set_warn_always(True)  # of a tensor that is too small for a product, each time
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "An output .* was resized")
            runner = gpu_runner(folder, scheduler="static", max_num_seqs=8, max_num_batched_tokens=3)
            runner.warm_up()
            outputs = tools.Driver(runner).generate(prompts, 2, chunk=1)
    finally:
        torch.set_warn_always(False)
    assert outputs == [tools.oracle(model, p, o) for p, o in zip(prompts, outputs, strict=True)]


def test_how_many_tiles_is_sent_with_a_counter_at_zero(monkeypatch):
    """Whatever the host's memory holds, which is used again and again, and whatever a step before left."""
    monkeypatch.setattr(inputs_module, "pinned", lambda size, _: torch.full((size,), 7, dtype=torch.int32))
    inputs = StepInputs(64, 4, block_m=16, vocab_size=160, device=torch.device("cpu"))
    for works, tiles in (((RowWork(1, 5, 1), RowWork(0, 0, 33)), 3), ((RowWork(1, 6, 1),), 0)):
        inputs.num_tiles.fill_(9)
        inputs.send(Step(0, (), (), works, ()), lambda shape: shape)
        assert inputs.num_tiles.tolist() == [tiles, 0]
