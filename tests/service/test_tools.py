"""Tools and reasoning over a real server and a scripted engine whose tokens are bytes; prompts against transformers."""

import json
import shutil
from functools import partial

import grpc
import pytest
import xgrammar
from tokenizers import AddedToken, Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from engine.grammar import tokenizer_info
from engine.request import FinishReason
from fulcrum.v1 import inference_pb2 as pb

EOS = 257
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Größe <1>"}, "days": {"type": "integer", "maximum": 1e1}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Looks out.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
CALL_2 = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
HERMES = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }};{% endfor %}"
    '{# <tool_call>{"name", "arguments"} #}'
)
CODE = grpc.StatusCode


def tool(name="weather", **fields):
    return pb.Tool(name=name, **fields)


def tools():
    return [tool(description="Looks out.", parameters_json=json.dumps(WEATHER)), tool("now")]


def message(role="user", text="hi", **fields):
    return pb.ChatMessage(role=role, content=[pb.ContentPart(text=text)] if text is not None else [], **fields)


def request(chat=None, **fields):
    chat = {"messages": [message()], "tools": tools()} | (chat or {})
    return pb.GenerateRequest(chat=pb.Chat(**chat), **fields)


def writes(*texts, finish=FinishReason.EOS, step=1):
    """Each index writes its text, `step` bytes an output."""

    def reply(_):
        for index, text in enumerate(texts):
            ids = [*(text if isinstance(text, bytes | list) else text.encode())]
            for at in range(0, len(ids), step):
                yield index, ids[at : at + step], None
            yield index, [EOS] if finish is FinishReason.EOS else [33], finish

    return reply


async def generate(server, asked):
    events, call = [], server.stub.Generate(asked)
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def refusal(server, asked, details):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(server, asked)
    return details(caught.value)


def answer(events, index=0):
    """(content, reasoning, [(name, arguments)], Finished), with the calls' shape checked."""
    deltas = [event.delta for event in events if event.HasField("delta") and event.delta.index == index]
    calls = []
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        if piece.id:
            assert piece.index == len(calls)
            assert piece.name
            calls.append([piece.name, ""])
        calls[piece.index][1] += piece.arguments
    content, reasoning = ("".join(getattr(delta, field) for delta in deltas) for field in ("text", "reasoning"))
    [finished] = [event.finished for event in events if event.HasField("finished") and event.finished.index == index]
    return content, reasoning, [tuple(call) for call in calls], finished


@pytest.fixture
def qwen(data_file, tmp_path):
    """A Qwen template as a file, by its name."""

    def write(name):
        config = json.loads(data_file(f"tokenizers/{name}_tokenizer_config.json").read_text())
        path = tmp_path / f"{name}.jinja"
        path.write_text(config["chat_template"])
        return path

    return write


@pytest.fixture
def template(tmp_path):
    """Any template as a file."""

    def write(source):
        path = tmp_path / "template.jinja"
        path.write_text(source)
        return path

    return write


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
async def test_prompts_are_those_of_transformers(make_core, serving, qwen, name, kwargs):
    arguments = '{"city": "Ulm", "big": 12345678901234567890, "z": 1.0, "a": "\\u00e9<"}'
    calls = [("c1", "weather", arguments), ("c2", "now", "")]
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I look.",
            "tool_calls": [
                {"id": id, "type": "function", "function": {"name": called, "arguments": json.loads(text or "{}")}}
                for id, called, text in calls
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"degrees": 18}'},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    ]
    messages = [
        message("system", "Be brief."),
        message("user", "Weather?"),
        message(
            "assistant",
            None,
            reasoning="I look.",
            tool_calls=[pb.ToolCall(id=id, name=called, arguments_json=text) for id, called, text in calls],
        ),
        message("tool", '{"degrees": 18}', tool_call_id="c1"),
        message("tool", "noon", tool_call_id="c2"),
    ]
    async with serving(make_core(), chat_template=qwen(name)) as server:
        for count in (2, 5):
            asked = pb.Chat(messages=messages[:count], tools=tools(), template_kwargs_json=json.dumps(kwargs))
            reply = await server.stub.Tokenize(pb.TokenizeRequest(chat=asked))
            [want], _ = render_jinja_template(
                [chat[:count]], tools=TOOLS, chat_template=server.config.chat_template.read_text(),
                add_generation_prompt=True, **kwargs,
            )  # fmt: skip
            assert b"".join(reply.token_bytes).decode() == want


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_calls_are_told_apart_from_content(make_core, serving, qwen, step):
    core = make_core()
    core.reply = writes(f"I look.\n{CALL}\n{CALL_2}", "No <tool", step=step)
    async with serving(core, chat_template=qwen("qwen2_5")) as server:
        events = await generate(server, request(n=2, output=pb.OutputOptions(token_ids=True)))
    content, reasoning, calls, finished = answer(events)
    assert (content, reasoning, calls) == ("I look.", "", [("weather", '{"city": "Ulm"}'), ("now", "{}")])
    assert finished.reason == pb.FINISH_REASON_TOOL_CALLS
    assert finished.WhichOneof("matched") is None
    assert finished.completion_tokens == len(f"I look.\n{CALL}\n{CALL_2}") + 1
    ids = [id for event in events if event.delta.index == 0 for id in event.delta.token_ids]
    assert bytes(ids[:-1]).decode() == f"I look.\n{CALL}\n{CALL_2}"
    content, _, calls, finished = answer(events, 1)
    assert (content, calls, finished.reason) == ("No <tool", [], pb.FINISH_REASON_STOP)


