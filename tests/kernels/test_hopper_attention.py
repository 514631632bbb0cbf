"""Prefill attention for Hopper without one: the kernel in plain Python, with threads for its roles of warps."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from kernels.gpu import hopper_attention, prefill_attention
from kernels.gpu.prefill_attention import prefill_config
from tests.kernels.plain_gluon import plainly
from tests.kernels.test_gpu_attention import check_prefill

HEADS = {"group": 2, "kv_heads": 2, "head_dim": 128, "dtype": torch.float16, "config": None}


def serve(monkeypatch, programs, launches=1):
    """Has `prefill_attention` launch the kernel, one launch after the other, as of several layers."""

    def launch(*args):
        for _ in range(launches):
            hopper_attention.hopper_prefill(*args, programs=programs)

    monkeypatch.setattr(prefill_attention, "serves", lambda *_: True)
    monkeypatch.setattr(prefill_attention, "hopper_prefill", launch)


def note_stores(gl):
    """What the kernel's groups of warps store from now on: (program, where in memory) of each store."""
    stores, store = [], gl.store

    def noting(pointer, values, mask=None):
        store(pointer, values, mask)
        if mask is not None:
            stores.append((gl.program_id(0), pointer.at[mask.expand(values.shape)]))

    gl.store = noting
    return stores


@pytest.mark.parametrize("page", [8, 16, 128])
def test_chunks_of_several_sequences(monkeypatch, page):
    """They end in each half of a tile and of a block, some before a border and some behind it."""
    serve(monkeypatch, programs=5)
    shapes = [(0, 300), (0, 64), (0, 65), (64, 63), (127, 129), (500, 13), (127, 1), (128, 1)]
    with plainly(hopper_attention):
        check_prefill("cpu", shapes, page=page, **HEADS)


@pytest.mark.parametrize("processors", [1, 3, None])
@pytest.mark.parametrize("programs", [1, 3, 16, 19])
def test_all_is_done_once_in_each_launch(monkeypatch, programs, processors):
    """By fewer programs than the 16 units, of a tile and a head each, by as many, and by more."""
    serve(monkeypatch, programs, launches=2)
    shapes = [(0, 130), (0, 3), (5, 20)]
    with plainly(hopper_attention, processors):
        stores = note_stores(hopper_attention.gl)
        check_prefill("cpu", shapes, **HEADS)
    where, times = torch.cat([at for _, at in stores]).unique(return_counts=True)
    assert where.tolist() == list(range((130 + 3 + 20) * 4 * 128))
    assert (times == 2).all()


def test_who_is_free_takes_the_next_unit(monkeypatch):
    """One processor runs four programs in turn: the first one finds nobody else and leaves each its first unit."""
    serve(monkeypatch, programs=4)
    with plainly(hopper_attention, processors=1):
        stores = note_stores(hopper_attention.gl)
        check_prefill("cpu", [(0, 9)] * 5, **HEADS)
    sizes = Counter()
    for program, at in stores:
        sizes[program] += len(at)
    assert {program: size / (9 * 128) for program, size in sizes.items()} == {0: 17, 1: 1, 2: 1, 3: 1}


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
