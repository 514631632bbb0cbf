"""What a streamed token costs outside the model: CPU time of the service, the gateway and the client.

`python -m loadtest.frontend` runs `fulcrum serve` with a model so small that it only draws tokens, and this package's
own client. CPU time, unlike the clock, means something on a busy machine too. Where tokens come together (less than
one event a token) a token costs less: give the model more --layers.
"""

import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from engine.hub import resolve_model
from loadtest.generator import Load, generate
from loadtest.options import COUNT
from loadtest.records import Chain, LoadTestError, Prompt, Target
from loadtest.suite_server import serving

_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS = 120.0
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "vocab_size": 4096,  # most text is made of few tokens, and a service looks each up for the first time once
}
# What a process is, by a word of its command line; its children are the same.
_KINDS = {"engine.core_main": "core", "engine": "service", "service-worker": "service", "gateway": "gateway"}
# Never met, since no random text is that long and that regular; but searched for in every one.
_STOPS = ["<|never|>", "\n\n\n\n\n\n"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured: microseconds of CPU a token, of each process of a kind ("client" is all together)."""

    tokens: int
    events: int
    seconds: float
    processes: dict[str, list[float]]

    def lines(self) -> str:
        """For people."""
        rates = f"{self.tokens / self.seconds:.0f} tokens/s, {self.events / self.tokens:.3f} events a token"
        lines = [f"{self.tokens} tokens in {self.seconds:.1f} s: {rates}", "CPU us a token:"]
        for kind, each in self.processes.items():
            lines.append(f"  {kind:8} {sum(each):6.1f}  ({' + '.join(f'{cost:.1f}' for cost in each)})")
        return "\n".join(lines)


def measure(
    model: Path,
    options: Sequence[str],
    *,
    backend: str,
    rows: int,
    tokens: int,
    requests: int,
    layers: int,
    clients: int,
) -> Costs:
    """Runs `fulcrum serve` with the tokenizer of `model` and these further options, and sends it requests.

    Args:
        backend: "openai" (through the gateway) or "grpc" (the service alone).
        rows: streams at once.
        tokens: of each answer.
        layers: of the small model: the more, the longer a step takes.
        clients: processes of the client.

    Raises: LoadTestError where the server does not start or a request fails.
    """
    with tempfile.TemporaryDirectory(prefix="fulcrum-frontend-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_CONFIG | {"num_hidden_layers": layers}))
        small = (f"--tokenizer={model}", "--load-format=dummy", "--device=cpu", "--threads=1", f"--max-num-seqs={rows}")
        with serving(folder, [*small, *options], Path(folder) / "log", _START_SECONDS) as server:
            target = replace(server.target, sampling={"temperature": 0.0}, extra_body={"stop": _STOPS})
            if backend == "grpc":
                address = re.search(r"gRPC +(\S+)", server.log.read_text())
                assert address is not None
                target = replace(target, backend="grpc", url=f"http://{address[1]}", extra_body={})
            _send(target, rows, min(64, tokens), rows, clients)  # connections are made, vocabularies warm
            before = _cpu_seconds(server.process.pid)
            count, events, seconds, client = _send(target, requests, tokens, rows, clients)
            spent = _cpu_seconds(server.process.pid)
    processes: dict[str, list[float]] = defaultdict(list)
    for (kind, pid), cpu in spent.items():
        if cost := cpu - before[kind, pid]:
            processes[kind].append(1e6 * cost / count)
    return Costs(count, events, seconds, {**processes, "client": [1e6 * client / count]})


def _send(target: Target, requests: int, tokens: int, rows: int, clients: int) -> tuple[int, int, float, float]:
    """Tokens, events, seconds, and the client's seconds of CPU, of so many requests. Raises: LoadTestError."""
    chains = [Chain((Prompt([1000 + number % 1000], tokens),)) for number in range(requests)]
    outcome = generate(target, chains, Load([0.0] * requests, rows, workers=clients), lambda count: None)
    if failed := [record.error for record in outcome.records if record.error]:
        raise LoadTestError(f"{len(failed)} of {requests} requests failed: {failed[0]}")
    count = sum(record.output_tokens or 0 for record in outcome.records)
    events = sum(len(record.itls) + 1 for record in outcome.records)
    return count, events, outcome.duration, sum(usage.mean for usage in outcome.usages) * outcome.duration


def _cpu_seconds(pid: int, kind: str = "") -> dict[tuple[str, int], float]:
    """Seconds of CPU, user and system, that each process under this one has used, by its kind and id."""
    folder = Path(f"/proc/{pid}")
    words = folder.joinpath("cmdline").read_text().split("\0")
    kind = next((_KINDS[word] for word in words if word in _KINDS), kind)
    fields = folder.joinpath("stat").read_text().rpartition(")")[2].split()
    found = {(kind, pid): (int(fields[11]) + int(fields[12])) / _TICKS} if kind else {}
    for child in folder.joinpath(f"task/{pid}/children").read_text().split():
        found |= _cpu_seconds(int(child), kind)
    return found


@click.command()
@click.option("--model", help="Whose tokenizer is used: folder, GGUF file or hub id (default: the default model).")
@click.option("--rows", type=COUNT, default=64, help="Streams at once.")
@click.option("--tokens", type=COUNT, default=256, help="Tokens of each answer.")
@click.option("--requests", type=COUNT, help="All in all (default: twice the rows).")
@click.option("--layers", type=COUNT, default=8, help="Of the small model: the more, the longer a step takes.")
@click.option("--clients", type=COUNT, default=1, help="Client processes.")
@click.option("--backend", type=click.Choice(["openai", "grpc"]), default="openai")
@click.argument("options", nargs=-1)
def main(model: str | None, options: tuple[str, ...], requests: int | None, **params: Any) -> None:
    """Measure what a streamed token costs outside the model, with these further OPTIONS of `fulcrum serve`."""
    path = resolve_model(model, progress=False)
    click.echo(measure(path, options, requests=requests or 2 * params["rows"], **params).lines())


if __name__ == "__main__":
    main()
