"""The container, compose and Kubernetes files start commands that exist, on ports and with times that agree."""

import re
import shlex
import subprocess
import sys
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import click
import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cli import settings
from cli.child import STOP_SECONDS
from cli.main import main
from gateway.edge import OPEN_PATHS

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if service["image"] == "fulcrum"}
KUBERNETES = [*yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())]
PODS = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in KUBERNETES if "replicas" in each["spec"]}
SERVICES = {each["metadata"]["name"]: each["spec"] for each in KUBERNETES if each["kind"] == "Service"}
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
IMAGE = dict(pair.split("=", 1) for pair in re.findall(r"\w+=\S+", " ".join(re.findall(r"(?m)^ENV (.*)$", DOCKERFILE))))
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
# Variables of ours that are no option of a command.
OTHERS = {"FULCRUM_CACHE"}


def started(monkeypatch: pytest.MonkeyPatch, arguments: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """The options of a command as it runs in a container: checked, with those of the image's variables."""
    name, *rest = arguments
    command = main.commands[name]
    for variable, value in (IMAGE | variables).items():
        monkeypatch.setenv(variable, value)
    known = {param.envvar for each in ("engine", "gateway") for param in main.commands[each].params} | OTHERS
    assert {each for each in IMAGE | variables if each.startswith("FULCRUM_")} <= known
    assert {each for each in variables if each.startswith("FULCRUM_")} <= {param.envvar for param in command.params}
    params = command.make_context(name, rest).params
    if name == "engine":
        settings.engine_config(params, Path())
        settings.service_config(params, Path(), grpc_port=params["grpc_port"])
    else:
        settings.gateway_config(params, tuple(params["engine"].split(",")))
    return params


def ports(params: dict[str, Any]) -> dict[str, int]:
    """Where the command listens."""
    listening = {"grpc": "grpc_port", "metrics": "metrics_port", "http": "port"}
    return {name: params[option] for name, option in listening.items() if params.get(option) is not None}


@pytest.mark.parametrize("name", PODS)
def test_kubernetes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pod, (container,) = PODS[name], PODS[name]["containers"]
    params = started(
        monkeypatch, container["args"], {each["name"]: each.get("value", "x") for each in container["env"]}
    )
    assert {each["name"]: each["containerPort"] for each in container["ports"]} == ports(params)
    assert {each["name"]: each["port"] for each in SERVICES[name]["ports"]} == ports(params)
    assert all(each["targetPort"] == each["name"] for each in SERVICES[name]["ports"])
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        for how, asked in container.get(kind, {}).items():
            if how in ("grpc", "tcpSocket", "httpGet"):
                assert asked["port"] in (*ports(params), *ports(params).values())
                assert how != "grpc" or asked["port"] == params["grpc_port"]
                assert asked.get("path", "/livez") in OPEN_PATHS
    # A drain is whole: what precedes SIGTERM, the grace, and last words.
    (_, before), grace = container["lifecycle"]["preStop"]["exec"]["command"], params["grace"]
    assert pod["terminationGracePeriodSeconds"] >= float(before) + grace + STOP_SECONDS
    # Kubernetes would set FULCRUM_PORT=tcp://... for a Service called fulcrum.
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsUser"] == int(re.search(r"(?m)^USER (\d+)$", DOCKERFILE).group(1))
    # Pod Security Standard "restricted", and places for all that is written.
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {each["mountPath"] for each in container["volumeMounts"]}
    assert {"/tmp", *([IMAGE["FULCRUM_CACHE"]] if name == "fulcrum-engine" else [])} <= mounted


def test_kubernetes_fits_together() -> None:
    head = (ROOT / "deploy/kubernetes.yaml").read_text()
    made = set(re.findall(r"--from-literal=([\w-]+)=", head))
    asked = {
        (ref["name"], ref["key"])
        for pod in PODS.values()
        for each in pod["containers"][0]["env"]
        if (ref := each.get("valueFrom", {}).get("secretKeyRef"))
    }
    assert asked == {(re.search(r"create secret generic (\S+)", head).group(1), key) for key in made}
    by_kind = {each["kind"]: each for each in KUBERNETES}
    engines = by_kind["StatefulSet"]["spec"]
    assert SERVICES[engines["serviceName"]]["clusterIP"] == "None", "a name for each pod"
    pods = [f"fulcrum-engine-{number}.{engines['serviceName']}:50051" for number in range(engines["replicas"])]
    arguments = PODS["fulcrum-gateway"]["containers"][0]["args"]
    assert main.commands["gateway"].make_context("gateway", arguments[1:]).params["engine"] == ",".join(pods)
    for each in KUBERNETES:
        selector = each["spec"]["selector"]
        assert selector.get("matchLabels", selector) == {"app": each["metadata"]["name"]}


def composed(monkeypatch: pytest.MonkeyPatch, name: str) -> dict[str, Any]:
    """The options of a service, where nothing is set that need not be."""
    variables = {key: re.sub(r"\$\{\w+:-\}", "", value) for key, value in OURS[name]["environment"].items()}
    return started(monkeypatch, OURS[name]["command"], variables)


@pytest.mark.parametrize("name", OURS)
def test_compose(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    service = OURS[name]
    for text in str(service).split("${")[1:]:  # of the person who starts it
        assert re.match(r"(FULCRUM_API_KEY|FULCRUM_GATEWAY_KEY|MODEL|HF_TOKEN|PORT|GRPC_PORT)\W", text), text
    params = composed(monkeypatch, name)
    assert params.get("model") is None, "what is not set is the default model, not one without a name"
    assert (service["read_only"], service["tmpfs"], service["cap_drop"]) == (True, ["/tmp"], ["ALL"])
    (published,) = service["ports"]
    host, ours, port = re.fullmatch(r"(\S+):\$\{\w+:-(\d+)\}:(\d+)", published).groups()
    assert (host, int(ours)) == ("127.0.0.1", int(port))
    assert int(port) in ports(params).values()
    assert float(service["stop_grace_period"].removesuffix("s")) >= params["grace"] + STOP_SECONDS
    if name == "engine":
        program = service["healthcheck"]["test"][-1]
        compile(program, "healthcheck", "exec")
        assert f'"127.0.0.1:{port}"' in program
        assert [each.split(":")[1] for each in service["volumes"]] == [IMAGE["FULCRUM_CACHE"], "/models"]
    else:
        assert params["engine"] == f"engine:{main.commands['engine'].make_context('engine', []).params['grpc_port']}"
        assert service["depends_on"] == {"engine": {"condition": "service_healthy"}}


class Healthy(BaseHTTPRequestHandler):
    """A gateway that serves."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_containers_ask_their_own_health_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker hands the proxies of its configuration to all containers."""
    for name in ("http_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    engine = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, engine)
    grpc_port = engine.add_insecure_port("127.0.0.1:0")
    engine.start()
    with HTTPServer(("127.0.0.1", 0), Healthy) as gateway:
        thread = threading.Thread(target=gateway.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            of_engine = OURS["engine"]["healthcheck"]["test"][-1].replace("50051", str(grpc_port))
            of_gateway = re.search(r'HEALTHCHECK .*"-c", "(.*)"\]', DOCKERFILE)[1].replace(
                "8000", str(gateway.server_port)
            )
            for program in (of_engine, of_gateway):
                subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
        finally:
            gateway.shutdown()
            thread.join()
            engine.stop(0).wait()


def test_the_image() -> None:
    defaults = {param.name: param.default for param in main.commands["serve"].params if isinstance(param, click.Option)}
    exposed = re.search(r"(?m)^EXPOSE (.*)$", DOCKERFILE).group(1).split()
    assert exposed == [str(defaults["port"]), str(defaults["grpc_port"])]
    health = re.search(r"HEALTHCHECK .*http://127\.0\.0\.1:(\d+)(/\w+)", DOCKERFILE)
    assert (int(health[1]), health[2]) == (defaults["port"], "/health")
    assert re.search(r'(?m)^ENTRYPOINT \["fulcrum"\]\nCMD \["serve"\]$', DOCKERFILE)
    assert re.search(r"(?m)^STOPSIGNAL SIGTERM$", DOCKERFILE)
    assert all(IMAGE[name].startswith("/cache") for name in ("FULCRUM_CACHE", "HF_HOME", "TRITON_CACHE_DIR"))
    sources = [word for each in re.findall(r"(?m)^COPY (.*) \S+$", DOCKERFILE) for word in each.split()]
    everything, *allowed = (ROOT / ".dockerignore").read_text().split("\n", 1)[1].split()
    assert everything == "*"
    assert {each.removeprefix("!") for each in allowed} == {*sources, "**/__pycache__"}
    copied = re.findall(r"(?m)^COPY (\w+) \1$", DOCKERFILE)
    assert all((ROOT / each).is_dir() for each in copied)
    # What setuptools is told to install, or the build ends.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {each.partition(".")[0] for each in project["tool"]["setuptools"]["packages"]}
    assert packages - {"fulcrum"} | {"proto"} == set(copied)
    program = re.search(r'RUN python -c "([^"]*)" > deps.txt', DOCKERFILE).group(1)
    listed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert {"torch", "grpcio", "fastapi", "opentelemetry-sdk"} <= set(re.findall(r"(?m)^[\w-]+", listed))


def test_the_documented_containers() -> None:
    """Ports, the keys that are asked for, and where models are kept."""
    text = OPERATIONS.partition("## Containers")[2]
    _, run, compose, apply = (shlex.split(line, comments=True) for line in text.split("```")[1].splitlines()[1:])
    grace = main.commands["serve"].make_context("serve", []).params["grace"]
    assert float(run[run.index("--stop-timeout") + 1]) >= grace + STOP_SECONDS, "of itself it is 10 s"
    assert "--init" in run, "what a killed engine leaves would stay as zombies of ours"
    published = [run[at + 1] for at, word in enumerate(run) if word == "-p"]
    assert published == ["127.0.0.1:8000:8000", "127.0.0.1:50051:50051"]
    assert f"fulcrum:{IMAGE['FULCRUM_CACHE']}" in run
    needed = set(re.findall(r"\$\{(\w+):\?", (ROOT / "deploy/compose.yaml").read_text()))
    assert {word.partition("=")[0] for word in compose if "=" in word} == needed
    assert (ROOT / apply[-1]).exists()
    user = re.search(r"(?m)^USER (\d+)$", DOCKERFILE).group(1)
    assert f"The image runs as user {user} and keeps models in `{IMAGE['FULCRUM_CACHE']}`" in OPERATIONS


def test_prometheus_asks_those_that_compose_starts_and_the_alerts_watch_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus.yaml").read_text())
    watched = re.search(r'up\{job=~"([^"]+)"\}', (ROOT / "deploy/alerts.yaml").read_text()).group(1)
    asked = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    assert all(re.fullmatch(watched, name) for name in asked)
    engine, gateway = (composed(monkeypatch, name) for name in ("engine", "gateway"))
    assert engine["metrics_host"] == gateway["host"] == "0.0.0.0"
    assert [*asked.values()] == [[f"engine:{engine['metrics_port']}"], [f"gateway:{gateway['port']}"]]
    # Its files lie where it looks for them.
    service, (secret,) = COMPOSE["services"]["prometheus"], COMPOSE["secrets"]
    mounted = [each.removesuffix(":ro").split(":") for each in service["volumes"]]
    assert mounted == [
        ["./prometheus.yaml", "/etc/prometheus/prometheus.yml"],
        *([f"./{name}", f"/etc/prometheus/{name}"] for name in config["rule_files"]),
        ["prometheus", "/prometheus"],
    ]
    assert service["secrets"] == [secret]
    assert config["scrape_configs"][1]["authorization"] == {"credentials_file": f"/run/secrets/{secret}"}
    assert COMPOSE["secrets"][secret] == {"environment": "FULCRUM_API_KEY"}


@pytest.mark.parametrize(("model", "words"), [("", []), ("/my models/a b", ["/my models/a b"])])
def test_make_serve_hands_a_model_on_as_one_word(model: str, words: list[str]) -> None:
    quiet = ["make", "-n", "--no-print-directory", "-o", ".venv/serve.stamp"]  # make test runs this test, too
    command = [*quiet, "serve", "GRPC_PORT=2", "SERVE_ARGS=", f"MODEL={model}"]
    line = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shlex.split(line.partition("--grpc-port 2")[2]) == words
