"""Parsers of reasoning and tool calls, on texts in the forms that the models' own documentation shows.

Hermes: github.com/NousResearch/Hermes-Function-Calling; Qwen: qwen.readthedocs.io, "Function Calling"; Llama: the
prompt formats of Llama 3.1 at llama.com/docs; Mistral: docs.mistral.ai, and tokenizers v3 and v11 in mistral-common.
"""

import json
import lzma
import re

import pytest
import tokenizers
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from service.detokenizer import Detokenizer
from service.output_grammar import behind_reasoning, calls_form, free_form
from service.parsers.events import Arguments, CallEnd, CallStart, Content, Reasoning
from service.parsers.output_parser import OutputParser
from service.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, Formats
from service.parsers.think import Think
from service.tokenizer import Tokenizer

NAMES = frozenset({"get_current_temperature", "get_temperature_date", "get_stock_fundamentals", "weather", "f", "g"})


def parsed(parser, pieces):
    """(content, reasoning, [(name, arguments), ...]) of the joined events, whose order is checked."""
    content, reasoning, calls, open_call, ids = "", "", [], None, set()
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        match event:
            case Content(text):
                assert text
                assert open_call is None
                content += text
            case Reasoning(text):
                assert text
                assert not content
                assert not calls
                reasoning += text
            case CallStart(call, call_id, name):
                assert (call, open_call) == (len(calls), None)
                assert re.fullmatch(r"call_[0-9a-f]{24}|[0-9a-f]{9}", call_id)
                assert call_id not in ids
                ids.add(call_id)
                open_call = call
                calls.append([name, ""])
            case Arguments(call, text):
                assert text
                assert call == open_call
                calls[call][1] += text
            case CallEnd(call):
                assert call == open_call
                open_call = None
    assert open_call is None
    return content, reasoning, [tuple(call) for call in calls]


def read(name, *pieces, **options):
    """What the tool parser of this name makes of the pieces: content and calls."""
    content, _, calls = parsed(OutputParser(None, TOOL_PARSERS[name](NAMES), **options), pieces)
    return content, calls


TSLA = '{"symbol": "TSLA"}'
PARIS = '{"location": "San Francisco, CA, USA"}'
DATED = '{"location": "San Francisco, CA, USA", "date": "2024-10-01"}'

