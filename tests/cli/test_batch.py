"""`fulcrum batch`: the same answers as single requests, no row lost or repeated, whatever ends the process."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from cli.batch import _WAITS
from cli.batch_file import Answers, BatchFileError, Requests
from cli.main import main

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
Reply = tuple[int, dict[str, str], bytes]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FULCRUM_") and name != "FULCRUM_DATA":
            monkeypatch.delenv(name)


def line(custom_id: object, url: str = TEXT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_bytes().split(b"\n") if each]


def answer(custom_id: str, status: int = 200) -> dict[str, Any]:
    response = {"status_code": status, "request_id": "r", "body": {}}
    return {"id": f"batch_req_{custom_id}", "custom_id": custom_id, "response": response, "error": None}


# ------------------------------------------------------------------------------------------------- the engine


def test_killed_and_resumed_it_answers_every_row_once_as_single_requests_are(
    fulcrum, tiny_model: Path, tmp_path: Path
) -> None:
    # fmt: off
    settings = ["--load-format=dummy", "--dtype=float32", "--device=cpu", "--threads=1", "--memory-budget=32MiB",
                "--max-num-seqs=8", "--served-model-name=tiny", "--log-level=warning"]
    # fmt: on
    greedy = {"model": "tiny", "temperature": 0, "max_tokens": 80, "ignore_eos": True}
    rows = [line(f"text-{number}", prompt=f"Number {number}", **greedy) for number in range(16)]
    rows += [
        line(f"chat-{number}", CHAT, messages=[{"role": "user", "content": f"Say {number} 🌊"}], n=2, **greedy)
        for number in range(8)
    ]
    rows += [line("bad", prompt="x", temperature=3), line("urgent", prompt="x", **greedy, priority=5)]
    response = {"input": "x", "max_output_tokens": 80} | {name: greedy[name] for name in greedy if name != "max_tokens"}
    rows += [line("response", RESPONSES, **response)]
    rows += [line("other", CHAT, messages=[{"role": "user", "content": "x"}], model="gpt-4o")]
    source, target = write(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    command = ["batch", source, target, f"--model={tiny_model}", *settings, "--max-concurrency=2"]

    serve = fulcrum("serve", tiny_model, *settings, "--port=0", "--grpc-port=0")
    url = serve.expect(r"OpenAI API +(\S+)/v1")
    serve.expect(r"(Ctrl-C)")

    killed = fulcrum(*command, f"--base-url={url}/v1")
    deadline = time.monotonic() + 60
    while not target.exists() or target.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < deadline, killed.log.read_text()
        assert killed.process.poll() is None, killed.log.read_text()
        time.sleep(0.01)
    os.kill(killed.process.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    before = target.read_bytes()
    whole = before[: before.rindex(b"\n") + 1]
    assert 5 <= whole.count(b"\n") < len(rows)
    target.write_bytes(whole + b'{"id":"batch_req_1","custom_id":"text-15","respon')

    resumed = fulcrum(*command)  # with an engine of its own
    assert resumed.wait() == 0, resumed.log.read_text()
    resumed.expect(r"(28 rows: 28 answered, 2 of them with an error, 0 left)")
    assert not re.search("WARNING|ERROR", resumed.log.read_text()), "all went well, its end too"
    after = target.read_bytes()
    assert after.startswith(whole)
    answers = read(target)
    assert sorted(each["custom_id"] for each in answers) == sorted(each["custom_id"] for each in rows)
    assert len({each["id"] for each in answers}) == len(rows)
    assert all(each["error"] is None for each in answers)

    by_id = {each["custom_id"]: each["response"] for each in answers}
    with httpx.Client(base_url=url, timeout=60) as client:
        for row in rows:
            single, response = client.post(row["url"], json=row["body"]), by_id[row["custom_id"]]
            expected, body = single.json(), response["body"]
            assert response["status_code"] == single.status_code
            assert response["request_id"]
            for name in ("choices", "error", "model", "object", "incomplete_details"):
                assert body.get(name) == expected.get(name), row["custom_id"]
            texts = [[item["content"] for item in each.get("output", ())] for each in (body, expected)]
            assert texts[0] == texts[1]
            if row["url"] == RESPONSES:
                assert body["usage"]["output_tokens"] == 80
            elif single.status_code == 200:
                assert len(body["choices"]) == row["body"].get("n", 1)
                assert body["usage"]["completion_tokens"] == 80 * len(body["choices"])
    assert [by_id[name]["status_code"] for name in ("bad", "other", "urgent")] == [400, 404, 200]

    again = CliRunner().invoke(main, [str(each) for each in (*command, "--fail-on-error")])
    assert (again.exit_code, target.read_bytes()) == (1, after)
    assert "28 answered, 2 of them with an error" in again.stdout


# ------------------------------------------------------------------------------------------- another's server


class Server:
    """An HTTP server whose replies the test writes down; it knows what it was asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []


