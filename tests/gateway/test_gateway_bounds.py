"""How much a request may hold: of each field, and in all. (What a prompt may hold, the engine says.)"""

import asyncio
import json
import random
import socket
import tracemalloc

import httpx
import pytest
from starlette.requests import Request

from fulcrum.v1 import inference_pb2 as pb
from gateway.answer import Answer
from gateway.choices_format import CompletionFormat, Echo, Head, TokenCounts
from gateway.config import GatewayConfig
from gateway.engines import EnginePool, Generation
from gateway.metrics import Metrics
from gateway.responses_format import ResponsesFormat
from gateway.responses_schema import ResponsesRequest
from gateway.routes import Routes
from gateway.schemas import CompletionRequest
from gateway.structure import Structure
from telemetry.expiry import Certificates

TEXT = {"type": "text", "text": "x"}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
USER = {"role": "user", "content": "hi"}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

# Path, field at fault, how many there may be, and a body with so many.
BOUNDS = [
    (CHAT, "messages", 8192, lambda n: {"messages": [USER] * n}),
    (CHAT, "messages[1].content", 2048, lambda n: {"messages": [USER, {"role": "user", "content": [TEXT] * n}]}),
    (CHAT, "messages[0].tool_calls", 128, lambda n: {"messages": [{"role": "assistant", "tool_calls": [CALL] * n}]}),
    (CHAT, "tools", 128, lambda n: {"messages": [USER], "tools": [TOOL] * n}),
    (CHAT, "stop_token_ids", 1024, lambda n: {"messages": [USER], "stop_token_ids": [1] * n}),
    (CHAT, "logit_bias", 1024, lambda n: {"messages": [USER], "logit_bias": {str(i): 1 for i in range(n)}}),
    (CHAT, "guided_choice", 1024, lambda n: {"messages": [USER], "guided_choice": ["x"] * n}),
    (
        COMPLETIONS,
        "structured_outputs.choice",
        1024,
        lambda n: {"prompt": "p", "structured_outputs": {"choice": ["x"] * n}},
    ),
    (COMPLETIONS, "stop", 16, lambda n: {"prompt": "p", "stop": ["x"] * n}),
    (RESPONSES, "input", 8192, lambda n: {"input": [USER] * n}),
    (
        RESPONSES,
        "input[0].content",
        2048,
        lambda n: {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * n}]},
    ),
    (
        RESPONSES,
        "input[0].content",
        2048,
        lambda n: {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}] * n}]},
    ),
    (RESPONSES, "tools", 128, lambda n: {"input": "hi", "tools": [{"type": "function", "name": "f"}] * n}),
    (RESPONSES, "metadata", 16, lambda n: {"input": "hi", "metadata": {str(i): "x" for i in range(n)}}),
]


@pytest.mark.parametrize(("path", "param", "most", "body"), BOUNDS)
def test_of_each_field_so_many_are_taken_and_no_more(http, gateway, engine, path, param, most, body):
    taken = http.post(f"{gateway}{path}", json=body(most))
    assert taken.status_code == 200, taken.text
    refused = http.post(f"{gateway}{path}", json=body(most + 1))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert param in error["message"]
    assert len(engine.calls) == 1


def value(draw: random.Random, depth: int = 0) -> object:
    """Any JSON value."""
    kind = draw.randrange(6 if depth < 4 else 3)
    if kind == 0:
        return draw.randrange(9999)
    if kind <= 2:
        return "".join(draw.choice('a\\",[]{}:é\n ') for _ in range(draw.randrange(6)))
    if kind == 3:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {str(value(draw, 9)): value(draw, depth + 1) for _ in range(draw.randrange(4))}


def counts(of: object) -> tuple[int, int]:
    """Lists, objects and keys in a value; and commas."""
    if not isinstance(of, (list, dict)):
        return 0, 0
    inner = [counts(one) for one in (of.values() if isinstance(of, dict) else of)]
    own = 1 + (len(of) if isinstance(of, dict) else 0)
    return own + sum(nodes for nodes, _ in inner), max(0, len(of) - 1) + sum(commas for _, commas in inner)


