"""Whole runs against a mock server of known delays, over worker processes."""

import asyncio
import json
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from cli.main import main
from loadtest.datasets import Sampling
from loadtest.records import Chain, LoadTestError, Prompt, Target
from loadtest.report import details, print_out
from loadtest.serve import LoadTest

pytestmark = pytest.mark.usefixtures("no_children")
RUNS = 5  # of which one has to be on time: a busy machine is late in some of them, a wrong figure in all


@pytest.fixture
def prompts(tmp_path):
    """A custom data set of 8 prompts of three words."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"one two {n}", "output_tokens": 5}) + "\n" for n in range(8)))
    return path


@pytest.fixture
def load_test(prompts):
    """A load test of the server at `url`."""

    def make(url: str, *, backend: str = "openai", dataset: str = "custom", **settings) -> LoadTest:
        endpoint = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
        target = Target(backend, url, endpoint, settings.pop("model", "m"), {}, {})
        sampling = settings.pop("sampling", Sampling(prompts, 8))
        return LoadTest(target, dataset, sampling, progress=False, **settings)

    return make


def run(test: LoadTest):
    return test.run(test.chains())


def test_known_delays_are_measured(mock_server, stream, load_test):
    late = []
    for _ in range(RUNS):
        with mock_server(partial(stream, first=0.2, gap=0.05)) as server:
            done = run(load_test(server.url, workers=2, warmups=3, objectives={"ttft": 190}))
        result = done.fields
        assert (result["completed"], result["failed"], done.fields["unfinished"]) == (8, 0, 0)
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (8 * 3, 8 * 5)
        assert result["events_per_token"] == 1.0
        assert result["request_goodput"] == 0
        assert len(server.calls) == 8 + 3
        assert result["request_throughput"] == 8 / result["duration"]
        assert [record.text for record in done.records] == [" a" * 5] * 8
        # Nothing comes before its time; how much later depends on how busy this machine is.
        least = {"median_ttft_ms": 200, "median_tpot_ms": 50, "median_itl_ms": 45, "median_e2el_ms": 400}
        late.append({name: result[name] - told for name, told in least.items()})
        late[-1]["duration"] = 1000 * (result["duration"] - 0.4)
        assert min(late[-1].values()) >= -2, late[-1]
        if max(late[-1].values()) < 100:
            assert result["max_concurrent_requests"] == 8
            assert result["max_output_tokens_per_s"] == 40
            return
    pytest.fail(f"each run was late, by these ms: {late}")


def test_arrivals_keep_their_times(mock_server, stream, load_test):
    late = []
    for _ in range(RUNS):
        with mock_server(stream) as server:
            test = load_test(server.url, rate=16.0, burstiness=float("inf"), workers=2)
            records = run(test).records
        late.append([record.start - records[0].start - number / 16 for number, record in enumerate(records)])
        if max(map(abs, late[-1])) < 0.045:
            return
    pytest.fail(f"no run kept the times: {late}")


@pytest.mark.parametrize("workers", [1, 2])
def test_concurrency_is_bounded_over_all_workers(mock_server, stream, load_test, workers):
    running, most = 0, 0

    async def answer(call):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await stream(call, gap=0.01)
        running -= 1

    with mock_server(answer) as server:
        done = run(load_test(server.url, max_concurrency=3, workers=workers))
    assert done.fields["completed"] == 8
    assert most == 3
    assert sorted(call.body["prompt"] for call in server.calls) == [f"one two {n}" for n in range(8)]


def test_a_connection_is_used_again_until_the_server_ends_it(mock_server, stream, load_test):
    writers = []

    async def answer(call):
        writers.append(call.writer)
        await stream(call)
        if len(writers) == 4:
            call.writer.close()

    with mock_server(answer) as server:
        assert run(load_test(server.url, max_concurrency=1)).fields["completed"] == 8
    assert [len(set(part)) for part in (writers[:4], writers[4:], writers)] == [1, 1, 2]


def test_tokens_that_come_together_void_the_token_latencies(mock_server, stream, load_test):
    with mock_server(partial(stream, together=2)) as server:
        done = run(load_test(server.url))
    assert done.fields["events_per_token"] == 3 / 5
    assert done.fields["token_latencies_void"]


def test_a_request_carries_what_was_asked_for(mock_server, stream, prompts):
    target = Target(
        "openai", "", "/v1/completions", "m", {"authorization": "Bearer k"}, {"top_p": 0.5}, True, {"user": "u"}
    )
    with mock_server(stream) as server:
        run(LoadTest(replace(target, url=server.url), "custom", Sampling(prompts, 1, shuffle=False), progress=False))
    (call,) = server.calls
    assert call.path == "/v1/completions"
    assert call.headers["authorization"] == "Bearer k"
    assert call.body == {
        "model": "m",
        "prompt": "one two 0",
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_p": 0.5,
        "user": "u",
    }


async def _chat(call, text="b"):
    await call.head()
    await call.event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    await asyncio.sleep(0.05)
    for _ in range(3):
        await call.event({"choices": [{"delta": {"content": text}, "finish_reason": None}]})
    await call.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    await call.event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}})
    await call.send("data: [DONE]\r\n\r\n")
    await call.end()


def test_turns_of_a_chat_wait_for_one_another(mock_server, load_test, tmp_path):
    path = tmp_path / "chats.jsonl"
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(3) for role in ("user", "assistant")]
    path.write_text(json.dumps({"turns": turns}) + "\n")
    with mock_server(_chat) as server:
        sampling = Sampling(path, 9, output_len=3)
        done = run(load_test(server.url, backend="openai-chat", dataset="multi-turn", sampling=sampling))
    assert [call.body["messages"] for call in server.calls] == [turns[:1], turns[:3], turns[:5]]
    assert {call.body["max_completion_tokens"] for call in server.calls} == {3}
    records = done.records
    assert [record.turn for record in records] == [0, 1, 2]
    assert all(later.start >= earlier.start + earlier.latency for earlier, later in pairwise(records))
    # The first chunk names the role alone, the last one the reason alone: neither is a token.
    assert [len(record.itls) for record in records] == [2, 2, 2]
    assert all(record.ttft >= 0.05 for record in records)


async def _bytes(call, *chunks, end=True):
    await call.head()
    for chunk in chunks:
        await call.send(chunk)
    if end:
        await call.end()
    else:
        call.writer.close()


_TOKEN = 'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
_LAST = 'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n'
_NONE = 'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 0}}\n\n'
_ONE = _NONE.replace(": 0", ": 1")


async def _unframed(call, text):
    """An answer that ends with its connection."""
    call.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + text.encode())
    await call.writer.drain()
    call.writer.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda call: call.refuse("429 Too Many Requests", "slow down"), "HTTP 429: slow down"),
        (lambda call: call.refuse("500 Internal Server Error", "broken"), "HTTP 500: broken"),
        (lambda call: call.refuse("404 Not Found", "no model 'm'"), "HTTP 404: no model 'm'"),
        (lambda call: _bytes(call, _TOKEN), "truncated"),
        (lambda call: _bytes(call, _TOKEN, end=False), "truncated"),
        (lambda call: _bytes(call, _TOKEN, "data: [DONE]\n\n"), "truncated"),
        (lambda call: _bytes(call, _TOKEN, _LAST, _ONE, end=False), "truncated"),
        (lambda call: _unframed(call, _TOKEN + _LAST + _ONE), "truncated"),
        (lambda call: _bytes(call, _LAST, _NONE), "empty"),
        (lambda call: _bytes(call, "data: {nonsense\n\n"), "unreadable event"),
        (lambda call: _bytes(call, _TOKEN, 'data: {"error": {"message": "lost"}}\n\n'), "error in the stream: lost"),
        (lambda call: _bytes(call, '{"choices": [{"text": "not a stream", "finish_reason": "stop"}]}'), "truncated"),
    ],
)
def test_failures_are_counted_and_named(mock_server, load_test, answer, message):
    with mock_server(answer) as server:
        done = run(load_test(server.url, sampling=Sampling(load_test(server.url).sampling.path, 2)))
    assert (done.fields["completed"], done.fields["failed"]) == (0, 2)
    assert all(message in record.error for record in done.records)
    assert all(record.latency > 0 for record in done.records)


def test_events_may_be_cut_anywhere(mock_server, load_test):
    text = ": ping\n\n" + _TOKEN * 2 + _LAST.replace("\n", "\r\n") + _NONE.replace(": 0", ": 2") + "data: [DONE]"
    with mock_server(lambda call: _bytes(call, *text)) as server:
        done = run(load_test(server.url))
    assert [record.error for record in done.records] == [""] * 8
    assert {(record.text, record.output_tokens, len(record.itls)) for record in done.records} == {("aa", 2, 1)}


def test_the_end_of_a_connection_ends_an_answer_without_framing(mock_server, load_test):
    with mock_server(lambda call: _unframed(call, _TOKEN + _LAST + _ONE + "data: [DONE]\n\n")) as server:
        assert run(load_test(server.url)).fields["completed"] == 8


async def _ended(call, tokens):
    await call.head()
    await call.event({"choices": [{"text": "a", "finish_reason": None}]})
    await asyncio.sleep(0.05)
    await call.send(_LAST + _NONE.replace(": 0", f": {tokens}") + "data: [DONE]\n\n")
    await call.end()


def test_a_last_chunk_without_text_is_a_token_where_the_server_counts_one(mock_server, load_test):
    with mock_server(partial(_ended, tokens=2)) as server:
        done = run(load_test(server.url))
    assert (done.fields["events_per_token"], done.fields["token_latencies_void"]) == (1.0, False)
    assert all(len(record.itls) == 1 and record.itls[0] >= 0.045 for record in done.records)
    with mock_server(partial(_ended, tokens=1)) as server:
        assert run(load_test(server.url)).fields["events_per_token"] == 1.0
    with mock_server(partial(_ended, tokens=3)) as server:
        assert run(load_test(server.url)).fields["events_per_token"] == 1 / 3


def test_a_token_whose_text_lags_is_an_event_of_a_chat(mock_server, load_test):
    with mock_server(partial(_chat, text="")) as server:
        done = run(load_test(server.url, backend="openai-chat"))
    assert done.fields["events_per_token"] == 1.0
    assert all(record.ttft >= 0.045 for record in done.records)


def test_a_prompt_that_cannot_be_sent_fails_alone(mock_server, stream, load_test):
    with mock_server(stream) as server:
        test = load_test(server.url)
        chains = test.chains()
        chains[3] = Chain((Prompt("half a character: \ud800", 5),))
        done = test.run(chains)
    assert (done.fields["completed"], done.fields["failed"]) == (7, 1)
    assert "cannot be sent" in done.records[3].error


def test_a_name_that_no_host_can_have_is_a_failure(load_test):
    done = run(load_test(f"http://{'a' * 64}.test"))
    assert done.fields["failed"] == 8
    assert "cannot connect" in done.records[0].error


def test_tokens_are_counted_here_when_the_server_does_not(mock_server, stream, load_test):
    with mock_server(partial(stream, usage=False)) as server:
        test = load_test(server.url)
        test.__dict__["tokenizer"] = _Words()
        result = run(test).fields
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (8 * 3, 8 * 5)


def test_where_nobody_counts_tokens_the_other_figures_stay(mock_server, stream, load_test):
    async def answer(call):
        await (stream(call, usage=False) if "completions" in call.path else call.refuse("404 Not Found", "no"))

    with mock_server(answer) as server:
        done = run(load_test(server.url, objectives={"ttft": 60000}))
    assert (done.fields["completed"], done.fields["token_latencies_void"]) == (8, False)
    assert done.fields["request_goodput"] == done.fields["request_throughput"]
    printed = print_out(done.fields)
    for name in ("Total generated tokens", "Output token throughput (tok/s)", "Mean TPOT (ms)", "Events per token"):
        assert f"{name + ':':<40} -" in printed
    assert "HTTP 404" in done.warnings[0]
    fields = json.loads(json.dumps(done.fields | details(done.records)))
    assert (fields["total_input_tokens"], fields["output_throughput"]) == (None, None)
    assert fields["mean_ttft_ms"] > 0
    assert fields["mean_tpot_ms"] is None


class _Words:
    ids, fillers, vocab_size, specials_added = range(9), range(9), 9, 0

    def encode(self, texts, *, special=True):
        return [[0] * len(text.split()) for text in texts]

    def encode_chats(self, chats):
        assert not chats
        return []


def test_unreachable_servers_are_failures_or_a_clear_error(load_test, unused_port):
    done = run(load_test(f"http://127.0.0.1:{unused_port}"))
    assert done.fields["failed"] == 8
    assert "cannot connect" in done.records[0].error
    with pytest.raises(LoadTestError, match="cannot be asked"):
        load_test(f"http://{'a' * 64}.test", model="").prepared()
    with pytest.raises(LoadTestError, match="cannot be asked"):
        load_test(f"http://127.0.0.1:{unused_port}", model="").prepared()


def test_data_sets_that_a_backend_cannot_send_are_refused(load_test):
    with pytest.raises(LoadTestError, match="token ids"):
        load_test("http://x", backend="openai-chat", dataset="shared-prefix")
    with pytest.raises(LoadTestError, match="chats"):
        load_test("http://x", dataset="multi-turn")


def command(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


async def serving(model, stream, call):
    """Tells the model's name where that is asked for."""
    if call.path != "/v1/models":
        await stream(call)
        return
    await call.head(kind="application/json")
    await call.send(json.dumps({"data": [{"id": model}]}))
    await call.end()


