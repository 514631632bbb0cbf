"""Every bad request is refused before the stream opens, with its field named, and the next good one is answered."""

import json

import grpc
import pytest

from engine.limits import MAX_LISTED_IDS
from engine.request import FinishReason, RejectReason, RequestRejected
from fulcrum import limits
from fulcrum.v1 import inference_pb2 as pb

NAN, INF = float("nan"), float("inf")
S, T, O = pb.SamplingParams, pb.StoppingCriteria, pb.OutputOptions  # noqa: E741


def request(**fields):
    return pb.GenerateRequest(**({"token_ids": pb.TokenIds(ids=[1, 2, 3])} | fields))


def chat(*messages, **fields):
    made = [
        pb.ChatMessage(**({"role": "user", "content": [pb.ContentPart(text="hi")]} | message)) for message in messages
    ]
    return pb.Chat(messages=made, **fields)


def call_of(arguments):
    return pb.ToolCall(id="c", name="f", arguments_json=arguments)


BAD_FIELDS = {
    "no prompt": (pb.GenerateRequest(), "prompt"),
    "no token ids": (request(token_ids=pb.TokenIds()), "token_ids"),
    "empty text": (pb.GenerateRequest(text=""), "text"),
    "token id out of vocabulary": (request(token_ids=pb.TokenIds(ids=[1, 258])), "token_ids.ids[1]"),
    "huge token id": (request(token_ids=pb.TokenIds(ids=[2**32 - 1])), "token_ids.ids[0]"),
    "temperature NaN": (request(sampling=S(temperature=NAN)), "sampling.temperature"),
    "temperature infinite": (request(sampling=S(temperature=INF)), "sampling.temperature"),
    "temperature negative": (request(sampling=S(temperature=-0.1)), "sampling.temperature"),
    "temperature huge": (request(sampling=S(temperature=1e30)), "sampling.temperature"),
    "top_p zero": (request(sampling=S(top_p=0)), "sampling.top_p"),
    "top_p above 1": (request(sampling=S(top_p=1.01)), "sampling.top_p"),
    "top_p NaN": (request(sampling=S(top_p=NAN)), "sampling.top_p"),
    "min_p above 1": (request(sampling=S(min_p=1.5)), "sampling.min_p"),
    "min_p negative": (request(sampling=S(min_p=-1)), "sampling.min_p"),
    "presence_penalty": (request(sampling=S(presence_penalty=2.5)), "sampling.presence_penalty"),
    "frequency_penalty": (request(sampling=S(frequency_penalty=-INF)), "sampling.frequency_penalty"),
    "repetition_penalty zero": (request(sampling=S(repetition_penalty=0)), "sampling.repetition_penalty"),
    "repetition_penalty NaN": (request(sampling=S(repetition_penalty=NAN)), "sampling.repetition_penalty"),
    "bias of an unknown id": (request(sampling=S(logit_bias={258: 1.0})), "sampling.logit_bias[258]"),
    "bias NaN": (request(sampling=S(logit_bias={5: NAN})), "sampling.logit_bias[5]"),
    "bias too large": (request(sampling=S(logit_bias={5: 100.5})), "sampling.logit_bias[5]"),
    "n zero": (request(n=0), "n"),
    "n above 128": (request(n=129), "n"),
    "n huge": (request(n=2**32 - 1), "n"),
    "max_tokens zero": (request(stopping=T(max_tokens=0)), "stopping.max_tokens"),
    "min_tokens above max_tokens": (request(stopping=T(max_tokens=3, min_tokens=4)), "stopping.min_tokens"),
    "min_tokens above the window": (request(stopping=T(min_tokens=5000)), "stopping.min_tokens"),
    "1,000 stop strings": (request(stopping=T(stop=["x"] * 1000)), "stopping.stop"),
    "17 stop strings": (request(stopping=T(stop=[f"x{i}" for i in range(17)])), "stopping.stop"),
    "empty stop string": (request(stopping=T(stop=["a", ""])), "stopping.stop[1]"),
    "endless stop string": (request(stopping=T(stop=["a" * 1001])), "stopping.stop[0]"),
    "stop id out of vocabulary": (request(stopping=T(stop_token_ids=[7, 999])), "stopping.stop_token_ids[1]"),
    "top_logprobs above 20": (request(output=O(top_logprobs=21)), "output.top_logprobs"),
    "prompt_logprobs above 20": (request(output=O(prompt_logprobs=2**31)), "output.prompt_logprobs"),
    "max_tokens zero with logprobs": (
        request(stopping=T(max_tokens=0), output=O(top_logprobs=1)),
        "stopping.max_tokens",
    ),
    "long request id": (request(request_id="r" * 129), "request_id"),
    "request id with a line break": (request(request_id="r\nINFO all is well"), "request_id"),
    "long salt": (request(cache=pb.CacheOptions(salt="s" * 257)), "cache.salt"),
    "no messages": (pb.GenerateRequest(chat=pb.Chat()), "chat.messages"),
    "unknown role": (pb.GenerateRequest(chat=chat({}, {"role": "wizard"})), "chat.messages[1].role"),
    "image": (
        pb.GenerateRequest(
            chat=chat({"content": [pb.ContentPart(text="see"), pb.ContentPart(unsupported="image_url")]})
        ),
        "chat.messages[0].content[1]",
    ),
    "empty part": (pb.GenerateRequest(chat=chat({"content": [pb.ContentPart()]})), "chat.messages[0].content[0]"),
    "both continue and generation prompt": (
        pb.GenerateRequest(chat=chat({}, add_generation_prompt=True, continue_final_message=True)),
        "chat.continue_final_message",
    ),
    "template_kwargs no JSON": (
        pb.GenerateRequest(chat=chat({}, template_kwargs_json="{")),
        "chat.template_kwargs_json",
    ),
    "template_kwargs a list": (
        pb.GenerateRequest(chat=chat({}, template_kwargs_json="[]")),
        "chat.template_kwargs_json",
    ),
    "template_kwargs too deep": (
        pb.GenerateRequest(chat=chat({}, template_kwargs_json="[" * 100_000)),
        "chat.template_kwargs_json",
    ),
    "template_kwargs replaces messages": (
        pb.GenerateRequest(chat=chat({}, template_kwargs_json='{"messages": []}')),
        "chat.template_kwargs_json",
    ),
    "lone surrogate in template_kwargs": (
        pb.GenerateRequest(chat=chat({}, template_kwargs_json='{"extra": "\\ud800"}')),
        "chat.template_kwargs_json",
    ),
    "a number beyond all in template_kwargs": (
        pb.GenerateRequest(chat=chat({}, template_kwargs_json='{"extra": 1e999}')),
        "chat.template_kwargs_json",
    ),
    "arguments no JSON": (
        pb.GenerateRequest(chat=chat({}, {"role": "assistant", "tool_calls": [call_of("{,}")]})),
        "chat.messages[1].tool_calls[0].arguments_json",
    ),
    "2,049 parts": (
        pb.GenerateRequest(chat=chat({"content": [pb.ContentPart(text="x")] * 2049})),
        "chat.messages[0].content",
    ),
    "129 calls": (
        pb.GenerateRequest(chat=chat({"role": "assistant", "tool_calls": [call_of("{}")] * 129})),
        "chat.messages[0].tool_calls",
    ),
    "arguments of more than 256 KiB": (
        pb.GenerateRequest(chat=chat({"role": "assistant", "tool_calls": [call_of(f'{{"a": "{"x" * 262144}"}}')]})),
        "chat.messages[0].tool_calls[0].arguments_json",
    ),
    "template_kwargs of more than 64 KiB": (
        pb.GenerateRequest(chat=chat({}, template_kwargs_json=f'{{"a": "{"x" * 65536}"}}')),
        "chat.template_kwargs_json",
    ),
    "17 tools of 63 KiB": (
        pb.GenerateRequest(chat=chat({}, tools=[pb.Tool(name=f"f{i}", description="x" * 64_000) for i in range(17)])),
        "chat.tools",
    ),
    "1,025 choices": (request(choices=pb.Choices(choices=["x"] * 1025)), "choices"),
    "140,000 messages, which are not even read": (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * 140_000)),
        "chat.messages",
    ),
    "a user calls a tool": (
        pb.GenerateRequest(chat=chat({"tool_calls": [call_of("{}")]})),
        "chat.messages[0].tool_calls",
    ),
}  # fmt: skip


