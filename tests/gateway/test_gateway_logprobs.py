"""Logprobs over HTTP, as OpenAI's client reads them; the engine is scripted, offsets are counted by hand."""

import math
import time

import openai
import pytest

from fulcrum.v1 import inference_pb2 as pb
from gateway.logprobs import ContentTokens, TextLogprobs

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
ASKED = {"model": "m", "input": "hi", "include": ["message.output_text.logprobs"]}
MESSAGES = [{"role": "user", "content": "hi"}]
SPLIT = "\u2192".encode()  # an arrow: three bytes


@pytest.fixture
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="any", max_retries=0) as client:
        yield client


def token(raw, logprob=-0.5, *top, hidden=False, number=7):
    others = [pb.TopLogprob(token_id=at, logprob=value, bytes=one) for at, (one, value) in enumerate(top)]
    return pb.TokenLogprob(token_id=number, logprob=logprob, bytes=raw, top=others, hidden=hidden)


# What the engine says: a split character, held-back text, an impossible token, the end.
ANSWER = [
    token(b" a", -0.25, (b" a", -0.25), (b" b", -1.5)),
    token(SPLIT[:1], -2.0, (b"x", -0.5), (SPLIT[:1], -2.0)),
    token(SPLIT[1:], -math.inf, (b"y", -0.125), (b"z", -3.0)),
    token(b"!", -0.75, (b"!", -0.75), (b"?", -1.0)),
    token(b"<|im_end|>", -0.0625, (b"<|im_end|>", -0.0625), (b"!", -4.0), hidden=True),
]
PROMPT = [token(b"\xc3\xa9", -1.25, (b"e", -0.5), number=8), token(b"t", -0.5, (b"t", -0.5), number=9)]
DELTAS = [(" a", ANSWER[:1]), ("", ANSWER[1:2]), ("\u2192", ANSWER[2:3]), ("!", ANSWER[3:])]


@pytest.fixture
def scripted(engine, kit):
    """Answers as above, for each of n choices; a prompt's logprobs in pieces where they are asked for."""

    async def script(request, context):
        yield kit.accepted()
        yield kit.started(prompt=3)
        if request.output.HasField("prompt_logprobs"):
            for at, one in enumerate(PROMPT, 1):
                yield pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(offset=at, tokens=[one]))
        alone = request.stopping.HasField("max_tokens") and not request.stopping.max_tokens
        for text, logprobs in [] if alone else DELTAS:
            for index in range(request.n or 1):
                said = logprobs if request.output.HasField("top_logprobs") else []
                if text or said:
                    yield pb.GenerateResponse(delta=pb.Delta(index=index, text=text, logprobs=said))
        for index in range(request.n or 1):
            yield kit.finished(index)
        yield kit.usage()

    engine.script = script
    return engine


def test_chat(client, scripted):
    answer = client.chat.completions.create(model="m", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2)
    assert scripted.calls[0].request.output.top_logprobs == 2
    for choice in answer.choices:
        assert choice.message.content == " a\u2192!"
        content = choice.logprobs.content
        assert [one.token for one in content] == [" a", "\\xe2", "\\x86\\x92", "!", "<|im_end|>"]
        assert [bytes(one.bytes) for one in content] == [one.bytes for one in ANSWER]
        assert [one.logprob for one in content] == [-0.25, -2.0, -9999.0, -0.75, -0.0625]
        assert [[(each.token, each.logprob) for each in one.top_logprobs] for one in content[:2]] == [
            [(" a", -0.25), (" b", -1.5)],
            [("x", -0.5), ("\\xe2", -2.0)],
        ]
        assert choice.logprobs.refusal is None

    pieces = {0: [], 1: []}
    with client.chat.completions.create(
        model="m", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, stream=True
    ) as stream:
        for chunk in stream:
            [choice] = chunk.choices
            if choice.logprobs is not None:
                pieces[choice.index] += choice.logprobs.content
    assert pieces == {choice.index: choice.logprobs.content for choice in answer.choices}


