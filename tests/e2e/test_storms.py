"""Clients that leave by the thousand, at any moment and in any state: nothing is left of them, and others are served.

The real sizes, 2,000 requests and 10,000 connections to each port, are the long forms.
"""

import asyncio
import contextlib
import logging
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1.inference_pb2_grpc import AdminServiceStub, InferenceServiceStub

SEED = 20
PAGES = 256
AT_ONCE = 200
GROWTH_MB = 30
RESET = struct.pack("ii", 1, 0)  # linger: no more than a RST

logger = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def stormed(serve_tiny: Callable[..., Any]) -> Iterator[Any]:
    with serve_tiny(PAGES, "--max-num-seqs", "32", "--log-level", "error") as addresses:
        yield addresses


async def idle(admin: AdminServiceStub) -> None:
    """Returns when nothing is live and all is back."""
    async with asyncio.timeout(60):
        while True:
            await admin.FlushCache(pb.FlushCacheRequest())
            stats = (await admin.GetStats(pb.GetStatsRequest())).stats
            if stats.live_requests == 0 and stats.free_pages == PAGES:
                break
            await asyncio.sleep(0.05)
    assert (stats.running_sequences, stats.waiting_sequences, stats.used_pages, stats.cached_pages) == (0, 0, 0, 0)
    assert stats.total_pages == PAGES
    assert stats.requests_accepted == stats.requests_finished + stats.requests_aborted


def case(draw: random.Random, number: int) -> pb.GenerateRequest:
    """A request that has one right answer."""
    prompt = pb.TokenIds(ids=[draw.randrange(256) for _ in range(draw.randint(1, 60))])
    request = pb.GenerateRequest(token_ids=prompt, n=draw.choice([1, 1, 2]))
    request.sampling.temperature, request.sampling.seed = 1.0, number
    request.stopping.max_tokens, request.stopping.ignore_eos = draw.randint(20, 80), True
    request.output.token_ids = True
    return request


class Left(Exception):
    """The caller has seen enough."""


