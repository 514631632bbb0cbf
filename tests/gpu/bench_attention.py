"""Times the Triton attention kernels at the shapes of Qwen2.5-7B (28 heads, 4 KV heads of 128, bfloat16, pages of 16).

    python tests/gpu/bench_attention.py --output attention.json

Decode is judged by the bytes of K and V that it reads a second, prefill by its floating-point operations. Launches lie
in a CUDA graph, and each reads pages of its own, so that the L2 cache does not help. All random choices are fixed.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.errors import TritonError

from kernels.gpu.decode_attention import DecodeConfig, DecodePlan, decode_attention, plan_decode
from kernels.gpu.prefill_attention import PrefillConfig, prefill_attention, prefill_config, prefill_tiles
from loadtest.environment import environment

HEADS, KV_HEADS, HEAD_DIM, PAGE = 28, 4, 128, 16
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
MEMORY = 4.2  # TB/s that an H200 reaches
CONTEXT = 1152
BATCHES = (1, 8, 32, 64, 128, 256, 512)
DECODE = (
    DecodeConfig(64, 4, 4, 2, 1, 128),
    DecodeConfig(64, 4, 4, 2, 4, 128),
    DecodeConfig(64, 4, 4, 2, 2, 64),
    DecodeConfig(64, 4, 3, 3, 1, 128),
    DecodeConfig(64, 4, 3, 3, 4, 128),
    DecodeConfig(64, 4, 3, 2, 2, 256),
    DecodeConfig(32, 4, 5, 3, 2, 128),
    DecodeConfig(128, 8, 3, 1, 4, 128),
)
# (queries, cached tokens before them)
CHUNKS = ((1152, 0), (1152, 2304), (1152, 5760), (768, 2048), (2048, 0), (2048, 2048), (2048, 6144), (7680, 0))
PREFILL = (
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 64, 8, 4),
    PrefillConfig(128, 128, 8, 2),
    PrefillConfig(128, 128, 8, 3),
    PrefillConfig(64, 64, 4, 3),
    PrefillConfig(64, 128, 4, 2),
)

Row = dict[str, Any]


def main() -> None:
    """Runs all cases and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write all rows as JSON")
    parser.add_argument("--only", choices=("decode", "prefill"), help="one of the two kernels")
    parser.add_argument("--pool-gb", type=float, default=6.0, help="size of the pool of pages")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device")
    torch.manual_seed(0)
    pages = int(options.pool_gb * 1e9) // (PAGE * TOKEN_BYTES)
    pool = torch.randn(pages, 2, KV_HEADS, PAGE, HEAD_DIM, dtype=torch.bfloat16, device="cuda").permute(0, 3, 1, 2, 4)
    rows: list[Row] = []
    if options.only != "prefill":
        draw = np.random.default_rng(0)
        mixed = np.clip(draw.lognormal(5.9, 0.9, 256).astype(int), 8, 4096).tolist()
        cases = {f"B{batch}": [CONTEXT] * batch for batch in BATCHES} | {"mixed256": mixed}
        for name, lengths in cases.items():
            rows += decode_case(pool, name, lengths)
        rows += plan_case()
        report(rows, "decode", "share", "share of 4.2 TB/s, %", 100)
    if options.only != "decode":
        for queries, prefix in CHUNKS:
            rows += prefill_case(pool, queries, prefix)
        report(rows, "prefill", "tflops", "TFLOP/s", 1)
    if options.output:
        cases = {"decode": by_case(rows, "decode", "share"), "prefill": by_case(rows, "prefill", "tflops")}
        options.output.write_text(json.dumps(environment() | {"rows": rows} | cases, indent=1) + "\n")


