"""The core's loop behind a Unix socket: messages in at step boundaries, one batched message a turn and client out.

One thread does everything: between two steps it reads what has arrived, and it blocks only when there is nothing to
compute. Only compiled grammars are read back in a second thread, since that may take longer than a step. A client that
goes away has its requests aborted; the kernel tells at once, however it died.
"""

import contextlib
import logging
import queue
import selectors
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from engine import messages
from engine.cache.kv_cache import CacheView
from engine.core import EngineCore, Turn
from engine.frames import FrameError, take_frames, to_frame
from engine.grammar import GrammarError, Vocabulary
from engine.messages import CoreInfo
from engine.request import FinishReason, RejectReason, RequestRejected
from engine.sequence import SequenceUpdate
from engine.throughput import ThroughputLog
from engine.watchdog import Watchdog

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
# A client that lets this much pile up has stopped reading.
_MAX_UNSENT_BYTES = 64 << 20
_SELECT_SECONDS = 0.001
_VIEW_SECONDS = 1.0
# Whom it cannot accept, for want of open files above all, the selector would name without end.
_ACCEPT_AGAIN_SECONDS = 1.0


class _Connection:
    """One client: its socket, its half-read frames, and what waits to be sent."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.request_ids: set[str] = set()
        self.turn = Turn([], [])
        self.vocabulary: Vocabulary | None = None


class CoreServer:
    """Serves an EngineCore to any number of clients.

    Args:
        core: the engine core, used by this object alone.
        info: what clients are told first.
        path: where the Unix socket is made (0600).
        watchdog: watches each turn of the core.
        lifeline: a pipe whose end of file means that the parent has gone, and so must we.
    """

    def __init__(
        self,
        core: EngineCore,
        info: CoreInfo,
        path: Path,
        lifeline: BinaryIO | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._core = core
        self._info = info
        self._stopping = False
        self._watchdog = watchdog or contextlib.nullcontext()
        self._owners: dict[str, _Connection] = {}
        self._connections: dict[socket.socket, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(messages.ToCore).decode
        self._log = ThroughputLog(core)
        self._view, self._view_due = CacheView(b"", [], 0), 0.0

        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._accept_due: float | None = None  # when the listener is listened to again, while it is not
        self._accepts = True  # as far as the last one told
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._woken)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._loaded: queue.SimpleQueue[tuple[_Connection, int, str]] = queue.SimpleQueue()
        if lifeline is not None:
            self._selector.register(lifeline, selectors.EVENT_READ, self.stop)

    def stop(self) -> None:
        """Ends `run` at the next step boundary. Safe in a signal handler."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # closed: `run` has ended meanwhile
            self._wake_in.send(b"\0")

    def _woken(self) -> None:
        self._wake_out.recv(64)
        while not self._loaded.empty():
            connection, call_id, error = self._loaded.get()
            if error:
                self._post(connection, messages.Refusal(call_id, RejectReason.INVALID, error, "constraint"))
            else:
                self._answer(connection, call_id, None)

    def run(self) -> None:
        """Serves until `stop` is called or the lifeline ends."""
        try:
            while not self._stopping:
                self._poll(None if not self._core.has_work else 0)
                began = time.monotonic()
                while (hold := self._core.hold()) and not self._stopping:
                    # The selector rounds up to whole milliseconds.
                    self._poll(max(0.0, hold - _SELECT_SECONDS))
                if self._core.has_work:
                    with self._watchdog:
                        self._route(self._core.turn())
                    self._flush()
                    self._log.tick(time.monotonic() - began)
        finally:
            self._loader.shutdown(wait=False, cancel_futures=True)
            for connection in list(self._connections.values()):
                self._drop(connection, "the core stops")
            self._selector.close()
            for sock in (self._listener, self._wake_out, self._wake_in):
                sock.close()

    # --- sockets

    def _poll(self, seconds: float | None) -> None:
        """Takes in what has come, or comes within the time (None: for ever), and sends what that brings."""
        if self._accept_due is not None:
            left = self._accept_due - time.monotonic()
            if left > 0:
                seconds = left if seconds is None else min(seconds, left)
            else:
                self._accept_due = None
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for key, events in self._selector.select(seconds):
            if isinstance(key.data, _Connection):
                if events & selectors.EVENT_WRITE:
                    self._send(key.data)
                if events & selectors.EVENT_READ:
                    self._receive(key.data)
            else:
                key.data()
        self._flush()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # it has gone again, or there are too many open files
            if self._accepts:
                logger.warning("a client could not be accepted, and is tried again each second: %s", error)
            self._accepts = False
            self._accept_due = time.monotonic() + _ACCEPT_AGAIN_SECONDS
            self._selector.unregister(self._listener)
            return
        self._accepts = True
        sock.setblocking(False)
        connection = _Connection(sock)
        self._connections[sock] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._post(connection, self._info)
        if self._core.scheduler.draining:
            self._post(connection, messages.CoreState(draining=True))

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(_READ_BYTES)
            if not data:
                self._drop(connection, "it closed the connection")
                return
            connection.inbox += data
            for payload in take_frames(connection.inbox):
                self._handle(connection, self._decode(payload))
        except BlockingIOError:
            return
        except (OSError, FrameError, msgspec.DecodeError) as error:
            self._drop(connection, str(error))

    def _post(self, connection: _Connection, message: messages.FromCore | Turn) -> None:
        """What is posted goes out with the next `_flush`, in this order."""
        connection.outbox += to_frame(self._encode(message))

    def _answer(self, connection: _Connection, call_id: int, answer: Any) -> None:
        self._post(connection, messages.Reply(call_id, msgspec.Raw(self._encode(answer))))

    def _flush(self) -> None:
        for connection in list(self._connections.values()):
            if connection.outbox:
                self._send(connection)

    def _send(self, connection: _Connection) -> None:
        try:
            while connection.outbox:
                sent = connection.sock.send(connection.outbox)
                del connection.outbox[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(connection, str(error))
            return
        if len(connection.outbox) > _MAX_UNSENT_BYTES:
            self._drop(connection, f"it left {len(connection.outbox)} bytes unread")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outbox else 0)
        if self._selector.get_key(connection.sock).events != wanted:
            self._selector.modify(connection.sock, wanted, connection)

    def _drop(self, connection: _Connection, why: str) -> None:
        if self._connections.pop(connection.sock, None) is None:
            return
        self._selector.unregister(connection.sock)
        connection.sock.close()
        if connection.request_ids:
            logger.warning("a client is gone (%s): aborting its %d requests", why, len(connection.request_ids))
        for request_id in list(connection.request_ids):
            self._abort(request_id)

    # --- messages

    def _handle(self, connection: _Connection, message: messages.ToCore) -> None:
        match message:
            case messages.Submit():
                self._submit(connection, message)
            case messages.EndSequences():
                for request_id, index in message.sequences:
                    if request_id not in connection.request_ids:
                        continue  # ended meanwhile, and its id may be another client's by now
                    self._core.scheduler.end_sequence(request_id, index)
                    self._forget_if_ended(request_id)
            case messages.Abort():
                # Without a question it is about the client's own requests: one refused as a duplicate has none.
                ids = message.request_ids
                if not message.call_id:
                    ids = [request_id for request_id in ids if request_id in connection.request_ids]
                live = [request_id for request_id in ids if self._abort(request_id)]
                if message.call_id:
                    self._answer(connection, message.call_id, live)
            case messages.Call():
                self._answer(connection, message.call_id, self._ask(message))
            case messages.LoadGrammar():
                connection.vocabulary = message.vocabulary or connection.vocabulary
                self._loader.submit(self._load, connection, message, connection.vocabulary)
            case messages.Note():
                self._core.scheduler.tracer.add(message.request_id, message.kind)

    def _load(self, connection: _Connection, message: messages.LoadGrammar, vocabulary: Vocabulary | None) -> None:
        """Runs in the loader's thread."""
        error = ""
        try:
            if vocabulary is None:
                raise GrammarError("no vocabulary has come on this connection")
            self._core.scheduler.grammars.load(message.key, message.data, vocabulary)
        except GrammarError as failure:
            error = str(failure)
        except Exception:  # XGrammar cannot be imported, for one: told to the one who asked
            logger.exception("a grammar could not be loaded")
            error = "the engine cannot load grammars"
        self._loaded.put((connection, message.call_id, error))
        self._wake()

    def _submit(self, connection: _Connection, message: messages.Submit) -> None:
        request_id = message.request.request_id
        try:
            self._core.scheduler.add(message.request)
        except RequestRejected as refused:
            self._post(connection, messages.Refusal(message.call_id, refused.reason, str(refused), refused.field))
            return
        self._owners[request_id] = connection
        connection.request_ids.add(request_id)
        self._answer(connection, message.call_id, None)

    def _ask(self, call: messages.Call) -> Any:
        scheduler = self._core.scheduler
        match call.method:
            case "stats":
                return self._core.stats()
            case "cache":
                return self._cache_view()
            case "flush_cache":
                return scheduler.cache.flush()
            case "drain":
                ending = call.argument == "end"
                if ending or not scheduler.draining:
                    scheduler.draining = True
                    for connection in self._connections.values():
                        self._post(connection, messages.CoreState(draining=True, ending=ending))
                return len(self._owners)
            case "trace":
                return scheduler.tracer.request(call.argument)
            case "steps":
                steps = list(scheduler.tracer.steps)
                return steps[max(0, len(steps) - int(call.argument)) :]

    def _cache_view(self) -> CacheView:
        """At most once a second, and in at most a hundredth of the time: with many pages it takes a while."""
        began = time.monotonic()
        if began >= self._view_due:
            self._view = self._core.scheduler.cache.view()
            self._view_due = began + max(_VIEW_SECONDS, 100 * (time.monotonic() - began))
        return self._view

    def _abort(self, request_id: str) -> bool:
        """Ends a live request; its owner is told. False where it is not live."""
        owner = self._owners.get(request_id)
        if owner is None or not self._core.scheduler.abort(request_id):
            return False
        self._post(owner, Turn([], [SequenceUpdate(request_id, 0, (), FinishReason.ABORT)]))
        self._forget(request_id)
        return True

    def _route(self, turn: Turn) -> None:
        """Each client gets what is its own, at once: an id may be another request's after the next message."""
        owners = self._owners
        for start in turn.started:
            owners[start.request_id].turn.started.append(start)
        for update in turn.updates:
            owners[update.request_id].turn.updates.append(update)
        for connection in self._connections.values():
            if connection.turn.started or connection.turn.updates:
                self._post(connection, connection.turn)
                connection.turn = Turn([], [])
        for request_id in [update.request_id for update in turn.updates if update.finish is not None]:
            self._forget_if_ended(request_id)

    def _forget_if_ended(self, request_id: str) -> None:
        if request_id in self._owners and not self._core.scheduler.is_live(request_id):
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._owners.pop(request_id).request_ids.discard(request_id)
