"""Tenants take turns where work waits: alone, for prompts, for grammars, and as the service asks for them."""

import asyncio
import hashlib
import threading

import grpc
import msgspec
import pytest

from engine.request import FinishReason
from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1 import inference_pb2_grpc
from service import grammar
from service.grammar import GrammarCompiler
from service.grammar_worker import BEGUN, Constraint, Result
from service.prompts import Prompts
from service.turns import Turns


async def begun(*works):
    """Tasks, each of which has come as far as it can."""
    tasks = [asyncio.ensure_future(work) for work in works]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def test_one_of_each_tenant_after_another():
    turns, order = Turns(2), []

    async def work(tenant, number):
        await turns.take(tenant)
        order.append(f"{tenant}{number}")

    waiting = [("a", 1), ("a", 2), ("a", 3), ("a", 4), ("b", 1), ("a", 5), ("b", 2), ("c", 1)]
    tasks = await begun(*(work(*each) for each in waiting))
    assert order == ["a1", "a2"]
    for _ in range(6):
        turns.leave()
    await asyncio.gather(*tasks)
    assert order[2:] == ["a3", "b1", "c1", "a4", "b2", "a5"]


async def test_who_goes_away_leaves_his_place_to_the_next():
    turns = Turns(1)
    await turns.take("a")
    first, second, third = await begun(*(turns.take("a") for _ in range(3)))
    first.cancel()
    turns.leave()  # to the second, who goes at the same moment
    second.cancel()
    await asyncio.wait_for(third, 10)
    turns.leave()
    await asyncio.wait_for(turns.take("b"), 10)
    assert first.cancelled()
    assert second.cancelled()


async def test_a_prompt_waits_for_one_of_each_other_tenant():
    prompts = Prompts(None, None, 1, None)
    block, order = threading.Event(), []

    def work(name):
        block.wait(20)
        order.append(name)

    tasks = await begun(*(prompts.run(lambda: work("many"), turn="many") for _ in range(9)))
    tasks += await begun(prompts.run(lambda: work("few"), turn="few"))
    tasks[0].cancel()  # its thread goes on, and no other is begun beside it
    await asyncio.sleep(0)
    block.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    prompts.close()
    assert order == ["many", "many", "few"] + ["many"] * 7


async def test_small_prompts_do_not_wait_for_large_ones():
    prompts, block = Prompts(None, None, 1, None), threading.Event()
    large = await begun(*(prompts.run(lambda: block.wait(20), 1 << 20) for _ in range(3)))
    assert await asyncio.wait_for(prompts.run(lambda: "small", 1000), 10) == "small"
    block.set()
    assert await asyncio.gather(*large) == [True] * 3
    prompts.close()


async def test_a_grammar_waits_for_one_of_each_other_tenant_and_for_none_whose_asker_has_gone(monkeypatch):
    compiler = GrammarCompiler(None, 258, [257], seconds=9)
    go, asked = asyncio.Event(), []

    async def answer(control, message, seconds):
        asked.append(msgspec.msgpack.decode(message, type=Constraint).text)
        await go.wait()
        return BEGUN + msgspec.msgpack.encode(Result(grammar=b"x"))

    async def started():
        return None, None

    monkeypatch.setattr(grammar, "_asked", answer)
    monkeypatch.setattr(compiler, "_started", started)
    many = await begun(*(compiler.compile(Constraint("regex", f"m{n}"), turn="many") for n in range(6)))
    few = await begun(compiler.compile(Constraint("regex", "few"), turn="few"))
    for task in many[3:]:
        task.cancel()
    await asyncio.sleep(0)
    again = await begun(compiler.compile(Constraint("regex", "m5"), turn="many"))
    go.set()
    await asyncio.gather(*many[:3], *few, *again)
    assert asked == ["m0", "m1", "m2", "few", "m5"]
    assert (await compiler.compile(Constraint("regex", "m4"))).data == b"x"


async def test_the_service_names_the_tenant(make_core, serving, tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    keys.write_text(f"acme sha256:{hashlib.sha256(b'k').hexdigest()}\n")
    taken = []

    async def take(self, tenant):
        taken.append(tenant)
        raise LookupError

    monkeypatch.setattr(Turns, "take", take)
    metadata = (("authorization", "Bearer k"),)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=[pb.ContentPart(text="x")])])
    core = make_core()
    core.reply = lambda request: [(0, [65], FinishReason.LENGTH)]
    async with serving(core, api_key_file=keys) as server:
        stub = server.stub
        for call in (
            stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=metadata),
            stub.Tokenize(pb.TokenizeRequest(chat=chat), metadata=metadata),
            stub.Detokenize(pb.DetokenizeRequest(token_ids=[65]), metadata=metadata),
            *(
                stub.Generate(request, metadata=metadata).read()
                for request in (
                    pb.GenerateRequest(text="x"),
                    pb.GenerateRequest(chat=chat),
                    pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), regex="x"),
                )
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await call
    # The grammar's turn is asked for in a task of its own, whose end is the caller's.
    assert taken == ["acme"] * 6


async def test_without_keys_each_connection_has_turns_of_its_own(make_core, serving, monkeypatch):
    taken = []

    async def take(self, whose):
        taken.append(whose)
        raise LookupError

    monkeypatch.setattr(Turns, "take", take)
    async with serving(make_core()) as server:
        for calls in (2, 1):
            own = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(server.addresses.address, own) as channel:
                for _ in range(calls):
                    with pytest.raises(grpc.aio.AioRpcError):
                        await inference_pb2_grpc.InferenceServiceStub(channel).Tokenize(pb.TokenizeRequest(text="x"))
    assert taken[0] == taken[1] != taken[2]
