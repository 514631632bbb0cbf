"""Products of a few rows with a fixed weight, bound by the one pass over the weight: y = x @ weight.T.

Letters: M rows of x, N rows of the weight, K columns of both. A table, tuned offline on one GPU kind, says which shapes
are faster here than in cuBLAS, and with which tiles; every other product goes to `torch.mm`. Sums are in float32, in a
fixed order, with one rounding to the dtype. Nothing is allocated, synchronised or tuned in a call, so that a CUDA graph
can hold it.

It knows no bias, no model and no layer. Twin: `torch.mm`, followed by `kernels.activation` where the gate is fused.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gpu.activation import silu_mul
from kernels.gpu.launching import after_previous, early

TABLE_FILE = Path(__file__).with_name("matmul_table.json")


class Key(NamedTuple):
    """What the table is asked for; rows are rounded up to a power of two, n counts all rows of the weight."""

    op: Literal["linear", "gate_up"]
    rows: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class Config:
    """How a product is cut.

    Attributes:
        kind: "dot" has the weight on the right of the tensor core's product, "swap" on its left (which needs tiles of
            64 rows and 4 warps), "gemv" uses no tensor core and takes one row.
        block_n: output columns of a program.
        block_k: products of one turn of its loop.
        split_k: programs that share a tile's K; the last to arrive adds their parts.
        stages: tiles of the weight that are in flight.
        warps: of a program.
        tma: whether the copy engine fetches the weight's tiles (not for "gemv").
    """

    kind: Literal["dot", "swap", "gemv"]
    block_n: int
    block_k: int
    split_k: int = 1
    stages: int = 4
    warps: int = 4
    tma: bool = False


class Workspace:
    """The table and the scratch memory of products that split K.

    Calls that may overlap in time, as those of two streams, need one each.

    Args:
        device: of the weights.
        table: products to do here; by default that of the device's kind, empty where none was tuned.
        extra: further products that the scratch memory must be large enough for.
    """

    def __init__(
        self,
        device: torch.device | str,
        table: Mapping[Key, Config] | None = None,
        *,
        extra: Iterable[tuple[Key, Config]] = (),
    ) -> None:
        device = torch.device(device)
        if table is None:
            table = load_table(TABLE_FILE, torch.cuda.get_device_name(device)) if device.type == "cuda" else {}
        self.table = dict(table)
        split = [(key, config) for key, config in [*self.table.items(), *extra] if config.split_k > 1]
        parts = max((config.split_k * key.rows * key.n for key, config in split), default=1)
        tiles = max((triton.cdiv(key.n, config.block_n) for key, config in split), default=1)
        self.partials = torch.empty(parts, dtype=torch.float32, device=device)
        # Every kernel leaves them at zero.
        self.counters = torch.zeros(tiles, dtype=torch.int32, device=device)


def load_table(path: Path, device_name: str) -> dict[Key, Config]:
    """Reads the products tuned for a GPU kind; none if the file is for another one."""
    record = json.loads(path.read_text())
    if record["device"] != device_name:
        return {}
    return {Key(*entry["key"]): Config(**entry["config"]) for entry in record["entries"]}


def bucket(rows: int) -> int:
    """`rows`, at least 1, rounded up to a power of two."""
    return 1 << (rows - 1).bit_length()


def linear(x: Tensor, weight: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Writes x @ weight.T into out.

    Args:
        x: (M, K), M >= 1.
        weight: (N, K).
        out: (M, N).
        workspace: on the same device.
    All are contiguous and of one dtype; the table holds for those of two bytes.
    """
    config = workspace.table.get(Key("linear", bucket(x.shape[0]), *weight.shape))
    if config is None or x.element_size() != 2:
        torch.mm(x, weight.T, out=out)
    else:
        launch(x, weight, out, workspace, config)


def gate_up_silu(x: Tensor, weight: Tensor, out: Tensor, workspace: Workspace, scratch: Tensor) -> None:
    """Writes silu(gate) * up into out, (gate, up) being the halves of x @ weight.T.

    Args:
        x: (M, K), M >= 1.
        weight: (2I, K), the gate's rows first.
        out: (M, I).
        workspace: on the same device.
        scratch: (M, 2I), overwritten where the table has no fused product: there `linear` and `silu_mul` do it.
    All are contiguous and of one dtype.
    """
    config = workspace.table.get(Key("gate_up", bucket(x.shape[0]), *weight.shape))
    if config is None or x.element_size() != 2:
        linear(x, weight, scratch, workspace)
        silu_mul(scratch, out)
    else:
        launch(x, weight, out, workspace, config)


def launch(x: Tensor, weight: Tensor, out: Tensor, workspace: Workspace, config: Config) -> None:
    """Writes the product, or the gated one if out has half as many columns as the weight has rows, into out.

    Arguments as above; the workspace was made with this product in its table or among its extras.
    """
    kernel, grid, args, options = plan(x, weight, out, workspace, config)
    kernel[grid](*args, **options)


def plan(
    x: Tensor, weight: Tensor, out: Tensor, workspace: Workspace, config: Config
) -> tuple[triton.JITFunction, tuple[int, int], tuple[object, ...], dict[str, object]]:
    """Returns what `launch` starts: kernel, grid, positional and named arguments."""
    rows, k = x.shape
    n = out.shape[1]
    grid = (triton.cdiv(n, config.block_n), config.split_k)
    options: dict[str, object] = {
        "N": n,
        "K": k,
        "GATED": weight.shape[0] == 2 * n,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SPLIT_K": config.split_k,
        "STAGES": config.stages,
        **early(rows, x.device),
        "num_warps": config.warps,
    }
    if config.kind == "gemv":
        assert rows == 1
        return _gemv, grid, (x, weight, out, workspace.partials, workspace.counters), options
    swap = config.kind == "swap"
    options |= {"BLOCK_M": max(8 if swap else 16, bucket(rows)), "SWAP": swap, "TMA": config.tma}
    options["num_stages"] = config.stages
    tiles = TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]) if config.tma else weight
    return _dot, grid, (x, weight, tiles, out, workspace.partials, workspace.counters, rows), options


