"""Prefill attention for Hopper without one: the kernel in plain Python, with threads for its roles of warps."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kernels.gpu import hopper_attention, prefill_attention
from kernels.gpu.prefill_attention import prefill_config
from tests.kernels.plain_gluon import Launcher, plainly
from tests.kernels.test_gpu_attention import check_prefill


@pytest.mark.parametrize("page", [8, 16, 128])
def test_chunks_of_several_sequences(monkeypatch, page):
    """They end in each half of a tile and of a block, some before a border and some behind it."""
    monkeypatch.setattr(prefill_attention, "serves", lambda *_: True)
    kernel = partial(hopper_attention.hopper_prefill, programs=5)
    monkeypatch.setattr(prefill_attention, "hopper_prefill", kernel)
    shapes = [(0, 300), (0, 64), (0, 65), (64, 63), (127, 129), (500, 13), (127, 1), (128, 1)]
    with plainly(hopper_attention):
        check_prefill("cpu", shapes, group=2, kv_heads=2, head_dim=128, page=page, dtype=torch.float16, config=None)


@pytest.mark.parametrize(
    ("units", "dealt"),
    [
        (13, [[0, 9, 10], [1, 8, 11], [2, 7, 12], [3, 6], [4, 5]]),
        (8, [[0], [1], [2, 7], [3, 6], [4, 5]]),
        (3, [[0], [1], [2], [], []]),
    ],
)
def test_units_are_dealt_out_to_and_fro(units, dealt):
    got = []

    def kernel():
        rounds = hopper_attention._rounds(torch.tensor(units))
        got.append([hopper_attention._unit(i) for i in range(rounds)])

    with plainly(hopper_attention):
        Launcher(kernel)[(5,)](num_warps=4)
    assert got == dealt


def test_tiles_are_those_of_the_other_kernel():
    """The engine makes them before it is known which kernel serves."""
    for dtype in (torch.bfloat16, torch.float16):
        assert prefill_config(128, dtype).block_m == hopper_attention.BLOCK_M


def pool(pages=2, page=16, kv_heads=2, head_dim=128, dtype=torch.bfloat16):
    return torch.zeros(pages, 2, kv_heads, page, head_dim, dtype=dtype).permute(0, 3, 1, 2, 4)


@pytest.mark.parametrize(
    ("served", "cache", "dtype", "window", "capability"),
    [
        (True, pool(), torch.bfloat16, None, (9, 0)),
        (True, pool(page=8, dtype=torch.float16), torch.float16, None, (9, 0)),
        (True, pool(page=128)[1:], torch.bfloat16, None, (9, 0)),
        (False, pool(), torch.bfloat16, None, (8, 9)),
        (False, pool(), torch.bfloat16, None, (10, 0)),
        (False, pool(dtype=torch.float32), torch.float32, None, (9, 0)),
        (False, pool(head_dim=64), torch.bfloat16, None, (9, 0)),
        (False, pool(page=4), torch.bfloat16, None, (9, 0)),
        (False, pool(page=256), torch.bfloat16, None, (9, 0)),
        (False, pool().contiguous(), torch.bfloat16, None, (9, 0)),
        (False, pool(kv_heads=4)[:, :, :, :2], torch.bfloat16, None, (9, 0)),
        (
            False,
            torch.zeros(16_385, dtype=torch.bfloat16)[1:].view(2, 2, 2, 16, 128).permute(0, 3, 1, 2, 4),
            torch.bfloat16,
            None,
            (9, 0),
        ),
        (False, pool(), torch.bfloat16, 300, (9, 0)),
    ],
)
def test_what_it_serves(monkeypatch, served, cache, dtype, window, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    q = SimpleNamespace(is_cuda=True, device="cuda", dtype=dtype)
    assert hopper_attention.serves(q, cache, window) is served
