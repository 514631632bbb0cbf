"""The Responses API through the real OpenAI client: what reaches the engine, and the answer whole and as typed events.

Every event and answer is checked against the client's own models, which say what the API's fields are.
"""

import json

import grpc
import openai
import pytest
from google.protobuf.json_format import MessageToDict
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from fulcrum.v1 import inference_pb2 as pb

EVENT = TypeAdapter(ResponseStreamEvent)
URL = "/v1/responses"


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


@pytest.fixture
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="any", max_retries=0) as client:
        yield client


def events(answer):
    """The events of a stream, each valid by the client's models and named as its data says, numbered from 0 on."""
    found = []
    for block in answer.text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
            EVENT.validate_python(found[-1])
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


def sent(engine):
    return MessageToDict(engine.calls[-1].request, preserving_proto_field_name=True)


SCHEMA = {"type": "object", "properties": {"é": {"type": "null", "default": None}}}
FUNCTION = {"type": "function", "name": "weather", "description": "Looks out.", "parameters": SCHEMA, "strict": True}


def test_nothing_asked_nothing_set(client, engine, kit):
    answer = client.responses.create(model=kit.MODEL, input="hi")
    assert answer.output_text == "Hello world"
    assert sent(engine) == {
        "model": kit.MODEL,
        "chat": {"messages": [{"role": "user", "content": [{"text": "hi"}]}]},
        "sampling": {},
        "stopping": {},
        "output": {},
    }


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"max_output_tokens": 9}, {"stopping": {"max_tokens": 9}}),
        ({"temperature": 0.5, "top_p": 0.25}, {"sampling": {"temperature": 0.5, "top_p": 0.25}}),
        ({"extra_body": {"top_k": 5, "seed": 7}}, {"sampling": {"top_k": 5, "seed": "7"}}),
        ({"extra_body": {"stop": "a"}}, {"stopping": {"stop": ["a"]}}),
        ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"json_object": True}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
            {"json_schema": json.dumps(SCHEMA, ensure_ascii=False)},
        ),
        ({"extra_body": {"guided_regex": "a+"}}, {"regex": "a+"}),
    ],
)
def test_fields(client, engine, kit, fields, wanted):
    client.responses.create(model=kit.MODEL, input="hi", **fields)
    assert sent(engine) | wanted == sent(engine)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "weather"}},
            {
                "tools": [
                    {
                        "name": "weather",
                        "description": "Looks out.",
                        "parameters_json": json.dumps(SCHEMA, ensure_ascii=False),
                        "strict": True,
                    }
                ],
                "tool_choice": {"function": "weather"},
            },
        ),
        ({"tool_choice": "required"}, {"tool_choice": {"mode": "MODE_REQUIRED"}}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        (
            {"reasoning": {"effort": "low", "summary": "auto"}},
            {"template_kwargs_json": '{"reasoning_effort": "low"}'},
        ),
        ({"extra_body": {"chat_template_kwargs": {"a": "é"}}}, {"template_kwargs_json": '{"a": "é"}'}),
        (
            {"instructions": "be short"},
            {
                "messages": [
                    {"role": "system", "content": [{"text": "be short"}]},
                    {"role": "user", "content": [{"text": "hi"}]},
                ]
            },
        ),
    ],
)
def test_fields_of_the_chat(client, engine, kit, fields, wanted):
    client.responses.create(model=kit.MODEL, input="hi", **fields)
    assert sent(engine)["chat"] | wanted == sent(engine)["chat"]


ITEMS = [
    {"role": "developer", "content": "be short"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I", "annotations": [], "parsed": 1}],
        "phase": None,
    },
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}},
    {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}", "status": "completed", "async_": None},
    {"type": "function_call_output", "call_id": "c1", "output": "2", "name": "f"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
    {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "so"}], "encrypted_content": None},
    {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c3", "output": ""},
    {"role": "assistant", "content": "one"},
    {"role": "assistant", "content": "two"},
]


