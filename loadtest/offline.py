"""Decode speed of the engine in this process, without a server: `python -m loadtest.offline MODEL`.

Prints, for each number of streams, the tokens generated a second over the whole run and in decode alone (the run less
the time of the same run with one token out). Prompts are random token ids, so that nothing is cached; every stream
generates the same number of tokens. Knows no network.
"""

import os
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import click

from engine import LLM, SamplingParams


@click.command()
@click.argument("model", required=False)
@click.option("--streams", default="1,16", show_default=True, help="Numbers of sequences that run together.")
@click.option("--input-len", default=64, show_default=True, help="Prompt tokens of each.")
@click.option("--output-len", default=128, show_default=True, help="Tokens generated for each.")
@click.option("--repeat", default=3, show_default=True, help="Runs of each; the median is printed.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", type=int, help="Torch threads (default: the cores at hand).")
@click.option("--load-format", default="auto", show_default=True)
def main(model: str | None, streams: str, input_len: int, output_len: int, repeat: int, **settings: Any) -> None:
    """Measures MODEL (default: SmolLM2-135M-Instruct)."""
    llm = LLM(model, progress=False, **settings)
    cores = len(os.sched_getaffinity(0))
    info = llm.info
    click.echo(f"{info.architecture}, {info.dtype} on {info.device}; {cores} cores of {_processor()}")
    click.echo(f"{input_len} tokens in, {output_len} out; median of {repeat}")
    click.echo(f"{'streams':>8} {'tokens/s':>10} {'decode tokens/s':>16} {'ms a step':>10}")
    generator = random.Random(0)
    for count in map(int, streams.split(",")):
        shape = (generator, count, input_len)
        prefill = statistics.median(_seconds(llm, *shape, output_len=1) for _ in range(repeat))
        total = statistics.median(_seconds(llm, *shape, output_len=output_len) for _ in range(repeat))
        step = (total - prefill) / (output_len - 1)
        click.echo(f"{count:>8} {count * output_len / total:>10.1f} {count / step:>16.1f} {1000 * step:>10.2f}")


def _seconds(llm: LLM, generator: random.Random, count: int, input_len: int, *, output_len: int) -> float:
    """How long `count` streams take together, prefill included."""
    prompts = [[generator.randrange(llm.info.vocab_size) for _ in range(input_len)] for _ in range(count)]
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True))
    return time.perf_counter() - began


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
