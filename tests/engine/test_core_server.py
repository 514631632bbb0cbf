"""The core's loop and its asyncio client over a real Unix socket, with the real scheduler and a runner that counts.

The runner's next token is the sum of the row's tokens modulo 97, so what must come out is known by hand.
"""

import asyncio
import errno
import gc
import itertools
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
import xgrammar

from engine.client import CoreClient, CoreDied
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.core_server import CoreServer
from engine.frames import MAX_FRAME_BYTES, FrameError, frame_length, take_frames, to_frame
from engine.grammar import GrammarError, Vocabulary, tokenizer_info
from engine.messages import CoreInfo, LoadGrammar, RequestStart, SequenceOutput
from engine.request import FinishReason, RejectReason, Request, RequestRejected, SamplingParams
from engine.scheduler import Scheduler
from engine.step import DeviceLost, Step, StepResult
from engine.stream import RequestStream

VOCAB = 97
EOS = 96
LONG = 4000


def next_token(tokens: list[int]) -> int:
    """What the fake model says."""
    return sum(tokens) % (VOCAB - 1)


def continuation(prompt: tuple[int, ...], count: int) -> list[int]:
    """The first tokens that the fake model generates."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class SumRunner:
    """Sums. `gate` holds it at the beginning of a step; `failure` is raised once by the next launch.

    `pause` is what a step takes, seconds: with a hundredth, LONG tokens take 40 s, and their request still runs when
    the client's next word comes, however busy the machine is.
    """

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.steps = 0
        self.pause = 0.0
        self.failure: Exception | None = None

    def launch(self, step: Step) -> Step:
        self.gate.wait()
        self.steps += 1
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        for init in step.inits:
            self.rows[init.row] = list(init.tokens)
        return step

    def collect(self, launched: Step) -> StepResult:
        time.sleep(self.pause)  # as for a device: the client's thread has the interpreter meanwhile
        tokens = []
        for sample in launched.samples:
            tokens.append(next_token(self.rows[sample.row]))
            self.rows[sample.row].append(tokens[-1])
        return StepResult(tuple(tokens))


class Served:
    """A core server on a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.runner = SumRunner()
        info = CoreInfo(
            vocab_size=VOCAB,
            max_model_len=8192,
            eos_token_ids=[EOS],
            page_size=16,
            num_pages=1024,
            max_num_seqs=64,
            max_num_batched_tokens=256,
            architecture="Sum",
        )
        self.path = folder / "core.sock"
        self.core = EngineCore(Scheduler(EngineConfig(Path(), trace_requests=4), info), self.runner)
        self.server = CoreServer(self.core, info, self.path)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()

    def stop(self) -> None:
        self.runner.gate.set()
        if self.thread.is_alive():
            self.server.stop()
            self.thread.join()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.stop()
    served.core.scheduler.check_integrity()


@asynccontextmanager
async def connected(served: Served) -> AsyncIterator[CoreClient]:
    client = await CoreClient.connect(served.path)
    try:
        yield client
    finally:
        await client.close()


