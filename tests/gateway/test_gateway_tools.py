"""Tools and reasoning through the real OpenAI client: what reaches the engine, what comes back, whole and streamed."""

import json

import grpc
import openai
import pytest
from google.protobuf.json_format import MessageToDict
from pydantic import BaseModel

from fulcrum.v1 import inference_pb2 as pb

PARAMETERS = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"enum": ["é", 12345678901234567890]}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Looks out.", "parameters": PARAMETERS, "strict": True},
    },
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="any", max_retries=0) as client:
        yield client


def ask(http, gateway, kit, **fields):
    return http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT | fields)


def test_tools_reach_the_engine(client, engine, kit):
    choice = {"type": "function", "function": {"name": "now"}}
    client.chat.completions.create(**kit.CHAT, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    chat = engine.calls[0].request.chat
    weather, now = chat.tools
    assert (weather.name, weather.description, weather.strict) == ("weather", "Looks out.", True)
    assert weather.parameters_json == json.dumps(PARAMETERS, ensure_ascii=False)
    assert now == pb.Tool(name="now")
    assert chat.tool_choice == pb.ToolChoice(function="now")
    assert chat.HasField("parallel_tool_calls")
    assert not chat.parallel_tool_calls


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"tool_choice": "none"}, {"tool_choice": {"mode": "MODE_NONE"}}),
        ({"tool_choice": "auto"}, {"tool_choice": {"mode": "MODE_AUTO"}}),
        ({"tool_choice": "required"}, {"tool_choice": {"mode": "MODE_REQUIRED"}}),
        ({"parallel_tool_calls": True}, {"parallel_tool_calls": True}),
        ({"tools": [], "tool_choice": None, "parallel_tool_calls": None}, {}),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {}, "strict": None},
                        "cache_control": {},
                    }
                ]
            },
            {"tools": [{"name": "f", "parameters_json": "{}"}]},
        ),
        ({"reasoning_effort": "low"}, {"template_kwargs_json": '{"reasoning_effort": "low"}'}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"a": 1, "reasoning_effort": "odd"}},
            {"template_kwargs_json": '{"reasoning_effort": "odd", "a": 1}'},
        ),
    ],
)
def test_fields(http, gateway, engine, kit, fields, sent):
    assert ask(http, gateway, kit, **fields).status_code == 200
    chat = MessageToDict(engine.calls[0].request.chat, preserving_proto_field_name=True)
    assert chat == {"messages": [{"role": "user", "content": [{"text": "hi"}]}]} | sent


def test_whole_answer(client, engine, kit):
    engine.script = kit.two_calls()
    (choice,) = client.chat.completions.create(**kit.CHAT, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.model_dump(exclude_unset=True) == {
        "role": "assistant",
        "content": "I ",
        "refusal": None,
        "reasoning_content": "Hm, é",
        "reasoning": "Hm, é",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"z": 1}'}},
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }


