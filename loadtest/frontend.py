"""What a streamed token costs outside the model: CPU time of the core, the service, the gateway and the client.

`python -m loadtest.frontend` runs the real processes over a core that draws random tokens (`loadtest.frontend_core`),
and this package's own client. CPU time, unlike the clock, means something on a busy machine too.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from loadtest.frontend_core import CoreSettings
from loadtest.generator import Load, generate
from loadtest.records import Chain, LoadTestError, Prompt, Target

_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS = 120.0
_STOP_SECONDS = 20.0
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
    with tempfile.TemporaryDirectory(prefix="fulcrum-frontend-") as folder, contextlib.ExitStack() as stack:
        core_socket = str(Path(folder) / "core.sock")
        settings = CoreSettings(setup.rows, setup.step_ms / 1e3, setup.tokens + 256, _vocabulary(setup.model))
        core = stack.enter_context(_process("loadtest.frontend_core", core_socket))
        _say(core, json.dumps(dataclasses.asdict(settings)))
        _told(core)
        port = _free_port()
        services = [
            stack.enter_context(_service(setup, core_socket, port, number)) for number in range(setup.service_workers)
        ]
        reports = [_told(service) for service in services]
        gateways = []
        url = f"http://{reports[0]['address']}"
        if setup.backend != "grpc":
            addresses = [str(address) for report in reports for address in cast(list[str], report["process_addresses"])]
            gateways.append(stack.enter_context(_gateway(setup, addresses)))
            url = f"http://{_told(gateways[0])['address']}"
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


def _service(
    setup: Setup, core_socket: str, port: int, number: int
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return _process(
        *("cli", "service-worker", "--supervised", f"--core={core_socket}", f"--grpc-port={port}", "--no-admin"),
        f"--own-address=unix:{core_socket}-{number}",
        *(f"--service-workers={max(2, setup.service_workers)}", f"--served-model-name={_NAME}"),
        *("--log-level=warning", "--", str(setup.model)),
    )


def _gateway(setup: Setup, addresses: Sequence[str]) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    engines = ",".join(dict.fromkeys(addresses))
    return _process(
        *("cli", "gateway", "--supervised", f"--engine={engines}", "--port=0", f"--workers={setup.workers}"),
        *("--log-level=warning",),
    )


@contextlib.contextmanager
def _process(module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `python -m MODULE` with a lifeline on its standard input, for as long as the block lasts."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.terminate()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _say(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")
    process.stdin.flush()


def _told(process: subprocess.Popen[bytes]) -> dict[str, object]:
    """The line by which a process says that it serves. Raises: LoadTestError."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise LoadTestError(f"a process ended with status {process.wait()} while it started")
    facts: dict[str, object] = json.loads(line)
    return facts


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


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.frontend", description=__doc__)
    parser.add_argument("--model", type=Path, help="folder or GGUF file (default: the default model)")
    parser.add_argument("--rows", type=int, default=64, help="streams at once")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--requests", type=int, help="all in all (default: twice the rows)")
    parser.add_argument("--step-ms", type=float, default=15.0, help="shortest time of a step (0: as fast as it goes)")
    parser.add_argument("--service-workers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="gateway processes")
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--backend", choices=("openai", "openai-chat", "grpc"), default="openai")
    options = parser.parse_args()
    from engine.hub import resolve_model

    setup = Setup(
        options.model or resolve_model(None, progress=False),
        options.rows,
        options.tokens,
        options.requests or 2 * options.rows,
        options.step_ms,
        options.service_workers,
        options.workers,
        options.clients,
        options.backend,
    )
    sys.stdout.write(measure(setup).lines() + "\n")


if __name__ == "__main__":
    main()
