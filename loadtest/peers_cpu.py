"""This server, llama.cpp's and transformers' `generate` side by side on one CPU: `python -m loadtest.peers_cpu MODEL`.

All are started once; then each is measured in turn, round after round, while the others are idle. Servers are measured
by the client of `fulcrum bench serve`, with prompts of random token ids, each sent once; transformers by itself.
Knows how its peers are started, and nothing of their insides (peer_llama_cpp.py, peer_transformers.py).
"""

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from loadtest.datasets import Sampling
from loadtest.environment import environment
from loadtest.options import COUNT, Listed
from loadtest.records import LoadTestError, Target
from loadtest.report import check_folder, save_figures
from loadtest.serve import LoadTest
from loadtest.suite_server import serving
from loadtest.tables import ROWS, rows_table

_FIGURES = ("output_throughput", "p50_ttft_ms", "p50_itl_ms", "p99_itl_ms")
_START_SECONDS = 300.0
_PYTHON = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of each prompt and answer."""

    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Peer:
    """One that is measured: its name, what its weights are in, its version, and how to measure (streams, seed)."""

    label: str
    weights: str
    version: str | None
    measure: Callable[[int, int], Mapping[str, float]]


def measure_server(url: str, shape: Shape, streams: int, seed: int) -> dict[str, float]:
    """The figures of `streams` requests at once (of one stream: two, one after the other) at an OpenAI server.

    Raises: LoadTestError when a request fails.
    """
    count, tokens = max(2, streams), max(2, streams) * shape.output_len
    sampling = Sampling(
        count=count,
        seed=seed,
        prefixes=count,
        prefix_len=1,
        suffix_len=shape.input_len - 1,
        prefix_output_len=shape.output_len,
    )
    target = Target("openai", url, "/v1/completions", "", {}, {"temperature": 0.0}, ignore_eos=True)
    test = LoadTest(target, "shared-prefix", sampling, max_concurrency=streams, progress=False).prepared()
    fields = test.run(test.chains()).fields
    if (fields["completed"], fields["total_output_tokens"]) != (count, tokens):
        raise LoadTestError(f"{url}: {fields['completed']} of {count} requests, {fields['total_output_tokens']} tokens")
    return {name: fields[name] for name in _FIGURES}


@contextmanager
def fulcrum(model: str, shape: Shape, streams: int, threads: int, dtype: str) -> Iterator[Peer]:
    """Our own gateway, service and core."""
    settings = [f"--threads={threads}", f"--dtype={dtype}", f"--max-num-seqs={streams}", "--device=cpu"]
    with TemporaryDirectory() as folder, serving(model, settings, Path(folder) / "log", _START_SECONDS) as server:
        url = server.target.url
        yield Peer("Fulcrum, HTTP", dtype, None, lambda count, seed: measure_server(url, shape, count, seed))


@contextmanager
def llama_cpp(python: Path, model: str, shape: Shape, streams: int, threads: int) -> Iterator[Peer]:
    """llama.cpp's server, with a slot for each stream."""
    tokens = shape.input_len + shape.output_len + 16
    with program(python, "peer_llama_cpp.py", model, threads, streams, tokens) as ask:
        said, weights = ask(), model.rpartition(".gguf")[0].rpartition(".")[2]
        measure = lambda count, seed: measure_server(said["url"], shape, count, seed)  # noqa: E731
        yield Peer("llama.cpp (xllamacpp), HTTP", weights, said["version"], measure)


@contextmanager
def transformers(python: Path, model: str, shape: Shape, threads: int, dtype: str) -> Iterator[Peer]:
    """`generate`, one batch at a time."""
    with program(python, "peer_transformers.py", model, threads, dtype) as ask:
        measure = lambda count, seed: ask(count, shape.input_len, shape.output_len, seed)  # noqa: E731
        yield Peer("transformers `generate`", dtype, ask()["version"], measure)


@contextmanager
def program(python: Path, script: str, *arguments: object) -> Iterator[Callable[..., dict[str, Any]]]:
    """Runs a script of this folder with another interpreter. Yields what says a line to it and reads its next, JSON.

    That raises LoadTestError when the program has ended, or says something else.
    """
    line = [str(python), "-I", str(Path(__file__).parent / script), *map(str, arguments)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        words, answers = process.stdin, process.stdout

        def ask(*say: object) -> dict[str, Any]:
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


def rounds(peers: Sequence[Peer], streams: Sequence[int], repeat: int) -> list[dict[str, Any]]:
    """Measures all peers at all numbers of streams, `repeat` times after one round that is thrown away: medians."""
    found: dict[tuple[str, int], list[Mapping[str, float]]] = {(peer.label, n): [] for peer in peers for n in streams}
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
            row: dict[str, Any] = {"label": peer.label, "weights": peer.weights, "streams": count}
            row |= {name: statistics.median(run[name] for run in runs) for name in runs[0]}
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
def main(model: str, llama_python: Path | None, transformers_python: Path | None, **params: Any) -> None:
    """Measure this server with MODEL, a GGUF file, beside those peers whose interpreter is given."""
    shape, counts = Shape(params["input_len"], params["output_len"]), params["streams"]
    repeat, threads, dtype = params["repeat"], params["threads"], params["dtype"]
    if params["output_json"]:
        check_folder(params["output_json"].parent)
    try:
        with ExitStack() as stack:
            peers = [stack.enter_context(fulcrum(model, shape, max(counts), threads, dtype))]
            if llama_python:
                peers.append(stack.enter_context(llama_cpp(llama_python, model, shape, max(counts), threads)))
            if transformers_python:
                peers.append(stack.enter_context(transformers(transformers_python, model, shape, threads, dtype)))
            rows = rounds(peers, counts, repeat)
    except OSError as error:  # a program that cannot be started, or has ended
        raise click.ClickException(str(error)) from error
    click.echo(rows_table(rows, ROWS["peers"]))
    fields = {
        "kind": "peers",
        "model_id": Path(model).name,
        "settings": f"{shape.input_len} tokens in, {shape.output_len} out; {threads} threads; median of {repeat}",
        "rows": rows,
        "versions": environment()["versions"] | {peer.label.split()[0]: peer.version for peer in peers if peer.version},
    }
    save_figures(fields, params["output_json"])


if __name__ == "__main__":
    main()
