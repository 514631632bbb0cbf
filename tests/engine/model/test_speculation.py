"""Texts with guesses are those of plain decoding, in float32, whatever was asked for."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from engine import LLM, Request, SamplingParams, sequence
from engine.ngram import PromptRuns


def texts(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[Any]]:
    """Of each continuation the token ids, how it ended, and the tokens that its logprobs tell of."""
    made = llm.generate(prompts, params)
    return [
        [(one.token_ids, one.finish, [[token for token, _ in place.top] for place in one.logprobs]) for one in each]
        for each in (generation.completions for generation in made)
    ]


def oracle(prompts: list[list[int]], plain: list[list[Any]]) -> type:
    """A class in the place of NGrams that knows the texts, and errs at times."""
    left: dict[tuple[int, ...], Iterator[Any]] = {
        tuple(prompt): iter(made) for prompt, made in zip(prompts, plain, strict=True)
    }
    draw = random.Random(0)

    class Oracle:
        worth_waiting = True

        def __init__(self, tokens: list[int], length: int, prompt: PromptRuns) -> None:
            self.tokens, self.length, self.prompt = tokens, length, len(prompt._tokens)
            self.text = next(left[prompt._tokens])[0]

        def follow(self, most: int) -> int:
            return most

        def guesses(self, most: int) -> tuple[int, ...]:
            known = len(self.tokens) - self.prompt
            right = self.text[known:][: min(most, self.length)]
            return tuple(token if draw.random() < 0.8 else draw.randrange(160) for token in right)

    return Oracle


@pytest.mark.parametrize(
    "settings",
    [{}, {"memory_budget": 14 * 12_288, "max_num_batched_tokens": 40, "max_num_seqs": 6}],
    ids=["at ease", "preempted"],
)
def test_texts_are_those_of_plain_decoding(settings, llama, tools, monkeypatch):
    """Greedy and sampled, filters, penalties, bias, min_tokens, stop tokens, n, prefix hits, tiny pools."""
    draw = random.Random(4)
    block = [draw.randrange(4, 160) for _ in range(20)]
    wanted = [
        *tools.SAMPLING,
        {"temperature": 0.3, "seed": 3, "n": 3, "top_logprobs": 2},
        {"temperature": 0.0, "n": 2, "stop_token_ids": tuple(range(40, 60)), "min_tokens": 9},
        {"temperature": 0.2, "seed": 4, "logit_bias": {7: 3.0, 8: 3.0}, "ignore_eos": True},
    ]
    params = [SamplingParams(**{"seed": 0, "max_tokens": 60, **each}) for each in wanted]
    prompts = [block * 2 + [number] + block[:number] for number in range(len(params))]
    settings = {**settings, "dtype": "float32", "device": "cpu", "threads": 1}
    plain = LLM(llama[0], progress=False, **settings)
    expected = texts(plain, prompts, params)
    assert all(len(told) == len(tokens) for tokens, _, told in expected[len(tools.SAMPLING)])
    monkeypatch.setattr(sequence, "NGrams", oracle(prompts, expected))
    guessing = LLM(llama[0], progress=False, **settings, speculative="ngram")
    assert texts(guessing, prompts, params) == expected
    stats = guessing.core.stats()
    assert stats.draft_tokens > stats.accepted_tokens > 100
    assert stats.steps < plain.core.stats().steps
    assert (stats.preemptions > 0) == ("memory_budget" in settings)
    guessing.core.scheduler.check_integrity()


def test_smollm2_copies_what_it_read(default_model, own_data):
    """The default model, greedy and sampled, on prompts that make it repeat: most guesses are right; and the switch."""
    golden = json.loads((own_data / "smollm2_golden.json").read_text())
    cases = [case["ids"] for case in golden["tokenizer_cases"] if len(case["ids"]) > 12][:3]
    prompts = [ids * 4 + ids[:3] for ids in cases]
    params = [SamplingParams(temperature=t, seed=5, max_tokens=40, ignore_eos=True) for t in (0.0, 0.0, 0.5)]
    llm = LLM(default_model, progress=False, dtype="float32", threads=1, speculative="ngram")
    guessed = texts(llm, prompts, params)
    first = llm.core.stats()
    assert first.accepted_tokens > 0.6 * first.draft_tokens > 30
    before, drafted = first.steps, first.draft_tokens
    llm.core.scheduler.cache.flush()
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        llm.core.scheduler.add(Request(str(number), tuple(prompt), each, speculative=False))
    plain: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    while llm.core.has_work:
        for update in llm.core.turn().updates:
            plain[update.request_id] += update.tokens
    assert list(plain.values()) == [made[0][0] for made in guessed]
    assert llm.core.stats().draft_tokens == drafted
    assert llm.core.stats().steps - before == 40 > before
