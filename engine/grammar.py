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
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from engine.container import usable_memory
from engine.request import RejectReason, RequestRejected

if TYPE_CHECKING:
    import xgrammar

# Of compiled grammars, in the core, as long as they were when they came: what XGrammar says of their size may be a
# fiftieth of it. Common are 4 to 20 MB; whoever is crowded out is sent again when it is asked for.
MAX_HELD, MAX_HELD_BYTES = 1024, 512 << 20
# Those that live requests follow stay, whether or not they are crowded out: of the memory, one part in so many.
_USED_PART = 8
# What following one grammar may take: this, and so much for each token. Common are 5 to 100 microseconds.
_FIRST_SECONDS, _TOKEN_SECONDS = 0.5, 1e-3
# A longer token is accepted in pieces of so many bytes, since XGrammar cannot be stopped: 128 took it 40 s.
_PIECE_BYTES = 16
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
    """A grammar cannot be read back, or is of another vocabulary."""


@dataclass(slots=True)
class _Taken:
    """What all grammars take together.

    Attributes:
        bytes: of those that live requests follow.
        kept: of all their texts, seconds of accepting of which the memory is kept, beside what is common.
    """

    bytes: int = 0
    kept: float = 0.0


class _Grammar:
    """A compiled grammar, and what all its matchers take together.

    Some grammars, most of them made for it, take a second for a token: processor time of the core's thread, in which
    all wait. `with` measures it. Whatever took more than is allowed ends.

    Attributes:
        compiled, size: the grammar, and the bytes of its serialised form.
        of_all: what all grammars take.
        matchers: how many follow it.
        left: seconds that they may still take.
        latest: seconds that the latest of their work took.
        kept: its part of what all keep, seconds.
    """

    __slots__ = ("__weakref__", "_began", "compiled", "kept", "latest", "left", "matchers", "of_all", "size")

    def __init__(self, compiled: "xgrammar.CompiledGrammar", size: int, of_all: _Taken) -> None:
        self.compiled, self.size, self.of_all = compiled, size, of_all
        self.matchers = 0
        self.left = _FIRST_SECONDS
        self.latest = self.kept = 0.0

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
        self._max_bytes, self._max_held, self._max_used = max_bytes, max_held, usable_memory() // _USED_PART
        self._vocabulary: Vocabulary | None = None
        self._info: xgrammar.TokenizerInfo | None = None
        self._known: WeakValueDictionary[str, _Grammar] = WeakValueDictionary()  # held or followed
        self._held: OrderedDict[str, _Grammar] = OrderedDict()
        self._bytes = 0  # of those held
        self._taken = _Taken()
        self._lock = threading.Lock()

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def load(self, key: str, data: bytes, vocabulary: Vocabulary) -> None:
        """Holds a grammar under `key`. If it is not known it is read back: tens of milliseconds for a large one.

        Raises: GrammarError.
        """
        import xgrammar

        if self._vocabulary is None:
            self._vocabulary, self._info = vocabulary, tokenizer_info(vocabulary)
        if self._vocabulary != vocabulary or self._info is None:
            raise GrammarError("the grammar is of another vocabulary than those before it")
        with self._lock:
            grammar = self._known.get(key)
            if grammar is not None:  # perhaps followed alone, by who may soon end
                self._hold(key, grammar)
                return
        try:
            compiled = xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._info)
        except (RuntimeError, ValueError) as error:
            raise GrammarError(f"the compiled grammar cannot be read: {error}") from error
        grammar = _Grammar(compiled, len(data), self._taken)
        with self._lock:
            self._known[key] = grammar
            self._hold(key, grammar)

    def _hold(self, key: str, grammar: _Grammar) -> None:
        """It was used last."""
        if key not in self._held:
            self._held[key] = grammar
            self._bytes += grammar.size
        self._held.move_to_end(key)
        while len(self._held) > self._max_held or (self._bytes > self._max_bytes and len(self._held) > 1):
            self._bytes -= self._held.popitem(last=False)[1].size

    def matcher(self, key: str) -> "GrammarMatcher":
        """A matcher at the beginning of the grammar.

        Raises: RequestRejected, UNKNOWN_GRAMMAR (it is not held), INVALID (it takes too long to follow) or QUEUE_FULL
        (those that are followed take too much memory already).
        """
        with self._lock:
            grammar = self._known.get(key)
            if grammar is None or self._vocabulary is None:
                reason = RejectReason.UNKNOWN_GRAMMAR
                raise RequestRejected(reason, "the engine does not hold this grammar", "constraint")
            self._hold(key, grammar)
        if grammar.left < 0:
            raise RequestRejected(RejectReason.INVALID, "following it takes too long", "constraint")
        used = self._taken.bytes
        if used and not grammar.matchers and used + grammar.size > self._max_used:
            text = f"the grammars of live requests take {used} bytes; {grammar.size} more are too many"
            raise RequestRejected(RejectReason.QUEUE_FULL, text)
        return GrammarMatcher(grammar, self._vocabulary.tokens)