def test_chat_without_others(client, scripted, http, gateway):
    """logprobs alone asks for the tokens' own; without it nothing is asked for, and nothing is told."""
    client.chat.completions.create(model="m", messages=MESSAGES, logprobs=True)
    assert scripted.calls[-1].request.output == pb.OutputOptions(top_logprobs=0)
    for fields in ({}, {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}, {"logprobs": None}):
        answer = http.post(f"{gateway}{CHAT}", json={"messages": MESSAGES, **fields}).json()
        assert answer["choices"][0]["logprobs"] is None
        assert scripted.calls[-1].request.output == pb.OutputOptions()


@pytest.mark.parametrize("prompt", ["n\u00e9t", [110, 233, 116]])
@pytest.mark.parametrize("echo", [False, True])
def test_text(client, scripted, prompt, echo):
    """Offsets are characters of the whole text: what is split begins with its character, what is hidden takes none."""
    answer = client.completions.create(model="m", prompt=prompt, n=2, logprobs=1, echo=echo)
    output = scripted.calls[0].request.output
    assert output == pb.OutputOptions(top_logprobs=1, prompt_logprobs=1 if echo else None)
    shift = 3 if echo else 0
    for choice in answer.choices:
        assert choice.text == "n\u00e9t"[:shift] + " a\u2192!"
        logprobs = choice.logprobs
        of_prompt = [None, -1.25, -0.5][:shift]
        words = ["n", "\u00e9", "t"][:shift]
        assert logprobs.tokens == [*words, " a", "bytes:\\xe2", "bytes:\\x86\\x92", "!", "<|im_end|>"]
        assert logprobs.token_logprobs == [*of_prompt, -0.25, -2.0, -9999.0, -0.75, -0.0625]
        assert logprobs.text_offset == [0, 1, 2][:shift] + [shift + at for at in (0, 2, 2, 3, 4)]
        assert logprobs.top_logprobs == [
            *[None, {"e": -0.5, "\u00e9": -1.25}, {"t": -0.5}][:shift],
            {" a": -0.25},
            {"x": -0.5, "bytes:\\xe2": -2.0},
            {"y": -0.125, "bytes:\\x86\\x92": -9999.0},
            {"!": -0.75},
            {"<|im_end|>": -0.0625},
        ]

    texts, told = ["", ""], [{}, {}]
    with client.completions.create(model="m", prompt=prompt, n=2, logprobs=1, echo=echo, stream=True) as stream:
        for chunk in stream:
            [choice] = chunk.choices
            texts[choice.index] += choice.text
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                told[choice.index].setdefault(name, []).extend(values)
    assert texts == [choice.text for choice in answer.choices]
    assert told == [choice.logprobs.model_dump() for choice in answer.choices]


@pytest.mark.parametrize(
    ("pieces", "first", "text", "offsets"),
    [
        ([SPLIT[:1], SPLIT[1:] + b"a", b" b"], "bytes:\\xe2", "\u2192a b", [0, 0, 2]),
        ([b"a" + SPLIT[:2], SPLIT[2:], b"b"], "bytes:a\\xe2\\x86", "a\u2192b", [0, 1, 2]),
        ([b"a", b"\xcf", b" b", SPLIT[:2], b"c"], "a", "a\ufffd b\ufffdc", [0, 1, 2, 4, 5]),
        ([b"\xcf", b" b", SPLIT], "\ufffd", "\ufffd b\u2192", [0, 1, 3]),
    ],
)
def test_an_echo_of_tokens_that_are_no_whole_characters(client, engine, kit, monkeypatch, pieces, first, text, offsets):
    """By hand. Only the first token's text is known: where it is never a character, as U+FFFD."""

    async def script(request, context):
        yield kit.accepted()
        yield kit.started()
        yield pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(offset=1, tokens=map(token, pieces[1:])))
        yield pb.GenerateResponse(delta=pb.Delta(text="!", logprobs=[token(b"!")]))
        yield kit.finished()
        yield kit.usage()

    engine.script = script
    monkeypatch.setattr(engine, "text_of", lambda ids: b"".join(pieces[at] for at in ids).decode(errors="replace"))
    prompt = list(range(len(pieces)))
    [choice] = client.completions.create(model="m", prompt=prompt, logprobs=0, echo=True).choices
    assert choice.text == f"{text}!"
    assert choice.logprobs.tokens[0] == first
    assert choice.logprobs.text_offset == [*offsets, len(text)]


