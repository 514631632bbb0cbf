"""The engine's statuses as HTTP errors and as events; unknown paths; what a stream's end looks like."""

import asyncio
import json

import grpc
import openai
import pytest
from starlette.requests import Request

from gateway.app import on_crash

Code = grpc.StatusCode
INVALID = "invalid_request_error"


ROWS = 28


def table(kit):
    """(status code, details, HTTP status, type, param, code, message shown)"""
    why, at, wait = kit.reason, kit.violation, kit.retry
    return [
        (Code.INVALID_ARGUMENT, [], 400, INVALID, None, None, "inner"),
        (Code.OUT_OF_RANGE, [], 400, INVALID, None, None, "inner"),
        (Code.FAILED_PRECONDITION, [], 400, INVALID, None, None, "inner"),
        (
            Code.INVALID_ARGUMENT,
            [why("CONTEXT_LENGTH_EXCEEDED"), at("stopping.max_tokens")],
            400,
            INVALID,
            "max_completion_tokens",
            "context_length_exceeded",
            "inner",
        ),
        (
            Code.INVALID_ARGUMENT,
            [why("CONTEXT_LENGTH_EXCEEDED")],
            400,
            INVALID,
            "messages",
            "context_length_exceeded",
            "inner",
        ),
        (
            Code.INVALID_ARGUMENT,
            [why("TEMPLATE_ERROR"), at("chat.messages")],
            400,
            INVALID,
            "messages",
            "template_error",
            "inner",
        ),
        (
            Code.INVALID_ARGUMENT,
            [why("INVALID_PARAMETER"), at("sampling.top_k")],
            400,
            INVALID,
            "top_k",
            "invalid_value",
            "Invalid 'top_k': bad",
        ),
        (
            Code.INVALID_ARGUMENT,
            [at("chat.messages[2].content[1]")],
            400,
            INVALID,
            "messages[2].content[1]",
            None,
            "inner",
        ),
        (
            Code.INVALID_ARGUMENT,
            [at("stopping.include_stop")],
            400,
            INVALID,
            "include_stop_str_in_output",
            None,
            "inner",
        ),
        (
            Code.INVALID_ARGUMENT,
            [at("chat.messages[1].tool_calls[0].arguments_json")],
            400,
            INVALID,
            "messages[1].tool_calls[0].function.arguments",
            None,
            "inner",
        ),
        (Code.INVALID_ARGUMENT, [at("chat.template_kwargs_json")], 400, INVALID, "chat_template_kwargs", None, "inner"),
        (Code.INVALID_ARGUMENT, [at("cache.salt")], 400, INVALID, "cache_salt", None, "inner"),
        (Code.UNAUTHENTICATED, [], 500, "server_error", None, "internal_error", None),
        (Code.PERMISSION_DENIED, [why("TENANT_FORBIDDEN")], 500, "server_error", None, "internal_error", None),
        (
            Code.PERMISSION_DENIED,
            [why("PRIORITY_TOO_HIGH"), at("priority")],
            403,
            "permission_error",
            "priority",
            "priority_too_high",
            "inner",
        ),
        (Code.NOT_FOUND, [why("MODEL_NOT_FOUND"), at("model")], 404, INVALID, "model", "model_not_found", "inner"),
        (
            Code.ALREADY_EXISTS,
            [why("DUPLICATE_REQUEST_ID")],
            409,
            "conflict_error",
            None,
            "duplicate_request_id",
            "inner",
        ),
        (Code.ABORTED, [], 409, "conflict_error", None, "aborted", "inner"),
        (Code.RESOURCE_EXHAUSTED, [why("QUEUE_FULL"), wait(7)], 429, "rate_limit_error", None, "queue_full", "inner"),
        (Code.RESOURCE_EXHAUSTED, [], 413, INVALID, None, "request_too_large", None),
        (Code.UNIMPLEMENTED, [why("NOT_IMPLEMENTED")], 501, "server_error", None, "not_implemented", "inner"),
        (Code.UNAVAILABLE, [why("DRAINING"), wait(1, 500)], 503, "server_error", None, "draining", "inner"),
        (Code.UNAVAILABLE, [], 503, "server_error", None, "unavailable", None),
        (Code.CANCELLED, [], 503, "server_error", None, "unavailable", None),
        (Code.DEADLINE_EXCEEDED, [], 504, "server_error", None, "timeout", None),
        (Code.INTERNAL, [why("SECRET")], 500, "server_error", None, "internal_error", None),
        (Code.UNKNOWN, [], 500, "server_error", None, "internal_error", None),
        (Code.DATA_LOSS, [], 500, "server_error", None, "internal_error", None),
    ]


