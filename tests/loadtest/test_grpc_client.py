"""The gRPC backend against an engine server of known delays, and the server's own tokenizer over both protocols."""

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from loadtest import worker
from loadtest.datasets import Sampling
from loadtest.grpc_client import GrpcClient
from loadtest.records import Chain, Prompt, Record, Target
from loadtest.serve import LoadTest
from loadtest.tokens import RemoteTokenizer, served_model

pytestmark = pytest.mark.usefixtures("no_children")
RUNS = 5  # of which one has to be on time: a busy machine is late in some of them, a wrong figure in all


class Engine(InferenceServiceServicer):
    """One token every 20 ms, the first after 100 ms. Its tokenizer: a token for each word, 7 before them."""

    def __init__(self):
        self.requests = []
        self.metadata = []

    async def Generate(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if request.model != "served":
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.model!r}")
        yield pb.GenerateResponse(accepted=pb.Accepted(request_id="r", model="served"))
        yield pb.GenerateResponse(started=pb.Started(prompt_tokens=11))
        await asyncio.sleep(0.1)
        tokens = request.stopping.max_tokens
        for number in range(tokens):
            if number:
                await asyncio.sleep(0.02)
            yield pb.GenerateResponse(delta=pb.Delta(text="x", token_ids=[number]))
        if tokens == 9:
            return  # OK, but not all of it
        yield pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH, completion_tokens=tokens))
        usage = pb.Usage(prompt_tokens=11, completion_tokens=tokens, cached_tokens=2)
        yield pb.GenerateResponse(usage=usage)

    async def Tokenize(self, request, context):
        if request.HasField("chat"):
            return pb.TokenizeResponse(token_ids=[len(each.content[0].text) for each in request.chat.messages])
        ids = [len(word) for word in request.text.split()]
        return pb.TokenizeResponse(token_ids=[7, *ids] if request.add_special_tokens else ids)

    async def Detokenize(self, request, context):
        return pb.DetokenizeResponse(text=" ".join("a" * token for token in request.token_ids))

    async def GetModel(self, request, context):
        return pb.GetModelResponse(served_names=["served", "other"])


@pytest.fixture
def engine():
    """A running Engine and its URL."""

    @contextmanager
    def start():
        servicer, loop, started, port = Engine(), asyncio.new_event_loop(), threading.Event(), []
        stop = asyncio.Event()

        async def main():
            server = grpc.aio.server()
            add_InferenceServiceServicer_to_server(servicer, server)
            port.append(server.add_insecure_port("127.0.0.1:0"))
            await server.start()
            started.set()
            await stop.wait()
            await server.stop(None)

        thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
        thread.start()
        assert started.wait(20)
        try:
            yield servicer, f"http://127.0.0.1:{port[0]}"
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(20)
            loop.close()

    with start() as running:
        yield running


def test_an_engine_is_measured(engine, tmp_path):
    servicer, url = engine
    path = tmp_path / "file.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{n}", "output_tokens": 6}) + "\n" for n in range(4)))
    headers = {"authorization": "Bearer k"}
    target = Target("grpc", url, "", "", headers, {"temperature": 0.5, "top_k": 3}, ignore_eos=True)
    test = LoadTest(target, "custom", Sampling(path, 4, shuffle=False), workers=2, progress=False).prepared()
    measured = []
    for _ in range(RUNS):
        servicer.requests.clear()
        done = test.run(test.chains())
        result = done.fields
        assert [record.error for record in done.records] == [""] * 4
        assert (result["total_input_tokens"], result["total_output_tokens"], result["cached_tokens"]) == (44, 24, 8)
        assert result["events_per_token"] == 1.0
        assert sorted(request.text for request in servicer.requests) == ["p0", "p1", "p2", "p3"]
        measured.append([result[f"median_{name}_ms"] for name in ("ttft", "tpot", "e2el")])
        assert all(told >= least for told, least in zip(measured[-1], (98, 19, 198), strict=True)), measured
        if all(told < most for told, most in zip(measured[-1], (200, 60, 400), strict=True)):
            break
    else:
        pytest.fail(f"each run was late: {measured}")
    request = servicer.requests[0]
    assert request.model == "served"
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.HasField("top_p")) == (0.5, 3, False)
    assert (request.stopping.max_tokens, request.stopping.ignore_eos, request.output.token_ids) == (6, True, True)
    assert servicer.metadata[0]["authorization"] == "Bearer k"