async def read(stream: RequestStream) -> tuple[list[int], FinishReason | None, int]:
    """(tokens, finish, cached tokens) of a stream with one index."""
    tokens: list[int] = []
    finish, cached = None, -1
    async for event in stream:
        if isinstance(event, RequestStart):
            cached = event.cached_tokens
            continue
        for output in event:
            tokens += output.token_ids
            finish = output.finish
    return tokens, finish, cached


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that another thread brings about."""
    while not condition():
        await asyncio.sleep(0.001)


def request(name: str, prompt: tuple[int, ...] = (1, 2, 3), **params: object) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0.0, **params))


async def test_a_request_gets_its_tokens(served: Served) -> None:
    async with connected(served) as client:
        assert client.info.architecture == "Sum"
        stream = await client.submit(request("a", max_tokens=20))
        assert await read(stream) == (continuation((1, 2, 3), 20), FinishReason.LENGTH, 0)


async def test_many_requests_share_steps_and_each_gets_its_own(served: Served) -> None:
    served.runner.gate.clear()
    prompts = [(n, n + 1, 7) for n in range(50)]
    async with connected(served) as client:
        submitting = [client.submit(request(f"r{n}", prompt, max_tokens=30)) for n, prompt in enumerate(prompts)]
        first = asyncio.gather(*submitting)
        served.runner.gate.set()
        results = await asyncio.gather(*(read(stream) for stream in await first))
        assert [tokens for tokens, _, _ in results] == [continuation(prompt, 30) for prompt in prompts]
        stats = await client.stats()
        assert stats.max_step_rows > 30
        assert stats.generated_tokens == 50 * 30
        assert stats.requests_finished == 50
        assert (stats.live_requests, stats.used_pages) == (0, 0)


async def test_two_clients_do_not_see_each_other(served: Served) -> None:
    async with connected(served) as one, connected(served) as other:
        streams = await asyncio.gather(
            one.submit(request("a", (5, 5), max_tokens=9)), other.submit(request("b", (6, 6), max_tokens=9))
        )
        results = [await read(stream) for stream in streams]
        assert [tokens for tokens, _, _ in results] == [continuation((5, 5), 9), continuation((6, 6), 9)]


async def test_a_live_id_is_refused_by_whoever_sends_it_and_the_first_is_unharmed(served: Served) -> None:
    async with connected(served) as one, connected(served) as other:
        served.runner.pause = 0.01
        first = await one.submit(request("a", max_tokens=LONG))
        for client in (one, other):
            with pytest.raises(RequestRejected) as refusal:
                await client.submit(request("a"))
            assert refusal.value.reason is RejectReason.DUPLICATE_ID
        served.runner.pause = 0.0
        tokens, finish, _ = await read(first)
        assert (len(tokens), finish) == (LONG, FinishReason.LENGTH)


async def test_a_cancelled_duplicate_leaves_the_other_clients_request_alone(served: Served) -> None:
    async with connected(served) as one, connected(served) as other:
        served.runner.pause = 0.01
        first = await one.submit(request("a", max_tokens=LONG))
        submitting = asyncio.create_task(other.submit(request("a")))
        await asyncio.sleep(0)
        submitting.cancel()  # before the core has refused it
        with pytest.raises(asyncio.CancelledError):
            await submitting
        await other.stats()  # the core has read what the other client sent
        served.runner.pause = 0.0
        tokens, finish, _ = await read(first)
        assert (len(tokens), finish) == (LONG, FinishReason.LENGTH)


async def test_refusals_name_the_field(served: Served) -> None:
    async with connected(served) as client:
        with pytest.raises(RequestRejected) as refusal:
            await client.submit(request("a", (1, VOCAB)))
        assert refusal.value.reason is RejectReason.INVALID
        assert refusal.value.field
        assert (await client.stats()).requests_rejected == 1


async def test_abort_ends_a_running_request_and_returns_its_pages(served: Served) -> None:
    async with connected(served) as client, connected(served) as admin:
        served.runner.pause = 0.01
        stream = await client.submit(request("a", max_tokens=LONG))
        assert await admin.abort(["b", "a"]) == ["a"]
        tokens, finish, _ = await read(stream)
        assert finish is FinishReason.ABORT
        assert tokens == continuation((1, 2, 3), len(tokens))
        assert await admin.abort(["a"]) == []
        stats = await admin.stats()
        assert (stats.requests_aborted, stats.live_requests, stats.used_pages) == (1, 0, 0)


async def test_an_id_may_be_used_again_right_after_an_abort(served: Served) -> None:
    """vllm#23697: the old request's output must not reach the new one."""
    async with connected(served) as client:
        for attempt in range(20):
            old = await client.submit(request("a", (50, attempt), max_tokens=LONG))
            assert isinstance(await anext(old), RequestStart)
            client.abort_soon(old)
            new = await client.submit(request("a", (7, attempt), max_tokens=5))
            assert (await read(new))[:2] == (continuation((7, attempt), 5), FinishReason.LENGTH)