async def refused(call):
    try:
        async for _ in call:
            pytest.fail("the stream has opened")
    except grpc.aio.AioRpcError as error:
        return error
    pytest.fail("the call has ended OK")


async def answered(server):
    events = [event async for event in server.stub.Generate(request())]
    return events[-1].HasField("usage")


async def test_bad_fields_are_named(make_core, serving, details):
    core = make_core()
    core.reply = lambda request: [(0, [65], FinishReason.LENGTH)]
    async with serving(core) as server:
        for name, (bad, field) in BAD_FIELDS.items():
            error = details(await refused(server.stub.Generate(bad)))
            found = (error.code, error.reason, error.fields, error.domain)
            assert found == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER", [field], "fulcrum"), name
            assert field in error.message, name
        assert core.requests == []
        assert await answered(server)


async def test_messages_are_bounded_where_the_window_is_longer(make_core, serving, details):
    async with serving(make_core(max_model_len=10_000)) as server:
        error = details(await refused(server.stub.Generate(pb.GenerateRequest(chat=chat(*[{}] * 8193)))))
    assert (error.reason, error.fields) == ("INVALID_PARAMETER", ["chat.messages"])


async def test_every_bad_field_is_named_at_once(make_core, serving, details):
    async with serving(make_core()) as server:
        bad = request(n=0, sampling=S(temperature=3, top_p=2), stopping=T(stop=[""]))
        error = details(await refused(server.stub.Generate(bad)))
        assert set(error.fields) == {"n", "sampling.temperature", "sampling.top_p", "stopping.stop[0]"}


