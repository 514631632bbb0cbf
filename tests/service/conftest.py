"""A scripted engine core, a byte-level model folder, and real servers in front of them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.cache.kv_cache import CacheView
from engine.cache.radix import NodeView
from engine.client import CoreDied
from engine.grammar import Vocabulary
from engine.messages import CoreInfo, CoreStats, RequestStart, SequenceOutput
from engine.request import FinishReason, RejectReason, Request, RequestRejected
from engine.stream import RequestStream
from engine.trace import StepTrace
from fulcrum.v1 import inference_pb2_grpc
from service.config import ServiceConfig
from service.server import BoundAddresses, serve

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'raise' %}{{ raise_exception('no such turn') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ extra or '' }}"
)
EOS = 257


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose token ids are the bytes 0 to 255 of UTF-8, then <|im_start|> (256) and <|im_end|> (257)."""
    folder = tmp_path_factory.mktemp("byte-model")
    # GPT-2's alphabet: a printable byte stands for itself, the others for U+0100 and on, in their order.
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in shown]
    vocab = {chr(byte) if byte in shown else chr(256 + rest.index(byte)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<|im_start|>", normalized=False), AddedToken("<|im_end|>", normalized=False)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 258, "hidden_size": 8,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": EOS, "bos_token_id": 256,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 7, "eos_token_id": EOS}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})
    )
    return folder


class FakeCore:
    """Takes the place of engine.client.CoreClient: the test says what comes, and when.

    `reply`, when set, answers every request by itself: Callable[[Request], list of what `emit` takes].
    """

    def __init__(self, **info: Any) -> None:
        known = {
            "architecture": "LlamaForCausalLM", "vocab_size": 258, "max_model_len": 4096, "eos_token_ids": [EOS],
            "dtype": "float32", "device": "cpu", "page_size": 16, "num_pages": 512, "max_num_seqs": 64,
            "max_num_batched_tokens": 2048, "version": "0.1.0",
        }  # fmt: skip
        self.info = CoreInfo(**(known | info))
        self.draining = False
        self.requests: list[Request] = []
        self.grammars: list[tuple[str, bytes, Vocabulary]] = []
        self.streams: dict[str, RequestStream] = {}
        self.aborted: list[str] = []
        self.ended: list[tuple[str, int]] = []
        self.refuse_with: RequestRejected | None = None
        self.reply: Callable[[Request], Iterable[tuple[Any, ...]]] | None = None
        self._changed = asyncio.Event()
        self._ending = asyncio.Event()
        self._closed = asyncio.Event()
        self._revived = asyncio.Event()

    # What the service calls.

    async def load_grammar(self, key: str, data: bytes, vocabulary: Callable[[], Vocabulary]) -> None:
        self.grammars.append((key, data, vocabulary()))

    async def submit(self, request: Request) -> RequestStream:
        if self._closed.is_set():
            raise CoreDied("gone")
        if request.request_id in self.streams:
            raise RequestRejected(RejectReason.DUPLICATE_ID, "live", "request_id")
        if self.refuse_with is not None:
            raise self.refuse_with
        stream = RequestStream(request)
        stream.accepted.set_result(None)
        self.requests.append(request)
        self.streams[request.request_id] = stream
        if self.reply is not None:
            self.start(request.request_id)
            for output in self.reply(request):
                self.emit(request.request_id, *output)
        return stream

    def end_sequence(self, stream: RequestStream, index: int) -> None:
        self.ended.append((stream.request_id, index))
        stream.end_index(index)
        if stream.ended and self.streams.get(stream.request_id) is stream:
            del self.streams[stream.request_id]

    def abort_soon(self, stream: RequestStream) -> None:
        if self.streams.get(stream.request_id) is stream:
            del self.streams[stream.request_id]
            self.aborted.append(stream.request_id)

    async def abort(self, request_ids: list[str]) -> list[str]:
        self._check()
        live = [request_id for request_id in request_ids if request_id in self.streams]
        for request_id in live:
            self.emit(request_id, 0, [], FinishReason.ABORT)
        return live

    async def stats(self) -> CoreStats:
        self._check()
        return CoreStats(
            live_requests=len(self.streams), requests_accepted=len(self.requests), steps=41, total_pages=512
        )

    async def cache(self) -> CacheView:
        self._check()
        return CacheView(bytes([0, 1, 2, 2]), [NodeView(0, 2, 0, 7, 1)], 1)

    async def steps(self, count: int) -> list[StepTrace]:
        return [StepTrace(number, *[float(number)] * 7, 512, 8192, 512, 512, "") for number in range(60_000)][-count:]

    def note(self, request_id: str, kind: str) -> None:
        pass

    async def flush_cache(self) -> int:
        self._check()
        return 12

    async def drain(self, *, end: bool = False) -> int:
        self._check()
        self.draining = True
        self._changed.set()
        if end:
            self._ending.set()
        return len(self.streams)

    async def reconnect(self) -> None:
        await self._revived.wait()
        self.__init__()

    async def state_changed(self) -> None:
        await self._changed.wait()

    async def ending(self) -> bool:
        await self._ending.wait()
        return not self._closed.is_set()

    async def closed(self) -> None:
        await self._closed.wait()

    # What the test calls.

    def start(self, request_id: str, cached_tokens: int = 0) -> None:
        self.streams[request_id].put_start(RequestStart(request_id, cached_tokens, time.monotonic()))

    def emit(
        self, request_id: str, index: int, ids: list[int], finish: FinishReason | None = None, *logprobs: bytes
    ) -> None:
        stream = self.streams.get(request_id)
        if stream is not None:
            stream.put(SequenceOutput(request_id, index, ids, finish, *map(bytearray, logprobs)))
            if stream.ended:
                self.streams.pop(request_id, None)

    def revive(self) -> None:
        self._revived.set()

    def die(self) -> None:
        self._closed.set()
        self._changed.set()
        self._ending.set()
        for stream in self.streams.values():
            stream.fail(CoreDied("gone"))
        self.streams.clear()

    async def until(self, met: Callable[[], bool]) -> None:
        """Waits for something that only time can bring; the test's own limit ends it."""
        async with asyncio.timeout(20):
            while not met():
                await asyncio.sleep(0.005)

    def _check(self) -> None:
        if self._closed.is_set():
            raise CoreDied("gone")


