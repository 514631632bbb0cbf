"""A random crowd on a tiny random model with a tiny KV pool: each answer is the one given alone, and nothing leaks.

Pages run out all the time, so sequences are preempted and cached pages evicted; at last the core is killed under it.
`make soak` runs it for SOAK_SECONDS with the seed SOAK_SEED, which chooses settings too; here it runs for seconds.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1.inference_pb2_grpc import AdminServiceStub, InferenceServiceStub

SEED = int(os.environ.get("SOAK_SEED", "1"))
SECONDS = float(os.environ.get("SOAK_SECONDS", "8"))
CROWD = 24
CASES = 24
ROUNDS = max(2, int(SECONDS / 30))
PAGES = 48
PREFIX = "What all requests begin with, so that pages are shared. "
SCHEMA = {
    "type": "object",
    "properties": {"side": {"enum": ["left", "right"]}, "steps": {"type": "array", "items": {"enum": [1, 2, 3]}}},
    "required": ["side", "steps"],
    "additionalProperties": False,
}
# What else the server is set to: a seed has one of these.
SETTINGS = [
    ("--admission", "prefix", "--no-chunked-prefill", "--tool-parser", "mistral"),
    ("--tool-parser", "hermes"),
    ("--service-workers", "2", "--workers", "2", "--tool-parser", "hermes", "--reasoning-parser", "think"),
    ("--no-prefix-cache", "--max-num-batched-tokens", "48", "--tool-parser", "llama3_json"),
]
VARIES = {"id", "call_id", "created", "created_at", "completed_at", "prompt_tokens_details", "input_tokens_details"}


@pytest.fixture(scope="module")
def soaked(serve_tiny: Callable[..., Any], tool_template: Path) -> Iterator[Any]:
    flags = ("--max-num-seqs", "16", "--speculative", "ngram", "--chat-template", str(tool_template))
    with serve_tiny(PAGES, *flags, *SETTINGS[SEED % len(SETTINGS)]) as addresses:
        yield addresses


def case(draw: random.Random, number: int) -> pb.GenerateRequest:
    """A request that has one right answer: greedy, or with a seed of its own."""
    prompt = PREFIX[: draw.randint(1, len(PREFIX))]
    request = pb.GenerateRequest(model="smollm2", n=draw.choice([1, 1, 1, 2, 3]))
    if draw.random() < 0.2:
        request.chat.messages.add(role="user").content.add(text=prompt)
        if draw.random() < 0.5:
            request.chat.tools.add(name="go", parameters_json=json.dumps(SCHEMA))
            request.chat.tool_choice.mode = pb.ToolChoice.MODE_REQUIRED
    else:
        request.token_ids.ids[:] = [*prompt.encode(), *(draw.randrange(256) for _ in range(draw.randint(0, 40)))]
    request.stopping.max_tokens = draw.randint(1, 100)
    request.stopping.ignore_eos = draw.random() < 0.5
    request.output.token_ids = True
    request.sampling.temperature = 0.0
    if draw.random() < 0.5:
        request.sampling.temperature, request.sampling.seed = 1.0, number
        request.sampling.top_p, request.sampling.top_k = draw.choice([1.0, 0.9]), draw.choice([0, 20])
    if draw.random() < 0.3:
        request.sampling.repetition_penalty = 1.2
        request.sampling.frequency_penalty = request.sampling.presence_penalty = 0.5
    if draw.random() < 0.2:
        request.sampling.logit_bias[draw.randrange(256)] = draw.choice([-100, 3])
        request.sampling.min_p = 0.02
    if draw.random() < 0.3:
        request.stopping.stop.append(chr(draw.randrange(97, 123)))
        request.stopping.min_tokens = draw.choice([0, 1])
        request.stopping.include_stop = draw.random() < 0.5
    if draw.random() < 0.2:
        request.stopping.stop_token_ids.extend(draw.sample(range(256), 20))
    if draw.random() < 0.2:
        request.output.top_logprobs = draw.choice([0, 3, 20])
    if draw.random() < 0.1:
        request.output.prompt_logprobs = draw.choice([0, 2])
    match None if request.chat.tools else draw.randrange(20):
        case 0 | 1:
            request.regex = "(yes|no){1,5}"
        case 2 | 3:
            request.choices.choices.extend(["left", "right"])
        case 4:
            request.json_schema = json.dumps(SCHEMA)
        case 5:
            request.json_object = True
        case 6:
            request.grammar = 'root ::= ("a" | "b" root)'
    request.priority = draw.choice([0, 0, 0, 1])
    request.speculative = draw.random() < 0.8
    request.cache.bypass = draw.random() < 0.1
    request.cache.salt = draw.choice(["", "", "mine"])
    return request


def posted(draw: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    """A path of the OpenAI API, and a body that has one right answer there."""
    text = PREFIX[: draw.randint(1, len(PREFIX))]
    tool = {"name": "go", "parameters": SCHEMA}
    messages = [{"role": "user", "content": text}]
    chat = {"messages": messages, "n": draw.choice([1, 2]), "max_tokens": draw.randint(1, 99)}
    path, body = draw.choice(
        [
            ("completions", {"prompt": [text, text[:5]], "n": 2, "max_tokens": draw.randint(1, 40)}),
            ("completions", {"prompt": [text, "x"], "echo": True, "logprobs": 1, "max_tokens": draw.randint(0, 40)}),
            ("chat/completions", chat | {"logprobs": True, "top_logprobs": 2}),
            ("chat/completions", chat | {"response_format": {"type": "json_object"}}),
            ("chat/completions", chat | {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}),
            ("responses", {"input": text, "max_output_tokens": draw.randint(1, 99)}),
            ("responses", {"input": text, "tools": [{"type": "function"} | tool], "max_output_tokens": 60}),
        ]
    )
    return f"/v1/{path}", body | {"model": "smollm2", "temperature": draw.choice([0.0, 1.0]), "seed": number}


def same(one: Any, other: Any) -> bool:
    """Whether two answers agree: logprobs as far as the batch leaves them alone, names and times not at all."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one.keys() - VARIES)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (isinstance(one, float) and one == pytest.approx(other, abs=1e-3))