def test_ids_and_chats_are_sent_as_such(engine, tmp_path):
    servicer, url = engine
    target = Target("grpc", url, "", "served", {}, {})
    sampling = Sampling(count=1, prefixes=1, prefix_len=5, suffix_len=2, output_len=1)
    test = LoadTest(target, "shared-prefix", sampling, progress=False)
    chains = test.chains()
    assert test.run(chains).fields["completed"] == 1
    assert list(servicer.requests[0].token_ids.ids) == chains[0].prompts[0].content
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"turns": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}))
    test = LoadTest(target, "multi-turn", Sampling(path, 1, output_len=1), progress=False)
    assert test.run(test.chains()).fields["completed"] == 1
    (message,) = servicer.requests[1].chat.messages
    assert (message.role, message.content[0].text) == ("user", "q")
    assert not servicer.requests[1].HasField("cache")
    salted = Chain((replace(test.chains()[0].prompts[0], salt="s"),))
    assert test.run([salted]).fields["completed"] == 1
    assert servicer.requests[2].cache.salt == "s"


def test_chats_are_counted_by_the_server(engine):
    chats = [
        [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}],
        [{"role": "user", "content": "f"}],
    ]
    assert RemoteTokenizer(Target("grpc", engine[1], "", "served", {}, {})).encode_chats(chats) == [[3, 2], [1]]


@pytest.mark.parametrize(
    ("model", "tokens", "message"), [("x", 3, "NOT_FOUND: no model 'x'"), ("served", 9, "truncated")]
)
def test_failures_are_named(engine, model, tokens, message):
    _, url = engine
    sampling = Sampling(count=2, prefixes=1, prefix_len=5, suffix_len=2, output_len=tokens)
    test = LoadTest(Target("grpc", url, "", model, {}, {}), "shared-prefix", sampling, progress=False)
    done = test.run(test.chains())
    assert done.fields["failed"] == 2
    assert all(record.error.startswith(message) for record in done.records)


def test_unreachable_engine(unused_port):
    sampling = Sampling(count=1, prefixes=1, output_len=1)
    target = Target("grpc", f"http://127.0.0.1:{unused_port}", "", "m", {}, {})
    test = LoadTest(target, "shared-prefix", sampling, progress=False)
    (record,) = test.run(test.chains()).records
    assert record.error.startswith("UNAVAILABLE")


def check_tokenizer(target):
    assert served_model(target) == "served"
    tokenizer = RemoteTokenizer(target)
    assert tokenizer.specials_added == 1
    assert tokenizer.encode(["aa b", "ccc"]) == [[7, 2, 1], [7, 3]]
    assert tokenizer.encode(["aa b"], special=False) == [[2, 1]]
    assert tokenizer.decode([[1, 3]]) == ["a aaa"]


def test_tokenizer_of_an_engine(engine):
    _, url = engine
    check_tokenizer(Target("grpc", url, "", "served", {}, {}))


def test_tokenizer_of_an_http_server(mock_server):
    async def answer(call):
        match call.path:
            case "/v1/models":
                fields = {"data": [{"id": "served"}]}
            case "/tokenize":
                ids = [len(word) for word in call.body["prompt"].split()]
                fields = {"tokens": [7, *ids] if call.body["add_special_tokens"] else ids}
            case "/detokenize":
                fields = {"prompt": " ".join("a" * token for token in call.body["tokens"])}
        await call.head(kind="application/json")
        await call.send(json.dumps(fields))
        await call.end()

    with mock_server(answer) as server:
        check_tokenizer(Target("openai", server.url, "/v1/completions", "served", {}, {}))


@pytest.mark.parametrize("content", ["half a character: \ud800", [2**32], []])
def test_a_prompt_that_cannot_be_sent_fails_alone(unused_port, content):
    async def send():
        client = GrpcClient(Target("grpc", f"http://127.0.0.1:{unused_port}", "", "m", {}, {}))
        record = await worker.send(client, Prompt(content, 5), Record())
        await client.close()
        return record

    record = asyncio.run(send())
    assert record.error.startswith("cannot be sent")
    assert record.start > 0
