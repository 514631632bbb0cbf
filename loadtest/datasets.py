"""What the requests of a load test hold: real texts, random ones, traces, chats. Knows no server.

ShareGPT, random and custom are sampled by the rules of `vllm bench serve` 0.26, so that the same file and the same seed
give the same requests. Each function returns chains of prompts in the order in which they are to be sent.
"""

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from loadtest.records import Chain, LoadTestError, Message, Prompt
from loadtest.tokens import COMMON_IDS, Tokenizer

_BATCH = 128
_TRIES = 10
_TRACE_BLOCK = 512  # tokens that a hash id of the trace stands for
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Sampling:
    """What to sample. Lengths are in tokens.

    Attributes:
        path: the file, where the data set has one.
        count: requests.
        output_len: overrides the data's own.
        oversample: repeats samples where the file has too few.
        range_ratio: of random lengths: within (1 - r, 1 + r) of input and output.
        block: of a trace: tokens that each hash id becomes (the trace has 512); its lengths shrink in proportion.
        prefixes: of shared-prefix: groups, each with a prefix of its own.
    """

    path: Path | None = None
    count: int = 1000
    seed: int = 0
    output_len: int | None = None
    shuffle: bool = True
    oversample: bool = True
    random_input_len: int = 1024
    random_output_len: int = 128
    range_ratio: float = 0.0
    random_prefix_len: int = 0
    block: int = 16
    prefixes: int = 64
    prefix_len: int = 2048
    suffix_len: int = 128
    prefix_output_len: int = 256


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A request of a trace, its lengths (tokens) shrunk in proportion to the block; `timestamp` in seconds."""

    timestamp: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...]


def trace_rows(sampling: Sampling) -> Iterator[TraceRow]:
    """The first `count` requests of a trace file. Raises: LoadTestError, naming the line, for another form."""

    def read(row: dict[str, Any]) -> TraceRow:
        input_len, output_len = (
            max(1, _whole(row[name], 0) * sampling.block // _TRACE_BLOCK) for name in ("input_length", "output_length")
        )
        if sampling.output_len is not None:
            output_len = sampling.output_len
        time, ids = float(row["timestamp"]) / 1000, tuple(_whole(each, 0) for each in row["hash_ids"])
        if not ids or not 0 <= time < math.inf:
            raise ValueError("no hash ids" if not ids else f"timestamp {time}")
        return TraceRow(time, input_len, output_len, ids)

    return itertools.islice(_lines(sampling, read), sampling.count)


def sharegpt(sampling: Sampling, tokenizer: Callable[[], Tokenizer]) -> list[Chain]:
    """The first two entries of each conversation as prompt and answer, whoever speaks.

    Kept are those with at least 4 tokens in the prompt and in the answer, at most 1024 in the prompt and 2048 in both.
    """

    def read(row: dict[str, Any]) -> tuple[str, str] | None:
        entry = row.get("conversations", ())
        return (_text(entry[0]["value"]), _text(entry[1]["value"])) if len(entry) >= 2 else None

    pairs = [pair for pair in _entries(sampling, read) if pair]
    if sampling.shuffle:
        random.Random(sampling.seed).shuffle(pairs)
    prompts: list[Prompt] = []
    least = 4 if sampling.output_len is None else 0
    for batch in _batches(pairs):
        if len(prompts) >= sampling.count:
            break
        inputs = tokenizer().encode([prompt for prompt, _ in batch])
        outputs = tokenizer().encode([answer for _, answer in batch])
        for (text, _), prompt, answer in zip(batch, inputs, outputs, strict=True):
            length = len(answer) if sampling.output_len is None else sampling.output_len
            if 4 <= len(prompt) <= 1024 and length >= least and len(prompt) + length <= 2048:
                prompts.append(Prompt(text, length, len(prompt)))
    return _oversampled(prompts[: sampling.count], sampling)


def custom(sampling: Sampling, tokenizer: Callable[[], Tokenizer]) -> list[Chain]:
    """JSON lines with "prompt" and, unless an output length is given, "output_tokens". Sent as they are.

    Instead of a prompt a line may have the "messages" of a chat, or "turns", of which the first is asked for.
    """

    def read(row: dict[str, Any]) -> Prompt:
        if sampling.output_len is None and "output_tokens" not in row:
            raise ValueError("no output_tokens (or give --custom-output-len)")
        output = _whole(row["output_tokens"], 1) if sampling.output_len is None else sampling.output_len
        if "prompt" in row:
            return Prompt(_text(row["prompt"]), output)
        if "turns" in row:
            return Prompt([{"role": "user", "content": _text(row["turns"][0])}], output)
        if "messages" in row:
            return Prompt([{key: _text(each[key]) for key in ("role", "content")} for each in row["messages"]], output)
        return Prompt(_text(row["prompt"]), output)

    prompts = list(_lines(sampling, read))
    if sampling.shuffle:
        random.Random(sampling.seed).shuffle(prompts)
    return _oversampled(prompts[: sampling.count], sampling)


def random_texts(sampling: Sampling, tokenizer: Callable[[], Tokenizer]) -> list[Chain]:
    """Texts of so many tokens, with a common prefix of random_prefix_len before them.

    Each is a run of ids in their order from a random one on; its text is cut or extended until it has as many tokens.
    """
    import numpy as np

    words, generator = tokenizer(), np.random.default_rng(sampling.seed)
    ids, count = np.asarray(words.ids), sampling.count
    length = max(0, sampling.random_input_len - words.specials_added)
    sizes = (length, sampling.random_output_len)
    lows = [math.floor(size * (1 - sampling.range_ratio)) for size in sizes]
    highs = [math.ceil(size * (1 + sampling.range_ratio)) for size in sizes]
    if lows[0] + sampling.random_prefix_len < 1:
        raise LoadTestError("--random-input-len is too small for a prompt of one token")
    inputs = generator.integers(lows[0], highs[0] + 1, size=count)
    outputs = generator.integers(max(lows[1], 1), max(highs[1], 1) + 1, size=count)
    offsets = generator.integers(0, words.vocab_size, size=count)
    prefix: list[int] = []
    if sampling.random_prefix_len:
        drawn = ids[generator.integers(0, len(ids), size=sampling.random_prefix_len)].tolist()
        ((_, prefix),) = _texts_of_length(words, [drawn], [sampling.random_prefix_len], generator)
    runs = [prefix + ids[(offsets[i] + i + np.arange(inputs[i])) % len(ids)].tolist() for i in range(count)]
    lengths = [sampling.random_prefix_len + int(each) for each in inputs]
    made = _texts_of_length(words, runs, lengths, generator)
    return [
        Chain((Prompt(text, int(output), len(tokens) + words.specials_added),))
        for (text, tokens), output in zip(made, outputs, strict=True)
    ]


def prefix_trace(sampling: Sampling, tokenizer: Callable[[], Tokenizer]) -> list[Chain]:
    """A trace of {"timestamp" (ms), "input_length", "output_length", "hash_ids"}, one hash id for each 512 tokens.

    Each hash id becomes the same `block` random token ids wherever it stands, and the lengths shrink in proportion:
    what is shared between requests stays in proportion too.
    """
    blocks: dict[int, list[int]] = {}
    chains: list[Chain] = []
    for row in trace_rows(sampling):
        ids: list[int] = []
        for number in row.hash_ids:
            if number not in blocks:
                blocks[number] = random.Random(number).choices(COMMON_IDS, k=sampling.block)
            ids += blocks[number]
        prompt = ids[: row.input_len]
        chains.append(Chain((Prompt(prompt, row.output_len, len(prompt)),), row.timestamp))
    return chains


def multi_turn(sampling: Sampling, tokenizer: Callable[[], Tokenizer]) -> list[Chain]:
    """Conversations of {"turns": [{"role", "content"}]}: each answer of the file is asked for, with all before it.

    The history is the file's own, so that every server gets the same prompts. An answer's length is the file's too.
    `count` counts the requests of all turns.
    """

    def read(row: dict[str, Any]) -> list[Message]:
        return [{name: _text(turn[name]) for name in ("role", "content")} for turn in row["turns"]]

    rows = list(_lines(sampling, read))
    if sampling.shuffle:
        random.Random(sampling.seed).shuffle(rows)
    chains, left = [], sampling.count
    for turns in rows:
        asked = [i for i, turn in enumerate(turns) if turn["role"] == "assistant" and i > 0][:left]
        if not asked:
            continue
        if sampling.output_len is None:
            answers = tokenizer().encode([turns[i]["content"] for i in asked], special=False)
            lengths = [max(1, len(answer)) for answer in answers]
        else:
            lengths = [sampling.output_len] * len(asked)
        prompts = (Prompt(turns[:i], length) for i, length in zip(asked, lengths, strict=True))
        chains.append(Chain(tuple(prompts)))
        left -= len(asked)
    return chains


def shared_prefix(sampling: Sampling, tokenizer: Callable[[], Tokenizer]) -> list[Chain]:
    """Groups of prompts of random token ids, each group with a prefix of its own, in random order."""
    if sampling.count < sampling.prefixes:
        raise LoadTestError(f"{sampling.count} prompts are fewer than {sampling.prefixes} prefixes")
    generator = random.Random(sampling.seed)
    output = sampling.prefix_output_len if sampling.output_len is None else sampling.output_len
    chains = []
    for _ in range(sampling.prefixes):
        prefix = generator.choices(COMMON_IDS, k=sampling.prefix_len)
        for _ in range(sampling.count // sampling.prefixes):
            ids = prefix + generator.choices(COMMON_IDS, k=sampling.suffix_len)
            chains.append(Chain((Prompt(ids, output, len(ids)),)))
    if sampling.shuffle:
        generator.shuffle(chains)
    return chains


DATASETS: dict[str, Callable[[Sampling, Callable[[], Tokenizer]], list[Chain]]] = {
    "sharegpt": sharegpt,
    "random": random_texts,
    "custom": custom,
    "prefix-trace": prefix_trace,
    "multi-turn": multi_turn,
    "shared-prefix": shared_prefix,
}


def _texts_of_length(
    tokenizer: Tokenizer, ids: Sequence[list[int]], lengths: Sequence[int], generator: Any
) -> list[tuple[str, list[int]]]:
    """Text and ids of each list, such that the text encodes to these ids and (if ten tries do) has that length.

    Ids turned into text and back are seldom as many: what is too long is cut, what is too short gets random ids; the
    latter one list after another, so that the draws are those of `vllm bench serve`.
    """
    made: list[tuple[str, list[int]]] = [("", list(each)) for each in ids]
    tries = [0] * len(made)

    def encode(numbers: Sequence[int]) -> None:
        texts = tokenizer.decode([made[i][1] for i in numbers])
        for i, text, encoded in zip(numbers, texts, tokenizer.encode(texts, special=False), strict=True):
            made[i] = (text, encoded)

    def wrong(i: int) -> bool:
        return len(made[i][1]) != lengths[i] and tries[i] < _TRIES

    long, short = list(range(len(made))), []
    while long:
        encode(long)
        short += [i for i in long if wrong(i) and len(made[i][1]) < lengths[i]]
        long = [i for i in long if wrong(i) and len(made[i][1]) > lengths[i]]
        for i in long:
            made[i] = ("", made[i][1][: lengths[i]])
            tries[i] += 1
    for i in sorted(short):
        while wrong(i):
            encoded = made[i][1][: lengths[i]]
            if missing := lengths[i] - len(encoded):
                bounds = tokenizer.fillers
                encoded += generator.integers(bounds.start, bounds.stop, size=missing).tolist()
            made[i] = ("", encoded)
            tries[i] += 1
            encode([i])
    return made


def _oversampled(prompts: list[Prompt], sampling: Sampling) -> list[Chain]:
    if not prompts:
        raise LoadTestError(f"{sampling.path}: no entry can be used")
    if sampling.oversample and len(prompts) < sampling.count:
        generator = random.Random(sampling.seed)
        prompts = prompts + [generator.choice(prompts) for _ in range(sampling.count - len(prompts))]
    return [Chain((prompt,)) for prompt in prompts]


def _batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]


def _content(sampling: Sampling) -> str:
    if sampling.path is None:
        raise LoadTestError("this data set needs --dataset-path")
    try:
        return sampling.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadTestError(f"{sampling.path} cannot be read: {error}") from error


def _entries(sampling: Sampling, read: Callable[[dict[str, Any]], _Row]) -> Iterator[_Row]:
    """Each entry of a JSON list, as `read` takes it. Raises: LoadTestError, naming the entry."""
    try:
        entries = json.loads(_content(sampling))
    except ValueError as error:
        raise LoadTestError(f"{sampling.path} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise LoadTestError(f"{sampling.path} is not a JSON list")
    for number, entry in enumerate(entries, 1):
        yield _taken(sampling, f"entry {number}", entry, read)


def _lines(sampling: Sampling, read: Callable[[dict[str, Any]], _Row]) -> Iterator[_Row]:
    """Each JSON line, as `read` takes it. Raises: LoadTestError, naming the line; for a file without any, too."""
    number = 0
    for number, line in ((n, line) for n, line in enumerate(_content(sampling).split("\n"), 1) if line.strip()):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise LoadTestError(f"{sampling.path}, line {number} is not JSON: {error}") from error
        yield _taken(sampling, f"line {number}", row, read)
    if not number:
        raise LoadTestError(f"{sampling.path} is empty")


def _taken(sampling: Sampling, name: str, row: Any, read: Callable[[dict[str, Any]], _Row]) -> _Row:
    try:
        return read(row)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise LoadTestError(f"{sampling.path}, {name} is not of the form that this data set has: {what}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.50} is not a text")
    return value


def _whole(value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r:.50} is not a whole number from {least} on")
    return value