def test_streamed_answer(client, engine, kit):
    engine.script = kit.two_calls()
    chunks = [
        chunk.choices[0].model_dump(mode="json", exclude_unset=True)
        for chunk in client.chat.completions.create(**kit.CHAT, tools=TOOLS, stream=True)
    ]
    assert [chunk["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm", "reasoning": "Hm"},
        {
            "reasoning_content": ", é",
            "reasoning": ", é",
            "content": "I ",
            "tool_calls": [
                {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"z"'}}
            ],
        },
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": ": 1}"}},
                {"index": 1, "id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}},
            ]
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * 5 + ["tool_calls"]


def test_the_clients_own_accumulation_of_a_stream(client, engine, kit):
    """The client joins the pieces, and parses the arguments against the strict schema."""
    engine.script = kit.two_calls()
    with client.chat.completions.stream(**kit.CHAT, tools=[TOOLS[0]]) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("call_1", "weather", '{"z": 1}'),
        ("call_2", "now", "{}"),
    ]
    assert message.tool_calls[0].function.parsed_arguments == {"z": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_has_its_own_calls(client, engine, kit, stream):
    engine.script = kit.plays(
        kit.delta(index=1, calls=[(0, "call_b", "now", "{")]),
        kit.delta(reasoning="r"),
        kit.delta(index=1, calls=[(0, "", "", "}")]),
        kit.delta("t"),
        reasons=(pb.FINISH_REASON_STOP, pb.FINISH_REASON_TOOL_CALLS),
    )
    if not stream:
        one, two = client.chat.completions.create(**kit.CHAT, tools=TOOLS, n=2).choices
        assert (one.finish_reason, one.message.content, one.message.tool_calls) == ("stop", "t", None)
        assert one.message.reasoning_content == "r"
        assert (two.finish_reason, two.message.content) == ("tool_calls", None)
        assert two.message.tool_calls[0].function.arguments == "{}"
        assert "reasoning_content" not in two.message.model_dump()
        return
    arguments, ends = {0: "", 1: ""}, {}
    for chunk in client.chat.completions.create(**kit.CHAT, tools=TOOLS, n=2, stream=True):
        (choice,) = chunk.choices
        for call in choice.delta.tool_calls or ():
            arguments[choice.index] += call.function.arguments
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert (arguments, ends) == ({0: "", 1: "{}"}, {0: "stop", 1: "tool_calls"})


class Weather(BaseModel):
    city: str


@pytest.mark.parametrize("stream", [False, True])
def test_models_of_the_client(client, engine, kit, stream):
    """The client's helpers: a Pydantic model as a tool, and one as the answer's format."""
    pieces = [kit.delta(text='{"city": '), kit.delta(text='"Ulm"}'), kit.delta(calls=[(0, "c", "Weather", '{"city"')])]
    engine.script = kit.plays(*pieces, kit.delta(calls=[(0, "", "", ': "Bonn"}')]))
    asked = kit.CHAT | {"tools": [openai.pydantic_function_tool(Weather)], "response_format": Weather}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            answer = events.get_final_completion()
    else:
        answer = client.chat.completions.parse(**asked)
    message = answer.choices[0].message
    assert message.parsed == Weather(city="Ulm")
    assert message.tool_calls[0].function.parsed_arguments == Weather(city="Bonn")
    sent = engine.calls[0].request
    assert sent.chat.tools[0].strict
    for schema in (sent.json_schema, sent.chat.tools[0].parameters_json):
        assert json.loads(schema)["required"] == ["city"]


def test_an_answer_goes_back_as_it_came_with_the_tools_results(client, engine, kit):
    engine.script = kit.two_calls()
    message = client.chat.completions.create(**kit.CHAT, tools=TOOLS).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": call.function.name} for call in message.tool_calls]
    engine.script = kit.says("Done.")
    history = [*kit.CHAT["messages"], message, *results]
    answer = client.chat.completions.create(model=kit.MODEL, messages=history, tools=TOOLS)
    assert answer.choices[0].message.content == "Done."
    _, sent, first, second = engine.calls[1].request.chat.messages
    assert sent == pb.ChatMessage(
        role="assistant",
        content=[pb.ContentPart(text="I ")],
        reasoning="Hm, é",
        tool_calls=[
            pb.ToolCall(id="call_1", name="weather", arguments_json='{"z": 1}'),
            pb.ToolCall(id="call_2", name="now", arguments_json="{}"),
        ],
    )
    assert first == pb.ChatMessage(role="tool", tool_call_id="call_1", content=[pb.ContentPart(text="weather")])
    assert second.tool_call_id == "call_2"


def test_reasoning_goes_in_by_either_name(http, gateway, engine, kit):
    thought = [{"role": "assistant", "content": "a", name: name} for name in ("reasoning", "reasoning_content")]
    both = {"role": "assistant", "content": "a", "reasoning": "alias", "reasoning_content": "name"}
    assert ask(http, gateway, kit, messages=[*thought, both]).status_code == 200
    sent = [message.reasoning for message in engine.calls[0].request.chat.messages]
    assert sent == ["reasoning", "reasoning_content", "name"]


def test_tokens_of_a_chat_with_tools(http, gateway, engine, kit):
    body = {"messages": kit.CHAT["messages"], "tools": TOOLS, "tool_choice": "none"}
    body["add_special_tokens"] = False  # vLLM's default
    assert http.post(f"{gateway}/tokenize", json=body).json()["count"] == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "f"}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": 1}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        (
            {"tools": [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[2].function.parameters",
        ),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}}, "tool_choice.function.x"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_bad_fields_are_named(http, gateway, engine, kit, fields, param):
    answer = ask(http, gateway, kit, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not engine.calls


@pytest.mark.parametrize("field", ["tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"])
def test_text_completions_have_none_of_it(http, gateway, engine, field):
    answer = http.post(f"{gateway}/v1/completions", json={"prompt": "p", field: "none"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("chat.tools", "tools"),
        ("chat.tools[3]", "tools[3]"),
        ("chat.tools[3].name", "tools[3].function.name"),
        ("chat.tools[12].parameters_json", "tools[12].function.parameters"),
        ("chat.tool_choice", "tool_choice"),
    ],
)
@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "FAILED_PRECONDITION"])
def test_what_the_engine_refuses_is_named_as_in_http(http, gateway, engine, kit, field, param, code):
    engine.script = kit.refuses(getattr(grpc.StatusCode, code), "no", kit.violation(field))
    answer = ask(http, gateway, kit, tools=TOOLS, stream=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
