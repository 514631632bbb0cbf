"""`fulcrum trace` against a running server."""

import json
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import grpc
import pytest

from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1 import inference_pb2_grpc as rpc


def fulcrum(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", "trace", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_request_and_the_steps(served, tmp_path):
    messages = [pb.ChatMessage(role="user", content=[pb.ContentPart(text="Say something about traces.")])]
    request = pb.GenerateRequest(
        request_id="traced",
        chat=pb.Chat(messages=messages),
        stopping=pb.StoppingCriteria(max_tokens=4, ignore_eos=True),
    )
    with grpc.insecure_channel(served.grpc) as channel:
        events = list(rpc.InferenceServiceStub(channel).Generate(request))
    usage = events[-1].usage
    nowhere = fulcrum("--admin-address", served.admin, "--steps", str(tmp_path / "none" / "steps.json"))
    assert (nowhere.returncode, nowhere.stderr.count("\n")) == (1, 1), nowhere.stderr
    file = tmp_path / "steps.json"
    done = fulcrum("traced", "--admin-address", served.admin, "--steps", str(file), "--last", "20")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[1:]]
    kinds = [words[2] for words in lines]
    expected = [
        "arrived",
        "rendered",
        "tokenized",
        "queued",
        "admitted",
        "prefill",
        "first_token",
        "finished",
        "released",
    ]
    assert [kind for kind in kinds if kind != "sent"] == expected
    assert kinds.count("sent") == 1
    assert f"prompt_tokens={usage.prompt_tokens}" in lines[3]
    at = dict(zip(kinds, (float(words[0]) / 1e3 for words in lines), strict=True))
    assert abs(at["admitted"] - usage.queue_seconds) < 0.05, "the two clocks are one"
    assert at["first_token"] <= usage.queue_seconds + usage.prefill_seconds + 0.001

    written = json.loads(file.read_text())["traceEvents"]
    spans = [event for event in written if event["ph"] == "X"]
    assert {span["name"] for span in spans} == {"schedule", "launch", "wait", "process"}
    assert len({span["args"]["step_id"] for span in spans}) <= 20
    spans.sort(key=lambda span: span["ts"])
    for before, after in pairwise(spans):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3, (
            "on a CPU the engine's thread does one thing at a time"
        )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
        ("completions", {"prompt": "Hi", "max_tokens": 1}),
        ("responses", {"input": "Hi", "max_output_tokens": 1}),
    ],
)
def test_the_id_of_an_answer_over_http(served, path, body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{served.http}/v1/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        done = fulcrum(json.load(reply)["id"], "--admin-address", served.admin)
    assert done.returncode == 0, done.stderr
    assert "first_token" in done.stdout


def test_what_cannot_be_told(served):
    unknown = fulcrum("nobody", "--admin-address", served.admin)
    assert unknown.returncode == 1
    assert "NOT_FOUND: nothing is kept of a request 'nobody'" in unknown.stderr
    nowhere = fulcrum("any", "--admin-address", "unix:/nonexistent/admin.sock")
    assert nowhere.returncode == 1
    assert "UNAVAILABLE" in nowhere.stderr
    nothing = fulcrum("--admin-address", served.admin)
    assert nothing.returncode == 2


def test_a_unix_socket_speaks_no_tls(served, certificates):
    done = fulcrum("nobody", "--admin-address", served.admin, "--engine-ca", str(certificates / "ca.pem"))
    assert "NOT_FOUND: nothing is kept" in done.stderr


class Many(rpc.AdminServiceServicer):
    def GetSteps(self, request, context):
        return pb.GetStepsResponse(steps=[pb.StepTrace(step_id=at, error="x" * 1_000_000) for at in range(6)])


def test_more_steps_than_a_message_holds_by_default(tmp_path):
    server = grpc.server(ThreadPoolExecutor(1))
    rpc.add_AdminServiceServicer_to_server(Many(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    done = fulcrum("--admin-address", address, "--steps", str(tmp_path / "steps.json"))
    server.stop(None).wait()
    assert done.returncode == 0, done.stderr
    assert "6 steps are in" in done.stderr