# format, text, content, calls
WRITTEN = {
    "hermes 2 pro: arguments first": (
        "hermes",
        "<tool_call>\n" + f'{{"arguments": {TSLA}, "name": "get_stock_fundamentals"}}' + "\n</tool_call>",
        "",
        [("get_stock_fundamentals", TSLA)],
    ),
    "qwen: two calls": (
        "hermes",
        f'<tool_call>\n{{"name": "get_current_temperature", "arguments": {PARIS}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_temperature_date", "arguments": {DATED}}}\n</tool_call>',
        "",
        [("get_current_temperature", PARIS), ("get_temperature_date", DATED)],
    ),
    "qwen: content before and after": (
        "hermes",
        f'Let me look.\n\n<tool_call>\n{{"name": "f", "arguments": {TSLA}}}\n</tool_call>\n\nOne moment. ',
        "Let me look.One moment. ",
        [("f", TSLA)],
    ),
    "llama 3.1: a call": (
        "llama3_json",
        '{"name": "weather", "parameters": {"city": "San Francisco", "state": "CA"}}',
        "",
        [("weather", '{"city": "San Francisco", "state": "CA"}')],
    ),
    "llama 3.1: with its type": (
        "llama3_json",
        '{"type": "function", "name": "weather", "parameters": {"city": "Ulm"}}',
        "",
        [("weather", '{"city": "Ulm"}')],
    ),
    "llama 3.1: behind the tag": (
        "llama3_json",
        '<|python_tag|>{"name": "anything", "parameters": {}}',
        "",
        [("anything", "{}")],
    ),
    "llama 3.2: two calls": (
        "llama3_json",
        '{"name": "f", "parameters": {"a": "1"}}; {"name": "g", "parameters": {"b": [1, 2]}}',
        "",
        [("f", '{"a": "1"}'), ("g", '{"b": [1, 2]}')],
    ),
    "mistral v3: an array": (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": {"b": []}}}, {"name": "g", "arguments": {}, "id": "VvvODy9m"}]',
        "",
        [("f", '{"a": {"b": []}}'), ("g", "{}")],
    ),
    "mistral v11: names": (
        "mistral",
        'I look.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]VvvODy9mT[ARGS]{"b": "}"}',
        "I look.",
        [("f", '{"a": 1}'), ("g", '{"b": "}"}')],
    ),
    "mistral v11: its special tokens left out": (
        "mistral",
        '[TOOL_CALLS]weather{"a": 1}',
        "",
        [("weather", '{"a": 1}')],
    ),
    # What is forgiven.
    "hermes: no end, no last brace": (
        "hermes",
        '<tool_call>{"name":"f","arguments":{"a":1}</tool_call>\n<tool_call>{"name":"g","arguments":{}}',
        "",
        [("f", '{"a":1}'), ("g", "{}")],
    ),
    "hermes: the marker twice": (
        "hermes",
        '<tool_call>\n<tool_call>\n{"name":"f","arguments":{}}\n</tool_call>',
        "<tool_call>\n",
        [("f", "{}")],
    ),
    "arguments that are no JSON are passed on as they are": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {\'a\': None, b}}</tool_call>done',
        "done",
        [("f", "{'a': None, b}")],
    ),
    "arguments that a marker ends": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1, </tool_call>',
        "",
        [("f", '{"a": [1, ')],
    ),
    "arguments that the end of the text ends": (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": "x]}',
        "",
        [("f", '{"a": "x]}')],
    ),
    "escapes": (
        "hermes",
        '<tool_call>{"na\\u006de": "\\u0066", "arguments": {"a": "\\"}</tool_call>\\\\", "é": "\\n"}}</tool_call>',
        "",
        [("f", '{"a": "\\"}</tool_call>\\\\", "é": "\\n"}')],
    ),
    "members that mean nothing": (
        "hermes",
        '<tool_call>{"id": -1.5e3, "x": [{"name": "}"}], "y": null, "s": "", "name": "f", "arguments": {}, "z": 1}'
        "</tool_call>",
        "",
        [("f", "{}")],
    ),
}

# What is no call: content, as it was.
NO_CALLS = {
    "hermes": [
        "Hello",
        "  a <b> <tool <tool_cal",
        "a </tool_call> b",
        "x \n <tool_call> not json </tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\x", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name" "f"}',
        '<tool_call>{"a": x?}',
        "<tool_call>{}",
        '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>',
        '<tool_call>{"arguments": {"a": 1}',
        "<tool_call>",
        "blanks at the end \n\n ",
        " \n",
    ],
    "llama3_json": [
        'Sure: {"name": "f", "parameters": {}}',
        ' {"name": "Bob", "parameters": {}}',
        '{"city": "Ulm"}',
        "<|python_tag|>brave_search.call(query=\"x\")",
        "{",
        " <|python",
        " \n",
        '{"name": "f", "x": {}} tail',
    ],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] [",
        "[TOOL_CALLS] [1]",
        "[TOOL_CALLS]two words[ARGS]{}",
        "[TOOL_CALLS]f[ARGS]",
        "[TOOL_CALLS]" + "f" * 65 + "{}",
        "[TOOL_CALLS]" + "f" * 300,
        "[TOOL] [1, 2]",
    ],
}  # fmt: skip
NO_CALL_CASES = [(name, text) for name, texts in NO_CALLS.items() for text in texts]


@pytest.mark.parametrize("case", WRITTEN)
def test_what_models_write(case):
    name, text, content, calls = WRITTEN[case]
    assert read(name, text) == (content, calls)
    assert read(name, *text) == (content, calls)


def test_ids_are_those_that_the_templates_take_back():
    """Mistral's templates raise "Tool call IDs should be alphanumeric strings with length 9!"."""
    parser = OutputParser(None, TOOL_PARSERS["mistral"](NAMES))
    events = parser.feed('[TOOL_CALLS][{"name": "f", "arguments": {}}][TOOL_CALLS]g[ARGS]{}')
    ids = [event.id for event in events if isinstance(event, CallStart)]
    assert len(set(ids)) == 2
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert TOOL_PARSERS["hermes"].new_id().startswith("call_")