async def test_arguments_are_streamed_as_they_come(make_core, serving, qwen):
    core = make_core()
    async with serving(core, chat_template=qwen("qwen2_5")) as server:
        call = server.stub.Generate(request(request_id="r"))
        assert (await call.read()).HasField("accepted")
        core.start("r")
        assert (await call.read()).HasField("started")
        core.emit("r", 0, [*b'<tool_call>{"name": "now", "arguments": {"a'])
        [piece] = (await call.read()).delta.tool_calls
        assert (piece.index, piece.name, piece.arguments) == (0, "now", '{"a')
        assert piece.id.startswith("call_")
        core.emit("r", 0, [*b'": "b'])
        assert (await call.read()).delta == pb.Delta(tool_calls=[pb.ToolCallDelta(arguments='": "b')])
        core.emit("r", 0, [*b'"}}</tool_call>', EOS], FinishReason.EOS)
        assert (await call.read()).delta == pb.Delta(tool_calls=[pb.ToolCallDelta(arguments='"}')])
        assert (await call.read()).finished.reason == pb.FINISH_REASON_TOOL_CALLS
        call.cancel()


async def test_reasoning_content_and_calls_keep_their_order(make_core, serving, qwen):
    core = make_core()
    async with serving(core, chat_template=qwen("qwen3")) as server:
        for step in (1, 1000):
            core.reply = writes(f"<think>\nHm é\n</think>\n\nI look.\n{CALL}\nand{CALL_2}", step=step)
            events = await generate(server, request())
            content, reasoning, calls, _ = answer(events)
            assert (content, reasoning) == ("I look.and", "Hm é")
            assert calls == [("weather", '{"city": "Ulm"}'), ("now", "{}")]
        # In one output: reasoning, content and a call fit one Delta, what comes behind it takes another.
        deltas = [event.delta for event in events if event.HasField("delta")]
        assert [(delta.text, len(delta.tool_calls)) for delta in deltas] == [("I look.", 1), ("and", 1)]
        core.reply = writes("<think>\nHm\n</think>\n\nHi <think>")
        content, reasoning, calls, finished = answer(await generate(server, request({"tools": []})))
        assert (content, reasoning, calls) == ("Hi <think>", "Hm", [])
        assert finished.reason == pb.FINISH_REASON_STOP
        assert finished.eos_token_id == EOS


async def test_reasoning_that_the_prompt_has_opened_or_closed(make_core, serving, qwen, template):
    core = make_core()
    opening = template("{{ messages[-1].content }}{% if add_generation_prompt %}</think><think>\n{% endif %}")
    async with serving(core, chat_template=opening) as server:
        core.reply = writes("Hm</think>Hi")
        assert answer(await generate(server, request({"tools": []})))[:2] == ("Hi", "Hm")
        core.reply = writes("Hm", finish=FinishReason.LENGTH)
        content, reasoning, _, finished = answer(await generate(server, request({"tools": []})))
        assert (content, reasoning, finished.reason) == ("", "Hm!", pb.FINISH_REASON_LENGTH)
        continued = {
            "tools": [],
            "messages": [message(), message("assistant", "<think>H")],
            "continue_final_message": True,
        }
        core.reply = writes("m</think>Hi")
        assert answer(await generate(server, request(continued)))[:2] == ("Hi", "m")
        continued["messages"] = [message(), message("assistant", "<think>Hm</think>H")]
        core.reply = writes("i</think>")
        assert answer(await generate(server, request(continued)))[:2] == ("i</think>", "")
    async with serving(core, chat_template=qwen("qwen3")) as server:
        core.reply = writes("Hi</think>")
        asked = request({"tools": [], "template_kwargs_json": '{"enable_thinking": false}'})
        assert answer(await generate(server, asked))[:2] == ("Hi</think>", "")
    async with serving(core, chat_template=opening, reasoning_parser="none") as server:
        core.reply = writes("Hm</think>Hi")
        assert answer(await generate(server, request({"tools": []})))[:2] == ("Hm</think>Hi", "")


