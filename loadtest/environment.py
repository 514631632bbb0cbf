"""Where and how a measurement was made: machine, commit, command. Every result says it."""

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = ("torch", "triton", "tokenizers", "grpcio")


def environment() -> dict[str, Any]:
    """JSON fields: machine (with its GPUs), commit of this checkout (with a "+": and changes), versions, command."""
    return {
        "machine": {
            "cpu": processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpus": _lines("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "commit": _commit(),
        "version": version("fulcrum-llm"),
        "versions": {name: _version(name) for name in _DISTRIBUTIONS},
        "command": command(sys.argv),
    }


def command(arguments: list[str]) -> str:
    """The command line as one would type it, without the values of headers, which may be keys, and without folders."""
    script = Path(arguments[0])
    program = ["python", "-m", f"loadtest.{script.stem}"] if script.parent.name == "loadtest" else ["fulcrum"]
    shown = program + [_without_folder(argument) for argument in arguments[1:]]
    for number, argument in enumerate(shown):
        if argument.startswith("--header="):
            shown[number] = argument.partition("=")[0] + "=" + _masked(argument.partition("=")[2])
        elif number and shown[number - 1] == "--header":
            shown[number] = _masked(argument)
    return shlex.join(shown)


def processor() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _without_folder(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    return option + equals + (path.name if path.is_absolute() and path.parent.exists() else value)


def _masked(header: str) -> str:
    return header.partition("=")[0] + "=..."


def _commit() -> str | None:
    folder = str(Path(__file__).parent)
    head = _lines("git", "-C", folder, "rev-parse", "HEAD")
    if not head:
        return None
    return head[0] + ("+" if _lines("git", "-C", folder, "status", "--porcelain", "--untracked-files=no") else "")


def _lines(*arguments: str) -> list[str]:
    """What a program says; nothing where it is missing or fails."""
    try:
        run = subprocess.run(arguments, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return run.stdout.splitlines()
