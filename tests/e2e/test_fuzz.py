"""Whatever is sent, over HTTP and over gRPC: an answer or a clear refusal, never a fault of the server, never a hang.

`make fuzz` sends much more: FUZZ_EXAMPLES requests to each method, of the seed FUZZ_SEED.
"""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import schemathesis
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from fulcrum.v1 import inference_pb2 as pb

SEED = int(os.environ.get("FUZZ_SEED", "1"))
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "15"))
SECONDS = 30.0
MODEL = "smollm2"  # what the fixture calls whatever it serves
bounded = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def fuzzed(
    serve_model: Callable[..., Any], tiny_model: Path, tool_template: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A tiny random model with a pool of 64 pages: what is asked for may be too much for it."""
    log = tmp_path_factory.mktemp("fuzz") / "stderr.log"
    flags = ("--load-format", "dummy", "--memory-budget", "512KiB", "--max-model-len", "256", "--request-timeout", "20")
    flags += ("--chat-template", str(tool_template), "--tool-parser", "hermes", "--speculative", "ngram")
    with serve_model(tiny_model, log, *flags) as addresses:
        yield addresses
    told = log.read_text()
    assert "Traceback" not in told, told[-4000:]


POSTS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"]
OPERATIONS = [
    *(pytest.param("POST", path, GenerationMode.POSITIVE, id=f"{path}-valid") for path in POSTS),
    *(pytest.param("POST", path, GenerationMode.NEGATIVE, id=f"{path}-invalid") for path in POSTS),
    pytest.param("GET", "/v1/models/{id}", GenerationMode.POSITIVE, id="/v1/models/{id}"),
]


def whole(value: Any) -> Any:
    """The same with 1 for 1.0, which is an integer too for JSON Schema alone."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {key: whole(each) for key, each in value.items()}
        case list():
            return list(map(whole, value))
    return value


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_http(fuzzed: Any, method: str, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{fuzzed.http}/openapi.json")

    @seed(SEED)
    @bounded
    @given(
        case=schema[path][method].as_strategy(generation_mode=mode),
        prompt=st.sampled_from([None, "x", ["x", "yz"], [1, 2], [[1], [2, 3]]]),
    )
    def send(case: Any, prompt: Any) -> None:
        if prompt is not None and isinstance(case.body, dict):  # more of it is as it should be
            case.body = whole(case.body) | {"model": MODEL} | ({"prompt": prompt} if path == "/v1/completions" else {})
        response = case.call(timeout=SECONDS)
        assert response.status_code < 500 or response.status_code in (501, 504), (response.status_code, response.text)
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["message"]
        elif "text/event-stream" in str(response.headers["content-type"]):
            assert '"internal_error"' not in response.text
        else:
            response.json()

    send()


NUMBERS = {
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([0, 1, 2, 3, 16, 64, 255, 257, 2**31, 2**32 - 1]),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from([0, 1, 2**63, 2**64 - 1]),
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31)]),
    FieldDescriptor.CPPTYPE_FLOAT: st.sampled_from([0, 0.5, 1, 2, -1, 1e-30, 3e38, math.inf, -math.inf, math.nan]),
    FieldDescriptor.CPPTYPE_DOUBLE: st.sampled_from([0, 0.1, 1, -1, 1e300, math.inf, math.nan]),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.sampled_from([0, 1, 2, 3, 99, -1]),
}
TEXTS = st.one_of(
    st.sampled_from(["", "x", "user", "assistant", "tool", "\0", "\ud7ff\U0010ffff", "x" * 5000, "{{ 1 }}"]),
    st.sampled_from(["{}", "[]", "null", '{"type": "object"}', '{"type": "array", "items": {"$ref": "#"}}']),
    st.sampled_from(["(a+)+b", "[", "root ::= root", 'root ::= "a" | "b"']),
    st.text(max_size=20),
)


