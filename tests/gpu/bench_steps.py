"""Times whole steps of the CUDA runner, and their kernels against the time that their bytes take.

    python tests/gpu/bench_steps.py MODEL_FOLDER --output steps.json

Weights are random, K and V zero: speed alone. Steps are launched one ahead, as the engine does. A step's time is from
its first kernel to its last; the gap is what lies between one step's last kernel and the next one's first.
"""

import json
import re
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

GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
# Decodes, tokens of a chunk, tokens before the chunk.
_MIXED = (
    (0, 256, 0),
    (0, 2048, 0),
    (64, 192, 0),
    (128, 384, 0),
    (128, 896, 0),
    (256, 768, 0),
    (0, 1152, 3456),
    (0, 1536, 6144),
)
# Not of few decodes: kernels that are set up early (kernels/gpu/launching.py) count the time that they wait.
_PROFILED = {
    "128 decodes": (128, 0, 0),
    "256 decodes and a chunk of 768": (256, 768, 0),
    "a chunk of 1,152 after 3,456": (0, 1152, 3456),
}
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, seed=0, ignore_eos=True)


class Rows:
    """Rows with pages of their own, scattered over the pool."""

    def __init__(self, runner: GpuRunner, page_size: int) -> None:
        self.runner, self.page_size = runner, page_size
        self.pages = torch.randperm(runner.num_pages, generator=torch.Generator().manual_seed(0)).tolist()
        self.step_id = 0

    def init(self, lengths: list[int], params: SamplingParams) -> Step:
        """A step that only makes rows of these lengths."""
        inits, updates, at = [], [], 0
        for row, length in enumerate(lengths):
            count = -(-(length + 64) // self.page_size)
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


GROUPS = {
    "products": r"nvjet|gemm|splitK|_gemv|_dot",
    "decode attention": r"_decode_kernel",
    "prefill attention": r"_prefill_kernel|_hopper_kernel",
    "norms, with the residual sum": r"rms_norm",
    "bias, RoPE, K and V into pages": r"_rope_kv",
    "SiLU and product": r"_silu_mul",
    "sampling": r"_maxima|_pick",
}
BYTES_A_SECOND = 4.2e12  # measured: a large copy, read and written
FLOPS = 790e12  # measured: a large bfloat16 product


def floors(runner: GpuRunner, decodes: int, context: int, chunk: int, prefix: int) -> dict[str, float]:
    """The least time of each group in us: bytes at the device's bandwidth, or operations at its speed.

    Of the last layer the chunk's tokens, none of them sampled from, have K and V alone.
    """
    model = runner.model_config
    tokens, samples, layers = decodes + chunk, decodes, model.num_layers
    heads, kv_heads, d = model.num_heads, model.num_kv_heads, model.head_dim
    qkv, *rest = (linear.weight.numel() for linear in runner._forward._decoder.layers[0].linears)
    head = model.vocab_size * model.hidden_size
    of_all, of_samples = layers * qkv + (layers - 1) * sum(rest), (sum(rest) + head) * (samples > 0)
    products = max(2 * (of_all + of_samples) / BYTES_A_SECOND, 2 * (of_all * tokens + of_samples * samples) / FLOPS)
    rests = (layers - 1) * tokens + samples  # tokens, over all layers, that have what follows K and V
    attended = sum(prefix + at + 1 for at in range(chunk))
    passes = 4 if tokens <= 64 else 2  # more than that are added to the residual stream by the product
    seconds = {
        "products": products,
        "decode attention": layers * decodes * context * 2 * kv_heads * d * 2 / BYTES_A_SECOND,
        "prefill attention": (layers - 1) * 4 * heads * d * attended / FLOPS,
        "norms, with the residual sum": 2 * rests * passes * model.hidden_size * 2 / BYTES_A_SECOND,
        "bias, RoPE, K and V into pages": layers * tokens * 2 * (heads + 2 * kv_heads) * d * 2 / BYTES_A_SECOND,
        "SiLU and product": rests * 3 * model.intermediate_size * 2 / BYTES_A_SECOND,
        "sampling": samples * model.vocab_size * 2 / BYTES_A_SECOND,
    }
    return {name: 1e6 * value for name, value in seconds.items()}


def kernel_times(rows: Rows, steps: list[Step]) -> dict[str, tuple[float, float]]:
    """Device us and launches of a step, by group."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run_steps(rows, steps)
        torch.cuda.synchronize()
    found: dict[str, tuple[float, float]] = {}
    for event in profiler.key_averages():
        group = next((name for name, pattern in GROUPS.items() if re.search(pattern, event.key)), "the rest")
        us, calls = found.get(group, (0.0, 0.0))
        found[group] = (us + event.device_time_total / len(steps), calls + event.count / len(steps))
    return found


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--batches", default="1,8,32,64,128,256,512")
@click.option("--context", default=1152)
@click.option("--max-num-batched-tokens", default=2048)
@click.option("--page-size", default=16)
@click.option("--profile/--no-profile", "profiled", default=True)
def main(model: Path, output: Path, batches: str, context: int, profiled: bool, **limits: int) -> None:
    """Prints a table of step times; everything goes to the output file."""
    began = time.perf_counter()
    sizes = [int(size) for size in batches.split(",")]
    config = EngineConfig(
        model=model,
        load_format="dummy",
        max_model_len=8192,
        max_num_seqs=max(*sizes, 256) + 1,  # a chunk beside the decodes
        **limits,
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
        "page_size": config.page_size,
        "memory_used_fraction": (total - free) / total,
        "rows": [],
        "kernels": [],
    }
    click.echo(str({key: record[key] for key in list(record)[-8:-2]}))
    rows = Rows(runner, config.page_size)

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
    for decodes, chunk, prefix in _MIXED:
        if decodes + chunk > config.max_num_batched_tokens:
            continue
        runner.collect(runner.launch(rows.init([context] * decodes + [prefix + chunk], GREEDY)))
        measure(f"mixed {decodes} + {chunk} after {prefix}", mixed_steps(rows, decodes, context, chunk, prefix, 12))
    for name, (decodes, chunk, prefix) in _PROFILED.items() if profiled else ():
        runner.collect(runner.launch(rows.init([context] * decodes + [prefix + chunk] * bool(chunk), GREEDY)))
        if chunk:
            made = mixed_steps(rows, decodes, context, chunk, prefix, 10)
        else:
            made = decode_steps(rows, decodes, context, 10)
        least = floors(runner, decodes, context, chunk, prefix)
        for group, (us, calls) in sorted(kernel_times(rows, made).items(), key=lambda entry: -entry[1][0]):
            floor_us = least.get(group)
            entry = {"step": name, "kernels": group, "us": us, "launches": calls, "floor_us": floor_us}
            entry["of_floor"] = us / floor_us if floor_us else None
            record["kernels"].append(entry)
            floor = "" if floor_us is None else f"{floor_us:9.1f} us at least"
            click.echo(f"{name:32s} {group:32s} {us:9.1f} us {calls:6.1f} launches {floor}")
    output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
