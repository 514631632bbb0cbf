"""Puts an engine core together from its settings. The only place that chooses between implementations."""

import importlib.metadata
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import LoadedModel, NoRoom, find_device, load_model, whose_memory
from engine.messages import CoreInfo
from engine.model.errors import ModelError
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.static_scheduler import StaticScheduler

if TYPE_CHECKING:
    from engine.gpu.runner import GpuRunner


def build_core(config: EngineConfig, *, progress: bool = True) -> tuple[EngineCore, CoreInfo]:
    """Loads the model, makes the KV pool and warms up.

    Raises:
        ModelError: the model cannot be served as asked.
        ValueError: a logits processor cannot be loaded.
    """
    try:
        runner = _runner(config, load_model(config, progress=progress))
        runner.warm_up()
    except (NoRoom, torch.OutOfMemoryError) as error:
        device = find_device(config.device)
        if device.type == "cpu":
            raise
        raise ModelError(f"{error}. {whose_memory(device)}") from error
    model, limits = runner.model_config, config.step_limits(runner.device.type)
    info = CoreInfo(
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=runner.max_model_len,
        eos_token_ids=list(model.eos_token_ids),
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(runner.device),
        page_size=config.page_size,
        num_pages=runner.num_pages,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        traces=config.trace_requests > 0,
        step_timeout=config.step_timeout,
        max_samples=limits.max_samples,
        version=importlib.metadata.version("fulcrum-llm"),
    )
    overlap = int(config.overlap and runner.device.type == "cuda")
    return EngineCore(new_scheduler(config, info), runner, overlap=overlap), info


def new_scheduler(config: EngineConfig, info: CoreInfo) -> Scheduler:
    """An empty scheduler as the settings say, for an engine of this description."""
    kind = StaticScheduler if config.scheduler == "static" else Scheduler
    return kind(config, info)


def _runner(config: EngineConfig, model: LoadedModel) -> "ModelRunner | GpuRunner":
    if model.device.type == "cpu" or config.attention == "reference":
        return ModelRunner(config, model)
    from engine.gpu.runner import GpuRunner  # brings Triton, which a CPU does without

    return GpuRunner(config, model)
