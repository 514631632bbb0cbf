"""Where and in what precision a model runs, and the loading of its weights there. Knows no steps and no pages."""

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.container import usable_cores
from engine.model.checkpoint import open_checkpoint
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.errors import ModelError
from engine.model.weights import fill_dummy, load_weights
from kernels.linear import cpu_computes_bfloat16
from telemetry.garbage import keep_freed_memory

CUDA_BUDGET = 0.9  # of the device's memory, where memory_budget is not set


class NoRoom(ModelError):
    """The budget leaves nothing for the KV pool."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device."""

    decoder: Decoder  # with its weights
    max_model_len: int  # longest sequence, tokens
    dtype: torch.dtype  # of weights and KV
    device: torch.device

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        return self.decoder.config

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page: K and V of all layers."""
        return 2 * self.config.num_layers * page_size * self.config.kv_size * self.dtype.itemsize


def load_model(config: EngineConfig, *, progress: bool = True) -> LoadedModel:
    """Loads the model as the settings say.

    Args:
        progress: show a bar while weights load.

    Raises:
        ModelError: the model cannot be served as asked.
    """
    device = find_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or usable_cores())
        keep_freed_memory()
    checkpoint = open_checkpoint(config.model)
    max_model_len = _max_model_len(config, checkpoint.config)
    dtype = _dtype(config, device)
    with torch.inference_mode():
        decoder = Decoder(checkpoint.config, dtype, device)
        if config.load_format == "dummy":
            fill_dummy(decoder, config.seed or 0)
        else:
            load_weights(decoder, checkpoint, progress=progress)
    return LoadedModel(decoder, max_model_len, dtype, device)


def find_device(name: str) -> torch.device:
    """The device of that name ("auto": cuda where there is one, else cpu). Raises ModelError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device {name!r} is none that torch knows") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ModelError(f"device {name!r} is not available here")
    return device


def allowed_bytes(budget: int | float | None, memory: int, default: int | float) -> int:
    """What the memory_budget allows of a device's `memory` bytes. Raises ModelError: it is more than that."""
    wanted = default if budget is None else budget
    allowed = int(wanted * memory) if isinstance(wanted, float) else wanted
    if allowed > memory:  # a pool on the CPU takes its memory only when it fills: it would die then, not now
        raise ModelError(f"memory_budget is {allowed} bytes, and the device has {memory}")
    return allowed


def pages_within(left: int, page_bytes: int, page_size: int) -> int:
    """Pages of the KV pool that fit into the `left` bytes. Raises NoRoom: none does."""
    pages = left // page_bytes
    if pages < 1:
        raise NoRoom(
            f"memory_budget leaves {max(left, 0)} bytes for the KV pool, and one page of {page_size} tokens"
            f" takes {page_bytes}"
        )
    return pages


def whose_memory(device: torch.device) -> str:
    """Who has a CUDA device's memory, and what helps where others do: for the error that there is too little."""
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    of, ours, others, left = (f"{size / (1 << 30):.1f}" for size in (total, own, total - free - own, free))
    return (
        f"Of the device's {of} GiB this process has {ours}, others and the driver have {others}, and {left} are free."
        " What others have counts in memory_budget: servers that share a device are started one after the other, each"
        " with a larger --memory-budget than the one before (such as 0.45 and 0.9)"
    )


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]
    if device.type == "cuda":
        with torch.cuda.device(device):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = cpu_computes_bfloat16()
    return torch.bfloat16 if native else torch.float32


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.window
    if config.max_model_len > model.window:
        raise ModelError(
            f"max_model_len ({config.max_model_len}) is beyond the model's window of {model.window} tokens"
        )
    return config.max_model_len
