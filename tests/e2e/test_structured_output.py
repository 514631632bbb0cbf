"""Structured output of the default model, through real processes; outputs are judged by the `jsonschema` library."""

import asyncio
import json
import random
import re
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1 import inference_pb2_grpc as rpc

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "job": {"enum": ["baker", "pilot", "nurse"]},
    },
    "required": ["name", "age", "job"],
    "additionalProperties": False,
}
ASK: list[Any] = [{"role": "user", "content": "Describe a person called Ada in JSON."}]


def response_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def told(schema: Any) -> list[Any]:
    """A chat that shows the model its schema, as one does."""
    return [
        {"role": "system", "content": f"You answer in JSON that follows this JSON schema: {json.dumps(schema)}"},
        {"role": "user", "content": "Give a short example."},
    ]


async def ask(client: openai.AsyncOpenAI, **body: Any) -> Any:
    settings = {"model": "smollm2", "messages": ASK, "max_tokens": 64, "temperature": 0.0} | body
    return await client.chat.completions.create(**settings)


async def test_a_schema_is_followed_whole_streamed_by_each_of_n_and_beside_free_requests(
    client: openai.AsyncOpenAI,
) -> None:
    form = response_format(PERSON)

    async def streamed() -> str:
        stream = await ask(client, response_format=form, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    free, whole, joined, several, again, free_again = await asyncio.gather(
        ask(client, max_tokens=24),
        ask(client, response_format=form),
        streamed(),
        ask(client, response_format=form, n=2, temperature=1.0, seed=5),
        ask(client, response_format=form, n=2, temperature=1.0, seed=5),
        ask(client, max_tokens=24),
    )
    assert whole.choices[0].message.content == joined
    texts = [choice.message.content for choice in several.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1
    for text in (joined, *texts):
        jsonschema.validate(json.loads(text), PERSON)
    assert {choice.finish_reason for choice in (*whole.choices, *several.choices)} == {"stop"}
    assert free.choices[0].message.content == free_again.choices[0].message.content
    # Alone, and with its prefix in the cache.
    assert (await ask(client, response_format=form)).choices[0].message.content == joined


class Person(BaseModel):
    name: Annotated[str, Field(max_length=20)]
    age: Annotated[int, Field(ge=0, le=130)]
    job: Literal["baker", "pilot", "nurse"]


async def test_models_of_the_client(client: openai.AsyncOpenAI) -> None:
    """Chats and responses ask for the same: whole and streamed, they give the same."""
    asked: dict[str, Any] = {"model": "smollm2", "temperature": 0}
    chat, response = await asyncio.gather(
        client.chat.completions.parse(messages=ASK, max_tokens=64, response_format=Person, **asked),
        client.responses.parse(input=ASK, max_output_tokens=64, text_format=Person, **asked),
    )
    assert isinstance(response.output_parsed, Person)
    assert chat.choices[0].message.parsed == response.output_parsed
    assert response.status == "completed"
    async with client.responses.stream(input=ASK, max_output_tokens=64, text_format=Person, **asked) as stream:
        pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert len(pieces) > 5
    assert "".join(pieces) == final.output_text == response.output_text
    assert final.output_parsed == response.output_parsed
    assert final.usage is not None
    assert final.usage.output_tokens == response.usage.output_tokens  # type: ignore[union-attr]


async def test_regex_choice_and_grammar(client: openai.AsyncOpenAI) -> None:
    extras = (
        {"guided_regex": r"\d{3}-\d{4}"},
        {"guided_choice": ["tea", "coffee", 'ünïcödé \\ "quoted"']},
        {"guided_grammar": 'root ::= "<" [a-z]+ ">"'},
        {"structured_outputs": {"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}}},
    )
    answers = await asyncio.gather(*(ask(client, extra_body=extra) for extra in extras))
    phone, drink, tag, flags = (answer.choices[0].message.content for answer in answers)
    assert re.fullmatch(r"\d{3}-\d{4}", phone)
    assert drink in extras[1]["guided_choice"]
    assert re.fullmatch(r"<[a-z]+>?", tag)
    assert len(json.loads(flags)) in (2, 3)


async def test_what_ends_it_early_and_what_is_combined(client: openai.AsyncOpenAI) -> None:
    form = response_format(PERSON)
    cut, stopped, biased, long = await asyncio.gather(
        ask(client, response_format=form, max_tokens=4),
        ask(client, response_format=form, stop=['"age"']),
        ask(client, extra_body={"guided_regex": "[0-9]", "min_tokens": 5}, frequency_penalty=2.0),
        ask(client, extra_body={"guided_regex": "a{30}", "ignore_eos": True}),
    )
    assert cut.choices[0].finish_reason == "length"
    assert stopped.choices[0].finish_reason == "stop"
    assert '"age"' not in stopped.choices[0].message.content
    assert re.fullmatch("[0-9]", biased.choices[0].message.content)
    assert long.choices[0].message.content == "a" * 30


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": response_format({"type": "array", "uniqueItems": True})},
         "response_format.json_schema.schema", "/uniqueItems: uniqueItems is not served"),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex", "parentheses"),
        ({"extra_body": {"guided_json": "{"}}, "guided_json", "not valid JSON"),
    ],
)  # fmt: skip
async def test_a_bad_constraint_is_a_400_that_says_why(
    client: openai.AsyncOpenAI, body: Any, param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, stream=True, **body)
    assert (caught.value.param, caught.value.code) == (param, "invalid_grammar")
    assert words in str(caught.value)


async def test_over_grpc_tokens_say_the_same_as_the_text(engine: rpc.InferenceServiceStub, default_model: Any) -> None:
    from service.tokenizer import Tokenizer

    request = pb.GenerateRequest(
        text="Two numbers:",
        json_schema='{"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 2, "maxItems": 2}',
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingCriteria(max_tokens=64),
        output=pb.OutputOptions(token_ids=True),
    )
    events = [event async for event in engine.Generate(request)]
    text = "".join(event.delta.text for event in events)
    ids = [token for event in events for token in event.delta.token_ids]
    assert len(json.loads(text)) == 2
    assert Tokenizer.load(default_model).decode(ids) == text
    finished = next(event.finished for event in events if event.HasField("finished"))
    assert (finished.reason, finished.eos_token_id) == (pb.FINISH_REASON_STOP, 2)


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_schemas_of_the_benchmark(client: openai.AsyncOpenAI, data_file: Any) -> None:
    """Of a tenth of all schemas each output that ended by itself is valid, and at least half end within 256 tokens."""
    rows = [json.loads(line) for line in data_file("jsonschemabench.jsonl").read_text().splitlines()]
    schemas = [row["schema"] for row in random.Random(1).sample(rows, len(rows) // 10)]
    slots = asyncio.Semaphore(8)

    async def one(schema: Any) -> str | None:
        async with slots:
            try:
                form = response_format(schema)
                answer = await ask(client, messages=told(schema), response_format=form, max_tokens=256)
            except openai.BadRequestError as error:
                return error.code
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
        if finish == "stop":
            jsonschema.validate(json.loads(text), schema)
        return str(finish)

    ends = await asyncio.gather(*map(one, schemas))
    served = [end for end in ends if end in ("stop", "length")]
    assert set(ends) - set(served) <= {"invalid_grammar"}
    assert len(served) > 20
    assert served.count("stop") >= len(served) / 2