def test_command_prints_saves_and_compares(mock_server, stream, prompts, tmp_path):
    with mock_server(partial(serving, "org/served", stream)) as server:
        arguments = ["--port", server.port, "--dataset-name", "custom", "--dataset-path", prompts]
        arguments += ["--custom-output-len", -1, "--disable-tqdm", "--result-dir", tmp_path / "results"]
        saving = ["--save-result", "--save-detailed", "--result-filename", "a.json", "--metadata", "note=yes"]
        saving += ["--metadata", "model_id=other", "--metadata", "completed=99"]
        ran = command(
            "serve", *arguments, "--num-prompts", 8, "--goodput", "ttft:5000", "tpot:500", *saving, "--fail-on-error"
        )
        assert ran.exit_code == 0, ran.output
        assert "Successful requests:                     8" in ran.output
        assert "Request goodput (req/s):" in ran.output
        saved = json.loads((tmp_path / "results" / "a.json").read_text())
        assert saved["model_id"] == "org/served"
        assert (saved["note"], saved["completed"]) == ("yes", 8)
        assert saved["request_goodput"] == saved["request_throughput"]
        assert saved["output_lens"] == [5] * 8
        assert {"machine", "commit", "command", "seed"} <= saved.keys()

        even = ["--request-rate", 100, "--burstiness", "inf", "--save-result", "--result-filename", "even.json"]
        ran = command("serve", *arguments, "--num-prompts", 2, *even)
        assert ran.exit_code == 0, ran.output
        saved = msgspec.json.decode((tmp_path / "results" / "even.json").read_bytes())  # which knows no Infinity
        assert (saved["request_rate"], saved["burstiness"]) == (100.0, "inf")

        ran = command("sweep", *arguments, "--request-rates", "40,inf", "--seconds", 0.1, "--plot-format", "svg,png")
        assert ran.exit_code == 0, ran.output
        assert "| 40.0 requests/s | " in ran.stdout
        assert "| inf requests/s  | " in ran.stdout
        assert json.loads((tmp_path / "results" / "sweep-40qps.json").read_text())["num_prompts"] == 4
        for name in ("goodput.svg", "goodput.png", "latency.svg", "latency.png"):
            assert (tmp_path / "results" / name).stat().st_size > 1000

    ran = command("compare", tmp_path / "results" / "a.json", tmp_path / "results" / "sweep-infqps.json")
    assert ran.exit_code == 0, ran.output
    assert "(x1.000)" in ran.output
    plots = tmp_path / "plots"
    watched = {
        "seconds": 1,
        "running_sequences": 2,
        "waiting_sequences": 0,
        "preemptions": 0,
        "used_pages": 3,
        "total_pages": 4,
    }
    with_samples = json.loads((tmp_path / "results" / "a.json").read_text()) | {"samples": [watched]}
    (tmp_path / "watched.json").write_text(json.dumps(with_samples))
    ran = command("compare", tmp_path / "watched.json", "--plot-dir", plots)
    assert ran.exit_code == 0, ran.output
    assert {path.name for path in plots.iterdir()} == {"goodput.svg", "latency.svg", "samples.svg"}


