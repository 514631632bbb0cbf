"""Chats through the real OpenAI client: whole and streamed answers."""

import asyncio
import json
import re
import socket
import time

import httpx2
import openai
import pytest

NASTY = [
    'He said "hi\\n"\n\t\r',
    "data: [DONE]\n\ndata: {",
    "\x00\x01\x1f\x7f\x85\u2028\u2029",
    "日本語と",
    "👩‍👩‍👧",
    "\ufeff\ufffd\u0301",
    '"content":""',
    " ",
    "</script>&amp;",
]


class Tee(httpx2.HTTPTransport):
    """Keeps the bytes of every answer."""

    def __init__(self):
        super().__init__()
        self.wire = b""

    def handle_request(self, request):
        response = super().handle_request(request)
        self.wire = b""
        inner, tee = response.stream, self

        class Stream(httpx2.SyncByteStream):
            def __iter__(self):
                for chunk in inner:
                    tee.wire += chunk
                    yield chunk

            def close(self):
                inner.close()

        response.stream = Stream()
        return response


@pytest.fixture
def tee():
    return Tee()


@pytest.fixture
def client(gateway, tee):
    with openai.OpenAI(
        base_url=f"{gateway}/v1", api_key="any", max_retries=0, http_client=httpx2.Client(transport=tee)
    ) as client:
        yield client


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("include_usage", [None, False, True])
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_what_the_client_parsed_is_what_was_on_the_wire(client, tee, engine, kit, n, include_usage, api):
    engine.script = kit.says(*NASTY)
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    if api == "chat":
        stream = client.chat.completions.create(**kit.CHAT, n=n, stream=True, **options)
    else:
        stream = client.completions.create(model=kit.MODEL, prompt="p", n=n, stream=True, **options)
    parsed = [chunk.model_dump(mode="json", exclude_unset=True) for chunk in stream]
    *wire, last = kit.events(tee.wire.decode())
    assert last == "[DONE]"
    assert parsed == wire
    assert len(parsed) == n * (len(NASTY) + (2 if api == "chat" else 1)) + bool(include_usage)
    texts = ["" for _ in range(n)]
    for chunk in parsed:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "") if api == "chat" else choice["text"]
    if api == "chat":
        whole = client.chat.completions.create(**kit.CHAT, n=n)
        assert [choice.message.content for choice in whole.choices] == texts
    else:
        whole = client.completions.create(model=kit.MODEL, prompt="p", n=n)
        assert [choice.text for choice in whole.choices] == texts
    assert whole.model_dump(mode="json", exclude_unset=True) == json.loads(tee.wire)
    assert texts == ["".join(NASTY)] * n


def test_whole_answer(client, engine, kit):
    answer = client.chat.completions.create(**kit.CHAT)
    assert answer.id == "chatcmpl-r1"
    assert answer.object == "chat.completion"
    assert answer.model == kit.MODEL
    assert abs(answer.created - time.time()) < 60
    assert answer.system_fingerprint
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello world")
    assert answer.usage.model_dump(exclude_unset=True) == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_the_model_is_the_name_asked_for(client, kit):
    assert client.chat.completions.create(**kit.CHAT | {"model": "alias"}).model == "alias"


def test_without_a_model_the_engine_names_it(http, gateway, kit):
    answer = http.post(f"{gateway}/v1/chat/completions", json={"messages": kit.CHAT["messages"]})
    assert answer.json()["model"] == kit.MODEL


def test_order_of_a_stream(client, engine, kit):
    stream = client.chat.completions.create(**kit.CHAT, n=2, stream=True, stream_options={"include_usage": True})
    chunks = [chunk.model_dump(mode="json", exclude_unset=True) for chunk in stream]
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-r1"}
    assert len({chunk["created"] for chunk in chunks}) == 1
    role = {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [role, role]
    assert [chunk["choices"][0]["index"] for chunk in chunks[:2]] == [0, 1]
    assert [chunk["choices"][0]["delta"] for chunk in chunks[-3:-1]] == [{}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-3:-1]] == ["stop", "stop"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-3])
    assert chunks[-1]["choices"] == []
    # the prompt once, the completions summed
    assert chunks[-1]["usage"]["prompt_tokens"] == 5
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_the_usage_so_far_as_vllm_tells_it(client, engine, kit):
    """Of each choice, with every chunk; the first ones come before the prompt is looked at."""
    pieces = [kit.delta("ab"), kit.delta("c", 1), kit.delta(), kit.delta("d", 1)]
    for piece, ids in zip(pieces, ([1, 2], [3], [4, 5], [6]), strict=True):
        piece.delta.token_ids.extend(ids)
    engine.script = kit.plays(*pieces, reasons=(1, 1))
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = [
        (chunk.choices[0].index, chunk.usage and chunk.usage.model_dump(exclude_unset=True))
        for chunk in client.chat.completions.create(**kit.CHAT, n=2, stream=True, stream_options=options)
        if chunk.choices
    ]
    assert engine.calls[-1].request.output.token_ids

    def usage(completion):
        counts = {"prompt_tokens": 5, "completion_tokens": completion, "total_tokens": 5 + completion}
        return counts | {"prompt_tokens_details": {"cached_tokens": 2}}

    assert told == [(0, None), (1, None), (0, usage(2)), (1, usage(1)), (1, usage(2)), (0, usage(4)), (1, usage(2))]