async def test_a_refusal_is_small_whatever_was_sent(make_core, serving, details):
    """Trailers are held to 8 KiB: a refusal that quotes its request would become RESOURCE_EXHAUSTED at the client."""
    async with serving(make_core()) as server:
        many = request(sampling=S(logit_bias=dict.fromkeys(range(250), 1e9)))
        assert len(details(await refused(server.stub.Generate(many))).fields) == 8
        error = details(await refused(server.stub.Generate(request(model="m" * 1_000_000))))
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        error = details(await refused(server.stub.Generate(request(model="\U0001f600" * 100_000))))
        assert error.reason == "MODEL_NOT_FOUND"
        role = pb.GenerateRequest(chat=chat(*[{"role": "\u20ac" * 100_000}] * 10))
        assert details(await refused(server.stub.Generate(role))).fields[0] == "chat.messages[0].role"


async def test_a_template_that_raises_is_the_callers_error(make_core, serving, details):
    async with serving(make_core()) as server:
        bad = chat({"content": [pb.ContentPart(text="raise")]})
        error = details(await refused(server.stub.Generate(pb.GenerateRequest(chat=bad))))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TEMPLATE_ERROR")
        assert error.fields == ["chat.messages"]
        assert "no such turn" in error.message
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Tokenize(pb.TokenizeRequest(chat=bad))
        assert details(caught.value).reason == "TEMPLATE_ERROR"


async def test_a_model_without_template_refuses_chats(make_core, serving, details, byte_model, tmp_path):
    folder = tmp_path / "plain"
    folder.mkdir()
    for file in byte_model.iterdir():
        text = file.read_text()
        if file.name == "tokenizer_config.json":
            text = json.dumps({key: value for key, value in json.loads(text).items() if key != "chat_template"})
        (folder / file.name).write_text(text)
    async with serving(make_core(), model=folder) as server:
        error = details(await refused(server.stub.Generate(pb.GenerateRequest(chat=chat({})))))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TEMPLATE_ERROR")
        assert not (await server.stub.GetModel(pb.GetModelRequest())).has_chat_template