def test_a_load_and_what_it_asks_before_go_past_proxies(mock_server, stream, prompts, monkeypatch):
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "socks5://127.0.0.1:1")

    with mock_server(partial(serving, "named", stream)) as server:
        arguments = ["--base-url", server.url, "--num-prompts", 2, "--disable-tqdm", "--dataset-name", "custom"]
        ran = command("serve", *arguments, "--dataset-path", prompts)
        assert ran.exit_code == 0, ran.output
        assert "Successful requests:                     2" in ran.output
        assert server.calls[-1].body["model"] == "named"


def test_a_host_may_be_an_ipv6_address(mock_server, stream, prompts):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    with mock_server(stream, host="::1") as server:
        arguments = ["--host", "::1", "--port", server.port, "--model", "m", "--num-prompts", 3, "--disable-tqdm"]
        ran = command("serve", *arguments, "--dataset-name", "custom", "--dataset-path", prompts)
        assert ran.exit_code == 0, ran.output
        assert "Successful requests:                     3" in ran.output
        assert {call.headers["host"] for call in server.calls} == {f"[::1]:{server.port}"}


def test_a_label_is_part_of_a_file_name_and_no_folder(mock_server, stream, prompts, tmp_path):
    with mock_server(stream) as server:
        arguments = ["--base-url", server.url, "--model", "m", "--dataset-name", "custom", "--dataset-path", prompts]
        arguments += ["--num-prompts", 1, "--result-dir", tmp_path / "new", "--save-result", "--label", "a/b"]
        ran = command("serve", *arguments)
    assert ran.exit_code == 0, ran.output
    (path,) = (tmp_path / "new").iterdir()
    assert path.name.startswith("a_b-infqps-m-")
    assert json.loads(path.read_text())["label"] == "a/b"


