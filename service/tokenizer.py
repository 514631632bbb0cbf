"""Text to token ids and back, from a model folder or a GGUF file. Knows nothing of chats, streams or requests.

Ids turn to text by way of bytes: every token stands for a run of bytes, and a text is their concatenation read as
UTF-8, with U+FFFD for what is not UTF-8. This is the one definition that `decode`, the incremental detokenizer and the
bytes of logprobs share. For byte-level tokenizers it is that of the `tokenizers` library; for byte fallback it differs
where bytes are invalid: the library then voids the valid characters beside them too, so that no such text could be sent
before its end.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.model.config import read_json
from engine.model.errors import ModelError
from engine.model.gguf_header import read_gguf_metadata
from service.gguf_tokenizer import SPECIAL_NAMES, gguf_tokenizer
from service.long_text import cut, ends_of_parted

# Special tokens that templates know, as tokenizer_config.json names them.
_SPECIAL_NAMES = (*SPECIAL_NAMES, "sep_token", "cls_token", "mask_token")

_SLICE = 64 << 10  # characters


class Tokenizer:
    """A tokenizer with its special tokens. All methods may be called from several threads at once.

    Attributes:
        special_tokens: texts by the names that templates use (bos_token, eos_token, ...), where the model has them.
        special_ids: ids that `skip_special_tokens` leaves out.
        vocab_size: one more than the highest id.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
        """Takes a `tokenizers` tokenizer over; truncation and padding in it are switched off.

        Raises:
            ModelError: its decoder is of a kind that is not supported.
        """
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab().values(), default=-1)
        self._pieces = _Pieces(backend)
        self._texts: dict[int, str | None] = {}
        self._ends = ends_of_parted(backend)  # None: a text is not cut
        # Characters of a text for each token at most; a normalizer may shrink it first (NFC: to a quarter at most).
        self._longest = max(1, *map(len, backend.get_vocab())) * (1 if backend.normalizer is None else 4)
        self.strips_first_space = self._pieces.strips_first_space

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Reads the tokenizer of a model folder or a GGUF file.

        Raises:
            ModelError: there is none, or it cannot be used.
        """
        return cls.from_folder(path) if path.is_dir() else cls.from_gguf(read_gguf_metadata(path), path)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Reads tokenizer.json, and the special tokens' names from the files beside it.

        Raises:
            ModelError: a file is missing or broken.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{folder}: there is no tokenizer.json in it (a SentencePiece tokenizer.model is not enough)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{path}: not a tokenizer that can be read: {error}") from error
        config = read_json(folder / "tokenizer_config.json", optional=True)
        named = {**read_json(folder / "special_tokens_map.json", optional=True), **config}
        names = {}
        for name in _SPECIAL_NAMES:
            value = named.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                names[name] = text
        try:
            _add_missing(backend, config.get("added_tokens_decoder", {}), names.values(), path)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"{folder}/tokenizer_config.json: broken added_tokens_decoder: {error!r}") from error
        return cls(backend, names)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], path: Path) -> "Tokenizer":
        """Builds the tokenizer that GGUF metadata describe.

        Raises:
            ModelError: a kind of tokenizer that is not supported, or metadata that do not fit together.
        """
        try:
            return cls(*gguf_tokenizer(metadata))
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of how many tokens the text has, at once: tokenizing megabytes takes a minute."""
        return len(text) // self._longest

    def exceeds(self, text: str, most: int) -> bool:
        """Whether the text has more than `most` tokens, told by no more of it than that takes.

        A token that is cut to be told counts as several: of texts that are as long as that matters, few in a thousand.

        Raises:
            ValueError: as `encode`.
        """
        _check(text)
        count = 0
        for at in range(0, len(text), _SLICE):
            count += len(self._encodings([text[at : at + _SLICE]])[0])
            if count > most:
                return True
        return False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenizes; special tokens that are spelled out in the text become their ids.

        Args:
            add_special_tokens: add what the model wants around a text, such as BOS.

        Raises:
            ValueError: the text holds a lone surrogate, which is no character, or the library fails.
        """
        _check(text)
        # A batch, also of one, because `encode` holds the interpreter's lock: a long text would stop the whole process.
        parts = [text] if self._ends is None else cut(text)
        if self._ends is None or len(parts) == 1:
            return list(self._encodings([text], add_special_tokens)[0].ids)
        encodings = self._encodings(parts)
        before, after = self._ends if add_special_tokens else ([], [])
        return [*before, *chain.from_iterable(encoding.ids for encoding in encodings), *after]

    def _encodings(self, texts: list[str], add_special_tokens: bool = False) -> list[tokenizers.Encoding]:
        try:
            return self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:  # a panic of the library's, which is no Exception, for ten million blanks
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"the text cannot be tokenized: {error}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turns ids into text; ids outside the vocabulary have none."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(number) for number in ids if number not in skipped).decode(errors="replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: part of a character, or several; b"" for an id outside the vocabulary."""
        return self._pieces[token_id]

    def token_text(self, token_id: int) -> str | None:
        """The text that a token stands for, if no character is open; None if its bytes are not whole characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            piece = self._pieces[token_id]
            if not piece:
                return ""  # not kept, as in _Pieces
            text: str | None
            try:
                text = piece.decode()
            except UnicodeDecodeError:
                text = None
            self._texts[token_id] = text
            return text

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled like this in the vocabulary."""
        number: int | None = self.backend.token_to_id(text)
        return number


def _check(text: str) -> None:
    """Raises ValueError where the text holds a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
        raise ValueError(f"the text is not valid Unicode: {surrogate}") from error


class _Pieces(dict[int, bytes]):
    """The bytes of each token, worked out when first asked for, by the rules of the tokenizer's decoder."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._byte_level = False
        self._byte_fallback = False
        self._replaced: list[tuple[str, str]] = []
        self.strips_first_space = False
        if backend.decoder is None:
            raise ModelError("the tokenizer has no decoder")
        state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
        for step in state["decoders"] if state["type"] == "Sequence" else [state]:
            self._read_step(step)

    def _read_step(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replaced.append((old, new))
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                self.strips_first_space = True
            case {"type": "Metaspace", "replacement": str(old), "prepend_scheme": scheme}:
                self._replaced.append((old, " "))
                self.strips_first_space = scheme != "never"
            case _:
                raise ModelError(f"the tokenizer's decoder {json.dumps(step)} is not supported")

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            return b""  # not kept: the ids that somebody may ask for have no bound
        piece = self[token_id] = self._piece(token)
        return piece

    def _piece(self, token: str) -> bytes:
        if self._byte_level:
            # An added token may hold characters that stand for no byte: it is text then.
            known = all(char in BYTES for char in token)
            return bytes(BYTES[char] for char in token) if known else token.encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Characters that stand for bytes in byte-level BPE (GPT-2): printable Latin-1 for itself, others from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_alphabet()


def _add_missing(backend: tokenizers.Tokenizer, added: Mapping[str, Any], special: Iterable[str], path: Path) -> None:
    """Adds what tokenizer_config.json names and tokenizer.json lacks, and marks the named special tokens as special."""
    for number, entry in sorted(added.items(), key=lambda item: int(item[0])):
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        token = AddedToken(entry["content"], **{flag: entry[flag] for flag in flags})
        if backend.token_to_id(token.content) is None:
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != int(number):
            raise ModelError(
                f"{path}: token {token.content!r} has id {backend.token_to_id(token.content)}"
                f" here and {number} in tokenizer_config.json"
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for text in special:
        if text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, normalized=False)])
