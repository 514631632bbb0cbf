"""The alerts and the dashboard in Prometheus' own hands, where it is installed (Debian's package `prometheus`)."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CASES = Path(__file__).with_name("alerts.yaml")
# What lasts minutes there lasts seconds here, and scrapes are a second apart.
SPANS, FOR = {"5m": "10s", "15m": "20s", "1d": "60s"}, "2s"
WAIT_SECONDS = 60.0


def promtool(*arguments: object) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool here (Debian: apt install prometheus)")
    run = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def alerts() -> dict[str, dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_prometheus_takes_the_files() -> None:
    promtool("check", "rules", DEPLOY / "alerts.yaml")
    promtool("check", "config", "--syntax-only", DEPLOY / "prometheus.yaml")


def test_each_alert_fires_when_it_should_and_not_otherwise() -> None:
    promtool("test", "rules", CASES)


def test_each_alert_has_a_case_of_firing_and_one_of_silence() -> None:
    asked = [each for case in yaml.safe_load(CASES.read_text())["tests"] for each in case["alert_rule_test"]]
    for fires in (True, False):
        assert {each["alertname"] for each in asked if bool(each["exp_alerts"]) == fires} == set(alerts())


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


class Prometheus:
    """A real one, with our alerts."""

    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
        for rule in rules["groups"][0]["rules"]:
            rule["expr"] = re.sub(r"\[(\w+)\]", lambda span: f"[{SPANS[span[1]]}]", rule["expr"])
            rule["for"] = FOR
        (folder / "alerts.yaml").write_text(yaml.safe_dump(rules))
        config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        for job in config["scrape_configs"]:
            job.pop("authorization", None)
            job |= {"scheme": "https", "tls_config": {"insecure_skip_verify": True}}
            job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
        ]
        self.log = folder / "prometheus.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stderr=log)
        self.api = httpx.Client(timeout=20)

    def listen(self) -> None:
        until(lambda: "Listening on" in self.log.read_text(), "Prometheus does not listen")
        address = re.search(r'msg="Listening on" address=(\S+)', self.log.read_text()).group(1)
        self.api.base_url = httpx.URL(f"http://{address}/api/v1/")

    def ask(self, path: str, **params: str) -> Any:
        answer = self.api.get(path, params=params).json()
        assert answer["status"] == "success", (params, answer)
        return answer["data"]

    def fires(self, name: str) -> bool:
        found = [each for each in self.ask("alerts")["alerts"] if each["labels"]["alertname"] == name]
        return any(each["state"] == "firing" for each in found)

    def empty(self) -> list[str]:
        """What the dashboard asks for and finds nothing of."""
        panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
        asked = [target["expr"] for panel in panels for target in panel["targets"]]
        concrete = {each: each.replace("$instance", ".*").replace("$__rate_interval", "6s") for each in asked}
        values = {each: self.ask("query", query=query)["result"] for each, query in concrete.items()}
        return [each for each, found in values.items() if all(one["value"][1] == "NaN" for one in found)]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(WAIT_SECONDS)
        self.api.close()


class Crowd:
    """Callers, each of which asks again and again until the block ends, whatever it is told."""

    def __init__(self, client: httpx.Client, callers: int, prompt: Callable[[], str], tokens: int = 32) -> None:
        self.client, self.prompt, self.tokens = client, prompt, tokens
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []
        self.grow(callers)

    def grow(self, callers: int = 1) -> None:
        self.threads += [threading.Thread(target=self.ask) for _ in range(callers)]
        for thread in self.threads[-callers:]:
            thread.start()

    def ask(self) -> None:
        while not self.over.is_set():
            body = {"prompt": self.prompt(), "max_tokens": self.tokens, "ignore_eos": True, "stream": True}
            with contextlib.suppress(httpx.HTTPError):
                with self.client.stream("POST", "/v1/completions", json=body) as answer:
                    any(self.over.is_set() for _ in answer.iter_raw())
                if answer.status_code != httpx.codes.OK:
                    self.over.wait(1)

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_troubled_server_sets_off_every_alert(
    fulcrum: Callable[..., Any], tiny_model: Path, certificates: Path, tmp_path: Path
) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("there is no Prometheus here (Debian: apt install prometheus)")
    serve = fulcrum(
        "serve", tiny_model, "--load-format=dummy", "--dtype=float32", "--device=cpu", "--threads=1", "--port=0",
        "--grpc-port=0", "--metrics-port=0", "--memory-budget=1MiB", "--max-num-seqs=16", "--max-queue-requests=60",
        "--max-model-len=1024", "--restarts=20",
        f"--https-cert={certificates / 'server.pem'}", f"--https-key={certificates / 'server.key'}",
        f"--tls-cert={certificates / 'server.pem'}", f"--tls-key={certificates / 'server.key'}",
    )  # fmt: skip
    url, metrics = serve.expect(r"OpenAI API +(http\S+)/v1"), serve.expect(r"metrics +(http\S+)")
    serve.expect(r"(Ctrl-C ends it)")
    hosts = {"fulcrum-engine": httpx.URL(metrics).netloc.decode(), "fulcrum-gateway": httpx.URL(url).netloc.decode()}
    (tmp_path / "prometheus").mkdir()
    prometheus = Prometheus(tmp_path / "prometheus", hosts)
    client = httpx.Client(base_url=url, timeout=60, verify=False, limits=httpx.Limits(max_connections=None))
    fired, numbers = set(), itertools.count()

    def expect(name: str, provoke: Callable[[], object] = lambda: None) -> None:
        until(lambda: (provoke(), prometheus.fires(name))[1], f"{name} does not fire")
        fired.add(name)

    def core() -> int | None:
        with contextlib.suppress(FileNotFoundError):  # one has just gone
            command_lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in serve.descendants()}
            return next((pid for pid, line in command_lines.items() if "engine.core_main" in line), None)
        return None

    def hang(seconds: float, then: float) -> None:
        """The core does, for so long; then it works for a while."""
        for number, pause in ((signal.SIGSTOP, seconds), (signal.SIGCONT, then)):
            os.kill(core(), number)
            threading.Event().wait(pause)

    def kill() -> None:
        busy = prometheus.ask("query", query="fulcrum_engine_running_sequences > 0")["result"]
        if busy and (pid := core()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def fresh() -> str:
        return f"{next(numbers):08}" * 8

    try:
        prometheus.listen()
        with Crowd(client, 4, lambda: "a" * 320):
            until(lambda: not prometheus.empty(), "the dashboard finds nothing of some of what it asks for")
            expect("FulcrumCertificateExpires")  # in two days
        with Crowd(client, 4, fresh):
            expect("FulcrumPrefixHitsCollapsed")
        with Crowd(client, 16, fresh, tokens=300) as crowd:
            expect("FulcrumKvCacheFull")
            expect("FulcrumQueueGrows", lambda: (crowd.grow(), crowd.over.wait(0.5)))
        with Crowd(client, 90, fresh, tokens=300):
            expect("FulcrumRequestsRefused")
            expect("FulcrumFirstTokenLate", lambda: hang(5.5, 5))
        with Crowd(client, 8, fresh):
            expect("FulcrumTokensSlow", lambda: hang(0.5, 0.1))
            for name in ("EngineDown", "HttpErrors", "SequencesFail", "CoreRestarted"):
                expect(f"Fulcrum{name}", kill)
        assert serve.stop() == 0, serve.log.read_text()
        expect("FulcrumTargetDown")
        assert fired == set(alerts())
    finally:
        client.close()
        prometheus.close()
