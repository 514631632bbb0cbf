"""service.long_text: the ids of a text that is cut are those that the `tokenizers` library gives for the whole."""

import itertools
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from service import long_text
from service.tokenizer import Tokenizer

TABLES = [
    "sharegpt_like.jsonl", "unicode_samples.jsonl", "copy_heavy.jsonl", "spec_bench.jsonl", "azure_code.csv",
    "jsonschemabench.jsonl",
]  # fmt: skip
UNCUT = ["azure_code.csv"]  # numbers only
FRAGMENTS = [
    "a", "b", "don", "The", "zzz", " a", "x y", "I'm", "'s", "'", "1", "234", " 5", ".", "...", "-", "_", "(", "def f(",
    " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2000", "\u3000", "\u0301", "e\u0301", " \u0301", "\u212a", "é", "ß",
    "你好", "。", "한", "\u1100\u1161", "👋🏽", "👨‍👩‍👧", "\ufeff", "`", "\\n", '"', "İ",
    "<|im_end|>", "<|im_start|>user\n", " <think> ", "<|im_end", "|>",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def in_parallel() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "true")
        yield


@pytest.fixture
def short_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch)
        yield


def cut_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(long_text, "LEAST_CHARACTERS", 6)
    patch.setattr(long_text, "MOST_PARTS", 1000)


@pytest.fixture(scope="module")
def families(default_model: Path, data_file: Callable[[str], Path]) -> list[Tokenizer]:
    """SmolLM2's tokenizer, Qwen 3's, and that as Llama 3 would have it: three digits at a time, BOS in front."""
    qwen = lzma.decompress(data_file("tokenizers/qwen3_tokenizer.json.xz").read_bytes()).decode()
    llama = tokenizers.Tokenizer.from_str(qwen.replace(r"|\\p{N}|", r"|\\p{N}{1,3}|"))
    ends = [("<|endoftext|>", 151643), ("<|im_end|>", 151645)]
    template = processors.TemplateProcessing(single="<|endoftext|> $A <|im_end|>", special_tokens=ends)
    llama.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    found = [
        Tokenizer.load(default_model),
        *(Tokenizer(one, {}) for one in (tokenizers.Tokenizer.from_str(qwen), llama)),
    ]
    assert [tokenizer.encode("x")[:-1] for tokenizer in found[:2]] == [[], []]
    assert llama.encode("x").ids[::2] == [151643, 151645]
    return found


def check(tokenizer: Tokenizer, text: str) -> None:
    for special in (True, False):
        assert tokenizer.encode(text, special) == tokenizer.backend.encode(text, add_special_tokens=special).ids