@pytest.mark.parametrize("step", [1, 1000])
async def test_without_parallel_calls_the_first_ends_the_output(make_core, serving, template, step):
    core = make_core()
    core.reply = writes(CALL + CALL_2, "Hi", step=step, finish=None)
    async with serving(core, chat_template=template(HERMES)) as server:
        call = server.stub.Generate(request({"parallel_tool_calls": False}, request_id="r", n=2))
        events = []
        while not (events and events[-1].HasField("finished")):
            events.append(await call.read())
        content, _, calls, finished = answer(events)
        assert (content, calls) == ("", [("weather", '{"city": "Ulm"}')])
        assert finished.reason == pb.FINISH_REASON_TOOL_CALLS
        # Up to the brace that closes the arguments.
        assert finished.completion_tokens == CALL.index("}") + 1
        assert core.ended == [("r", 0)]
        call.cancel()


async def test_how_a_call_may_end(make_core, serving, template):
    core = make_core()
    async with serving(core, chat_template=template(HERMES)) as server:
        core.reply = writes('<tool_call>{"name": "now", "arguments": {"a": ', finish=FinishReason.LENGTH)
        _, _, calls, finished = answer(await generate(server, request()))
        assert (calls, finished.reason) == ([("now", '{"a": !')], pb.FINISH_REASON_LENGTH)
        core.reply = writes(f"{CALL} STOP", finish=None)
        events = await generate(server, request(stopping=pb.StoppingCriteria(stop=["STOP"])))
        content, _, calls, finished = answer(events)
        assert (content, len(calls), finished.reason) == ("", 1, pb.FINISH_REASON_TOOL_CALLS)
        core.reply = writes('<tool_call>{"name": "now STOP', finish=None)
        content, _, calls, finished = answer(
            await generate(server, request(stopping=pb.StoppingCriteria(stop=["STOP"])))
        )
        assert (content, calls) == ('<tool_call>{"name": "now ', [])
        assert (finished.reason, finished.stop) == (pb.FINISH_REASON_STOP, "STOP")
        core.reply = writes("<tool_call>", finish=FinishReason.STOP_TOKEN)
        content, _, _, finished = answer(await generate(server, request()))
        assert (content, finished.reason, finished.stop_token_id) == ("<tool_call>", pb.FINISH_REASON_STOP, 33)


async def test_no_tools_no_parsing(make_core, serving, template):
    core = make_core()
    core.reply = writes(CALL)
    none = pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE)
    async with serving(core, chat_template=template(HERMES)) as server:
        for chat in ({"tools": []}, {"tool_choice": none}, {"tools": [], "tool_choice": none}):
            content, _, calls, finished = answer(await generate(server, request(chat)))
            assert (content, calls, finished.reason) == (CALL, [], pb.FINISH_REASON_STOP)
            assert bytes(core.requests[-1].prompt) == b"hi;"
        text_off = request(output=pb.OutputOptions(text=False, token_ids=True))
        assert answer(await generate(server, text_off))[2] == []
        auto = request({"tool_choice": pb.ToolChoice(mode=pb.ToolChoice.MODE_AUTO), "parallel_tool_calls": True})
        assert len(answer(await generate(server, auto))[2]) == 1
        assert (
            bytes(core.requests[-1].prompt)
            == "".join(json.dumps(t, ensure_ascii=False) for t in TOOLS).encode() + b"hi;"
        )


