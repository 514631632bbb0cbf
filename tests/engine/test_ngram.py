"""The guesser of one sequence, and the rule by which the scheduler takes its guesses."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch

from engine.core import EngineCore
from engine.ngram import NGrams, PromptRuns
from engine.request import Request, SamplingParams
from engine.scheduler import READING
from engine.step import RowInit, Step, StepResult
from kernels.sampling import uniform


def guesser(tokens: list[int], length: int = 4, window: tuple[int, int] = (2, 3)) -> NGrams:
    ngrams = NGrams(tokens, length, PromptRuns(tuple(tokens), window))
    ngrams.follow(len(tokens))
    return ngrams


@pytest.mark.parametrize(
    ("tokens", "window", "guesses"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], (2, 3), (3, 4, 5, 6)),
        ([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], (2, 2), (4, 8, 1, 2)),  # the last place
        ([5, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2], (2, 3), (3, 9, 1, 2)),  # a longer run before a later place
        ([1, 2, 3, 4, 2], (2, 3), ()),
        ([1, 2, 3, 4, 2], (1, 3), (3, 4, 2, 3)),  # what goes on up to the end repeats
        ([7, 7, 7, 7], (2, 3), (7, 7, 7, 7)),
        ([1], (2, 3), ()),
    ],
)
@pytest.mark.parametrize("prompt", [1, 3, 99])
@pytest.mark.parametrize("piece", [1, 2, 99])
def test_what_stood_behind_the_last_such_run_comes_again(tokens, window, guesses, prompt, piece):
    """However much of the text is the prompt, in whatever pieces that is read, and if a sibling has read it."""
    runs = PromptRuns(tuple(tokens[:prompt]), window)
    for _ in range(2):
        known = tokens[:prompt]
        ngrams = NGrams(known, 4, runs)
        for _ in known:
            ngrams.follow(piece)
        for token in tokens[len(known) :]:
            known.append(token)
            ngrams.follow(0)
        ngrams._fresh = ngrams._continued = 1.0  # whatever it thinks of itself
        assert ngrams.guesses(9) == guesses
        assert ngrams.guesses(1) == guesses[:1]


def test_nothing_is_guessed_before_the_prompt_has_been_read():
    tokens = [1, 2, 3] * 4
    ngrams = NGrams(tokens, 4, PromptRuns(tuple(tokens), (2, 3)))
    assert ngrams.follow(11) == 0
    assert not ngrams.guesses(9)
    tokens.append(1)
    assert ngrams.follow(11) == 10  # one was left
    assert ngrams.guesses(9) == (2, 3, 1)


def test_no_step_reads_more_of_a_prompt_than_it_computes_and_a_little(harness, monkeypatch):
    """For three siblings the prompt is read once; when it was cached, beside decodes."""
    read: list[int] = []

    def counted(runs: PromptRuns, most: int, original=PromptRuns.read) -> int:
        before = runs.end
        left = original(runs, most)
        read.append(runs.end - before)
        return left

    monkeypatch.setattr(PromptRuns, "read", counted)
    settings = {"num_pages": 999, "page_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 4000, "vocab_size": 9}
    scheduler = harness.new_scheduler(**settings, max_model_len=12_000, eos_token_ids=(), speculative_length=4)
    for name in ("cold", "cached"):
        scheduler.add(Request(name, tuple(range(9)) * 1111, SamplingParams(max_tokens=8, n=3)))
        total = 0
        while scheduler.has_work:
            step = scheduler.schedule()
            assert sum(read) <= READING + sum(work.length for work in step.works if work.length > 1)
            total += sum(read)
            read.clear()
            scheduler.update(step, StepResult((0,) * len(step.samples)))
        assert total == 9999


def test_it_stops_where_guesses_fail_and_begins_again_where_they_would_be_right():
    tokens = [1, 2, 3] * 2
    ngrams = guesser(tokens)
    assert ngrams.guesses(9)
    for number in range(10, 22):  # runs that were there before, and then something else
        tokens += [1, 2, number]
        ngrams.follow(0)
    assert not ngrams.guesses(9)
    assert not ngrams.worth_waiting
    tokens += [50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61]
    ngrams.follow(0)
    tokens += [50, 51, 52, 53, 54, 55, 56]
    ngrams.follow(0)
    assert ngrams.guesses(9) == (57, 58, 59, 60)
    assert ngrams.worth_waiting


P = torch.tensor([[0.85, 0.05, 0.05, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.05, 0.9, 0.03, 0.02]])


@dataclass
class Chain:
    """A runner whose model is a Markov chain: what follows a token has the probabilities of its row of P."""

    rows: dict[int, tuple[RowInit, list[int]]] = field(default_factory=dict)

    def launch(self, step: Step) -> StepResult:
        for init in step.inits:
            self.rows[init.row] = init, list(init.tokens)
        for row, start, tokens in step.drafts:
            self.rows[row][1][start:] = tokens
        rows = [self.rows[row] for _, row in step.samples]
        ends = [step.works[work].start + step.works[work].length for work, _ in step.samples]
        seeds = torch.tensor([init.params.seed for init, _ in rows])
        numbers = uniform(seeds, torch.zeros_like(seeds), torch.tensor(ends))
        last = [tokens[end - 1] for (_, tokens), end in zip(rows, ends, strict=True)]
        drawn = (P[last].cumsum(1)[:, :3] <= numbers[:, None]).sum(1).tolist()
        for (_, tokens), end, token in zip(rows, ends, drawn, strict=True):
            tokens[end:] = [token]
        return StepResult(tuple(drawn))

    def collect(self, launched: StepResult) -> StepResult:
        return launched


def test_guesses_leave_the_distribution_as_it_is(harness):
    """Pearson's chi-squared of all transitions against the chain itself, which the guesses do not follow."""
    scheduler = harness.new_scheduler(
        num_pages=400,
        max_num_seqs=50,
        max_num_batched_tokens=400,
        vocab_size=4,
        max_model_len=50,
        eos_token_ids=(),
        speculative_length=4,
        speculative_window=(1, 2),
        max_samples=250,
    )
    core, texts = EngineCore(scheduler, Chain()), {}
    for seed in range(200):
        params = SamplingParams(max_tokens=40, seed=seed)
        scheduler.add(Request(str(seed), (0, 1, 1, 0), params))
        texts[str(seed)] = [0]
    while core.has_work:
        for update in core.turn().updates:
            texts[update.request_id] += update.tokens
    assert 500 < scheduler.stats.accepted_tokens < scheduler.stats.draft_tokens - 500
    counts = torch.zeros(4, 4)
    for text in texts.values():
        assert len(text) == 41
        for before, after in pairwise(text):
            counts[before, after] += 1
    expected = counts.sum(1, keepdim=True) * P
    assert ((counts - expected) ** 2 / expected).sum() < 39.1  # 12 degrees of freedom: 1 in 10,000 is beyond
