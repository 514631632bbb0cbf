"""Cuts a long text where its parts can be tokenized in parallel, with the ids of the whole. Knows no chat, no request.

Byte-level BPE splits a text into pre-tokens and tokenizes each for itself. None that the patterns below match holds a
space behind a letter, and they look forward only, never beyond a space that follows a letter: between an ASCII letter
and a space one pre-token ends and the next begins, whatever is before and behind. NFC changes and joins neither of the
two, and an added token may not reach across. What is not known to be like that is never cut.
"""

import json
import re
from typing import NamedTuple

import tokenizers
from tokenizers import models

# How Qwen 2 and 3, and Llama 3, split text before BPE, as the tokenizer.json of these models says.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

# Parts are enough for the threads that one text gets, and none is so small that starting it counts.
MOST_PARTS = 8
LEAST_CHARACTERS = 2_000

_PLACE = re.compile("[A-Za-z](?= [A-Za-z])")


class Ends(NamedTuple):
    """Ids that the post-processor puts before and behind any text."""

    before: list[int]
    after: list[int]


def cut(text: str) -> list[str]:
    """Parts of the text in order, of about one size; only the text where it is short or there is no place to cut."""
    count = min(MOST_PARTS, len(text) // LEAST_CHARACTERS)
    parts, start = [], 0
    for number in range(1, count):
        near = len(text) * number // count
        # Not far, so that the search is short also in a text that has no such place.
        place = _PLACE.search(text, near, near + LEAST_CHARACTERS // 2)
        if place is not None:
            parts.append(text[start : place.end()])
            start = place.end()
    return [*parts, text[start:]]


def ends_of_parted(backend: tokenizers.Tokenizer) -> Ends | None:
    """The ends of every text, if what `cut` makes has between them the ids of the whole; None if that is not sure."""
    model, normalizer, pre_tokenizer = backend.model, backend.normalizer, backend.pre_tokenizer
    if not isinstance(model, models.BPE) or model.dropout is not None or pre_tokenizer is None:
        return None
    if normalizer is not None and json.loads(normalizer.__getstate__()) != {"type": "NFC"}:
        return None
    state = json.loads(pre_tokenizer.__getstate__())
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    splits = [_splits(step) for step in steps if step["type"] != "Digits"]
    if None in splits or splits[:1] != [True]:  # a later one would see bytes as letters, spaces too
        return None
    for token in backend.get_added_tokens_decoder().values():
        # It may begin with spaces; one behind another character may be where the text is cut.
        if " " in token.content.lstrip(" ") or token.single_word or token.lstrip or token.rstrip:
            return None
    whole = backend.encode("a")  # one token, or as often as the post-processor says
    if len(backend.encode("a", add_special_tokens=False)) != 1 or whole.special_tokens_mask.count(0) != 1:
        return None
    at = whole.special_tokens_mask.index(0)
    return Ends(whole.ids[:at], whole.ids[at + 1 :])


def _splits(step: dict[str, object]) -> bool | None:
    """Whether the pre-tokenizer splits between a letter and a space; None: it is not known to be safe."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(splits)}:
            return splits
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return True if pattern in (QWEN2_PATTERN, LLAMA3_PATTERN) else None
    return None
