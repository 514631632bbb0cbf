"""`fulcrum serve`, `engine`, `generate` and `chat` as a person runs them: real processes around a tiny random model."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import httpx
import pytest
from click.testing import CliRunner, Result
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.main import main
from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1.inference_pb2_grpc import InferenceServiceStub

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
BIN = Path(sys.executable).parent
# What `make serve` finds on PATH for curl and grpcurl, the latter being the environment's own.
PASTE = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}

# As a shell starts a command: its terminal is told to be its own.
OWN_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from cli.main import main; main()"


@pytest.fixture
def engine_options(tiny_model: Path) -> list[str]:
    return [
        str(tiny_model),
        "--load-format=dummy",
        "--dtype=float32",
        "--device=cpu",
        "--threads=1",
        "--memory-budget=32MiB",
        "--max-num-seqs=8",
        "--grpc-port=0",
        "--log-level=warning",
    ]


def paste(line: str, **variables: str) -> str:
    return subprocess.run(
        ["sh", "-c", line], env=PASTE | variables, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def messages(output: str) -> list[dict]:
    """The JSON objects that grpcurl prints one after the other."""
    decoder, found = json.JSONDecoder(), []
    while output := output.strip():
        message, end = decoder.raw_decode(output)
        found.append(message)
        output = output[end:]
    return found


def test_serve(fulcrum, await_end, engine_options: list[str], tmp_path: Path) -> None:
    """The banner's lines work when pasted, a chat works, and Ctrl-C ends everything after what is running."""
    options = ["--port=0", "--max-model-len=200", "--speculative=ngram"]
    serve = fulcrum("serve", *engine_options, *options, FULCRUM_API_KEY="sk-user")
    grpc_address = serve.expect(r"gRPC +(\S+)")
    pages = int(serve.expect(r"KV cache +[\d,]+ tokens \(([\d,]+) pages of 16\)").replace(",", ""))
    # Keys and values of 2 layers, 2 heads of 16, float32, 16 tokens.
    assert pages == 32 * 2**20 // (2 * 2 * 2 * 16 * 4 * 16)
    assert serve.expect(r"settings .*speculative (\w+)") == "ngram"
    curl = serve.expect(r"(?m)^  (curl .*)$")
    grpcurl = serve.expect(r"(?m)^  (grpcurl .*)$")
    serve.expect(r"(Ctrl-C ends it)")
    assert "sk-user" not in serve.output

    answer = json.loads(paste(f"{curl} --silent", FULCRUM_API_KEY="sk-user"))
    assert answer["model"] == "tiny-llama"
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert answer["usage"]["completion_tokens"] > 0
    assert "error" in json.loads(paste(f"{curl} --silent", FULCRUM_API_KEY="wrong"))

    events = messages(paste(grpcurl, FULCRUM_API_KEY="sk-user"))
    assert next(iter(events[0])) == "accepted"
    assert next(iter(events[-1])) == "usage"
    reflection = ["grpcurl", "-plaintext", "-H", "authorization: Bearer sk-user", grpc_address]
    services = paste(shlex.join([*reflection, "list"])).split()
    assert {"fulcrum.v1.InferenceService", "grpc.health.v1.Health"} <= set(services)
    described = paste(shlex.join([*reflection, "describe", "fulcrum.v1.InferenceService"]))
    assert "rpc Generate ( .fulcrum.v1.GenerateRequest ) returns ( stream .fulcrum.v1.GenerateResponse );" in described

    line = [sys.executable, "-m", "cli", "chat", f"--address={grpc_address}", "--max-tokens=4", "--temperature=0"]
    variables = os.environ | {"FULCRUM_API_KEY": "sk-user"}

    def chat(text: str) -> str:
        run = subprocess.run(line, input=text.encode(), env=variables, capture_output=True, timeout=60, check=True)
        return run.stdout.decode()

    raw = [sys.executable, "-m", "cli", "chat", f"--address={grpc_address}", "--api-key=sk-user"]
    other = subprocess.run(raw, input=b"a\xffb\n", capture_output=True, timeout=60, check=False)
    assert (other.returncode, other.stderr) == (1, b"Error: what was typed or piped in is not UTF-8\n")
    one = chat("Hello\n")
    assert len(one) > 1
    assert chat("\nHello\n/reset\n  Hello  \n/exit\nunread\n") == one + one
    ours, theirs = pty.openpty()  # typed at a terminal, while the answers go into a file
    os.write(ours, b"Hello\n/exit\n")
    typed = subprocess.run(line, stdin=theirs, env=variables, capture_output=True, timeout=60, check=True)
    os.close(ours)
    os.close(theirs)
    assert typed.stdout.decode() == one
    assert typed.stderr.decode().endswith("> > ")

    family = serve.descendants()
    assert len(family) >= 3
    assert serve.stop(signal.SIGINT) == 0
    await_end(family)
    assert "Traceback" not in serve.log.read_text()