def score(of: pb.TokenLogprob) -> list[Any]:
    """A token's logprob, and those of the likeliest in its place."""
    return [of.token_id, of.logprob, [[top.token_id, top.logprob] for top in of.top]]


async def answer(stub: InferenceServiceStub, request: pb.GenerateRequest, pause: float = 0) -> list[dict[str, Any]]:
    """What a stream says of the prompt and of each index, pieces put together; read with a pause behind each."""
    prompt, kinds = {"scores": []}, []
    said = [{"ids": [], "text": "", "reasoning": "", "calls": "", "scores": [], "ends": []} for _ in range(request.n)]
    tenant = "one" if request.cache.salt else "other"
    call = stub.Generate(request, timeout=120, metadata=[("x-fulcrum-tenant", tenant), ("x-fulcrum-max-priority", "1")])
    async for event in call:
        kinds.append(event.WhichOneof("event"))
        match kinds[-1]:
            case "prompt_logprobs":
                prompt["scores"] += map(score, event.prompt_logprobs.tokens)
            case "delta":
                one = said[event.delta.index]
                one["ids"] += event.delta.token_ids
                one["text"] += event.delta.text
                one["reasoning"] += event.delta.reasoning
                one["calls"] += "".join(piece.name + piece.arguments for piece in event.delta.tool_calls)
                one["scores"] += map(score, event.delta.logprobs)
            case "finished":
                said[event.finished.index]["ends"].append(str(event.finished))
            case "usage":
                prompt["tokens"] = event.usage.prompt_tokens
                assert event.usage.completion_tokens == sum(len(one["ids"]) for one in said)
        await asyncio.sleep(pause)
    assert (kinds[0], kinds[-1], kinds.count("finished")) == ("accepted", "usage", request.n)
    return [prompt, *said]


def texts(answer: dict[str, Any]) -> dict[int, str]:
    """What each choice says in an answer, or in a chunk of one, and why it ends."""
    said = {}
    for choice in answer.get("choices", ()):
        part = choice.get("message") or choice.get("delta") or choice
        calls = [call["function"].get("arguments") or "" for call in part.get("tool_calls") or ()]
        said[choice["index"]] = "".join(
            [part.get("text") or part.get("content") or "", *calls, choice["finish_reason"] or ""]
        )
    return said


