"""Which fields are taken, what becomes of them, and which are refused by name."""

import contextlib
import functools
import gzip
import json
import re
import socket
import time
from types import NoneType, UnionType
from typing import Literal, Required, Union, get_args, get_origin, get_type_hints

import httpx
import pytest
from google.protobuf.json_format import MessageToDict
from jsonschema import Draft202012Validator
from openai.types import chat, responses, shared_params
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from openai.types.responses import response_input_param
from pydantic import ValidationError
from typing_extensions import is_typeddict

from gateway import constraints, responses_schema, schemas
from gateway.errors import ApiError
from gateway.openapi import openapi
from gateway.parse import parse
from gateway.responses_schema import ResponsesRequest
from gateway.schemas import ChatRequest, CompletionRequest

POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def post(http, gateway, path, body):
    return http.post(f"{gateway}{path}", json=body)


def error_of(answer, status=400):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def documented_fields(kit):
    return (kit.ROOT / "docs/api.md").read_text().partition("## Fields\n")[2].partition("### Tokenize")[0]


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_params.CompletionCreateParamsStreaming),
        (ResponsesRequest, response_params.ResponseCreateParamsStreaming),
    ],
)
def test_every_field_is_served_or_told(kit, kind, theirs):
    """Each field of OpenAI's, by its client, is known; it and every other known one are in the document."""
    known = kind.model_fields.keys() | kind.ignored | kind.unserved.keys()
    assert not theirs.__annotations__.keys() - known
    fields = documented_fields(kit)
    shared, _, of_responses = fields.partition("### Responses\n")
    own = of_responses if kind is ResponsesRequest else shared
    assert not [name for name in theirs.__annotations__ if f"`{name}`" not in own]
    assert not [name for name in known if f"`{name}`" not in fields]


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        (schemas.Message, chat.ChatCompletionDeveloperMessageParam),
        (schemas.Message, chat.ChatCompletionSystemMessageParam),
        (schemas.Message, chat.ChatCompletionUserMessageParam),
        (schemas.Message, chat.ChatCompletionAssistantMessageParam),
        (schemas.Message, chat.ChatCompletionToolMessageParam),
        (schemas.ContentPart, chat.ChatCompletionContentPartTextParam),
        (schemas.ToolCall, chat.ChatCompletionMessageFunctionToolCallParam),
        (schemas.Tool, chat.ChatCompletionFunctionToolParam),
        (schemas.Function, shared_params.FunctionDefinition),
        (schemas.NamedTool, chat.ChatCompletionNamedToolChoiceParam),
        (schemas.StreamOptions, chat.ChatCompletionStreamOptionsParam),
        (constraints.ResponseFormat, shared_params.ResponseFormatJSONSchema),
        (constraints.JsonSchema, shared_params.response_format_json_schema.JSONSchema),
        (responses_schema.InputMessage, responses.EasyInputMessageParam),
        (responses_schema.InputMessage, responses.ResponseOutputMessageParam),
        (responses_schema.Text, responses.ResponseInputTextParam),
        (responses_schema.Text, responses.ResponseOutputTextParam),
        (responses_schema.FunctionCall, responses.ResponseFunctionToolCallParam),
        (responses_schema.FunctionOutput, response_input_param.FunctionCallOutput),
        (responses_schema.Reasoning, responses.ResponseReasoningItemParam),
        (responses_schema.FunctionTool, responses.FunctionToolParam),
        (responses_schema.NamedFunction, responses.ToolChoiceFunctionParam),
        (responses_schema.ReasoningConfig, shared_params.Reasoning),
        (responses_schema.TextConfig, responses.ResponseTextConfigParam),
        (constraints.TextFormat, responses.ResponseFormatTextJSONSchemaConfigParam),
        (schemas.StreamOptions, response_params.StreamOptions),
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_field_within_a_field_is_served_or_told(kit, kind, theirs):
    """What is not known is a 400 by name, and the document says so."""
    known = {field.alias or name for name, field in kind.model_fields.items()}
    shared, _, of_responses = documented_fields(kit).partition("### Responses\n")
    own = of_responses if theirs.__module__.startswith("openai.types.responses") else shared
    for name in theirs.__annotations__.keys() - known:
        assert f"`{name}`" in own
        with pytest.raises(ValidationError) as caught:
            kind.model_validate({name: "x"})
        assert (name,) in [error["loc"] for error in caught.value.errors() if error["type"] == "extra_forbidden"]