def test_fail_on_error_is_an_exit_status(mock_server, prompts):
    with mock_server(lambda call: call.refuse("500 Internal Server Error", "broken")) as server:
        arguments = ["serve", "--base-url", server.url, "--model", "m", "--dataset-name", "custom", "--dataset-path"]
        arguments += [prompts, "--num-prompts", 2, "--disable-tqdm"]
        ran = command(*arguments)
        assert ran.exit_code == 0
        assert "failed, 2 times: HTTP 500: broken" in ran.stderr
        assert command(*arguments, "--fail-on-error").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--goodput", "itl:3"], "no objective"),
        (["stray"], "no objective"),
        (["--header", "x"], "KEY=VALUE"),
        (["--percentile-metrics", "ttft,x"], "--percentile-metrics"),
        (["--metric-percentiles", "a"], "--metric-percentiles"),
        (["--random-range-ratio", "1"], "--random-range-ratio"),
        (["--extra-body", "{"], "not a JSON object"),
        (["--extra-body", "3"], "not a JSON object"),
        (["--extra-body", '["ab"]'], "not a JSON object"),
        (["--metric-percentiles", "50,101"], "--metric-percentiles"),
        (["--base-url", "ftp://x"], "not http"),
        (["--base-url", "http://x:99999"], "not http"),
        (["--base-url", "http://\u65e5\u672c"], "not http"),
        (["--header", "a=\u65e5"], "--header"),
        (["--header", "a=b\r\nc: d"], "--header"),
        (["--endpoint", "/a b\n"], "--endpoint"),
        (["--request-rate", "0"], "--request-rate"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--burstiness", "nan"], "--burstiness"),
        (["--temperature", "inf"], "--temperature"),
        (["--metric-percentiles", "nan"], "--metric-percentiles"),
        (["--goodput", "ttft:nan"], "no objective"),
        (["--goodput", "ttft:inf"], "no objective"),
        (["--seed", 2**32], "--seed"),
    ],
)
def test_wrong_options_are_named(arguments, message):
    ran = command("serve", "--model", "m", *arguments)
    assert ran.exit_code == 2
    assert message in ran.stderr