async def test_a_request_that_waits_to_be_accepted_can_be_cancelled(served: Served) -> None:
    served.runner.gate.clear()
    async with connected(served) as client:
        blocker = await client.submit(request("blocker", max_tokens=LONG))
        submitting = asyncio.create_task(client.submit(request("a", max_tokens=LONG)))
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        client.abort_soon(blocker)
        served.runner.gate.set()
        stats = await client.stats()
        assert (stats.live_requests, stats.used_pages) == (0, 0)


async def test_a_lost_client_has_its_requests_aborted_and_the_others_go_on(served: Served) -> None:
    async with connected(served) as other:
        served.runner.pause = 0.01
        survivor = await other.submit(request("b", (9,), max_tokens=LONG))
        async with connected(served) as client:
            for number in range(5):
                await client.submit(request(f"a{number}", max_tokens=LONG))
        while (await other.stats()).live_requests > 1:
            pass
        served.runner.pause = 0.0
        assert (await read(survivor))[0] == continuation((9,), LONG)
        stats = await other.stats()
        assert (stats.requests_aborted, stats.live_requests, stats.used_pages) == (5, 0, 0)


async def test_a_slow_reader_gets_everything_merged_in_pieces(served: Served) -> None:
    async with connected(served) as client:
        stream = await client.submit(request("a", max_tokens=300))
        await until(lambda: not served.core.has_work)
        await client.stats()
        events = [event async for event in stream]
        assert [len(outputs[0].token_ids) for outputs in events[1:]] == [256, 44]
        assert [token for outputs in events[1:] for token in outputs[0].token_ids] == continuation((1, 2, 3), 300)


async def test_end_sequence_ends_one_index_only(served: Served) -> None:
    async with connected(served) as client:
        served.runner.pause = 0.01
        stream = await client.submit(request("a", max_tokens=LONG, n=3))
        client.end_sequence(stream, 1)
        await client.stats()  # the core has read it
        served.runner.pause = 0.0
        tokens: dict[int, list[int]] = {}
        async for event in stream:
            if isinstance(event, list):
                for output in event:
                    tokens.setdefault(output.index, []).extend(output.token_ids)
        expected = continuation((1, 2, 3), LONG)
        assert tokens == {0: expected, 2: expected}
        assert (await client.stats()).used_pages == 0


async def test_an_abort_reaches_the_reader_on_an_index_that_still_runs(served: Served) -> None:
    async with connected(served) as client:
        served.runner.pause = 0.01
        stream = await client.submit(request("a", max_tokens=LONG, n=3))
        client.end_sequence(stream, 0)
        assert await client.abort(["a"]) == ["a"]
        ends = {output.index: output.finish async for event in stream if isinstance(event, list) for output in event}
        assert ends.pop(1) is FinishReason.ABORT
        assert set(ends.values()) <= {None}


async def test_what_is_said_of_an_ended_stream_does_not_touch_the_next_of_its_id(served: Served) -> None:
    async with connected(served) as client:
        old = await client.submit(request("a", max_tokens=2))
        await read(old)
        new = await client.submit(request("a", max_tokens=300))
        client.end_sequence(old, 0)
        client.abort_soon(old)
        assert (await read(new))[:2] == (continuation((1, 2, 3), 300), FinishReason.LENGTH)