@pytest.mark.parametrize("kind", [ChatRequest, ResponsesRequest])
def test_what_is_ignored_and_what_is_not_served_is_told_exactly(kit, kind):
    shared, _, of_responses = documented_fields(kit).partition("### Responses\n")
    if kind is ResponsesRequest:
        ignored, rows = of_responses.partition("\nIgnored: ")[2].partition(". 400")[::2]
    else:
        ignored, rows = shared.partition("they change nothing: ")[2].partition("### Not supported yet")[::2]
    assert set(re.findall("`([a-z_]+)`", ignored)) == kind.ignored
    told = {}
    for names, values in re.findall(r"^\| (`.*`) \| (`.*?) (?:\(.*\) )?\|$", rows, re.MULTILINE):
        taken = {json.dumps(json.loads(value)) for value in re.findall("`(.+?)`", values)} | {"null"}
        told |= dict.fromkeys(re.findall("`(.+?)`", names), taken)
    assert told == {name: {"null", *map(json.dumps, values)} for name, values in kind.unserved.items()}


PLAIN = {str: ("x",), int: (1,), float: (1.0,), bool: (True, False), NoneType: (None,), object: ("x",)}


def values(kind):
    """Of a type of OpenAI's client: one value for each alternative in it, of objects with one field more at a time."""
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        least = {name: next(values(hint)) for name, hint in hints.items() if get_origin(hint) is Required}
        yield least
        for name, hint in hints.items():
            yield from (least | {name: value} for value in values(hint) if (name, value) not in least.items())
    elif get_origin(kind) is Literal:
        yield from get_args(kind)
    elif get_origin(kind) in (Required, Union, UnionType):
        for each in get_args(kind):
            yield from values(each)
    elif get_origin(kind) is dict:
        yield {"7": next(values(get_args(kind)[1]))}
    elif get_args(kind):  # lists, by whatever name
        yield from ([value] for value in values(get_args(kind)[0]))
    else:
        yield from PLAIN[kind]


@pytest.mark.parametrize(
    ("kind", "theirs", "least", "refused"),
    [
        (
            ChatRequest,
            chat_params.CompletionCreateParamsStreaming,
            {"messages": [{"role": "user", "content": "x"}], "logprobs": True},
            {
                *("messages[0].audio", "messages[0].function_call", "messages[0].refusal"),
                *("messages[0].role", "messages[0].tool_calls[0].type"),  # function; custom
                *("response_format.json_schema.schema", "tool_choice.type", "tools[0].type"),
            },
        ),
        (CompletionRequest, completion_params.CompletionCreateParamsStreaming, {"prompt": "x"}, {"prompt"}),  # null
        (
            ResponsesRequest,
            response_params.ResponseCreateParamsStreaming,
            {"input": "x"},
            {
                *("input[0]", "input[0].role", "input[0].content[0].type"),
                *("input[0].async", "input[0].caller", "input[0].namespace"),
                *("input[0].call_id", "input[0].encrypted_content"),
                *("reasoning.context", "reasoning.generate_summary", "reasoning.mode", "reasoning.summary"),
                *("text.verbosity", "tool_choice.type", "tools[0].type"),
                *("tools[0].allowed_callers", "tools[0].async", "tools[0].defer_loading", "tools[0].output_schema"),
            },
        ),
    ],
    ids=["chat", "completion", "response"],
)
def test_whatever_the_clients_types_allow_is_served_or_refused_by_its_place(kind, theirs, least, refused):
    """All values of all fields: taken, or a 400 that names the field, as the document says of it.

    `refused` are the places within served fields. (Parts of messages that are no text are left to the engine.)
    /openapi.json allows the same.
    """
    described = Draft202012Validator({"$ref": f"#/components/schemas/{kind.__name__}", **openapi("1")})
    taken, faults = set(), []
    for name, hint in get_type_hints(theirs).items():
        for value in values(hint):
            body = least | {"stream": True, name: value}
            try:
                parse(kind, body)
            except ApiError as fault:
                faults.append((name, fault))
                assert not described.is_valid(body), body
            else:
                assert described.is_valid(body), body
                assert name not in kind.unserved or value in (None, *kind.unserved[name])
                taken |= {name} if value is not None else set()
    for name, fault in faults:
        assert (fault.status, re.split(r"[.\[]", fault.param)[0]) == (400, name)
        assert (fault.code == "unsupported_parameter") == (name in kind.unserved)
    assert {fault.param for _, fault in faults} - kind.unserved.keys() == refused
    assert theirs.__annotations__.keys() - taken <= kind.unserved.keys()


