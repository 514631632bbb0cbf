"""Fixtures that every room's tests share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def own_data() -> Path:
    """The folder of the project's own figures."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data_file() -> Callable[[str], Path]:
    """Finds a file of the test data folder that FULCRUM_DATA names; skips without it, fails if it lacks the file."""

    def find(name: str) -> Path:
        folder = os.environ.get("FULCRUM_DATA")
        if not folder:
            pytest.skip(f"FULCRUM_DATA is not set: {name} is not at hand")
        path = Path(folder) / name
        if not path.exists():
            pytest.fail(f"FULCRUM_DATA is set, but {name} is missing there")
        return path

    return find