def connects(url: str) -> bool:
    """Whether somebody listens there."""
    try:
        httpx.get(f"{url}/models", timeout=60)
    except httpx.ConnectError:
        return False
    except httpx.TransportError:  # it was let in just before
        return True
    return True


def test_a_drain_lets_running_requests_finish(fulcrum, await_end, engine_options: list[str]) -> None:
    """The gateway's go first, and nobody connects to it any more; the engine serves until they have ended."""
    serve = fulcrum("serve", *engine_options, "--port=0")
    address = serve.expect(r"gRPC +(\S+)")
    url = serve.expect(r"OpenAI API +(\S+)")
    serve.expect(r"(Ctrl-C ends it)")
    family = serve.descendants()
    body = {
        "model": "tiny-llama",
        "prompt": "x",
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        serve.process.send_signal(signal.SIGTERM)
        while connects(url):
            pass
        with grpc.insecure_channel(address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        rest = list(lines)
        assert check.status == health_pb2.HealthCheckResponse.SERVING
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert serve.wait() == 0
    await_end(family)


def test_the_end_of_its_terminal_begins_a_drain(engine_options: list[str], tmp_path: Path) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_TERMINAL, "serve", *engine_options, "--port=0"],
        stdin=slave, stdout=slave, stderr=slave, env=os.environ | {"TMPDIR": str(tmp_path)}, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    try:
        output = b""
        while b"Ctrl-C ends it" not in output:
            output += os.read(master, 65536)
        url = re.search(rb"OpenAI API +(\S+)", output).group(1).decode()
        body = {"model": "tiny-llama", "prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            os.close(master)
            assert list(lines)[-1] == "data: [DONE]"
        assert process.wait(60) == 0  # it waits for what it has started
        assert not list(tmp_path.glob("fulcrum-own-*"))
    finally:
        process.kill()
        process.wait()


@pytest.mark.full
def test_a_drain_of_both_takes_no_longer_than_the_grace_and_15_seconds(
    fulcrum, await_end, engine_options: list[str]
) -> None:
    """Though the gateway needs all of the grace, and the engine after it would, too."""
    serve = fulcrum("serve", *engine_options, "--port=0", "--grace=20")
    channel = grpc.insecure_channel(serve.expect(r"gRPC +(\S+)"))
    url = serve.expect(r"OpenAI API +(\S+)")
    serve.expect(r"(Ctrl-C ends it)")
    family = serve.descendants()
    stopping = pb.StoppingCriteria(max_tokens=30_000, ignore_eos=True)
    call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x", stopping=stopping))
    next(call)
    body = {"model": "tiny-llama", "prompt": "x", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        began = time.monotonic()
        serve.process.send_signal(signal.SIGTERM)
        *_, last = lines
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - began > 20
    assert serve.wait() == 0
    assert time.monotonic() - began < 20 + 15
    await_end(family)


def test_nothing_is_left_of_a_killed_supervisor(fulcrum, await_end, engine_options: list[str]) -> None:
    serve = fulcrum("serve", *engine_options, "--port=0")
    serve.expect(r"(Ctrl-C ends it)")
    family = serve.descendants()
    assert len(family) >= 3
    assert serve.stop(signal.SIGKILL) == -signal.SIGKILL
    await_end(family)


def test_an_engine_that_cannot_start_ends_serve(fulcrum, tmp_path: Path) -> None:
    serve = fulcrum("serve", tmp_path, "--port=0", "--grpc-port=0")
    assert serve.wait() == 1
    lines = serve.log.read_text().splitlines()
    assert lines[0].startswith(f"Error: {tmp_path}: not a model folder")
    assert lines[1:] == ["Error: the engine ended with status 1"]


def test_ctrl_c_twice_ends_at_once_and_a_dead_core_is_told(fulcrum, await_end, engine_options: list[str]) -> None:
    def long_request(engine) -> grpc.Future:
        channel = grpc.insecure_channel(engine.expect(r"gRPC +(\S+)"))
        stopping = pb.StoppingCriteria(max_tokens=30_000, ignore_eos=True)
        call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x", stopping=stopping))
        while next(call).WhichOneof("event") != "delta":
            pass
        return call

    hurried = fulcrum("serve", *engine_options, "--port=0")
    killed = fulcrum("engine", *engine_options, "--restarts=0")
    first, second = long_request(hurried), long_request(killed)
    families = hurried.descendants() + killed.descendants()

    hurried.process.send_signal(signal.SIGINT)
    hurried.process.send_signal(signal.SIGTERM)  # a second SIGTERM would be no hurry
    assert hurried.stop(signal.SIGINT) == 0
    with pytest.raises(grpc.RpcError):
        list(first)

    (core,) = killed.descendants()
    os.kill(core, signal.SIGKILL)
    assert killed.wait() == 128 + signal.SIGKILL
    assert "Error: the engine core was killed by SIGKILL" in killed.log.read_text()
    with pytest.raises(grpc.RpcError) as caught:
        list(second)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await_end(families)


def test_a_core_that_is_stopped_does_not_serve_until_it_goes_on(fulcrum, engine_options: list[str]) -> None:
    engine = fulcrum("engine", *engine_options, "--step-timeout=2")
    address = engine.expect(r"gRPC +(\S+)")
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in engine.descendants()}
    (core,) = (pid for pid, line in lines.items() if "engine.core_main" in line)
    with grpc.insecure_channel(address) as channel:
        stopping = pb.StoppingCriteria(max_tokens=30_000, ignore_eos=True)
        stream = InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x", stopping=stopping), timeout=60)
        assert next(event.delta.text for event in stream if event.delta.text)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        told = []
        for reply in watch:
            told.append(reply.status)
            if len(told) == 3:
                break
            os.kill(core, signal.SIGCONT if reply.status == NOT_SERVING else signal.SIGSTOP)
        assert told == [SERVING, NOT_SERVING, SERVING]
        for _ in range(50):  # the same stream, of the same core
            assert next(stream).HasField("delta")
        stream.cancel()
    log = engine.log.read_text()
    assert "the engine core has not answered for 2 s, with 1 requests open" in log
    assert "the engine core answers again" in log
    assert engine.stop() == 0


def test_service_workers_share_one_port(fulcrum, await_end, engine_options: list[str], tmp_path: Path) -> None:
    admin = tmp_path / "admin.sock"
    engine = fulcrum("engine", *engine_options, "--service-workers=2", f"--admin-address=unix:{admin}")
    address = engine.expect(r"gRPC +(\S+)")
    engine.expect(r"(grpcurl)")
    family = engine.descendants()
    assert len(family) == 3  # the core and two workers
    for _ in range(4):  # connections of their own, spread over the workers by the kernel
        request = json.dumps({"text": "x", "stopping": {"max_tokens": 2}, "output": {"token_ids": True}})
        line = shlex.join(["grpcurl", "-plaintext", "-d", request, address, "fulcrum.v1.InferenceService/Generate"])
        assert messages(paste(line))[-1]["usage"]["completion_tokens"] == 2
    stats = messages(
        paste(shlex.join(["grpcurl", "-plaintext", "-unix", str(admin), "fulcrum.v1.AdminService/GetStats"]))
    )
    assert stats[0]["stats"]["requests_finished"] == "4"
    assert engine.stop() == 0
    await_end(family)


def test_generate(tiny_model: Path) -> None:
    options = ["--load-format=dummy", "--dtype=float32", "--device=cpu", "--threads=1", "--memory-budget=1MiB"]
    options += [f"--model={tiny_model}", "--max-model-len=128", "--temperature=0"]

    def run(*arguments: str, text: str = "") -> Result:
        return CliRunner().invoke(main, ["generate", *options, *arguments], input=text)

    raw = run("--raw", "--max-tokens=8", text="Hello")
    assert raw.exit_code == 0, raw.output
    assert len(raw.stdout) > 1
    # The template of the tiny model, written out by hand, is the same prompt as the chat.
    by_hand = run("--raw", "--max-tokens=8", "<|user|>Hello<|end|><|assistant|>")
    assert run("--max-tokens=8", "Hello").stdout == by_hand.stdout
    # A stop string ends it, and is not printed.
    stop = by_hand.stdout[2]
    assert run("Hello", f"--stop={stop}").stdout == by_hand.stdout[: by_hand.stdout.index(stop)] + "\n"
    long = run("--raw", "x" * 200)
    assert long.exit_code == 1
    assert "context length is 128 tokens" in long.stderr
    for other in (run("a\udcffb"), CliRunner().invoke(main, ["generate", *options], input=b"a\xffb")):
        assert (other.exit_code, other.stderr) == (1, "Error: what was typed or piped in is not UTF-8\n")


def test_a_model_that_is_none_is_one_line_and_status_1(tmp_path: Path) -> None:
    for command in (["engine", str(tmp_path), "--grpc-port=0"], ["generate", "x", f"--model={tmp_path}"]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"Error: {tmp_path}: not a model folder")
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["trace", "\udcff", "--admin-address=127.0.0.1:1"], ["generate", "\udcff"]])
def test_what_is_not_utf_8_is_one_line_and_status_1(command: list[str], tiny_model: Path) -> None:
    """As Python gives the byte ff of a command line."""
    model = [f"--model={tiny_model}", "--load-format=dummy", "--device=cpu", "--memory-budget=1MiB"]
    result = CliRunner().invoke(main, [*command, *(model if command[0] == "generate" else [])])
    assert (result.exit_code, result.stderr) == (1, "Error: what was typed or piped in is not UTF-8\n")


def test_chat_without_a_server_is_one_line_and_status_1() -> None:
    result = CliRunner().invoke(main, ["chat", "--address=127.0.0.1:1"], input="hi\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: 127.0.0.1:1: UNAVAILABLE")
    assert result.stderr.endswith(" (does a server run there? One with TLS needs --engine-ca)\n")
