"""One continuation of a request while it is live: how far it is, and what its own grammar and ends make of a token."""

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import InitVar, dataclass, field

import msgspec

from engine.cache.radix import Found, Node
from engine.grammar import GrammarMatcher
from engine.ngram import NGrams, PromptRuns
from engine.request import FinishReason, Request


class State(enum.Enum):
    """WAITING -> RUNNING -> FINISHED; a preemption leads back to WAITING."""

    WAITING = 1
    RUNNING = 2
    FINISHED = 3


class SequenceUpdate(msgspec.Struct, array_like=True, gc=False):
    """What a collected step brought for one sequence: tokens, and its end if it came (`message` says why it failed).

    Encoded, it is a `messages.SequenceOutput` (with one entry more), so that the core sends it on as it is.
    """

    request_id: str
    index: int
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""
    message: str = ""


@dataclass(eq=False, slots=True)
class Sequence:
    """The scheduler's record of a sequence.

    Args:
        guess: most tokens guessed at once, and what guesses need of the prompt; None where nothing is to be guessed.

    Attributes:
        request, index: the request, its seed set, and which of its n continuations this is.
        rank: the order of service; lower is sooner: (-priority, arrival number, index).
        matcher: where the text stands in its grammar, after all of `tokens`; None without a grammar.
        ngrams: guesses at its next tokens; None where that is off.
        special: whether it has one of the two, so that its decodes are more than a row.
        guessed: guesses of a step in flight may be accepted.
        max_length: prompt + max_tokens.
        stops: token ids that end the sequence, and the reason; one for all siblings, of which millions may wait.
        tokens: every collected token, prompt first; none before its first row. Never a placeholder.
        num_tokens: tokens collected or being sampled by a step in flight.
        num_computed: tokens whose K and V are computed by scheduled steps; chases num_tokens.
        num_cached: tokens whose pages have been offered to the tree, a multiple of the page size.
        logprobs_from: the first token of the prompt whose logprob is still to be reported; max_length: none is.
        row: the runner's row, -1 without one. Row, pages and node are held until no step in flight uses them.
        pages: the page table; only ever appended to.
        node: where its cached prefix ends in the tree (locked); None if it does not use the prefix cache.
        found: where its cached prefix was found last; it is looked up from there on.
        last_step: id of the last step that it has part in.
        void_through: samples of steps up to this one are not of its text (they read pages of a failed step).
        overtaken: how often a later one was admitted while this one did not fit.
        followers: siblings that take their prompt from this sequence when it has been computed; they wait with it.
        leader: the sequence whose follower this is.
    """

    request: Request
    index: int
    rank: tuple[int, int, int]
    matcher: GrammarMatcher | None
    stops: dict[int, FinishReason]
    guess: InitVar[tuple[int, PromptRuns] | None]
    ngrams: NGrams | None = field(init=False)
    special: bool = field(init=False)
    guessed: bool = False
    max_length: int = field(init=False)
    tokens: list[int] = field(init=False)
    num_tokens: int = field(init=False)
    num_computed: int = 0
    num_cached: int = 0
    logprobs_from: int = field(init=False)
    state: State = State.WAITING
    row: int = -1
    pages: list[int] = field(default_factory=list)
    node: Node | None = None
    found: Found | None = None
    last_step: int = -1
    void_through: int = -1
    overtaken: int = 0
    followers: "list[Sequence]" = field(default_factory=list)
    leader: "Sequence | None" = None

    def __post_init__(self, guess: tuple[int, PromptRuns] | None) -> None:
        params = self.request.params
        self.tokens = []
        self.num_tokens = len(self.request.prompt)
        self.ngrams = NGrams(self.tokens, *guess) if guess else None
        self.special = self.matcher is not None or self.ngrams is not None
        self.max_length = self.num_tokens + params.max_tokens
        self.logprobs_from = self.max_length if self.index or params.prompt_logprobs is None else 1

    @property
    def stop_mask(self) -> tuple[int, ...]:
        """The token ids that end it, if min_tokens bars them at first and no grammar does; else none."""
        return tuple(self.stops) if self.request.params.min_tokens and self.matcher is None else ()

    def take(
        self, token: int, guessed: SequenceOf[tuple[int, int]] = ()
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Appends a token that was drawn, and those drawn behind right guesses, as long as the text goes on.

        Args:
            guessed: guesses at the tokens from this one on, each with the token drawn behind it.

        Returns: the tokens, none where the grammar does not allow one; and how the last of them ends the text.
        """
        self.tokens.append(token)
        taken, finish = [token], self.judge(token)
        for guess, following in guessed:
            if finish is not None or guess != taken[-1]:
                break
            self.tokens.append(following)
            taken.append(following)
            finish = self.judge(following)
        self.guessed = False
        self.num_tokens += len(taken) - 1
        self.num_computed += len(taken) - 1
        return () if finish is FinishReason.ERROR else tuple(taken), finish

    def judge(self, token: int) -> FinishReason | None:
        """How its last token ends it; ERROR where its grammar does not allow the token."""
        if self.matcher is not None:
            if not self.matcher.accept(token):
                return FinishReason.ERROR
            if self.matcher.terminated:
                return FinishReason.EOS
        finish = self.stops.get(token)
        if finish is not None and len(self.tokens) - len(self.request.prompt) > self.request.params.min_tokens:
            return finish
        return FinishReason.LENGTH if len(self.tokens) >= self.max_length else None

    def mask(self, ahead: int = 0) -> bytes | None:
        """The tokens that its grammar allows next, `ahead` accepted guesses on (`GrammarMatcher.mask`); None: all."""
        if self.matcher is None:
            return None
        generated = len(self.tokens) + ahead - len(self.request.prompt)
        return self.matcher.mask(self.stops if generated < self.request.params.min_tokens else ())

    def masks_behind(self, guesses: SequenceOf[int]) -> list[bytes | None]:
        """Of each guess, up to the first that ends the text or breaks its grammar: the mask of the token behind it."""
        masks: list[bytes | None] = []
        accepted = 0
        for guess in guesses:
            if guess in self.stops:
                break
            if self.matcher is not None:
                if not self.matcher.accept(guess):
                    break
                accepted += 1
                if self.matcher.terminated:
                    break
            masks.append(self.mask(accepted))
        if self.matcher is not None and accepted:
            self.matcher.rollback(accepted)
        return masks
