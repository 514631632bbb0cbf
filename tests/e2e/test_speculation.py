"""With guesses (--speculative ngram), whatever is asked for together with whatever else: as without, for each request.

A tiny random model, whose tokens are bytes, soon repeats itself; the pool is so small that sequences are preempted.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1.inference_pb2_grpc import AdminServiceStub

FLAGS = [
    *("--load-format=dummy", "--memory-budget=144KiB", "--max-num-seqs=8", "--max-num-batched-tokens=48"),
    *("--speculative=ngram", "--tool-parser=hermes", "--reasoning-parser=none"),
]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %} {% endif %}"
PROMPTS = ["abcabcabc", "aab aab aab aab", "é→é→é→", "12 12 12 12", '{"a": 1}, {"a": 1}, ']
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"const": 36}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {},
    {"guided_regex": "(ab|ba|→){6,30}"},
    {"guided_json": {"type": "array", "minItems": 4, "maxItems": 6, "items": PERSON}},
    {"guided_choice": ["aaaaaaaaaaaaaab", "aaaaaaaaaaaaaaa", "aab aab aab aab"]},
    {"guided_grammar": 'root ::= item{3,8}\nitem ::= "aab " | "ab " | "é"'},
]
STOPS = ["a", "b", "c", " ", "aa", "bb", "ab", "ba", "é", "→", "\ufffd", "aaa", "bbb", "ccc", "   ", "ob", "36", "x y"]
LETTERS = [64, 65, 66, 220, 127, 102, 158]  # ids, of which texts are made
TOOL = {"type": "function", "function": {"name": "greet", "parameters": PERSON}}


def asked(draw: random.Random) -> dict[str, Any]:
    """Sampling, stops, logprobs, continuations and a form, each drawn with or without."""

    def at_times(share: float, **fields: Any) -> dict[str, Any]:
        return fields if draw.random() < share else {}

    bias = {str(token): draw.choice([2, 4]) for token in draw.sample([*LETTERS, 256], 3)}
    return {
        "max_tokens": draw.choice([20, 40, 90]),
        "temperature": draw.choice([0, 0, 0.4, 1]),
        "seed": draw.randrange(99),
        "logit_bias": bias,
        **at_times(0.5, n=draw.choice([2, 3])),
        **at_times(0.8, min_tokens=draw.choice([1, 7, 12, 18])),
        **at_times(0.7, stop=draw.sample(STOPS, 6)),
        **at_times(0.3, stop_token_ids=draw.sample(range(256), 12)),
        **at_times(0.3, include_stop_str_in_output=True),
        **at_times(0.3, ignore_eos=True),
        **at_times(0.2, frequency_penalty=0.3),
    }


def completion(draw: random.Random) -> dict[str, Any]:
    told = {"logprobs": draw.choice([0, 2, 5])} if draw.random() < 0.5 else {}
    return asked(draw) | draw.choice(FORMS) | told | {"prompt": draw.choice(PROMPTS) * draw.choice([1, 3])}


def chat(draw: random.Random) -> dict[str, Any]:
    """Calls that must come: whole, or cut by whatever else is asked for."""
    told = {"logprobs": True, "top_logprobs": 2} if draw.random() < 0.5 else {}
    messages = [{"role": "user", "content": draw.choice(PROMPTS)}]
    calls = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": draw.random() < 0.5}
    return asked(draw) | told | calls | {"messages": messages, "max_tokens": draw.choice([40, 200])}


def words(value: Any) -> Any:
    """All that has to be equal."""
    if isinstance(value, dict):
        apart = {"id", "created", "prompt_tokens_details", "top_logprobs"}
        return {name: words(each) for name, each in value.items() if name not in apart}
    if isinstance(value, list):
        return [words(each) for each in value]
    return None if isinstance(value, float) else value


def numbers(value: Any) -> list[float]:
    """The logprobs, which vary a little with the batch."""
    if isinstance(value, dict | list):
        return [number for each in (value.values() if isinstance(value, dict) else value) for number in numbers(each)]
    return [value] if isinstance(value, float) else []


async def test_answers_are_those_of_plain_decoding(
    serve_model: Callable[..., AbstractContextManager[Any]], tiny_model: Path, tmp_path: Path
) -> None:
    draw = random.Random(1)
    bodies = [("/completions", completion(draw)) for _ in range(32)]
    bodies += [("/chat/completions", chat(draw)) for _ in range(12)]
    draw.shuffle(bodies)
    ends: set[tuple[str, type]] = set()
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)

    async def both(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        plain, guessed = [
            (await client.post(path, json=body | more)).raise_for_status().json()
            for more in ({"speculative": False}, {})
        ]
        assert words(guessed) == words(plain), body
        assert numbers(guessed["choices"]) == pytest.approx(numbers(plain["choices"]), abs=1e-3), body
        ends.update((choice["finish_reason"], type(choice["stop_reason"])) for choice in plain["choices"])

    with serve_model(tiny_model, tmp_path / "log", *FLAGS, f"--chat-template={template}") as served:
        async with (
            httpx.AsyncClient(base_url=f"{served.http}/v1", timeout=300) as client,
            grpc.aio.insecure_channel(served.admin) as channel,
        ):
            for first in range(0, len(bodies), 8):
                await asyncio.gather(*(both(client, *each) for each in bodies[first : first + 8]))
            stats = (await AdminServiceStub(channel).GetStats(pb.GetStatsRequest())).stats
    assert stats.draft_tokens > stats.accepted_tokens > 300
    assert stats.preemptions > 0
    assert stats.used_pages == 0
    no = type(None)
    assert ends == {("length", no), ("stop", no), ("stop", str), ("stop", int), ("tool_calls", no)}
