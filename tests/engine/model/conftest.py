"""What the tests of the model path share: tiny random models made by transformers, and a driver of hand-built steps."""

import gc
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.device import load_model
from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.step import Draft, PageUpdate, RowInit, RowWork, Sample, Step

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when engine.gpu is first imported

GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
VOCAB = 160
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": None,
}

# What a sampler may be asked for, on rows of their own.
SAMPLING = (
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.3, "seed": 2**40 + 1, "top_p": 0.8},
    {"temperature": 1.0, "seed": 7, "top_k": 5, "min_p": 0.01},
    {"temperature": 0.7, "seed": 8, "repetition_penalty": 1.4, "logit_bias": {9: 4.0}},
    {"temperature": 0.0, "seed": 9},
    {"temperature": 0.0, "seed": 9, "presence_penalty": 1.5, "frequency_penalty": 0.5, "min_tokens": 4},
)

Model = tuple[Path, Any]


def make_model(
    folder: Path, family: str, *, shard: str = "1GB", dtype: torch.dtype = torch.float32, **config: Any
) -> Model:
    """Saves a random model; returns (folder, oracle). Weights are large enough for every part to matter."""
    settings = transformers.AutoConfig.for_model(family, **{**SHAPE, **config})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, 0.2)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder, model


def make_runner(folder: Path, **config: Any) -> ModelRunner:
    settings = {
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "memory_budget": 4 << 20,
        "max_num_seqs": 16,
        **config,
    }
    config = EngineConfig(model=folder, **settings)
    return ModelRunner(config, load_model(config, progress=False))


def row_init(row: int, tokens: Sequence[int]) -> RowInit:
    return RowInit(row, tuple(tokens), len(tokens), GREEDY, 0, ())