def test_tokens_of_a_real_vocabulary(data_file):
    """Qwen 3's markers are tokens of their own; the rest comes in whole words and halves of characters."""
    packed = lzma.decompress(data_file("tokenizers/qwen3_tokenizer.json.xz").read_bytes()).decode()
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(packed), {})
    arguments = '{"city": "Köln 🌧", "days": 3}'
    text = f'<think>\nÄh.\n</think>\n\nHm 🌧.\n<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    ids = tokenizer.encode(text)
    assert {tokenizer.token_id(marker) for marker in ("<think>", "</think>", "<tool_call>", "</tool_call>")} < {*ids}
    detokenizer = Detokenizer(tokenizer)
    parser = OutputParser(Think(False), TOOL_PARSERS["hermes"](NAMES))
    assert parsed(parser, map(detokenizer.step, ids)) == ("Hm 🌧.", "Äh.", [("f", arguments)])


@pytest.mark.parametrize(("name", "text"), NO_CALL_CASES)
def test_what_is_no_call_is_content_as_it_was(name, text):
    assert read(name, text) == (text, [])
    assert read(name, *text) == (text, [])


def test_behind_a_call_a_semicolon_is_content_unless_a_call_follows():
    call = '{"name": "f", "parameters": {}}'
    assert read("llama3_json", call, " ; and ", "more") == ("; and more", [("f", "{}")])
    assert read("llama3_json", call, ";") == (";", [("f", "{}")])
    assert read("llama3_json", call, ' ;{"name": "stranger", "parameters": {}}')[0] == (
        ' ;{"name": "stranger", "parameters": {}}'
    )


PARTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", "; ", "f",
        '{"name": "f", "arguments": {"a": "\\"}"}}', '{"name": "g", "parameters": {"b": [{}, 1]}}', "<", "[", "]", "{",
        "}", '"', "\\", ",", ":", "\n", " ", "word", "é\U0001f600", '"name"', '"arguments": {', "{}", "<tool_",
    ]
)  # fmt: skip


@st.composite
def cut_texts(draw):
    """A text of odd pieces, and one way to cut it."""
    text = "".join(draw(st.lists(PARTS, max_size=14)))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=600, deadline=None)
@given(cut_texts(), st.sampled_from([*TOOL_PARSERS, None]), st.sampled_from([None, True, False]), st.booleans())
def test_how_a_text_is_cut_makes_no_difference(cut, tools, opened, parallel):
    def parser():
        think = None if opened is None else Think(opened)
        return OutputParser(think, TOOL_PARSERS[tools](NAMES) if tools else None, parallel=parallel)

    text, pieces = cut
    whole = parsed(parser(), [text])
    assert parsed(parser(), pieces) == whole
    assert parsed(parser(), text) == whole
    if not parallel:
        assert len(whole[2]) <= 1


@settings(max_examples=300, deadline=None)
@given(cut_texts(), st.sampled_from([*TOOL_PARSERS]))
def test_nothing_is_lost(cut, tools):
    """Content and arguments come out in the order in which they went in, and nothing else does."""
    text, pieces = cut
    parser = TOOL_PARSERS[tools](NAMES)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    out = "".join(event.text for event in events if isinstance(event, Content | Arguments))
    if not any(isinstance(event, CallStart) for event in events):
        assert out == text
    rest = iter(text)
    assert all(char in rest for char in out)


def test_nothing_is_held_back_that_cannot_become_a_marker():
    parser = OutputParser(None, TOOL_PARSERS["hermes"](NAMES))
    assert parser.feed("a < b") == [Content("a < b")]
    assert parser.feed(" ") == []
    assert parser.feed("<tool") == []
    assert parser.feed("box>") == [Content(" <toolbox>")]
    assert parser.feed("<tool_call>") == []
    assert parser.feed('{"name": "f", "arguments": ') == []
    start, arguments = parser.feed('{"a')
    assert (start.call, start.name, arguments) == (0, "f", Arguments(0, '{"a'))
    assert parser.feed('": 1') == [Arguments(0, '": 1')]
    assert parser.feed("}}") == [Arguments(0, "}"), CallEnd(0)]
    assert parser.feed("</tool_call>") == []


