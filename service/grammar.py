"""Compiled grammars: in a process of its own under limits of time and size, each once, and kept. Knows no request.

The process is started for the first grammar: it imports XGrammar, and with it torch and transformers.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import sys
from asyncio.subprocess import Process
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import grpc
import msgspec

from engine.grammar import Vocabulary
from service.errors import ApiError, grammar_compiler_dead
from service.grammar_worker import BEGUN, Constraint, Result, Setup
from service.tokenizer import Tokenizer
from service.turns import Turns

logger = logging.getLogger(__name__)

_AT_ONCE = 2  # compilations; others wait for them
_TRIES = 2  # of a compilation whose process dies
_MEMORY_BYTES = 2 << 30
_OUTPUT_BYTES = 128 << 20
_KEPT_BYTES = 256 << 20
_KEPT = 1024
_START_SECONDS = 120.0
_SLACK_SECONDS = 2.0
_FORGET_SECONDS = 60.0


class Compiled(NamedTuple):
    """A compiled grammar as it travels to the core, under a key that follows from its source.

    `field`: of the request, to blame where the core refuses it.
    """

    key: str
    data: bytes
    field: str


class GrammarCompiler:
    """Compiles for one model. Belongs to one event loop.

    Args:
        tokenizer: of the model.
        vocab_size: of the model; more than the tokenizer's where it is padded.
        stop_token_ids: what ends a text.
        seconds: limit of one compilation.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int], *, seconds: float) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stops = tuple(stop_token_ids)
        self._seconds = seconds
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[Constraint, Result] = OrderedDict()
        self._running: dict[Constraint, asyncio.Task[Result]] = {}
        self._wanted: Counter[Constraint] = Counter()
        self._turns = Turns(_AT_ONCE)
        self._starting = asyncio.Lock()
        self._worker: tuple[Process, socket.socket] | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        """Of the model, made when first asked for (0.1 s for 50,000 tokens): in a thread, if not by `compile`."""
        if self._vocabulary is None:
            silent = self._tokenizer.special_ids | set(self._stops)
            pieces = (b"" if i in silent else self._tokenizer.token_bytes(i) for i in range(self._vocab_size))
            self._vocabulary = Vocabulary(tuple(pieces), self._stops)
        return self._vocabulary

    async def compile(self, constraint: Constraint, field: str = "", *, turn: str = "") -> Compiled:
        """The grammar, from the cache or compiled now; equal ones at the same time are compiled once.

        Args:
            constraint: its source.
            field: the request's field to blame, where it is not the constraint's kind.
            turn: in whose turn it is compiled.

        Raises ApiError: INVALID_ARGUMENT (INVALID_GRAMMAR), it cannot be compiled, or not within the limits;
        UNAVAILABLE, the process died, and so did its successor.
        """
        field = field or constraint.kind
        if not self._stops:
            raise invalid_grammar(field, "the model has no end-of-sequence token, so that no text would end")
        result = self._kept.get(constraint)
        if result is None:
            task = self._running.get(constraint)
            if task is None:
                task = self._running[constraint] = asyncio.create_task(self._in_turn(constraint, turn))
            self._wanted[constraint] += 1
            try:
                result = await asyncio.shield(task)
            finally:
                self._wanted[constraint] -= 1
        else:
            self._kept.move_to_end(constraint)
        if result.error:
            raise invalid_grammar(field, result.error)
        key = hashlib.sha256(msgspec.msgpack.encode(constraint)).hexdigest()
        return Compiled(key, result.grammar, field)

    async def close(self) -> None:
        """Ends the process and whatever it compiles."""
        for task in self._running.values():
            task.cancel()
        if self._worker is not None:
            await _end(*self._worker)

    async def _in_turn(self, constraint: Constraint, turn: str) -> Result:
        await self._turns.take(turn)
        try:
            # Once it is begun it is brought to its end, as its process goes on by itself.
            return await self._compile(constraint) if self._wanted[constraint] else Result(error="all have gone")
        finally:
            self._turns.leave()
            del self._running[constraint]
            self._wanted += Counter()  # only what is wanted

    async def _compile(self, constraint: Constraint) -> Result:
        loop = asyncio.get_running_loop()
        for _ in range(_TRIES):
            if (worker := await self._started()) is None:
                continue
            began = loop.time()
            answer = await _asked(worker[1], msgspec.msgpack.encode(constraint), self._seconds + _SLACK_SECONDS)
            if answer:
                break
            await _end(*worker)
        else:
            raise grammar_compiler_dead()
        try:
            result = msgspec.msgpack.decode(answer.removeprefix(BEGUN), type=Result)
        except msgspec.DecodeError:  # it was ended
            late = loop.time() - began >= self._seconds
            limit = f"takes longer than the {self._seconds:g} s" if late else "takes more memory or depth than"
            result = Result(error=f"its compilation {limit} that it may")
            # It may have been the machine that was busy.
            loop.call_later(_FORGET_SECONDS, self._kept.pop, constraint, None)
        logger.debug("a grammar (%s) took %.3f s: %d bytes", constraint.kind, loop.time() - began, len(result.grammar))
        self._kept[constraint] = result
        while (
            len(self._kept) > _KEPT
            or sum(len(of.text) + len(it.grammar) for of, it in self._kept.items()) > _KEPT_BYTES
        ):
            self._kept.popitem(last=False)
        return result

    async def _started(self) -> tuple[Process, socket.socket] | None:
        """The worker, which is started if it does not run, and the socket that takes its work; None: it died."""
        async with self._starting:
            if self._worker is not None:
                if self._worker[0].returncode is None:
                    return self._worker
                logger.warning("the grammar compiler has ended: starting another")
                self._worker[1].close()
            vocabulary = await asyncio.to_thread(lambda: self.vocabulary)
            # The worker forks: it must have no threads.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            control, theirs = socket.socketpair()
            control.setblocking(False)
            with theirs:
                command = (sys.executable, "-m", "service.grammar_worker")
                process = await asyncio.create_subprocess_exec(*command, stdin=theirs.fileno(), env=environment)
            self._worker = process, control
            setup = Setup(vocabulary, self._seconds, _MEMORY_BYTES, _OUTPUT_BYTES)
            if not await _asked(control, msgspec.msgpack.encode(setup), _START_SECONDS):
                await _end(process, control)
                logger.error("the grammar compiler did not start (status %s)", process.returncode)
                return None
            return self._worker


async def _asked(control: socket.socket, message: bytes, seconds: float) -> bytes:
    """Sends a message on a socket of its own, and returns what comes back: nothing where nobody has taken it up."""
    loop, answer = asyncio.get_running_loop(), bytearray()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, contextlib.suppress(ConnectionError, TimeoutError):
        with theirs:
            socket.send_fds(control, [b"\0"], [theirs.fileno()])
        async with asyncio.timeout(seconds):
            await loop.sock_sendall(ours, message)
            ours.shutdown(socket.SHUT_WR)
            while piece := await loop.sock_recv(ours, 1 << 20):
                answer += piece
    return bytes(answer)


async def _end(process: Process, control: socket.socket) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
    control.close()


def invalid_grammar(field: str, why: str) -> ApiError:
    """INVALID_ARGUMENT that names the field."""
    return ApiError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_GRAMMAR", why, field=field)