def test_no_others(client, scripted):
    """`logprobs: 0` is not `logprobs: null`: it tells the tokens' own."""
    answer = client.completions.create(model="m", prompt="p", logprobs=0)
    assert scripted.calls[0].request.output == pb.OutputOptions(top_logprobs=0)
    assert [len(one) for one in answer.choices[0].logprobs.top_logprobs] == [1] * 5
    assert answer.choices[0].logprobs.top_logprobs[0] == {" a": -0.25}


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_alone(client, scripted, stream):
    """How evaluations ask: echo, logprobs and no new token; without logprobs it is the text."""
    for logprobs in (1, None):
        body = {"model": "m", "prompt": "n\u00e9t", "max_tokens": 0, "echo": True, "logprobs": logprobs}
        if stream:
            with client.completions.create(**body, stream=True) as chunks:
                choices = [chunk.choices[0] for chunk in chunks]
        else:
            choices = client.completions.create(**body).choices
        assert "".join(choice.text for choice in choices) == "n\u00e9t"
        found = [value for choice in choices if choice.logprobs for value in choice.logprobs.token_logprobs]
        assert found == ([None, -1.25, -0.5] if logprobs else [])
        assert scripted.calls[-1].request.stopping.max_tokens == 0
        assert scripted.calls[-1].request.output.prompt_logprobs == (logprobs or 0)


def test_prompt_logprobs_as_vllm_has_them(http, gateway, scripted):
    expected = [
        None,
        {"8": {"logprob": -1.25, "decoded_token": "\u00e9"}, "0": {"logprob": -0.5, "decoded_token": "e"}},
        {"9": {"logprob": -0.5, "decoded_token": "t"}, "0": {"logprob": -0.5, "decoded_token": "t"}},
    ]
    answer = http.post(f"{gateway}{CHAT}", json={"messages": MESSAGES, "n": 2, "prompt_logprobs": 1}).json()
    assert answer["prompt_logprobs"] == expected
    answer = http.post(f"{gateway}{TEXT}", json={"prompt": ["p", "q"], "n": 2, "prompt_logprobs": 1}).json()
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [expected] * 4
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    body = {"prompt": "p", "prompt_logprobs": 0, "echo": True, "logprobs": 1, "max_tokens": 1}
    [choice] = http.post(f"{gateway}{TEXT}", json=body).json()["choices"]
    assert scripted.calls[-1].request.output.prompt_logprobs == 1  # the larger of the two
    assert [None if one is None else list(one) for one in choice["prompt_logprobs"]] == [None, ["8"], ["9"]]
    assert choice["logprobs"]["top_logprobs"][1] == {"e": -0.5, "\u00e9": -1.25}


def test_response(client, scripted):
    """The same as the chat's; in a stream with the text that they bring, also when it comes late."""
    body = ASKED | {"top_logprobs": 2}
    answer = client.responses.create(**body)
    assert scripted.calls[0].request.output.top_logprobs == answer.top_logprobs == 2
    (text,) = answer.output[0].content
    assert text.text == " a\u2192!"
    (choice,) = client.chat.completions.create(model="m", messages=MESSAGES, logprobs=True, top_logprobs=2).choices
    told = [each.model_dump() for each in text.logprobs]
    assert told == [each.model_dump() for each in choice.logprobs.content]
    assert [each["logprob"] for each in told] == [-0.25, -2.0, -9999.0, -0.75, -0.0625]

    events = [each.to_dict() for each in client.responses.create(**body, stream=True)]
    assert [(each["delta"], each["logprobs"]) for each in events if each["type"] == "response.output_text.delta"] == [
        (" a", told[:1]),
        ("\u2192", told[1:3]),
        ("!", told[3:4]),
        ("", told[4:]),
    ]
    assert [each["logprobs"] for each in events if each["type"] == "response.output_text.done"] == [told]
    assert [each["part"]["logprobs"] for each in events if each["type"] == "response.content_part.done"] == [told]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == told


