"""A random crowd on a tiny random model with a tiny KV pool: each answer is the one given alone, and nothing leaks.

Pages run out all the time, so sequences are preempted and cached pages evicted. `make soak` runs it for SOAK_SECONDS
with the seed SOAK_SEED; here it runs for a few seconds.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest

from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1.inference_pb2_grpc import AdminServiceStub, InferenceServiceStub

SEED = int(os.environ.get("SOAK_SEED", "1"))
SECONDS = float(os.environ.get("SOAK_SECONDS", "8"))
CROWD = 24
CASES = 40
PAGES = 64
PREFIX = [ord(letter) for letter in "What all requests begin with, so that pages are shared. "]


@pytest.fixture(scope="module")
def soaked(serve_tiny: Callable[..., Any]) -> Iterator[Any]:
    with serve_tiny(PAGES, "--max-num-seqs", "16", "--speculative", "ngram") as addresses:
        yield addresses


def case(draw: random.Random, number: int) -> pb.GenerateRequest:
    """A request that has one right answer: greedy, or with a seed of its own."""
    prompt = PREFIX[: draw.randint(1, len(PREFIX))] + [draw.randrange(256) for _ in range(draw.randint(0, 40))]
    request = pb.GenerateRequest(model="smollm2", token_ids=pb.TokenIds(ids=prompt), n=draw.choice([1, 1, 1, 2, 3]))
    request.stopping.max_tokens = draw.randint(1, 100)
    request.stopping.ignore_eos = draw.random() < 0.5
    request.output.token_ids = True
    request.sampling.temperature = 0.0
    if draw.random() < 0.5:
        request.sampling.temperature, request.sampling.seed = 1.0, number
        request.sampling.top_p, request.sampling.top_k = draw.choice([1.0, 0.9]), draw.choice([0, 20])
    if draw.random() < 0.3:
        request.sampling.repetition_penalty = 1.2
        request.sampling.frequency_penalty = 0.5
    if draw.random() < 0.3:
        request.stopping.stop.append(chr(draw.randrange(97, 123)))
        request.stopping.min_tokens = draw.choice([0, 1])
    if draw.random() < 0.2:
        request.output.top_logprobs = draw.randint(0, 3)
    constraint = draw.random()
    if constraint < 0.1:
        request.regex = "(yes|no){1,5}"
    elif constraint < 0.2:
        request.choices.choices.extend(["left", "right"])
    request.priority = draw.choice([0, 0, 0, 1])
    request.cache.bypass = draw.random() < 0.1
    return request


async def answer(stub: InferenceServiceStub, request: pb.GenerateRequest) -> list[tuple[Any, ...]]:
    """Of each index the token ids, the text, the logprobs and the reason; pieces put together."""
    ids, text, scores, ends = ([[] for _ in range(request.n)] for _ in range(4))
    async for event in stub.Generate(request, timeout=120):
        match event.WhichOneof("event"):
            case "delta":
                ids[event.delta.index] += event.delta.token_ids
                text[event.delta.index].append(event.delta.text)
                scores[event.delta.index] += [round(one.logprob, 3) for one in event.delta.logprobs]
            case "finished":
                ends[event.finished.index].append(event.finished.reason)
    return [(ids[index], "".join(text[index]), scores[index], ends[index]) for index in range(request.n)]


class Crowd:
    """Clients that do what clients do, also to each other."""

    def __init__(self, soaked: Any, seed: int) -> None:
        self.draw = random.Random(seed)
        self.cases = [case(self.draw, number) for number in range(CASES)]
        self.alone: list[list[tuple[Any, ...]]] = []
        self.http = soaked.http
        self.done: Counter[str] = Counter()

    async def run(self, channel: grpc.aio.Channel, admin: grpc.aio.Channel, seconds: float) -> None:
        self.stub, self.admin = InferenceServiceStub(channel), AdminServiceStub(admin)
        self.alone = [await answer(self.stub, one) for one in self.cases]
        until = time.monotonic() + seconds
        async with httpx.AsyncClient(base_url=self.http, timeout=120) as self.client, asyncio.TaskGroup() as tasks:
            for _ in range(CROWD):
                tasks.create_task(self.client_of(until))

    async def client_of(self, until: float) -> None:
        acts = (self.compares, self.compares, self.compares, self.cancels, self.leaves_http, self.reads_http)
        acts += (self.is_wrong, self.is_late, self.is_aborted, self.flushes)
        while time.monotonic() < until:
            act = self.draw.choice(acts)
            await act(self.draw.randrange(CASES))
            self.done[act.__name__] += 1

    async def compares(self, number: int) -> None:
        assert await answer(self.stub, self.cases[number]) == self.alone[number], self.cases[number]

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
        wrong.stopping.max_tokens = 10_000
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

    def _completion(self, number: int) -> dict[str, Any]:
        asked = self.cases[number]
        body = {"model": "smollm2", "prompt": list(asked.token_ids.ids), "n": asked.n, "stream": True}
        body |= {"max_tokens": asked.stopping.max_tokens, "temperature": 1.0, "seed": number}
        return body

    async def leaves_http(self, number: int) -> None:
        async with self.client.stream("POST", "/v1/completions", json=self._completion(number)) as response:
            async for _ in response.aiter_lines():
                if self.draw.random() < 0.3:
                    return

    async def reads_http(self, number: int) -> None:
        async with self.client.stream("POST", "/v1/completions", json=self._completion(number)) as response:
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        ends = [choice["finish_reason"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
        assert sum(end is not None for end in ends) == self.cases[number].n


@pytest.mark.timeout(SECONDS * 3 + 600)
async def test_soak(soaked: Any) -> None:
    crowd = Crowd(soaked, SEED)
    async with grpc.aio.insecure_channel(soaked.grpc) as channel, grpc.aio.insecure_channel(soaked.admin) as admin:
        await crowd.run(channel, admin, SECONDS / 2)
        before = soaked.resident()
        await crowd.run(channel, admin, SECONDS / 2)
        async for reply in crowd.admin.WatchStats(pb.WatchStatsRequest(interval_seconds=0.1), timeout=60):
            stats = reply.stats
            if stats.live_requests == 0:
                break
        assert (stats.running_sequences, stats.waiting_sequences, stats.used_pages) == (0, 0, 0)
        assert stats.free_pages + stats.cached_pages == stats.total_pages == PAGES
        assert stats.preemptions > 0, "the pool was large enough: nothing was tried"
        assert stats.requests_accepted == stats.requests_finished + stats.requests_aborted
        await crowd.admin.FlushCache(pb.FlushCacheRequest())
        assert (await crowd.admin.GetStats(pb.GetStatsRequest())).stats.free_pages == PAGES
        grown = soaked.resident() - before
    told = f"{crowd.done.total()} acts, {stats.preemptions} preemptions, memory grew by {grown:.0f} MB"
    logging.getLogger(__name__).info("%s: %s", told, dict(crowd.done))
    assert grown < 30 + 0.02 * SECONDS
