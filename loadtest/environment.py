"""Where and how a measurement was made: machine, commit, command. Every result says it."""

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = ("torch", "triton", "tokenizers", "grpcio")


def environment() -> dict[str, Any]:
    """JSON fields: machine (with its GPUs), commit of this checkout (with a "+": and changes), versions, command."""
    git = ("git", "-C", str(Path(__file__).parent))
    commit = _said(*git, "rev-parse", "HEAD")
    changed = _said(*git, "status", "--porcelain", "--untracked-files=no")
    installed = {each.name: each.version for each in distributions()}
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return {
        "machine": {
            "cpu": names[0].strip() if names else platform.processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpus": _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "commit": commit[0] + "+" * bool(changed) if commit else None,
        "version": version("fulcrum-llm"),
        "versions": {name: installed.get(name) for name in _DISTRIBUTIONS},
        "command": command(sys.argv),
    }


def command(arguments: list[str]) -> str:
    """The command line as one would type it, without the values of headers, which may be keys, and without folders."""
    script = Path(arguments[0])
    programs = {"loadtest": ["python", "-m", f"loadtest.{script.stem}"], "gpu": ["python", f"tests/gpu/{script.name}"]}
    shown = programs.get(script.parent.name, ["fulcrum"])
    for number, argument in enumerate(arguments[1:]):
        option, equals, value = argument.rpartition("=")
        path = Path(value)
        if arguments[number] == "--header":
            shown.append(argument.partition("=")[0] + "=...")
        elif argument.startswith("--header="):
            shown.append("=".join([*argument.split("=")[:2], "..."]))
        elif path.is_absolute() and path.parent.exists():
            shown.append(option + equals + path.name)
        else:
            shown.append(argument)
    return shlex.join(shown)


def _said(*arguments: str) -> list[str]:
    """The lines that a program says; none where it is missing or fails."""
    try:
        return subprocess.run(arguments, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
