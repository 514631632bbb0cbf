"""What the requests of a load test hold: real texts, random ones, traces, chats. Knows no server.

ShareGPT, random and custom are sampled by the rules of `vllm bench serve` 0.26, so that the same file and the same seed
give the same requests. Each function returns chains of prompts in the order in which they are to be sent.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from loadtest.records import Chain, Content, LoadTestError, Message, Prompt
from loadtest.tokens import COMMON_IDS, Tokenizer

_BATCH = 128
_TRIES = 10
_TRACE_BLOCK = 512  # tokens that a hash id of the trace stands for
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Sampling:
    """What to sample. Lengths are in tokens."""

    path: Path | None = None
    count: int = 1000  # requests
    seed: int = 0
    output_len: int | None = None  # overrides the data's own
    shuffle: bool = True
    oversample: bool = True  # repeats samples where the file has too few
    random_input_len: int = 1024
    random_output_len: int = 128
    range_ratio: float = 0.0  # of random lengths: within (1 - r, 1 + r) of input and output
    random_prefix_len: int = 0
    block: int = 16  # of a trace: what its blocks of 512 tokens become; its lengths shrink in proportion
    prefixes: int = 64  # of shared-prefix: groups, each with a prefix of its own
    prefix_len: int = 2048
    suffix_len: int = 128
    prefix_output_len: int = 256


class TraceRow(msgspec.Struct, frozen=True):
    """A request of a trace: its time (seconds; in the file milliseconds), its lengths (tokens), ids of its blocks."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=0)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=1)]


class _Said(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Said] = []


_Texts = Annotated[list[str], msgspec.Meta(min_length=1)]


class _Chat(msgspec.Struct):
    turns: list[Message]


class _Custom(msgspec.Struct):
    prompt: str | None = None
    turns: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