@pytest.mark.parametrize("row", range(ROWS))
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(http, gateway, engine, kit, row, stream):
    code, details, status, type_, param, error_code, message = table(kit)[row]
    engine.script = kit.refuses(code, "inner", *details)
    body = kit.CHAT | {"stream": stream, "max_completion_tokens": 5}
    answer = http.post(f"{gateway}/v1/chat/completions", json=body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    (error,) = answer.json().values()
    shown = error.pop("message")
    assert error == {"type": type_, "param": param, "code": error_code}
    assert shown == message if message else "inner" not in shown
    retry_after = {"QUEUE_FULL": "7", "DRAINING": "2"}.get(
        details[0].reason if details and hasattr(details[0], "reason") else "", "1"
    )
    assert answer.headers.get("retry-after") == (retry_after if status in (429, 503) else None)


def test_the_table_is_whole(kit):
    assert len(table(kit)) == ROWS
    answered = {row[0] for row in table(kit)}
    assert answered == set(Code) - {Code.OK}


def test_details_that_are_none_change_nothing(http, gateway, engine, kit):
    async def script(request, context):
        await context.abort(Code.ABORTED, "inner", (("grpc-status-details-bin", b"\xff"),))
        yield

    engine.script = script
    answer = http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT)
    assert answer.status_code == 409
    assert answer.json()["error"]["message"] == "inner"


@pytest.mark.parametrize("row", range(ROWS))
def test_failures_after_the_first_byte(http, gateway, engine, kit, row):
    code, details, status, type_, _, error_code, _ = table(kit)[row]
    engine.script = kit.refuses(code, "inner", *details, after=[kit.accepted(), kit.started(), kit.delta("x")])
    body = kit.CHAT | {"stream": True, "max_completion_tokens": 5}
    answer = http.post(f"{gateway}/v1/chat/completions", json=body)
    assert answer.status_code == 200
    _, text, last = kit.events(answer.text)
    assert text["choices"][0]["delta"] == {"content": "x"}
    assert last["error"]["code"] == error_code
    assert last["error"]["type"] == type_
    assert "[DONE]" not in answer.text
    # not streamed: the same error as a refusal
    assert http.post(f"{gateway}/v1/chat/completions", json=body | {"stream": False}).status_code == status


def test_the_client_raises_on_an_error_event(gateway, engine, kit):
    engine.script = kit.refuses(Code.ABORTED, "by an operator", after=[kit.accepted(), kit.delta("x")])
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="any", max_retries=0) as client:
        seen = []
        stream = client.chat.completions.create(**kit.CHAT, stream=True)
        with pytest.raises(openai.APIError, match="by an operator") as caught:
            seen.extend(chunk.choices[0].delta.content for chunk in stream)
        assert seen == ["", "x"]
        assert caught.value.code == "aborted"


def test_the_client_does_not_send_again_what_an_operator_has_ended(gateway, engine, kit):
    engine.script = kit.refuses(Code.ABORTED, "by an operator", after=[kit.accepted(), kit.delta("x")])
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="any") as client:
        with pytest.raises(openai.ConflictError, match="by an operator"):
            client.chat.completions.create(**kit.CHAT)
        assert len(engine.calls) == 1
        with pytest.raises(openai.InternalServerError, match="not served") as caught:
            client.embeddings.create(model="any", input="x")
        assert caught.value.response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_s_exceptions(gateway, engine, kit, stream):
    cases = [
        (Code.INVALID_ARGUMENT, [kit.reason("CONTEXT_LENGTH_EXCEEDED")], openai.BadRequestError),
        (Code.NOT_FOUND, [kit.violation("model")], openai.NotFoundError),
        (Code.ALREADY_EXISTS, [], openai.ConflictError),
        (Code.RESOURCE_EXHAUSTED, [kit.reason("QUEUE_FULL")], openai.RateLimitError),
        (Code.INTERNAL, [], openai.InternalServerError),
    ]
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="any", max_retries=0) as client:
        for code, details, exception in cases:
            engine.script = kit.refuses(code, "no", *details)
            with pytest.raises(exception) as caught:
                client.chat.completions.create(**kit.CHAT, stream=stream)
            assert caught.value.body["message"]