def test_of_calls_that_may_not_be_parallel_the_first_is_the_end():
    parser = OutputParser(None, TOOL_PARSERS["hermes"](NAMES), parallel=False)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    events = parser.feed("Hm. " + call + call + "more")
    assert [type(event) for event in events] == [Content, CallStart, Arguments, CallEnd]
    assert parser.complete
    assert parser.feed(call) == []
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm, 2.\n\n</think>\n\n4 < 5 \n", "Hm, 2.", "4 < 5 \n"),
        (False, "\n<think>\n\n</think>\n\nHi", "", "Hi"),
        (True, "\nHm.\n</think>Hi", "Hm.", "Hi"),
        (True, "<think>\nHm.</think>Hi <think>no</think>", "Hm.", "Hi <think>no</think>"),
        (False, "Hi <think>no</think>", "", "Hi <think>no</think>"),
        (False, " \n", "", " \n"),
        (True, "cut <off </thin", "cut <off </thin", ""),
        (True, "no end \n", "no end \n", ""),
        (False, "<thi", "", "<thi"),
        (True, "<thi", "<thi", ""),
        (True, "", "", ""),
    ],
)
def test_reasoning(opened, text, reasoning, content):
    for pieces in ([text], list(text)):
        assert parsed(OutputParser(Think(opened), None), pieces) == (content, reasoning, [])


def test_reasoning_then_calls_as_qwen3_writes_them():
    text = (
        '<think>\nI call <tool_call> now.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    )
    parser = OutputParser(Think(False), TOOL_PARSERS["hermes"](NAMES))
    assert parsed(parser, list(text)) == ("", "I call <tool_call> now.", [("f", '{"a": 1}')])


def test_a_parser_is_idle_once_all_that_comes_is_content():
    parser = OutputParser(Think(False), None)
    assert not parser.idle
    parser.feed("<think>x</think>\n")
    assert not parser.idle
    assert parser.feed("\nHi") == [Content("Hi")]
    assert parser.idle
    assert not OutputParser(None, TOOL_PARSERS["hermes"](NAMES)).idle


def test_formats_are_found_in_the_template(data_file):
    def found(template):
        formats = Formats.choose("auto", "auto", template)
        return formats.tools, formats.reasoning

    for name, reasoning in (("qwen2_5", None), ("qwen3", Think)):
        config = json.loads(data_file(f"tokenizers/{name}_tokenizer_config.json").read_text())
        assert found(config["chat_template"]) == (TOOL_PARSERS["hermes"], reasoning)
    assert found("{{ '[TOOL_CALLS]' + calls | tojson }}") == (TOOL_PARSERS["mistral"], None)
    assert found('<|start_header_id|>{"name": "f", "parameters": {}}') == (TOOL_PARSERS["llama3_json"], None)
    assert found("<tool_call>\n<function=f><parameter=a>") == (None, None)
    assert found("{{ messages }}") == (None, None)


def test_formats_by_name():
    template = '<tool_call> "arguments" </think>'
    assert Formats.choose("mistral", "none", template) == Formats(TOOL_PARSERS["mistral"], None)
    assert Formats.choose("none", "think", "") == Formats(None, REASONING_PARSERS["think"], raw_calls=True)
    with pytest.raises(ValueError, match=r"tool_parser must be one of auto, none, hermes, llama3_json, mistral"):
        Formats.choose("xml", "auto", "")
    with pytest.raises(ValueError, match="reasoning_parser"):
        Formats.choose("auto", "hermes", "")


# ------------------------------------------------------------------------------------------------------- forced calls

POINT = {
    "properties": {"at": {"$ref": "#/$defs/at"}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"at": {"type": "integer"}},
}
FORCED = {"f": POINT, "g": {"type": "object", "properties": {}, "additionalProperties": False}}
TOKENS = [*(chr(number) for number in range(32, 127)), "\n", "</s>"]


def accepts(form, text):
    """Whether the form takes the text from its beginning to its end."""
    grammar = json.dumps({"type": "structural_tag", "format": form})
    info = xgrammar.TokenizerInfo(TOKENS, stop_token_ids=[len(TOKENS) - 1])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_structural_tag(grammar))
    ids = [TOKENS.index(char) for char in text]
    return all(matcher.accept_token(token) for token in ids) and matcher.accept_token(len(TOKENS) - 1)