def texts_of(value: Any) -> list[str]:
    """Every string in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for one in value for text in texts_of(one)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("name", TABLES)
def test_real_texts(name: str, families: list[Tokenizer], data_file: Callable[[str], Path]) -> None:
    raw = data_file(name).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in raw[:600_000].splitlines()[:-1]] if name.endswith("jsonl") else []
    for text in (raw[:40_000], "\n".join(text for row in rows for text in texts_of(row))[:40_000]):
        assert not text or len(long_text.cut(text)) >= (1 if name in UNCUT else 2)
        for tokenizer in families:
            check(tokenizer, text)
        with pytest.MonkeyPatch.context() as patch:
            cut_small(patch)
            for tokenizer in families:
                check(tokenizer, text[:3_000])


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=60))
def test_made_texts(families: list[Tokenizer], parts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch)
        for tokenizer in families:
            check(tokenizer, "".join(parts))


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), min_size=10, max_size=80))
def test_random_tokens(families: list[Tokenizer], ids: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch)
        for tokenizer in families:
            check(tokenizer, tokenizer.decode(ids, skip_special_tokens=False))


def test_parts_are_few_alike_and_the_whole_text() -> None:
    text = "some words and 12 more, " * 10_000
    parts = long_text.cut(text)
    assert "".join(parts) == text
    assert len(parts) == 8
    assert max(map(len, parts)) - min(map(len, parts)) < 100
    assert all(
        left[-1].isalpha() and right[0] == " " and right[1].isalpha() for left, right in itertools.pairwise(parts)
    )


@pytest.mark.parametrize("text", ["", "a b " * 999, "你好。世界 " * 9999, "a  b" * 9999, "a1 2" * 9999, "é é" * 9999])
def test_short_texts_and_those_without_a_place_stay_whole(text: str) -> None:
    assert long_text.cut(text) == [text]


# ------------------------------------------------------------------------------------------ tokenizers that are not cut


def made(merges: list[tuple[str, str]], space: str = "Ġ", **options: Any) -> tokenizers.Tokenizer:
    """A tokenizer of the letters a to e and the space, which is spelled like this, and what these merges make."""
    tokens = [*"abcde", space, *dict.fromkeys(left + right for left, right in merges)]
    backend = tokenizers.Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges, **options))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


CROSSING = [("a", "Ġ"), ("aĠ", "b"), ("Ġ", "b")]


def plain() -> tokenizers.Tokenizer:
    return made(CROSSING)


def metaspace() -> tokenizers.Tokenizer:
    backend = made([("a", "▁"), ("a▁", "b")], "▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
    return backend


def no_pre_tokenizer() -> tokenizers.Tokenizer:
    backend = made([("a", "▁"), ("a▁", "b")], "▁")
    backend.pre_tokenizer = None  # type: ignore[assignment]
    backend.normalizer = normalizers.Replace(" ", "▁")
    return backend


def no_pattern() -> tokenizers.Tokenizer:
    backend = plain()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return backend


def bytes_first() -> tokenizers.Tokenizer:
    """The pattern sees the bytes of spaces as letters."""
    backend = plain()
    split = pre_tokenizers.Split(Regex(long_text.QWEN2_PATTERN), "isolated")
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), split]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return backend


def other_pattern() -> tokenizers.Tokenizer:
    backend = plain()
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("[ab]+ ?[ab]*"), "isolated"), to_bytes])
    return backend


def pre_tokens_joined() -> tokenizers.Tokenizer:
    backend = plain()
    split = pre_tokenizers.Split(Regex(long_text.QWEN2_PATTERN), "contiguous")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    return backend


def normalized_away() -> tokenizers.Tokenizer:
    backend = made([("a", "c"), ("ac", "b")])
    backend.normalizer = normalizers.Replace(" ", "c")
    return backend


def with_token(content: str, **options: bool) -> Callable[[], tokenizers.Tokenizer]:
    def make() -> tokenizers.Tokenizer:
        backend = plain()
        backend.add_tokens([AddedToken(content, **options)])
        return backend

    return make


def text_twice() -> tokenizers.Tokenizer:
    backend = plain()
    backend.post_processor = processors.TemplateProcessing(single="$A $A", special_tokens=[])
    return backend


@pytest.mark.parametrize(
    "make",
    [
        metaspace,
        no_pre_tokenizer,
        no_pattern,
        bytes_first,
        other_pattern,
        pre_tokens_joined,
        normalized_away,
        text_twice,
        pytest.param(with_token("a b"), id="token over a space"),
        pytest.param(with_token("a "), id="token that ends in a space"),
        pytest.param(with_token(" b a", normalized=False), id="token with a space within"),
        pytest.param(with_token("a", rstrip=True), id="token that takes the space behind it"),
        pytest.param(with_token(" b", single_word=True), id="token that looks before it"),
    ],
)
@pytest.mark.parametrize("text", ["a b " * 5, "a b a " * 4, "ab ba a b cab " * 3])
def test_what_could_reach_across_is_not_cut(
    make: Callable[[], tokenizers.Tokenizer], text: str, short_parts: None
) -> None:
    assert len(long_text.cut(text)) > 1
    check(Tokenizer(make(), {}), text)


def test_chance_is_not_cut() -> None:
    assert long_text.ends_of_parted(made(CROSSING, dropout=0.5)) is None
    assert long_text.ends_of_parted(plain()) == ([], [])


@pytest.mark.parametrize(
    ("single", "ends"), [("$A", ([], [])), ("[a] $A", ([9], [])), ("[a] [b] $A [a]", ([9, 10], [9]))]
)
def test_ends_are_those_of_the_template(single: str, ends: tuple[list[int], list[int]], short_parts: None) -> None:
    backend = plain()
    backend.add_special_tokens(["[a]", "[b]"])
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("[a]", 9), ("[b]", 10)])
    assert long_text.ends_of_parted(backend) == ends
    check(Tokenizer(backend, {}), "a b [a] ab ba" * 5)
