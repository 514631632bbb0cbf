"""How many service and gateway processes serve where a person does not say. Knows no room's settings."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.container import usable_cores

# Of 16 cores; what is left is for the engine core and the system. More than so many one device never feeds.
_SERVICE, _GATEWAY, _CORES = 5, 6, 16
# Descriptors; more connections than that one process does not serve.
_MOST_FILES = 1 << 16


def raise_file_limit() -> None:
    """Lets this process, and those that it starts, have as many connections as the system would let them.

    The limit that it gives at first, often 1024 files, is for programs that cannot have more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def with_counts(params: Mapping[str, Any]) -> dict[str, Any]:
    """The options with service_workers and workers filled in, where a command has them."""
    service, gateway = counts(usable_cores(), cuda=on_cuda(params.get("device") or "cpu"))
    chosen = {"service_workers": service, "workers": gateway}
    return {name: chosen.get(name) if value is None else value for name, value in params.items()}


def counts(cores: int, *, cuda: bool) -> tuple[int, int]:
    """(service processes, gateway processes): of 16 cores 5 and 6, of fewer in proportion; 1 and 1 without CUDA.

    On the CPU the model has use for every core.
    """
    if not cuda:
        return 1, 1
    share = min(cores, _CORES) / _CORES
    return max(1, int(_SERVICE * share)), max(1, int(_GATEWAY * share))


def on_cuda(device: str) -> bool:
    """Whether --device means CUDA; of "auto" told by the driver's device files, since to import torch takes seconds."""
    if device != "auto":
        return device.startswith("cuda")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*"))
