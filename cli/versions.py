"""Versions of what a bug report needs, read from the installed distributions without importing them."""

import platform
from importlib.metadata import PackageNotFoundError, version

_DISTRIBUTIONS = ("torch", "triton", "tokenizers", "safetensors", "grpcio", "protobuf", "fastapi", "uvicorn")


def versions() -> list[tuple[str, str]]:
    """(name, version) pairs, Fulcrum first; what is not installed says so."""
    rows = [("fulcrum", version("fulcrum-llm")), ("python", platform.python_version())]
    for name in _DISTRIBUTIONS:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows
