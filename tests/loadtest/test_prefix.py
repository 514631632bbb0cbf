"""Hit rates: without a model, and of a mock server whose cache is known; an operator's flush; a sweep's rows."""

import asyncio
import json
import threading
from concurrent import futures
from contextlib import contextmanager

import grpc
import pytest
from click.testing import CliRunner

from cli.main import main
from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1.inference_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from loadtest.trace import Hits, PageNames, ideal

pytestmark = pytest.mark.usefixtures("no_children")


def bench(*arguments, status=0):
    ran = CliRunner().invoke(main, ["bench", *map(str, arguments)])
    assert ran.exit_code == status, ran.output
    return ran


@pytest.fixture
def trace(tmp_path):
    """Four requests of two tenants, blocks of 512: the third repeats the first but for its last, partial block."""
    path = tmp_path / "trace.jsonl"
    rows = [(1024 + 160, [1, 2, 3]), (1024, [4, 5]), (1024 + 320, [1, 2, 6]), (1024, [4, 5])]
    fields = [{"timestamp": 0, "input_length": n, "output_length": 32, "hash_ids": ids} for n, ids in rows]
    path.write_text("".join(json.dumps(each) + "\n" for each in fields))
    return path


def test_pages_are_named_by_all_before_them():
    names = PageNames(2)
    assert names.extend([], [1, 2, 3, 4, 5]) == [0, 1]
    assert names.extend([], [1, 2, 3, 3]) == [0, 2]
    assert names.extend([], [3, 4]) == [3]


def test_ideal_hits_by_hand():
    # The third finds "ab" of the first; the fourth is the third, of which the last page is computed again.
    prompts = [b"abcd", b"xy", b"abce", b"abce"]
    assert ideal(prompts, 2) == Hits(14, 4)
    # Two pages: "xy" pushes out "cd", "abce" that; then nothing is pushed out any more.
    assert ideal(prompts, 2, 2) == Hits(14, 4)
    # One page: always the head of the last prompt.
    assert ideal(prompts, 2, 1) == Hits(14, 2)


def test_simulation(trace, tmp_path):
    # In pages of 16: 37 + 32 + 42 + 32 tokens; the third finds two pages, the fourth one of its two.
    result = tmp_path / "result.json"
    arguments = ["prefix", "--trace", trace, "--simulate", "--page-sizes", "16,8,1", "--pool-tokens", "inf,96"]
    bench(*arguments, "--output-json", result)
    saved = json.loads(result.read_text())
    assert {"machine", "commit", "command", "versions"} <= saved.keys()
    rows = {(row["page_size"], row["pool_tokens"]): row for row in saved["rows"]}
    assert {row["queried_tokens"] for row in rows.values()} == {37 + 32 + 42 + 32}
    assert rows[16, None]["cached_tokens"] == 32 + 16
    assert rows[8, None]["cached_tokens"] == 32 + 24
    assert rows[1, None]["cached_tokens"] == 32 + 31
    for row in rows.values():
        assert row["hit_rate"] == row["cached_tokens"] / 143
        assert row["hit_rate"] <= row["ideal_hit_rate"]
    assert rows[16, None]["hit_rate"] == rows[16, None]["ideal_hit_rate"] == rows[16, None]["vllm_rules_hit_rate"]
    assert all(row["same_policy_hit_rate"] == row["vllm_rules_hit_rate"] for row in rows.values())
    assert (rows[16, None]["lru_hit_rate"], rows[16, 96]["num_pages"]) == (None, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --trace or --chats"),
        (["--chats", "FILE", "--simulate"], "chats need a server"),
        (["--trace", "FILE", "--page-sizes", "16,32"], "one page size"),
        (["--trace", "FILE", "--simulate", "--page-sizes", "0.5"], "--page-sizes"),
    ],
)
def test_wrong_options_of_prefix_are_named(trace, arguments, message):
    assert message in bench("prefix", *(trace if each == "FILE" else each for each in arguments), status=2).stderr


def test_a_pool_that_is_too_small_is_told(trace):
    assert "too small" in bench("prefix", "--trace", trace, "--simulate", "--pool-tokens", 16, status=1).stderr


async def reply(call, fields):
    await call.head(kind="application/json")
    await call.send(json.dumps(fields))
    await call.end()


def test_a_server_is_asked_for_its_hits(mock_server, trace, tmp_path):
    seen = []

    async def answer(call):
        """Finds 16 tokens of every prompt but the first."""
        seen.append(call.body)
        cached = 16 if len(seen) > 1 else 0
        await call.head()
        await call.event({"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]})
        usage = {"prompt_tokens": len(call.body["prompt"]), "completion_tokens": 1}
        await call.event({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}})
        await call.end()

    result = tmp_path / "result.json"
    with mock_server(answer) as server:
        bench("prefix", "--trace", trace, "--base-url", server.url, "--model", "m", "--output-json", result)
    assert [len(body["prompt"]) for body in seen] == [37, 32, 42, 32]
    assert seen[1]["prompt"] == seen[3]["prompt"]
    assert [body["max_tokens"] for body in seen] == [1] * 4
    (row,) = json.loads(result.read_text())["rows"]
    assert (row["cached_tokens"], row["queried_tokens"]) == (48, 143)
    assert row["ideal_hit_rate"] == (32 + 16) / 143


def test_chats_are_sent_cold_and_warm(mock_server, tmp_path):
    """The mock's tokens are words; it finds what it has seen with the same salt, and takes 100 ms where it does not."""
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": ("user", "assistant")[number % 2], "content": f"word{number} " * 16} for number in range(4)]
    chats.write_text(json.dumps({"turns": turns}) + "\n")
    seen, known = [], set()

    async def answer(call):
        messages = call.body["messages"]
        if call.path == "/tokenize":
            ids = [int(word.removeprefix("word")) for each in messages for word in each["content"].split()]
            return await reply(call, {"tokens": [*ids, 99]})
        seen.append(call.body)
        texts, salt = tuple(each["content"] for each in messages), call.body["cache_salt"]
        found = sum((salt, texts[:end]) in known for end in range(1, len(texts) + 1))
        known.update((salt, texts[:end]) for end in range(1, len(texts) + 1))
        await call.head()
        await asyncio.sleep(0 if found else 0.1)
        await call.event({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": 16 * len(messages) + 1, "completion_tokens": 1}
        await call.event({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 16 * found}}})
        return await call.end()

    result = tmp_path / "result.json"
    with mock_server(answer) as server:
        ran = bench("prefix", "--chats", chats, "--base-url", server.url, "--model", "m", "--output-json", result)
    assert [len(body["messages"]) for body in seen] == [1, 3, 1, 3]
    salts = [body["cache_salt"] for body in seen]
    assert salts[2] == salts[3]
    assert len(set(salts)) == 3
    saved = json.loads(result.read_text())
    first, second = saved["turns"]
    assert (first["turn"], first["requests"], first["mean_prompt_tokens"], first["hit_rate"]) == (1, 1, 17, 0)
    assert (second["turn"], second["mean_prompt_tokens"], second["hit_rate"]) == (2, 49, 16 / 49)
    assert min(first["cold_p50_ttft_ms"], first["warm_p50_ttft_ms"], second["cold_p50_ttft_ms"]) >= 98
    assert second["warm_p50_ttft_ms"] < second["cold_p50_ttft_ms"]
    (row,) = saved["rows"]
    assert row["hit_rate"] == row["ideal_hit_rate"] == 16 / 66
    assert "cold TTFT p50" in ran.stdout


class Admin(AdminServiceServicer):
    """Counts the flushes, with the keys that came."""

    def __init__(self):
        self.keys = []

    def FlushCache(self, request, context):
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        return pb.FlushCacheResponse(pages_freed=7)


@contextmanager
def administered(tls=None):
    """An operator's address, and what came there."""
    servicer, server, free = Admin(), grpc.server(futures.ThreadPoolExecutor(1)), "127.0.0.1:0"
    add_AdminServiceServicer_to_server(servicer, server)
    port = server.add_secure_port(free, tls) if tls else server.add_insecure_port(free)
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def admin():
    with administered() as both:
        yield both


def test_a_cache_is_flushed_over_tls(mock_server, stream, certificates, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a"}))
    pair = [(certificates / f"other.{kind}").read_bytes() for kind in ("key", "pem")]
    with mock_server(stream) as server, administered(grpc.ssl_server_credentials([tuple(pair)])) as (servicer, address):
        arguments = ["sweep", "--base-url", server.url, "--model", "m", "--num-prompts", 1, "--request-rates", "inf"]
        arguments += ["--dataset-name", "custom", "--dataset-path", path, "--result-dir", tmp_path, "--disable-tqdm"]
        arguments += ["--flush-cache", address, "--header", "authorization=Bearer k"]
        assert f"the operator address {address}: UNAVAILABLE" in bench(*arguments, status=1).stderr
        arguments += ["--engine-ca", certificates / "ca.pem", "--engine-tls-name", "server.example"]
        assert "Flushed 7 pages" in bench(*arguments).stderr
        assert servicer.keys == ["Bearer k"]


def test_rows_of_a_sweep_are_comparable(mock_server, stream, admin, tmp_path, unused_port):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {n}"}) + "\n" for n in range(50)))
    servicer, address = admin
    lock, asked = threading.Lock(), []

    async def answer(call):
        with lock:
            asked.append((len(servicer.keys), call.body["prompt"]))
        await stream(call)

    with mock_server(answer) as server:
        arguments = ["sweep", "--base-url", server.url, "--model", "m", "--dataset-name", "custom", "--dataset-path"]
        arguments += [path, "--num-prompts", 4, "--output-len", 1, "--request-rates", "100,inf", "--disable-tqdm"]
        arguments += ["--result-dir", tmp_path, "--header", "authorization=Bearer k"]
        bench(*arguments, "--flush-cache", address, "--vary-seed")
        rows = [{prompt for flushes, prompt in asked if flushes == row} for row in (1, 2)]
        assert [len(row) for row in rows] == [4, 4]
        assert rows[0] != rows[1]
        assert servicer.keys == ["Bearer k", "Bearer k"]
        saved = [json.loads((tmp_path / f"sweep-{rate}qps.json").read_text()) for rate in ("100", "inf")]
        assert [(row["seed"], row["cache_flushed"]) for row in saved] == [(0, True), (1, True)]
        asked.clear()
        bench(*arguments)
        prompts = [prompt for _, prompt in asked]
        assert sorted(prompts[:4]) == sorted(prompts[4:])
        ran = bench(*arguments, "--flush-cache", f"127.0.0.1:{unused_port}", status=1)
        assert f"the operator address 127.0.0.1:{unused_port}: UNAVAILABLE" in ran.stderr
