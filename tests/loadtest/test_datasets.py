"""What is sampled, against the counts of the reference runs and of the data's own page."""

import csv
import json
import lzma
import math
from collections import Counter
from pathlib import Path

import pytest

from loadtest.datasets import (
    DATASETS,
    Sampling,
    custom,
    multi_turn,
    prefix_trace,
    random_texts,
    shared_prefix,
    sharegpt,
)
from loadtest.records import LoadTestError
from loadtest.tokens import LocalTokenizer


@pytest.fixture(scope="module")
def qwen(data_file, tmp_path_factory) -> LocalTokenizer:
    """Qwen2.5's tokenizer: that of Qwen3 without the four tokens that it added."""
    fields = json.loads(lzma.decompress(data_file("tokenizers/qwen3_tokenizer.json.xz").read_bytes()))
    fields["added_tokens"] = [token for token in fields["added_tokens"] if not 151665 <= token["id"] <= 151668]
    path = tmp_path_factory.mktemp("qwen2.5") / "tokenizer.json"
    path.write_text(json.dumps(fields))
    return LocalTokenizer.from_file(path.parent)


def lengths(chains):
    prompts = [prompt for chain in chains for prompt in chain.prompts]
    return [prompt.prompt_len for prompt in prompts], [prompt.output_len for prompt in prompts]


def test_sharegpt_samples_what_the_reference_sampled(data_file, own_data, qwen):
    path = data_file("sharegpt_vllm_format.json")
    rows = list(csv.DictReader((own_data / "lengths_sharegpt.csv").read_text().splitlines()))
    reference = Counter((int(row["prompt_tokens"]), int(row["output_tokens"])) for row in rows)
    assert reference.total() == 519
    # The file lacks 24 of the entries that the lengths were counted of; all others are there, with the same lengths.
    kept = sharegpt(Sampling(path, 2000, seed=1, oversample=False), qwen)
    found = Counter(zip(*lengths(kept), strict=True))
    assert found.total() == 519 - 24
    assert found <= reference
    chains = sharegpt(Sampling(path, 2000, seed=1), qwen)
    assert chains[: len(kept)] == kept
    assert len(chains) == 2000
    # Another number of requests is another part of the same order.
    assert sharegpt(Sampling(path, 25, seed=1), qwen) == chains[:25]
    assert sharegpt(Sampling(path, 25, seed=2), qwen) != chains[:25]


def test_sharegpt_keeps_short_answers_when_the_length_is_given(tmp_path):
    class Words:
        ids, fillers, vocab_size, specials_added = range(9), range(9), 9, 0

        def encode(self, texts, *, special=True):
            return [[0] * len(text.split()) for text in texts]

        def decode(self, ids):
            return [" ".join("w" for _ in each) for each in ids]

    def entry(*sizes):
        return {"conversations": [{"from": "gpt", "value": "w " * size} for size in sizes]}

    path = tmp_path / "file.json"
    path.write_text(
        json.dumps(
            [
                entry(4, 4),
                entry(3, 4),
                entry(4, 3),
                entry(1024, 1024),
                entry(1025, 4),
                entry(1024, 1025),
                entry(9),
                {"id": 1},
            ]
        )
    )
    sampling = Sampling(path, 9, shuffle=False, oversample=False)
    assert lengths(sharegpt(sampling, Words())) == ([4, 1024], [4, 1024])
    given = Sampling(path, 9, shuffle=False, oversample=False, output_len=2)
    assert lengths(sharegpt(given, Words())) == ([4, 4, 1024, 1024], [2, 2, 2, 2])


def test_random_texts_have_their_lengths(qwen):
    sampling = Sampling(count=20, seed=3, random_input_len=300, random_output_len=40, random_prefix_len=50)
    chains = random_texts(sampling, qwen)
    inputs, outputs = lengths(chains)
    assert inputs == [350] * 20
    assert outputs == [40] * 20
    texts = [chain.prompts[0].content for chain in chains]
    assert [len(ids) for ids in qwen.encode(texts)] == [350] * 20
    assert len({text[:60] for text in texts}) == 1  # the common prefix
    assert len(set(texts)) == 20
    assert random_texts(sampling, qwen) == chains