class Storm:
    """Nine of ten requests are left at a random moment; one of four comes over HTTP."""

    def __init__(self, stub: InferenceServiceStub, client: httpx.AsyncClient) -> None:
        self.stub, self.client = stub, client
        self.draw = random.Random(SEED)
        self.cases = [case(self.draw, number) for number in range(20)]
        self.alone: list[Any] = []
        self.left_after: Counter[str] = Counter()
        self.completed = 0
        self.slots = asyncio.Semaphore(AT_ONCE)

    async def prepare(self) -> None:
        self.alone = [await self.generate(number) for number in range(len(self.cases))]

    async def blow(self, requests: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(requests):
                chosen, moment = self.draw.randrange(len(self.cases)), self.draw.random()
                tasks.create_task(self.one(number, chosen, moment))

    async def one(self, number: int, chosen: int, moment: float) -> None:
        async with self.slots:
            if number % 10 == 0:
                assert await self.generate(chosen) == self.alone[chosen]
                self.completed += 1
                return
            ask = self.complete if number % 4 == 1 else self.generate
            # After some time, or after so many events.
            seconds, events = (moment, None) if number % 3 == 0 else (None, int(10 * moment))
            seen = ["nothing"]
            with contextlib.suppress(TimeoutError, Left):
                async with asyncio.timeout(seconds):
                    await ask(chosen, events, seen)
            self.left_after[seen[-1]] += 1

    async def generate(self, chosen: int, most: int | None = None, seen: list[str] | None = None) -> list[list[Any]]:
        """The tokens, the text and the end of each index."""
        request = self.cases[chosen]
        answer = [[[], "", None] for _ in range(request.n)]
        seen = [] if seen is None else seen
        call = self.stub.Generate(request, timeout=120)
        try:
            if most == 0:
                raise Left
            async for event in call:
                seen.append(event.WhichOneof("event"))
                match seen[-1]:
                    case "delta":
                        answer[event.delta.index][0] += event.delta.token_ids
                        answer[event.delta.index][1] += event.delta.text
                    case "finished":
                        answer[event.finished.index][2] = event.finished.reason
                if len(seen) - 1 == most:
                    raise Left
        finally:
            call.cancel()
        return answer

    async def complete(self, chosen: int, most: int | None, seen: list[str]) -> None:
        request = self.cases[chosen]
        body = {"prompt": list(request.token_ids.ids), "n": request.n, "stream": True, "ignore_eos": True}
        body |= {"max_tokens": request.stopping.max_tokens, "temperature": 1.0, "seed": chosen}
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                seen.append("line")
                if len(seen) - 1 == most:
                    raise Left


@pytest.mark.parametrize("requests", [400, pytest.param(2000, marks=pytest.mark.full)])
async def test_a_storm_of_cancels_leaves_nothing(stormed: Any, requests: int) -> None:
    async with (
        grpc.aio.insecure_channel(stormed.grpc) as channel,
        grpc.aio.insecure_channel(stormed.admin) as administration,
        httpx.AsyncClient(base_url=stormed.http, timeout=120, limits=httpx.Limits(max_connections=None)) as client,
    ):
        storm, admin = Storm(InferenceServiceStub(channel), client), AdminServiceStub(administration)
        await storm.prepare()
        await storm.blow(requests // 2)
        await idle(admin)
        began, grown = time.monotonic(), list[float]()
        while len(grown) < 3 and (not grown or grown[-1] >= GROWTH_MB):  # a leak grows each time, a pool of memory once
            before = stormed.resident()
            await storm.blow(requests // 2)
            await idle(admin)
            grown.append(stormed.resident() - before)
    told = f"half of {requests} in {time.monotonic() - began:.1f} s, memory grew by {grown} MB"
    logger.info("%s; left after: %s", told, dict(storm.left_after))
    assert storm.completed == requests // 20 * (1 + len(grown))
    assert {"nothing", "accepted", "started", "delta", "line"} <= storm.left_after.keys()
    assert grown[-1] < GROWTH_MB


async def recorded(stormed: Any) -> bytes:
    """What a gRPC client sends for a Generate, up to its first answer."""
    loop, sent = asyncio.get_running_loop(), bytearray()

    async def pass_on(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        while data := await loop.sock_recv(source, 65536):
            kept += data
            await loop.sock_sendall(sink, data)

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as there:
        listener.setblocking(False)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
            stopping = pb.StoppingCriteria(max_tokens=400, ignore_eos=True)
            call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x", stopping=stopping))
            here, _ = await loop.sock_accept(listener)
            there.connect(("127.0.0.1", int(stormed.grpc.rpartition(":")[2])))
            there.setblocking(False)
            with here:
                tasks = [asyncio.create_task(pass_on(here, there, sent))]
                tasks += [asyncio.create_task(pass_on(there, here, bytearray()))]
                assert (await call.read()).WhichOneof("event") == "accepted"
                whole = bytes(sent)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()
    return whole


def post() -> bytes:
    """An HTTP request."""
    body = b'{"prompt": "x", "max_tokens": 400, "ignore_eos": true, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


class Drops:
    """Connections that send some of a request and are gone."""

    def __init__(self, messages: dict[int, bytes]) -> None:
        self.messages = messages  # by port
        self.draw = random.Random(SEED)
        self.slots = asyncio.Semaphore(AT_ONCE)

    async def drop(self, connections: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for port, message in self.messages.items():
                for _ in range(connections):
                    # All of it as often as none of it; else any part.
                    size = min(len(message), max(0, self.draw.randint(-len(message) // 2, 3 * len(message) // 2)))
                    tasks.create_task(self.one(port, message[:size], self.draw.random()))

    async def one(self, port: int, data: bytes, moment: float) -> None:
        async with self.slots:
            loop = asyncio.get_running_loop()
            with socket.socket() as connection:
                connection.setblocking(False)
                await loop.sock_connect(connection, ("127.0.0.1", port))
                await loop.sock_sendall(connection, data)
                await asyncio.sleep(moment / 10)
                if moment < 0.5:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


@pytest.mark.parametrize("connections", [500, pytest.param(10_000, marks=pytest.mark.full)])
async def test_connections_that_are_dropped_leave_nothing(stormed: Any, connections: int) -> None:
    whole = await recorded(stormed)
    drops = Drops({int(stormed.grpc.rpartition(":")[2]): whole, urlsplit(stormed.http).port: post()})
    async with grpc.aio.insecure_channel(stormed.admin) as administration:
        admin = AdminServiceStub(administration)
        before = (await admin.GetStats(pb.GetStatsRequest())).stats.requests_accepted
        files = stormed.open_files()

        async def settled() -> None:
            async with asyncio.timeout(60):
                while stormed.open_files() > files:
                    await asyncio.sleep(0.05)
            await idle(admin)

        await drops.drop(connections // 2)
        await settled()
        memory, began = stormed.resident(), time.monotonic()
        await drops.drop(connections // 2)
        seconds = time.monotonic() - began
        await settled()
        grown = stormed.resident() - memory
        taken = (await admin.GetStats(pb.GetStatsRequest())).stats.requests_accepted - before
    assert taken > connections // 100, "none came whole, to be cancelled"
    logger.info("half of 2 x %d in %.1f s, %d taken, memory grew by %.1f MB", connections, seconds, taken, grown)
    assert grown < GROWTH_MB
    async with httpx.AsyncClient(base_url=stormed.http, timeout=60) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 3


async def test_long_prompts_that_are_refused_are_not_kept(stormed: Any) -> None:
    """An error knows the frames it passed, and they the message: whoever keeps one in a ring keeps the other."""
    text, prompts = "hello " * 700_000, 40
    grown = []
    async with (
        grpc.aio.insecure_channel(stormed.grpc) as channel,
        httpx.AsyncClient(base_url=stormed.http, timeout=60) as client,
    ):
        service = InferenceServiceStub(channel)
        for count in (4, prompts):  # the first make pools of memory
            before = stormed.resident()
            for _ in range(count):
                answer = await client.post("/v1/completions", json={"prompt": text})
                assert answer.status_code == 400
                with pytest.raises(grpc.aio.AioRpcError, match="maximum context length"):
                    await service.Generate(pb.GenerateRequest(text=text)).read()
            grown.append(stormed.resident() - before)
    logger.info("memory grew by %s MB", grown)
    assert grown[-1] < 2 * GROWTH_MB


async def test_memory_is_back_after_a_flood_of_large_messages(stormed: Any) -> None:
    """The allocator keeps what is freed below anything that is used, until it is asked for it."""
    text, at_once = "hello " * 2_600_000, 24  # 15.6 MB
    before = stormed.resident()

    async def refused(number: int) -> None:
        # An option of its own: else they all share a connection.
        async with grpc.aio.insecure_channel(stormed.grpc, options=[("number", number)]) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="maximum context length"):
                await InferenceServiceStub(channel).Generate(pb.GenerateRequest(text=text)).read()

    async with httpx.AsyncClient(base_url=stormed.http, timeout=120) as client:
        answers = [client.post("/v1/completions", json={"prompt": text}) for _ in range(at_once)]
        assert {answer.status_code for answer in await asyncio.gather(*answers)} == {400}
    await asyncio.gather(*map(refused, range(at_once)))
    logger.info("memory grew by %.0f MB", stormed.resident() - before)
    async with asyncio.timeout(60):
        while stormed.resident() - before > 2 * GROWTH_MB:
            await asyncio.sleep(0.1)