@triton.jit
def _write(acc, acc_up, out, at, mask, GATED: tl.constexpr):
    """Rounds as the unfused operations do: the product, then the gate, then what it lets through."""
    dtype: tl.constexpr = out.dtype.element_ty
    y = acc.to(dtype)
    if GATED:
        gate = y.to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        y = (gate * acc_up.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out + at, y, mask=mask)


@triton.jit
def _finish(acc, acc_up, out, partials, counters, rows, N: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr):  # fmt: skip
    """Writes the tile; where K is split, the program that arrives last adds the parts, in the order of K."""
    row = tl.arange(0, BLOCK_M)[:, None]
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (row < rows) & (column < N)
    at = row * N + column
    if SPLIT_K == 1:
        _write(acc, acc_up, out, at, mask, GATED)
    else:
        size = rows * N
        part = partials + tl.program_id(1) * size + at
        tl.store(part, acc, mask=mask)
        if GATED:
            tl.store(part + SPLIT_K * size, acc_up, mask=mask)
        # Every thread's part is written before one of them counts, with release and acquire.
        tl.debug_barrier()
        counter = counters + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT_K - 1:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            total_up = total
            for split in tl.static_range(SPLIT_K):
                part = partials + split * size + at
                total += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
                if GATED:
                    total_up += tl.load(part + SPLIT_K * size, mask=mask, other=0.0, cache_modifier=".cg")
            _write(total, total_up, out, at, mask, GATED)
            tl.store(counter, 0)


@triton.jit
def _load_tile(weight, row, column, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Loads weight[row, column], read once in a step and so the first to leave the cache; zero beyond N and K."""
    if N % BLOCK_N == 0 and K % BLOCK_K == 0:
        tile = tl.load(weight + row * K + column, eviction_policy="evict_first")
    else:
        inside = (row < N) & (column < K)
        tile = tl.load(weight + row * K + column, mask=inside, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _accumulate(x, w, acc, SWAP: tl.constexpr):
    # Never TF32 for float32.
    return tl.dot(w, x.T, acc, input_precision="ieee") if SWAP else tl.dot(x, w.T, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def _dot(x, weight, tiles, out, partials, counters, rows, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
         BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
         STAGES: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TURNS: tl.constexpr = (BLOCKS + SPLIT_K - 1) // SPLIT_K
    first_row = tl.program_id(0) * BLOCK_N
    first = tl.program_id(1) * TURNS
    last = tl.minimum(first + TURNS, BLOCKS)
    after_previous(PDL)
    token = tl.arange(0, BLOCK_M)[:, None]
    row = (first_row + tl.arange(0, BLOCK_N)[:, None]).to(tl.int64)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    acc_up = acc
    for block in tl.range(first, last):
        column = block * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        part = tl.load(x + token * K + column, mask=(token < rows) & (column < K), other=0.0)
        if TMA:
            acc = _accumulate(part, tiles.load([first_row, block * BLOCK_K]), acc, SWAP)
        else:
            acc = _accumulate(part, _load_tile(weight, row, column, N, K, BLOCK_N, BLOCK_K), acc, SWAP)
        if GATED:
            if TMA:
                acc_up = _accumulate(part, tiles.load([N + first_row, block * BLOCK_K]), acc_up, SWAP)
            else:
                tile = _load_tile(weight + N * K, row, column, N, K, BLOCK_N, BLOCK_K)
                acc_up = _accumulate(part, tile, acc_up, SWAP)
    if SWAP:
        acc, acc_up = acc.T, acc_up.T
    _finish(acc, acc_up, out, partials, counters, rows, N, GATED, BLOCK_M, BLOCK_N, SPLIT_K)


@triton.jit
def _eighths(products):
    """Adds runs of eight products, which are those of one thread: (BLOCK_N, BLOCK_K) to (BLOCK_N, BLOCK_K / 8)."""
    return tl.sum(tl.reshape(products, [products.shape[0], products.shape[1] // 8, 8]), 2)


@triton.jit
def _gemv(x, weight, out, partials, counters, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
          BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
          PDL: tl.constexpr):  # fmt: skip
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TURNS: tl.constexpr = (BLOCKS + SPLIT_K - 1) // SPLIT_K
    first_row = tl.program_id(0) * BLOCK_N
    first = tl.program_id(1) * TURNS
    last = tl.minimum(first + TURNS, BLOCKS)
    after_previous(PDL)
    row = (first_row + tl.arange(0, BLOCK_N)[:, None]).to(tl.int64)
    acc = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    acc_up = acc
    for block in tl.range(first, last, loop_unroll_factor=STAGES):
        column = block * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        part = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
        acc += _eighths(part * _load_tile(weight, row, column, N, K, BLOCK_N, BLOCK_K))
        if GATED:
            acc_up += _eighths(part * _load_tile(weight + N * K, row, column, N, K, BLOCK_N, BLOCK_K))
    total, total_up = tl.sum(acc, 1)[None, :], tl.sum(acc_up, 1)[None, :]
    _finish(total, total_up, out, partials, counters, 1, N, GATED, 1, BLOCK_N, SPLIT_K)