@pytest.mark.parametrize("first_prompt", [(1, 2), (VOCAB,)], ids=["accepted", "rejected"])
async def test_an_id_may_be_used_again_while_the_answer_to_a_cancelled_submit_is_under_way(
    served: Served, first_prompt: tuple[int, ...]
) -> None:
    async with connected(served) as client:
        served.runner.gate.clear()
        await client.submit(request("blocker", max_tokens=2))
        submitting = asyncio.create_task(client.submit(request("a", first_prompt, max_tokens=LONG)))
        await asyncio.sleep(0)
        submitting.cancel()
        await asyncio.gather(submitting, return_exceptions=True)
        submitting = asyncio.create_task(client.submit(request("a", (7,), max_tokens=5)))
        await asyncio.sleep(0)
        served.runner.gate.set()
        assert (await read(await submitting))[:2] == (continuation((7,), 5), FinishReason.LENGTH)
        stats = await client.stats()
        assert (stats.live_requests, stats.used_pages) == (0, 0)


@pytest.mark.parametrize("failure", [RuntimeError("CUDA error"), OSError("no space left"), IndexError("too far")])
async def test_a_step_that_raises_ends_its_own_requests_only(served: Served, failure: Exception) -> None:
    async with connected(served) as client:
        served.runner.failure = failure
        failed = await client.submit(request("a", (8,) * 40, max_tokens=10))
        assert (await read(failed))[:2] == ([], FinishReason.ERROR)
        again = await client.submit(request("b", (8,) * 40, max_tokens=10))
        # What the failed step wrote is not served from the cache.
        assert await read(again) == (continuation((8,) * 40, 10), FinishReason.LENGTH, 0)


def test_a_lost_device_ends_the_core(served: Served) -> None:
    """No later request could be computed: whoever watches the process starts another."""
    core = EngineCore(served.core.scheduler, SumRunner())
    core.scheduler.add(request("a", (8,) * 40, max_tokens=10))
    core._runner.failure = DeviceLost("an illegal memory access was encountered")
    with pytest.raises(DeviceLost, match="illegal memory access"):
        core.turn()
    core.scheduler.abort("a")
    for step in list(core.scheduler._in_flight.values()):
        core.scheduler.fail(step, "lost")


async def test_a_draining_core_refuses_and_finishes(served: Served) -> None:
    async with connected(served) as client, connected(served) as other:
        served.runner.pause = 0.01
        running = await client.submit(request("a", max_tokens=LONG))
        assert await client.drain() == 1
        await other.state_changed()
        assert other.draining
        with pytest.raises(RequestRejected) as refusal:
            await other.submit(request("b"))
        assert refusal.value.reason is RejectReason.DRAINING
        served.runner.pause = 0.0
        assert len((await read(running))[0]) == LONG
        async with connected(served) as late:
            await late.state_changed()
            assert late.draining


async def test_the_end_of_a_drain_is_told_to_all(served: Served) -> None:
    async with connected(served) as client, connected(served) as other:
        served.runner.pause = 0.01
        running = await other.submit(request("a", max_tokens=LONG))
        await client.drain()
        assert await client.drain(end=True) == 1
        assert await other.ending()
        other.abort_soon(running)
        while await client.drain():
            pass


async def test_flush_cache_tells_what_it_freed(served: Served) -> None:
    async with connected(served) as client:
        await read(await client.submit(request("a", (4,) * 64, max_tokens=1)))
        assert (await client.stats()).cached_pages == 4
        assert await client.flush_cache() == 4
        assert (await client.stats()).free_pages == 1024


async def test_everybody_is_told_when_the_core_goes(served: Served) -> None:
    client = await CoreClient.connect(served.path)
    served.runner.pause = 0.01
    stream = await client.submit(request("a", max_tokens=LONG))
    served.runner.gate.clear()
    asking = asyncio.create_task(client.stats())
    await asyncio.sleep(0)
    served.stop()
    await client.closed()
    with pytest.raises(CoreDied):
        await read(stream)
    assert isinstance((await asyncio.gather(asking, return_exceptions=True))[0], CoreDied | msgspec.Struct)
    with pytest.raises(CoreDied):
        await client.submit(request("b"))
    with pytest.raises(CoreDied):
        await client.stats()
    client.abort_soon(stream)
    await client.close()


