"""Tunes kernels/gpu/matmul.py on a GPU and writes its table: `PYTHONPATH=. python tests/gpu/tune_matmul.py`.

For every shape and number of rows it times cuBLAS and two dozen configurations, in CUDA graphs over so many distinct
weights that the L2 cache never helps, and checks every result against float32. A configuration enters the table if it
beats cuBLAS by 2%; entries of products that a run leaves out stay. The fused gate is compared with cuBLAS and the
gate's own kernel, one after the other.
"""

# ruff: noqa: T201

import argparse
import contextlib
import functools
import json
import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.gpu.activation import silu_mul
from kernels.gpu.matmul import TABLE_FILE, Config, Key, Workspace, launch, load_table, plan

# (hidden size, heads' columns of q, k and v together, columns of the heads, intermediate size, vocabulary, layers)
MODELS = {
    "qwen2.5-7b": (3584, 4608, 3584, 18944, 152064, 28),
    "llama-8b": (4096, 6144, 4096, 14336, 128256, 32),
    "qwen2.5-0.5b": (896, 1152, 896, 4864, 151936, 24),
    "qwen2.5-1.5b": (1536, 2048, 1536, 8960, 151936, 28),
    "llama-1b": (2048, 3072, 2048, 8192, 128256, 16),
    "smollm2-135m": (576, 960, 576, 1536, 49152, 30),
}
ROWS = (1, 8, 2, 4, 16, 32, 64)
SMS = 132
SHARED = 227 << 10
BANDWIDTH = 4.3e6  # bytes per microsecond
SM_BANDWIDTH = 4.5e4
# What must be in flight to reach it, by Little's law.
IN_FLIGHT = 3e6


@dataclass(frozen=True)
class Case:
    """A product of a model."""

    name: str
    key: Key
    layers: int

    @property
    def bytes(self) -> int:
        """Of the weight."""
        return self.key.n * self.key.k * 2

    @property
    def columns(self) -> int:
        """Of the output."""
        return self.key.n // 2 if self.key.op == "gate_up" else self.key.n


def cases(model: str, rows: int) -> list[Case]:
    """The five products of a model's decode step."""
    hidden, qkv, heads, intermediate, vocabulary, layers = MODELS[model]
    return [
        Case(f"{model} {name}", Key(op, rows, n, k), count)
        for name, op, n, k, count in (
            ("qkv", "linear", qkv, hidden, layers),
            ("o", "linear", hidden, heads, layers),
            ("gate_up", "gate_up", 2 * intermediate, hidden, layers),
            ("down", "linear", hidden, intermediate, layers),
            ("lm_head", "linear", vocabulary, hidden, 1),
        )
    ]