@pytest.mark.parametrize("missing", ["finished", "usage", "everything", "reason", "order", "choice"])
def test_a_stream_that_ends_well_but_lacks_something_is_an_error(http, start_gateway, engine, kit, missing, tmp_path):
    async def script(request, context):
        yield kit.accepted()
        if missing == "everything":
            return
        yield kit.delta("x", 1 if missing == "choice" else 0)
        if missing != "finished":
            yield kit.finished(reason=0 if missing == "reason" else 1)
        if missing == "order":
            yield kit.delta("x")
        if missing != "usage":
            yield kit.usage()

    engine.script = script
    with start_gateway(engines=[engine.address]) as gateway:
        assert http.post(f"{gateway}/v1/responses", json={"input": "x"}).status_code == 500
        answer = http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT | {"stream": True})
        assert kit.events(answer.text)[-1]["error"]["code"] == "internal_error"
    assert (tmp_path / "gateway.log").read_text().count("the engine's stream for request r1 breaks the contract") == 2


def test_a_choice_that_a_prompt_lacks_is_not_the_next_prompt_s(http, gateway, engine, kit):
    told = asyncio.Event()

    async def script(request, context):
        yield kit.accepted()
        if request.text == "b":
            await told.wait()
        yield kit.delta("x", 1 if request.text == "a" else 0)
        yield kit.finished()
        yield kit.usage()
        told.set()

    engine.script = script
    assert http.post(f"{gateway}/v1/completions", json={"prompt": ["a", "b"]}).status_code == 500


async def test_a_fault_of_the_gateway_s_own_ends_its_connection():
    """The server closes it, so that the client must not send its next request on it."""
    request = Request({"type": "http", "state": {"request_id": "a"}})
    answer = await on_crash(request, ValueError())
    assert (answer.status_code, answer.headers["connection"], answer.headers["x-request-id"]) == (500, "close", "a")


def test_an_engine_that_does_not_accept_is_an_error(http, gateway, engine, kit):
    async def silent(request, context):
        return
        yield

    async def hasty(request, context):
        yield kit.delta("x")

    for script in (silent, hasty):
        engine.script = script
        answer = http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT | {"stream": True})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/page", 404, "unknown_url"),
        ("GET", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", "/docs", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/x", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_unknown_paths_and_methods(http, gateway, method, path, status, code):
    answer = http.request(method, f"{gateway}{path}")
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["type"] == INVALID
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/"])
def test_a_base_url_that_is_a_little_wrong_is_told_the_right_path(http, gateway, path):
    message = http.post(f"{gateway}{path}", json={}).json()["error"]["message"]
    assert message == f"There is no POST {path}: call /v1/chat/completions."


@pytest.mark.parametrize("path", ["/", "/v1/models/", "/v1/responses/"])
def test_a_long_path_does_not_come_back_whole(http, gateway, path):
    answer = http.get(f"{gateway}{path}{'x' * 60_000}")
    assert answer.status_code == 404
    assert "x" * 100 in answer.text
    assert len(answer.content) < 500


@pytest.mark.parametrize("stream", [False, True])
def test_deadlines(http, gateway, engine, kit, stream):
    engine.script = kit.hangs(kit.accepted(), kit.delta("x"))
    headers = {"x-request-timeout": "0.5"}
    answer = http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT | {"stream": stream}, headers=headers)
    # gRPC rounds the time that it sends up.
    assert 0 < engine.calls[0].time_remaining < 0.6
    if stream:
        assert answer.status_code == 200
        assert kit.events(answer.text)[-1]["error"]["code"] == "timeout"
    else:
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
    assert engine.calls[0].cancelled.wait(5)


def test_a_deadline_in_the_queue_is_a_status_also_when_streamed(http, gateway, engine, kit):
    engine.script = kit.hangs()
    headers = {"x-request-timeout": "0.3"}
    answer = http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT | {"stream": True}, headers=headers)
    assert answer.status_code == 504


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "", "1_0"])
def test_bad_timeouts(http, gateway, engine, kit, value):
    headers = {"x-request-timeout": value}
    answer = http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-request-timeout"
    assert not engine.calls


def test_the_gateway_s_own_limit_is_the_longest(http, gateway, engine, kit):
    http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT)
    http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT, headers={"x-request-timeout": "100000"})
    assert len(engine.calls) == 2
    # gRPC rounds what is left up on its way: a little more than 600 may arrive.
    assert all(590 < call.time_remaining < 601 for call in engine.calls)


def test_a_limit_of_centuries_is_none(http, start_gateway, engine, kit):
    """gRPC counts nanoseconds in 63 bits."""
    with start_gateway(engines=[engine.address], request_timeout=1e12) as url:
        assert http.post(f"{url}/v1/chat/completions", json=kit.CHAT).status_code == 200


def test_a_good_request_works_after_all_of_it(http, gateway, kit):
    answer = http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT)
    assert json.loads(answer.text)["choices"][0]["message"]["content"] == "Hello world"