@pytest.mark.parametrize("seed", range(200))
def test_the_structure_is_counted_however_it_is_cut(seed):
    draw = random.Random(seed)
    whole = value(draw)
    text = json.dumps(whole, ensure_ascii=draw.random() < 0.5).encode()
    structure, at = Structure(), 0
    while at < len(text):
        size = draw.randrange(1, 8)
        structure.add(text[at : at + size])
        at += size
    assert (structure.nodes, structure.values) == counts(whole)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"model": "m", "messages": [' + "{}," * 70_000, "messages"),
        ('{"chat_template_kwargs": {"a": [' + "[]," * 70_000, "chat_template_kwargs"),
        ('{"prompt": [' + "1," * 1_100_000, "prompt"),
        ('{"metadata": {' + "".join(f'"{number}": 1,' for number in range(70_000)), "metadata"),
        ("{" + "".join(f'"{number}": 1,' for number in range(70_000)), None),
        ("[" * 70_000, None),
        ("[" * 100 + "[]," * 70_000, None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_read(start_gateway, engine, body, param):
    """Its end has not come, nor will it."""
    with start_gateway(engines=[engine.address], max_body_bytes=16 << 20) as url:
        place = httpx.URL(url)
        with socket.create_connection((place.host, place.port), timeout=20) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {place.host}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {16 << 20}\r\n\r\n"
            connection.sendall(head.encode() + body.encode())
            answer = connection.recv(4096)
            while b"}}" not in answer:
                answer += connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400 ")
    error = json.loads(answer[answer.index(b"\r\n\r\n") :])["error"]
    assert error["code"] == "invalid_value"
    assert "65536 lists, objects and keys" in error["message"]
    if param is not None:
        assert error["param"] == param
    assert not engine.calls


def test_texts_are_no_structure(http, gateway, engine):
    """They may hold any number of brackets and commas."""
    text = '[{"a": 1},' * 80_000
    answer = http.post(f"{gateway}{COMPLETIONS}", json={"prompt": text})
    assert answer.status_code == 200
    assert engine.calls[-1].request.text == text


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": "p"}), (RESPONSES, {"input": "p"})]
)
def test_an_answer_of_more_than_64_mib_is_cancelled_unless_it_is_streamed(http, gateway, engine, kit, path, body):
    async def script(request, context):
        yield kit.accepted()
        for _ in range(9):
            yield kit.delta("x" * (8 << 20))
        if len(engine.calls) == 1:
            await asyncio.Event().wait()
        yield kit.finished()
        yield kit.usage()

    engine.script = script
    answer = http.post(f"{gateway}{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "answer_too_large")
    assert engine.calls[-1].cancelled.wait(20)
    if path == RESPONSES:  # whose stream tells the whole text four times more
        return
    with http.stream("POST", f"{gateway}{path}", json=body | {"stream": True}) as stream:
        assert sum(map(len, stream.iter_bytes())) > 72 << 20


def test_an_echo_counts_in_each_choice_of_a_whole_answer(http, gateway, engine, kit):
    engine.script = kit.hangs(kit.accepted(), kit.delta("y"))
    body = {"prompt": "x" * (1 << 19), "n": 128, "echo": True}
    answer = http.post(f"{gateway}{COMPLETIONS}", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "answer_too_large")
    assert engine.calls[-1].cancelled.wait(20)


def test_the_choices_of_a_prompt_share_its_echo():
    text, body = "x" * (1 << 20), CompletionRequest(prompt="p", logprobs=0, echo=True)
    tracemalloc.start()
    try:
        CompletionFormat(Head("id", 1, "m", "f"), 128, body, [Echo(text, b"x")] * 128)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3 << 20


async def test_a_stream_of_many_echoes_lets_others_go_on():
    """To write into a socket with room, or behind a client that has gone, is nothing to wait for."""
    body = CompletionRequest(prompt="p", echo=True)
    shape = CompletionFormat(Head("id", 1, "m", "f"), 1000, body, [Echo("x", b"")] * 1000)
    written = []

    async def write(chunk):
        written.append(chunk)

    async def read():
        await asyncio.Event().wait()

    config, request = GatewayConfig(), Request({"type": "http", "state": {"arrival": 0.0}})
    routes = Routes(config, EnginePool(config), Metrics(Certificates(config.certificates())))
    answer = Answer([Generation(pb.Accepted(), read, lambda: True)], 1000)
    writing = asyncio.create_task(routes._write(request, answer, shape, {}, write))
    for turn in range(1, 10):
        await asyncio.sleep(0)
        assert len(written) == turn
    writing.cancel()
    await asyncio.wait([writing])
    assert len(written) == 9


def test_a_whole_response_is_as_large_as_what_it_says():
    """Not as the events of a stream would be, which take 200 characters more for each token."""
    form = ResponsesFormat(Head("id", 1, "m", "f"), 1, ResponsesRequest(input="p"))
    call = pb.ToolCallDelta(id="c", name="f", arguments="[[[[[")
    for piece in (pb.Delta(reasoning="think"), pb.Delta(text="words"), pb.Delta(tool_calls=[call])):
        assert sum(form.keep(0, piece) for _ in range(1000)) < 6000
    entry = len('{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[]}')
    piece = pb.Delta(text="a", logprobs=[token(b"a")])
    assert sum(form.keep(0, piece) for _ in range(1000)) > 1000 * entry


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_a_whole_answer_is_the_same_however_its_tokens_came(cut):
    """Of two choices with an echo, the logprobs of both in every list, and those of the prompt."""
    prompt = [token(b"b"), token("\u00e9\u2028".encode())]
    said = [token(b" c"), token("\u2192".encode()[:1]), token("\u2192".encode()[1:]), token(b"<end>", hidden=True)]
    body = CompletionRequest(prompt="p", logprobs=1, prompt_logprobs=1)
    echo = Echo("ab\u00e9\u2028", b"a")
    form = CompletionFormat(Head("id", 1, "m", "f"), 2, body, [echo] * 2)
    for at in range(0, len(prompt), cut):
        form.keep_prompt(range(2), prompt[at : at + cut])
    for index in (1, 0):
        for at in range(0, len(said), cut):
            form.keep(index, pb.Delta(text=f"{at}", logprobs=said[at : at + cut]))
    form.keep_ending(1, pb.Finished(reason=pb.FINISH_REASON_LENGTH))
    form.keep_ending(0, pb.Finished(reason=pb.FINISH_REASON_STOP, stop="s"))
    answer = json.loads("".join(form.whole(TokenCounts(3, 8))))
    texts = ["a", "b", "\u00e9\u2028", " c", "bytes:\\xe2", "bytes:\\x86\\x92", "<end>"]
    for index, (reason, matched) in enumerate([("stop", "s"), ("length", None)]):
        choice = answer["choices"][index]
        assert choice["text"] == "ab\u00e9\u2028" + "".join(str(at) for at in range(0, len(said), cut))
        assert choice["logprobs"] == {
            "tokens": texts,
            "token_logprobs": [None] + [-0.5] * 6,
            "top_logprobs": [None] + [{text: -0.5} | ({} if text == "x" else {"x": -1.0}) for text in texts[1:]],
            "text_offset": [0, 1, 2, 4, 6, 6, 7],
        }
        assert [None if one is None else list(one) for one in choice["prompt_logprobs"]] == [
            None,
            ["7", "8"],
            ["7", "8"],
        ]
        assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (index, reason, matched)
    assert answer["usage"]["total_tokens"] == 11


def token(raw, hidden=False):
    return pb.TokenLogprob(
        token_id=7, logprob=-0.5, bytes=raw, hidden=hidden, top=[pb.TopLogprob(token_id=8, logprob=-1, bytes=b"x")]
    )
