"""Guesses at what a sequence says next: what stood behind the last place where its latest tokens occurred.

Copies, quotations and repeated code are guessed so without a second model (prompt lookup; Yang et al., "Inference with
Reference", arXiv:2304.04487). Plain data: knows no scheduler.
"""

from collections.abc import Sequence
from typing import Final

# How fast the shares of right guesses follow the text, and what they begin with.
_RATE: Final = 0.2
_FRESH, _CONTINUED = 0.4, 0.7
# A token that is less likely to be reached and right than this is not worth its row of a step.
_LEAST: Final = 0.25
# Expected right guesses that are worth a step in which the sequence waits for its last one to be collected.
_WORTH_WAITING: Final = 1.5


class PromptRuns:
    """Where runs of a prompt's tokens are followed by a token, last; shared by the continuations of one request.

    Args:
        tokens: the prompt.
        window: shortest and longest run of tokens that is looked for.
    """

    __slots__ = ("_tokens", "after", "end")

    def __init__(self, tokens: Sequence[int], window: tuple[int, int]) -> None:
        self._tokens = tokens
        # By their length, longest first: the hash of a run of tokens -> where the token is that followed it last. Two
        # runs of one hash make a wrong guess at worst; the runs themselves would take more memory, and the garbage
        # collector's time.
        self.after: dict[int, dict[int, int]] = {size: {} for size in range(window[1], window[0] - 1, -1)}
        self.end = 0  # tokens that were read

    def read(self, most: int) -> int:
        """Reads the next tokens, at most so many: about a microsecond each. Returns: how many were left to be read."""
        tokens, start, left = self._tokens, self.end, len(self._tokens) - self.end
        self.end = end = start + min(most, left)
        places = list(range(start, end))
        for size, after in self.after.items():
            first = min(max(start, size), end)
            runs = zip(*(tokens[first - size + at : end - size + at] for at in range(size)), strict=True)
            after.update(zip(map(hash, runs), places[first - start :], strict=True))
        return left


class NGrams:
    """The guesser of one sequence; O(1) a token.

    Every token is guessed, whether a step verifies the guess or not. So it shows at no cost when guesses begin to fail,
    and when they would be right again.

    Args:
        tokens: of the sequence; only ever appended to.
        length: most tokens guessed at once.
        prompt: what the tokens begin with. Longer runs are trusted first.
    """

    def __init__(self, tokens: list[int], length: int, prompt: PromptRuns) -> None:
        self._tokens, self._length, self._prompt = tokens, length, prompt
        self._after: dict[int, int] = {}  # as the prompt's, of what follows it
        # Those that end with the last token, each with where runs of its length stand in the prompt.
        self._runs: list[tuple[int, dict[int, int]]] = []
        self._end = 0  # tokens that were looked at
        self._next = -1  # where the token is that is guessed to come next; -1: nowhere
        self._goes_on = False  # the guess before was right, and this one is of the same place
        # Shares of right guesses: at a place just found, and behind a right one.
        self._fresh, self._continued = _FRESH, _CONTINUED

    def follow(self, most: int) -> int:
        """Takes in the tokens that have been appended since the last call, once the prompt has been read.

        Args:
            most: tokens of the prompt that may be read for it now.

        Returns: how many of these are left.
        """
        tokens, end = self._tokens, len(self._tokens)
        if not self._end:
            left = self._prompt.read(most)
            if left > most:
                return 0
            most -= left
            self._end = self._prompt.end
            self._find(self._end)
        for position in range(self._end, end):
            for run, _ in self._runs:
                self._after[run] = position
            guess = self._next
            right = guess >= 0 and tokens[guess] == tokens[position]
            if guess >= 0:
                if self._goes_on:
                    self._continued += _RATE * (right - self._continued)
                else:
                    self._fresh += _RATE * (right - self._fresh)
            self._find(position + 1)
            self._goes_on = right
            if right:
                self._next = guess + 1
        self._end = end
        return most

    def _find(self, end: int) -> None:
        tokens, sizes, self._next = self._tokens, self._prompt.after.items(), -1
        self._runs = [(hash(tuple(tokens[end - size : end])), earlier) for size, earlier in sizes if size <= end]
        for run, earlier in self._runs:
            place = self._after.get(run) or earlier.get(run)
            if place is not None:
                self._next = place
                return

    @property
    def worth_waiting(self) -> bool:
        """Whether guesses go so well that it is better to wait for the last token than to go on without them."""
        likely, expected = self._likely, 0.0
        for _ in range(self._length):
            expected += likely
            likely *= self._continued
        return expected >= _WORTH_WAITING

    @property
    def _likely(self) -> float:
        return 0.0 if self._next < 0 else self._continued if self._goes_on else self._fresh

    def guesses(self, most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may come next; none where they are not likely enough."""
        likely, count = self._likely, 0
        while count < min(self._length, most) and likely >= _LEAST:
            likely *= self._continued
            count += 1
        if not count:
            return ()
        found = tuple(self._tokens[self._next : self._next + count])
        # What goes on up to the end is guessed to repeat.
        return (found * count)[:count] if len(found) < count else found
