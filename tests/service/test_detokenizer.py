"""service.detokenizer: joined pieces equal the whole decode, and stop strings cut where the whole text says."""

import json
import lzma
import time
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from service.detokenizer import Detokenizer, StopChecker, TextStream
from service.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2(default_model: Path) -> Tokenizer:
    return Tokenizer.load(default_model)


@pytest.fixture(scope="session")
def qwen(data_file: Callable[[str], Path]) -> Tokenizer:
    text = lzma.decompress(data_file("tokenizers/qwen3_tokenizer.json.xz").read_bytes()).decode()
    return Tokenizer(tokenizers.Tokenizer.from_str(text), {})


@pytest.fixture(scope="session")
def spm() -> Tokenizer:
    """A SentencePiece vocabulary with byte fallback: most characters are bytes."""
    pieces = ["▁", "a", "b", "▁a", "ab", "▁ab", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *pieces]
    metadata: dict[str, Any] = {
        "model": "llama", "tokens": tokens, "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "scores": [-float(number) for number in range(len(tokens))], "bos_token_id": 1, "add_bos_token": False,
    }  # fmt: skip
    return Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, Path("spm.gguf"))


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], **options: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.step(number) for number in ids), detokenizer.finish()]


# ----------------------------------------------------------------------------------------------------- whole characters


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
@example(text="👨‍👩‍👧‍👦 é\ufffd\ufffd 你好")
def test_random_unicode(smollm2: Tokenizer, qwen: Tokenizer, spm: Tokenizer, text: str) -> None:
    # Qwen composes characters; SmolLM2's vocabulary lacks some bytes, so that some characters are no text there.
    wholes = {qwen: unicodedata.normalize("NFC", text), spm: text, smollm2: None}
    for tokenizer, whole in wholes.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        decoded = tokenizer.backend.decode(ids)
        assert whole is None or decoded == whole
        pieces = pieces_of(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids) == decoded
        if whole is not None:
            assert pieces[-1] == ""  # nothing was incomplete at the end
            for at in range(len(pieces)):  # never U+FFFD for a character that is merely incomplete
                assert whole.startswith("".join(pieces[:at]))


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(17, 300)), max_size=50), skip=st.booleans())
def test_random_tokens_equal_the_library(smollm2: Tokenizer, ids: list[int], skip: bool) -> None:
    whole = smollm2.backend.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces_of(smollm2, ids, skip_special_tokens=skip)) == whole


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 152_000), st.integers(0, 260)), max_size=50), skip=st.booleans())
def test_random_tokens_of_qwen_equal_the_library(qwen: Tokenizer, ids: list[int], skip: bool) -> None:
    whole = qwen.backend.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces_of(qwen, ids, skip_special_tokens=skip)) == whole


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 265), max_size=30), skip=st.booleans())
def test_random_tokens_with_byte_fallback(spm: Tokenizer, ids: list[int], skip: bool) -> None:
    joined = "".join(pieces_of(spm, ids, skip_special_tokens=skip))
    assert joined == spm.decode(ids, skip_special_tokens=skip)
    library = spm.backend.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in library:
        assert joined == library


def test_unicode_samples(smollm2: Tokenizer, qwen: Tokenizer, spm: Tokenizer, data_file: Callable[[str], Path]) -> None:
    lines = data_file("unicode_samples.jsonl").read_text(encoding="utf-8").splitlines()
    for text in [json.loads(line)["text"] for line in lines]:
        for tokenizer in (smollm2, qwen, spm):
            ids = tokenizer.encode(text)
            pieces = pieces_of(tokenizer, ids)
            assert "".join(pieces) == tokenizer.decode(ids)
            assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
        assert smollm2.decode(smollm2.encode(text)) == text