class GrammarMatcher:
    """Where one sequence stands in its grammar.

    Args:
        grammar: shared with its other matchers.
        tokens: as in Vocabulary.
    """

    def __init__(self, grammar: _Grammar, tokens: tuple[bytes, ...]) -> None:
        vocab_size = len(tokens)
        self._grammar, self._tokens, self._words = grammar, tokens, -(-vocab_size // 32)
        self._pieces: list[int] = []  # of each token accepted
        if not grammar.matchers:
            grammar.of_all.bytes += grammar.size
        grammar.matchers += 1
        self._kept = 0.0  # of the grammar's
        self._seconds = 0.0  # not asked for yet
        self._full = False  # too much memory is kept
        # XGrammar may set the bits of the last word that stand for no token.
        self._last_word = np.int32((1 << vocab_size % 32) - 1 if vocab_size % 32 else -1)

    @cached_property
    def _matcher(self) -> "xgrammar.GrammarMatcher":
        """Made when it is first asked, on its grammar's time: of sequences that wait there may be millions."""
        import xgrammar

        return xgrammar.GrammarMatcher(self._grammar.compiled)

    def seconds(self) -> float:
        """What its tokens and masks took since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def terminated(self) -> bool:
        """Whether the text is complete and its stop token was accepted: nothing may follow."""
        return bool(self._matcher.is_terminated())

    def accept(self, token: int) -> bool:
        """Goes on by one sampled token; False (and nothing changed) where the grammar does not allow it.

        Also when there is no more time or memory: the next mask tells of that, which nobody takes for a fault of ours.
        """
        try:
            with self._grammar:
                accepted = self._accept(token)
        except RuntimeError:  # whatever fails in XGrammar concerns this sequence alone
            return False
        self._seconds += self._grammar.latest
        self._keep(max(0.0, self._kept + self._grammar.latest - _COMMON_SECONDS))
        # No grammar may keep more than is left for all: alone half, and of many the heaviest end first.
        if self._grammar.kept > _KEPT_SECONDS - self._grammar.of_all.kept:
            self._full = True
            self._keep(0.0)  # others may go on, since this one ends
        return accepted

    def _accept(self, token: int) -> bool:
        text, count = self._tokens[token], 1
        if len(text) <= _PIECE_BYTES:
            accepted = bool(self._matcher.accept_token(token))
        else:
            end = thread_time() + self._grammar.left
            for count, at in enumerate(range(0, len(text), _PIECE_BYTES), 1):
                accepted = bool(self._matcher.accept_string(text[at : at + _PIECE_BYTES]))
                if not accepted:
                    self._matcher.rollback(count - 1)
                if not accepted or thread_time() > end:
                    break
        if accepted:
            self._pieces.append(count)
        return accepted

    def _keep(self, seconds: float) -> None:
        self._grammar.kept += seconds - self._kept
        self._grammar.of_all.kept += seconds - self._kept
        self._kept = seconds

    def __del__(self) -> None:
        self._keep(0.0)
        self._grammar.matchers -= 1
        if not self._grammar.matchers:
            self._grammar.of_all.bytes -= self._grammar.size

    def rollback(self, count: int) -> None:
        """Takes back the tokens accepted last."""
        kept = len(self._pieces) - count
        self._matcher.rollback(sum(self._pieces[kept:]))
        del self._pieces[kept:]

    def mask(self, barred: Iterable[int] = ()) -> bytes | None:
        """The tokens that may come next: a bit for each id, least significant first, in whole int32 words.

        None: all of them. All zeros: there is none, or the matcher failed.

        Args:
            barred: token ids that are not to come as long as others may.
        """
        bits = np.zeros((1, self._words), np.int32)
        if self._grammar.left < 0 or self._full:
            return bytes(bits.nbytes)
        self._grammar.left += _TOKEN_SECONDS
        try:
            with self._grammar:
                limited = self._matcher.fill_next_token_bitmask(bits)
        except RuntimeError:
            return bytes(bits.nbytes)
        self._seconds += self._grammar.latest
        if not limited and not barred:
            return None
        bits[0, -1] &= self._last_word
        if barred:
            rest, ids = bits.copy(), np.fromiter(barred, np.uint32)
            np.bitwise_and.at(rest.view(np.uint32)[0], ids // 32, ~(np.uint32(1) << ids % 32))
            if rest.any():
                bits = rest
        return bits.tobytes()
