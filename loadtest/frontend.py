"""What a streamed token costs outside the model: CPU time of the core, the service, the gateway and the client.

`python -m loadtest.frontend` runs the real processes over a core that draws random tokens (`loadtest.frontend_core`),
and this package's own client. CPU time, unlike the clock, means something on a busy machine too.
"""

import dataclasses
import json
import os
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from loadtest.frontend_core import CoreSettings
from loadtest.generator import Load, generate
from loadtest.programs import Program, answer, program, say
from loadtest.records import Chain, LoadTestError, Prompt, Target

_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS = 120.0
_NAME = "random"
# Never met, since no random text is that long and that regular; but searched for in every one.
_STOPS = ("<|never|>", "\n\n\n\n\n\n")


@dataclass(frozen=True, slots=True)
class Setup:
    """What is run.

    Attributes:
        model: folder or GGUF file with the tokenizer.
        rows: streams at once, and rows of a step.
        tokens: of each answer.
        requests: all in all; each row has several, one after another.
        step_ms: shortest time of a step.
        service_workers, workers, clients: processes of service, gateway and client.
        backend: "openai" (through the gateway), "openai-chat" or "grpc" (the service alone).
    """

    model: Path
    rows: int
    tokens: int
    requests: int
    step_ms: float
    service_workers: int
    workers: int
    clients: int
    backend: str


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured: microseconds of CPU per token, by process kind, and how tokens came."""

    tokens: int
    events: int
    seconds: float
    core: float
    service: float
    gateway: float
    client: float
    service_shares: tuple[float, ...]  # of each service process, of all their CPU time
    gateway_shares: tuple[float, ...]

    def lines(self) -> str:
        """For people."""
        service, gateway = (
            " ".join(f"{share:.0%}" for share in shares) for shares in (self.service_shares, self.gateway_shares)
        )
        return (
            f"{self.tokens} tokens in {self.seconds:.1f} s: {self.tokens / self.seconds:.0f} tokens/s, "
            f"{self.events / self.tokens:.3f} events a token\n"
            f"CPU us a token: core {self.core:.1f}, service {self.service:.1f} (by process: {service}), "
            f"gateway {self.gateway:.1f} ({gateway}), client {self.client:.1f}"
        )


def measure(setup: Setup) -> Costs:
    """Runs it. Raises: LoadTestError where a process does not start or a request fails."""
    with tempfile.TemporaryDirectory(prefix="fulcrum-frontend-") as folder, ExitStack() as stack:
        core_socket = str(Path(folder) / "core.sock")
        settings = CoreSettings(setup.rows, setup.step_ms / 1e3, setup.tokens + 256, _vocabulary(setup.model))
        core = stack.enter_context(_module("loadtest.frontend_core", core_socket))
        say(core, json.dumps(dataclasses.asdict(settings)))
        answer(core, "the core")
        port = _free_port()
        services = [
            stack.enter_context(_service(setup, core_socket, port, number)) for number in range(setup.service_workers)
        ]
        reports = [answer(service, "the service") for service in services]
        gateways = []
        url = f"http://{reports[0]['address']}"
        if setup.backend != "grpc":
            addresses = [str(address) for report in reports for address in report["process_addresses"]]
            gateways.append(stack.enter_context(_gateway(setup, addresses)))
            url = f"http://{answer(gateways[0], 'the gateway')['address']}"
            _healthy(url)
        _send(setup, url, setup.rows, min(64, setup.tokens))  # connections are made, vocabularies warm
        groups = [[process.pid] for process in (core, *services)] + [_family(process.pid) for process in gateways]
        before = [[_cpu(pid) for pid in group] for group in groups]
        tokens, events, seconds, client = _send(setup, url, setup.requests, setup.tokens)
        spent = [
            [_cpu(pid) - was for pid, was in zip(group, earlier, strict=True)]
            for group, earlier in zip(groups, before, strict=True)
        ]
        service = [sum(each) for each in spent[1 : 1 + len(services)]]
        # The parent of several only supervises them, and a helper of its own does nothing.
        gateway = [each for group in spent[1 + len(services) :] for each in group[len(group) > 1 :] if each]
        return Costs(
            tokens,
            events,
            seconds,
            core=1e6 * sum(spent[0]) / tokens,
            service=1e6 * sum(service) / tokens,
            gateway=1e6 * sum(gateway) / tokens,
            client=1e6 * client / tokens,
            service_shares=tuple(value / sum(service) for value in service),
            gateway_shares=tuple(value / sum(gateway) for value in gateway),
        )


def _send(setup: Setup, url: str, requests: int, tokens: int) -> tuple[int, int, float, float]:
    """Tokens, events, seconds, and the client's seconds of CPU, of so many requests. Raises: LoadTestError."""
    chat, grpc = setup.backend == "openai-chat", setup.backend == "grpc"
    endpoint = "/v1/chat/completions" if chat else "/v1/completions"
    extra = {} if grpc else {"stop": list(_STOPS)}
    target = Target(setup.backend, url, endpoint, _NAME, {}, {}, ignore_eos=True, extra_body=extra)
    chains = [Chain((Prompt(f"Number {number} is", tokens),)) for number in range(requests)]
    outcome = generate(target, chains, Load([0.0] * requests, setup.rows, 0, setup.clients), lambda count: None)
    failed = [record.error for record in outcome.records if record.error]
    if failed:
        raise LoadTestError(f"{len(failed)} of {requests} requests failed: {failed[0]}")
    count = sum(record.output_tokens or 0 for record in outcome.records)
    events = sum(len(record.itls) + 1 for record in outcome.records)
    cpu = sum(usage.mean for usage in outcome.usages) * outcome.duration
    return count, events, outcome.duration, cpu


