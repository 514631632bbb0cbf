"""What this process may use of its machine: all of it, or what its container may (cgroup v2). Knows no device."""

import math
import os
from pathlib import Path

_CONTAINER = Path("/sys/fs/cgroup")  # where a container finds its own limits


def usable_memory() -> int:
    """Bytes of memory."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limit("memory.max")])


def usable_cores() -> int:
    """Cores: those of its affinity, within its CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _limit("cpu.max")
    return min(cores, math.ceil(quota[0] / quota[1])) if quota else cores


def _limit(name: str) -> list[int]:
    """The numbers of a limit; none where there is no container or no limit."""
    file = _CONTAINER / name
    words = file.read_text().split() if file.exists() else ["max"]
    return [] if words[0] == "max" else [int(word) for word in words]