class Crowd:
    """Clients that do what clients do, also to each other."""

    def __init__(self, soaked: Any, seed: int) -> None:
        self.draw = random.Random(seed)
        self.http = soaked.http
        self.done: Counter[str] = Counter()

    async def run(self, channel: grpc.aio.Channel, admin: grpc.aio.Channel, client: Callable[[], Any]) -> None:
        """New requests, each alone at first and then in a crowd of such clients."""
        self.stub, self.admin = InferenceServiceStub(channel), AdminServiceStub(admin)
        self.cases = [case(self.draw, number) for number in range(CASES)]
        self.bodies = [posted(self.draw, number) for number in range(CASES)]
        async with httpx.AsyncClient(base_url=self.http, timeout=120) as self.client:
            self.alone = [await answer(self.stub, one) for one in self.cases]
            self.replies = [await self.post(number) for number in range(CASES)]
            self.began = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(CROWD):
                    tasks.create_task(client())

    async def all_back(self) -> pb.Stats:
        """The stats when nothing is under way: every page and row is back, and every request is accounted for.

        What a client has left may reach the engine only now, through the gateway: then it is looked at again.
        """
        async for reply in self.admin.WatchStats(pb.WatchStatsRequest(interval_seconds=0.1), timeout=60):
            stats = reply.stats
            if stats.live_requests:
                continue
            assert (stats.running_sequences, stats.waiting_sequences, stats.used_pages) == (0, 0, 0)
            assert stats.free_pages + stats.cached_pages == stats.total_pages == PAGES
            assert stats.requests_accepted == stats.requests_finished + stats.requests_aborted
            await self.admin.FlushCache(pb.FlushCacheRequest())
            if (await self.admin.GetStats(pb.GetStatsRequest())).stats.free_pages == PAGES:
                return stats
        raise AssertionError("the stream of stats ended")

    async def post(self, number: int) -> dict[str, Any]:
        path, body = self.bodies[number]
        response = await self.client.post(path, json=body)
        response.raise_for_status()
        return response.json()

    async def does_anything(self) -> None:
        acts = (self.compares, self.compares, self.compares, self.reads_slowly, self.posts, self.reads_http)
        acts += (self.leaves_http, self.is_impatient, self.cancels, self.is_wrong, self.is_late, self.is_aborted)
        acts += (self.flushes, self.looks)
        while time.monotonic() < self.began + SECONDS / ROUNDS:
            act = self.draw.choice(acts)
            await act(self.draw.randrange(CASES))
            self.done[act.__name__] += 1

    async def goes_on(self, core: int) -> None:
        """Until all have been served again by another core than this, which is killed on the way."""
        while self.done["again"] < CROWD:
            try:
                await self.draw.choice((self.compares, self.posts))(self.draw.randrange(CASES))
                self.done["again" if self.done["UNAVAILABLE"] else "at first"] += 1
            except grpc.aio.AioRpcError as error:
                self.done[error.code().name] += 1
            except httpx.HTTPStatusError as error:
                self.done[str(error.response.status_code)] += 1
            if self.done["at first"] == CROWD and not self.done["killed"]:
                os.kill(core, signal.SIGKILL)
                self.done["killed"] += 1
            await asyncio.sleep(0.01)

    async def compares(self, number: int) -> None:
        said = await answer(self.stub, self.cases[number])
        assert same(said, self.alone[number]), (self.cases[number], said, self.alone[number])

    async def reads_slowly(self, number: int) -> None:
        said = await answer(self.stub, self.cases[number], pause=self.draw.random() * 0.05)
        assert same(said, self.alone[number]), (self.cases[number], said, self.alone[number])

    async def cancels(self, number: int) -> None:
        call = self.stub.Generate(self.cases[number])
        for _ in range(self.draw.randrange(6)):
            if await call.read() is grpc.aio.EOF:
                break
        call.cancel()

    async def is_late(self, number: int) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in self.stub.Generate(self.cases[number], timeout=self.draw.random() * 0.1):
                pass

    async def is_wrong(self, number: int) -> None:
        wrong = pb.GenerateRequest()
        wrong.CopyFrom(self.cases[number])
        if self.draw.random() < 0.5:
            wrong.stopping.max_tokens = 10_000
        else:
            wrong.regex = "("
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answer(self.stub, wrong)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    async def is_aborted(self, number: int) -> None:
        request = pb.GenerateRequest()
        request.CopyFrom(self.cases[number])
        request.request_id = f"aborted-{self.draw.getrandbits(60)}"
        call = self.stub.Generate(request)
        await call.read()
        await self.admin.Abort(pb.AbortRequest(request_ids=[request.request_id]))
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass

    async def flushes(self, number: int) -> None:
        await self.admin.FlushCache(pb.FlushCacheRequest())
        await asyncio.sleep(0)

    async def looks(self, number: int) -> None:
        tokenized = await self.stub.Tokenize(pb.TokenizeRequest(text=PREFIX))
        assert b"".join(tokenized.token_bytes) == PREFIX.encode()
        assert len((await self.admin.GetCache(pb.GetCacheRequest())).pages) == PAGES
        assert (await self.admin.GetSteps(pb.GetStepsRequest())).steps
        assert (await self.client.get("/health")).status_code == 200

    async def posts(self, number: int) -> None:
        said = await self.post(number)
        assert same(said, self.replies[number]), (self.bodies[number], said, self.replies[number])

    async def leaves_http(self, number: int) -> None:
        path, body = self.bodies[number]
        async with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            async for _ in response.aiter_lines():
                if self.draw.random() < 0.3:
                    return

    async def is_impatient(self, number: int) -> None:
        path, body = self.bodies[number]
        with contextlib.suppress(httpx.TimeoutException):
            await self.client.post(path, json=body, timeout=self.draw.random() * 0.1)

    async def reads_http(self, number: int) -> None:
        (path, body), reply = self.bodies[number], self.replies[number]
        async with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]
        if path == "/v1/responses":
            assert same(json.loads(lines[-1])["response"], reply), (body, lines, reply)
            return
        assert lines.pop() == "[DONE]"
        said: dict[int, str] = {}
        for line in lines:
            for index, text in texts(json.loads(line)).items():
                said[index] = said.get(index, "") + text
        assert said == texts(reply), (body, lines, reply)


