"""Options, variables, help texts and refusals of the `fulcrum` command."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cli import processes, settings
from cli.bench import bench
from cli.main import main
from cli.options import Budget
from engine import container
from engine.config import EngineConfig
from fulcrum.keys import KeyRing
from service.parsers.registry import AUTO

COMMANDS = sorted(name for name, command in main.commands.items() if not command.hidden)
SERVING = ["serve", "engine", "gateway"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FULCRUM_"):
            monkeypatch.delenv(name)


def parse(command: str, *arguments: str) -> dict[str, Any]:
    return main.commands[command].make_context(command, list(arguments)).params


def refusal(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stderr.strip()


def test_commands_are_those_of_the_design() -> None:
    assert COMMANDS == ["batch", "bench", "chat", "engine", "gateway", "generate", "key", "serve", "trace", "version"]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith("Usage: ")


@pytest.mark.parametrize("command", [*bench.commands.values()], ids=lambda command: command.name)
def test_help_of_load_tests(command: click.Command) -> None:
    """Ranges are of numbers: one without ends would be shown as `x<=None`."""
    result = CliRunner().invoke(command, ["--help"])
    assert result.exit_code == 0
    assert "None" not in result.output


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"key"}))  # a variable would make keys of more rights
def test_every_option_has_a_help_text_and_a_variable(command: str) -> None:
    for param in main.commands[command].params:
        if isinstance(param, click.Option) and not param.hidden:
            assert param.help, param.name
            assert param.envvar == "FULCRUM_" + param.opts[0].removeprefix("--").replace("-", "_").upper()


def test_version() -> None:
    assert CliRunner().invoke(main, ["--version"]).output.startswith("fulcrum, version 0.")
    lines = CliRunner().invoke(main, ["version"]).output.splitlines()
    assert lines[0].startswith("fulcrum 0.")
    assert any(line.startswith("grpcio 1.") for line in lines)


def test_grpc_is_told_before_it_is_imported() -> None:
    """It reads its variables once; said later they have no effect."""
    program = """
import os, sys

class Look:
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            print(os.environ["GRPC_EXPERIMENTS"], os.environ["GRPC_ENABLE_FORK_SUPPORT"])

sys.meta_path.insert(0, Look())
import cli.main, cli.run, gateway.server, service.server
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "-event_engine_client 0\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2GiB", 2147483648),
        ("2 gib", 2147483648),
        ("1.5GiB", 1610612736),
        ("512MiB", 536870912),
        ("2GB", 2_000_000_000),
        ("4096", 4096),
        ("0.9", 0.9),
        ("90%", 0.9),
        ("1", 1.0),
        ("100%", 1.0),
        ("0.001%", 0.00001),
        ("1.5e9", 1_500_000_000),
    ],
)
def test_budget(text: str, value: float) -> None:
    result = Budget().convert(text, None, None)
    assert result == value
    assert type(result) is type(value)
    again = Budget().convert(str(result), None, None)  # as a child gets it
    assert (again, type(again)) == (result, type(result))