def estimate(case: Case, config: Config) -> float:
    """Microseconds that a tensor core configuration may take: bytes, by a bandwidth that needs many in flight."""
    gated = case.key.op == "gate_up"
    block_m = max(8 if config.kind == "swap" else 16, case.key.rows)
    tile = config.block_n * config.block_k * 2 * (2 if gated else 1)
    # Triton keeps one buffer fewer than stages where mma.sync reads them, and all of them where wgmma does.
    wgmma = config.warps >= 4 and (config.block_n if config.kind == "swap" else block_m) >= 64 and block_m >= 16
    buffers = config.stages if wgmma else config.stages - 1
    shared = buffers * (tile + block_m * config.block_k * 2) + 1024
    resident = min(SHARED // shared, 2048 // (32 * config.warps), 65536 // (96 * 32 * config.warps))
    if resident == 0:
        return math.inf
    grid = -(-case.columns // config.block_n) * config.split_k
    share = case.bytes / grid
    took, left = 0.0, grid
    while left > 0:
        wave = min(left, SMS * resident)
        flight = wave * min(share, buffers * tile)
        bandwidth = min(BANDWIDTH, min(wave, SMS) * SM_BANDWIDTH)
        took += wave * share / bandwidth * math.hypot(1, IN_FLIGHT / flight)
        left -= wave
    return took + 2 + (1.5 if config.split_k > 1 else 0)


def tensor_core(case: Case) -> Iterator[Config]:
    """Configurations worth an estimate."""
    for kind in ("swap", "dot"):
        for block_n in (16, 32, 64, 128):
            warps = min(8, max(1, block_n // (16 if kind == "swap" else 8)))
            for block_k in (64, 128, 256, 512):
                turns = case.key.k // block_k
                if case.key.k % block_k:
                    continue
                for stages in (3, 4, 5, 6, 8):
                    for split_k in (1, 2, 3, 4, 6, 8, 12, 16):
                        if turns // split_k >= min(3, turns):
                            for tma in (False, True):
                                yield Config(kind, block_n, block_k, split_k, stages, warps, tma)


def candidates(case: Case, most: int) -> list[Config]:
    """The best by estimate, with variety, and for one row those without tensor cores."""
    chosen: list[Config] = []
    if case.key.rows == 1:
        for block_n, warps, unroll, split_k in (
            (4, 4, 2, 1), (8, 4, 1, 1), (2, 4, 4, 1), (8, 2, 2, 1), (4, 2, 4, 1), (16, 2, 1, 1), (8, 2, 1, 1),
            (8, 1, 2, 1), (16, 1, 1, 1), (4, 8, 1, 1), (8, 4, 1, 2), (16, 2, 1, 4), (2, 8, 2, 1),
        ):  # fmt: skip
            # So each thread reads 16 bytes of x that serve all its rows.
            chosen.append(Config("gemv", block_n, 256 * warps, split_k, unroll, warps))
    ranked = sorted(tensor_core(case), key=functools.partial(estimate, case))
    seen: Counter[tuple[object, ...]] = Counter()
    for config in ranked:
        if seen.total() == 4 * most or estimate(case, config) == math.inf:
            break
        likes = {
            (config.kind, config.block_n, config.tma): 3,
            (config.block_n, config.block_k, config.split_k): 2,
            (config.split_k,): most // 2,
            (config.kind,): most * 2 // 3,
        }
        if all(seen[like] < limit for like, limit in likes.items()):
            seen.update(likes.keys())
            chosen.append(config)
    return chosen


def operands(case: Case, device: str, copies: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x (M, K), weights (copies, N, K) and out, such that the products have unit variance."""
    rows, n, k = case.key.rows, case.key.n, case.key.k
    x = torch.randn(rows, k, dtype=torch.bfloat16, device=device)
    weights = torch.empty(copies, n, k, dtype=torch.bfloat16, device=device).normal_(0, k**-0.5)
    return x, weights, torch.empty(rows, case.columns, dtype=torch.bfloat16, device=device)


def precompile(case: Case, config: Config) -> None:
    """Compiles into Triton's cache on disk, in a process of the pool."""
    x, weights, out = operands(case, "meta")
    kernel, grid, args, options = plan(x, weights[0], out, Workspace("meta", {}), config)
    kernel.warmup(*args, grid=grid, **options)


def submit(pool: ProcessPoolExecutor, case: Case, config: Config) -> Future[None]:
    """Has it compiled elsewhere; a pool that broke leaves that to the first launch."""
    try:
        return pool.submit(precompile, case, config)
    except BrokenProcessPool:
        done: Future[None] = Future()
        done.set_result(None)
        return done


def measure(call: Callable[[Tensor], None], weights: Tensor) -> float:
    """Microseconds of one call, the median of five runs of a graph that goes over the weights."""
    calls = max(4, len(weights))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(weights[0])
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            for index in range(calls):
                call(weights[index % len(weights)])
        finally:
            graph.capture_end()
        graph.replay()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        replays = max(1, round(2 / max(begin.elapsed_time(end), 1e-3)))
        times = []
        for _ in range(5):
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / (replays * calls))
    torch.cuda.current_stream().wait_stream(stream)
    return sorted(times)[2]


def expected(case: Case, x: Tensor, weight: Tensor) -> Tensor:
    """The product in float32, with the unfused operations' roundings before the last."""
    y = x.float() @ weight.float().T
    if case.key.op == "linear":
        return y
    gate, up = y.bfloat16().float().chunk(2, dim=1)
    return torch.nn.functional.silu(gate).bfloat16().float() * up


class Tuner:
    """Times one case after another until the time is up.

    Attributes:
        best: what beat cuBLAS, and what the table had of products not timed yet.
        times: microseconds of each key: cuBLAS alone, what the engine would do without a table, and with it.
    """

    def __init__(self, best: dict[Key, Config], deadline: float, every: bool) -> None:
        self.deadline = deadline
        self.every = every
        self.best = best
        self.times: dict[Key, tuple[float, float, float]] = {}

    def late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.deadline

    def tune(self, case: Case, pending: list[tuple[Config, Future[None]]]) -> None:
        """Times a case and keeps the best configuration."""
        copies = min(128, max(1, -(-(256 << 20) // case.bytes)))
        x, weights, out = operands(case, "cuda", copies)
        reference = expected(case, x, weights[0])
        scratch = torch.empty(case.key.rows, case.key.n, dtype=torch.bfloat16, device="cuda")

        def product(weight: Tensor) -> None:
            torch.mm(x, weight.T, out=scratch)

        def unfused(weight: Tensor) -> None:
            product(weight)
            silu_mul(scratch, out)

        def attempt(config: Config, future: Future[None]) -> float:
            with contextlib.suppress(BrokenProcessPool):  # then the launch compiles
                future.result(timeout=max(1.0, self.deadline - time.monotonic()))
            workspace = Workspace("cuda", {}, extra=[(case.key, config)])
            times = []
            for _ in range(2):
                out.fill_(math.nan)
                launch(x, weights[0], out, workspace, config)
                error = (out.float() - reference).abs()
                if not bool((error <= 0.03 + 2**-6 * reference.abs()).all()):
                    raise ValueError(f"off by {error.max().item()}")
                if not times:
                    times.append(measure(lambda weight: launch(x, weight, out, workspace, config), weights))
            return times[0]

        alone = measure(product, weights)
        base = measure(unfused, weights) if case.key.op == "gate_up" else alone
        results: list[tuple[float, Config]] = []
        failures = 0
        for config, future in pending:
            if self.late():
                break
            try:
                results.append((attempt(config, future), config))
            except Exception as error:  # noqa: BLE001 (a configuration that cannot run is no candidate)
                failures += 1
                print(f"  skipped {short(config)}: {type(error).__name__} {str(error).strip()[-150:]!r}", flush=True)
        if not results:
            return
        results.sort(key=lambda result: result[0])
        took, config = results[0]
        self.best.pop(case.key, None)
        if wins := took <= 0.98 * base:
            self.best[case.key] = config
        self.times[case.key] = (alone, base, took if wins else base)
        gate = f", with the gate {base:7.2f}" if base != alone else ""
        print(
            f"{case.name:22} M={case.key.rows:<3} cuBLAS {alone:7.2f} us{gate}  best {took:7.2f} us "
            f"{case.bytes / took / 1e6:.2f} TB/s  {short(config)}  ({len(results)} ran, {failures} failed)",
            flush=True,
        )
        for other, config in results if self.every else results[1:3]:
            print(f"    {other:7.2f}  {short(config)}", flush=True)


def short(config: Config) -> str:
    """One word."""
    tma = " tma" if config.tma else ""
    return (
        f"{config.kind} n{config.block_n} k{config.block_k} split{config.split_k} s{config.stages} w{config.warps}{tma}"
    )


def write_table(path: Path, best: dict[Key, Config]) -> None:
    """Writes one entry a line."""
    lines = [json.dumps({"key": list(key), "config": asdict(config)}) for key, config in sorted(best.items())]
    path.write_text(
        f'{{"device": {json.dumps(torch.cuda.get_device_name())}, "entries": [\n' + ",\n".join(lines) + "\n]}\n"
    )


def main() -> None:
    """Tunes, writes the table, prints sums over a decode step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=TABLE_FILE)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, choices=ROWS, default=list(ROWS))
    parser.add_argument("--candidates", type=int, default=24, help="tensor core configurations of a shape")
    parser.add_argument("--every", action="store_true", help="print every configuration's time")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    most = arguments.candidates
    before = load_table(arguments.output, torch.cuda.get_device_name()) if arguments.output.exists() else {}
    tuner = Tuner(before, deadline, arguments.every)
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for model in arguments.models:
                if tuner.late():
                    break
                work = [case for rows in arguments.rows for case in cases(model, rows)]
                compiling = [
                    [(config, submit(pool, case, config)) for config in candidates(case, most)] for case in work
                ]
                for case, pending in zip(work, compiling, strict=True):
                    if tuner.late():
                        print(f"out of time before {case.name} M={case.key.rows}")
                        break
                    tuner.tune(case, pending)
                    write_table(arguments.output, tuner.best)
        finally:
            pool.shutdown(cancel_futures=True)
    for model in arguments.models:
        for rows in sorted(arguments.rows):
            step = cases(model, rows)
            if all(case.key in tuner.times for case in step):
                alone, base, best = (
                    sum(tuner.times[case.key][i] * case.layers for case in step) / 1e3 for i in range(3)
                )
                size = sum(case.bytes * case.layers for case in step)
                print(
                    f"{model} decode step, M={rows}: cuBLAS {alone:.3f} ms, with the gate {base:.3f}; "
                    f"with the table, gate included, {best:.3f} ({size / best / 1e9:.2f} TB/s)"
                )


if __name__ == "__main__":
    main()