def test_pieces_come_no_later_than_those_of_decode_stream(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("naïve 👩‍🚀 test — 漢字 done", add_special_tokens=False)
    stream, detokenizer, theirs, ours = DecodeStream(skip_special_tokens=True), Detokenizer(smollm2), "", ""
    for number in ids:
        theirs += stream.step(smollm2.backend, number) or ""
        ours += detokenizer.step(number)
        assert ours.startswith(theirs)
    assert ours == theirs


def test_incomplete_character_waits_and_is_flushed(smollm2: Tokenizer) -> None:
    """vllm #17448, #19449, #24159: no U+FFFD before the character is known to be broken."""
    ids = smollm2.encode("👋")
    assert len(ids) > 1
    assert pieces_of(smollm2, ids[:-1]) == [""] * (len(ids) - 1) + ["\ufffd"]
    assert pieces_of(smollm2, ids)[-2:] == ["👋", ""]
    hello = smollm2.encode(" hello")
    assert "".join(pieces_of(smollm2, [*ids[:-1], *hello])) == "\ufffd hello"


def test_invalid_bytes_are_not_quadratic(smollm2: Tokenizer) -> None:
    """sglang #34852: ids that keep decoding to U+FFFD. Ten times as many may cost ten times as much, not a hundred."""
    invalid = next(number for number in range(17, 300) if smollm2.token_bytes(number) == b"\x80")

    def seconds(count: int) -> float:
        start = time.thread_time()
        pieces = pieces_of(smollm2, [invalid] * count)
        taken = time.thread_time() - start
        assert pieces == ["\ufffd"] * count + [""]
        return taken

    few, many = min(seconds(2_000) for _ in range(5)), min(seconds(20_000) for _ in range(3))
    assert many < 40 * few


def test_leading_space_of_sentencepiece(spm: Tokenizer) -> None:
    prompt, answer = spm.encode("ab"), spm.encode("a ab")
    assert "".join(pieces_of(spm, answer)) == "a ab" == spm.decode(answer)
    # Behind a prompt the space belongs to the text.
    behind = "".join(pieces_of(spm, answer, after_prompt=True))
    assert behind == " a ab"
    assert spm.decode(prompt) + behind == spm.decode([*prompt, *answer])


# --------------------------------------------------------------------------------------------------------- stop strings


def run_stops(pieces: Sequence[str], stops: Sequence[str], *, include: bool = False) -> tuple[list[str], str | None]:
    checker = StopChecker(stops, include_stop=include)
    sent = []
    for piece in pieces:
        text, stop = checker.step(piece)
        sent.append(text)
        if stop is not None:
            return sent, stop
    return [*sent, checker.finish()], None


def whole_text_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The first complete stop string of the whole text, by trying every beginning of it."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=250, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
@example(pieces=["aaab"], stops=["aab"], include=False)
@example(pieces=["ab", "ab", "ac"], stops=["ababac"], include=False)
@example(pieces=["abcd"], stops=["abcde", "bc"], include=False)
def test_stops_cut_as_the_whole_text_says(pieces: list[str], stops: list[str], include: bool) -> None:
    text = "".join(pieces)
    kept, want = whole_text_stop(text, stops)
    sent, stop = run_stops(pieces, stops, include=include)
    assert stop == want
    assert "".join(sent) == kept + (want if include and want else "")
    if len(stops) == 1 and not include:
        assert "".join(sent) == text.split(stops[0])[0]


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=3), max_size=10),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_held_back_is_the_longest_beginning_of_a_stop(pieces: list[str], stops: list[str]) -> None:
    checker, text, sent = StopChecker(stops), "", ""
    for piece in pieces:
        delta, stop = checker.step(piece)
        if stop is not None:
            return
        text, sent = text + piece, sent + delta
        beginnings = [stop[:size] for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
        assert text == sent + max(beginnings, key=len)


def test_long_stops_that_do_not_come_cost_no_more_while_another_is_held() -> None:
    """Were each compared at all of its lengths, a token would take 1.3 ms, and 128 continuations hold up all others."""
    checker = StopChecker(["ab" * 499 + "c", *(character * 1000 for character in "defghijklmnopqr")])
    began = time.process_time()
    assert "".join(checker.step("ab"[number % 2])[0] for number in range(2000)) == "ab" * 501
    assert time.process_time() - began < 0.5


def test_stop_string_never_leaks_and_held_text_is_flushed() -> None:
    """vllm #3574, sglang #11462: no part of a stop string is sent; llama.cpp #15007: what is held is not lost."""
    assert run_stops(["Hello", " <", "|end", "|> x"], ["<|end|>"]) == (["Hello", " ", "", ""], "<|end|>")
    assert run_stops(["Hello", " <", "|end"], ["<|end|>"]) == (["Hello", " ", "", "<|end"], None)
    assert run_stops(["a <", "b"], ["<|end|>"]) == (["a ", "<b", ""], None)
    assert run_stops(["x<|end", "|>y"], ["<|end|>"], include=True) == (["x", "<|end|>"], "<|end|>")


# ------------------------------------------------------------------------------------------------------------- together


def stream_text(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str], *, min_tokens: int = 0, include: bool = False
) -> tuple[str, str | None, int]:
    """Returns the text, the stop string, and how many tokens it took."""
    stream = TextStream(Detokenizer(tokenizer), StopChecker(stops, include_stop=include), min_tokens=min_tokens)
    sent = ""
    for taken, number in enumerate(ids, start=1):
        text, stop = stream.step(number)
        sent += text
        if stop is not None:
            return sent, stop, taken
    text, stop = stream.finish()
    return sent + text, stop, len(ids)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), ids=st.lists(st.integers(17, 2000), min_size=1, max_size=40))
