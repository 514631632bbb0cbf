"""Tools with the real model, told of them by a template in the form of Hermes: calls that must or may come, results."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one so: <tool_call>
{"name": "NAME", "arguments": {}}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
UNITS = ["celsius", "fahrenheit"]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}, "unit": {"type": "string", "enum": UNITS}},
                "required": ["city", "unit"],
                "additionalProperties": False,
                "$defs": {"city": {"type": "string", "maxLength": 20}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "Tells the time.",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
GUEST = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BOOK: Any = {
    "name": "book",
    "description": "Books a room.",
    "parameters": {
        "type": "object",
        "properties": {
            "guests": {"type": "array", "items": GUEST, "minItems": 1, "maxItems": 2},
            "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
            "view": {"anyOf": [{"enum": ["sea", "yard"]}, {"type": "null"}]},
            "nights": {"type": "integer", "minimum": 1, "maximum": 30},
        },
        "required": ["guests", "code", "view", "nights"],
        "additionalProperties": False,
    },
}
SCHEMAS = {function["name"]: function["parameters"] for function in (*(tool["function"] for tool in TOOLS), BOOK)}
ASK: dict[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the weather in Paris, in celsius?"}],
    "tools": TOOLS,
    "temperature": 0,
    "max_tokens": 150,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def client(serve_with_template: Callable[[str], AbstractContextManager[Any]]) -> Iterator[openai.OpenAI]:
    with (
        serve_with_template(TEMPLATE) as served,
        openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", timeout=300, max_retries=0) as client,
    ):
        yield client


def check(name: str, arguments: str) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(arguments))


def streamed(client: openai.OpenAI, **asked: Any) -> dict[int, tuple[str, list[list[str]], str | None]]:
    """By choice, of the chunks: the content, the calls' names and arguments, and how it ended."""
    found: dict[int, tuple[str, list[list[str]], str | None]] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        content, calls, finish = found.get(choice.index, ("", [], None))
        for piece in choice.delta.tool_calls or ():
            assert piece.function is not None
            if piece.id:
                calls.append([piece.function.name or "", ""])
            calls[piece.index][1] += piece.function.arguments or ""
        found[choice.index] = content + (choice.delta.content or ""), calls, choice.finish_reason or finish
    return found


def whole(client: openai.OpenAI, **asked: Any) -> dict[int, tuple[str, list[list[str]], str | None]]:
    """The same of an answer that is not streamed; each call has an id of its own."""
    found = {}
    for choice in client.chat.completions.create(**asked).choices:
        calls = choice.message.tool_calls or []
        assert len({call.id for call in calls}) == len(calls)
        said = [[call.function.name, call.function.arguments] for call in calls]
        found[choice.index] = choice.message.content or "", said, choice.finish_reason
    return found


def test_a_call_that_must_come_comes_and_its_result_goes_back(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**ASK, tool_choice=WEATHER).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "weather"
    check(call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 18}'}
    again = ASK | {"messages": [*ASK["messages"], choice.message, result], "tool_choice": "none"}
    (choice,) = client.chat.completions.create(**again).choices
    assert choice.message.content
    assert choice.message.tool_calls is None


@pytest.mark.parametrize("parallel", [True, False])
def test_a_stream_of_calls_is_the_whole_answer_in_pieces(client: openai.OpenAI, parallel: bool) -> None:
    asked = ASK | {"tool_choice": "required", "parallel_tool_calls": parallel}
    found = whole(client, **asked)
    assert streamed(client, **asked) == found
    ((content, calls, finish),) = found.values()
    assert content == ""
    assert calls
    if not parallel:
        assert len(calls) == 1
        assert finish == "tool_calls"
    # Where the tokens end within a call, that one is cut.
    for name, arguments in calls if finish == "tool_calls" else calls[:-1]:
        check(name, arguments)


def test_each_continuation_calls_for_itself(client: openai.OpenAI) -> None:
    """However hot they are drawn, arguments follow a schema with all that schemas are made of."""
    asked = ASK | {"tools": [*TOOLS, {"type": "function", "function": BOOK}], "temperature": 1.0, "seed": 3, "n": 2}
    asked |= {"tool_choice": {"type": "function", "function": {"name": "book"}}}
    found = whole(client, **asked)
    assert streamed(client, **asked) == found
    assert len({arguments for _, ((_, arguments),), _ in found.values()}) == 2
    for content, ((name, arguments),), finish in found.values():
        assert (content, name, finish) == ("", "book", "tool_calls")
        check(name, arguments)


@pytest.mark.parametrize("strict", [False, True])
def test_a_call_that_the_model_chooses(client: openai.OpenAI, strict: bool) -> None:
    """It has seen how: earlier turns have calls, as the template writes them."""

    def turn(id: str, city: str, unit: str) -> list[Any]:
        call = {"name": "weather", "arguments": json.dumps({"city": city, "unit": unit})}
        return [
            {"role": "user", "content": f"Weather in {city}, in {unit}?"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": id, "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": id, "content": "18"},
            {"role": "assistant", "content": f"It is 18 degrees {unit} in {city}."},
        ]

    history = [*turn("c1", "Rome", "celsius"), *turn("c2", "Oslo", "fahrenheit"), *turn("", "Paris", "celsius")[:1]]
    tools = [{"type": "function", "function": tool["function"] | {"strict": strict}} for tool in TOOLS]
    asked = ASK | {"messages": history, "tools": tools}
    found = whole(client, **asked)
    assert found == {0: ("", [["weather", '{"city": "Paris", "unit": "celsius"}']], "tool_calls")}
    assert streamed(client, **asked) == found


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: Annotated[str, Field(max_length=20)]
    unit: Literal["celsius", "fahrenheit"]


def test_a_tool_that_is_a_model_of_the_client(client: openai.OpenAI) -> None:
    """Chats and responses, streamed, ask for the same and get the same call; its result goes back."""
    once: dict[str, Any] = {"tools": [openai.pydantic_function_tool(Weather)], "parallel_tool_calls": False}
    with client.chat.completions.stream(**ASK | once, tool_choice="required") as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)
    asked: dict[str, Any] = {"model": "smollm2", "temperature": 0} | once
    question: list[Any] = ASK["messages"]
    with client.responses.stream(input=question, tool_choice="required", **asked) as events:
        (item,) = events.get_final_response().output
    assert item.type == "function_call"
    assert item.parsed_arguments == call.function.parsed_arguments
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "18 degrees"}
    history: list[Any] = [*question, item, result]
    answer = client.responses.parse(input=history, tool_choice="none", max_output_tokens=16, **asked)
    assert answer.output_text
    assert [item.type for item in answer.output] == ["message"]


def test_strict_tools_leave_free_text_as_it_is(client: openai.OpenAI) -> None:
    answers = []
    for strict in (False, True):
        tools = [{"type": "function", "function": TOOLS[1]["function"] | {"strict": strict}}]
        hello = [{"role": "user", "content": "Say hello."}]
        (choice,) = client.chat.completions.create(
            **ASK | {"messages": hello, "tools": tools, "max_tokens": 24}
        ).choices
        assert choice.message.tool_calls is None
        answers.append(choice.message.content)
    assert answers[0] == answers[1]


def test_what_no_grammar_can_say_is_refused_by_the_tools_name(client: openai.OpenAI) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": bad}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK | {"tools": tools}, tool_choice="required")
    assert caught.value.param == "tools"
    assert "uniqueItems" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, tool_choice={"type": "function", "function": {"name": "nowhere"}})
    assert caught.value.param == "tool_choice"