async def test_markers_that_are_special_tokens_are_seen(make_core, serving, byte_model, template, tmp_path):
    folder = tmp_path / "mistral"
    shutil.copytree(byte_model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    mark = tokenizer.token_to_id("[TOOL_CALLS]")
    core = make_core(vocab_size=mark + 1)
    path = template("{{ tools }}{{ messages }}{# [TOOL_CALLS] #}")
    async with serving(core, model=folder, chat_template=path) as server:
        core.reply = writes([*b"Hm. ", mark, *b'[{"name": "now", "arguments": {}}]'])
        assert answer(await generate(server, request()))[:3] == ("Hm.", "", [("now", "{}")])
        core.reply = writes([*b"Hm. ", mark, 256, *b"x"])
        assert answer(await generate(server, request()))[0] == "Hm. [TOOL_CALLS]x"
        assert answer(await generate(server, request({"tools": []})))[0] == "Hm. x"
        core.reply = writes([*b' [{"name": "now", "arguments": {}}]'])
        asked = request({"tool_choice": pb.ToolChoice(function="now")})
        assert answer(await generate(server, asked))[:3] == ("", "", [("now", "{}")])
        assert core.requests[-1].prompt[-1] == mark
        await generate(server, request({"tools": [tool(parameters_json=STRICT, strict=True)]}))
        assert not core.requests[-1].grammar  # under one the marker could not come
        core.reply = writes([*b"Hm. ", mark, 256, *b"x"])
        stop = pb.StoppingCriteria(stop=["CALLS]"])
        content, _, _, finished = answer(await generate(server, request(stopping=stop)))
        assert (content, finished.stop) == ("Hm. [TOOL_", "CALLS]")


async def test_models_that_take_no_tools_say_so(make_core, serving, template, details):
    core = make_core()
    core.reply = writes(CALL)
    async with serving(core) as server:
        error = await refusal(server, request(), details)
        assert (error.code, error.reason, error.fields) == (
            CODE.FAILED_PRECONDITION,
            "TOOLS_UNSUPPORTED",
            ["chat.tools"],
        )
        none = {"tool_choice": pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE)}
        assert answer(await generate(server, request(none)))[0] == CALL
    unknown = template("{{ tools }}{{ messages[0].content }}")
    async with serving(core, chat_template=unknown) as server:
        error = await refusal(server, request(), details)
        assert (error.code, error.reason) == (CODE.FAILED_PRECONDITION, "TOOLS_UNSUPPORTED")
        assert "--tool-parser" in error.message
    async with serving(core, chat_template=unknown, tool_parser="hermes") as server:
        assert len(answer(await generate(server, request()))[2]) == 1
    async with serving(core, chat_template=unknown, tool_parser="none") as server:
        content, _, calls, finished = answer(await generate(server, request()))
        assert (content, calls, finished.reason) == (CALL, [], pb.FINISH_REASON_STOP)


def last_grammar_accepts(core, text):
    """Whether the grammar that the core got last takes the text from its beginning to its end."""
    _, data, vocabulary = core.grammars[-1]
    grammar = xgrammar.CompiledGrammar.deserialize_json(data.decode(), tokenizer_info(vocabulary))
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(EOS)


REQUIRED, NOW = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED), pb.ToolChoice(function="now")


async def test_a_call_that_must_come_is_a_grammar(make_core, serving, template, details):
    core = make_core()

    accepts = partial(last_grammar_accepts, core)
    core.reply = writes(CALL_2)
    async with serving(core, chat_template=template(HERMES)) as server:
        _, _, calls, finished = answer(await generate(server, request({"tool_choice": REQUIRED})))
        assert (calls, finished.reason) == ([("now", "{}")], pb.FINISH_REASON_TOOL_CALLS)
        assert core.requests[-1].grammar == core.grammars[-1][0] != ""
        assert accepts(CALL_2)
        assert accepts(f"{CALL}\n{CALL_2}")
        assert not accepts("Hi")
        await generate(server, request({"tool_choice": REQUIRED, "parallel_tool_calls": False}))
        assert accepts(CALL)
        assert not accepts(f"{CALL}\n{CALL_2}")
        await generate(server, request({"tool_choice": NOW}))
        assert accepts(CALL_2)
        assert not accepts(CALL)
        assert not accepts(f"{CALL_2}\n{CALL_2}")
        loaded = len(core.grammars)
        await generate(server, request())
        assert (core.requests[-1].grammar, len(core.grammars)) == ("", loaded)
        error = await refusal(server, request({"tool_choice": NOW}, json_object=True), details)
        assert (error.code, error.fields) == (CODE.INVALID_ARGUMENT, ["chat.tool_choice"])
        bad = [tool(parameters_json='{"properties": {"a": {"contains": {"type": "null"}}}}')]
        error = await refusal(server, request({"tools": bad, "tool_choice": REQUIRED}), details)
        assert (error.code, error.reason, error.fields) == (CODE.INVALID_ARGUMENT, "INVALID_GRAMMAR", ["chat.tools"])
        assert "contains" in error.message
    opened = template('{{ tools }}{{ messages[0].content }}<think>{# </think><tool_call>"arguments" #}')
    async with serving(core, chat_template=opened) as server:
        await generate(server, request({"tool_choice": NOW}))
        assert accepts(f"Hm</think>\n\n{CALL_2}")
        assert not accepts(CALL_2)
        closed = {"messages": [message(text="<think></think>")], "continue_final_message": True, "tool_choice": NOW}
    path = template('{{ tools }}{{ messages[0].content }}{# </think><tool_call>"arguments" #}')
    async with serving(core, chat_template=path) as server:
        await generate(server, request(closed))
        assert accepts(CALL_2)
        assert not accepts(f"<think></think>\n\n{CALL_2}")
    async with serving(core, chat_template=path, tool_parser="none") as server:
        error = await refusal(server, request({"tool_choice": NOW}), details)
        assert (error.code, error.reason) == (CODE.FAILED_PRECONDITION, "TOOLS_UNSUPPORTED")