def decode_case(pool: Tensor, name: str, lengths: list[int]) -> list[Row]:
    """Every setting at one batch; launch j reads the pages of its own rows of the table."""
    batch, tokens = len(lengths), sum(lengths)
    widest = -(-max(lengths) // PAGE)
    launches = min(64, max(2, math.ceil(256e6 / (tokens * TOKEN_BYTES))), len(pool) // (batch * widest))
    tables = random_tables(pool, launches * batch, widest).view(launches, batch, widest)
    q = torch.randn(batch, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")[:, :HEADS]
    out = torch.zeros(batch, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    positions = torch.tensor(lengths, dtype=torch.int32, device="cuda") - 1
    count = torch.tensor([batch], dtype=torch.int32, device="cuda")

    def run(config: DecodeConfig) -> Callable[[], None]:
        plan = DecodePlan.allocate(max(BATCHES), HEADS, KV_HEADS, HEAD_DIM, q.dtype, "cuda", config=config)
        plan_decode(plan, rows, positions, count)

        def launch() -> None:
            for table in tables:
                decode_attention(q, pool, table, plan, out)

        return launch

    result = []
    for row in measured("decode", name, DECODE, run, launches, out):
        if "us" in row:
            row["tb_s"] = tokens * TOKEN_BYTES / row["us"] * 1e-6
            row["share"] = row["tb_s"] / MEMORY
        result.append(row)
    return result


def plan_case() -> list[Row]:
    """The kernel that lists the splits, once a step."""
    ints = torch.full((256,), CONTEXT - 1, dtype=torch.int32, device="cuda")
    rows = torch.arange(256, dtype=torch.int32, device="cuda")
    count = torch.tensor([256], dtype=torch.int32, device="cuda")

    def run(config: DecodeConfig) -> Callable[[], None]:
        plan = DecodePlan.allocate(max(BATCHES), HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, "cuda", config=config)

        def launch() -> None:
            for _ in range(20):
                plan_decode(plan, rows, ints, count)

        return launch

    return measured("plan", "B256", DECODE[:1], run, 20, None)


def prefill_case(pool: Tensor, queries: int, prefix: int) -> list[Row]:
    """Every setting at one chunk, and PyTorch's own kernel where there is no prefix."""
    widest = -(-(queries + prefix) // PAGE)
    launches = 4
    tables = random_tables(pool, launches, widest)[:, None]
    q = torch.randn(queries, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")[:, :HEADS]
    out = torch.zeros(queries, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")

    def run(config: PrefillConfig | None) -> Callable[[], None]:
        block_m = (config or prefill_config(HEAD_DIM, q.dtype)).block_m
        tiles = prefill_tiles([(0, 0, prefix, queries)], block_m)
        count = torch.tensor([len(tiles), 0], dtype=torch.int32, device="cuda")
        device_tiles = torch.from_numpy(tiles).cuda()

        def launch() -> None:
            for table in tables:
                prefill_attention(q, pool, table, device_tiles, count, out, programs=len(tiles), config=config)

        return launch

    def run_torch(_: str) -> Callable[[], None]:
        dense = q.transpose(0, 1).contiguous()[None]
        k, v = torch.randn(2, 1, KV_HEADS, queries, HEAD_DIM, dtype=q.dtype, device="cuda")

        def launch() -> None:
            for _ in range(launches):
                F.scaled_dot_product_attention(dense, k, v, is_causal=True, enable_gqa=True)

        return launch

    name = f"{queries}@{prefix}"
    result = measured("prefill", name, PREFILL, run, launches, out)
    result += measured("prefill", name, ("as served",), lambda _: run(None), launches, out)
    if prefix == 0:
        result += measured("prefill", name, ("torch sdpa",), run_torch, launches, None)
    pairs = queries * prefix + queries * (queries + 1) // 2
    for row in result:
        if "us" in row:
            row["tflops"] = 4 * HEADS * HEAD_DIM * pairs / row["us"] * 1e-6
    return result


def random_tables(pool: Tensor, rows: int, widest: int) -> Tensor:
    """(rows, widest) page numbers, none twice."""
    return torch.randperm(len(pool), device="cuda")[: rows * widest].view(rows, widest).int()


def measured(
    kernel: str,
    case: str,
    settings: Sequence[Any],
    run: Callable[[Any], Callable[[], None]],
    launches: int,
    out: Tensor | None,
) -> list[Row]:
    """Microseconds of a launch with each setting, and how far its output is from the first's."""
    result: list[Row] = []
    expected = None
    for setting in settings:
        row: Row = {
            "kernel": kernel,
            "case": case,
            "setting": setting if isinstance(setting, str) else str(tuple(setting)),
        }
        try:
            launch = run(setting)
            row["us"] = graph_time(launch) / launches
            if out is not None:
                expected = out.clone() if expected is None else expected
                row["off"] = float((out - expected).abs().max())
        except (RuntimeError, ValueError, TritonError) as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
            sys.stdout.write(f"{kernel} {case} {row['setting']} failed: {row['failed']}\n")
        result.append(row)
    return result


def graph_time(launch: Callable[[], None]) -> float:
    """Microseconds of one replay of what `launch` enqueues."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    graph.replay()
    middle.record()
    middle.synchronize()
    replays = max(3, min(50, int(15 / max(start.elapsed_time(middle), 1e-3))))
    middle.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return 1000 * middle.elapsed_time(end) / replays


def by_case(rows: list[Row], kernel: str, figure: str) -> list[Row]:
    """A row for each case: {"case": its name, setting: figure}."""
    rows = [row for row in rows if row["kernel"] == kernel and figure in row]
    return [
        {"case": case} | {row["setting"]: row[figure] for row in rows if row["case"] == case}
        for case in dict.fromkeys(row["case"] for row in rows)
    ]


def report(rows: list[Row], kernel: str, figure: str, title: str, factor: float) -> None:
    """A line for each setting, the best on average first, and the best time of each case."""
    for row in rows:
        if row["kernel"] == "plan" and "us" in row and kernel == "decode":
            sys.stdout.write(f"plan of 256 queries: {row['us']:.1f} us\n")
    rows = [row for row in rows if row["kernel"] == kernel]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    found = {(row["setting"], row["case"]): row for row in rows if figure in row}
    settings = list(dict.fromkeys(row["setting"] for row in rows))

    def mean(setting: str) -> float:
        values = [found[setting, case][figure] for case in cases if (setting, case) in found]
        return math.exp(sum(map(math.log, values)) / len(values)) if len(values) == len(cases) else 0.0

    sys.stdout.write(f"\n{kernel}: {title}\n{'':26}" + "".join(f"{case:>10}" for case in cases) + "   off\n")
    for setting in sorted(settings, key=mean, reverse=True):
        cells = [found.get((setting, case)) for case in cases]
        line = "".join(f"{factor * cell[figure]:10.0f}" if cell else f"{'-':>10}" for cell in cells)
        off = max((cell.get("off", 0.0) for cell in cells if cell), default=math.nan)
        sys.stdout.write(f"{setting:26}{line}{off:6.3f}\n")
    ours = [row for row in rows if "off" in row]
    best = [min((row["us"] for row in ours if row["case"] == case), default=math.nan) for case in cases]
    sys.stdout.write(f"{'best, us':26}" + "".join(f"{value:10.1f}" for value in best) + "\n")


if __name__ == "__main__":
    main()
