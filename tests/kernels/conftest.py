"""Triton kernels run interpreted where there is no CUDA device: this is set before any of them is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: a CUDA device, or the CPU under the interpreter (right for float32 and float16 alone)."""
    return "cuda" if torch.cuda.is_available() else "cpu"
