"""Numbers of docs/operations.md that are the code's own."""

from pathlib import Path

import pytest

from cli import child
from engine import core_server, device, kept, own_folder, runner, scheduler
from engine import trace as timelines
from service import grammar, servicer
from telemetry import tracing

NUMBERS = {
    "up to 30 s": kept._LONGEST_PAUSE == 30,
    "each time within a minute of its start": kept._STEADY_SECONDS == 60,
    "of memory (2 GiB)": grammar._MEMORY_BYTES == 2 << 30,
    "a minute later at the earliest": own_folder._YOUNG_SECONDS == 60,
    "until 64 others have overtaken one": scheduler.MAX_OVERTAKEN == 64,
    "up to 16,384 characters": servicer._LOGGED_CHARACTERS == 16_384,
    "has all of `--memory-budget` (2 GiB)": runner._CPU_BUDGET == 2 << 30,
    "the budget (0.9 of the device's memory)": device.CUDA_BUDGET == 0.9,
    "the grace plus 15 seconds": child.STOP_SECONDS == 15,
    "its workers within a second": child._ORPHAN_SECONDS == 1,
    "at most once a second, by all together": core_server._VIEW_SECONDS == 1,
    "a process ends up to 3 s later": tracing._CLOSE_SECONDS == 3,
    "its last 8 N steps": timelines.STEPS_PER_REQUEST == 8,
}


@pytest.mark.parametrize("claim", NUMBERS)
def test_numbers_are_those_of_the_code(claim: str) -> None:
    assert claim in " ".join((Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8").split())
    assert NUMBERS[claim]
