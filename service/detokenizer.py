"""The text of one sequence while its tokens arrive: whole characters only, and stop strings. Knows nothing of requests.

The joined pieces always equal `Tokenizer.decode` of all ids. The work is O(1) a token, whatever the tokens are: a token
of whole characters is looked up; the bytes of others, and of those that follow half a character, go through an
incremental UTF-8 decoder, which keeps at most three bytes of a character that is not complete yet.
(`tokenizers.decoders.DecodeStream` decodes all pending ids anew at each step, so a run of invalid bytes costs O(n²); it
has no end, and so loses what is pending there.)
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from itertools import repeat

from service.parsers.until import partial
from service.tokenizer import Tokenizer


class Detokenizer:
    """Turns the ids of one sequence into text, piece by piece. `skipped` are the ids that have none."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        after_prompt: bool = False,
        shown: Iterable[str] = (),
    ) -> None:
        """Starts a text.

        Args:
            after_prompt: the text goes on where a prompt ended, so a space that the tokenizer would leave out at the
                beginning of a text (SentencePiece) stays.
            shown: special tokens that are text all the same, because a parser looks for them.
        """
        self._token_bytes = tokenizer.token_bytes
        self._token_text = tokenizer.token_text
        self.skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        if shown:
            self.skipped -= {tokenizer.token_id(token) for token in shown}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = False  # the decoder holds a part of a character
        self._strip = tokenizer.strips_first_space and not after_prompt

    def step(self, token_id: int) -> str:
        """Returns the text that this token completes; "" while a character is incomplete."""
        if token_id in self.skipped:
            return ""
        text = None if self._partial else self._token_text(token_id)
        if text is None:
            text = self._utf8.decode(self._token_bytes(token_id))
            self._partial = bool(self._utf8.getstate()[0])
        return self._stripped(text) if self._strip else text

    def finish(self) -> str:
        """Returns what is left: U+FFFD if the sequence ended within a character."""
        return self._stripped(self._utf8.decode(b"", True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class StopChecker:
    """Finds stop strings in a growing text, and holds back no more than what may become one.

    The stop string that is complete first ends the text; of several that are complete at the same character, the
    longest. So the outcome depends on the text alone and not on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Takes the stop strings, none of them empty. `include_stop` leaves the matched one in the text."""
        self._stops = stops
        self._may_begin = re.compile(f"[{re.escape(''.join(stop[0] for stop in stops))}]").search if stops else None
        self._include = include_stop
        self._held = ""
        self._begun = [0] * len(stops)  # so much of each stands at the end of what is held

    def step(self, piece: str) -> tuple[str, str | None]:
        """Returns the text that may be sent, and the stop string that ends it, if one does (the last call then)."""
        if self._may_begin is None or not (self._held or self._may_begin(piece)):
            return piece, None
        text = self._held + piece
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            return text[: end if self._include else start], stop
        # None grows by more than the piece: over the whole text each is compared twice a character at most.
        most = [begun + len(piece) for begun in self._begun]
        self._begun = list(map(partial, repeat(text), self._stops, most))
        cut = len(text) - max(self._begun)
        self._held = text[cut:]
        return text[:cut], None

    def finish(self) -> str:
        """Returns what was held back: no stop string came of it."""
        text, self._held = self._held, ""
        return text


class TextStream:
    """The text of one sequence: detokenized, and ended by stop strings.

    The text of the first `min_tokens` tokens is never searched: a stop string begins after it.
    """

    def __init__(self, detokenizer: Detokenizer, stop_checker: StopChecker, *, min_tokens: int = 0) -> None:
        """Joins a fresh detokenizer and a fresh stop checker."""
        self._detokenizer = detokenizer
        self.skipped = detokenizer.skipped
        self._stop_checker = stop_checker
        self._unchecked = min_tokens

    def step(self, token_id: int) -> tuple[str, str | None]:
        """Takes a token; returns the text that may be sent, and the stop string that ends it (the last call then)."""
        piece = self._detokenizer.step(token_id)
        if self._unchecked > 0:
            self._unchecked -= 1
            return piece, None
        return self._stop_checker.step(piece) if piece else ("", None)

    def finish(self) -> tuple[str, str | None]:
        """Ends the text from outside (length, end of sequence); returns its rest, as `step` does."""
        piece = self._detokenizer.finish()
        if self._unchecked > 0:
            return piece, None
        text, stop = self._stop_checker.step(piece)
        return (text, stop) if stop is not None else (text + self._stop_checker.finish(), None)