def test_interrupt_prints_what_there_is(mock_server, stream, prompts):
    async def answer(call):
        if call.body["prompt"].endswith("7"):
            await asyncio.sleep(600)
        await stream(call)

    with mock_server(answer) as server:
        arguments = ["--base-url", server.url, "--model", "m", "--dataset-name", "custom", "--dataset-path", prompts]
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", "bench", "serve", *map(str, arguments), "--num-prompts", "8"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            # 8 of 8, as far as the bar can show: the eighth never ends.
            shown = ""
            while "7/8" not in shown:
                piece = process.stderr.read(1)
                assert piece, shown
                shown += piece
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130
    assert "Successful requests:                     7" in out
    assert "Unfinished requests (interrupted):       1" in out
    assert "Mean TTFT (ms):" in out


def test_interrupt_ends_warm_ups(mock_server, prompts):
    asked = threading.Event()

    async def answer(call):
        asked.set()
        await asyncio.sleep(600)

    with mock_server(answer) as server:
        arguments = ["--base-url", server.url, "--model", "m", "--dataset-name", "custom", "--dataset-path", prompts]
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", "bench", "serve", *map(str, arguments), "--num-warmups", "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert asked.wait(60)
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=20)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130
    assert "Successful requests:                     0" in out


class _Interrupting(str):
    """A text that presses Ctrl-C as it is handed to a worker."""

    def __reduce__(self):
        signal.raise_signal(signal.SIGINT)
        return str, (str(self),)


