"""Grammars in the core: holds compiled ones and makes a matcher for each sequence that one constrains.

The service compiles (its `grammar_worker`); here a grammar is only read back. A grammar speaks of bytes: the vocabulary
says which bytes each token id stands for. Knows no JSON Schema, no scheduler. XGrammar (https://github.com/mlc-ai/xgrammar,
arXiv:2411.15100), which brings transformers, is imported when the first grammar comes.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

if TYPE_CHECKING:
    import xgrammar

# Of compiled grammars, in the core. One takes 0.1 to 2 MB; whoever is crowded out is sent again when it is asked for.
MAX_HELD_BYTES = 256 << 20


class Vocabulary(msgspec.Struct, array_like=True, frozen=True):
    """What token ids stand for.

    Args:
        tokens: the bytes of every token id of the model; empty for an id that no grammar allows (special, padding).
        stop_token_ids: end a text, once its grammar is complete; at least one.
    """

    tokens: tuple[bytes, ...]
    stop_token_ids: tuple[int, ...]


class GrammarError(Exception):
    """A grammar cannot be read back, or is of another vocabulary."""


class Matcher(Protocol):
    """Where one sequence stands in its grammar."""

    @property
    def terminated(self) -> bool:
        """Whether the text is complete and its stop token was accepted: nothing may follow."""

    def accept(self, token: int) -> bool:
        """Goes on by one sampled token; False (and nothing changed) where the grammar does not allow it."""

    def mask(self, barred: Iterable[int] = ()) -> bytes | None:
        """The tokens that may come next: a bit for each id, least significant first, in whole int32 words.

        None: all of them. All zeros: there is none, or the matcher failed.

        Args:
            barred: token ids that are not to come as long as others may.
        """


class Matchers(Protocol):
    """Where matchers come from."""

    def matcher(self, key: str) -> Matcher | None:
        """A matcher at the beginning of the grammar; None if the grammar is not held."""


def tokenizer_info(vocabulary: Vocabulary) -> "xgrammar.TokenizerInfo":
    """The vocabulary as XGrammar knows it; the compiler's and the core's must be equal."""
    import xgrammar

    return xgrammar.TokenizerInfo(
        list(vocabulary.tokens),
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=len(vocabulary.tokens),
        stop_token_ids=list(vocabulary.stop_token_ids),
        add_prefix_space=False,
    )


class Grammars:
    """The compiled grammars that the core holds, least recently used out first.

    `load` may run in a thread of its own (XGrammar lets the interpreter go on meanwhile); the rest in the core's.
    """

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._vocabulary: Vocabulary | None = None
        self._info: xgrammar.TokenizerInfo | None = None
        self._held: OrderedDict[str, xgrammar.CompiledGrammar] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def load(self, key: str, data: bytes, vocabulary: Vocabulary) -> None:
        """Reads a serialised grammar back and holds it under `key`; tens of milliseconds for a large one.

        Raises: GrammarError.
        """
        import xgrammar

        if self._vocabulary is None:
            self._vocabulary, self._info = vocabulary, tokenizer_info(vocabulary)
        if self._vocabulary != vocabulary or self._info is None:
            raise GrammarError("the grammar is of another vocabulary than those before it")
        try:
            grammar = xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._info)
        except (RuntimeError, ValueError) as error:
            raise GrammarError(f"the compiled grammar cannot be read: {error}") from error
        with self._lock:
            earlier = self._held.pop(key, None)
            self._bytes += grammar.memory_size_bytes - (earlier.memory_size_bytes if earlier is not None else 0)
            self._held[key] = grammar
            while self._bytes > self._max_bytes and len(self._held) > 1:
                self._bytes -= self._held.popitem(last=False)[1].memory_size_bytes

    def matcher(self, key: str) -> "GrammarMatcher | None":
        """A matcher at the beginning of the grammar; None if the grammar is not held."""
        with self._lock:
            grammar = self._held.get(key)
            if grammar is None or self._vocabulary is None:
                return None
            self._held.move_to_end(key)
        return GrammarMatcher(grammar, len(self._vocabulary.tokens))


class GrammarMatcher:
    """A `Matcher` of XGrammar's.

    Args:
        grammar: compiled; shared with others.
        vocab_size: token ids are below it.
    """

    def __init__(self, grammar: "xgrammar.CompiledGrammar", vocab_size: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._bits = np.zeros((1, -(-vocab_size // 32)), np.int32)

    @property
    def terminated(self) -> bool:
        """Whether the text is complete and its stop token was accepted: nothing may follow."""
        return bool(self._matcher.is_terminated())

    def accept(self, token: int) -> bool:
        """Goes on by one sampled token; False (and nothing changed) where the grammar does not allow it."""
        try:
            return bool(self._matcher.accept_token(token))
        except RuntimeError:  # whatever fails in XGrammar concerns this sequence alone
            return False

    def mask(self, barred: Iterable[int] = ()) -> bytes | None:
        """See `Matcher`."""
        bits = self._bits
        try:
            limited = self._matcher.fill_next_token_bitmask(bits)
        except RuntimeError:
            return bytes(bits.nbytes)
        if not limited and not barred:
            return None
        if barred:
            rest = bits.copy()
            flat = rest.view(np.uint32)[0]
            for token in barred:
                flat[token // 32] &= ~np.uint32(1 << token % 32)
            if rest.any():
                bits = rest
        return bits.tobytes()
