"""Times all products of a step over prompts, cuBLAS alone, at once and once the device is at its limit of power.

python tests/gpu/bench_products.py MODEL_FOLDER --output products.json
"""

import json
import time
from pathlib import Path
from typing import Any

import click
import torch

from engine.config import EngineConfig
from engine.device import load_model
from loadtest.environment import environment

_SIZES = (1152, 2048, 8192)
_SECONDS = 1.5  # a device gets to its limit of power within less than one


def replayed(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Milliseconds of one replay, of so many."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(count):
        graph.replay()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / count


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), required=True)
@torch.inference_mode()
def main(model: Path, output: Path) -> None:
    """Prints microseconds a token."""
    config = EngineConfig(model=model, load_format="dummy")
    layers = load_model(config, progress=False).decoder.layers
    weights = [linear.weight for layer in layers for linear in layer.linears]
    rows: list[dict[str, Any]] = []
    for tokens in _SIZES:
        inputs = {width: torch.randn(tokens, width, device="cuda").bfloat16() for _, width in map(_shape, weights)}
        outputs = {height: torch.empty(tokens, height, device="cuda").bfloat16() for height, _ in map(_shape, weights)}

        def products(inputs: Any = inputs, outputs: Any = outputs) -> None:
            for weight in weights:
                torch.mm(inputs[weight.shape[1]], weight.t(), out=outputs[weight.shape[0]])

        products()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            products()
        first = replayed(graph, 2)
        count = int(1e3 * _SECONDS / first)
        replayed(graph, count)
        sustained = replayed(graph, count)
        operations = 2 * tokens * sum(weight.numel() for weight in weights)
        row = {"tokens": tokens, "first_us": 1e3 * first / tokens, "sustained_us": 1e3 * sustained / tokens}
        rows.append(row | {"sustained_tflops": operations / sustained / 1e9})
        click.echo(str(rows[-1]))
        time.sleep(1)  # in which the device cools
    output.write_text(json.dumps(environment() | {"rows": rows}, indent=1))


def _shape(weight: torch.Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


if __name__ == "__main__":
    main()