def test_interrupt_while_workers_start_is_heard_after(mock_server, stream, load_test):
    former = signal.getsignal(signal.SIGINT)
    with mock_server(stream) as server:
        done = load_test(server.url, workers=2).run([Chain((Prompt(_Interrupting("one"), 5),))] * 2)
    assert done.fields["unfinished"] == 2
    assert signal.getsignal(signal.SIGINT) is former


def test_failed_warm_ups_are_told(mock_server, stream, load_test):
    async def answer(call):
        await (call.refuse("503 Service Unavailable", "cold") if len(server.calls) <= 2 else stream(call))

    with mock_server(answer) as server:
        done = run(load_test(server.url, warmups=2))
    assert (done.fields["completed"], done.warnings) == (8, ["warm-up failed, 2 times: HTTP 503: cold"])


def test_a_sweep_shows_the_rows_before_the_one_that_broke(mock_server, stream, prompts, tmp_path, monkeypatch):
    from cli import bench

    saved = []

    def save(fields, path):
        saved.append(path.name)
        if len(saved) == 2:
            raise LoadTestError("the disk is full")

    monkeypatch.setattr(bench, "save", save)

    async def answer(call):
        await (stream(call) if len(server.calls) <= 2 else call.refuse("500 Internal Server Error", "broken"))

    with mock_server(answer) as server:
        arguments = ["--base-url", server.url, "--model", "m", "--dataset-name", "custom", "--dataset-path", prompts]
        arguments += ["--num-prompts", 2, "--result-dir", tmp_path / "new", "--request-rates", "50,60,70"]
        ran = command("sweep", *arguments)
    assert ran.exit_code == 1
    assert "the disk is full" in ran.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ran.stdout.splitlines() if "| " in line]
    first, second = (next(row for row in rows if row[0] == f"{rate} requests/s") for rate in ("50.0", "60.0"))
    assert (first[-1], second) == ("0", ["60.0 requests/s", *[""] * 9, "2"])
    assert (tmp_path / "new" / "latency.svg").exists()