def _service(setup: Setup, core_socket: str, port: int, number: int) -> AbstractContextManager[Program]:
    return _module(
        *("cli", "service-worker", "--supervised", f"--core={core_socket}", f"--grpc-port={port}", "--no-admin"),
        f"--own-address=unix:{core_socket}-{number}",
        *(f"--service-workers={max(2, setup.service_workers)}", f"--served-model-name={_NAME}"),
        *("--log-level=warning", "--", str(setup.model)),
    )


def _gateway(setup: Setup, addresses: Sequence[str]) -> AbstractContextManager[Program]:
    engines = ",".join(dict.fromkeys(addresses))
    return _module(
        *("cli", "gateway", "--supervised", f"--engine={engines}", "--port=0", f"--workers={setup.workers}"),
        *("--log-level=warning",),
    )


def _module(name: str, *arguments: str) -> AbstractContextManager[Program]:
    return program(sys.executable, "-m", name, *arguments)


def _healthy(url: str) -> None:
    """Returns when the gateway answers. Raises: LoadTestError."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    raise LoadTestError("the gateway does not become healthy")


def _cpu(pid: int) -> float:
    """Seconds of CPU that a process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _family(pid: int) -> list[int]:
    """A process and its children."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _vocabulary(model: Path) -> int:
    if model.is_dir():
        return int(json.loads((model / "config.json").read_text())["vocab_size"])
    from engine.model.gguf_header import read_gguf_metadata

    return len(read_gguf_metadata(model)["tokenizer.ggml.tokens"])


@click.command()
@click.option("--model", help="Folder, GGUF file or hub id (default: the default model).")
@click.option("--rows", type=int, default=64, help="Streams at once.")
@click.option("--tokens", type=int, default=256, help="Tokens of each answer.")
@click.option("--requests", type=int, help="All in all (default: twice the rows).")
@click.option("--step-ms", type=float, default=15.0, help="Shortest time of a step (0: as fast as it goes).")
@click.option("--service-workers", type=int, default=1)
@click.option("--workers", type=int, default=1, help="Gateway processes.")
@click.option("--clients", type=int, default=1, help="Client processes.")
@click.option("--backend", type=click.Choice(["openai", "openai-chat", "grpc"]), default="openai")
def main(model: str | None, requests: int | None, **params: Any) -> None:
    """Measure what a streamed token costs outside the model."""
    from engine.hub import resolve_model

    setup = Setup(resolve_model(model, progress=False), requests=requests or 2 * params["rows"], **params)
    click.echo(measure(setup).lines())


if __name__ == "__main__":
    main()