def test_items_become_messages(client, engine, kit):
    """An assistant's reasoning, text and calls are one message: that is what chat templates know."""
    client.responses.create(model=kit.MODEL, input=ITEMS)
    assert sent(engine)["chat"]["messages"] == [
        {"role": "developer", "content": [{"text": "be short"}]},
        {"role": "user", "content": [{"text": "a"}, {"text": "b"}]},
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": [{"text": "I"}],
            "tool_calls": [
                {"id": "c1", "name": "f", "arguments_json": '{"a": 1}'},
                {"id": "c2", "name": "g", "arguments_json": "{}"},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": [{"text": "2"}]},
        {"role": "tool", "tool_call_id": "c2", "content": [{"text": "3"}]},
        {
            "role": "assistant",
            "reasoning": "so",
            "tool_calls": [{"id": "c3", "name": "f", "arguments_json": "{}"}],
        },
        {"role": "tool", "tool_call_id": "c3", "content": [{"text": ""}]},
        {"role": "assistant", "content": [{"text": "one"}]},
        {"role": "assistant", "content": [{"text": "two"}]},
    ]


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("chat.messages[0]", "instructions"),
        ("chat.messages[2].content[1]", "input[1].content[1]"),
        ("chat.messages[3].content[0]", "input[3].content[0]"),
        ("chat.messages[3]", "input[2]"),
        ("chat.messages[3].tool_calls[1].arguments_json", "input[5].arguments"),
        ("chat.messages[5].content[0]", "input[7].output[0]"),
        ("chat.messages", "input"),
        ("chat", "input"),
        ("chat.tools[0].parameters_json", "tools[0].parameters"),
        ("chat.tools", "tools"),
        ("stopping.max_tokens", "max_output_tokens"),
        ("json_schema", "text.format.schema"),
    ],
)
def test_what_the_engine_refuses_is_named_as_in_http(client, engine, kit, field, param):
    engine.script = kit.refuses(grpc.StatusCode.INVALID_ARGUMENT, "no", kit.violation(field))
    form = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input=ITEMS, instructions="i", tools=[FUNCTION], text=form, stream=True)
    assert caught.value.param == param


def test_whole_answer(http, gateway, engine, kit):
    engine.script = kit.two_calls()
    asked = {
        "instructions": "i",
        "max_output_tokens": 50,
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high"},
        "top_p": 0.5,
    }
    answer = http.post(f"{gateway}{URL}", json={"input": "hi", "store": False, "user": "u"} | asked).json()
    Response.model_validate(answer)
    assert answer | asked | {"reasoning": {"effort": "high", "summary": None}} == answer
    assert (answer["id"], answer["object"], answer["status"]) == ("resp_r1", "response", "completed")
    assert (answer["model"], answer["store"], answer["error"], answer["incomplete_details"]) == (
        kit.MODEL,
        False,
        None,
        None,
    )
    assert answer["completed_at"] >= answer["created_at"]
    assert answer["output"] == [
        {
            "id": "rs_r1_0",
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm, é"}],
            "encrypted_content": None,
        },
        {
            "id": "msg_r1_1",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I ", "annotations": [], "logprobs": []}],
        },
        *(
            {
                "id": f"fc_r1_{index}",
                "type": "function_call",
                "status": "completed",
                "call_id": call_id,
                "name": name,
                "arguments": arguments,
            }
            for index, call_id, name, arguments in ((2, "call_1", "weather", '{"z": 1}'), (3, "call_2", "now", "{}"))
        ),
    ]
    assert answer["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 8,
    }