def test_nothing_asked_nothing_set(http, gateway, engine, kit):
    assert post(http, gateway, "/v1/chat/completions", kit.CHAT).status_code == 200
    assert MessageToDict(engine.calls[0].request, preserving_proto_field_name=True) == {
        "model": kit.MODEL,
        "chat": {"messages": [{"role": "user", "content": [{"text": "hi"}]}]},
        "sampling": {},
        "stopping": {},
        "output": {},
    }


@pytest.mark.parametrize(
    ("fields", "group", "wanted"),
    [
        ({"temperature": 0}, "sampling", {"temperature": 0.0}),
        ({"temperature": 0.5}, "sampling", {"temperature": 0.5}),
        ({"top_p": 1}, "sampling", {"top_p": 1.0}),
        ({"top_k": 0}, "sampling", {"top_k": 0}),
        ({"top_k": -1}, "sampling", {"top_k": 0}),
        ({"top_k": 40}, "sampling", {"top_k": 40}),
        ({"min_p": 0.25}, "sampling", {"min_p": 0.25}),
        ({"presence_penalty": -2}, "sampling", {"presence_penalty": -2.0}),
        ({"frequency_penalty": 2.0}, "sampling", {"frequency_penalty": 2.0}),
        ({"repetition_penalty": 1.5}, "sampling", {"repetition_penalty": 1.5}),
        ({"seed": 7}, "sampling", {"seed": "7"}),
        ({"seed": 0}, "sampling", {"seed": "0"}),
        ({"seed": -1}, "sampling", {"seed": "18446744073709551615"}),
        ({"seed": 2**63 - 1}, "sampling", {"seed": "9223372036854775807"}),
        ({"seed": -(2**63)}, "sampling", {"seed": "9223372036854775808"}),
        ({"logit_bias": {"5": -100, "7": 1}}, "sampling", {"logit_bias": {"5": -100.0, "7": 1.0}}),
        ({"max_tokens": 9}, "stopping", {"max_tokens": 9}),
        ({"min_tokens": 3}, "stopping", {"min_tokens": 3}),
        ({"stop": "a"}, "stopping", {"stop": ["a"]}),
        ({"stop": ["a", "b"]}, "stopping", {"stop": ["a", "b"]}),
        ({"stop": []}, "stopping", {}),
        ({"stop": None}, "stopping", {}),
        ({"stop_token_ids": [1, 2]}, "stopping", {"stop_token_ids": [1, 2]}),
        ({"ignore_eos": True}, "stopping", {"ignore_eos": True}),
        ({"ignore_eos": False}, "stopping", {"ignore_eos": False}),
        ({"include_stop_str_in_output": True}, "stopping", {"include_stop": True}),
        ({"skip_special_tokens": False}, "output", {"skip_special_tokens": False}),
        ({"n": 2}, None, {"n": 2}),
        ({"priority": -3}, None, {"priority": -3}),
        ({"cache_salt": "s"}, "cache", {"salt": "s"}),
        ({"speculative": False}, None, {"speculative": False}),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_shared_fields(http, gateway, engine, kit, path, fields, group, wanted):
    body = kit.CHAT if "chat" in path else {"prompt": "p", "max_tokens": None}
    answer = post(http, gateway, path, body | fields)
    assert answer.status_code == 200, answer.text
    sent = MessageToDict(engine.calls[0].request, preserving_proto_field_name=True)
    sent = sent if group is None else sent.get(group, {})
    if group == "stopping" and "max_tokens" not in fields:
        assert sent.pop("max_tokens", None) == (None if "chat" in path else 16)
    assert sent | wanted == sent
    assert group is None or set(sent) == set(wanted)


def test_max_completion_tokens_goes_before_max_tokens(http, gateway, engine, kit):
    post(http, gateway, "/v1/chat/completions", kit.CHAT | {"max_tokens": 5, "max_completion_tokens": 7})
    assert engine.calls[0].request.stopping.max_tokens == 7


def test_messages(http, gateway, engine, kit):
    function = {"name": "f", "arguments": '{"a": 1}'}
    call = {"id": "c1", "type": "function", "function": function | {"parsed_arguments": {"a": 1}}, "custom": None}
    messages = [
        {"role": "developer", "content": "be short", "name": "boss"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "text", "text": "b", "id": "lc_1", "cache_control": {"type": "ephemeral"}, "image_url": None},
                {"type": "text", "text": "c", "prompt_cache_breakpoint": {"mode": "explicit"}},
            ],
            "cache_control": {"type": "ephemeral"},
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "reasoning_content": "hm",
            "provider_specific_fields": {"reasoning": "hm"},  # LiteLLM
            # what the OpenAI client sends when a program appends an earlier answer
            "parsed": {"a": 1},
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
    ]
    options = {"chat_template_kwargs": {"b": 1, "a": "é"}, "add_generation_prompt": False}
    assert post(http, gateway, "/v1/chat/completions", {"messages": messages} | options).status_code == 200
    assert MessageToDict(engine.calls[0].request.chat, preserving_proto_field_name=True) == {
        "messages": [
            {"role": "developer", "content": [{"text": "be short"}], "name": "boss"},
            {"role": "user", "content": [{"text": "a"}, {"text": "b"}, {"text": "c"}]},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "name": "f", "arguments_json": '{"a": 1}'}],
                "reasoning": "hm",
            },
            {"role": "tool", "content": [{"text": "2"}], "tool_call_id": "c1"},
            {"role": "user", "content": [{"unsupported": "image_url"}]},
        ],
        "add_generation_prompt": False,
        "template_kwargs_json": '{"b": 1, "a": "é"}',
    }


