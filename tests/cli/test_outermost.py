"""What surrounds every command: a full disk, and standard streams that were closed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FULCRUM = (sys.executable, "-m", "cli")
DUMMY = ("--load-format=dummy", "--device=cpu", "--threads=1", "--memory-budget=32MiB")


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["bench", "compare", "--help"]])
def test_a_full_disk_is_one_line_and_status_1(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [*FULCRUM, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (run.returncode, run.stderr) == (1, "Error: [Errno 28] No space left on device\n")


def test_a_command_and_its_children_work_without_standard_input_and_error(tiny_model: Path, tmp_path: Path) -> None:
    body = {"model": tiny_model.name, "prompt": "x", "max_tokens": 3, "ignore_eos": True}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in").write_text(json.dumps(row))
    command = [*FULCRUM, "batch", tmp_path / "in", tmp_path / "out", f"--model={tiny_model}", *DUMMY]
    closed = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", *command]
    run = subprocess.run(closed, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (0, "1 rows: 1 answered, 0 of them with an error, 0 left\n")


def test_an_answer_that_nobody_reads_any_more_ends_quietly(tiny_model: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [*FULCRUM, "generate", "x", f"--model={tiny_model}", *DUMMY]
        run = subprocess.run(
            command,
            stdout=writing,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert (run.returncode, run.stderr) == (1, "")
