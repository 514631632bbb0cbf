"""Recorded launches: which sizes of a step are recorded, and their replay. Knows no model.

A step is padded to the next recorded size. Up to 128 rows a product takes the same time whatever their number, so few
sizes do; above 512 cuBLAS takes longer for 576 rows than for 640 (11.9 and 11.3 ms for all of Qwen2.5-7B's on an H200).
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable
from typing import Any

import torch

_SAMPLES = (1, 2, 4, 8, 16, 24, 32, *range(48, 129, 16), *range(160, 385, 32), 448, *range(512, 1025, 128))
_TOKENS = (16, 32, 64, 96, 128, *range(160, 385, 32), 448, 512)
_TOKEN_STEP = 128


def sample_sizes(most: int) -> list[int]:
    """Sizes of steps of decodes alone, and of sampling, up to `most`."""
    return [*(size for size in _SAMPLES if size < most), most]


def token_sizes(most: int) -> list[int]:
    """Sizes of steps with chunks of prompts, up to `most` tokens."""
    sizes = (*_TOKENS, *range(_TOKENS[-1] + _TOKEN_STEP, most, _TOKEN_STEP))
    return [*(size for size in sizes if size < most), most]


def padded(count: int, sizes: list[int]) -> int:
    """The least of the sizes (ascending) that holds `count`."""
    return sizes[bisect_left(sizes, count)]


class Graphs:
    """CUDA graphs by key, which share their memory; what was not recorded is launched as it is."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # torch's handle, made with the first graph

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Replays what was recorded under the key, else launches."""
        graph = self._graphs.get(key)
        if graph is None:
            launch()
        else:
            graph.replay()

    def record(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Launches once, so that everything is compiled and initialised, then records."""
        launch()
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # Not torch.cuda.graph(): it collects garbage and synchronises every time.
        graph.capture_begin(pool=self._pool)
        launch()
        graph.capture_end()
        self._graphs[key] = graph
