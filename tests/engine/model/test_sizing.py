"""What operators are told of sizes is what the engine takes."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import container
from engine.build import build_core
from engine.config import EngineConfig
from engine.device import LoadedModel, pages_within
from engine.model.config import ModelConfig
from engine.model.errors import ModelError

DOCUMENT = (Path(__file__).parents[3] / "docs/operations.md").read_text(encoding="utf-8").partition("## Sizing")[2]
ROWS = re.findall(r"(?m)^\| ([\w.-]+) \| (\d+), (\d+), (\d+) \| ([\d,]+) \| ([\d,]+) \|$", DOCUMENT)
# The models' own config.json.
MODELS = {
    "SmolLM2-135M": ("Llama", {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
                               "hidden_size": 576, "vocab_size": 49152}),
    "Llama-3.1-8B": ("Llama", {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                               "hidden_size": 4096, "vocab_size": 128256}),
    "Qwen2.5-7B": ("Qwen2", {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
                             "hidden_size": 3584, "vocab_size": 152064}),
    "Qwen3-8B": ("Qwen3", {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                           "hidden_size": 4096, "vocab_size": 151936, "head_dim": 128}),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_documented_sizes_are_those_of_the_pool(row: tuple[str, ...]) -> None:
    name, *numbers = row
    layers, kv_heads, head, token_bytes, tokens = (int(number.replace(",", "")) for number in numbers)
    family, shape = MODELS[name]
    common = {"intermediate_size": 1024, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
    config = ModelConfig.from_hf(
        {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), **common, **shape}
    )
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (layers, kv_heads, head)
    model = LoadedModel(SimpleNamespace(config=config), 4096, torch.bfloat16, torch.device("cpu"))
    assert model.page_bytes(1) == token_bytes == 2 * layers * kv_heads * head * 2
    assert 16 * pages_within(10 << 30, model.page_bytes(16), 16) == tokens


@pytest.mark.parametrize("measured_late", [True, False])
def test_too_little_memory_beside_another_server_says_who_has_it(
    monkeypatch: pytest.MonkeyPatch, llama: Any, measured_late: bool
) -> None:
    """Of two that start at once on a device, either measures what the other has taken, or finds it taken afterwards."""

    def load_model(config: EngineConfig, *, progress: bool) -> Any:
        if measured_late:
            pages_within(-1, 1000, 16)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60.00 GiB")

    monkeypatch.setattr("engine.build.load_model", load_model)
    monkeypatch.setattr("engine.build.find_device", torch.device)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (10 << 30, 80 << 30))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 15 << 30)
    with pytest.raises(ModelError) as caught:
        build_core(EngineConfig(model=llama[0], device="cuda"))
    first, _, rest = str(caught.value).partition(" Of the device's ")
    assert first.startswith("memory_budget leaves 0 bytes" if measured_late else "CUDA out of memory. Tried to")
    assert rest.startswith("80.0 GiB this process has 15.0, others and the driver have 55.0, and 10.0 are free.")
    assert "one after the other, each with a larger --memory-budget" in rest


def test_every_documented_model_is_checked() -> None:
    assert [row[0] for row in ROWS] == [*MODELS]


def test_a_container_has_what_it_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: Any, tools: Any
) -> None:
    """As the kernel's cgroup v2 has them: a quota and its period in microseconds; bytes; "max" where there is none."""
    monkeypatch.setattr(container, "_CONTAINER", tmp_path)
    cores, memory = container.usable_cores(), container.usable_memory()
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert (container.usable_cores(), container.usable_memory()) == (cores, memory)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{1 << 27}\n")
    assert container.usable_cores() == 1
    runner = tools.make_runner(llama[0], memory_budget=0.5)
    assert runner.num_pages == (1 << 26) // runner.page_bytes
    with pytest.raises(ModelError, match=f"the device has {1 << 27}"):
        tools.make_runner(llama[0], memory_budget=1 << 28)