@pytest.mark.parametrize(("asked", "sent"), [(None, False), (True, True), (False, False)])
def test_continuing_the_last_message_needs_no_second_field(http, gateway, engine, kit, asked, sent):
    body = kit.CHAT | {"continue_final_message": True, "add_generation_prompt": asked}
    post(http, gateway, "/v1/chat/completions", body)
    assert engine.calls[0].request.chat.continue_final_message is True
    assert engine.calls[0].request.chat.add_generation_prompt is sent


HARMLESS = [
    {"user": "u"},
    {"metadata": {"a": "b"}},
    {"store": False},
    {"service_tier": "auto"},
    {"service_tier": "default"},
    {"prompt_cache_key": "k"},
    {"prompt_cache_retention": "24h"},
    {"safety_identifier": "s"},
    {"response_format": {"type": "text"}},
    {"modalities": ["text"]},
    {"verbosity": "medium"},
    {"best_of": 1},
    {"suffix": None},
    {"guided_decoding_backend": None},
]


@pytest.mark.parametrize("fields", HARMLESS, ids=json.dumps)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_harmless_fields(http, gateway, engine, kit, path, fields):
    body = kit.CHAT if "chat" in path else {"prompt": "p"}
    assert post(http, gateway, path, body | fields).status_code == 200
    assert post(http, gateway, path, body | dict.fromkeys(fields)).status_code == 200


UNSERVED = [
    {"functions": [{"name": "f"}]},
    {"function_call": {"name": "f"}},
    {"best_of": 2},
    {"suffix": "s"},
    {"audio": {"voice": "alloy", "format": "wav"}},
    {"modalities": ["text", "audio"]},
    {"prediction": {"type": "content", "content": "x"}},
    {"verbosity": "low"},
    {"web_search_options": {}},
    {"store": True},
    {"service_tier": "flex"},
]


@pytest.mark.parametrize("fields", UNSERVED, ids=json.dumps)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_fields_that_are_not_served_yet(http, gateway, engine, kit, path, fields):
    body = kit.CHAT if "chat" in path else {"prompt": "p"}
    (name,) = fields
    error = error_of(post(http, gateway, path, body | fields))
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"
    assert "not supported yet" in error["message"]
    assert not engine.calls