async def test_tool_history_reaches_the_template(make_core, serving, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "={{ c.function.arguments.z }},{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }};{% endfor %}"
    )
    async with serving(make_core(), chat_template=template) as server:
        messages = chat(
            {},
            {"role": "assistant", "content": [], "tool_calls": [call_of('{"z": 12345678901234567890, "a": 1}')]},
            {"role": "tool", "tool_call_id": "c", "content": [pb.ContentPart(text="done")]},
        )
        reply = await server.stub.Tokenize(pb.TokenizeRequest(chat=messages))
        big = "12345678901234567890"
        assert b"".join(reply.token_bytes).decode() == (f'user:hi;assistant:f={big},{{"z": {big}, "a": 1}};tool:done;')


async def test_a_prompt_beyond_the_window(make_core, serving, details):
    async with serving(make_core(max_model_len=10)) as server:
        error = details(await refused(server.stub.Generate(request(token_ids=pb.TokenIds(ids=[1] * 10)))))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
        assert error.metadata == {"prompt_tokens": "10", "max_model_len": "10"}
        assert error.fields == ["token_ids"]
        error = details(await refused(server.stub.Generate(request(stopping=T(max_tokens=8)))))
        assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
        assert error.metadata == {"prompt_tokens": "3", "max_tokens": "8", "max_model_len": "10"}
        assert error.fields == ["stopping.max_tokens"]


async def test_a_text_of_many_windows_is_counted_and_not_tokenized(make_core, serving, details, monkeypatch):
    """Though its tokens might be long ones: 700 characters may be 59 tokens of the byte model, and are 700."""

    def encode(*_, **__):
        pytest.fail("it was tokenized")

    monkeypatch.setattr("service.tokenizer.Tokenizer.encode", encode)
    async with serving(make_core(max_model_len=100)) as server:
        error = details(await refused(server.stub.Generate(pb.GenerateRequest(text="x" * 700))))
    assert (error.reason, error.fields) == ("CONTEXT_LENGTH_EXCEEDED", ["text"])


@pytest.mark.parametrize("kind", ["text", "chat", "token_ids"])
async def test_what_no_window_can_hold_is_refused_without_the_work(make_core, serving, details, monkeypatch, kind):
    def encode(*_, **__):
        pytest.fail("it was tokenized")

    monkeypatch.setattr("service.tokenizer.Tokenizer.encode", encode)
    # The longest token is <|im_start|>, of 12 characters: 132 of them are 11 tokens at least.
    asked = {
        "text": pb.GenerateRequest(text="x" * 132),
        "chat": pb.GenerateRequest(chat=chat({"content": [pb.ContentPart(text="x" * 132)]})),
        "token_ids": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[999] * 11)),
    }[kind]
    async with serving(make_core(max_model_len=10)) as server:
        error = details(await refused(server.stub.Generate(asked)))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
    assert error.fields == [kind]
    assert error.metadata["max_model_len"] == "10"


async def test_lists_of_ids_are_bounded_and_a_bad_bias_is_named_by_its_token(make_core, serving, details):
    async with serving(make_core()) as server:
        many = request(stopping=T(stop_token_ids=[1] * 1025))
        assert details(await refused(server.stub.Generate(many))).fields == ["stopping.stop_token_ids"]
        many = request(sampling=S(logit_bias=dict.fromkeys(range(1025), 1.0)))
        assert details(await refused(server.stub.Generate(many))).fields[0] == "sampling.logit_bias"
        bias = request(sampling=S(logit_bias={3: 1.0, 258: 1.0}))
        assert details(await refused(server.stub.Generate(bias))).fields == ["sampling.logit_bias[258]"]


