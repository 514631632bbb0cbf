"""The tokenizer that GGUF metadata describe, built for the `tokenizers` library. Knows no files and no use of it."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.model.errors import ModelError
from service.long_text import LLAMA3_PATTERN, QWEN2_PATTERN

# Names under which templates know special tokens, and as metadata do: tokenizer.ggml.{}_token_id.
SPECIAL_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# Kinds of token in GGUF metadata (tokenizer.ggml.token_type).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# How text is split before BPE (`pre`).
GPT2_PRE = ("smollm", "qwen2", "llama-bpe")

SPACE = "\u2581"  # stands for a space in SentencePiece vocabularies


def gguf_tokenizer(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer, and the texts of its special tokens by the names that templates use.

    Raises:
        ModelError: a kind of tokenizer that is not supported, or metadata that do not fit together.
    """
    kind = metadata.get("tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre")
    if kind == "gpt2":
        if pre not in GPT2_PRE:
            raise ModelError(
                f"the GGUF tokenizer gpt2 with pre {pre!r} is not supported; supported: {', '.join(GPT2_PRE)}"
            )
    elif kind != "llama":
        raise ModelError(f"the GGUF tokenizer {kind!r} is not supported; supported: gpt2 (BPE), llama (SPM)")
    tokens: list[str] = _required(metadata, "tokenizer.ggml.tokens")
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ModelError(f"{len(types)} token types for {len(tokens)} tokens")
    names = {}
    for name, short in SPECIAL_NAMES.items():
        number = metadata.get(f"tokenizer.ggml.{short}_token_id")
        if number is not None:
            if number >= len(tokens):
                raise ModelError(f"{name} is {number}, outside of the vocabulary of {len(tokens)}")
            names[name] = tokens[number]
    # Unused entries only pad the embedding: they are no text.
    vocab = {token: number for number, token in enumerate(tokens) if types[number] != UNUSED}
    if kind == "gpt2":
        backend = _byte_level_bpe(vocab, _required(metadata, "tokenizer.ggml.merges"), str(pre))
    else:
        backend = _sentencepiece_bpe(vocab, types, metadata)
    special = [tokens[number] for number, kind in enumerate(types) if kind == CONTROL]
    plain = [tokens[number] for number, kind in enumerate(types) if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre == "llama-bpe")
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    ends = (["bos_token"] if add_bos else []), (["eos_token"] if add_eos else [])
    if any(ends):
        backend.post_processor = _surround(vocab, names, *ends)
    return backend, names


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ModelError(f"{key} is missing from the GGUF metadata")
    return metadata[key]


def _byte_level_bpe(vocab: dict[str, int], merges: list[str], pre: str) -> tokenizers.Tokenizer:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    backend = _bpe(vocab, pairs, ignore_merges=pre == "llama-bpe")
    if pre == "smollm":
        split: pre_tokenizers.PreTokenizer = pre_tokenizers.Digits(individual_digits=True)
    else:
        split = pre_tokenizers.Split(Regex(QWEN2_PATTERN if pre == "qwen2" else LLAMA3_PATTERN), "isolated")
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(vocab: dict[str, int], types: list[int], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece BPE has no merges but scores: of all pairs whose union is a token, the best-scored comes first."""
    scores: list[float] = _required(metadata, "tokenizer.ggml.scores")
    if len(scores) != len(types):
        raise ModelError(f"{len(scores)} scores for {len(types)} tokens")
    parts = {token: number for token, number in vocab.items() if types[number] == NORMAL}
    merges = []
    for token, number in parts.items():
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        found = [(left, right) for left, right in splits if left in parts and right in parts]
        merges += [(-scores[number], number, parts[left], parts[right], (left, right)) for left, right in found]
    merges.sort()
    unknown = next((token for token, number in vocab.items() if types[number] == UNKNOWN), None)
    fallback = any(types[number] == BYTE for number in vocab.values())
    backend = _bpe(vocab, [merge[-1] for merge in merges], unk_token=unknown, fuse_unk=True, byte_fallback=fallback)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _bpe(vocab: dict[str, int], merges: list[Any], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab, merges, **options))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"the tokenizer's merges do not fit its vocabulary: {error}") from error


def _surround(
    vocab: dict[str, int], names: dict[str, str], before: list[str], after: list[str]
) -> processors.PostProcessor:
    for name in before + after:
        if name not in names:
            raise ModelError(f"the tokenizer adds {name}, but the GGUF metadata do not say which that is")
    pattern = [*(names[name] for name in before), "$A", *(names[name] for name in after)]
    special = [(names[name], vocab[names[name]]) for name in before + after]
    return processors.TemplateProcessing(single=pattern, special_tokens=special)