def test_random_tokens_with_a_stop_of_their_text(smollm2: Tokenizer, data: st.DataObject, ids: list[int]) -> None:
    text = smollm2.decode(ids)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 12))]
    if not stop:
        return
    got, matched, taken = stream_text(smollm2, ids, [stop])
    assert matched == stop
    assert got == text.split(stop)[0]
    # It ends with the very token that completes the stop string (one later where only the next shows a byte invalid).
    assert stop not in smollm2.decode(ids[: taken - 1]).rstrip("\ufffd") or stop.endswith("\ufffd")


def test_stop_across_token_borders(smollm2: Tokenizer) -> None:
    """vllm #48853, #45636: across tokens, in held text, and left in the text on request."""
    ids = smollm2.encode("One two\n\nUser: three")
    assert stream_text(smollm2, ids, ["\nUser:"])[:2] == ("One two\n", "\nUser:")
    assert stream_text(smollm2, ids, ["o\n\nU"], include=True)[:2] == ("One two\n\nU", "o\n\nU")
    assert stream_text(smollm2, ids, ["four"])[:2] == ("One two\n\nUser: three", None)


def test_stop_that_only_the_end_completes(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("x👋")[:-1]
    assert stream_text(smollm2, ids, ["\ufffd"]) == ("x", "\ufffd", len(ids))


def test_no_stop_within_the_first_min_tokens(smollm2: Tokenizer) -> None:
    """vllm #21987, #5849."""
    ids = smollm2.encode("stop a stop b stop c")
    tokens = [smollm2.decode([number]) for number in ids]
    assert tokens == ["stop", " a", " stop", " b", " stop", " c"]
    assert stream_text(smollm2, ids, ["stop"])[0] == ""
    assert stream_text(smollm2, ids, ["stop"], min_tokens=1)[0] == "stop a "
    assert stream_text(smollm2, ids, ["stop"], min_tokens=3)[0] == "stop a stop b "
    assert stream_text(smollm2, ids, ["stop"], min_tokens=6)[:2] == ("stop a stop b stop c", None)
    # A stop string that begins before the border and ends behind it would cut text that had to be generated.
    assert stream_text(smollm2, ids, ["a stop"], min_tokens=2)[:2] == ("stop a stop b stop c", None)
