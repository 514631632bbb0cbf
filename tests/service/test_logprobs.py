"""Logprobs over a real server, its engine scripted: tokens are bytes, and each token's records can be told by it."""

import itertools
import struct

import grpc
import pytest

from engine.request import FinishReason
from fulcrum.v1 import inference_pb2 as pb

EOS = 257
HERMES = '{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call>{"name", "arguments"} #}'


def record(token, top):
    """The engine's: -token / 8, then as others the ids that follow."""
    others = ((token + at + 1, -at - 0.5) for at in range(top))
    return struct.pack("<f" + "if" * top, -token / 8, *itertools.chain.from_iterable(others))


def expected(token, top, hidden=False):
    """The contract's, by hand. The vocabulary: bytes, then <|im_start|> and <|im_end|>."""

    def piece(one):
        return bytes([one]) if one < 256 else {256: b"<|im_start|>", 257: b"<|im_end|>"}.get(one, b"")

    others = [
        pb.TopLogprob(token_id=token + at + 1, logprob=-at - 0.5, bytes=piece(token + at + 1)) for at in range(top)
    ]
    return pb.TokenLogprob(token_id=token, logprob=-token / 8, bytes=piece(token), top=others, hidden=hidden)


def script(ids, finish=None, *, top, step=1, index=0):
    """An index says these ids, so many an output."""
    for at in range(0, len(ids), step):
        part = ids[at : at + step]
        last = at + step >= len(ids)
        yield index, part, finish if last else None, b"".join(record(one, top) for one in part)


def asked(prompt="hello", stopping=None, n=None, **output):
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt.encode()), stopping=stopping, n=n, output=pb.OutputOptions(**output)
    )


async def generate(server, request):
    events, call = [], server.stub.Generate(request)
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


def logprobs_of(events, index=0):
    return [one for event in events if event.delta.index == index for one in event.delta.logprobs]


@pytest.mark.parametrize("top", [0, 2, 20])
@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_one_for_each_token_however_they_come(make_core, serving, top, step):
    """Single, merged, and so many at once that they need several messages; the end token is hidden."""
    core = make_core()
    texts = [[*"a\u00e9\u2192".encode(), 256, *(97 + at % 26 for at in range(600)), EOS], [*b"xy", EOS]]
    core.reply = lambda request: [
        output
        for index, ids in enumerate(texts)
        for output in script(ids, FinishReason.EOS, top=top, step=step, index=index)
    ]
    async with serving(core) as server:
        events = await generate(server, asked(n=2, top_logprobs=top, token_ids=True))
        assert core.requests[0].params.top_logprobs == top
        for index, ids in enumerate(texts):
            assert logprobs_of(events, index) == [expected(one, top, hidden=one in (256, EOS)) for one in ids]
            deltas = [event.delta for event in events if event.HasField("delta") and event.delta.index == index]
            assert all(list(delta.token_ids) == [one.token_id for one in delta.logprobs] for delta in deltas)
            assert "".join(delta.text for delta in deltas) == bytes(one for one in ids if one < 256).decode()
        assert max(event.ByteSize() for event in events) < 200_000


@pytest.mark.parametrize("step", [1, 100])
async def test_tokens_that_a_stop_string_cut_have_theirs(make_core, serving, step):
    core = make_core()
    core.reply = lambda request: script([*b"one END and more"], top=1, step=step)
    async with serving(core) as server:
        events = await generate(server, asked(stopping=pb.StoppingCriteria(stop=["END"]), top_logprobs=1))
        assert "".join(event.delta.text for event in events) == "one "
        assert logprobs_of(events) == [expected(one, 1) for one in b"one END"]
        assert not any(event.delta.token_ids for event in events)


async def test_what_ends_or_stays_in_the_text_is_told(make_core, serving):
    core = make_core()
    core.reply = lambda request: script([97, 256, 33], FinishReason.STOP_TOKEN, top=0)
    async with serving(core) as server:
        for include, skip in itertools.product((False, True), repeat=2):
            stopping = pb.StoppingCriteria(stop_token_ids=[33], include_stop=include)
            events = await generate(server, asked(stopping=stopping, top_logprobs=0, skip_special_tokens=skip))
            assert [one.hidden for one in logprobs_of(events)] == [False, skip, not include]
        only = await generate(server, asked(top_logprobs=0, text=False))
        assert [one.token_id for one in logprobs_of(only)] == [97, 256, 33]


async def test_tool_calls_and_reasoning_lose_none(make_core, serving, tmp_path):
    """Tokens of markers, reasoning and arguments, with a Delta that carries calls or without one."""
    template = tmp_path / "hermes.jinja"
    template.write_text(HERMES)
    ids = [*b'<think>hm</think>so<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>', EOS]
    chat = pb.Chat(
        messages=[pb.ChatMessage(role="user", content=[pb.ContentPart(text="hi")])], tools=[pb.Tool(name="now")]
    )
    core = make_core()
    async with serving(core, chat_template=template, reasoning_parser="think") as server:
        for step in (1, 7, 1000):
            core.reply = lambda request, step=step: script(ids, FinishReason.EOS, top=1, step=step)
            events = await generate(server, pb.GenerateRequest(chat=chat, output=pb.OutputOptions(top_logprobs=1)))
            assert [one.token_id for one in logprobs_of(events)] == ids
            assert [event.finished.reason for event in events if event.HasField("finished")] == [
                pb.FINISH_REASON_TOOL_CALLS
            ]
            assert "".join(event.delta.reasoning for event in events) == "hm"


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_a_prompts_come_in_pieces_before_all_else(make_core, serving, max_tokens):
    """Once for two indexes, the first token has none; max_tokens 0 has no text, whatever the engine drew."""
    core = make_core()
    text = "".join(chr(97 + at % 26) for at in range(700))
    pieces = [text[1:11], text[11:]]

    def reply(request):
        for piece in pieces:
            yield 0, [], None, b"", b"".join(record(one, 3) for one in piece.encode())
        for index in range(2):
            yield index, [*b"ab"][: request.params.max_tokens], FinishReason.LENGTH

    core.reply = reply
    async with serving(core) as server:
        stopping = pb.StoppingCriteria(max_tokens=max_tokens)
        events = await generate(server, asked(text, stopping, n=2, prompt_logprobs=3, token_ids=True))
        assert (core.requests[0].params.prompt_logprobs, core.requests[0].params.max_tokens) == (3, max(1, max_tokens))
        kinds = [kind for kind, _ in itertools.groupby(event.WhichOneof("event") for event in events)]
        assert kinds[:3] == ["accepted", "started", "prompt_logprobs"]
        assert set(kinds[3:]) == ({"delta", "finished", "usage"} if max_tokens else {"finished", "usage"})
        parts = [event.prompt_logprobs for event in events if event.HasField("prompt_logprobs")]
        assert len(parts) >= 3
        place = 1
        for part in parts:
            assert part.offset == place
            place += len(part.tokens)
        assert [one for part in parts for one in part.tokens] == [expected(one, 3) for one in text.encode()[1:]]
        assert {event.finished.reason for event in events if event.HasField("finished")} == {pb.FINISH_REASON_LENGTH}
        assert (events[-1].usage.prompt_tokens, events[-1].usage.completion_tokens) == (700, 2 * max_tokens)