def test_order_of_a_stream(http, gateway, engine, kit):
    engine.script = kit.two_calls()
    stream = events(http.post(f"{gateway}{URL}", json={"input": "hi", "stream": True}))
    reasoning, text, call = "reasoning_text", "output_text", "function_call_arguments"
    assert [each["type"].removeprefix("response.") for each in stream] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", *[f"{reasoning}.delta"] * 2),
        *(f"{reasoning}.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", f"{text}.delta"),
        *(f"{text}.done", "content_part.done", "output_item.done"),
        *("output_item.added", *[f"{call}.delta"] * 2, f"{call}.done", "output_item.done"),
        *("output_item.added", f"{call}.delta", f"{call}.done", "output_item.done"),
        "completed",
    ]
    assert [each["response"]["status"] for each in (stream[0], stream[1], stream[-1])] == [
        "in_progress",
        "in_progress",
        "completed",
    ]
    assert stream[0]["response"]["output"] == []
    items = [each["item"] for each in stream if each["type"] == "response.output_item.done"]
    assert items == stream[-1]["response"]["output"]
    for index, item in enumerate(items):
        its = [each for each in stream if each.get("output_index") == index]
        assert {each.get("item_id", item["id"]) for each in its} == {item["id"]}
        joined = "".join(each["delta"] for each in its if each["type"].endswith(".delta"))
        assert joined == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    chat = http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT).json()
    assert chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    whole = http.post(f"{gateway}{URL}", json={"input": "hi"}).json()
    times = {"created_at": 0, "completed_at": 0}
    assert stream[-1]["response"] | times == whole | times


def test_texts_pass_unchanged(client, engine, kit):
    pieces = ['"\n\n', "data: x\n\nevent: y", "\u2028\x85", "👩‍👩‍👧", "\x00"]
    engine.script = kit.says(*pieces)
    stream = client.responses.create(model=kit.MODEL, input="hi", stream=True)
    assert [each.delta for each in stream if each.type == "response.output_text.delta"] == pieces