BAD = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2**70}, "n"),
    ({"n": "2"}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**32}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [str(i) for i in range(1000)]}, "stop"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"4294967296": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias[1]"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"priority": 2**31}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern"),
    ({"temprature": 1}, "temprature"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bad_fields_are_named(http, gateway, engine, kit, path, fields, param):
    body = kit.CHAT if "chat" in path else {"prompt": "p"}
    error = error_of(post(http, gateway, path, body | fields))
    assert error["param"] == param
    assert param in error["message"]
    assert not engine.calls


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant"}, {"role": "tool", "tool_call_id": "a", "content": None}], "messages[1].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "x", "mood": 1}], "messages[1].mood"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_bad_messages_are_named(http, gateway, engine, messages, param):
    assert error_of(post(http, gateway, "/v1/chat/completions", {"messages": messages}))["param"] == param
    assert not engine.calls


def test_missing_messages_and_prompt(http, gateway):
    for path, name in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        error = error_of(post(http, gateway, path, {"model": "m"}))
        assert (error["param"], error["code"]) == (name, "missing_required_parameter")


def test_a_misspelt_name_is_told_before_what_is_missing(http, gateway, kit):
    error = error_of(post(http, gateway, "/v1/chat/completions", {"message": kit.CHAT["messages"]}))
    assert (error["param"], error["code"]) == ("message", "unknown_parameter")


def test_a_field_of_the_other_endpoint_is_unknown(http, gateway, kit):
    assert error_of(post(http, gateway, "/v1/chat/completions", kit.CHAT | {"echo": True}))["param"] == "echo"
    assert error_of(post(http, gateway, "/v1/completions", {"prompt": "p", "messages": []}))["param"] == "messages"
    body = {"prompt": "p", "max_completion_tokens": 5}
    assert error_of(post(http, gateway, "/v1/completions", body))["param"] == "max_completion_tokens"


def test_too_many_prompts(http, gateway, engine):
    assert error_of(post(http, gateway, "/v1/completions", {"prompt": ["p"] * 5}))["param"] == "prompt"
    assert not engine.calls


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"prompt": "p", "temperature": NaN}',
        b'{"prompt": "p", "temperature": Infinity}',
        b'{"prompt": "p", "temperature": -Infinity}',
        b'{"prompt": "p", "temperature": 1e999}',
        b'{"prompt": "p", "metadata": {"a": NaN}}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00x"}',
        b'{"prompt": "p", "metadata": {"a": "\\ud800"}}',
        b'{"\\ud800": 1, "prompt": "p"}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "p"} trailing',
        b"[" * 100_000,
        b'{"prompt":' * 50_000,
        b'{"prompt": "p\x01"}',
    ],
    ids=lambda body: repr(body[:40]),
)
def test_bodies_that_are_no_json(http, gateway, engine, body):
    answer = http.post(f"{gateway}/v1/completions", content=body, headers={"content-type": "application/json"})
    error_of(answer)
    assert not engine.calls
    assert http.post(f"{gateway}/v1/completions", json={"prompt": "p"}).status_code == 200