def test_random_lengths_spread_over_the_range(qwen):
    sampling = Sampling(count=200, random_input_len=100, random_output_len=10, range_ratio=0.5)
    inputs, outputs = lengths(random_texts(sampling, qwen))
    assert 50 <= min(inputs) < 60
    assert 140 < max(inputs) <= 150
    assert set(outputs) == set(range(5, 16))


def test_trace_keeps_the_sharing_of_its_blocks(data_file):
    chains = prefix_trace(Sampling(data_file("prefix_trace.jsonl"), 2000), None)
    inputs, _ = lengths(chains)
    assert (len(inputs), sum(inputs)) == (2000, 856_614)
    assert chains[-1].timestamp >= chains[0].timestamp == 0
    # An infinite cache of 16-token pages, where the last token of a prompt is always computed.
    seen: set[tuple[int, ...]] = set()
    cached = 0
    for chain in chains:
        ids = chain.prompts[0].content
        pages = [tuple(ids[: end + 16]) for end in range(0, len(ids) - 15, 16)]
        usable = [page for page in pages if len(page) < len(ids)]
        cached += 16 * next((n for n, page in enumerate(usable) if page not in seen), len(usable))
        seen.update(pages)
    # Measured on vLLM, one request at a time, with an ample pool.
    assert cached == 252_032


def test_multi_turn_asks_for_each_answer_of_a_conversation(data_file, qwen):
    path = data_file("sharegpt_like.jsonl")
    chains = multi_turn(Sampling(path, 10**6, shuffle=False, output_len=1), None)
    assert sum(len(chain.prompts) for chain in chains) == 2672
    for chain in chains:
        for earlier, later in zip(chain.prompts, chain.prompts[1:], strict=False):
            assert later.content[: len(earlier.content)] == earlier.content
    some = multi_turn(Sampling(path, 7, shuffle=False), qwen)
    assert sum(len(chain.prompts) for chain in some) == 7
    answer = json.loads(path.read_text().splitlines()[0])["turns"][1]["content"]
    assert some[0].prompts[0].output_len == len(qwen.encode([answer])[0])


def test_shared_prefix_groups():
    sampling = Sampling(count=1024, seed=5)
    chains = shared_prefix(sampling, None)
    inputs, outputs = lengths(chains)
    assert inputs == [2048 + 128] * 1024
    assert outputs == [256] * 1024
    groups = Counter(tuple(chain.prompts[0].content[:2048]) for chain in chains)
    assert list(groups.values()) == [16] * 64
    assert shared_prefix(sampling, None) == chains
    with pytest.raises(LoadTestError, match="fewer"):
        shared_prefix(Sampling(count=63), None)


def test_custom_lines(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 3}\n\n{"prompt": "b", "output_tokens": 4}\n')
    (first, second) = custom(Sampling(path, 2, shuffle=False), None)
    assert (first.prompts[0].content, first.prompts[0].output_len) == ("a", 3)
    assert second.prompts[0].content == "b"
    assert {chain.prompts[0].output_len for chain in custom(Sampling(path, 5, output_len=9), None)} == {9}
    assert len(custom(Sampling(path, 5), None)) == 5
    assert len(custom(Sampling(path, 5, oversample=False), None)) == 2


@pytest.mark.parametrize(("text", "message"), [("{", "line 1"), ('{"prompt": "a"}', "output_tokens"), ("", "is empty")])
def test_bad_files_are_told(tmp_path, text, message):
    path = tmp_path / "file.jsonl"
    path.write_text(text)
    with pytest.raises(LoadTestError, match=message):
        custom(Sampling(path, 2), None)