@pytest.mark.parametrize(
    "text", ["", "GiB", "much", "2XB", "-1", "0", "150%", "nan", "inf", "-2GiB", "1.5", "1b", "9e400", "e9"]
)
def test_bad_budget(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Budget().convert(text, None, None)


def test_variables_set_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_MAX_MODEL_LEN", "512")
    monkeypatch.setenv("FULCRUM_PREFIX_CACHE", "0")
    monkeypatch.setenv("FULCRUM_SERVED_MODEL_NAME", "a b")
    monkeypatch.setenv("FULCRUM_MODEL", "some/model")
    monkeypatch.setenv("FULCRUM_MEMORY_BUDGET", "1GiB")
    params = parse("engine", "--max-num-seqs=8")
    assert params["max_model_len"] == 512
    assert params["prefix_cache"] is False
    assert params["served_model_names"] == ("a", "b")
    assert params["model"] == "some/model"
    assert params["memory_budget"] == 2**30
    assert params["max_num_seqs"] == 8


def test_options_win_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_PORT", "1")
    assert parse("gateway", "--port=2")["port"] == 2


def test_engine_defaults_are_those_of_the_engine() -> None:
    assert settings.engine_config(parse("engine"), Path("m")) == EngineConfig(model=Path("m"))


def test_engine_options_reach_the_engine() -> None:
    params = parse(
        "engine",
        "--dtype=float32",
        "--device=cpu",
        "--load-format=dummy",
        "--memory-budget=0.5",
        "--max-model-len=100",
        "--page-size=8",
        "--max-num-seqs=4",
        "--max-num-batched-tokens=64",
        "--scheduler=static",
        "--no-prefix-cache",
        "--no-chunked-prefill",
        "--reserve-full-length",
        "--look-ahead=0",
        "--logits-processor=a.b:C",
        "--logits-processors=a.b:D",
        "--threads=1",
    )
    assert settings.engine_config(params, Path("m")) == EngineConfig(
        model=Path("m"),
        dtype="float32",
        device="cpu",
        load_format="dummy",
        memory_budget=0.5,
        max_model_len=100,
        page_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        scheduler="static",
        prefix_cache=False,
        chunked_prefill=False,
        reserve_full_length=True,
        look_ahead=0,
        logits_processors=("a.b:C", "a.b:D"),
        threads=1,
    )


def test_speculation_is_set_up_and_refused_by_name() -> None:
    given = {"speculative": "ngram", "speculative_length": 3}
    for text, window in (("1,5", (1, 5)), ("3", (3, 3)), ("(1, 5)", (1, 5))):
        params = parse("engine", "--speculative=ngram", "--speculative-length=3", f"--speculative-window={text}")
        assert settings.engine_config(params, Path("m")) == EngineConfig(Path("m"), **given, speculative_window=window)
    for wrong in ("--speculative-length=0", "--speculative-window=3,2", "--scheduler=static"):
        with pytest.raises(settings.ConfigError, match=r"speculative"):
            settings.engine_config(parse("engine", "--speculative=ngram", wrong), Path("m"))
    with pytest.raises(click.UsageError, match="MIN,MAX"):
        parse("engine", "--speculative-window=1,2,3")


def test_service_options_reach_the_service(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(CliRunner().invoke(main, ["key", "acme", "--admin"]).stdout)
    params = parse(
        "engine",
        "--host=::1",
        "--served-model-name=x",
        "--api-key=sk-1",
        f"--api-key-file={keys}",
        "--gateway-key=sk-2",
        "--share-prefixes",
        "--request-timeout=9.5",
        "--grace=3",
        "--metrics-port=0",
        "--metrics-host=::",
        "--max-priority=5",
        "--service-workers=2",
        "--tool-parser=mistral",
        "--reasoning-parser=none",
    )
    config = settings.service_config(params, Path("m"), grpc_port=7)
    assert config.address == "[::1]:7"
    assert config.served_model_names == ("x",)
    assert (config.api_keys, config.api_key_file, config.gateway_keys) == (("sk-1",), keys, ("sk-2",))
    assert config.share_prefixes
    assert (config.request_timeout, config.grace_seconds) == (9.5, 3.0)
    assert (config.metrics_host, config.metrics_port) == ("::", 0)
    assert (config.max_priority, config.reuse_port, config.admin_address) == (5, True, AUTO)
    assert (config.tool_parser, config.reasoning_parser) == ("mistral", "none")
    assert settings.service_config(params, Path("m"), grpc_port=7, admin=False).admin_address is None


def test_gateway_options_reach_the_gateway() -> None:
    params = parse(
        "gateway",
        "--engine-key=e",
        "--workers=3",
        "--cors-origin=*",
        "--request-timeout=9",
        "--grace=2.5",
        "--access-log",
    )
    config = settings.gateway_config(params, ("a:1", "b:2"))
    assert config.engines == ("a:1", "b:2")
    assert (config.engine_key, params["workers"], config.cors_origins) == ("e", 3, ("*",))
    assert (config.request_timeout, config.shutdown_seconds, config.access_log) == (9.0, 2.5, True)


@pytest.mark.parametrize(
    ("model", "name"), [(None, "SmolLM2-135M-Instruct"), ("org/name", "org/name"), ("org/other-7B", "org/other-7B")]
)
def test_name_of_a_model(model: str | None, name: str) -> None:
    assert settings.served_names({"served_model_names": (), "model": model}) == (name,)


def test_name_of_a_local_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = tmp_path / "tiny.v2", tmp_path / "Some.Q4_1.gguf"
    folder.mkdir()
    file.touch()
    monkeypatch.chdir(folder)
    for model, name in ((str(folder), "tiny.v2"), (".", "tiny.v2"), (str(file), "Some.Q4_1")):
        assert settings.served_names({"served_model_names": (), "model": model}) == (name,)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["engine", "--page-size=15"], "Error: page_size must be a power of two, not 15"),
        (["serve", "--max-num-seqs=0"], "Error: max_num_seqs must be at least 1, not 0"),
        (["gateway", f"--https-cert={__file__}"], "Error: https_cert and https_key must both be given"),
        (["generate", "hello", "--threads=0"], "Error: threads must be at least 1, not 0"),
        (["gateway", "--engine-key=a\n"], "Error: engine_key: a key is printable ASCII without blanks"),
        (["chat", "--api-key=clé"], "Error: api_key: a key is printable ASCII without blanks"),
        (
            ["trace", "x", "--admin-address=localhost:1", "--api-key=clé"],
            "Error: api_key: a key is printable ASCII without blanks",
        ),
        (["batch", __file__, "out", "--api-key=clé"], "Error: api_key: a key is printable ASCII without blanks"),
        (
            ["engine", "--admin-address=1.2.3.4:5"],
            "Error: admin_address: a TCP address (1.2.3.4:5) needs an API key with admin, in api_key_file",
        ),
        (
            ["serve", "--api-key=k", "--host=a..b"],
            "Error: cannot listen on a..b:8000 (--port): this is no host's name",
        ),
        (
            ["engine", "--grpc-port=0", "--metrics-port=1", f"--metrics-host={'a' * 64}"],
            f"Error: cannot listen on {'a' * 64}:1 (--metrics-port): this is no host's name",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_and_status_2(arguments: list[str], line: str) -> None:
    assert refusal(*arguments) == (2, line)


@pytest.mark.parametrize("command", [["chat"], ["generate", "hello"]])
@pytest.mark.parametrize("option", [f"--seed={2**64}", f"--top-k={2**32}", f"--max-tokens={2**32}"])
def test_numbers_that_the_contract_cannot_hold_are_refused(command: list[str], option: str) -> None:
    status, text = refusal(*command, option)
    assert status == 2
    assert f"{option.partition('=')[2]} is not in the range" in text


@pytest.mark.parametrize(
    ("command", "extras"),
    [
        ("serve", "engine,gateway"),
        ("engine", "engine"),
        ("gateway", "gateway"),
        ("generate", "engine"),
        ("bench", "bench"),
    ],
)
def test_what_is_not_installed_is_one_line_and_status_1(
    command: str, extras: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.main.find_spec", lambda name: None)
    status, line = refusal(command)
    assert status == 1
    assert line.endswith(f" is missing: pip install 'fulcrum-llm[{extras}]'")
    assert "\n" not in line


@pytest.mark.parametrize("command", SERVING)
def test_other_machines_need_a_key(command: str) -> None:
    status, line = refusal(command, "--host=0.0.0.0")
    assert status == 2
    assert "0.0.0.0" in line
    assert "API key (api_key, api_key_file)" in line
    assert "\n" not in line


def test_the_variable_that_kubernetes_sets_for_a_service_called_fulcrum_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("FULCRUM_PORT", "tcp://10.0.0.1:8000")
    status, line = refusal("gateway")
    assert status == 2
    assert "'tcp://10.0.0.1:8000' is not a valid integer" in line


def test_a_key_file_without_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# nothing\n")
    status, line = refusal("gateway", f"--api-key-file={tmp_path / 'keys'}")
    assert status == 2
    assert "there is no key in it" in line


@pytest.mark.parametrize("command", ["serve", "engine"])
def test_the_default_of_every_engine_option_can_be_handed_to_a_child(command: str) -> None:
    params = parse(command)
    name, *arguments = settings.child_arguments(main.commands["engine"], params)
    assert name == "engine"
    child = parse("engine", *arguments)
    own = {"supervised", "own_folder"}
    assert {key: value for key, value in child.items() if key not in own} == {
        key: params[key] for key in child if key not in own
    }


def test_a_child_gets_the_options_but_never_the_keys() -> None:
    params = parse(
        "serve",
        "some model",
        "--api-key=sk-secret",
        "--no-prefix-cache",
        "--served-model-name=a b",
        "--served-model-name=--c",
        "--memory-budget=0.25",
        "--max-model-len=77",
        "--access-log",
    )
    line = settings.child_arguments(main.commands["engine"], params)
    assert "sk-secret" not in " ".join(line)
    child = parse(*line)
    assert child["model"] == "some model"
    assert child["served_model_names"] == ("a b", "--c")
    assert (child["prefix_cache"], child["memory_budget"], child["max_model_len"]) == (False, 0.25, 77)
    gateway = parse(*settings.child_arguments(main.commands["gateway"], params, engine="h:1,h:2"))
    assert (gateway["engine"], gateway["access_log"]) == ("h:1,h:2", True)
    assert settings.key_variables(("a", "b"))["FULCRUM_API_KEY"] == "a b"


def test_of_several_service_processes_one_takes_the_metrics_port_that_a_variable_names(monkeypatch) -> None:
    """As deploy/ has it; the others could not bind it."""
    monkeypatch.setenv("FULCRUM_METRICS_PORT", "9100")
    params, worker = parse("engine", "m", "--grpc-port=1"), main.commands["service-worker"]
    lines = [settings.child_arguments(worker, {**params, "core": "c"}, metrics_port=port) for port in (9100, None)]
    for name, value in settings.key_variables(()).items():
        monkeypatch.setenv(name, value)
    assert [parse(*line)["metrics_port"] for line in lines] == [9100, None]


def test_key(tmp_path: Path) -> None:
    """Its two outputs fit each other; a tenant has several keys, and each is new."""
    results = [CliRunner().invoke(main, ["key", "acme", *more]) for more in ([], ["--priority=-3", "--admin"])]
    (tmp_path / "keys").write_text("".join(result.stdout for result in results))
    ring = KeyRing(path=tmp_path / "keys")
    found = [ring.find(result.stderr.strip()) for result in results]
    assert [(key.tenant, key.max_priority, key.admin) for key in found if key] == [
        ("acme", None, False),
        ("acme", -3, True),
    ]
    assert refusal("key", "a b")[0] == 2


@pytest.mark.parametrize(
    ("cores", "cuda", "expected"),
    [
        (1, True, (1, 1)),
        (4, True, (1, 1)),
        (8, True, (2, 3)),
        (16, True, (5, 6)),
        (128, True, (5, 6)),
        (16, False, (1, 1)),
    ],
)
def test_processes_by_the_cores(cores: int, cuda: bool, expected: tuple[int, int]) -> None:
    assert processes.counts(cores, cuda=cuda) == expected


def test_the_cores_are_those_of_the_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Kubernetes' limits and `docker run --cpus 8` write them for cgroup v2: microseconds of each period."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(container, "_CONTAINER", tmp_path)
    (tmp_path / "cpu.max").write_text("800000 100000\n")
    params = processes.with_counts(parse("serve", "--device=cuda"))
    assert (params["service_workers"], params["workers"]) == (2, 3)


def test_processes_where_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 16)
    for options, expected in (
        (["--device=cuda:1"], (5, 6)),
        (["--device=cpu"], (1, 1)),
        (["--device=cuda", "--workers=2"], (5, 2)),
        (["--device=cuda", "--service-workers=1"], (1, 6)),
    ):
        params = processes.with_counts(parse("serve", *options))
        assert (params["service_workers"], params["workers"]) == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not processes.on_cuda("auto")
    assert processes.with_counts(parse("engine"))["service_workers"] == 1
    assert "workers" not in processes.with_counts(parse("engine", "--device=cuda"))


@pytest.mark.parametrize(
    ("command", "option"),
    [("engine", "--grpc-port"), ("engine", "--metrics-port"), ("serve", "--metrics-port"), ("serve", "--port")],
)
def test_a_taken_port_is_named_before_a_model_is_looked_for(command: str, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        others = [
            f"{each}=0"
            for each in ("--grpc-port", "--port")
            if each != option and (command, each) != ("engine", "--port")
        ]
        told = refusal(command, "/nowhere", *others, f"{option}={port}")
    assert told == (2, f"Error: cannot listen on 127.0.0.1:{port} ({option}): Address already in use")


def test_several_service_processes_share_a_port_that_connections_of_an_ended_server_still_keep() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as client:
        accepted, _ = listener.accept()
        listener.close()
        accepted.close()  # first, as a server that ends: the connection is kept in TIME_WAIT on its side
        assert client.recv(1) == b""
    with socket.socket() as strict, pytest.raises(OSError, match="Address already in use"):
        strict.bind(("127.0.0.1", port))
    with settings.reserved_port("127.0.0.1", port, shared=True) as held:
        assert held == port
        with socket.socket() as worker:  # with gRPC's options
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            worker.bind(("127.0.0.1", port))
            worker.listen()
            socket.create_connection(("127.0.0.1", port)).close()  # served by the worker, not by what holds the port


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("serve", ["--port", "--grpc-port"]),
        ("serve", ["--port", "--metrics-port"]),
        ("engine", ["--grpc-port", "--metrics-port"]),
    ],
)
def test_two_options_of_one_port_are_named_before_a_model_is_looked_for(command: str, options: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    free = ["--grpc-port=0"] if "--grpc-port" not in options else []
    told = refusal(command, "/nowhere", *free, *(f"{option}={port}" for option in options))
    assert told == (2, f"Error: {options[0]} and {options[1]} are both {port}")