STRICT = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)


def strictly(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def test_strict_tools_hold_also_where_the_model_chooses(make_core, serving, template, details):
    core = make_core()
    accepts = partial(last_grammar_accepts, core)
    core.reply = writes("Hi")
    offered = [tool("f", parameters_json=STRICT, strict=True), tool("g", parameters_json=STRICT, strict=False)]
    good, bad = strictly("f", '{"a": 1}'), strictly("f", '{"a": ""}')
    path = template('{{ tools }}{{ messages[0].content }}{# </think><tool_call>"arguments" #}')
    async with serving(core, chat_template=path) as server:
        await generate(server, request({"tools": offered}))
        assert core.requests[-1].grammar
        loose = strictly("g", '{"b": []}')
        assert all(map(accepts, ("", "Hi", good, f"Hi {good}\n{loose}", f"<think>{bad}</think>\n\n{good} Bye")))
        assert not any(map(accepts, (bad, f"Hi {good}{bad}", f"<think>Hm</think>\n\n{bad}", strictly("h", "{}"))))
        await generate(server, request({"tools": offered}, regex="x+"))
        assert all(map(accepts, ("xx", good)))
        assert not any(map(accepts, (bad, "Hi", f"x{good}")))
        none = pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE)
        for chat in ({"tools": offered, "tool_choice": none}, {"tools": offered[1:]}):
            await generate(server, request(chat))
            assert not core.requests[-1].grammar
        odd = [tool(parameters_json='{"contains": {}}', strict=True)]
        for constraint, field in (({}, "chat.tools"), ({"regex": "x"}, "chat.tools"), ({"regex": "("}, "regex")):
            error = await refusal(server, request({"tools": odd}, **constraint), details)
            assert (error.reason, error.fields) == ("INVALID_GRAMMAR", [field])


