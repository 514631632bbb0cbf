"""Grammars in the core: holds compiled ones and makes a matcher for each sequence that one constrains.

The service compiles (its `grammar_worker`); here a grammar is only read back. A grammar speaks of bytes: the vocabulary
says which bytes each token id stands for. Knows no JSON Schema, no scheduler. XGrammar (https://github.com/mlc-ai/xgrammar,
arXiv:2411.15100), which brings transformers, is imported when the first grammar comes.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from time import thread_time
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    import xgrammar

# Of compiled grammars, in the core, as long as they were when they came: what XGrammar says of their size may be a
# fiftieth of it. Common are 4 to 20 MB; whoever is crowded out is sent again when it is asked for.
MAX_HELD, MAX_HELD_BYTES = 1024, 512 << 20
# What following one grammar may take: this, and so much for each token. Common are 5 to 100 microseconds.
_FIRST_SECONDS, _TOKEN_SECONDS = 0.5, 1e-3
# What XGrammar keeps of a text is some 0.7 MB for each millisecond that its tokens took to accept. So much may be kept
# of all texts together, beside so much of each token. Common are 1 to 10 microseconds.
_KEPT_SECONDS, _COMMON_SECONDS = 2.0, 25e-6


class Vocabulary(msgspec.Struct, array_like=True, frozen=True):
    """What token ids stand for.

    Args:
        tokens: the bytes of every token id of the model; empty for an id that no grammar allows (special, padding).
        stop_token_ids: end a text, once its grammar is complete; at least one.
    """

    tokens: tuple[bytes, ...]
    stop_token_ids: tuple[int, ...]


class GrammarError(Exception):
    """A grammar cannot be read back, is of another vocabulary, or takes too long to follow."""


@dataclass(slots=True)
class _Kept:
    """Of all texts of all grammars: seconds of accepting of which the memory is kept, beside what is common."""

    seconds: float = 0.0


class _Time:
    """What all matchers of one grammar have taken together: processor time of the core's thread, in which all wait.

    Some grammars, most of them made for it, take a second for a token. Whatever took more than is allowed ends.

    Attributes:
        left: seconds that they may still take.
        latest: seconds that the latest of their work took.
        of_all: what all grammars keep.
        kept: their part of it, seconds.
    """

    __slots__ = ("_began", "kept", "latest", "left", "of_all")

    def __init__(self, of_all: _Kept) -> None:
        self.left = _FIRST_SECONDS
        self.latest = self.kept = 0.0
        self.of_all = of_all

    def __enter__(self) -> None:
        self._began = thread_time()

    def __exit__(self, *_: object) -> None:
        self.latest = thread_time() - self._began
        self.left -= self.latest


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

    def __init__(self, max_bytes: int = MAX_HELD_BYTES, max_held: int = MAX_HELD) -> None:
        self._max_bytes, self._max_held = max_bytes, max_held
        self._vocabulary: Vocabulary | None = None
        self._info: xgrammar.TokenizerInfo | None = None
        self._held: OrderedDict[str, tuple[xgrammar.CompiledGrammar, _Time, int]] = OrderedDict()
        self._bytes = 0
        self._kept = _Kept()
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
            if key in self._held:
                return
            self._bytes += len(data)
            self._held[key] = grammar, _Time(self._kept), len(data)
            while len(self._held) > self._max_held or (self._bytes > self._max_bytes and len(self._held) > 1):
                self._bytes -= self._held.popitem(last=False)[1][-1]

    def matcher(self, key: str) -> "GrammarMatcher | None":
        """A matcher at the beginning of the grammar; None if it is not held. Raises GrammarError: it takes too long."""
        with self._lock:
            if key not in self._held or self._vocabulary is None:
                return None
            self._held.move_to_end(key)
            grammar, time, _ = self._held[key]
        if time.left < 0:
            raise GrammarError("following it takes too long")
        return GrammarMatcher(grammar, len(self._vocabulary.tokens), time)


class GrammarMatcher:
    """Where one sequence stands in its grammar.

    Args:
        grammar: compiled; shared with others.
        vocab_size: token ids are below it.
        time: shared with the grammar's other matchers.
    """

    def __init__(self, grammar: "xgrammar.CompiledGrammar", vocab_size: int, time: _Time) -> None:
        self._grammar, self._words, self._time = grammar, -(-vocab_size // 32), time
        self._kept = 0.0  # of the time's
        self._full = False  # too much memory is kept
        # XGrammar may set the bits of the last word that stand for no token.
        self._last_word = np.int32((1 << vocab_size % 32) - 1 if vocab_size % 32 else -1)

    @cached_property
    def _matcher(self) -> "xgrammar.GrammarMatcher":
        """Made when it is first asked, on its grammar's time: of sequences that wait there may be millions."""
        import xgrammar

        return xgrammar.GrammarMatcher(self._grammar)

    @property
    def terminated(self) -> bool:
        """Whether the text is complete and its stop token was accepted: nothing may follow."""
        return bool(self._matcher.is_terminated())

    def accept(self, token: int) -> bool:
        """Goes on by one sampled token; False (and nothing changed) where the grammar does not allow it.

        Also when there is no more time or memory: the next mask tells of that, which nobody takes for a fault of ours.
        """
        try:
            with self._time:
                accepted = bool(self._matcher.accept_token(token))
        except RuntimeError:  # whatever fails in XGrammar concerns this sequence alone
            return False
        self._keep(max(0.0, self._kept + self._time.latest - _COMMON_SECONDS))
        # No grammar may keep more than is left for all: alone half, and of many the heaviest end first.
        if self._time.kept > _KEPT_SECONDS - self._time.of_all.seconds:
            self._full = True
            self._keep(0.0)  # others may go on, since this one ends
        return accepted

    def _keep(self, seconds: float) -> None:
        self._time.kept += seconds - self._kept
        self._time.of_all.seconds += seconds - self._kept
        self._kept = seconds

    def __del__(self) -> None:
        self._keep(0.0)

    def rollback(self, count: int) -> None:
        """Takes back the tokens accepted last."""
        self._matcher.rollback(count)

    def mask(self, barred: Iterable[int] = ()) -> bytes | None:
        """The tokens that may come next: a bit for each id, least significant first, in whole int32 words.

        None: all of them. All zeros: there is none, or the matcher failed.

        Args:
            barred: token ids that are not to come as long as others may.
        """
        bits = np.zeros((1, self._words), np.int32)
        if self._time.left < 0 or self._full:
            return bytes(bits.nbytes)
        self._time.left += _TOKEN_SECONDS
        try:
            with self._time:
                limited = self._matcher.fill_next_token_bitmask(bits)
        except RuntimeError:
            return bytes(bits.nbytes)
        if not limited and not barred:
            return None
        bits[0, -1] &= self._last_word
        if barred:
            rest = bits.copy()
            flat = rest.view(np.uint32)[0]
            for token in barred:
                flat[token // 32] &= ~np.uint32(1 << token % 32)
            if rest.any():
                bits = rest
        return bits.tobytes()