@st.composite
def messages(draw: st.DrawFn, kind: type[Message], eighths: int = 6, depth: int = 0) -> Message:
    """Any message of the kind: each field is set, to values at the edges of what it may hold, in so many eighths."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if draw(st.integers(0, 7)) >= eighths or depth > 4:
            continue
        of_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
        if of_message and field.message_type.GetOptions().map_entry:
            parts = field.message_type.fields_by_name
            key, value = (draw(_scalar(parts[name])) for name in ("key", "value"))
            getattr(message, field.name)[key] = value
        elif field.is_repeated:
            values = _part(field, eighths, depth) if of_message else _scalar(field)
            getattr(message, field.name).extend(draw(st.lists(values, max_size=3)))
        elif of_message:
            getattr(message, field.name).CopyFrom(draw(_part(field, eighths, depth)))
        else:
            setattr(message, field.name, draw(_scalar(field)))
    return message


def _part(field: FieldDescriptor, eighths: int, depth: int) -> st.SearchStrategy[Message]:
    return messages(GetMessageClass(field.message_type), eighths, depth + 1)


# What is taken by itself: some of it is then set to anything.
TAKEN = {
    "GenerateRequest": pb.GenerateRequest(text="x", stopping=pb.StoppingCriteria(max_tokens=5)),
    "TokenizeRequest": pb.TokenizeRequest(text="x"),
    "DetokenizeRequest": pb.DetokenizeRequest(token_ids=[120]),
}


@st.composite
def requests(draw: st.DrawFn, kind: type[Message]) -> Message:
    """As good as anything, or a good one with some fields at the edges."""
    if draw(st.booleans()):
        return draw(messages(kind))
    request = kind()
    request.MergeFrom(TAKEN.get(kind.DESCRIPTOR.name, request))
    request.MergeFrom(draw(messages(kind, eighths=1)))
    return request


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return TEXTS if field.type == FieldDescriptor.TYPE_STRING else st.binary(max_size=20)
    return NUMBERS[field.cpp_type]


FAULTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED)
SERVICES = pb.DESCRIPTOR.services_by_name
METHODS = [
    (service, method.name)
    for service in SERVICES
    for method in SERVICES[service].methods
    if method.name != "Drain"  # which ends the server
]


@pytest.mark.parametrize(("service", "name"), METHODS)
def test_grpc(fuzzed: Any, service: str, name: str) -> None:
    method = SERVICES[service].methods_by_name[name]
    path = f"/{SERVICES[service].full_name}/{name}"
    kind = GetMessageClass(method.input_type)
    with grpc.insecure_channel(fuzzed.grpc if service == "InferenceService" else fuzzed.admin) as channel:
        call = channel.unary_stream if method.server_streaming else channel.unary_unary

        def send(payload: bytes) -> None:
            code, details = grpc.StatusCode.OK, ""
            try:
                answer = call(path, request_serializer=None, response_deserializer=None)(payload, timeout=SECONDS)
                if method.server_streaming:
                    _ = next(answer) if name == "WatchStats" else list(answer)
            except grpc.RpcError as error:
                code, details = error.code(), error.details()
            assert code not in FAULTS, (code, details)

        @seed(SEED)
        @bounded
        @given(request=requests(kind), known=st.booleans())
        def send_message(request: Any, known: bool) -> None:
            if known and hasattr(request, "model"):
                request.model = MODEL
            send(request.SerializeToString())

        @seed(SEED)
        @bounded
        @given(payload=st.binary(min_size=1, max_size=60))
        def send_bytes(payload: bytes) -> None:
            send(payload)

        send_message()
        send_bytes()


def test_nothing_is_left(fuzzed: Any) -> None:
    """After all of the above (or alone): no request lives, every page is free or cached, and a chat is answered."""
    with grpc.insecure_channel(fuzzed.admin) as channel:
        from fulcrum.v1.inference_pb2_grpc import AdminServiceStub

        for reply in AdminServiceStub(channel).WatchStats(pb.WatchStatsRequest(interval_seconds=0.1), timeout=SECONDS):
            if reply.stats.live_requests == 0:
                assert reply.stats.used_pages == 0
                assert reply.stats.free_pages + reply.stats.cached_pages == reply.stats.total_pages
                break
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    assert httpx.post(f"{fuzzed.http}/v1/chat/completions", json=body, timeout=SECONDS).status_code == 200
