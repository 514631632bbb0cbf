"""The same load at several request rates: plots of goodput and latency over the rate."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.records import Fields, LoadTestError


def plot(rows: Sequence[Fields], folder: Path, kinds: Sequence[str]) -> list[Path]:
    """Draws goodput.KIND and latency.KIND for each kind ("svg", "png"); the infinite rate stands at the right end.

    Raises: LoadTestError when matplotlib is missing or a file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LoadTestError("plots need matplotlib: install fulcrum-llm[bench]") from error
    places, ticks = range(len(rows)), [str(row["request_rate"]) for row in rows]

    def draw(axes: Any, title: str, unit: str, keys: Mapping[str, str]) -> None:
        for key, label in keys.items():  # a row of which no request succeeded is a gap
            axes.plot(places, [row[key] if row["completed"] else None for row in rows], marker="o", label=label)
        axes.set(title=title, xlabel="offered requests/s", ylabel=unit, xticks=places, xticklabels=ticks)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)

    objectives = rows[0].get("goodput_objectives_ms") or {}
    figures = {"goodput": Figure((6, 4), layout="constrained"), "latency": Figure((15, 4), layout="constrained")}
    axes = figures["goodput"].add_subplot()
    title = "Goodput" + "".join(f", {name.upper()} ≤ {limit:g} ms" for name, limit in objectives.items())
    keys = {"request_goodput": "requests that met the objectives", "request_throughput": "all requests"}
    draw(axes, title, "requests/s", keys)
    axes.legend()
    for name, axes in zip(("ttft", "tpot", "itl"), figures["latency"].subplots(1, 3), strict=True):
        keys = {key: key.partition("_")[0] for key in rows[0] if key.startswith("p") and key.endswith(f"_{name}_ms")}
        draw(axes, name.upper(), "ms", keys)
        if name in objectives:
            axes.axhline(objectives[name], linestyle="--", color="gray", label="objective")
        axes.legend()
    paths = {folder / f"{name}.{kind}": figure for name, figure in figures.items() for kind in kinds}
    for path, figure in paths.items():
        try:
            figure.savefig(path)
        except OSError as error:
            raise LoadTestError(f"{path} cannot be written: {error}") from error
    return list(paths)
