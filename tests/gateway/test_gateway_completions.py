"""Text completions: forms of the prompt, several prompts, echo."""

import asyncio
import itertools

import grpc
import openai
import pytest


@pytest.fixture
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def parrot(engine, kit):
    """Answers each prompt with its own text (token ids are code points) and the choice's index."""

    async def script(request, context):
        prompt = request.text or "".join(map(chr, request.token_ids.ids))
        yield kit.accepted(f"id-{prompt}")
        for index in range(request.n or 1):
            yield kit.delta(f"<{prompt}", index)
            yield kit.delta(f"{index}>", index)
        for index in range(request.n or 1):
            yield kit.finished(index)
        yield kit.usage(prompt=len(prompt), completion=2 * (request.n or 1), cached=1)

    engine.script = script
    return engine


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
@pytest.mark.parametrize("echo", [False, True])
def test_prompt_forms(client, parrot, prompt, texts, echo):
    answer = client.completions.create(model="m", prompt=prompt, n=2, echo=echo)
    wanted = [f"{text if echo else ''}<{text}{i}>" for text in texts for i in range(2)]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == list(range(2 * len(texts)))
    assert answer.id == f"cmpl-id-{texts[0]}"
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == len("".join(texts))
    assert answer.usage.completion_tokens == 4 * len(texts)
    assert answer.usage.prompt_tokens_details.cached_tokens == len(texts)
    kinds = {call.request.WhichOneof("prompt") for call in parrot.calls}
    assert kinds == {"text" if isinstance(prompt, str) or isinstance(prompt[0], str) else "token_ids"}

    joined = [""] * len(wanted)
    for chunk in client.completions.create(model="m", prompt=prompt, n=2, echo=echo, stream=True):
        joined[chunk.choices[0].index] += chunk.choices[0].text
    assert joined == wanted


def test_usage_of_several_prompts_is_one_chunk(client, parrot):
    stream = client.completions.create(
        model="m", prompt=["ab", "c"], stream=True, stream_options={"include_usage": True}
    )
    usages = [chunk.usage for chunk in stream if not chunk.choices]
    assert [(usage.prompt_tokens, usage.completion_tokens) for usage in usages] == [(3, 4)]


@pytest.mark.parametrize("stream", [False, True])
def test_one_refused_prompt_refuses_all(http, gateway, engine, kit, stream):

    good, bad = kit.hangs(kit.accepted()), kit.refuses(grpc.StatusCode.INVALID_ARGUMENT, "bad prompt")

    arrived = asyncio.Semaphore(0)

    async def script(request, context):
        arrived.release()
        for _ in range(3 if request.text == "bad" else 0):
            await arrived.acquire()
        async for event in (bad if request.text == "bad" else good)(request, context):
            yield event

    engine.script = script
    body = {"prompt": ["one", "two", "bad"], "stream": stream}
    answer = http.post(f"{gateway}/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "bad prompt (of prompt[2])"
    assert len(engine.calls) == 3
    kit.wait_until(lambda: all(call.cancelled.is_set() for call in engine.calls))


def test_one_failing_prompt_ends_the_stream_with_an_error(http, gateway, engine, kit):

    fails = kit.refuses(grpc.StatusCode.INTERNAL, "secret", after=[kit.accepted(), kit.delta("x")])
    other = kit.hangs(kit.accepted(), kit.delta("y"))

    async def script(request, context):
        async for event in (fails if request.text == "b" else other)(request, context):
            yield event

    engine.script = script
    answer = http.post(f"{gateway}/v1/completions", json={"prompt": ["a", "b"], "stream": True})
    assert answer.status_code == 200
    *_, last = kit.events(answer.text)
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    kit.wait_until(lambda: all(call.cancelled.is_set() for call in engine.calls))


@pytest.mark.parametrize("prompt", [[], [[]], [""] * 5, [1, "a"], ["a", [1]], [[1], 2], [-1], [2**32], [True], 5, None])
def test_bad_prompts(http, gateway, engine, prompt):
    answer = http.post(f"{gateway}/v1/completions", json={"prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert not engine.calls


@pytest.mark.parametrize(
    ("prompt", "field", "param"),
    [
        ([7], "token_ids[0]", "prompt[0]"),
        ([[5], [6, 7]], "token_ids[1]", "prompt[1][1]"),
        (["a", "\x07"], "text", "prompt[1]"),
        ("\x07", "text", "prompt"),
    ],
)
def test_echo_of_what_is_refused_names_it(http, gateway, engine, kit, monkeypatch, prompt, field, param):
    code = grpc.StatusCode.INVALID_ARGUMENT
    refusal = kit.status(code, "x", kit.reason("INVALID_PARAMETER"), kit.violation(field))
    looks = itertools.count(1)

    async def refuse_the_last(context):
        if next(looks) == (1 if len(prompt) == 1 else 2):
            await context.abort_with_status(refusal)

    monkeypatch.setattr(engine, "_maybe_fail", refuse_the_last)
    body = {"prompt": prompt, "echo": True} | ({"logprobs": 0} if field == "text" else {})
    answer = http.post(f"{gateway}/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert answer.json()["error"]["message"] == f"Invalid '{param}': bad"


def test_max_tokens_defaults_to_16(client, engine):
    client.completions.create(model="m", prompt="p")
    client.completions.create(model="m", prompt="p", max_tokens=None)
    client.completions.create(model="m", prompt="p", max_tokens=5)
    assert [call.request.stopping.max_tokens for call in engine.calls] == [16, 16, 5]


@pytest.mark.parametrize(
    ("field", "prompts", "param", "ending"),
    [
        ("text", ["a", "b", "c"], "prompt[2]", "Invalid 'prompt[2]': bad"),
        ("token_ids.ids[1]", [[97], [98], [99, 1]], "prompt[2][1]", "Invalid 'prompt[2][1]': bad"),
        ("sampling.top_p", ["a", "b", "c"], "top_p", "Invalid 'top_p': bad (of prompt[2])"),
        ("text", ["c"], "prompt", "Invalid 'prompt': bad"),
    ],
)
def test_the_refused_prompt_of_several_is_named(http, gateway, engine, kit, field, prompts, param, ending):
    says = kit.says("fine")
    refuses = kit.refuses(grpc.StatusCode.INVALID_ARGUMENT, "no", kit.reason("INVALID_PARAMETER"), kit.violation(field))
    engine.script = lambda request, context: (refuses if request.text == "c" or 99 in request.token_ids.ids else says)(
        request, context
    )
    answer = http.post(f"{gateway}/v1/completions", json={"prompt": prompts})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == (param, ending)
