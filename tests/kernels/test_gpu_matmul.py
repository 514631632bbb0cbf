"""kernels.gpu.matmul against float64 products, in the interpreter or on a CUDA device."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.activation import silu_mul
from kernels.gpu.matmul import TABLE_FILE, Config, Key, Workspace, bucket, gate_up_silu, launch, linear, load_table

SPLIT = Config("swap", block_n=16, block_k=32, split_k=3, stages=3, warps=1)
CONFIGS = [
    Config("dot", block_n=16, block_k=32, stages=3, warps=2),
    Config("dot", block_n=32, block_k=64, split_k=2, stages=4),
    Config("swap", block_n=16, block_k=64, stages=3, warps=1),
    SPLIT,
    Config("dot", block_n=16, block_k=64, split_k=2, stages=3, warps=2, tma=True),
    Config("swap", block_n=64, block_k=32, split_k=4, stages=3, tma=True),
]
# Float32 sums of products of unit variance: about the square root of K roundings of 2**-24; then that of the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def label(config: Config) -> str:
    return f"{config.kind}-{config.block_n}-{config.block_k}-{config.split_k}{'-tma' if config.tma else ''}"


def dtypes() -> list[torch.dtype]:
    # The interpreter's bfloat16 is wrong.
    return [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def operands(rows: int, n: int, k: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1_000_003 + n * 1009 + k)
    x = torch.randn(rows, k, generator=generator)
    weight = torch.randn(n, k, generator=generator) / k**0.5
    return x.to(device, dtype), weight.to(device, dtype)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


def workspace_of(device: str, op: str, rows: int, weight: Tensor, config: Config) -> Workspace:
    return Workspace(device, {Key(op, bucket(rows), *weight.shape): config})  # type: ignore[arg-type]


def assert_product(out: Tensor, x: Tensor, weight: Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), exact(x, weight), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("config", CONFIGS, ids=label)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 48, 160), (7, 33, 88), (16, 64, 128), (17, 40, 96)])
def test_product(rows: int, n: int, k: int, dtype: torch.dtype, config: Config, device: str) -> None:
    x, weight = operands(rows, n, k, dtype, device)
    out = torch.full((rows, n), torch.nan, dtype=dtype, device=device)
    workspace = workspace_of(device, "linear", rows, weight, config)
    launch(x, weight, out, workspace, config)
    assert_product(out, x, weight)


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(("n", "k"), [(48, 1024), (33, 1096), (5, 200)])
def test_one_row_without_tensor_cores(n: int, k: int, dtype: torch.dtype, split_k: int, device: str) -> None:
    config = Config("gemv", block_n=4, block_k=256, split_k=split_k, stages=2, warps=1)
    x, weight = operands(1, n, k, dtype, device)
    out = torch.full((1, n), torch.nan, dtype=dtype, device=device)
    launch(x, weight, out, workspace_of(device, "linear", 1, weight, config), config)
    assert_product(out, x, weight)


@pytest.mark.parametrize("rows", range(1, 18))
def test_every_number_of_rows(rows: int, device: str) -> None:
    x, weight = operands(rows, 32, 64, torch.float16, device)
    config = Config("swap", block_n=32, block_k=32, split_k=2, stages=3, warps=2)
    # Whatever lies beyond the last row stays.
    space = torch.full((rows + 1, 32), 7.0, dtype=torch.float16, device=device)
    linear(x, weight, space[:rows], workspace_of(device, "linear", rows, weight, config))
    assert_product(space[:rows], x, weight)
    assert torch.equal(space[rows], torch.full_like(space[rows], 7.0))


def test_split_sums_repeat_and_leave_the_counters_at_zero(device: str) -> None:
    shapes = [(3, 80, 160), (5, 48, 96), (8, 33, 224)]
    products = [operands(*shape, torch.float32, device) for shape in shapes]
    extra = [(Key("linear", bucket(rows), n, k), SPLIT) for rows, n, k in shapes]
    workspace = Workspace(device, {}, extra=extra)
    assert workspace.counters.numel() == 5
    assert workspace.partials.numel() == 3 * 8 * 48
    first: list[Tensor] = []
    for turn in range(3):
        for index, (x, weight) in enumerate(products):
            out = torch.full((x.shape[0], weight.shape[0]), torch.nan, device=device)
            workspace.partials.fill_(torch.nan)
            launch(x, weight, out, workspace, SPLIT)
            assert_product(out, x, weight)
            assert not workspace.counters.any()
            if turn == 0:
                first.append(out)
            else:
                assert torch.equal(out, first[index])


def test_a_program_without_work(device: str) -> None:
    """Five blocks of K over four programs, two for each: the last has none."""
    config = Config("dot", block_n=16, block_k=32, split_k=4, stages=3, warps=2)
    x, weight = operands(2, 16, 160, torch.float32, device)
    out = torch.full((2, 16), torch.nan, device=device)
    launch(x, weight, out, workspace_of(device, "linear", 2, weight, config), config)
    assert_product(out, x, weight)


GATES = [*CONFIGS[:4], CONFIGS[5], Config("gemv", block_n=2, block_k=256, split_k=2, stages=1, warps=1)]


@pytest.mark.parametrize("config", GATES, ids=label)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("rows", [1, 9])
def test_fused_gate_repeats_the_unfused_roundings(rows: int, dtype: torch.dtype, config: Config, device: str) -> None:
    if config.kind == "gemv" and rows > 1:
        config = CONFIGS[0]
    size, k = 40, 96
    x, weight = operands(rows, 2 * size, k, dtype, device)
    linear_workspace = workspace_of(device, "linear", rows, weight, config)
    product = torch.empty(rows, 2 * size, dtype=dtype, device=device)
    launch(x, weight, product, linear_workspace, config)
    workspace = workspace_of(device, "gate_up", rows, weight, config)
    out = torch.full((rows, size), torch.nan, dtype=dtype, device=device)
    launch(x, weight, out, workspace, config)
    # The same sums and roundings as the twin; silu itself may differ in its last float32 bits, and so round otherwise.
    twin = silu_mul(product)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(out, twin, rtol=16 * unit if dtype == torch.float32 else unit, atol=1e-6)
    if dtype != torch.float32:
        assert (out == twin).float().mean() > 0.98
    assert not workspace.counters.any()


def test_products_outside_the_table_go_to_torch(device: str) -> None:
    x, weight = operands(3, 32, 64, torch.float16, device)
    out = torch.empty(3, 32, dtype=torch.float16, device=device)
    linear(x, weight, out, Workspace(device, {}))
    assert torch.equal(out, torch.mm(x, weight.T))
    # Two rows up to four share an entry, five do not; float32 has none.
    workspace = Workspace(device, {Key("linear", 4, 32, 64): SPLIT})
    for rows, dtype in ((3, torch.float32), (5, torch.float16)):
        x, weight = operands(rows, 32, 64, dtype, device)
        out = torch.empty(rows, 32, dtype=dtype, device=device)
        linear(x, weight, out, workspace)
        assert torch.equal(out, torch.mm(x, weight.T))


@pytest.mark.parametrize("fused", [False, True])
def test_gate_with_and_without_an_entry(fused: bool, device: str) -> None:
    x, weight = operands(4, 64, 96, torch.float16, device)
    out = torch.full((4, 32), torch.nan, dtype=torch.float16, device=device)
    scratch = torch.full((4, 64), torch.nan, dtype=torch.float16, device=device)
    table = {Key("gate_up", 4, 64, 96): SPLIT} if fused else {}
    gate_up_silu(x, weight, out, Workspace(device, table), scratch)
    gate, up = exact(x, weight).chunk(2, dim=1)
    torch.testing.assert_close(out.double(), gate * torch.sigmoid(gate) * up, rtol=4e-3, atol=4e-3)
    assert bool(scratch.isnan().all()) == fused


def test_table_holds_for_its_device_alone(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    entry = {"key": ["linear", 8, 64, 128], "config": {"kind": "dot", "block_n": 16, "block_k": 64, "warps": 2}}
    path.write_text(json.dumps({"device": "NVIDIA H200", "entries": [entry]}))
    expected = {Key("linear", 8, 64, 128): Config("dot", 16, 64, split_k=1, stages=4, warps=2, tma=False)}
    assert load_table(path, "NVIDIA H200") == expected
    assert load_table(path, "NVIDIA A10") == {}


def test_the_committed_table_is_sound() -> None:
    table = load_table(TABLE_FILE, json.loads(TABLE_FILE.read_text())["device"])
    for key, config in table.items():
        assert key.op in ("linear", "gate_up")
        assert bucket(key.rows) == key.rows
        assert config.kind != "gemv" or key.rows == 1
        assert config.split_k <= -(-key.k // config.block_k)


@pytest.mark.parametrize(("rows", "rounded"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (17, 32), (64, 64)])
def test_bucket(rows: int, rounded: int) -> None:
    assert bucket(rows) == rounded


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(
    ("n", "k", "gated"), [(4608, 3584, False), (3584, 3584, False), (37888, 3584, True), (3584, 18944, False)]
)
def test_real_shapes_in_a_graph(n: int, k: int, gated: bool) -> None:
    """Each row count's entry, or a plausible one, captured and replayed three times with new inputs."""
    for rows in (1, 8, 13, 64):
        x, weight = operands(rows, n, k, torch.bfloat16, "cuda")
        config = Config("swap", 64, 64, split_k=2, stages=4, warps=4)
        op = "gate_up" if gated else "linear"
        table = Workspace("cuda").table
        table.setdefault(Key(op, bucket(rows), n, k), config)  # type: ignore[arg-type]
        workspace = Workspace("cuda", table)
        out = torch.empty(rows, n // 2 if gated else n, dtype=torch.bfloat16, device="cuda")
        scratch = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")

        def call() -> None:
            if gated:
                gate_up_silu(x, weight, out, workspace, scratch)  # noqa: B023
            else:
                linear(x, weight, out, workspace)  # noqa: B023

        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                call()
        for _ in range(3):
            x.normal_()
            out.fill_(torch.nan)
            graph.replay()
            if gated:
                product = exact(x, weight).bfloat16()
                torch.testing.assert_close(out, silu_mul(product), rtol=3e-2, atol=3e-2)
            else:
                assert_product(out, x, weight)
            assert not workspace.counters.any()
