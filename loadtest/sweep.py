"""The same load at several request rates: a table, and plots of goodput and latency over the rate."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.records import LoadTestError

Row = Mapping[str, Any]
"""A result file's fields (see loadtest.report)."""

_COLUMNS = (
    ("rate", "request_rate", 8),
    ("req/s", "request_throughput", 8),
    ("good/s", "request_goodput", 8),
    ("tok/s", "output_throughput", 10),
    ("TTFT p50", "p50_ttft_ms", 10),
    ("TTFT p99", "p99_ttft_ms", 10),
    ("TPOT p50", "p50_tpot_ms", 10),
    ("TPOT p99", "p99_tpot_ms", 10),
    ("ITL p99", "p99_itl_ms", 10),
    ("failed", "failed", 7),
)


def _figure(row: Row, key: str) -> Any:
    """A row's field; None for the figures of a row of which no request succeeded."""
    return row.get(key) if row.get("completed", 1) or key in ("request_rate", "failed") else None


def table(rows: Sequence[Row]) -> str:
    """One line for each rate; latencies in milliseconds. A "!" marks void token latencies, a "?" a saturated client."""
    lines = ["".join(f"{title:>{width}}" for title, _, width in _COLUMNS)]
    for row in rows:
        marks = ("!" if row.get("token_latencies_void") else "") + ("?" if row.get("client_saturated") else "")
        lines.append(
            "".join(f"{_cell(_figure(row, key)):>{width}}" for _, key, width in _COLUMNS) + f" {marks}".rstrip()
        )
    return "\n".join(lines)


def plot(rows: Sequence[Row], folder: Path, kinds: Sequence[str]) -> list[Path]:
    """Draws goodput.KIND and latency.KIND for each kind ("svg", "png"); the infinite rate stands at the right end.

    Raises: LoadTestError when matplotlib is missing or a file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LoadTestError("plots need matplotlib: install fulcrum-llm[bench]") from error
    places = list(range(len(rows)))
    ticks = [str(row["request_rate"]) for row in rows]

    def draw(axes: Any, title: str, unit: str, keys: Mapping[str, str]) -> Any:
        for label, key in keys.items():
            values = [float("nan") if _figure(row, key) is None else row[key] for row in rows]
            axes.plot(places, values, marker="o", label=label)
        axes.set_xticks(places, ticks)
        axes.set_xlabel("offered requests/s")
        axes.set_ylabel(unit)
        axes.set_title(title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        return axes

    goodput = Figure(figsize=(6, 4), layout="constrained")
    objectives = rows[0].get("goodput_objectives_ms") or {}
    title = "Goodput" + "".join(f", {name.upper()} ≤ {limit:g} ms" for name, limit in objectives.items())
    keys = {"requests that met the objectives": "request_goodput", "all requests": "request_throughput"}
    draw(goodput.add_subplot(), title, "requests/s", keys).legend()
    latency = Figure(figsize=(15, 4), layout="constrained")
    for panel, (name, what) in enumerate({"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL"}.items(), 1):
        shown = [
            key.removesuffix(f"_{name}_ms") for key in rows[0] if key.startswith("p") and key.endswith(f"_{name}_ms")
        ]
        axes = draw(latency.add_subplot(1, 3, panel), what, "ms", {each: f"{each}_{name}_ms" for each in shown})
        if name in objectives:
            axes.axhline(objectives[name], linestyle="--", color="gray", label="objective")
        axes.legend()
    paths = []
    for stem, figure in {"goodput": goodput, "latency": latency}.items():
        for kind in kinds:
            path = folder / f"{stem}.{kind}"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, format=kind)
            except OSError as error:
                raise LoadTestError(f"{path} cannot be written: {error}") from error
            paths.append(path)
    return paths


def read_result(path: Path) -> dict[str, Any]:
    """A result file's fields. Raises: LoadTestError when it is none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadTestError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise LoadTestError(f"{path} is not a result file")
    return fields


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