def test_a_surrogate_pair_is_a_character(http, gateway, engine):
    body = b'{"prompt": "\\ud83d\\ude00"}'
    http.post(f"{gateway}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert engine.calls[0].request.text == "😀"


def test_infinity_in_template_variables(http, gateway, engine):
    body = b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": 1e999}}'
    answer = http.post(f"{gateway}/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert error_of(answer)["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("text/plain", 400),
        ("application/x-www-form-urlencoded", 400),
        ("multipart/form-data; boundary=x", 400),
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        (None, 400),
    ],
)
def test_content_types(http, gateway, kind, status):
    headers = {} if kind is None else {"content-type": kind}
    answer = http.post(f"{gateway}/v1/completions", content=b'{"prompt": "p"}', headers=headers)
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["code"] == "invalid_content_type"


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_over_the_limit(http, gateway, engine, chunked):
    body = b'{"prompt": "' + b"x" * (1 << 20) + b'"}'
    content = (body[i : i + 65536] for i in range(0, len(body), 65536)) if chunked else body
    answer = http.post(f"{gateway}/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert not engine.calls


def test_a_compressed_body_is_refused_in_clear_words(http, gateway, kit):
    body = gzip.compress(json.dumps(kit.CHAT).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    error = error_of(http.post(f"{gateway}/v1/chat/completions", content=body, headers=headers))
    assert error["code"] == "invalid_encoding"
    assert "'gzip'" in error["message"]


@pytest.mark.parametrize("field", ["messages", "stop_token_ids"])
def test_of_many_faults_in_a_list_only_the_first_is_looked_for(field):
    body = {"messages": [{"role": "user", "content": "hi"}], field: [None] * 3}
    with pytest.raises(ValidationError) as found:
        ChatRequest.model_validate(body)
    assert [fault["loc"] for fault in found.value.errors()] == [(field, 0)]


def test_a_large_body_is_checked_too(http, gateway, engine, kit):
    """From 128 KiB on that is done in a thread."""
    ids = [7] * 100_000
    assert http.post(f"{gateway}/v1/completions", json={"prompt": ids}).status_code == 200
    assert list(engine.calls[-1].request.token_ids.ids) == ids
    bad = http.post(f"{gateway}/v1/completions", json={"prompt": ids, "top_p": 2})
    assert (bad.status_code, error_of(bad)["param"]) == (400, "top_p")


DEEP = 100_000


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [
        "[" * DEEP + "]" * DEEP,
        '{"a":' * DEEP + "1" + "}" * DEEP,
        '{"model": ' + "[" * DEEP + "]" * DEEP + "}",
        '{"messages": [{"role": "user", "content": ' + "[" * DEEP + "]" * DEEP + "}]}",
        '{"prompt": "p", "max_tokens": ' + "9" * 100_000 + "}",
        '{"prompt": "p", "temperature": 1e999999}',
        '{"prompt": "p", "seed": 1' + "0" * 400 + "}",
        '{"prompt": [1' + "0" * 30 + "]}",
        '{"prompt": [-1], "tokens": [-1]}',
        '{"prompt": [[4294967296]], "tokens": [4294967296]}',
    ],
    ids=lambda content: content[:40],
)
def test_bombs_are_refused(http, gateway, engine, path, content):
    """Depths and numbers that no request has, in a body within the limit: a 400 in time, and the gateway goes on."""
    answer = http.post(f"{gateway}{path}", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert len(answer.content) < 2000
    assert not engine.calls
    assert http.get(f"{gateway}/livez").status_code == 200


@pytest.mark.parametrize(
    "piece", [b"x-more: " + b"a" * 60_000 + b"\r\n", b"a" * 60_000], ids=["many headers", "one header"]
)
def test_headers_without_an_end_are_cut(http, gateway, piece):
    """Before any key is looked at; ordinary long ones pass."""
    host, port = gateway.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx-long: ")
        received = b""
        with contextlib.suppress(ConnectionError):
            for _ in range(200):  # 12 MB
                connection.sendall(piece)
        with contextlib.suppress(ConnectionError):
            received = connection.recv(4096)
        assert received.startswith(b"HTTP/1.1 431 ") or received == b""
        assert b"200" not in received
    assert http.get(f"{gateway}/livez", headers={"x-long": "a" * 30_000}).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer key-two"}], ids=["without a key", "with a key"])
@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"2\r\n{}\r\n0\r\n", b"x-more: " + b"a" * 60_000 + b"\r\n"),
        (b"2\r\n{}\r\n0\r\nx-more: ", b"a" * 60_000),
        (b"2;", b"a" * 60_000),
        (b"", b"0" * 60_000),
    ],
    ids=["many trailers", "one trailer", "an extension", "a size"],
)
def test_what_surrounds_a_body_is_bounded_too(http, guarded, headers, begin, piece):
    """The body is chunked; each piece would be kept, or read for ever."""
    place = httpx.URL(guarded.url)
    lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
    head = POST + b"transfer-encoding: chunked\r\n" + lines + b"\r\n"
    with socket.create_connection((place.host, place.port), timeout=20) as connection:
        connection.sendall(head + begin)
        with pytest.raises(ConnectionError):
            connection.sendall(piece * 1000)


def test_trailers_of_an_ordinary_body_are_ignored(http, gateway, engine):
    place = httpx.URL(gateway)
    body = b'd\r\n{"prompt":"a"\r\n1;ext=1\r\n}\r\n0\r\nx-request-id: trailer\r\n\r\n'
    head = POST + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    with socket.create_connection((place.host, place.port), timeout=20) as connection:
        connection.sendall(head + body)
        received = b"".join(iter(functools.partial(connection.recv, 4096), b""))
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b"trailer" not in received