FORMS = {
    "hermes": ('<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>', "{}", "\n"),
    "llama3_json": ('{{"name": "{}", "parameters": {}}}', "{}", "; "),
    "mistral": ('{{"name": "{}", "arguments": {}}}', "[{}]", ", "),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_forced_output_is_calls_and_is_read_as_such(name):
    form, frame, separator = FORMS[name]

    def text(*calls):
        joined = separator.join(form.format(*call) for call in calls)
        return frame.replace("{}", joined)

    one, two = [("f", '{"at": 3}')], [("g", "{}"), ("f", '{"at": 3}')]
    grammar = calls_form(TOOL_PARSERS[name], FORCED)
    for calls in (one, two):
        assert accepts(grammar, text(*calls))
        parser = OutputParser(None, TOOL_PARSERS[name](NAMES, prefilled=True))
        assert parsed(parser, text(*calls)) == ("", "", calls)
        assert (
            parsed(OutputParser(None, TOOL_PARSERS[name](NAMES)), TOOL_PARSERS[name].prefill + text(*calls))[2] == calls
        )
    assert not accepts(grammar, "Hello")
    assert not accepts(grammar, "")
    assert not accepts(grammar, text(("f", '{"at": "3"}')))
    assert not accepts(grammar, text(("stranger", "{}")))
    single = calls_form(TOOL_PARSERS[name], FORCED, parallel=False)
    assert accepts(single, text(*one))
    assert not accepts(single, text(*two))


@pytest.mark.parametrize(("name", "texts"), [("hermes", ["Hi ", "\n", " Bye"]), ("llama3_json", ["", "; ", ""])])
def test_calls_in_a_free_output_follow_their_schemas(name, texts):
    form, (before, between, behind) = FORMS[name][0], texts
    grammar = free_form(TOOL_PARSERS[name], FORCED)
    good = before + form.format("f", '{"at": 3}') + between + form.format("g", "{}") + behind
    parser = OutputParser(None, TOOL_PARSERS[name](NAMES))
    assert parsed(parser, good)[2] == [("f", '{"at": 3}'), ("g", "{}")]
    for text in (good, "", "Hi", " \n Hi {", 'It is {"name": "f"}'):
        assert accepts(grammar, text), text
    for call in (("f", '{"at": "3"}'), ("f", "{}"), ("g", '{"a": 1}'), ("stranger", "{}")):
        assert not accepts(grammar, before + form.format(*call) + behind), call
    assert free_form(TOOL_PARSERS["mistral"], FORCED) is None


def test_a_forced_output_may_be_thought_about():
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    form = calls_form(TOOL_PARSERS["hermes"], FORCED)
    free, opened = (behind_reasoning(form, Think, opened=opened) for opened in (False, True))
    thought = "\nHm <tool_call> {\n</think>\n\n"
    assert accepts(free, call)
    assert accepts(free, "<think>" + thought + call)
    assert accepts(opened, thought + call)
    assert not accepts(opened, call)
    for grammar, text in ((free, "<think>"), (opened, "")):
        assert not accepts(grammar, text + thought)
        assert not accepts(grammar, text + thought + "Hm " + call)
    assert not accepts(free, thought + call)


def test_white_space_in_forced_arguments_is_bounded():
    grammar = calls_form(TOOL_PARSERS["llama3_json"], FORCED)
    assert accepts(grammar, '{"name": "f", "parameters": {' + " " * 16 + '"at": 3}}')
    assert not accepts(grammar, '{"name": "f", "parameters": {' + " " * 17 + '"at": 3}}')
