"""Peers on one CPU: how they are measured, in what order, and what is said when one cannot start."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from loadtest.environment import command
from loadtest.peers_cpu import Peer, Setup, llama_cpp, main, measure_server, program, rounds, transformers
from loadtest.records import LoadTestError


def setup(input_len, output_len, model="m.gguf"):
    return Setup(model, input_len, output_len, streams=1, threads=1, dtype="float32")


async def answer(call, stream, **settings):
    """The list of models, or a stream."""
    if call.path.endswith("/models"):
        await call.head(kind="application/json")
        await call.send(json.dumps({"data": [{"id": "m"}]}))
        await call.end()
    else:
        await stream(call, **settings)


def test_a_server_is_measured_by_the_client_of_bench_serve(mock_server, stream):
    with mock_server(partial(answer, stream=stream, first=0.1, gap=0.05)) as server:
        figures = measure_server(server.url, setup(7, 5), streams=3, seed=1)
    bodies = [call.body for call in server.calls if call.path.endswith("/completions")]
    assert len(bodies) == len({tuple(body["prompt"]) for body in bodies}) == 3
    assert all(len(body["prompt"]) == 7 and body["max_tokens"] == 5 and body["ignore_eos"] for body in bodies)
    # Five tokens take 0.1 + 4 x 0.05 s; how much longer depends on how busy this machine is.
    assert figures["output_throughput"] < 3 * 5 / 0.3
    assert 95 < figures["p50_ttft_ms"] < 300
    assert 45 < figures["p50_itl_ms"] < 150


def test_answers_that_are_too_short_are_no_measurement(mock_server, stream):
    async def short(call):
        call.body["max_tokens"] = 2
        await answer(call, stream)

    with mock_server(short) as server, pytest.raises(LoadTestError, match="of 2 requests"):
        measure_server(server.url, setup(7, 5), streams=1, seed=1)


def test_rounds_interleave_the_peers_drop_the_first_and_give_medians(capsys):
    calls = []

    def measure(name, rates, streams, seed):
        calls.append((name, streams, seed))
        return {"output_throughput": next(rates)}

    one = Peer("one", "bf16", None, partial(measure, "one", iter([999.0, 10.0, 30.0, 20.0])))
    two = Peer("two", "Q4_1", "1", partial(measure, "two", iter([1.0, 5.0, 4.0, 6.0])))
    rows = rounds([one, two], [4], repeat=3)
    assert [name for name, _, _ in calls] == ["one", "two"] * 4
    assert len({seed for name, _, seed in calls if name == "one"}) == 4, "no prompt is sent twice"
    assert [(row["label"], row["output_throughput"]) for row in rows] == [("one", 20.0), ("two", 5.0)]
    assert (rows[0]["output_throughput_min"], rows[0]["output_throughput_max"]) == (10.0, 30.0)


def test_transformers_generates_as_many_tokens_as_asked(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, eos_token_id=3
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with transformers(Path(sys.executable), setup(4, 6, str(tmp_path))) as peer:
        assert peer.version
        assert peer.measure(2, 1)["output_throughput"] > 0
        assert peer.measure(1, 2)["output_throughput"] > 0


def test_a_peer_that_cannot_start_is_named(monkeypatch, tmp_path):
    model = str(tmp_path / "x.gguf")
    with (
        pytest.raises(LoadTestError, match=r"llama_cpp\.py ended with status 1"),
        llama_cpp(Path(sys.executable), setup(4, 4, model)),
    ):
        pytest.fail("xllamacpp is no package of this project")


def test_no_process_is_left_and_nonsense_is_told(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text("import os, sys, time; print(os.getpid()); sys.stdout.flush(); time.sleep(600)")
    with pytest.raises(LoadTestError, match="said no JSON") as told, program(Path(sys.executable), str(script)) as ask:
        ask()
    pid = re.search(r"'(\d+)", str(told.value))[1]
    assert not Path(f"/proc/{pid}").exists()


def test_a_missing_interpreter_is_a_wrong_option():
    done = CliRunner().invoke(main, ["model.gguf", "--llama-python", "/no/such/python"])
    assert done.exit_code == 2
    assert "/no/such/python" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["/usr/bin/fulcrum", "bench", "serve", "--port=1"], "fulcrum bench serve --port=1"),
        (["fulcrum", "bench", "--dataset-path", "{folder}/a.json"], "fulcrum bench --dataset-path a.json"),
        (["fulcrum", "bench", "--dataset-path={folder}/a.json"], "fulcrum bench --dataset-path=a.json"),
        (["fulcrum", "--endpoint=/v1/chat", "--header", "k=v"], "fulcrum --endpoint=/v1/chat --header k=..."),
        (["{folder}/loadtest/peers_cpu.py", "m.gguf"], "python -m loadtest.peers_cpu m.gguf"),
    ],
)
def test_the_command_of_a_result_names_no_folder_and_no_key(arguments, shown, tmp_path):
    assert command([argument.format(folder=tmp_path) for argument in arguments]) == shown


@pytest.mark.parametrize("streams", ["0", "a", "1,,2", "-1", "1.5"])
def test_streams_are_whole_numbers(streams):
    ran = CliRunner().invoke(main, ["model.gguf", "--streams", streams])
    assert (ran.exit_code, "--streams" in ran.stderr) == (2, True)


def test_a_program_that_cannot_be_started_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    ran = CliRunner().invoke(main, ["model.gguf"])
    assert (ran.exit_code, ran.stderr.startswith("Error: [Errno 2]")) == (1, True)
