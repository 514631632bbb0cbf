"""Plots: goodput and latency over the request rate, and an engine's gauges over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.records import Fields, LoadTestError


def plot(rows: Sequence[Fields], folder: Path, kinds: Sequence[str]) -> list[Path]:
    """Draws goodput.KIND and latency.KIND for each kind ("svg", "png"); the infinite rate stands at the right end.

    Rows of runs without a server have no rate, and are left out; what a row lacks is a gap. Where rows were watched (as
    `loadtest.suite`'s card24), the last one's samples.KIND too.

    Raises: LoadTestError when no row has a rate, when matplotlib is missing or a file cannot be written.
    """
    rows = [row for row in rows if "request_rate" in row]
    if not rows:
        raise LoadTestError("there is nothing to draw: no result has a request rate")
    places, ticks = range(len(rows)), [str(row["request_rate"]) for row in rows]

    def draw(axes: Any, title: str, unit: str, keys: Mapping[str, str]) -> None:
        for key, label in keys.items():  # a row of which no request succeeded is a gap
            values = [row.get(key) if row.get("completed", 1) else None for row in rows]
            axes.plot(places, values, marker="o", label=label)
        axes.set(title=title, xlabel="offered requests/s", ylabel=unit, xticks=places, xticklabels=ticks)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)

    objectives = rows[0].get("goodput_objectives_ms") or {}
    figures = {"goodput": _figure((6, 4)), "latency": _figure((15, 4))}
    axes = figures["goodput"].add_subplot()
    title = "Goodput" + "".join(f", {name.upper()} ≤ {limit:g} ms" for name, limit in objectives.items())
    keys = {"request_goodput": "requests that met the objectives", "request_throughput": "all requests"}
    draw(axes, title, "requests/s", keys)
    axes.legend()
    for name, axes in zip(("ttft", "tpot", "itl"), figures["latency"].subplots(1, 3), strict=True):
        told = (key for row in rows for key in row if key.startswith("p") and key.endswith(f"_{name}_ms"))
        keys = {key: key.partition("_")[0] for key in told}
        draw(axes, name.upper(), "ms", keys)
        if name in objectives:
            axes.axhline(objectives[name], linestyle="--", color="gray", label="objective")
        if axes.lines:
            axes.legend()
    if watched := [row["samples"] for row in rows if "samples" in row]:
        figures["samples"] = _over_time(watched[-1])
    paths = {folder / f"{name}.{kind}": figure for name, figure in figures.items() for kind in kinds}
    for path, figure in paths.items():
        try:
            figure.savefig(path)
        except OSError as error:
            raise LoadTestError(f"{path} cannot be written: {error}") from error
    return list(paths)


def _over_time(samples: Sequence[Fields]) -> Any:
    """Sequences that run and wait, preemptions, and the share of pages in use, over seconds."""
    figure = _figure((9, 4))
    axes = figure.add_subplot()
    lines = {
        "running": [each["running_sequences"] for each in samples],
        "waiting": [each["waiting_sequences"] for each in samples],
        "preemptions so far": [each["preemptions"] for each in samples],
        "pages in use, %": [100 * each["used_pages"] / each["total_pages"] for each in samples],
    }
    for label, values in lines.items():
        axes.plot([each["seconds"] for each in samples], values, label=label, linewidth=1)
    axes.set(xlabel="seconds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LoadTestError("plots need matplotlib: install fulcrum-llm[bench]") from error
    return Figure(size, layout="constrained")