@pytest.mark.parametrize("rates", ["1,0", "2,nan", "3,3", "-1", "2,x"])
def test_rates_are_checked_before_the_first(rates):
    ran = command("sweep", "--base-url", "http://x", "--model", "m", "--request-rates", rates)
    assert ran.exit_code == 2
    assert "--request-rates" in ran.stderr


@pytest.mark.parametrize("name", ["serve", "sweep"])
def test_a_folder_that_cannot_be_written_is_told_first(name, tmp_path):
    (tmp_path / "file").write_text("")
    saving = ["--save-result"] if name == "serve" else []
    ran = command(name, "--base-url", "http://x", "--model", "m", "--result-dir", tmp_path / "file" / "x", *saving)
    assert ran.exit_code == 1
    assert "cannot be written" in ran.stderr


def test_a_result_file_that_cannot_be_written_is_told_first(tmp_path):
    (tmp_path / "file").write_text("")
    ran = command("prefix", "--output-json", tmp_path / "file" / "x.json")
    assert ran.exit_code == 2
    assert "cannot be written" in ran.stderr


def test_workers_end_with_their_parent(mock_server, prompts):
    asked = threading.Event()

    async def answer(call):
        asked.set()
        await asyncio.sleep(600)

    with mock_server(answer) as server:
        arguments = ["--base-url", server.url, "--model", "m", "--dataset-name", "custom", "--dataset-path", prompts]
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "cli",
                "bench",
                "serve",
                *map(str, arguments),
                "--num-prompts",
                "2",
                "--workers",
                "2",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert asked.wait(60)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        finally:
            process.kill()
            process.wait()
        assert len(children) >= 2
        deadline = time.monotonic() + 60
        while any(_alive(pid) for pid in children):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_file_of_another_form_is_told(load_test, tmp_path):
    path = tmp_path / "file.json"
    path.write_text('[{"conversations": [{"text": "a"}, {"text": "b"}]}]')
    with pytest.raises(LoadTestError, match=r"is not of the form .* `value` - at `\$\[0\]\.conversations\[0\]`"):
        load_test("http://x", dataset="sharegpt", sampling=Sampling(path, 1)).chains()


_EVENTS = 500_000


class _Flood(socketserver.StreamRequestHandler):
    """Answers every request with the same bytes, made in advance, in one write."""

    body = _TOKEN.encode() * _EVENTS + f"{_LAST}{_NONE.replace(': 0', f': {_EVENTS}')}data: [DONE]\n\n".encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    seconds: list[float]

    def handle(self):
        before = time.thread_time()
        while self.rfile.readline():
            headers = iter(lambda: self.rfile.readline().strip().lower(), b"")
            self.rfile.read(max(int(line[15:]) for line in headers if line.startswith(b"content-length:")))
            self.wfile.write(self.answer)
        self.seconds.append(time.thread_time() - before)


@pytest.fixture
def flood(monkeypatch):
    """A server that streams faster than one process can read: its URL, and the CPU seconds of each connection."""
    monkeypatch.setattr(_Flood, "seconds", [], raising=False)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Flood) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", _Flood.seconds
        server.shutdown()
        thread.join()


def test_a_server_faster_than_one_process_can_read(flood, load_test):
    """One process is the limit, and says so; two can read twice as much, and do where cores are idle."""
    url, served = flood
    one, two = (run(load_test(url, workers=workers)) for workers in (1, 2))
    for done in (one, two):
        assert (done.fields["total_output_tokens"], done.fields["events_per_token"]) == (8 * _EVENTS, 1.0)
    assert one.fields["client_saturated"]
    assert any("use more --workers" in warning for warning in one.warnings)
    # In seconds of the busiest process's own CPU time, which other load on this machine does not change.
    seconds = [
        max(usage["mean"] for usage in done.fields["client_cpu"]) * done.fields["duration"] for done in (one, two)
    ]
    assert seconds[0] > 1.2 * seconds[1]
    assert sum(served) < 0.1 * (seconds[0] + 2 * seconds[1])
    if max(usage["busy"] - usage["peak"] for done in (one, two) for usage in done.fields["client_cpu"]) < 0.1:
        assert two.fields["output_throughput"] > 1.4 * one.fields["output_throughput"]
