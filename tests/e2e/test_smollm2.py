"""The main job on the real model: chats over HTTP, many in a step, each as if it were alone.

smollm2_golden.json and smollm2_many.json hold what transformers generates for each prompt alone (float32, greedy).
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1 import inference_pb2_grpc as rpc
from service.tokenizer import Tokenizer

GREEDY: dict[str, Any] = {"model": "smollm2", "temperature": 0.0, "max_tokens": 64}


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.load(default_model)


@pytest.fixture(scope="module")
def golden(own_data: Path) -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = json.loads((own_data / "smollm2_golden.json").read_text())["prompts"]
    return prompts


@pytest.fixture(scope="module")
def many(own_data: Path) -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = json.loads((own_data / "smollm2_many.json").read_text())["prompts"]
    return prompts


def user(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


async def streamed(client: openai.AsyncOpenAI, **body: Any) -> str:
    stream = await client.chat.completions.create(stream=True, **body)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def test_the_golden_prompts_over_http(
    client: openai.AsyncOpenAI, golden: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    async def check(prompt: dict[str, Any]) -> None:
        answer, joined = await asyncio.gather(
            client.chat.completions.create(messages=prompt["messages"], **GREEDY),
            streamed(client, messages=prompt["messages"], **GREEDY),
        )
        count = prompt["completion_tokens_until_eos"]
        text = tokenizer.decode(prompt["output_ids"][:count], skip_special_tokens=True)
        assert answer.choices[0].message.content == joined == text
        assert answer.choices[0].finish_reason == prompt["finish"]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == count
        assert answer.usage.prompt_tokens == len(prompt["prompt_ids"])

    await asyncio.gather(*map(check, golden))


async def test_the_golden_prompts_over_grpc(engine: rpc.InferenceServiceStub, golden: list[dict[str, Any]]) -> None:
    async def check(prompt: dict[str, Any]) -> None:
        request = pb.GenerateRequest(
            chat=pb.Chat(
                messages=[
                    pb.ChatMessage(role=message["role"], content=[pb.ContentPart(text=message["content"])])
                    for message in prompt["messages"]
                ]
            ),
            sampling=pb.SamplingParams(temperature=0),
            stopping=pb.StoppingCriteria(max_tokens=64, ignore_eos=True),
            output=pb.OutputOptions(token_ids=True),
        )
        events = [event async for event in engine.Generate(request)]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[:2] == ["accepted", "started"]
        assert kinds[-2:] == ["finished", "usage"]
        ids = [token for event in events for token in event.delta.token_ids]
        assert ids == prompt["output_ids"]

    await asyncio.gather(*map(check, golden))


async def test_64_streams_share_steps_and_each_equals_its_lone_run(
    client: openai.AsyncOpenAI, admin: Any, many: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    assert len({prompt["content"] for prompt in many}) == 64
    before = await admin.stats()
    texts = await asyncio.gather(
        *(
            streamed(client, messages=user(prompt["content"]), extra_body={"ignore_eos": True}, **GREEDY)
            for prompt in many
        )
    )
    for prompt, text in zip(many, texts, strict=True):
        assert len(prompt["output_ids"]) == 64
        assert text == tokenizer.decode(prompt["output_ids"], skip_special_tokens=True), prompt["content"]
    after = await admin.idle()
    assert after.max_step_rows >= 32
    assert after.generated_tokens - before.generated_tokens == 64 * 64
    # 64 rows for 64 tokens take 64 steps at best; one by one they would take 4,096.
    assert after.steps - before.steps < 200
    assert after.used_pages == 0


async def test_the_second_turn_of_a_chat_is_mostly_cached(client: openai.AsyncOpenAI) -> None:
    messages = user("Tell me a story about a lighthouse keeper who finds a map.")
    first = await client.chat.completions.create(messages=messages, **GREEDY)
    assert first.usage is not None
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, *user("What is on the map?")]
    second = await client.chat.completions.create(messages=messages, **GREEDY | {"max_tokens": 8})
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    # All full pages of the first turn, answer included, come from the cache.
    known = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens >= known // 16 * 16 - 16
    assert second.usage.prompt_tokens_details.cached_tokens > 0


async def test_64_equal_prompts_at_once_compute_their_prefix_once(client: openai.AsyncOpenAI, admin: Any) -> None:
    content = "Summarise this. " + "The lantern swung above the quiet harbour. " * 12
    before = await admin.stats()
    answers = await asyncio.gather(
        *(client.chat.completions.create(messages=user(content), **GREEDY | {"max_tokens": 4}) for _ in range(64))
    )
    after = await admin.idle()
    usage = answers[0].usage
    assert usage is not None
    prompt_tokens = usage.prompt_tokens
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    # The first computes the prompt; every other one at most what is beyond the last full page.
    computed = after.prefill_tokens - before.prefill_tokens
    assert computed <= prompt_tokens + 63 * 16
    assert prompt_tokens > 100


async def test_cancelling_half_of_the_streams_frees_their_pages(
    client: openai.AsyncOpenAI, admin: Any, many: list[dict[str, Any]]
) -> None:
    body = GREEDY | {"max_tokens": 96, "stream": True, "extra_body": {"ignore_eos": True}}
    streams = await asyncio.gather(
        *(client.chat.completions.create(messages=user(prompt["content"]), **body) for prompt in many[:16])
    )
    for stream in streams:
        await anext(stream)  # headers and role: accepted
    before = await admin.stats()
    for stream in streams[::2]:
        await stream.close()
    kept = await asyncio.gather(*(_count(stream) for stream in streams[1::2]))
    after = await admin.idle()
    assert all(count > 80 for count in kept)
    assert after.requests_aborted - before.requests_aborted == 8
    assert after.used_pages == 0
    assert after.free_pages + after.cached_pages == after.total_pages


async def _count(stream: openai.AsyncStream[Any]) -> int:
    return sum([1 async for chunk in stream if chunk.choices and chunk.choices[0].delta.content])


async def test_n_computes_the_prompt_once(client: openai.AsyncOpenAI, admin: Any) -> None:
    before = await admin.stats()
    answer = await client.chat.completions.create(
        messages=user("Name a colour, an animal and a town by the sea."),
        n=4,
        seed=7,
        **GREEDY | {"temperature": 1.0, "max_tokens": 16},
    )
    after = await admin.idle()
    assert answer.usage is not None
    assert len({choice.message.content for choice in answer.choices}) > 1
    cached = answer.usage.prompt_tokens_details.cached_tokens or 0  # type: ignore[union-attr]
    assert after.prefill_tokens - before.prefill_tokens == answer.usage.prompt_tokens - cached


async def test_a_seeded_answer_does_not_depend_on_its_neighbours(client: openai.AsyncOpenAI) -> None:
    body = GREEDY | {"temperature": 0.9, "top_p": 0.95, "max_tokens": 24}
    ask = user("Invent a name for a teahouse and say what it smells like.")
    alone = await client.chat.completions.create(messages=ask, seed=11, **body)
    crowd = [
        client.chat.completions.create(messages=user(f"Invent a name for a shop that sells {thing}."), **body)
        for thing in ("rope", "maps", "clay", "ink", "salt", "wool", "tin") * 4
    ]
    answers = await asyncio.gather(client.chat.completions.create(messages=ask, seed=11, **body), *crowd)
    assert answers[0].choices[0].message.content == alone.choices[0].message.content


class Recorder(httpx.AsyncHTTPTransport):
    """Keeps the bytes of the last answer as they came over the wire."""

    def __init__(self) -> None:
        super().__init__()
        self.wire = bytearray()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        self.wire.clear()
        response.stream = _Tee(response.stream, self.wire)
        return response


class _Tee(httpx.AsyncByteStream):
    def __init__(self, source: Any, copy: bytearray) -> None:
        self._source, self._copy = source, copy

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._source:
            self._copy += data
            yield data

    async def aclose(self) -> None:
        await self._source.aclose()


async def test_wire_json_is_what_the_client_parses(served: Any) -> None:
    recorder = Recorder()
    async with openai.AsyncOpenAI(
        base_url=f"{served.http}/v1", api_key="none", http_client=httpx.AsyncClient(transport=recorder, timeout=120)
    ) as client:
        body = {"messages": user("Write a haiku with one emoji: 🌊 or 🐚."), **GREEDY}
        stream = await client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **body)
        parsed = [chunk.model_dump(mode="json", exclude_unset=True) async for chunk in stream]
        events = [event.removeprefix("data: ") for event in recorder.wire.decode().split("\n\n") if event]
        assert events[-1] == "[DONE]"
        assert [json.loads(event) for event in events[:-1]] == parsed
        text = "".join(choice["delta"].get("content", "") for chunk in parsed for choice in chunk["choices"])
        whole = await client.chat.completions.create(**body)
        assert (whole.choices[0].message.content or "").encode() == text.encode()