def test_the_stream_helper_gathers_the_answer(client, engine, kit):
    engine.script = kit.two_calls()
    with client.responses.stream(model=kit.MODEL, input="hi", tools=[FUNCTION]) as stream:
        snapshots = [each.snapshot for each in stream if each.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert snapshots == ['{"z"', '{"z": 1}', "{}"]
    assert final.output_text == "I "
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output[2].parsed_arguments == {"z": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_parsed_into_a_model(client, engine, kit, stream):
    engine.script = kit.says('{"city": "Ulm", ', '"degrees": 7}')
    asked = {"model": kit.MODEL, "input": "hi", "text_format": Weather}
    if stream:
        with client.responses.stream(**asked) as events:
            answer = events.get_final_response()
    else:
        answer = client.responses.parse(**asked)
    assert answer.output_parsed == Weather(city="Ulm", degrees=7)
    asked = json.loads(engine.calls[0].request.json_schema)
    assert (asked["required"], asked["additionalProperties"]) == (["city", "degrees"], False)
    history = [{"role": "user", "content": "hi"}, *answer.output, {"role": "user", "content": "again"}]
    client.responses.create(model=kit.MODEL, input=history)
    assert [each.role for each in engine.calls[1].request.chat.messages] == ["user", "assistant", "user"]


def test_a_tools_model_and_its_result(client, engine, kit):
    engine.script = kit.plays(
        kit.delta(reasoning="Hm", calls=[(0, "call_1", "Weather", '{"city": "Ulm", "degrees": 7}')]),
    )
    tools = [openai.pydantic_function_tool(Weather)]
    answer = client.responses.parse(model=kit.MODEL, input="hi", tools=tools)
    thought, call = answer.output
    assert call.parsed_arguments == Weather(city="Ulm", degrees=7)
    assert engine.calls[0].request.chat.tools[0].strict
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    client.responses.create(model=kit.MODEL, input=[{"role": "user", "content": "hi"}, thought, call, result])
    assert [MessageToDict(each) for each in engine.calls[1].request.chat.messages[1:]] == [
        {
            "role": "assistant",
            "reasoning": "Hm",
            "toolCalls": [{"id": "call_1", "name": "Weather", "argumentsJson": call.arguments}],
        },
        {"role": "tool", "toolCallId": "call_1", "content": [{"text": "sunny"}]},
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_the_limit_of_tokens_cuts_the_last_item(http, gateway, engine, kit, stream):
    engine.script = kit.plays(kit.delta(text="I ", calls=[(0, "c", "f", '{"a')]), reasons=[pb.FINISH_REASON_LENGTH])
    answer = http.post(f"{gateway}{URL}", json={"input": "hi", "stream": stream})
    last = events(answer)[-1] if stream else {"type": "response.incomplete", "response": answer.json()}
    assert last["type"] == "response.incomplete"
    response = last["response"]
    Response.model_validate(response)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["output"][1]["arguments"] == '{"a'
    assert response["usage"]["output_tokens"] == 3


def test_a_stream_that_breaks(http, gateway, engine, kit, client):
    engine.script = kit.refuses(
        grpc.StatusCode.ABORTED, "by an operator", after=[kit.accepted(), kit.started(), kit.delta("x")]
    )
    *_, done, error, failed = events(http.post(f"{gateway}{URL}", json={"input": "hi", "stream": True}))
    assert (done["type"], done["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert (error["type"], error["code"], error["message"]) == ("error", "aborted", "by an operator")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "by an operator"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "x"
    seen = [each.type for each in client.responses.create(model=kit.MODEL, input="hi", stream=True)]
    assert seen[-2:] == ["error", "response.failed"]
    assert http.post(f"{gateway}{URL}", json={"input": "hi"}).status_code == 409


def test_events_begin_on_accepted(http, gateway, engine, kit):
    engine.script = kit.hangs(kit.accepted())
    with http.stream("POST", f"{gateway}{URL}", json={"input": "hi", "stream": True}) as answer:
        assert next(answer.iter_text()).startswith("event: response.created\n")
        assert engine.calls
    assert engine.calls[0].cancelled.wait(5)


HARMLESS = [
    {"store": False},
    {"background": False},
    {"truncation": "disabled"},
    {"service_tier": "auto"},
    {"top_logprobs": 0},
    {"include": ["reasoning.encrypted_content"]},
    {"max_tool_calls": 3},
    {"prompt_cache_key": "k"},
    {"tools": []},
    {"stream_options": {"include_obfuscation": False}, "stream": True},
]


@pytest.mark.parametrize("fields", HARMLESS, ids=json.dumps)
def test_harmless_fields(http, gateway, engine, fields):
    assert http.post(f"{gateway}{URL}", json={"input": "hi"} | fields).status_code == 200
    nothing = {name: None for name in fields if name != "stream"}
    assert http.post(f"{gateway}{URL}", json={"input": "hi"} | nothing).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"store": True}, "store", "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"response_format": {"type": "text"}}, "response_format", "unsupported_parameter"),
        ({"messages": []}, "messages", "unknown_parameter"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["hi"]}, "input[0]", "invalid_value"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "invalid_value"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood", "unknown_parameter"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "input[0].content[0].type",
            "invalid_value",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0].type",
            "invalid_value",
        ),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "input[0].call_id",
            "missing_required_parameter",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "missing_required_parameter"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "invalid_value"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "invalid_value"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "invalid_value"),
        (
            {"text": {"format": {"type": "json_object"}}, "guided_regex": "a"},
            "guided_regex",
            "invalid_value",
        ),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "invalid_value"),
        ({"include": ["message.output_text.logits"]}, "include[0]", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_value"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ],
)
def test_bad_fields_are_named(http, gateway, engine, fields, param, code):
    answer = http.post(f"{gateway}{URL}", json={"input": "hi"} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert param in error["message"]
    assert not engine.calls


def test_nothing_is_stored(client):
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="not stored") as caught:
            call("resp_1")
        assert caught.value.code == "response_not_found"


def test_embeddings_are_not_implemented(client):
    with pytest.raises(openai.InternalServerError) as caught:
        client.embeddings.create(model="m", input="x")
    assert (caught.value.status_code, caught.value.code) == (501, "not_implemented")