def test_who_asks_while_the_connection_breaks_is_told_that_the_core_is_gone(served: Served) -> None:
    async def ask() -> None:
        client = await CoreClient.connect(served.path)
        client._writer.transport.abort()  # as after a broken pipe
        await asyncio.sleep(0)  # it is closed, and the client has not been told
        with pytest.raises(CoreDied):
            await client.submit(request("a"))
        await client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in a service process
        runner.run(ask())


@pytest.mark.parametrize(
    "nonsense", [to_frame(b"\xc1"), to_frame(b"\x91\xa3abc"), b"\xff\xff\xff\xff", to_frame(b"")], ids=repr
)
async def test_a_client_that_talks_nonsense_is_dropped_and_nobody_else(served: Served, nonsense: bytes) -> None:
    async with connected(served) as client:
        reader, writer = await asyncio.open_unix_connection(str(served.path))
        writer.write(nonsense)
        await reader.read()  # until the core hangs up
        writer.close()
        assert (await read(await client.submit(request("a", max_tokens=3))))[0] == continuation((1, 2, 3), 3)


async def test_without_a_free_file_it_tries_now_and_then_to_accept_and_goes_on_meanwhile(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[float] = []

    def no_file(listener: socket.socket) -> tuple[socket.socket, Any]:
        tried.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("engine.core_server._ACCEPT_AGAIN_SECONDS", 0.1)
    async with connected(served) as client:
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", no_file)
            later = asyncio.create_task(CoreClient.connect(served.path))
            await until(lambda: len(tried) == 2)
            assert (await read(await client.submit(request("a", max_tokens=300))))[0] == continuation((1, 2, 3), 300)
            await until(lambda: len(tried) >= 4)
        await (await later).close()
    assert all(again - before >= 0.1 for before, again in itertools.pairwise(tried))
    assert [record.getMessage() for record in caplog.records if "accepted" in record.msg] == [
        "a client could not be accepted, and is tried again each second: [Errno 24] Too many open files"
    ]


def test_it_may_be_told_to_stop_when_it_has_stopped(served: Served) -> None:
    served.stop()
    served.server.stop()


def test_frames_survive_any_fragmentation() -> None:
    payloads = [b"", b"a", b"b" * 300]
    wire = b"".join(map(to_frame, payloads))
    assert wire[:9] == b"\0\0\0\0" + b"\1\0\0\0a"  # little-endian length, then the bytes
    for cut in range(len(wire)):
        buffer = bytearray(wire[:cut])
        found = list(take_frames(buffer))
        buffer += wire[cut:]
        assert found + list(take_frames(buffer)) == payloads
        assert not buffer


def test_an_oversize_frame_is_refused_before_it_is_read() -> None:
    with pytest.raises(FrameError, match="limit"):
        frame_length((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


async def test_merging_keeps_the_end() -> None:
    stream = RequestStream(request("a"))
    stream.accepted.set_result(None)
    stream.put(SequenceOutput("a", 0, [1]))
    stream.put(SequenceOutput("a", 0, [2], FinishReason.EOS))
    stream.put(SequenceOutput("a", 0, [3]))  # after the end: not ours
    assert [event async for event in stream] == [[SequenceOutput("a", 0, [1, 2], FinishReason.EOS)]]


async def test_what_a_slow_reader_has_left_comes_in_pieces_each_with_its_logprobs() -> None:
    """Of two indexes, one of which has ended, and an abort in the end."""
    stream = RequestStream(Request("a", (1,), SamplingParams(n=2)))
    stream.accepted.set_result(None)
    tokens = {0: list(range(600)), 1: list(range(1000, 1300))}
    stream.put(SequenceOutput("a", 0, [], prompt_logprobs=bytearray(b"prompt")))
    for index, ids in tokens.items():
        for token in ids:
            stream.put(SequenceOutput("a", index, [token], None, bytearray(token.to_bytes(4, "little"))))
    stream.put(SequenceOutput("a", 1, [7], FinishReason.EOS, bytearray(b"seven")[:4]))
    heard: dict[int, list[SequenceOutput]] = {0: [], 1: []}
    while not heard[0] or heard[0][-1].finish is None:
        if len(heard[0]) == 2:
            stream.put(SequenceOutput("a", 0, [], FinishReason.ABORT))
        for output in await anext(stream):
            assert len(output.token_ids) <= 256
            heard[output.index].append(output)
    assert stream.ended
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert [token for output in heard[0] for token in output.token_ids] == tokens[0]
    assert [token for output in heard[1] for token in output.token_ids] == [*tokens[1], 7]
    assert b"".join(output.prompt_logprobs for output in heard[0]) == heard[0][0].prompt_logprobs == b"prompt"
    for outputs in heard.values():
        for output in outputs:
            ids = [output.logprobs[at : at + 4] for at in range(0, len(output.logprobs), 4)]
            assert [int.from_bytes(one, "little") for one in ids[:-1]] == output.token_ids[:-1]
            assert len(ids) == len(output.token_ids)
    assert [output.finish for output in heard[1]] == [None, FinishReason.EOS]
    assert heard[0][-1].finish is FinishReason.ABORT


async def test_the_grammars_that_a_client_knows_of_are_bounded_and_each_is_sent_once(
    served: Served, monkeypatch
) -> None:
    """The least recently used is forgotten, and the one that the core says it lacks; nobody waits for another's."""
    monkeypatch.setattr("engine.client.MAX_HELD", 2)
    vocabulary = Vocabulary((*(bytes([token]) for token in range(VOCAB - 1)), b""), (EOS,))
    data = xgrammar.GrammarCompiler(tokenizer_info(vocabulary), max_threads=1).compile_regex("a").serialize_json()
    sent: list[str] = []

    async with connected(served) as client:
        send = client._send

        def noted(message: object) -> None:
            if isinstance(message, LoadGrammar):
                sent.append(message.key)
            send(message)

        monkeypatch.setattr(client, "_send", noted)

        async def load(*keys: str) -> list[str]:
            sent.clear()
            await asyncio.gather(*(client.load_grammar(key, data.encode(), lambda: vocabulary) for key in keys))
            return list(sent)

        assert await load("a", "a", "b", "a") == ["a", "b"]
        assert await load("a") == []
        assert await load("c") == ["c"]  # b was used before a
        assert await load("a", "c") == []
        assert await load("b") == ["b"]
        assert await load("a") == ["a"]
        with served.core.scheduler.grammars._lock:
            del served.core.scheduler.grammars._held["a"]
        with pytest.raises(RequestRejected, match="does not hold"):
            await client.submit(Request("x", (1,), SamplingParams(), grammar="a"))
        assert await load("b", "a") == ["a"]


async def test_a_grammar_is_loaded_once_for_all_clients_and_limits_the_requests_that_name_it(served: Served) -> None:
    # Token 33 is the byte "!", and so on; the sums of the fake model are no good there: 6 is not among them.
    vocabulary = Vocabulary((*(bytes([token]) for token in range(VOCAB - 1)), b""), (EOS,))
    compiler = xgrammar.GrammarCompiler(tokenizer_info(vocabulary), max_threads=1)
    data = compiler.compile_regex("[!-?]+").serialize_json().encode()
    asked: list[Vocabulary] = []

    def told() -> Vocabulary:
        asked.append(vocabulary)
        return vocabulary

    constrained = Request("c", (1, 2, 3), SamplingParams(max_tokens=5, seed=0), grammar="exclaim")
    async with connected(served) as one, connected(served) as two:
        with pytest.raises(RequestRejected) as caught:
            await one.submit(constrained)
        assert caught.value.reason is RejectReason.UNKNOWN_GRAMMAR
        with pytest.raises(GrammarError, match="cannot be read"):
            await one.load_grammar("exclaim", b"{}", told)
        free = await two.submit(request("free", max_tokens=20))
        await one.load_grammar("exclaim", data, told)
        await one.load_grammar("exclaim", data, told)
        await two.load_grammar("exclaim", b"not read: it is held already", told)
        assert len(asked) == 2  # once a connection
        assert "exclaim" in served.core.scheduler.grammars
        # The runner heeds no mask: the first token, 1 + 2 + 3, is refused by the matcher.
        tokens, finish, _ = await read(await two.submit(constrained))
        assert (tokens, finish) == ([], FinishReason.ERROR)
        assert (await read(free))[0] == continuation((1, 2, 3), 20)
        other = Vocabulary(vocabulary.tokens[:-1], (EOS - 1,))
        async with connected(served) as three:
            with pytest.raises(GrammarError, match="another vocabulary"):
                await three.load_grammar("more", data, lambda: other)


async def test_a_grammar_that_nobody_waits_for_any_more_fails_in_silence(served: Served) -> None:
    """The callers have gone, then the core: it is no fault to be told with a traceback."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    async with connected(served) as client:
        served.runner.pause = 0.01
        await client.submit(request("blocker", max_tokens=LONG))
        served.runner.gate.clear()
        asking = asyncio.create_task(client.load_grammar("a", b"", lambda: Vocabulary((), (EOS,))))
        await until(lambda: bool(client._calls))
        asking.cancel()
        await asyncio.wait([asking])
        loading = client._loading["a"]
        await client.close()
        await asyncio.wait([loading])
        del loading
        gc.collect()
    assert told == []


async def test_a_core_of_another_version_is_told_from_none(tmp_path: Path) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(to_frame(msgspec.msgpack.encode(["a message that nobody knows", 1])))

    async with await asyncio.start_unix_server(speak, tmp_path / "core.sock"), asyncio.timeout(10):
        with pytest.raises(CoreDied, match="another version"):
            await CoreClient.connect(tmp_path / "core.sock")


async def test_steps_are_counted_by_their_size(served: Served) -> None:
    """A prompt of three tokens in one step, then three steps of one token each."""
    async with connected(served) as client:
        await read(await client.submit(request("a", max_tokens=4)))
        stats = await client.stats()
        assert [[step.step_id for step in await client.steps(last)] for last in (0, 2, 9)] == [[], [2, 3], [0, 1, 2, 3]]
    assert (stats.steps, stats.scheduled_rows, stats.scheduled_tokens) == (4, 4, 6)
    assert (stats.step_rows[:3], sum(stats.step_rows)) == ([4, 0, 0], 4)
    assert (stats.step_tokens[:4], sum(stats.step_tokens)) == ([3, 0, 1, 0], 4)  # at most 1, 2, 4 and 8
    assert stats.launch_seconds > 0
    assert stats.collect_seconds > 0
    assert stats.launch_seconds + stats.collect_seconds <= stats.execute_seconds


async def test_the_view_of_the_cache_agrees_with_the_stats(served: Served) -> None:
    """Two of three requests find the first one's prefix; how the pages divide is what the stats count."""
    async with connected(served) as client:
        assert await client.cache() == (b"\0" * served.core.stats().total_pages, [], 0)
        prompt = tuple(range(3 * 16 + 1))
        for name in "abc":
            await read(await client.submit(request(name, prompt=prompt, max_tokens=1)))
        served.server._view_due = 0.0  # or it were the first view still
        view, stats = await client.cache(), await client.stats()
        assert [view.pages.count(kind) for kind in range(3)] == [stats.free_pages, stats.used_pages, stats.cached_pages]
        assert (view.nodes, view.total_nodes) == ([(0, 3, 0, 2, 1)], 1)
        served.server._view_due = float("inf")
        await client.flush_cache()
        assert await client.cache() == view, "a second has not passed"