class Driver:
    """Runs sequences through a runner as a scheduler would: `chunk` prompt tokens a step, one more sequence every
    `stagger` steps, scattered pages, rows in no order. So prefill and decode mix, and lengths differ."""

    def __init__(self, runner: ModelRunner, page_size: int = 16) -> None:
        self.runner = runner
        self.page_size = page_size
        self.free = list(range(runner.num_pages))
        random.Random(0).shuffle(self.free)

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, *, chunk: int = 10_000, stagger: int = 0
    ) -> list[list[int]]:
        rows = list(range(len(prompts)))
        random.Random(1).shuffle(rows)
        lengths = [len(prompt) for prompt in prompts]
        computed, pages = [0] * len(prompts), [0] * len(prompts)
        outputs: list[list[int]] = [[] for _ in prompts]
        step_id = 0
        while any(len(output) < count for output in outputs):
            inits, updates, works, samples, sampled = [], [], [], [], []
            for i, prompt in enumerate(prompts):
                if step_id < i * stagger or len(outputs[i]) == count:
                    continue
                if computed[i] == 0:
                    inits.append(row_init(rows[i], prompt))
                length = min(chunk, lengths[i] - computed[i])
                needed = -(-(computed[i] + length) // self.page_size)
                if needed > pages[i]:
                    new = tuple(self.free.pop() for _ in range(needed - pages[i]))
                    updates.append(PageUpdate(rows[i], pages[i], new))
                    pages[i] = needed
                works.append(RowWork(rows[i], computed[i], length))
                computed[i] += length
                if computed[i] == lengths[i]:
                    samples.append(Sample(len(works) - 1, rows[i]))
                    sampled.append(i)
                    lengths[i] += 1
            step = Step(step_id, tuple(inits), tuple(updates), tuple(works), tuple(samples))
            result = self.runner.collect(self.runner.launch(step))
            assert result.failed == ()
            for i, token in zip(sampled, result.tokens, strict=True):
                outputs[i].append(token)
            step_id += 1
        return outputs

    def generate_ahead(self, prompt: Sequence[int], count: int) -> list[int]:
        """One sequence, every step of which is launched before any is collected."""
        row, slots = 3, -(-(len(prompt) + count) // self.page_size)
        pages = tuple(self.free.pop() for _ in range(slots))
        first = RowWork(row, 0, len(prompt))
        steps = [Step(0, (row_init(row, prompt),), (PageUpdate(row, 0, pages),), (first,), (Sample(0, row),))]
        ends = range(len(prompt), len(prompt) + count - 1)
        steps += [Step(at, (), (), (RowWork(row, at, 1),), (Sample(0, row),)) for at in ends]
        launched = [self.runner.launch(step) for step in steps]
        return [self.runner.collect(one).tokens[0] for one in launched]


def verify(runner: Any, params: Sequence[SamplingParams], wrong: int, length: int = 5) -> None:
    """Plain decoding, and then the same with guesses of which the one at place `wrong` is not right: the samples up to
    that place are those of plain decoding, and so is what follows when the row goes on behind it.
    """
    rows = range(len(params))
    prompts = [[(11 * row + 5 * at) % VOCAB for at in range(4 + row)] for row in rows]
    inits = tuple(RowInit(row, tuple(prompts[row]), len(prompts[row]), params[row], 0, (3,)) for row in rows)
    pages = tuple(PageUpdate(row, 0, (row,)) for row in rows)
    first = tuple(RowWork(row, 0, len(prompts[row])) for row in rows)
    samples = tuple(Sample(row, row) for row in rows)

    def decode(count: int) -> tuple[int, ...]:
        works = tuple(RowWork(row, len(prompts[row]) + count, 1) for row in rows)
        return runner.collect(runner.launch(Step(count, (), (), works, samples))).tokens

    begun = runner.collect(runner.launch(Step(0, inits, pages, first, samples))).tokens
    plain = [begun, *(decode(count) for count in range(length + 2))]
    runner.launch(Step(0, inits, pages, first, samples))
    works = [RowWork(row, len(prompts[row]), 1) for row in rows]
    drawn, drafts = list(samples), []
    for row in rows:
        guesses = [plain[at][row] for at in range(1, length + 1)]
        guesses[wrong] = (guesses[wrong] + 1) % VOCAB
        drafts.append(Draft(row, len(prompts[row]) + 1, tuple(guesses)))
        for at in range(length):
            drawn.append(Sample(len(works), row))
            works.append(RowWork(row, len(prompts[row]) + 1 + at, 1))
    step = Step(1, (), (), tuple(works), tuple(drawn), drafts=tuple(drafts))
    tokens = runner.collect(runner.launch(step)).tokens
    assert tokens[: len(rows)] == plain[1]
    for row in rows:
        run = tokens[len(rows) + row * length :][:wrong]
        assert run == tuple(plain[at][row] for at in range(2, wrong + 2))
    for count in range(wrong + 1, length + 2):
        assert decode(count) == plain[count + 1]


def poison(runner: ModelRunner, *where: Any) -> None:
    """Fills the pool, or a part of it, with NaN."""
    with torch.inference_mode():
        runner._kv_cache[where] = torch.nan


def oracle(model: Any, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """What transformers chooses greedily at each of the output's places, given all before it.

    By induction the output is transformers' own greedy continuation if and only if the two are equal.
    """
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.fixture
def model_at(tmp_path: Path) -> Callable[..., Model]:
    """Makes a tiny random model of a family: model_at("llama", tie_word_embeddings=True) -> (folder, oracle)."""
    return lambda family, **config: make_model(tmp_path / "model", family, **config)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """One tiny Llama for the tests that are not about families."""
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts around page borders, and of very different lengths."""
    draw = random.Random(2)
    return [[draw.randrange(VOCAB) for _ in range(length)] for length in (1, 15, 16, 17, 31, 32, 33, 150)]


@pytest.fixture(scope="session")
def tools() -> Any:
    """The helpers of this file, for tests that need them by name."""

    class Tools:
        SAMPLING = SAMPLING
        Driver = Driver
        make_model = staticmethod(make_model)
        make_runner = staticmethod(make_runner)
        oracle = staticmethod(oracle)
        poison = staticmethod(poison)
        row_init = staticmethod(row_init)
        verify = staticmethod(verify)

    return Tools


@pytest.fixture
def budget() -> int:
    """A `memory_budget` for a small engine; that of a device counts all that is in use there, by other tests too."""
    if not torch.cuda.is_available():
        return 4 << 20
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free + (6 << 30)
