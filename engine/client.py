"""The asyncio side of the core's socket: requests go in, their tokens come out. Used by the service."""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import NoneType
from typing import NamedTuple, Self, TypeVar

import msgspec

from engine import messages
from engine.cache.kv_cache import CacheView
from engine.frames import HEADER_BYTES, frame_length, to_frame
from engine.grammar import MAX_HELD, GrammarError, Vocabulary
from engine.messages import CoreInfo, CoreStats
from engine.request import RejectReason, Request, RequestRejected
from engine.stream import RequestStream
from engine.trace import StepTrace, TraceEvent

_Answer = TypeVar("_Answer")

_RECONNECT_SECONDS = 0.1


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    info: CoreInfo


class CoreDied(Exception):
    """The connection to the core process is lost, and with it every running request."""


class CoreClient:
    """One connection to a core process. Not thread-safe: it belongs to one event loop.

    Attributes:
        info: what the core serves.
        draining: whether the core has stopped taking requests.
    """

    def __init__(self, socket: Path, connection: _Connection) -> None:
        self._socket = socket
        self._call_ids = itertools.count(1)
        self._encode = msgspec.msgpack.Encoder().encode
        self._begin(connection)

    def _begin(self, connection: _Connection) -> None:
        """All that is known of one core process."""
        self._reader, self._writer, self.info = connection
        self.draining = False
        self._streams: dict[str, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        # That the core has said to hold, least recently used first, as it lets them go itself; and those on their way.
        self._grammars: OrderedDict[str, None] = OrderedDict()
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._knows_vocabulary = False
        self._closed = asyncio.Event()
        self._state_changed = asyncio.Event()
        self._ending = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, socket: Path) -> Self:
        """Returns when a core serves the socket."""
        return cls(socket, await _open(socket))

    async def reconnect(self) -> None:
        """Once the connection is lost: returns when a core serves the socket again. It knows nothing of before."""
        self._begin(await _open(self._socket))

    # --- requests

    async def submit(self, request: Request) -> RequestStream:
        """Returns when the core has queued the request. Raises RequestRejected, CoreDied."""
        if request.request_id in self._streams:
            raise RequestRejected(
                RejectReason.DUPLICATE_ID, f"a request with id {request.request_id!r} is live", "request_id"
            )
        stream = self._streams[request.request_id] = RequestStream(request)
        try:
            await self._ask(messages.Submit(next(self._call_ids), request), NoneType, stream.accepted)
        except asyncio.CancelledError:
            self.abort_soon(stream)
            raise
        except (RequestRejected, CoreDied) as error:
            if self._is_live(stream):
                del self._streams[stream.request_id]
            if isinstance(error, RequestRejected) and error.reason is RejectReason.UNKNOWN_GRAMMAR:
                self._grammars.pop(request.grammar, None)
            raise
        return stream

    def end_sequence(self, stream: RequestStream, index: int) -> None:
        """This index is complete (a stop string was found): the core stops computing it, nothing more comes of it.

        Does nothing when the request has ended already: its id may be another's by then.
        """
        stream.end_index(index)
        if not self._is_live(stream):
            return
        if stream.ended:
            del self._streams[stream.request_id]
        self._send(messages.EndSequences([(stream.request_id, index)]))

    def abort_soon(self, stream: RequestStream) -> None:
        """Ends our own request, without an answer. Does nothing when it has ended already."""
        if self._is_live(stream):
            del self._streams[stream.request_id]
            self._send(messages.Abort([stream.request_id]))

    def _is_live(self, stream: RequestStream) -> bool:
        return self._streams.get(stream.request_id) is stream

    async def abort(self, request_ids: list[str]) -> list[str]:
        """Ends live requests, whoever's they are; their streams end with FinishReason.ABORT.

        Returns the ids that were live.
        """
        return await self._ask(messages.Abort(request_ids, next(self._call_ids)), list[str])

    async def load_grammar(self, key: str, data: bytes, vocabulary: Callable[[], Vocabulary]) -> None:
        """Lets the core hold a compiled grammar, unless it is known to. A request names it by its key.

        A core that lacks the room forgets it at some time: `submit` is refused as UNKNOWN_GRAMMAR then; load it again.

        Args:
            vocabulary: asked once, for the first grammar.

        Raises GrammarError, CoreDied.
        """
        if key in self._grammars:
            self._grammars.move_to_end(key)
            return
        if key not in self._loading:
            self._loading[key] = asyncio.create_task(self._load_grammar(key, data, vocabulary))
            self._loading[key].add_done_callback(partial(self._loaded, key))
        await asyncio.shield(self._loading[key])

    def _loaded(self, key: str, task: asyncio.Task[None]) -> None:
        self._loading.pop(key, None)
        if not task.cancelled():
            task.exception()  # is known then, though all who waited for it may have gone

    async def _load_grammar(self, key: str, data: bytes, vocabulary: Callable[[], Vocabulary]) -> None:
        first = None if self._knows_vocabulary else vocabulary()
        self._knows_vocabulary = True
        try:
            await self._ask(messages.LoadGrammar(next(self._call_ids), key, data, first), NoneType)
        except RequestRejected as refused:
            raise GrammarError(str(refused)) from refused
        self._grammars[key] = None
        if len(self._grammars) > MAX_HELD:
            self._grammars.popitem(last=False)

    # --- calls

    async def stats(self) -> CoreStats:
        """Gauges of this moment and counters since the core started."""
        return await self._call("stats", CoreStats)

    async def cache(self) -> CacheView:
        """What is in the pages and in the tree, at most a second ago."""
        return await self._call("cache", CacheView)

    async def flush_cache(self) -> int:
        """Drops the cached pages that nobody uses. Returns how many."""
        return await self._call("flush_cache", int)

    async def drain(self, *, end: bool = False) -> int:
        """The core takes no new requests from now on; with `end` all clients hear that theirs are to end (`ending`).

        Returns how many are live.
        """
        return await self._call("drain", int, "end" if end else "")

    def note(self, request_id: str, kind: str) -> None:
        """For the trace of a request, if one is kept: something happened to it just now."""
        if self.info.traces and not self._closed.is_set():
            self._send(messages.Note(request_id, kind))

    async def trace(self, request_id: str) -> list[TraceEvent]:
        """What happened to a request, in order; empty where nothing is kept of it."""
        return await self._call("trace", list[TraceEvent], request_id)

    async def steps(self, count: int) -> list[StepTrace]:
        """The latest steps that are kept, oldest first."""
        return await self._call("steps", list[StepTrace], str(count))

    async def state_changed(self) -> None:
        """Returns when `draining` has become true or the connection is lost."""
        await self._state_changed.wait()

    async def ending(self) -> bool:
        """Returns when the requests that run are to end, whoever said so, or (False) when the connection is lost."""
        await self._ending.wait()
        return not self._closed.is_set()

    async def closed(self) -> None:
        """Returns when the connection is lost."""
        await self._closed.wait()

    async def close(self) -> None:
        """Ends the connection; the core aborts what we had running."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()

    async def _call(self, method: messages.CallMethod, kind: type[_Answer], argument: str = "") -> _Answer:
        return await self._ask(messages.Call(next(self._call_ids), method, argument), kind)

    async def _ask(
        self,
        message: messages.Submit | messages.Abort | messages.Call | messages.LoadGrammar,
        kind: type[_Answer],
        answer: asyncio.Future[msgspec.Raw] | None = None,
    ) -> _Answer:
        """Sends a message and waits for its answer. Raises RequestRejected where it is refused, CoreDied."""
        answer = answer or asyncio.get_running_loop().create_future()
        self._send(message)
        self._calls[message.call_id] = answer
        try:
            return msgspec.msgpack.decode(await answer, type=kind)
        finally:
            del self._calls[message.call_id]

    # --- connection

    def _send(self, message: messages.ToCore) -> None:
        if self._closed.is_set():
            raise CoreDied("the engine core is gone")
        # Never awaited: the core reads at every step boundary, and what we send is small. While the connection breaks,
        # uvloop's would raise, and nobody hears us: `_read` tells everybody.
        if not self._writer.is_closing():
            self._writer.write(to_frame(self._encode(message)))

    async def _read(self) -> None:
        try:
            while True:
                self._dispatch(await _read_message(self._reader))
        except (asyncio.IncompleteReadError, OSError):
            pass  # told to everybody below
        finally:
            self._fail_all(CoreDied("the engine core is gone"))

    def _dispatch(self, message: messages.FromCore) -> None:
        match message:
            case messages.Outputs():
                self._dispatch_outputs(message)
            case messages.Reply() | messages.Refusal():
                answer = self._calls.get(message.call_id)
                if answer is None or answer.done():  # nobody waits any more
                    return
                if isinstance(message, messages.Reply):
                    answer.set_result(message.answer)
                else:
                    answer.set_exception(RequestRejected(message.reason, message.message, message.field))
            case messages.CoreState():
                self.draining = message.draining
                self._state_changed.set()
                if message.ending:
                    self._ending.set()

    def _dispatch_outputs(self, outputs: messages.Outputs) -> None:
        streams = self._streams
        for start in outputs.started:
            stream = streams.get(start.request_id)
            if stream is not None:
                stream.put_start(start)
        for output in outputs.sequences:
            stream = streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if stream.ended:
                    del streams[output.request_id]

    def _fail_all(self, error: CoreDied) -> None:
        self._closed.set()
        self._state_changed.set()
        self._ending.set()
        self._writer.close()
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)


async def _open(socket: Path) -> _Connection:
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(str(socket), limit=1 << 20)
            first = await _read_message(reader)
        except (asyncio.IncompleteReadError, OSError):  # nobody listens, or no longer
            await asyncio.sleep(_RECONNECT_SECONDS)
            continue
        except msgspec.DecodeError as error:  # other files were installed meanwhile
            raise CoreDied(f"the engine core speaks as another version does: {error}") from error
        if not isinstance(first, CoreInfo):
            raise CoreDied(f"the engine core began with {type(first).__name__}")
        return _Connection(reader, writer, first)


_decode = msgspec.msgpack.Decoder(messages.FromCore).decode


async def _read_message(reader: asyncio.StreamReader) -> messages.FromCore:
    header = await reader.readexactly(HEADER_BYTES)
    return _decode(await reader.readexactly(frame_length(header)))
