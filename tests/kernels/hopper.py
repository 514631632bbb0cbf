"""Compiles the kernels for an H200 on a machine without a GPU, and prints a JSON line about each.

Runs as a program of its own, since kernels that are interpreted cannot be compiled in the same process. What would be
launched is compiled: the wrappers are called with CPU tensors, and no program runs. ptxas comes with Triton.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.gpu import matmul, norm, penalties, rope, rows, sampling
from kernels.gpu.activation import silu_mul
from kernels.gpu.decode_attention import DecodePlan, decode_attention, plan_decode
from kernels.gpu.hopper_attention import hopper_prefill
from kernels.gpu.prefill_attention import prefill_attention

PROCESSORS = 132
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
VOCAB, MAX_LEN, ROWS = 152_064, 8192, 8


class Driver:
    """As much of a driver as a compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiling(kernel: JITFunction, grid: Any) -> Any:
    """What `kernel[grid]` is here."""

    def launch(*args: Any, **options: Any) -> None:
        began = time.perf_counter()
        compiled = kernel.run(*args, grid=(1, 1, 1), warmup=True, **options)
        seconds = time.perf_counter() - began
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run(
                (CUOBJDUMP, "--dump-resource-usage", file.name), capture_output=True, text=True, check=True
            ).stdout
        found = {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        about = {"case": case, "kernel": kernel.__name__, "seconds": round(seconds, 1)}
        sys.stdout.write(json.dumps(about | found | {"shared": compiled.metadata.shared}) + "\n")

    return launch


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def room(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def attention(heads: int, kv_heads: int, head_dim: int, page: int = 16) -> None:
    """Decode and prefill, one kernel each, and prefill's for Hopper."""
    q = room(ROWS, heads + 2 * kv_heads, head_dim)[:, :heads]
    pool = room(4, 2, kv_heads, page, head_dim).permute(0, 3, 1, 2, 4)
    table, out = ints(ROWS, MAX_LEN // page), room(ROWS, heads, head_dim)
    plan = DecodePlan.allocate(ROWS, heads, kv_heads, head_dim, q.dtype, "cpu", programs=2 * PROCESSORS)
    plan_decode(plan, ints(ROWS), ints(ROWS), ints(1))
    decode_attention(q, pool, table, plan, out)
    prefill_attention(q, pool, table, ints(ROWS, 4), ints(2), out, programs=8)
    if head_dim == 128:
        hopper_prefill(q, pool, table, ints(ROWS, 4), ints(2), out, 1.0, programs=8)


def layers(hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int) -> None:
    """What lies between the products, and those of a step's ends."""
    x, residual, weight = room(ROWS, hidden), room(ROWS, hidden), room(hidden)
    norm.embed_rms_norm(ints(ROWS), room(VOCAB, hidden), residual, weight, 1e-6, x)
    norm.add_rms_norm(x, residual, weight, 1e-6, x)
    norm.rms_norm(x, weight, 1e-6, x)
    silu_mul(room(ROWS, 2 * intermediate), room(ROWS, intermediate))
    width = heads + 2 * kv_heads
    cache, turned = room(4, 16, 2, kv_heads, head_dim), rope.rope_table(torch.ones(head_dim // 2), MAX_LEN, 1.0)
    rope.rope_kv(room(ROWS, width, head_dim), ints(ROWS), ints(ROWS), turned, cache, bias=room(width * head_dim))
    norms = {"q_norm": room(head_dim), "k_norm": room(head_dim), "eps": 1e-6}
    rope.rope_kv(room(ROWS, width, head_dim), ints(ROWS), ints(ROWS), turned, cache, **norms)
    tokens, table = ints(ROWS, MAX_LEN), ints(ROWS, MAX_LEN // 16)
    rows.gather_tokens(ints(ROWS), ints(ROWS), tokens, table, ints(ROWS), ints(ROWS), page_size=16, padding_slot=0)
    rows.append_tokens(ints(ROWS), ints(ROWS), ints(ROWS), tokens)
    rows.take_rows(x, ints(ROWS), residual)
    rows.copy_pages(ints(2, 2), room(2, 4, 16, 2, kv_heads, head_dim))
    rows.write_runs(ints(4, 3), ints(64), ints(64), 16)


def products(hidden: int, intermediate: int) -> None:
    """Of the tuned ones that which is the largest in each way of cutting, for one row and for eight."""
    table = matmul.load_table(matmul.TABLE_FILE, "NVIDIA H200")
    gate_up, down = 2 * intermediate, hidden
    for count in (1, 8):
        for key in (matmul.Key("gate_up", count, gate_up, hidden), matmul.Key("linear", count, down, intermediate)):
            workspace = matmul.Workspace("cpu", {key: table[key]})
            out = room(count, key.n // 2 if key.op == "gate_up" else key.n)
            matmul.launch(room(count, key.k), room(key.n, key.k), out, workspace, table[key])


def samplers() -> None:
    """The sampler with all that it can do, and what goes before it."""
    logits, scratch = room(ROWS, VOCAB), sampling.SamplingScratch.allocate(ROWS, "cpu")
    each, wide = ints(ROWS), room(ROWS, VOCAB, dtype=torch.float32)
    sampling.greedy(logits, each, ints(ROWS), ints(ROWS), scratch)
    sampling.sample(logits, each, each, ints(ROWS, 8), ints(ROWS), ints(ROWS), scratch)
    table = ints(ROWS, penalties.TABLE_WIDTH)
    penalties.adjust(logits, each, each, ints(ROWS, MAX_LEN), table, wide, ints(ROWS, VOCAB))
    penalties.bar(wide, each, each, table, each, ints(ROWS, VOCAB // 32))


driver.set_active(Driver())
JITFunction.__getitem__ = compiling
case = "Qwen2.5-7B"
attention(28, 4, 128)
layers(3584, 28, 4, 128, 18944)
products(3584, 18944)
samplers()
case = "no groups"  # Llama 2, and the smallest model that there is
attention(32, 32, 128)
attention(1, 1, 16)
case = "wide heads"
attention(16, 2, 256)