@pytest.mark.parametrize(
    ("reason", "code", "name", "retry_after"),
    [
        (RejectReason.TOO_LARGE, grpc.StatusCode.INVALID_ARGUMENT, "KV_EXHAUSTED", None),
        (RejectReason.INVALID, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER", None),
        (RejectReason.QUEUE_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", 1.0),
        (RejectReason.DRAINING, grpc.StatusCode.UNAVAILABLE, "DRAINING", 1.0),
        (RejectReason.DUPLICATE_ID, grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", None),
    ],
)
async def test_the_engines_refusals(make_core, serving, details, reason, code, name, retry_after):
    core = make_core()
    core.refuse_with = RequestRejected(reason, "the engine's own words")
    async with serving(core) as server:
        error = details(await refused(server.stub.Generate(request())))
        assert (error.code, error.reason, error.retry_after) == (code, name, retry_after)
        assert core.aborted == []


async def test_what_the_whole_pool_cannot_hold(make_core, serving, details):
    core = make_core(num_pages=2, max_model_len=100)  # 32 tokens
    core.reply = lambda request: [(0, [65], FinishReason.LENGTH)]
    async with serving(core) as server:
        assert await answered(server)
        assert core.requests[-1].params.max_tokens == 29  # a silent request gets what the pool holds
        core.refuse_with = RequestRejected(RejectReason.TOO_LARGE, "too large", "max_tokens")
        error = details(await refused(server.stub.Generate(request(stopping=T(max_tokens=30)))))
        assert (error.reason, error.fields) == ("KV_EXHAUSTED", ["stopping.max_tokens"])
        assert error.metadata == {"prompt_tokens": "3", "max_tokens": "30", "kv_tokens": "32"}


async def test_an_unknown_model_everywhere(make_core, serving, details):
    async with serving(make_core()) as server:
        assert details(await refused(server.stub.Generate(request(model="no")))).reason == "MODEL_NOT_FOUND"
        for call in (
            server.stub.Tokenize(pb.TokenizeRequest(model="no", text="a")),
            server.stub.Detokenize(pb.DetokenizeRequest(model="no")),
            server.stub.GetModel(pb.GetModelRequest(model="no")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            error = details(caught.value)
            assert (error.code, error.fields) == (grpc.StatusCode.NOT_FOUND, ["model"])


async def test_detokenize_refuses_ids_out_of_the_vocabulary_and_more_than_a_window(make_core, serving, details):
    async with serving(make_core(max_model_len=10)) as server:
        assert (await server.stub.Detokenize(pb.DetokenizeRequest(token_ids=[65] * 10))).text == "A" * 10
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Detokenize(pb.DetokenizeRequest(token_ids=[65] * 11))
        error = details(caught.value)
        assert (error.reason, error.fields) == ("CONTEXT_LENGTH_EXCEEDED", ["token_ids"])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 2, 258]))
        assert details(caught.value).fields == ["token_ids[2]"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Tokenize(pb.TokenizeRequest())
        assert details(caught.value).fields == ["prompt"]


async def test_bytes_that_are_no_message_are_the_callers_error(make_core, serving, details):
    """Such as a string with a lone surrogate, which no stub would send; grpc by itself would say UNKNOWN."""
    core = make_core()
    core.reply = lambda request: [(0, [65], FinishReason.LENGTH)]
    surrogate = b"\x1a\x03\xed\xa0\x80"  # GenerateRequest.text = U+D800
    async with serving(core) as server:
        for payload in (surrogate, b"\xff\xff\xff", b"\x1a\x7fshort"):
            call = server.channel.unary_stream("/fulcrum.v1.InferenceService/Generate")(payload)
            error = details(await refused(call))
            assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
        assert await answered(server)


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_a_message_that_does_not_come_is_waited_for_so_long(make_core, serving, details, monkeypatch, method):
    """Whoever stops in the midst of it, but answers pings, would be waited for without end by gRPC."""
    monkeypatch.setattr("service.guard._ARRIVAL_SECONDS", 0.1)
    async with serving(make_core()) as server:
        begin = server.channel.stream_stream(f"/fulcrum.v1.InferenceService/{method}")
        error = details(await refused(begin(timeout=20)))
        assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "REQUEST_TIMEOUT")
        assert error.message == "the message has not come within 0.1 s"
        monkeypatch.setattr("service.guard._ARRIVAL_SECONDS", 20.0)
        ended = begin(timeout=20)
        await ended.done_writing()  # without any
        assert details(await refused(ended)).reason == "MALFORMED_MESSAGE"


async def test_a_message_above_the_limit(make_core, serving):
    core = make_core()
    core.reply = lambda request: [(0, [65], FinishReason.LENGTH)]
    async with serving(core, max_message_bytes=1 << 20) as server:
        error = await refused(server.stub.Generate(pb.GenerateRequest(text="x" * (1 << 20))))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await answered(server)


async def test_the_unexpected_is_internal_and_says_nothing(make_core, serving, details, caplog):
    core = make_core()
    core.refuse_with = ZeroDivisionError("secret inner text")
    async with serving(core) as server:
        error = details(await refused(server.stub.Generate(request())))
        assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        assert "secret" not in error.message
        assert "secret inner text" in caplog.text


@pytest.mark.parametrize("text", ["root ::= root", 'root ::= "a" x\nx ::= x'], ids=["at once", "on the way"])
async def test_a_grammar_without_a_way_on_is_the_callers_fault(make_core, serving, details, text):
    core = make_core()
    core.reply = lambda request: [(0, [65], None), (0, [], FinishReason.GRAMMAR)]
    async with serving(core) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in server.stub.Generate(request(grammar=text)):
                pass
        error = details(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_GRAMMAR")
        assert error.fields == ["grammar"]


async def test_a_failed_step_is_internal(make_core, serving, details):
    core = make_core()
    core.reply = lambda request: [(0, [65], None), (0, [], FinishReason.ERROR)]
    async with serving(core) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in server.stub.Generate(request()):
                pass
        assert details(caught.value).reason == "STEP_FAILED"
        assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_priority_above_the_callers_limit(make_core, serving, details):
    core = make_core()
    core.reply = lambda request: [(0, [65], FinishReason.LENGTH)]
    async with serving(core, max_priority=3) as server:
        error = details(await refused(server.stub.Generate(request(priority=4))))
        assert (error.code, error.fields) == (grpc.StatusCode.PERMISSION_DENIED, ["priority"])
        for priority in (3, -5):
            assert [event async for event in server.stub.Generate(request(priority=priority))]
    async with serving(core, api_keys=("k",)) as server:
        metadata = (("authorization", "Bearer k"),)
        error = details(await refused(server.stub.Generate(request(priority=1), metadata=metadata)))
        assert error.code is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("rpc", ["Generate", "Tokenize"])
async def test_prompts_beyond_the_window_are_refused_before_they_are_tokenized(make_core, serving, details, rpc):
    """So that a body full of text, or of messages, costs little; the byte model's longest token has 12 bytes."""
    core = make_core(max_model_len=50)
    message = pb.ChatMessage(role="user", content=[pb.ContentPart(text="")])
    kind = {"Generate": pb.GenerateRequest, "Tokenize": pb.TokenizeRequest}[rpc]
    async with serving(core) as server:
        for fields in ({"text": "x" * 1_000_000}, {"chat": pb.Chat(messages=[message] * 51)}):
            call = getattr(server.stub, rpc)(kind(**fields))
            error = details(await refused(call) if rpc == "Generate" else await refused_unary(call))
            assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
        # What may be longer than the window, and is, can be counted.
        assert len((await server.stub.Tokenize(pb.TokenizeRequest(text="x" * 90))).token_ids) == 90


async def refused_unary(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize("wanted", [False, True])
async def test_requests_are_in_the_log_only_where_it_is_asked_for(make_core, serving, caplog, wanted):
    caplog.set_level("DEBUG")
    core = make_core(max_model_len=1 << 16)
    core.reply = lambda request: [(0, [65], FinishReason.LENGTH)]
    async with serving(core, log_requests=wanted) as server:
        text = "look\nfor me " + "x" * 30_000
        sent = pb.GenerateRequest(request_id="r1", text=text, stopping=pb.StoppingCriteria(max_tokens=5))
        assert [event async for event in server.stub.Generate(sent, metadata=(("authorization", "Bearer k"),))]
    assert ('"text": "look\\nfor me xxx' in caplog.text) == wanted
    assert max(map(len, caplog.messages)) < 16_384 + 100
    assert "Bearer" not in caplog.text
    assert "r1" in caplog.text


def test_the_engine_takes_as_many_ids_as_a_request_may_list():
    assert limits.LISTED_IDS == MAX_LISTED_IDS
