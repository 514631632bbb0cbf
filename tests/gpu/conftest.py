"""Tests that need a CUDA device: `pytest tests/gpu`. They skip where there is none.

What they share is here: tiny random models made by transformers, engines on the device, and what must always hold.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import transformers

from engine import LLM
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import FinishReason, Request
from engine.scheduler import Scheduler

HERE = Path(__file__).parent
DEVICE = "cuda"
VOCAB = 160
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": None,
}
# Sums of float32 in another order move these models' logits by some 1e-6 of their spread; nearer ones count as equal.
TIE = 1e-4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(autouse=True)
def clean_device() -> None:
    """What earlier tests held of the device counts against the budget of this process: it is given back first."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True)
class Model:
    """A random model in a folder, and transformers' own of the same weights, in float32."""

    folder: Path
    oracle: Any

    @torch.no_grad()
    def logits(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """For each prompt (len(output), V): the logits that each token of its output is chosen from, given all before.

        If every token is the likeliest there, then by induction the output is transformers' own greedy continuation.
        """
        texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
        longest = max(map(len, texts))
        # Padding on the right: causal attention hides it.
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=self.oracle.device)
        logits = self.oracle(ids, use_cache=False).logits.cpu()
        ends = [len(prompt) - 1 for prompt in prompts]
        return [rows[end : end + len(output)] for rows, end, output in zip(logits, ends, outputs, strict=True)]

    def assert_greedy(
        self,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        process: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda _, logits: logits,
    ) -> None:
        """Every token is the one that transformers chooses, or as good as that by rounding.

        Args:
            process: one of its logits processors.
        """
        for prompt, output, raw in zip(prompts, outputs, self.logits(prompts, outputs), strict=True):
            texts = [torch.tensor([[*prompt, *output[:at]]]) for at in range(len(output))]
            logits = torch.cat([process(text, row[None]) for text, row in zip(texts, raw, strict=True)])
            chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            short = (logits.amax(-1) - chosen) / logits.std(-1)
            at = int(short.argmax())
            assert short[at] < TIE, f"token {at} after {len(prompt)} of the prompt: {short[at]:.1e} below the best"


def make_model(
    folder: Path, family: str, *, dtype: torch.dtype = torch.float32, std: float = 0.2, **config: Any
) -> Model:
    """Saves a random model, its weights rounded to `dtype` and large enough for every part to matter."""
    settings = transformers.AutoConfig.for_model(family, **{**SHAPE, **config})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Not model.to(dtype): that would round the rotary frequencies too.
            weight.normal_(1.0 if name.endswith("norm.weight") else 0.0, std).copy_(weight.to(dtype))
    model.save_pretrained(folder)
    return Model(folder, model)


def taken() -> int:
    """Bytes of the device that are in use, as its driver sees it."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def make_engine(folder: Path, **settings: Any) -> LLM:
    """An engine on the device, for at most 1 GiB beside what is in use."""
    gc.collect()
    torch.cuda.empty_cache()
    defaults = {"dtype": "float32", "max_num_seqs": 9, "max_num_batched_tokens": 64, "seed": 0}
    if "memory_budget" not in settings:
        settings["memory_budget"] = taken() + (1 << 30)
    return LLM(folder, progress=False, device=DEVICE, **{**defaults, **settings})


def core_on(llm: LLM, *, prefix_cache: bool = True, **limits: int) -> EngineCore:
    """Another core over an engine's runner, whose scheduler has other settings: fewer pages, for one."""
    info = msgspec.structs.replace(llm.info, **limits)
    scheduler = Scheduler(EngineConfig(Path(), prefix_cache=prefix_cache), info)
    return EngineCore(scheduler, llm.core._runner, overlap=llm.core._overlap)


@dataclass
class Outcome:
    """What became of requests: tokens and end by (request id, index), cached tokens by request id."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finish: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)


def drive(
    core: EngineCore,
    requests: Iterable[Request],
    *,
    every: int = 0,
    aborts: Callable[[int], Iterable[str]] = lambda _: (),
    each_turn: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Turns the core until all requests have ended, none with an error; nothing comes of an aborted one afterwards.

    Args:
        every: a request is added every so many turns; 0 adds all at once.
        aborts: the live requests that are to be aborted after a turn.
    """
    outcome, waiting, aborted = Outcome(), deque(requests), set[str]()
    turn = 0
    while waiting or core.has_work:
        while waiting and turn % max(every, 1) == 0:
            core.scheduler.add(waiting.popleft())
            if every:
                break
        result = core.turn()
        outcome.cached.update((start.request_id, start.cached_tokens) for start in result.started)
        for update in result.updates:
            assert update.request_id not in aborted
            assert update.finish is not FinishReason.ERROR, update.message
            key = (update.request_id, update.index)
            assert key not in outcome.finish
            outcome.tokens.setdefault(key, []).extend(update.tokens)
            if update.finish is not None:
                outcome.finish[key] = update.finish
        for request_id in aborts(turn):
            assert core.scheduler.abort(request_id)
            aborted.add(request_id)
        each_turn(turn)
        turn += 1
    return outcome


def assert_settled(core: EngineCore) -> None:
    """Nothing runs or waits, all books agree, and every page is free or cached."""
    core.scheduler.check_integrity()
    stats = core.stats()
    assert (stats.live_requests, stats.running_sequences, stats.waiting_sequences) == (0, 0, 0)
    assert stats.free_pages + stats.cached_pages == stats.total_pages


def poison(llm: LLM, *, but: Iterable[int] = ()) -> None:
    """Fills the whole pool, the padding's page too, with NaN, except for these pages."""
    cache = llm.core._runner._kv_cache
    spoilt = torch.ones(cache.shape[1], dtype=torch.bool, device=cache.device)
    spoilt[list(but)] = False
    torch.cuda.synchronize()  # the runner has a stream of its own
    with torch.inference_mode():
        for layer in cache:
            layer[spoilt] = torch.nan
    torch.cuda.synchronize()


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """Makes a model, each once: model_of("mistral", sliding_window=20)."""
    made: dict[str, Model] = {}

    def find(family: str, **config: Any) -> Model:
        key = f"{family} {sorted(config.items())}"
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp(family), family, **config)
        return made[key]

    return find


@pytest.fixture(scope="session")
def tools() -> SimpleNamespace:
    """The helpers of this file, for tests that need them by name."""
    return SimpleNamespace(
        device=DEVICE,
        make_model=make_model,
        engine=make_engine,
        core_on=core_on,
        drive=drive,
        assert_settled=assert_settled,
        poison=poison,
        taken=taken,
    )
