"""What the scheduler hands to the runner: one immutable step. Plain data: no torch.

The runner keeps one *row* for every running sequence: its token ids, its page table and its sampling state live there,
on the device. A step names only what changes, so that its cost on the host grows with the changes and not with the
batch, and so that a step can be launched before the tokens of the step before it are known: a decode row reads its
input from the row, where the sampler has put it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from engine.request import SamplingParams


class DeviceLost(Exception):
    """The device cannot compute any more: nobody's steps would ever succeed."""


@dataclass(frozen=True, slots=True)
class RowInit:
    """A sequence takes a row (admitted, resumed after a preemption, or forked off a sibling).

    Args:
        row: 0 <= row < max_num_seqs; the row's earlier content is void.
        tokens: every token known so far, prompt first.
        prompt_length: how many of them are the prompt.
        params: params.seed is set.
        index: which of the request's n continuations (0 to n - 1); part of the random numbers' key.
        stop_mask: token ids that may not be sampled before min_tokens are generated.
    """

    row: int
    tokens: tuple[int, ...]
    prompt_length: int
    params: SamplingParams
    index: int
    stop_mask: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """Pages are written into a row's page table, beginning at slot `first`."""

    row: int
    first: int
    pages: tuple[int, ...]


class Draft(NamedTuple):
    """Guesses at the tokens of a row from position `start` on, the first that is not known: they are put there.

    Each is computed by a work of its own and has a sample, whose token replaces the guess behind it. Whether they were
    right is for the scheduler to find out.
    """

    row: int
    start: int
    tokens: tuple[int, ...]


class RowWork(NamedTuple):
    """Tokens [start, start + length) of a row go through the model; their K and V go to the row's pages.

    length is 1 in decode. Attention of token t sees the row's tokens 0..t. A row may have several works in one step
    (drafts; and static batching has tokens computed again as padding, which writes the same K and V).
    """

    row: int
    start: int
    length: int


class Sample(NamedTuple):
    """A token is drawn for `row` from the logits of the last token of work `work`, and put behind that token.

    `work` is of another row only when siblings take their first token from the prompt that one of them computed.
    """

    work: int
    row: int


class PromptLogprobs(NamedTuple):
    """The logprobs of a row's tokens [first, end), from the logits of the tokens before them, all in work `work`.

    `top`: of how many of the likeliest tokens beside each.
    """

    work: int
    first: int
    end: int
    top: int


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass. Effects in this order: inits, page updates, drafts, works, samples, copies.

    All K and V of a layer are written before any attention of that layer reads.
    """

    step_id: int
    inits: tuple[RowInit, ...]
    page_updates: tuple[PageUpdate, ...]
    works: tuple[RowWork, ...]
    samples: tuple[Sample, ...]
    # (source page, destination page): whole pages copied after the forward pass.
    copies: tuple[tuple[int, int], ...] = ()
    # (index into samples, the token ids that may be drawn: a bit each, least significant first, in whole int32 words).
    masks: tuple[tuple[int, bytes], ...] = ()
    # Their works and samples are the last of the step, in the same order.
    drafts: tuple[Draft, ...] = ()
    # (index into samples, of how many of the likeliest tokens beside the drawn one).
    logprobs: tuple[tuple[int, int], ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    # Requests of which this is the first step: (request id, prompt tokens found in the cache).
    started: tuple[tuple[str, int], ...] = ()

    @property
    def num_drafts(self) -> int:
        """Guessed tokens."""
        return sum(len(draft.tokens) for draft in self.drafts)

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(work.length for work in self.works)

    def guessed(self, result: "StepResult") -> dict[int, list[tuple[int, int]]]:
        """By row: the guesses, each with the token drawn behind it, as far as those were drawn from finite logits.

        Where they were not, plain decoding comes to the place itself, if it is on the text's way.
        """
        first, failed, guessed = len(self.samples) - self.num_drafts, set(result.failed), {}
        for draft in self.drafts:
            end = first + len(draft.tokens)
            good = next((index for index in range(first, end) if index in failed), end)
            guessed[draft.row] = list(zip(draft.tokens, result.tokens[first:good], strict=False))
            first = end
        return guessed

    def records(self, result: "StepResult") -> dict[int, list[bytes]]:
        """By row: the logprobs of the tokens drawn for it, in their order."""
        records: dict[int, list[bytes]] = {}
        for (index, _), record in zip(self.logprobs, result.logprobs, strict=True):
            records.setdefault(self.samples[index].row, []).append(record)
        return records


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out of a step.

    Args:
        tokens: one sampled token id for each of step.samples.
        failed: indexes into step.samples whose logits were not finite; their tokens mean nothing.
        busy_seconds: how long the device worked on the step, where it is known.
        gap_seconds: how long it had waited since the step before.
        logprobs: one record (`engine.logprobs`) for each of step.logprobs.
        prompt_logprobs: the records of each of step.prompt_logprobs.
    """

    tokens: tuple[int, ...]
    failed: tuple[int, ...] = ()
    busy_seconds: float = 0.0
    gap_seconds: float = 0.0
    logprobs: tuple[bytes, ...] = ()
    prompt_logprobs: tuple[bytes, ...] = ()
