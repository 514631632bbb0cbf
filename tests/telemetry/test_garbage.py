"""Memory that is freed goes back to the system."""

import asyncio
import ctypes
import os
from pathlib import Path

import pytest

from telemetry import garbage


def resident() -> float:
    """MB that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
async def test_memory_below_what_is_still_used_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_TRIM_SECONDS", 0.0)
    ctypes.CDLL(None).malloc_trim(0)  # or the blocks may take what other tests have freed
    before = resident()
    blocks = [b"x" * 100_000 for _ in range(2_000)]
    used = blocks[::100]
    del blocks
    assert resident() - before > 150
    giving = asyncio.create_task(garbage.give_back_freed_memory())
    async with asyncio.timeout(10):
        while resident() - before > 20:
            await asyncio.sleep(0.01)
    giving.cancel()
    assert len(used) == 20
