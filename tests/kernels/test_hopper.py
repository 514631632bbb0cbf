"""The kernels as an H200 would run them, compiled without one: they compile, fit, and keep to their registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# CUDA C++ programming guide, compute capability 9.0: of a block, and of a multiprocessor.
SHARED_OF_BLOCK, SHARED_OF_PROCESSOR, RESERVED = 227 * 1024, 228 * 1024, 1024
REGISTERS = 65_536


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """A record for each kernel that was compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    script = Path(__file__).with_name("hopper.py")
    # Loops that were unrolled too often have kept the compiler busy for minutes: that is a failure too.
    run = subprocess.run(
        (sys.executable, script), env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_all_kernels_fit(compiled):
    names = {each["kernel"] for each in compiled}
    attention, others = {"_decode_kernel", "_prefill_kernel", "_hopper_kernel"}, {"_dot", "_gemv", "_ladder", "_pick"}
    assert attention | others | {"_penalize", "_rope_kv"} <= names
    assert all(each["shared"] <= SHARED_OF_BLOCK for each in compiled)


def test_none_spills(compiled):
    """Registers that do not suffice go to device memory. Heads of 256 take all 255 of a thread, and a few words."""
    spilled = {(each["case"], each["kernel"]): each["stack"] for each in compiled if each["stack"] or each["local"]}
    assert all(key == ("wide heads", "_prefill_kernel") and size <= 64 for key, size in spilled.items()), spilled


def test_two_decode_programs_fit_into_a_multiprocessor(compiled):
    """As `decode_config` says, and the grid is made for."""
    decode = [each for each in compiled if each["kernel"] == "_decode_kernel"]
    assert len(decode) == 4
    for each in decode:
        assert 2 * (each["shared"] + RESERVED) <= SHARED_OF_PROCESSOR, each
        assert 2 * 4 * 32 * each["reg"] <= REGISTERS, each