def trace_rows(sampling: Sampling) -> Iterator[TraceRow]:
    """The first `count` requests of a trace file, their lengths shrunk in proportion to the block.

    Raises: LoadTestError, naming the line, for another form.
    """

    def shrunk(length: int) -> int:
        return max(1, length * sampling.block // _TRACE_BLOCK)

    for _, row in itertools.islice(_lines(sampling, TraceRow), sampling.count):
        output = shrunk(row.output_length) if sampling.output_len is None else sampling.output_len
        yield TraceRow(row.timestamp / 1000, shrunk(row.input_length), output, row.hash_ids)


def sharegpt(sampling: Sampling, tokenizer: Tokenizer) -> list[Chain]:
    """The first two entries of each conversation as prompt and answer, whoever speaks.

    Kept are those with at least 4 tokens in the prompt and in the answer, at most 1024 in the prompt and 2048 in both.
    """
    rows = _decoded(sampling, "", _content(sampling), list[_Conversation])
    pairs = [(said[0].value, said[1].value) for row in rows if len(said := row.conversations) >= 2]
    if sampling.shuffle:
        random.Random(sampling.seed).shuffle(pairs)
    prompts: list[Prompt] = []
    least = 4 if sampling.output_len is None else 0
    for start in range(0, len(pairs), _BATCH):
        if len(prompts) >= sampling.count:
            break
        texts, answers = zip(*pairs[start : start + _BATCH], strict=True)
        for text, prompt, answer in zip(texts, *map(tokenizer.encode, (texts, answers)), strict=True):
            length = len(answer) if sampling.output_len is None else sampling.output_len
            if 4 <= len(prompt) <= 1024 and length >= least and len(prompt) + length <= 2048:
                prompts.append(Prompt(text, length, len(prompt)))
    return _oversampled(prompts[: sampling.count], sampling)


def custom(sampling: Sampling, tokenizer: Tokenizer) -> list[Chain]:
    """JSON lines with "prompt" and, unless an output length is given, "output_tokens". Sent as they are.

    Instead of a prompt a line may have the "messages" of a chat, or "turns", of which the first is asked for.
    """
    prompts = []
    for number, row in _lines(sampling, _Custom):
        place = f", line {number}"
        content: Content | None = row.prompt
        if content is None and bytes(row.turns):
            first, *_ = _decoded(sampling, place, row.turns, _Texts)
            content = [Message(role="user", content=first)]
        elif content is None and bytes(row.messages):
            content = _decoded(sampling, place, row.messages, list[Message])
        output = row.output_tokens if sampling.output_len is None else sampling.output_len
        if content is None or output is None:
            lacking = "prompt" if content is None else "output_tokens (or give --custom-output-len)"
            raise _unfit(sampling, place, f"no {lacking}")
        prompts.append(Prompt(content, output))
    if sampling.shuffle:
        random.Random(sampling.seed).shuffle(prompts)
    return _oversampled(prompts[: sampling.count], sampling)


def random_texts(sampling: Sampling, tokenizer: Tokenizer) -> list[Chain]:
    """Texts of so many tokens, with a common prefix of random_prefix_len before them.

    Each is a run of ids in their order from a random one on; its text is cut or extended until it has as many tokens.
    """
    generator = np.random.default_rng(sampling.seed)
    ids, count = np.asarray(tokenizer.ids), sampling.count
    length = max(0, sampling.random_input_len - tokenizer.specials_added)
    sizes = (length, sampling.random_output_len)
    lows = [math.floor(size * (1 - sampling.range_ratio)) for size in sizes]
    highs = [math.ceil(size * (1 + sampling.range_ratio)) for size in sizes]
    if lows[0] + sampling.random_prefix_len < 1:
        raise LoadTestError("--random-input-len is too small for a prompt of one token")
    inputs = generator.integers(lows[0], highs[0] + 1, size=count)
    outputs = generator.integers(max(lows[1], 1), max(highs[1], 1) + 1, size=count)
    offsets = generator.integers(0, tokenizer.fillers.stop, size=count)
    prefix: list[int] = []
    if sampling.random_prefix_len:
        drawn = ids[generator.integers(0, len(ids), size=sampling.random_prefix_len)].tolist()
        ((_, prefix),) = _texts_of_length(tokenizer, [drawn], [sampling.random_prefix_len], generator)
    runs = [prefix + ids[(offsets[i] + i + np.arange(inputs[i])) % len(ids)].tolist() for i in range(count)]
    lengths = [sampling.random_prefix_len + int(each) for each in inputs]
    made = _texts_of_length(tokenizer, runs, lengths, generator)
    return [
        Chain((Prompt(text, int(output), len(tokens) + tokenizer.specials_added),))
        for (text, tokens), output in zip(made, outputs, strict=True)
    ]


def prefix_trace(sampling: Sampling, tokenizer: Tokenizer) -> list[Chain]:
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
        prompt = ids[: row.input_length]
        chains.append(Chain((Prompt(prompt, row.output_length, len(prompt)),), row.timestamp))
    return chains


def multi_turn(sampling: Sampling, tokenizer: Tokenizer) -> list[Chain]:
    """Conversations of {"turns": [{"role", "content"}]}: each answer of the file is asked for, with all before it.

    The history is the file's own, so that every server gets the same prompts. An answer's length is the file's too.
    `count` counts the requests of all turns.
    """
    rows = [chat.turns for _, chat in _lines(sampling, _Chat)]
    if sampling.shuffle:
        random.Random(sampling.seed).shuffle(rows)
    chains, left = [], sampling.count
    for turns in rows:
        asked = [i for i, turn in enumerate(turns) if turn["role"] == "assistant" and i > 0][:left]
        if not asked:
            continue
        if sampling.output_len is None:
            answers = tokenizer.encode([turns[i]["content"] for i in asked], special=False)
            lengths = [max(1, len(answer)) for answer in answers]
        else:
            lengths = [sampling.output_len] * len(asked)
        prompts = (Prompt(turns[:i], length) for i, length in zip(asked, lengths, strict=True))
        chains.append(Chain(tuple(prompts)))
        left -= len(asked)
    if not chains:
        raise _unusable(sampling)
    return chains


def shared_prefix(sampling: Sampling, tokenizer: Tokenizer) -> list[Chain]:
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


DATASETS: dict[str, Callable[[Sampling, Tokenizer], list[Chain]]] = {
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

    def coded(lists: Sequence[list[int]]) -> list[tuple[str, list[int]]]:
        texts = tokenizer.decode(lists)
        return list(zip(texts, tokenizer.encode(texts, special=False), strict=True))

    made, tries, bounds = coded(ids), [0] * len(ids), tokenizer.fillers
    while long := [i for i, (_, got) in enumerate(made) if len(got) > lengths[i] and tries[i] < _TRIES]:
        for i, one in zip(long, coded([made[i][1][: lengths[i]] for i in long]), strict=True):
            made[i], tries[i] = one, tries[i] + 1
    for i, length in enumerate(lengths):
        while len(got := made[i][1]) != length and tries[i] < _TRIES:
            more = generator.integers(bounds.start, bounds.stop, size=max(0, length - len(got))).tolist()
            (made[i],), tries[i] = coded([got[:length] + more]), tries[i] + 1
    return made


def _oversampled(prompts: list[Prompt], sampling: Sampling) -> list[Chain]:
    if not prompts:
        raise _unusable(sampling)
    if sampling.oversample and len(prompts) < sampling.count:
        generator = random.Random(sampling.seed)
        prompts = prompts + [generator.choice(prompts) for _ in range(sampling.count - len(prompts))]
    return [Chain((prompt,)) for prompt in prompts]


def _content(sampling: Sampling) -> bytes:
    if sampling.path is None:
        raise LoadTestError("this data set needs --dataset-path")
    try:
        return sampling.path.read_bytes()
    except OSError as error:
        raise LoadTestError(f"{sampling.path} cannot be read: {error}") from error


def _lines(sampling: Sampling, kind: type[_Row]) -> Iterator[tuple[int, _Row]]:
    """Each JSON line and its number. Raises: LoadTestError, naming the line; for a file without any, too."""
    numbered = [(n, line) for n, line in enumerate(_content(sampling).split(b"\n"), 1) if line.strip()]
    if not numbered:
        raise LoadTestError(f"{sampling.path} is empty")
    for number, line in numbered:
        yield number, _decoded(sampling, f", line {number}", line, kind)


def _decoded(sampling: Sampling, place: str, text: bytes, kind: type[_Row]) -> _Row:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unfit(sampling, place, error) from error


def _unusable(sampling: Sampling) -> LoadTestError:
    return LoadTestError(f"{sampling.path}: no entry can be used")


def _unfit(sampling: Sampling, place: str, why: object) -> LoadTestError:
    return LoadTestError(f"{sampling.path}{place} is not of the form that this data set has: {why}")