@contextmanager
def replying(reply: Callable[[int, dict[str, Any]], Reply]) -> Iterator[Server]:
    """`reply` is called with the number of the request, from 0, and its body."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            headers = {name.lower(): value for name, value in self.headers.items()}
            with lock:
                number = len(server.asked)
                server.asked.append((self.path, headers, body))
            status, headers, data = reply(number, body)
            self.send_response(status)
            for name, value in (headers | {"content-length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    class Backlogged(ThreadingHTTPServer):
        request_queue_size = 128

        def handle_error(self, *about: Any) -> None:
            # A client that has left is none, and would be printed into what another test reads.
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(*about)

    with Backlogged(("127.0.0.1", 0), Handler) as http:
        server = Server(f"http://127.0.0.1:{http.server_port}/v1")
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def ok(number: int, body: dict[str, Any]) -> Reply:
    return 200, {"x-request-id": f"label-{number}"}, json.dumps({"text": body["prompt"] + "!"}).encode()


def batch(source: Path, target: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["batch", str(source), str(target), *arguments])


def test_a_running_server_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy"):  # not to reach this machine
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    source = write(tmp_path / "in", line("a", prompt="A\u2028é"), "", line("b", prompt="B"))
    with replying(ok) as server:
        result = batch(
            source, tmp_path / "out", f"--base-url={server.url}", "--api-key=sk-1 sk-2", "--max-concurrency=1"
        )
    assert result.exit_code == 0, result.output
    assert result.stdout == "2 rows: 2 answered, 0 of them with an error, 0 left\n"
    assert [path for path, _, _ in server.asked] == [TEXT, TEXT]
    assert {headers["authorization"] for _, headers, _ in server.asked} == {"Bearer sk-1"}
    assert {float(headers["x-request-timeout"]) for _, headers, _ in server.asked} == {86400.0}
    first, second = read(tmp_path / "out")
    assert first.pop("id") != second.pop("id")
    assert first == {
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "label-0", "body": {"text": "A\u2028é!"}},
        "error": None,
    }
    assert second["custom_id"] == "b"


@pytest.mark.parametrize(("option", "allowed"), [(["--max-concurrency=3"], 3), ([], 64)])
def test_as_many_requests_run_together_as_are_allowed(tmp_path: Path, option: list[str], allowed: int) -> None:
    source = write(tmp_path / "in", *(line(str(number), prompt="x") for number in range(2 * allowed)))
    together, seats, crowded = threading.Barrier(allowed), threading.Semaphore(allowed), []

    def reply(number: int, body: dict[str, Any]) -> Reply:
        crowded.append(not seats.acquire(blocking=False))  # one more than is allowed
        together.wait(20)  # needs so many at a time
        seats.release()
        return ok(number, body)

    with replying(reply) as server:
        result = batch(source, tmp_path / "out", f"--base-url={server.url}", *option)
    assert result.exit_code == 0, result.output
    assert not any(crowded)
    assert not together.broken


def test_more_requests_run_together_than_the_first_limit_of_open_files(tmp_path: Path) -> None:
    source = write(tmp_path / "in", *(line(str(number), prompt="x") for number in range(100)))
    together = threading.Barrier(100)

    def reply(number: int, body: dict[str, Any]) -> Reply:
        together.wait(20)
        return ok(number, body)

    with replying(reply) as server:
        limited = ["sh", "-c", 'ulimit -S -n 80 && exec "$@"', "sh", sys.executable, "-m", "cli", "batch"]
        command = [*limited, source, tmp_path / "out", f"--base-url={server.url}", "--max-concurrency=100"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "100 rows: 100 answered, 0 of them with an error, 0 left\n"
    assert not together.broken


def test_a_busy_server_is_asked_again_as_late_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.batch._WAITS", (0.01, 0.01, 0.01))
    source = write(tmp_path / "in", line("a", prompt="A"))
    refusals: list[Reply] = [
        (429, {"retry-after": "1"}, b"{}"),
        (503, {"retry-after": "0"}, b"no JSON"),
        (503, {}, b""),
    ]
    asked: list[float] = []

    def reply(number: int, body: dict[str, Any]) -> Reply:
        asked.append(time.monotonic())
        return refusals[number] if number < 3 else ok(number, body)

    with replying(reply) as server:
        result = batch(source, tmp_path / "out", f"--base-url={server.url}")
    assert result.exit_code == 0, result.output
    assert len(asked) == 4
    assert asked[1] - asked[0] >= 1
    assert [each["response"]["status_code"] for each in read(tmp_path / "out")] == [200]


def test_it_is_asked_again_nine_times_within_five_minutes() -> None:
    assert (len(_WAITS), sum(_WAITS)) == (9, 300)


def test_rows_reach_the_disk_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, now = [], 100.0
    monkeypatch.setattr("cli.batch_file.os.fsync", synced.append)
    monkeypatch.setattr("cli.batch_file.time", SimpleNamespace(monotonic=lambda: now))
    requests = Requests(write(tmp_path / "in", *(line(name, prompt="x") for name in "abc")))
    with Answers(tmp_path / "out", requests) as answers:
        before = len(synced)
        for name, passed, times in (("a", 0.5, 0), ("b", 0.5, 1), ("c", 0.9, 1)):
            now += passed
            answers.add(answer(name))
            assert len(synced) - before == times
    assert len(synced) - before == 2


def test_errors_are_rows(tmp_path: Path) -> None:
    source = write(tmp_path / "in", *(line(name, prompt=name.upper()) for name in "abcde"))
    replies = {
        "A": (500, {}, b'{"error": {"code": "internal_error"}}'),
        "B": (502, {}, b"<html>Bad gateway</html>"),
        "C": (200, {}, b'{"text": "C"}'),
        "D": (200, {"content-encoding": "gzip"}, b'{"text": "D"}'),
        "E": (200, {}, b"[" * 100_000),
    }
    with replying(lambda number, body: replies[body["prompt"]]) as server:
        result = batch(source, tmp_path / "out", f"--base-url={server.url}/", "--fail-on-error")
    assert result.exit_code == 1
    assert result.stdout == "5 rows: 5 answered, 4 of them with an error, 0 left\n"
    found = {each["custom_id"]: each for each in read(tmp_path / "out")}
    assert found["a"]["response"]["status_code"] == 500
    assert found["a"]["response"]["body"] == {"error": {"code": "internal_error"}}
    assert found["a"]["error"] is None
    for name in "bde":
        assert found[name]["response"] is None
        assert found[name]["error"]["code"] == "invalid_response"
    assert "502" in found["b"]["error"]["message"]


def test_a_wrong_key_is_no_answer(tmp_path: Path) -> None:
    source = write(tmp_path / "in", line("a", prompt="A"), line("b", prompt="B"), line("c", prompt="C"))

    def expires(number: int, body: dict[str, Any]) -> Reply:
        return ok(number, body) if number == 0 else (401, {}, b'{"error": {"code": "invalid_api_key"}}')

    with replying(expires) as server:
        result = batch(source, tmp_path / "out", f"--base-url={server.url}", "--max-concurrency=1")
    assert result.exit_code == 1
    assert "wants another --api-key" in result.stderr
    assert result.stdout == "3 rows: 1 answered, 0 of them with an error, 2 left\n"
    assert len(server.asked) == 2


def test_a_server_that_stays_away_leaves_its_rows_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.batch._WAITS", (0.01, 0.01))
    source = write(tmp_path / "in", *(line(str(number), prompt="x") for number in range(6)))

    def dies(number: int, body: dict[str, Any]) -> Reply:
        return ok(number, body) if number < 4 else (503, {}, b"")

    with replying(dies) as server:
        result = batch(source, tmp_path / "out", f"--base-url={server.url}", "--max-concurrency=1")
    assert result.exit_code == 1
    assert "status 503, 3 times; the same command goes on from here" in result.stderr
    assert result.stdout == "6 rows: 4 answered, 0 of them with an error, 2 left\n"
    assert len(server.asked) == 7
    gone = batch(source, tmp_path / "out", f"--base-url={server.url}", "--max-concurrency=1")
    assert gone.exit_code == 1
    assert "3 times" in gone.stderr
    with replying(ok) as server:
        result = batch(source, tmp_path / "out", f"--base-url={server.url}")
    assert result.exit_code == 0, result.output
    assert len(server.asked) == 2
    assert sorted(each["custom_id"] for each in read(tmp_path / "out")) == list("012345")


def test_a_terminal_gets_a_progress_bar(tmp_path: Path) -> None:
    source = write(tmp_path / "in", line("a", prompt="A"), line("b", prompt="B"))
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    with replying(ok) as server, os.fdopen(ours, "rb", 0) as screen:
        command = [sys.executable, "-m", "cli", "batch", source, tmp_path / "out", f"--base-url={server.url}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, check=True)
        os.close(theirs)
        drawn = screen.read(65536).decode()
    assert "2/2" in drawn
    assert "failed=0" in drawn
    assert done.stdout == "2 rows: 2 answered, 0 of them with an error, 0 left\n"


def test_ctrl_c_keeps_what_is_there(fulcrum, tmp_path: Path) -> None:
    source = write(tmp_path / "in", *(line(str(number), prompt="x") for number in range(3)))
    hanging, ended = threading.Event(), threading.Event()

    def hangs(number: int, body: dict[str, Any]) -> Reply:
        if number == 1:
            hanging.set()
            ended.wait(30)
        return ok(number, body)

    with replying(hangs) as server:
        process = fulcrum("batch", source, tmp_path / "out", f"--base-url={server.url}", "--max-concurrency=1")
        assert hanging.wait(30)
        assert process.stop(signal.SIGINT) == 1
        ended.set()
    process.expect(r"(3 rows: 1 answered, 0 of them with an error, 2 left)")
    assert "Error: stopped; the same command goes on from here" in process.log.read_text()
    assert "Traceback" not in process.log.read_text()
    assert [each["custom_id"] for each in read(tmp_path / "out")] == ["0"]


# -------------------------------------------------------------------------------------------------- the files


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "it is not valid JSON"),
        (
            '{"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"x": NaN}}',
            "it is not valid JSON: NaN is no",
        ),
        (
            '{"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"x": -1e999}}',
            "it is not valid JSON: -1e999 is more than a number holds",
        ),
        ("[" * 100_000, "it is nested too deeply"),
        ("[1]", "it must be a JSON object"),
        (line("a"), "custom_id 'a' is that of line 1 too"),
        (line(""), "custom_id must be a string, and not empty"),
        (line(7), "custom_id must be a string, and not empty"),
        (line("b") | {"method": "GET"}, "method must be POST"),
        (line("b", "/v1/embeddings"), "url must be one of /v1/chat/completions, /v1/completions, /v1/responses"),
        (line("b") | {"url": ["x"]}, "url must be"),
        (line("b") | {"body": "x"}, "body must be a JSON object"),
        (line("b", stream=True), "body.stream must not be true"),
    ],
)
def test_a_bad_line_is_refused_before_anything_is_asked(tmp_path: Path, bad: object, why: str) -> None:
    source, target = write(tmp_path / "in", line("a"), "", bad), tmp_path / "out"
    result = batch(source, target, "--base-url=http://127.0.0.1:1")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {source}: line 3: {why}")
    assert not target.exists()


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "in", *(line("a") for _ in range(30)))
    with pytest.raises(BatchFileError) as caught:
        Requests(source)
    told = str(caught.value).splitlines()
    assert [each.split(":")[1] for each in told[:-1]] == [f" line {number}" for number in range(2, 22)]
    assert told[-1] == "and 9 more"


@pytest.mark.parametrize("torn", [b"", b'{"id": "x", "custom_id": "c"', b"\0\0\0", json.dumps(answer("c")).encode()])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    requests = Requests(write(tmp_path / "in", line("a"), line("b"), line("c")))
    target = write(tmp_path / "out", answer("b"), answer("a", 400))
    whole = target.read_bytes()
    target.write_bytes(whole + torn)
    with Answers(target, requests) as answers:
        assert answers.done == {"a", "b"}
        assert answers.failed == 1
        assert target.read_bytes() == whole
        assert [row.custom_id for row in requests.rows(answers.done)] == ["c"]
        answers.add(answer("c"))
    assert read(target)[:2] == [answer("b"), answer("a", 400)]
    assert read(target)[2:] == [answer("c")]


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ("what is this", "line 2 is no answer of a batch"),
        ("[]", "line 2 is no answer of a batch"),
        ({"custom_id": "b"}, "line 2 is no answer of a batch"),
        ({"custom_id": []}, "line 2 is no answer of a batch"),
        (answer("z"), "line 2: custom_id 'z' is not in the input"),
        (answer("a"), "line 2: custom_id 'a' is answered by an earlier line"),
    ],
)
def test_another_file_is_left_as_it_is(tmp_path: Path, held: object, why: str) -> None:
    source, target = write(tmp_path / "in", line("a"), line("b")), write(tmp_path / "out", answer("a"), held)
    before = target.read_bytes()
    result = batch(source, target, "--base-url=http://127.0.0.1:1")
    assert result.exit_code == 2
    assert result.stderr == f"Error: {target}: {why}\n"
    assert target.read_bytes() == before


def test_the_input_is_never_the_output(tmp_path: Path) -> None:
    source = write(tmp_path / "in", line("a"))
    (tmp_path / "link").symlink_to(source)
    result = batch(source, tmp_path / "link", "--base-url=http://127.0.0.1:1")
    assert (result.exit_code, result.stderr) == (2, f"Error: {tmp_path / 'link'} is the input\n")


@pytest.mark.parametrize("device", ["/dev/null", "/dev/full"])
def test_files_are_regular(tmp_path: Path, device: str) -> None:
    """What is endless would be read for ever, and a pipe only once."""
    pipe, source = tmp_path / "pipe", write(tmp_path / "in", line("a"))
    os.mkfifo(pipe)
    for files, wrong in (((source, Path(device)), device), ((pipe, tmp_path / "out"), pipe)):
        result = batch(*files, "--base-url=http://127.0.0.1:1")
        told = f"Error: {wrong} is no regular file, and it is read more than once\n"
        assert (result.exit_code, result.stderr) == (2, told)


def test_two_processes_never_write_to_one_file(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in", line("a")), tmp_path / "out"
    with target.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        result = batch(source, target, "--base-url=http://127.0.0.1:1")
    assert (result.exit_code, result.stderr) == (2, f"Error: {target}: another process writes to it\n")


@pytest.mark.parametrize("url", ["localhost:8000", "http:///v1", "http://[::1/v1", "http://localhost:99999/v1"])
def test_a_base_url_is_one(tmp_path: Path, url: str) -> None:
    result = batch(write(tmp_path / "in", line("a")), tmp_path / "out", f"--base-url={url}")
    assert result.exit_code == 2
    assert "--base-url must be http://HOST:PORT/v1" in result.stderr


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "nonsense://127.0.0.1:1", "http://127.0.0.1:port"])
def test_a_proxy_that_cannot_be_used_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("all_proxy", proxy)
    monkeypatch.setitem(sys.modules, "socksio", None)  # which httpx speaks SOCKS with
    result = batch(write(tmp_path / "in", line("a", prompt="A")), tmp_path / "out", "--base-url=http://example.test/v1")
    assert result.exit_code == 2, result.output
    assert "Error: the proxy that the environment names cannot be used: " in result.stderr


@pytest.mark.parametrize("seconds", ["inf", "nan", "0"])
def test_a_time_that_is_no_number_of_seconds_is_refused_before_it_is_every_rows_error(
    tmp_path: Path, seconds: str
) -> None:
    source = write(tmp_path / "in", line("a", prompt="A"))
    result = batch(source, tmp_path / "out", "--base-url=http://127.0.0.1:1/v1", f"--request-timeout={seconds}")
    assert result.exit_code == 2
    assert "'--request-timeout'" in result.stderr
    assert not (tmp_path / "out").exists()
