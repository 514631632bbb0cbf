"""The official Python client: what it returns and which of its errors it raises, against the default model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fulcrum.v1 import inference_pb2 as pb

GRAVITY: list[Any] = [{"role": "user", "content": "What is gravity?"}]
GREEDY: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 10}


@pytest.fixture(scope="module")
def sync(served: Any) -> Iterator[openai.OpenAI]:
    """The synchronous client."""
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


def test_models(sync: openai.OpenAI) -> None:
    (card,) = sync.models.list().data
    assert (card.id, card.object, card.owned_by) == ("smollm2", "model", "fulcrum")
    assert card.created > 1_700_000_000
    assert sync.models.retrieve("smollm2") == card
    with pytest.raises(openai.NotFoundError) as caught:
        sync.models.retrieve("gpt-4o/mini")
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


def test_a_stream_is_the_whole_answer_in_pieces(sync: openai.OpenAI) -> None:
    whole = sync.chat.completions.create(messages=GRAVITY, **GREEDY)
    choice, usage = whole.choices[0], whole.usage
    assert (whole.object, whole.model, choice.index, choice.message.role) == (
        "chat.completion",
        "smollm2",
        0,
        "assistant",
    )
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert usage is not None
    assert usage.completion_tokens == 10
    assert usage.total_tokens == usage.prompt_tokens + 10

    options: Any = {"include_usage": True}
    with sync.chat.completions.create(messages=GRAVITY, stream=True, stream_options=options, **GREEDY) as stream:
        chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1]) == choice.message.content
    assert [each.choices[0].finish_reason for each in chunks[-3:-1]] == [None, "length"]
    assert all(each.usage is None for each in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (usage.prompt_tokens, 10)

    with sync.chat.completions.create(messages=GRAVITY, stream=True, **GREEDY) as stream:
        assert all(chunk.choices and chunk.usage is None for chunk in stream)


def test_the_stream_helper_gathers_the_answer(sync: openai.OpenAI) -> None:
    """chat.completions.stream checks every chunk against what came before it."""
    body = {"model": "smollm2", "messages": GRAVITY, "temperature": 0, "max_completion_tokens": 32, "stop": " concept"}
    whole = sync.chat.completions.create(**body)
    with sync.chat.completions.stream(**body) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_completions(sync: openai.OpenAI) -> None:
    text = sync.completions.create(prompt="1, 2, 3,", **GREEDY | {"max_tokens": 6})
    assert text.object == "text_completion"
    assert text.choices[0].text.startswith(" 4, 5")
    assert text.choices[0].finish_reason == "length"
    ids = sync.completions.create(prompt=[6403, 1980, 253, 655], echo=True, **GREEDY)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 4
    assert ids.choices[0].text.startswith("Once upon a time")
    both = sync.completions.create(prompt=["1, 2, 3,", "Once upon a time"], **GREEDY | {"max_tokens": 6})
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == text.choices[0].text
    with sync.completions.create(prompt="1, 2, 3,", stream=True, **GREEDY | {"max_tokens": 6}) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == text.choices[0].text
    assert sync.completions.create(prompt="x", model="smollm2").usage.completion_tokens <= 16  # type: ignore[union-attr]


def test_logprobs_of_an_echo(sync: openai.OpenAI) -> None:
    """Transformers' values (float32), cold, warm and streamed; a character of three tokens; offsets counted by hand."""
    text = "The capital of France is Paris, na\u00efve \u65e5"
    values = [-11.5393, -0.3376, -2.4387, -0.4509, -0.2581, -1.6585, -18.1905, -3.0233, -18.3357, -3.2468, -3.3976]
    words = ["The", " capital", " of", " France", " is", " Paris", ",", " na", "\u00efve"]
    body: Any = {"prompt": text, "model": "smollm2", "temperature": 0, "echo": True, "logprobs": 2}
    for length in (0, 1, 1):
        choice = sync.completions.create(max_tokens=length, **body).choices[0]
        assert choice.text == text + "\u672c"[:length]
        told: Any = choice.logprobs
        assert told.tokens == [*words, "bytes: \\xe6", "bytes:\\x97", "bytes:\\xa5", *["\u672c"][:length]]
        assert told.token_logprobs[0] is None
        assert told.token_logprobs[1:] == pytest.approx([*values, *[-0.1675][:length]], abs=1e-3)
        assert told.text_offset == [0, 3, 11, 14, 21, 24, 30, 31, 34, 37, 38, 38, *[39][:length]]
        assert told.top_logprobs[1] == pytest.approx({"-": -0.8655, ",": -2.6532, " capital": -11.5393}, abs=1e-3)
        assert told.top_logprobs[2] == pytest.approx({" of": -0.3376, " city": -2.3196}, abs=1e-3)
    with sync.completions.create(max_tokens=1, stream=True, **body) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == choice.text
    for name in ("tokens", "text_offset"):
        joined = [value for chunk in chunks if chunk.logprobs for value in getattr(chunk.logprobs, name)]
        assert joined == getattr(told, name)


def test_logprobs_of_a_chat(sync: openai.OpenAI) -> None:
    """Greedily, every token is the likeliest; joined, they are the text."""
    answer = sync.chat.completions.create(messages=GRAVITY, logprobs=True, top_logprobs=3, **GREEDY)
    found: Any = answer.choices[0].logprobs
    assert "".join(one.token for one in found.content) == answer.choices[0].message.content
    assert len(found.content) == 10
    for one in found.content:
        assert len(one.top_logprobs) == 3
        assert (one.token, one.bytes, one.logprob) == tuple(
            getattr(one.top_logprobs[0], name) for name in ("token", "bytes", "logprob")
        )
        assert 0 >= one.logprob >= one.top_logprobs[1].logprob >= one.top_logprobs[2].logprob