def test_missing_files_are_told():
    with pytest.raises(LoadTestError, match="--dataset-path"):
        sharegpt(Sampling(), None)
    with pytest.raises(LoadTestError, match="nowhere"):
        multi_turn(Sampling(Path("nowhere.jsonl")), None)
    with pytest.raises(LoadTestError, match="cannot be read as a tokenizer"):
        LocalTokenizer.from_file(Path("nowhere"))


_TRACE = {"timestamp": 0, "input_length": 512, "output_length": 5, "hash_ids": [1]}


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("custom", {"prompt": "a", "output_tokens": 0}, "`int` >= 1"),
        ("custom", {"prompt": "a", "output_tokens": 2.5}, "got `float`"),
        ("custom", {"prompt": "a", "output_tokens": "many"}, "got `str`"),
        ("custom", {"prompt": "a"}, "no output_tokens"),
        ("custom", {"prompt": None, "output_tokens": 1}, "no prompt"),
        ("custom", {"prompt": 3, "output_tokens": 1}, "prompt"),
        ("custom", {"output_tokens": 1}, "no prompt"),
        ("custom", {"turns": [], "output_tokens": 1}, "length >= 1"),
        ("custom", 7, ""),
        ("custom", ["prompt"], ""),
        ("multi-turn", {"turns": [{"role": "user"}]}, "field `content`"),
        ("multi-turn", {"turns": None}, ""),
        ("prefix-trace", _TRACE | {"hash_ids": []}, "hash_ids"),
        ("prefix-trace", _TRACE | {"hash_ids": ["1"]}, "hash_ids"),
        ("prefix-trace", _TRACE | {"input_length": -1}, "input_length"),
        ("prefix-trace", _TRACE | {"timestamp": math.nan}, ""),
        ("prefix-trace", {"timestamp": 0}, "field `input_length`"),
    ],
)
def test_a_line_of_another_form_is_named(tmp_path, name, row, message):
    good = {"prompt": "a", "output_tokens": 1, "turns": [], **_TRACE}
    path = tmp_path / "lines"
    path.write_text(f"{json.dumps(good)}\n\n{json.dumps(row)}\n")
    with pytest.raises(LoadTestError, match=f"line 3 is not of the form .*{message}"):
        DATASETS[name](Sampling(path, 9), None)


@pytest.mark.parametrize("name", ["custom", "multi-turn", "prefix-trace"])
def test_a_file_without_lines_is_told(tmp_path, name):
    path = tmp_path / "lines"
    path.write_text("\n")
    with pytest.raises(LoadTestError, match="is empty"):
        DATASETS[name](Sampling(path, 9), None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("multi-turn", '{"turns": [{"role": "user", "content": "nobody answers"}]}'),
        ("multi-turn", '{"turns": [{"role": "assistant", "content": "nobody asked"}]}'),
        ("sharegpt", '[{"conversations": [{"value": "alone"}]}]'),
    ],
)
def test_a_file_of_which_nothing_can_be_asked_is_told(tmp_path, name, text):
    path = tmp_path / "entries"
    path.write_text(text)
    with pytest.raises(LoadTestError, match="no entry can be used"):
        DATASETS[name](Sampling(path, 9), None)


@pytest.mark.parametrize("text", ["3", "[3]", "{}", '[{"conversations": 3}]', '[{"conversations": ["a", "b"]}]'])
def test_conversations_of_another_form_are_told(tmp_path, text):
    path = tmp_path / "entries"
    path.write_text(text)
    with pytest.raises(LoadTestError, match="is not of the form"):
        DATASETS["sharegpt"](Sampling(path, 9), None)


def test_a_line_separator_of_unicode_ends_no_line(tmp_path):
    path = tmp_path / "lines"
    path.write_text('{"prompt": "a\u2028b", "output_tokens": 1}\r\n', encoding="utf-8")
    (chain,) = DATASETS["custom"](Sampling(path, 1), None)
    assert chain.prompts[0].content == "a\u2028b"