def test_a_refused_request_s_body_is_not_read_for_ever(start_gateway, engine):
    with start_gateway(engines=[engine.address], api_keys=["k"], arrival_seconds=2) as url:
        place = httpx.URL(url)
        with socket.create_connection((place.host, place.port), timeout=20) as connection:
            connection.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
            assert connection.recv(13) == b"HTTP/1.1 401 "
            connection.settimeout(0.05)
            deadline = time.monotonic() + 30
            with contextlib.suppress(ConnectionError):
                while time.monotonic() < deadline:
                    connection.sendall(b"1\r\na\r\n")
                    with contextlib.suppress(TimeoutError):
                        if not connection.recv(4096):
                            break
            assert time.monotonic() < deadline, "the body is still taken"


def test_clients_that_do_not_go_on_are_let_go(start_gateway, engine):
    """Whether they have sent nothing, half of their headers or half of their body, they hold nothing for long."""
    begun = {b"": b"", POST: b"", POST + b"content-length: 9\r\n\r\n{": b"HTTP/1.1 408 "}
    with start_gateway(engines=[engine.address], arrival_seconds=2) as url, contextlib.ExitStack() as stack:
        place = httpx.URL(url)
        connections = [
            stack.enter_context(socket.create_connection((place.host, place.port), timeout=30)) for _ in begun
        ]
        for connection, sent in zip(connections, begun, strict=True):
            connection.sendall(sent)
        for connection, answer in zip(connections, begun.values(), strict=True):
            received = b"".join(iter(functools.partial(connection.recv, 4096), b""))  # to the connection's end
            assert received[:13] == answer
        assert b'"request_timeout"' in received


def test_an_upgrade_is_ignored(http, gateway, engine, kit):
    """Java's client offers h2c with its first request; a server may go on as if it had not (RFC 9110, 7.8)."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAEAAEAAAAIAAAABAAMAAABk"}
    body = kit.CHAT | {"user": "\r\nUpgrade: x"}
    answer = http.post(f"{gateway}/v1/chat/completions", json=body, headers=offer)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello world"


def test_an_upgrade_in_pieces_lets_no_request_hide_in_a_body(gateway, engine):
    """A proxy in front would have taken this for one request."""
    place = httpx.URL(gateway)
    hidden = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    pieces = [
        POST + b"connection: upgrade\r\nupgr",
        b"ade: h2c\r\ncontent-length: %d\r\n\r\n" % len(hidden),
        hidden,
    ]
    with socket.create_connection((place.host, place.port), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            with contextlib.suppress(ConnectionError):
                connection.sendall(piece)
            httpx.get(f"{gateway}/livez", timeout=20)  # the gateway has read the piece by now
        received = b""
        with contextlib.suppress(ConnectionError):
            received = b"".join(iter(functools.partial(connection.recv, 4096), b""))  # to the connection's end
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"tiny-model" not in received


def test_floods_are_refused_in_time(http, gateway, engine):
    """The first of many faults is told, soon; what is mapped is mapped once."""
    many = 40_000
    calls = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 8192
    messages = [{"role": "user", "content": "a"}]
    for path, body, param in (
        ("responses", {"input": "a", "include": ["x"] * many}, "include[0]"),
        ("responses", {"input": "a", "metadata": {"k" * 500_000: "v"}}, ("metadata." + "k" * 200)[:200]),
        ("chat/completions", {"messages": [messages[0] | {f"k{i}": 1 for i in range(many)}]}, "messages[0].k0"),
        (
            "chat/completions",
            {"messages": messages, "response_format": {"type": "text"} | {f"k{i}": 1 for i in range(many)}},
            "response_format.k0",
        ),
    ):
        answer = http.post(f"{gateway}/v1/{path}", json=body)
        assert answer.status_code == 400
        assert len(answer.content) < 2000
        assert error_of(answer)["param"] == param
    answer = http.post(f"{gateway}/v1/responses", json={"input": calls})
    assert answer.status_code == 200
    assert len(engine.calls[-1].request.chat.messages[0].tool_calls) == len(calls)


def test_every_field_of_the_description_is_known(http, gateway):
    description = http.get(f"{gateway}/openapi.json").json()
    for path, methods in description["paths"].items():
        if "post" in methods and path.startswith("/v1/"):
            kind = methods["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            for name in description["components"]["schemas"][kind]["properties"]:
                assert error_of(post(http, gateway, path, {name: {}}))["code"] != "unknown_parameter", (path, name)