def test_response_without_others(client, scripted):
    """`include` asks for the tokens' own; as with OpenAI, `top_logprobs` alone asks for nothing."""
    (text,) = client.responses.create(**ASKED).output[0].content
    assert scripted.calls[-1].request.output == pb.OutputOptions(top_logprobs=0)
    assert [each.logprob for each in text.logprobs] == [-0.25, -2.0, -9999.0, -0.75, -0.0625]
    answer = client.responses.create(model="m", input="hi", top_logprobs=3)
    assert scripted.calls[-1].request.output == pb.OutputOptions()
    assert (answer.top_logprobs, answer.output[0].content[0].logprobs) == (3, [])


# Token by token: its bytes, and what its Delta brings (nothing where the parser holds it back, or it is a marker).
MIXED = [
    (b"<think>", {}),
    (b"so", {"reasoning": "so"}),
    (b" t", {"reasoning": " t"}),
    (b"</think>", {}),
    (b"\n\n", {}),
    (b"t", {"text": "t"}),
    (b"<", {}),
    (b"<", {"text": "<"}),
    (b"b \xe2", {"text": "<b "}),
    (b"\x86\x92", {"text": "\u2192"}),
    (b" <", {}),
    (b"tool_call>{", {}),
    (b'"name": "f", "arguments": {', {"calls": [("c1", "f", "{")]}),
    (b"}}</tool", {"calls": [("", "", "}")]}),
    (b"_call>t", {"text": "t"}),
    (b"<|im_end|>", {}),
]


@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize("stream", [False, True])
def test_in_a_response_tokens_of_reasoning_calls_and_markers_have_no_place(client, engine, kit, size, stream):
    """However many tokens one Delta brings; items are as the model wrote them, streamed or not."""

    async def script(request, context):
        yield kit.accepted()
        yield kit.started()
        for at in range(0, len(MIXED), size):
            delta, place = pb.Delta(), 0
            for raw, _ in MIXED[at : at + size]:
                delta.logprobs.append(token(raw, hidden=raw == b"<|im_end|>"))
            for said in (said for _, said in MIXED[at : at + size] if said):
                now = ["reasoning", "text", "calls"].index(*said)
                if now < place:  # the order within one Delta
                    yield pb.GenerateResponse(delta=delta)
                    delta = pb.Delta()
                place = now
                delta.reasoning += said.get("reasoning", "")
                delta.text += said.get("text", "")
                for id, name, arguments in said.get("calls", ()):
                    delta.tool_calls.add(id=id, name=name, arguments=arguments)
            yield pb.GenerateResponse(delta=delta)
        yield kit.finished(reason=pb.FINISH_REASON_TOOL_CALLS)
        yield kit.usage()

    engine.script = script
    answer = client.responses.create(**ASKED, stream=stream)
    output = list(answer)[-1].response.output if stream else answer.output
    assert [item.type for item in output] == ["reasoning", "message", "function_call", "message"]
    said = [(item.content[0].text, [bytes(one.bytes) for one in item.content[0].logprobs]) for item in output[1::2]]
    assert said == [
        ("t<<b \u2192", [b"t", b"<", b"<", b"b \xe2", b"\x86\x92"]),
        ("t", [b"_call>t", b"<|im_end|>"]),
    ]
    assert (output[0].content[0].text, output[2].arguments) == ("so t", "{}")