@pytest.fixture
def make_core() -> Callable[..., FakeCore]:
    """Makes a scripted core; keyword arguments replace fields of its CoreInfo."""
    return FakeCore


@pytest.fixture
def serving(byte_model: Path, tmp_path: Path) -> Callable[..., Any]:
    """`async with serving(core, **settings) as server`: a real server on free addresses, stopped at the end."""

    @asynccontextmanager
    async def run(core: FakeCore, **settings: Any) -> AsyncIterator[SimpleNamespace]:
        known: dict[str, Any] = {
            "model": byte_model,
            "served_model_names": ("bytes", "bytes-alias"),
            "address": "127.0.0.1:0",
            "admin_address": f"unix:{tmp_path}/admin.sock",
            "grace_seconds": 0.0,
        }
        stop = asyncio.Event()
        bound: asyncio.Future[BoundAddresses] = asyncio.get_running_loop().create_future()
        config = ServiceConfig(**(known | settings))
        task = asyncio.create_task(serve(config, core, ready=bound.set_result, stop=stop))  # type: ignore[arg-type]
        await asyncio.wait((task, bound), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        addresses = bound.result()
        async with grpc.aio.insecure_channel(addresses.address) as channel:
            admin_channel = grpc.aio.insecure_channel([*addresses.admin_addresses, addresses.address][0])
            async with admin_channel:
                yield SimpleNamespace(
                    core=core,
                    config=config,
                    addresses=addresses,
                    channel=channel,
                    admin_channel=admin_channel,
                    stub=inference_pb2_grpc.InferenceServiceStub(channel),
                    admin=inference_pb2_grpc.AdminServiceStub(admin_channel),
                    stop=stop,
                    task=task,
                )
                stop.set()
                async with asyncio.timeout(20):
                    await task

    return run


@pytest.fixture
def details() -> Callable[[grpc.aio.AioRpcError], SimpleNamespace]:
    """Reads the google.rpc details of an error: code, message, reason, metadata, fields and retry_after."""

    def read(error: grpc.aio.AioRpcError) -> SimpleNamespace:
        trailers = dict(error.trailing_metadata() or ())
        status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
        assert (status.code, status.message) == (error.code().value[0], error.details())
        found = SimpleNamespace(code=error.code(), message=status.message, fields=[], retry_after=None)
        for packed in status.details:
            for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
                if not packed.Is(kind.DESCRIPTOR):
                    continue
                detail = kind.FromString(packed.value)
                if kind is error_details_pb2.ErrorInfo:
                    found.reason, found.metadata, found.domain = detail.reason, dict(detail.metadata), detail.domain
                elif kind is error_details_pb2.BadRequest:
                    found.fields = [violation.field for violation in detail.field_violations]
                else:
                    found.retry_after = detail.retry_delay.ToTimedelta().total_seconds()
        return found

    return read
