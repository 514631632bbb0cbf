"""This server, llama.cpp's and transformers' `generate` side by side on one CPU: `python -m loadtest.peers_cpu MODEL`.

All are started once; then each is measured in turn, round after round, while the others are idle. Servers are measured
by the client of `fulcrum bench serve`, with prompts of random token ids, each sent once; transformers by itself.
Knows how its peers are started, and nothing of their insides (peer_llama_cpp.py, peer_transformers.py).
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from loadtest.datasets import Sampling
from loadtest.environment import environment
from loadtest.options import COUNT, Listed
from loadtest.records import Fields, LoadTestError, Target
from loadtest.report import check_folder, save_figures
from loadtest.serve import LoadTest
from loadtest.suite_server import serving
from loadtest.tables import ROWS, medians, rows_table

_FIGURES = ("output_throughput", "p50_ttft_ms", "p50_itl_ms", "p99_itl_ms")
_START_SECONDS = 300.0
_PYTHON = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class Setup:
    """What all are given: a GGUF file, tokens of each prompt and answer, the most streams, threads and a type."""

    model: str
    input_len: int
    output_len: int
    streams: int
    threads: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Peer:
    """One that is measured: its name, what its weights are in, its version, and how to measure (streams, seed)."""

    label: str
    weights: str
    version: str | None
    measure: Callable[[int, int], Fields]


def measure_server(url: str, setup: Setup, streams: int, seed: int) -> Fields:
    """The figures of `streams` requests at once (of one stream: two, one after the other) at an OpenAI server.

    Raises: LoadTestError when a request fails.
    """
    count = max(2, streams)
    sampling = Sampling(count=count, seed=seed, output_len=setup.output_len, prefixes=count, prefix_len=1)
    sampling = replace(sampling, suffix_len=setup.input_len - 1)
    target = Target("openai", url, "/v1/completions", "", {}, {"temperature": 0.0}, ignore_eos=True)
    test = LoadTest(target, "shared-prefix", sampling, max_concurrency=streams, progress=False).prepared()
    fields = test.run(test.chains()).fields
    if (fields["completed"], fields["total_output_tokens"]) != (count, count * setup.output_len):
        raise LoadTestError(f"{url}: {fields['completed']} of {count} requests, {fields['total_output_tokens']} tokens")
    return {name: fields[name] for name in _FIGURES}


@contextmanager
def fulcrum(setup: Setup) -> Iterator[Peer]:
    """Our own gateway, service and core."""
    own = f"--threads={setup.threads}", f"--dtype={setup.dtype}", f"--max-num-seqs={setup.streams}", "--device=cpu"
    with TemporaryDirectory() as folder, serving(setup.model, own, Path(folder) / "log", _START_SECONDS) as server:
        yield Peer("Fulcrum, HTTP", setup.dtype, None, partial(measure_server, server.target.url, setup))


@contextmanager
def llama_cpp(python: Path, setup: Setup) -> Iterator[Peer]:
    """llama.cpp's server, with a slot for each stream."""
    tokens = setup.input_len + setup.output_len + 16
    with program(python, "peer_llama_cpp.py", setup.model, setup.threads, setup.streams, tokens) as ask:
        said, weights = ask(), setup.model.rpartition(".gguf")[0].rpartition(".")[2]
        yield Peer("llama.cpp (xllamacpp), HTTP", weights, said["version"], partial(measure_server, said["url"], setup))


@contextmanager
def transformers(python: Path, setup: Setup) -> Iterator[Peer]:
    """`generate`, one batch at a time."""
    with program(python, "peer_transformers.py", setup.model, setup.threads, setup.dtype) as ask:
        version = ask()["version"]
        measure = partial(ask, setup.input_len, setup.output_len)
        yield Peer("transformers `generate`", setup.dtype, version, measure)


@contextmanager
def program(python: Path, script: str, *arguments: object) -> Iterator[Callable[..., Fields]]:
    """Runs a script of this folder with another interpreter. Yields what says a line to it and reads its next, JSON.

    That raises LoadTestError when the program has ended, or says something else.
    """
    line = [str(python), "-I", str(Path(__file__).parent / script), *map(str, arguments)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        words, answers = process.stdin, process.stdout

        def ask(*say: object) -> Fields:
            if say:
                print(*say, file=words, flush=True)
            answer = answers.readline()
            if not answer:
                raise LoadTestError(f"{script} ended with status {process.wait()}")
            try:
                return dict(json.loads(answer))
            except (ValueError, TypeError) as error:
                raise LoadTestError(f"{script} said no JSON: {answer[:200]!r}") from error

        try:
            yield ask
        finally:
            process.kill()


def rounds(peers: Sequence[Peer], streams: Sequence[int], repeat: int) -> list[Fields]:
    """Measures all peers at all numbers of streams, `repeat` times after one round that is thrown away: medians."""
    found: dict[tuple[str, int], list[Fields]] = {(peer.label, n): [] for peer in peers for n in streams}
    for number in range(repeat + 1):
        for count in streams:
            for peer in peers:
                click.echo(f"{peer.label}, {count} streams, {number or 'warm-up'}", err=True)
                found[peer.label, count].append(peer.measure(count, 1000 * count + number))
    rows = []
    for peer in peers:
        for count in streams:
            runs = found[peer.label, count][1:]
            rates = [run["output_throughput"] for run in runs]
            row: Fields = {"label": peer.label, "weights": peer.weights, "streams": count}
            row |= medians(runs, list(runs[0]))
            rows.append(row | {"output_throughput_min": min(rates), "output_throughput_max": max(rates)})
    return rows


@click.command()
@click.argument("model")
@click.option("--llama-python", type=_PYTHON, help="Python that has xllamacpp.")
@click.option("--transformers-python", type=_PYTHON, help="Python that has transformers.")
@click.option("--streams", default="1,16", type=Listed(COUNT), show_default=True)
@click.option("--input-len", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--output-len", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--repeat", type=COUNT, default=3, show_default=True, help="Medians are shown.")
@click.option("--threads", type=COUNT, default=len(os.sched_getaffinity(0)), show_default="the cores")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of Fulcrum and transformers.")
@click.option("--output-json", type=click.Path(dir_okay=False, path_type=Path))
def main(streams: tuple[int, ...], repeat: int, output_json: Path | None, **params: Any) -> None:
    """Measure this server with MODEL, a GGUF file, beside those peers whose interpreter is given."""
    if output_json:
        check_folder(output_json.parent)
    llama_python, transformers_python = params.pop("llama_python"), params.pop("transformers_python")
    setup = Setup(streams=max(streams), **params)
    try:
        with ExitStack() as stack:
            peers = [stack.enter_context(fulcrum(setup))]
            if llama_python:
                peers.append(stack.enter_context(llama_cpp(llama_python, setup)))
            if transformers_python:
                peers.append(stack.enter_context(transformers(transformers_python, setup)))
            rows = rounds(peers, streams, repeat)
    except OSError as error:  # a program that cannot be started, or has ended
        raise click.ClickException(str(error)) from error
    click.echo(rows_table(rows, ROWS["peers"]))
    lengths = f"{setup.input_len} tokens in, {setup.output_len} out"
    fields = {
        "kind": "peers",
        "model_id": Path(setup.model).name,
        "settings": f"{lengths}; {setup.threads} threads; median of {repeat}",
        "rows": rows,
        "versions": environment()["versions"] | {peer.label.split()[0]: peer.version for peer in peers if peer.version},
    }
    save_figures(fields, output_json)


if __name__ == "__main__":
    main()
