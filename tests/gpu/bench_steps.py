"""Times whole steps of the CUDA runner, and their kernels against the time that their bytes take.

    python tests/gpu/bench_steps.py MODEL_FOLDER --output steps.json

Weights are random, K and V zero: speed alone. Steps are launched one ahead, as the engine does. A step's time is from
its first kernel to its last; the gap is what lies between one step's last kernel and the next one's first.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
import torch
from torch.profiler import ProfilerActivity, profile

from engine.config import EngineConfig
from engine.device import load_model
from engine.gpu.runner import GpuRunner
from engine.request import SamplingParams
from engine.step import PageUpdate, RowInit, RowWork, Sample, Step
from loadtest.environment import environment

PAGE = 16
GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
# Decodes, tokens of a chunk, tokens before the chunk.
_MIXED = ((0, 256, 0), (0, 2048, 0), (64, 192, 0), (128, 384, 0), (128, 896, 0), (256, 768, 0), (0, 1536, 6144))
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, seed=0, ignore_eos=True)


class Rows:
    """Rows with pages of their own, scattered over the pool."""

    def __init__(self, runner: GpuRunner) -> None:
        self.runner = runner
        self.pages = torch.randperm(runner.num_pages, generator=torch.Generator().manual_seed(0)).tolist()
        self.step_id = 0

    def init(self, lengths: list[int], params: SamplingParams) -> Step:
        """A step that only makes rows of these lengths."""
        inits, updates, at = [], [], 0
        for row, length in enumerate(lengths):
            count = -(-(length + 64) // PAGE)
            inits.append(RowInit(row, tuple(range(1, length + 1)), length, params, 0, ()))
            updates.append(PageUpdate(row, 0, tuple(self.pages[at : at + count])))
            at += count
        return self.step(tuple(inits), tuple(updates), (), ())

    def step(self, inits: Any, updates: Any, works: Any, samples: Any) -> Step:
        self.step_id += 1
        return Step(self.step_id, inits, updates, works, samples)


def run_steps(rows: Rows, steps: list[Step]) -> tuple[list[float], list[float], float]:
    """Busy and gap of each step in ms (the first left out), and ms of host time to launch one."""
    busy, gaps, host, launched = [], [], [], []
    for step in steps:
        began = time.perf_counter()
        launched.append(rows.runner.launch(step))
        host.append(time.perf_counter() - began)
        if len(launched) > 1:
            result = rows.runner.collect(launched.pop(0))
            busy.append(1e3 * result.busy_seconds)
            gaps.append(1e3 * result.gap_seconds)
    rows.runner.collect(launched.pop(0))
    return busy[1:], gaps[1:], 1e3 * statistics.median(host)


def decode_steps(rows: Rows, count: int, context: int, steps: int) -> list[Step]:
    samples = tuple(Sample(row, row) for row in range(count))
    return [
        rows.step((), (), tuple(RowWork(row, context - 1 + at, 1) for row in range(count)), samples)
        for at in range(steps)
    ]


def mixed_steps(rows: Rows, decodes: int, context: int, chunk: int, prefix: int, steps: int) -> list[Step]:
    made = []
    for at in range(steps):
        works = [RowWork(row, context - 1 + at, 1) for row in range(decodes)]
        samples = [Sample(row, row) for row in range(decodes)]
        made.append(rows.step((), (), (*works, RowWork(decodes, prefix, chunk)), tuple(samples)))
    return made


def kernel_times(rows: Rows, steps: list[Step]) -> list[dict[str, Any]]:
    """Device time of each kernel of one step, largest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run_steps(rows, steps)
        torch.cuda.synchronize()
    count = len(steps)
    table = [
        {"kernel": event.key, "us_a_step": event.device_time_total / count, "calls_a_step": event.count / count}
        for event in profiler.key_averages()
        if event.device_time_total
    ]
    return sorted(table, key=lambda entry: -entry["us_a_step"])


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--batches", default="1,8,32,64,128,256,512")
@click.option("--context", default=1152)
@click.option("--max-num-batched-tokens", default=2048)
@click.option("--profile/--no-profile", "profiled", default=True)
def main(model: Path, output: Path, batches: str, context: int, max_num_batched_tokens: int, profiled: bool) -> None:
    """Prints a table of step times; everything goes to the output file."""
    began = time.perf_counter()
    sizes = [int(size) for size in batches.split(",")]
    config = EngineConfig(
        model=model,
        load_format="dummy",
        max_model_len=8192,
        max_num_seqs=max(*sizes, 256),
        max_num_batched_tokens=max_num_batched_tokens,
    )
    runner = GpuRunner(config, load_model(config, progress=False))
    loaded = time.perf_counter()
    runner.warm_up()
    free, total = torch.cuda.mem_get_info()
    record: dict[str, Any] = environment() | {
        "load_seconds": loaded - began,
        "warm_up_seconds": time.perf_counter() - loaded,
        "graphs": len(runner._graphs),
        "pages": runner.num_pages,
        "memory_used_fraction": (total - free) / total,
        "rows": [],
        "kernels": {},
    }
    click.echo(str({key: record[key] for key in list(record)[-7:-2]}))
    rows = Rows(runner)

    def measure(name: str, steps: list[Step]) -> None:
        busy, gaps, host = run_steps(rows, steps)
        entry = {"name": name, "ms": statistics.median(busy), "p90_ms": sorted(busy)[int(0.9 * len(busy))]}
        entry |= {"gap_us": 1e3 * statistics.median(gaps), "launch_ms": host}
        record["rows"].append(entry)
        click.echo(
            f"{name:42s} {entry['ms']:8.3f} ms  p90 {entry['p90_ms']:8.3f}"
            f"  gap {entry['gap_us']:6.1f} us  launch {host:.2f} ms"
        )

    for params, label in ((GREEDY, ""), (DRAWN, " drawn")):
        for size in sizes:
            runner.collect(runner.launch(rows.init([context] * size, params)))
            measure(f"decode {size}{label}", decode_steps(rows, size, context, 30))
    for decodes, chunk, prefix in (
        (0, 256, 0),
        (0, 2048, 0),
        (64, 192, 0),
        (128, 384, 0),
        (128, 896, 0),
        (256, 768, 0),
        (0, 1536, 6144),
    ):
        if decodes + chunk > max_num_batched_tokens:
            continue
        runner.collect(runner.launch(rows.init([context] * decodes + [prefix + chunk], GREEDY)))
        measure(f"mixed {decodes} + {chunk} after {prefix}", mixed_steps(rows, decodes, context, chunk, prefix, 12))
    if profiled:
        scenes = {f"decode {size}": (size, 0, 0) for size in (1, 128)} | {"mixed 256 + 768": (256, 768, 0)}
        for name, (decodes, chunk, prefix) in scenes.items():
            lengths = [context] * decodes + ([prefix + chunk] if chunk else [])
            runner.collect(runner.launch(rows.init(lengths, GREEDY)))
            steps = (
                mixed_steps(rows, decodes, context, chunk, prefix, 10)
                if chunk
                else decode_steps(rows, decodes, context, 10)
            )
            record["kernels"][name] = table = kernel_times(rows, steps)
            click.echo(name)
            for entry in table[:14]:
                click.echo(f"  {entry['us_a_step']:9.1f} us  {entry['calls_a_step']:6.1f}  {entry['kernel'][:90]}")
    output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
