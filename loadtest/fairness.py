"""How long a light tenant waits beside a flood, on a simulated clock: `python -m loadtest.fairness`.

The light tenant sends what a trace of a chat service sends, at the trace's times; one minute in, the flood sends a
whole trace of code completions at once. Both are CSV files of arrival_s,context_tokens,generated_tokens (the form of
the Azure traces of Splitwise, ISCA 2024). A step takes 4 ms and 22 us a token, as Qwen2.5-7B's do on an H200.
"""

import csv
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from engine.core import EngineCore
from engine.request import Request, SamplingParams
from loadtest.prefix import NoModel, scheduler_alone
from loadtest.report import save_figures
from loadtest.tables import ROWS, rows_table

STEP_SECONDS, TOKEN_SECONDS = 4e-3, 22e-6
FLOOD_AT = 60.0
_FILE = click.Path(exists=True, path_type=Path)
Lengths = tuple[float, int, int]
"""Arrival in seconds, tokens in, tokens out."""


def read_lengths(path: Path, until: float = float("inf")) -> list[Lengths]:
    """A trace's requests up to a time."""
    with path.open(newline="") as file:
        rows = [(float(at), max(1, int(tokens)), max(1, int(out))) for at, tokens, out in list(csv.reader(file))[1:]]
    return [row for row in rows if row[0] <= until]


def queue_seconds(light: Iterable[Lengths], flood: Iterable[Lengths], *, apart: bool) -> list[float]:
    """Seconds from arrival to first step of each of the light tenant's requests.

    Args:
        flood: all arrive at FLOOD_AT.
        apart: whether they are tenants of their own, or one.
    """
    scheduler = scheduler_alone(
        num_pages=65_536, page_size=16, max_num_seqs=256, max_num_batched_tokens=1152, prefix_cache=False
    )
    core, params = EngineCore(scheduler, NoModel()), SamplingParams(temperature=0.0, seed=0)
    coming = [(at, f"light-{number}", tokens, out) for number, (at, tokens, out) in enumerate(light)]
    coming += [(FLOOD_AT, f"flood-{number}", tokens, out) for number, (_, tokens, out) in enumerate(flood)]
    coming.sort(reverse=True)
    arrivals, waited, now = dict[str, float](), list[float](), 0.0
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            at, name, tokens, out = coming.pop()
            tenant = name.partition("-")[0] if apart else ""
            scheduler.add(Request(name, (0,) * tokens, replace(params, max_tokens=out), tenant=tenant))
            arrivals[name] = at
        turn = core.turn()
        waited += [now - arrivals[name] for name, _ in turn.started if name.startswith("light")]
        now += STEP_SECONDS + TOKEN_SECONDS * scheduler.stats.last_step_tokens
    return waited


@click.command()
@click.option("--light", "light_file", type=_FILE, required=True, help="Trace of the light tenant.")
@click.option("--flood", "flood_file", type=_FILE, required=True, help="Trace of the flood.")
@click.option("--seconds", type=float, default=300.0, help="Of the light trace.")
@click.option("--output-json", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(light_file: Path, flood_file: Path, seconds: float, output_json: Path | None) -> None:
    """Show how long a light tenant's requests wait beside a flood."""
    light, flood = read_lengths(light_file, seconds), read_lengths(flood_file)
    rows: list[dict[str, Any]] = []
    for name, beside, apart in (
        ("light alone", [], True),
        ("one queue for all", flood, False),
        ("fair between tenants", flood, True),
    ):
        waited = queue_seconds(light, beside, apart=apart)
        p50, p99 = np.percentile(waited, (50, 99)).tolist()
        figures = {"queued_p50_s": p50, "queued_p99_s": p99, "queued_max_s": max(waited)}
        rows.append({"tenants": name, "light_requests": len(light), "flood_requests": len(beside)} | figures)
    click.echo(rows_table(rows, ROWS["fairness"]))
    fields = {"kind": "fairness", "files": [light_file.name, flood_file.name], "seconds": seconds, "rows": rows}
    save_figures(fields, output_json)


if __name__ == "__main__":
    main()