@pytest.mark.parametrize("stream_options", [None, {}, {"include_usage": False}])
def test_no_usage_unless_asked_for(client, kit, stream_options):
    for chunk in client.chat.completions.create(**kit.CHAT, stream=True, stream_options=stream_options):
        assert chunk.choices
        assert chunk.usage is None


@pytest.mark.parametrize(
    ("end", "finish_reason", "stop_reason"),
    [
        ({"reason": 1, "stop": "END"}, "stop", "END"),
        ({"reason": 1, "stop_token_id": 0}, "stop", 0),
        ({"reason": 1, "eos_token_id": 2}, "stop", None),
        ({"reason": 2}, "length", None),
    ],
)
def test_how_a_choice_ends(client, engine, kit, end, finish_reason, stop_reason):
    engine.script = kit.says("x", **end)
    whole = client.chat.completions.create(**kit.CHAT).choices[0]
    last = list(client.chat.completions.create(**kit.CHAT, stream=True))[-1].choices[0]
    assert (
        (whole.finish_reason, whole.stop_reason)
        == (last.finish_reason, last.stop_reason)
        == (
            finish_reason,
            stop_reason,
        )
    )


def test_headers_and_role_come_on_accepted(http, gateway, engine, kit):
    engine.script = kit.hangs(kit.accepted())
    with http.stream("POST", f"{gateway}/v1/chat/completions", json=kit.CHAT | {"stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-length" not in answer.headers
        first = next(answer.iter_text())
        assert '"role":"assistant"' in first


def test_completions_open_on_accepted_too(http, gateway, engine, kit):
    engine.script = kit.hangs(kit.accepted())
    with http.stream("POST", f"{gateway}/v1/completions", json={"prompt": "p", "stream": True}) as answer:
        assert answer.status_code == 200
        assert next(answer.iter_text()).strip() == "", (
            "no comment, which some readers take for the beginning of an event"
        )


def test_heartbeats_on_silence(http, gateway, engine, kit):
    engine.script = kit.hangs(kit.accepted())
    with http.stream("POST", f"{gateway}/v1/chat/completions", json=kit.CHAT | {"stream": True}) as answer:
        chunks, text = answer.iter_text(), ""
        while text.count("\n\n") < 4:  # they may come together
            text += next(chunks)
        event, silence = text.split("\n\n", 1)
        assert '"role":"assistant"' in event
        assert set(silence) == {"\n"}


def test_plain_line_readers_see_whole_events(http, gateway, engine, kit):
    """Readers that split at U+0085, U+2028 and U+2029 as well must not cut an event."""
    engine.script = kit.says(*NASTY)
    with http.stream("POST", f"{gateway}/v1/chat/completions", json=kit.CHAT | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    text = "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1])
    assert text == "".join(NASTY)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/version"])
def test_a_client_of_http_1_0_gets_no_chunks(http, gateway, engine, kit, path):
    """RFC 9112, 6.1: no Transfer-Encoding to HTTP/1.0, as old proxies speak it. What has no length ends with the
    connection; more than the socket's buffers hold, so that the writer waits in between.
    """
    engine.script = kit.says(*["x" * 100_000] * 50)
    body = json.dumps(kit.CHAT | {"stream": True}) if path.startswith("/v1") else ""
    method = "POST" if body else "GET"
    kind = {"content-type": "application/json"}
    modern = http.request(method, gateway + path, content=body, headers=kind)
    url = httpx2.URL(gateway)
    with socket.create_connection((url.host, url.port), timeout=20) as connection:
        head = f"{method} {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    head, _, said = answer.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 ")
    assert "connection: close" in head
    assert "transfer-encoding" not in head
    assert ("content-length" in head) == ("content-length" in modern.headers)
    same = [re.sub(r'"created":\d+|\n+', "", each) for each in (said, modern.text)]  # but for the time and heartbeats
    assert same[0] == same[1]


async def test_async_client_many_at_once(gateway, engine, kit):
    async with openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key="any", max_retries=0) as client:

        async def one(number):
            messages = [{"role": "user", "content": f"number {number}"}]
            stream = await client.chat.completions.create(model=kit.MODEL, messages=messages, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def echo(request, context):
            yield kit.accepted()
            for piece in request.chat.messages[0].content[0].text:
                yield kit.delta(piece)
            yield kit.finished()
            yield kit.usage()

        engine.script = echo
        assert await asyncio.gather(*(one(i) for i in range(40))) == [f"number {i}" for i in range(40)]


def test_the_caller_may_use_the_client_s_helpers(client, kit):
    with client.chat.completions.stream(**kit.CHAT) as stream:
        assert stream.get_final_completion().choices[0].message.content == "Hello world"
