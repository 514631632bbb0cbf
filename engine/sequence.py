"""One continuation of a request while it is live, and what the scheduler reports of it. Plain data: no decisions."""

import enum
from dataclasses import dataclass, field

import msgspec

from engine.cache.radix import Node
from engine.grammar import Matcher
from engine.ngram import NGrams
from engine.request import FinishReason, Request


class State(enum.Enum):
    """WAITING -> RUNNING -> FINISHED; a preemption leads back to WAITING."""

    WAITING = 1
    RUNNING = 2
    FINISHED = 3


class SequenceUpdate(msgspec.Struct, array_like=True):
    """What a collected step brought for one sequence: tokens, and its end if it came (ERROR says why in `message`).

    Encoded, it is a `messages.SequenceOutput` (with one entry more), so that the core sends it on as it is.
    """

    request_id: str
    index: int
    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""
    message: str = ""


@dataclass(eq=False, slots=True)
class Sequence:
    """The scheduler's record of a sequence.

    Attributes:
        request, index: the request, its seed set, and which of its n continuations this is.
        rank: the order of service; lower is sooner: (-priority, arrival number, index).
        max_length: prompt + max_tokens.
        stops: token ids that end the sequence, and the reason.
        stop_mask: the same ids if min_tokens bars them at first, else empty.
        tokens: every collected token, prompt first; none before its first row. Never a placeholder.
        logprobs_from: the first token of the prompt whose logprob is still to be reported; max_length: none is.
        matcher: where the text stands in its grammar, after all of `tokens`; None without a grammar.
        ngrams: guesses at its next tokens; None where that is off.
        special: whether it has one of the two, so that its decodes are more than a row.
        guessed: guesses of a step in flight may be accepted.
        num_tokens: tokens collected or being sampled by a step in flight.
        num_computed: tokens whose K and V are computed by scheduled steps; chases num_tokens.
        num_cached: tokens whose pages have been offered to the tree, a multiple of the page size.
        row: the runner's row, -1 without one. Row, pages and node are held until no step in flight uses them.
        pages: the page table; only ever appended to.
        node: where its cached prefix ends in the tree (locked); None if it does not use the prefix cache.
        last_step: id of the last step that it has part in.
        void_through: samples of steps up to this one are not of its text (they read pages of a failed step).
        overtaken: how often a later one was admitted while this one did not fit.
        followers: siblings that take their prompt from this sequence when it has been computed; they wait with it.
        leader: the sequence whose follower this is.
    """

    request: Request
    index: int
    rank: tuple[int, int, int]
    max_length: int
    stops: dict[int, FinishReason]
    stop_mask: tuple[int, ...]
    tokens: list[int]
    num_tokens: int
    logprobs_from: int
    state: State = State.WAITING
    num_computed: int = 0
    num_cached: int = 0
    row: int = -1
    pages: list[int] = field(default_factory=list)
    node: Node | None = None
    last_step: int = -1
    void_through: int = -1
    overtaken: int = 0
    followers: "list[Sequence]" = field(default_factory=list)
    leader: "Sequence | None" = None
    matcher: Matcher | None = None
    ngrams: NGrams | None = None
    special: bool = False
    guessed: bool = False