@pytest.mark.timeout(SECONDS * 3 + 600)
async def test_soak(soaked: Any) -> None:
    crowd = Crowd(soaked, SEED)
    async with grpc.aio.insecure_channel(soaked.grpc) as channel, grpc.aio.insecure_channel(soaked.admin) as admin:
        for number in range(ROUNDS):
            if number == ROUNDS // 2:
                before = soaked.resident()
            await crowd.run(channel, admin, crowd.does_anything)
        stats = await crowd.all_back()
        assert stats.preemptions > 0, "the pool was large enough: nothing was tried"
        grown = soaked.resident() - before
    told = (
        f"{stats.requests_accepted} requests, {stats.requests_aborted} of them aborted, {stats.preemptions} preemptions"
    )
    told += f", {stats.accepted_tokens} guesses accepted, memory grew from {before:.0f} MB by {grown:.0f} MB"
    logging.getLogger(__name__).info("%s: %s", told, dict(crowd.done))
    assert grown < 40 + 0.02 * SECONDS


async def test_a_killed_core_spoils_no_answer(soaked: Any) -> None:
    """What is under way, or comes meanwhile, is right or refused as unavailable; afterwards all is as it was."""
    (core,) = (pid for pid in soaked.family() if "engine.core_main" in Path(f"/proc/{pid}/cmdline").read_text())
    crowd = Crowd(soaked, SEED)
    async with grpc.aio.insecure_channel(soaked.grpc) as channel, grpc.aio.insecure_channel(soaked.admin) as admin:
        await crowd.run(channel, admin, lambda: crowd.goes_on(core))
        await crowd.all_back()
    assert crowd.done.keys() == {"at first", "killed", "UNAVAILABLE", "503", "again"}
    logging.getLogger(__name__).info("%s", dict(crowd.done))