def test_in_a_response_what_was_thought_and_then_said_is_told_as_it_was_said(client, engine, kit):
    """Both in one Delta: the same text, and not the same token."""
    tokens = [token(b"4", -1.0), token(b"</think>", -2.0), token(b"4", -3.0)]
    engine.script = kit.plays(
        pb.GenerateResponse(delta=pb.Delta(reasoning="4", text="4", logprobs=tokens)), reasons=(1,)
    )
    thought, said = client.responses.create(**ASKED).output
    assert (thought.content[0].text, said.content[0].text) == ("4", "4")
    assert [one.logprob for one in said.content[0].logprobs] == [-3.0]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprobs": 1}, "logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": "2"}, "top_logprobs"),
        (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (TEXT, {"logprobs": True}, "logprobs"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        (TEXT, {"logprobs": -1}, "logprobs"),
        (TEXT, {"logprobs": 1.0}, "logprobs"),
        (TEXT, {"logprobs": 1, "top_logprobs": 1}, "top_logprobs"),
        (TEXT, {"echo": 1}, "echo"),
        (TEXT, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (TEXT, {"logprobs": 1, "max_tokens": 0}, "max_tokens"),
        (RESPONSES, {"top_logprobs": 21}, "top_logprobs"),
        (RESPONSES, {"top_logprobs": -1}, "top_logprobs"),
        (RESPONSES, {"top_logprobs": "2"}, "top_logprobs"),
        (RESPONSES, {"include": ["message.output_text.logprob"]}, "include[0]"),
        (RESPONSES, {"include": "message.output_text.logprobs"}, "include"),
        (RESPONSES, {"logprobs": True}, "logprobs"),
    ],
)
def test_bad_fields_are_named(http, gateway, engine, path, fields, param):
    body = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "p"}, RESPONSES: {"input": "hi"}}[path]
    answer = http.post(f"{gateway}{path}", json=body | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert param in answer.json()["error"]["message"]
    assert not engine.calls


def test_what_the_tokenizer_adds_takes_no_place_in_an_echo():
    """BOS, SentencePiece's first space, a character over two tokens, and special tokens that stand in the prompt."""
    echo = "Hi \u00e9<s>."
    pieces = [b"<s>", b" Hi", b" \xc3", b"\xa9", b"<s>", b"."]
    told = TextLogprobs(0, echo)
    offsets = told.first(pieces[0])["text_offset"] + told.prompt([token(one) for one in pieces[1:]])["text_offset"]
    assert offsets == [0, 0, 2, 3, 4, 7]
    assert told.answer([token(b"x")])["text_offset"] == [8]


def test_a_token_behind_half_a_character_begins_behind_it():
    """The text is "\ufffdJ\u2192\ufffdk": by hand."""
    pieces = [b"\xcf", b"J", SPLIT[:2], SPLIT[2:], b"\xe2\x86", b"k"]
    assert TextLogprobs(0).answer([token(one) for one in pieces])["text_offset"] == [0, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("marker", [b"</think>", b"<think></think>", b"</tool_call>", b"[TOOL_CALLS]"])
def test_content_that_begins_as_the_marker_before_it_is_none_of_it(marker):
    tokens, first = ContentTokens(), marker[:1].decode()
    tokens.add([token(marker), token(b"\n\n"), token(first.encode(), -2.0)])
    assert [(one.bytes, one.logprob) for one in tokens.next(first)] == [(first.encode(), -2.0)]
    tokens.add([token(b"div>")])
    assert [one.bytes for one in tokens.next("div>")] == [b"div>"]


def test_the_tokens_of_a_long_call_are_each_looked_at_once():
    """Before a call is over no content comes: what was read again for each token took ten seconds for this one."""
    tokens = ContentTokens()
    began = time.process_time()
    for _ in range(60_000):
        tokens.add([token(b"tokens")])
    tokens.add([token(b"</call>"), token(b"Now"), token(b" this")])
    assert [one.bytes for one in tokens.next("Now this")] == [b"Now", b" this"]
    assert time.process_time() - began < 3
