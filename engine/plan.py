"""The step in the making, and what may still be added to it. Plain data."""

from dataclasses import dataclass, field, fields

from engine.sequence import Sequence
from engine.step import Draft, PageUpdate, PromptLogprobs, RowInit, RowWork, Sample, Step

FOLLOWING = 1.0  # seconds of a step in which grammars are followed: 0.1 is common for 1,024 rows

_PARTS = tuple(part.name for part in fields(Step) if part.name != "step_id")


@dataclass(slots=True)
class Plan:
    """A `Step` that is still being filled.

    Attributes:
        budget: tokens that may still be added.
        short: whether a sequence lacked a page.
        moving: tokens of the sequences that may still take a row.
        reading: tokens of prompts that may still be read for guesses.
        room: guesses for which a sequence may yet wait.
        following: seconds that grammars may still be followed.
        guessing: decoding sequences whose next tokens may be guessed.
        started: as in Step.
    """

    step_id: int
    budget: int
    short: bool = False
    moving: int = 0
    reading: int = 0
    room: int = 0
    following: float = FOLLOWING
    inits: list[RowInit] = field(default_factory=list)
    page_updates: list[PageUpdate] = field(default_factory=list)
    works: list[RowWork] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    masks: list[tuple[int, bytes]] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    logprobs: list[tuple[int, int]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    guessing: list[Sequence] = field(default_factory=list)
    started: list[tuple[str, int]] = field(default_factory=list)

    def may_draw(self, sequence: Sequence) -> bool:
        """Whether the sequence may draw a token: where it follows a grammar, only as long as there is time for it."""
        return self.following > 0 or sequence.matcher is None

    def draw(self, sequence: Sequence, mask: bytes | None) -> None:
        """The sequence draws a token from the last work, of those that the mask allows (None: all)."""
        if mask is not None:
            self.masks.append((len(self.samples), mask))
        self.samples.append(Sample(len(self.works) - 1, sequence.row))
        if sequence.matcher is not None:
            self.following -= sequence.matcher.seconds()

    def step(self) -> Step:
        """What has been planned."""
        return Step(self.step_id, **{name: tuple(getattr(self, name)) for name in _PARTS})
