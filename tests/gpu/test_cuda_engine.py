"""The whole engine on a CUDA device against transformers on the CPU: float32, greedy, the same tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine import LLM, SamplingParams
from engine.core import EngineCore

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
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % VOCAB for j in range(length)] for i, length in enumerate((1, 15, 16, 17, 64, 300))]


def saved(folder: Path, family: str) -> Any:
    settings = transformers.AutoConfig.for_model(family, **SHAPE)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(folder)
    return model


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat((ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)), 1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_tokens_equal_transformers(tmp_path: Path, family: str) -> None:
    model = saved(tmp_path, family)
    expected = [greedy(model, prompt, 64) for prompt in PROMPTS]
    settings = {"device": "cuda", "dtype": "float32", "memory_budget": 1 << 30, "max_num_seqs": 8}
    for budget in (2048, 40):
        llm = LLM(tmp_path, progress=False, max_num_batched_tokens=budget, **settings)
        results = llm.generate(PROMPTS, GREEDY)
        assert [result.completions[0].token_ids for result in results] == expected
        llm.core.scheduler.check_integrity()
        if budget == 40:
            # A step launched before the one before it is read back brings the same tokens.
            llm.core = EngineCore(llm.core.scheduler, llm.core._runner, overlap=1)
            llm.core.scheduler.flush_cache()
            again = llm.generate(PROMPTS, GREEDY)
            assert [result.completions[0].token_ids for result in again] == expected
        del llm


def test_a_fraction_of_the_device_is_not_exceeded(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    total = torch.cuda.get_device_properties(0).total_memory
    llm = LLM(tmp_path, progress=False, device="cuda", dtype="bfloat16", memory_budget=0.25)
    result = llm.generate(PROMPTS, SamplingParams(temperature=0.8, seed=1, max_tokens=32))
    assert all(len(each.completions[0].token_ids) >= 1 for each in result)
    assert torch.cuda.max_memory_allocated() <= 0.25 * total
    assert llm.info.num_pages > 10_000