# field and value, a text that follows it, a text that does not
CONSTRAINTS = [
    (
        {"json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}'},
        '{"a": 1, "b": "x"}',
        '{"a": ""}',
    ),
    ({"json_object": True}, '{"a": 1}', "[]"),
    ({"regex": "a+.?"}, "aab", "a\n"),
    ({"grammar": 'root ::= "x" root | "y"'}, "xxy", "xx"),
    ({"choices": pb.Choices(choices=["on", 'o"n"'])}, 'o"n"', "o"),
]


async def test_a_constraint_leaves_room_for_reasoning_and_calls(make_core, serving, template, details):
    core = make_core()
    accepts = partial(last_grammar_accepts, core)
    core.reply = writes("x")
    path = template('{{ tools }}{{ messages[0].content }}{# </think><tool_call>"arguments" #}')
    async with serving(core, chat_template=path) as server:
        for constraint, good, bad in CONSTRAINTS:
            await generate(server, request({"tools": []}, **constraint))
            assert accepts(good), constraint
            assert accepts(f"<think>\nHm {bad}</think>\n\n{good}"), constraint
            assert not any(map(accepts, (bad, f"<think></think>\n\n{bad}", "<think>", CALL))), constraint
            await generate(server, request(**constraint))
            assert accepts(good), constraint
            assert accepts(f"<think>Hm</think>\n\n{CALL}\n{CALL_2}"), constraint
            assert not any(map(accepts, (bad, good + CALL, CALL + good))), constraint
        for schema in ("{", '{"const": "\\ud800"}'):  # the latter is half a character
            error = await refusal(server, request({"tools": []}, json_schema=schema), details)
            assert (error.reason, error.fields) == ("INVALID_GRAMMAR", ["json_schema"])
        for regex in ("(", "a$b"):
            error = await refusal(server, request(regex=regex), details)
            assert (error.reason, error.fields) == ("INVALID_GRAMMAR", ["regex"])
        # What the tools' arguments must be is not asked for, so that it cannot be at fault.
        odd = [tool(parameters_json='{"contains": {}}')]
        assert answer(await generate(server, request({"tools": odd}, regex="x")))[0] == "x"


async def test_reasoning_that_the_prompt_has_opened_comes_before_a_constraint(make_core, serving, template):
    core = make_core()
    core.reply = writes('Hm</think>\n\n{"a": 1}')
    path = template("{{ messages[0].content }}<think>\n{# </think> #}")
    async with serving(core, chat_template=path) as server:
        events = await generate(server, request({"tools": []}, json_object=True))
        continued = {"tools": [], "messages": [message(text="<think></think>")], "continue_final_message": True}
        core.reply = writes("<t> Hm")
        assert (await generate(server, request(continued)))[-1].usage.reasoning_tokens == 0
    assert answer(events)[:2] == ('{"a": 1}', "Hm")
    # As many bytes, each a token.
    assert events[-1].usage.reasoning_tokens == len("Hm</think>\n\n")
    assert last_grammar_accepts(core, 'Hm</think>\n\n{"a": 1}')
    assert not last_grammar_accepts(core, '{"a": 1}')


DEEP = '{"a":' * 9_999 + "1" + "}" * 9_999
BIG = json.dumps({"x": "y" * 70_000})
REFUSED = {
    "no name": ({"tools": [tool("")]}, "chat.tools[0].name"),
    "65 characters": ({"tools": [tool("n" * 65)]}, "chat.tools[0].name"),
    "blank": ({"tools": [tool("now"), tool("a b")]}, "chat.tools[1].name"),
    "not ASCII": ({"tools": [tool("größe")]}, "chat.tools[0].name"),
    "line end": ({"tools": [tool("now\n")]}, "chat.tools[0].name"),
    "twice": ({"tools": [tool("now"), tool("now")]}, "chat.tools[1].name"),
    "no JSON": ({"tools": [tool(parameters_json="{")]}, "chat.tools[0].parameters_json"),
    "no object": ({"tools": [tool(parameters_json="[]")]}, "chat.tools[0].parameters_json"),
    "NaN": ({"tools": [tool(parameters_json='{"a": NaN}')]}, "chat.tools[0].parameters_json"),
    "too deep": ({"tools": [tool(parameters_json=DEEP)]}, "chat.tools[0].parameters_json"),
    "too large": ({"tools": [tool(parameters_json=BIG)]}, "chat.tools[0]"),
    "129 tools": ({"tools": [tool(f"f{number}") for number in range(129)]}, "chat.tools"),
    "unknown name": ({"tool_choice": pb.ToolChoice(function="nowhere")}, "chat.tool_choice"),
    "name without tools": ({"tools": [], "tool_choice": pb.ToolChoice(function="now")}, "chat.tool_choice"),
    "required without tools": (
        {"tools": [], "tool_choice": pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)},
        "chat.tool_choice",
    ),
    "unknown mode": ({"tool_choice": pb.ToolChoice(mode=9)}, "chat.tool_choice"),
}  # fmt: skip


async def test_bad_tools_are_named(make_core, serving, template, details):
    core = make_core(max_model_len=8192)
    async with serving(core, chat_template=template(HERMES)) as server:
        for what, (chat, field) in REFUSED.items():
            error = await refusal(server, request(chat), details)
            assert (error.code, error.fields) == (CODE.INVALID_ARGUMENT, [field]), what
        core.reply = writes("Hi")
        good = {
            "tools": [tool(f"f-{number}_" + "n" * 58) for number in range(10)] + [tool(f"g{n}") for n in range(118)]
        }
        assert answer(await generate(server, request(good)))[0] == "Hi"