def test_logprobs_of_a_response(sync: openai.OpenAI, own_data: Path) -> None:
    """Transformers' values (float32), whole and streamed; the others as a chat tells them."""
    golden = json.loads((own_data / "smollm2_golden.json").read_text())["prompts"]
    body: dict[str, Any] = {"model": "smollm2", "temperature": 0, "top_logprobs": 3}
    for prompt in golden[:2]:
        asked = body | {"input": prompt["messages"], "include": ["message.output_text.logprobs"]}
        (part,) = sync.responses.create(**asked).output[0].content  # type: ignore[union-attr]
        found: Any = part.logprobs  # type: ignore[union-attr]
        count = prompt["completion_tokens_until_eos"]
        assert [one.logprob for one in found] == pytest.approx(prompt["logprobs"][:count], abs=1e-3)
        assert b"".join(bytes(one.bytes) for one in found[:-1]).decode() == part.text  # type: ignore[union-attr]
        assert found[-1].token == "<|im_end|>"
        chat = sync.chat.completions.create(messages=prompt["messages"], logprobs=True, **body).choices[0].logprobs
        events: list[Any] = list(sync.responses.create(**asked, stream=True))
        (done,) = (event for event in events if event.type == "response.output_text.done")
        deltas = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
        for others in (chat.content, done.logprobs, deltas):  # type: ignore[union-attr]
            assert [one.token for one in others] == [one.token for one in found]
            for one, other in zip(found, others, strict=True):
                assert [each.token for each in other.top_logprobs] == [each.token for each in one.top_logprobs]
                values = [each.logprob for each in (one, *one.top_logprobs)]
                assert [each.logprob for each in (other, *other.top_logprobs)] == pytest.approx(values, abs=1e-3)
                assert len(values) == 4


def test_stop(sync: openai.OpenAI) -> None:
    for stop in (" 6", ["nowhere", " 6"]):
        answer = sync.completions.create(prompt="1, 2, 3,", stop=stop, **GREEDY)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" 4, 5,", "stop")


def test_n_and_seed(sync: openai.OpenAI) -> None:
    body = GREEDY | {"temperature": 1.0, "n": 4, "max_tokens": 8}
    first = sync.chat.completions.create(messages=GRAVITY, seed=5, **body)
    again = sync.chat.completions.create(messages=GRAVITY, seed=5, **body)
    other = sync.chat.completions.create(messages=GRAVITY, seed=6, **body)
    texts = [[choice.message.content for choice in answer.choices] for answer in (first, again, other)]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert len(set(texts[0])) > 1
    assert texts[0] == texts[1] != texts[2]
    assert first.usage is not None
    assert again.usage is not None
    assert first.usage.prompt_tokens == again.usage.prompt_tokens  # counted once, not four times
    assert first.usage.completion_tokens > 8


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"n": 0}, "invalid_value", "n"),
        ({"max_tokens": 100_000}, "context_length_exceeded", None),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"extra_body": {"temprature": 1}}, "unknown_parameter", "temprature"),
    ],
)
def test_bad_requests(sync: openai.OpenAI, wrong: dict[str, Any], code: str, param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sync.chat.completions.create(**{"messages": GRAVITY, **GREEDY, **wrong})
    error = caught.value
    assert (error.status_code, error.code, error.type) == (400, code, "invalid_request_error")
    assert param is None or error.param == param
    assert error.request_id
    with pytest.raises(openai.BadRequestError):  # before a stream begins too
        sync.chat.completions.create(**{"messages": GRAVITY, **GREEDY, **wrong, "stream": True})


def test_an_unknown_model_is_not_found(sync: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        sync.chat.completions.create(messages=GRAVITY, **GREEDY | {"model": "gpt-4o"})
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_timeout_ends_the_work(client: openai.AsyncOpenAI, admin: Any) -> None:
    before = await admin.idle()
    body = GREEDY | {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=httpx.Timeout(30, read=2)).chat.completions.create(messages=GRAVITY, **body)
    after = await admin.idle()  # long before 4,000 tokens
    assert after.requests_aborted == before.requests_aborted + 1


def test_the_servers_own_deadline_is_504(sync: openai.OpenAI) -> None:
    body = GREEDY | {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.InternalServerError) as caught:
        sync.chat.completions.create(messages=GRAVITY, extra_headers={"x-request-timeout": "0.3"}, **body)
    assert (caught.value.status_code, caught.value.type) == (504, "server_error")


def test_nobody_there() -> None:
    with (
        openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()


async def test_a_stream_that_breaks_raises(client: openai.AsyncOpenAI, admin: Any) -> None:
    body = GREEDY | {"max_tokens": 4000, "stream": True, "extra_body": {"ignore_eos": True}}
    stream = await client.chat.completions.create(messages=GRAVITY, **body)
    first = await anext(stream)
    await admin.stub.Abort(pb.AbortRequest(request_ids=[first.id.removeprefix("chatcmpl-")]))
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert (caught.value.code, caught.value.type) == ("aborted", "conflict_error")


def test_raw_responses(sync: openai.OpenAI) -> None:
    raw = sync.chat.completions.with_raw_response.create(
        messages=GRAVITY, extra_headers={"x-request-id": "label-1"}, **GREEDY
    )
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    assert raw.headers["x-request-id"] == "label-1"
    answer = raw.parse()
    assert answer._request_id == "label-1"
    assert answer.id.startswith("chatcmpl-")
    with sync.chat.completions.with_streaming_response.create(messages=GRAVITY, stream=True, **GREEDY) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
