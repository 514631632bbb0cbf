"""Asks an OpenAI server for streamed answers and notes when each event comes. Knows HTTP/1.1 and server-sent events.

It is made to cost little per event, since a client that is slower than the server measures itself: one callback for
each read of the socket, one typed decode for each event. No proxies, no redirects, no compression.
"""

import asyncio
import ssl
import time
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from loadtest.records import Prompt, Record, Target

_MAX_ERROR_BYTES = 2000


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


class Answer:
    """Takes the bytes of a stream of events and keeps the times in a record."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._rest = b""
        self._times: list[float] = []
        self._pieces: list[str] = []
        self._ending: float | None = None  # when a chunk without text told the reason
        self._finished = self._done = False

    def feed(self, data: bytes, now: float) -> None:
        """The next bytes, read at `now`."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):  # else a comment, an event's name, or the blank line after an event
                self._event(line[5:].strip(), now)

    def close(self, now: float, whole: bool | None) -> None:
        """The stream has ended, `whole` or not by its framing (None: it has none): judges whether all of it came."""
        self.feed(b"\n", now)
        record, times = self._record, self._times
        if record.error:
            return
        # The token that ended the answer has no text: an event, where the server counts it among the tokens.
        if self._ending is not None and record.output_tokens and len(times) in (0, record.output_tokens - 1):
            times.append(self._ending)
        record.heard(times)
        record.text = "".join(self._pieces)
        if not self._finished:
            record.error = "truncated: the stream ended without a finish reason"
        elif not (self._done if whole is None else whole):
            record.error = "truncated: the connection ended before the stream"
        elif not times or record.output_tokens == 0:
            record.error = "empty: the answer has no tokens"

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self._done = True
            return
        if self._record.error:
            return
        try:
            chunk = _decoder.decode(payload)
        except msgspec.MsgspecError as error:
            self._record.error = f"unreadable event: {error}: {payload[:200]!r}"
            return
        if chunk.error:
            self._record.error = f"error in the stream: {_message(chunk.error)}"
            return
        if chunk.choices:
            self._output(chunk.choices[0], now)
        if chunk.usage is not None:
            record, usage = self._record, chunk.usage
            if usage.prompt_tokens is not None:
                record.prompt_tokens = usage.prompt_tokens
            if usage.completion_tokens is not None:
                record.output_tokens = usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                record.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0

    def _output(self, choice: _Choice, now: float) -> None:
        record, delta = self._record, choice.delta
        record.latency = now - record.start
        text = choice.text or ""
        if delta is not None:
            text = delta.content or delta.reasoning or delta.reasoning_content or ""
        last = bool(choice.finish_reason)  # some servers send an empty one before
        self._finished |= last
        self._pieces.append(text)
        # An empty text may be a token (half a character, a special token). But a chunk that only names the role is
        # none; whether one that only tells the reason is one shows in the end.
        called = delta is not None and delta.tool_calls
        if last and not (text or called):
            self._ending = now
        elif text or called or delta is None or not delta.role:
            self._times.append(now)


class _Connection(asyncio.Protocol):
    """One connection, for one exchange after another."""

    def __init__(self) -> None:
        self.open = True  # for a further exchange
        self._begin(Answer(Record()))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    async def exchange(self, request: bytes, answer: Answer) -> None:
        """Sends a request; returns at the end of the answer, or when the connection has ended before that."""
        self._begin(answer)
        self._transport.write(request)
        try:
            await self._done
        finally:
            if not self._keep:
                self.close()

    def close(self) -> None:
        self.open = False
        self._transport.abort()

    def _begin(self, answer: Answer) -> None:
        self.now = 0.0  # when its last bytes came; 0: none did
        self.status = 0  # 0: no answer began
        self.whole: bool | None = None  # whether all of the answer came, where it says how much that is
        self.refusal = bytearray()  # what came instead of a stream
        self._keep = False
        self._answer, self._parser = answer, httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._end()

    def _end(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    # The parser's callbacks.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self.whole = False

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status == 200:
            self._answer.feed(body, self.now)
        elif len(self.refusal) < _MAX_ERROR_BYTES:
            self.refusal += body

    def on_message_complete(self) -> None:
        self.whole, self._keep = True, self._parser.should_keep_alive()
        self._end()


class HttpClient:
    """Sends prompts to the completions or chat endpoint of a target."""

    def __init__(self, target: Target) -> None:
        parts = urlsplit(target.url)
        self._target = target
        self._host = parts.hostname or "127.0.0.1"
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._idle: list[_Connection] = []
        headers = {"host": parts.netloc, "content-type": "application/json", "accept": "text/event-stream"}
        headers |= {name.lower(): value for name, value in target.headers.items()}
        lines = [f"POST {parts.path}{target.endpoint} HTTP/1.1", *(f"{name}: {headers[name]}" for name in headers)]
        self._head = "\r\n".join(lines).encode("latin-1")
        self._fields = {
            "model": target.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if target.ignore_eos else {}),
            **target.sampling,
            **target.extra_body,
        }

    def request(self, prompt: Prompt) -> bytes:
        """What is sent. Raises: ValueError, OverflowError (half a character, a number too large for JSON here)."""
        body = msgspec.json.encode(self._body(prompt))
        return b"%b\r\ncontent-length: %d\r\n\r\n%b" % (self._head, len(body), body)

    async def send(self, request: bytes, record: Record) -> None:
        """Fills `record` with what comes of the request. Raises nothing but a cancellation."""
        answer = Answer(record)
        try:
            connection = await self._exchange(request, answer)
        except (OSError, UnicodeError) as error:  # the latter of names that no host can have
            record.error = f"cannot connect: {getattr(error, 'strerror', None) or error}"
            return
        if connection.status == 200:
            answer.close(time.perf_counter(), connection.whole)
        elif connection.status:
            record.error = f"HTTP {connection.status}: {_refusal(bytes(connection.refusal))}"
        else:
            record.error = "the connection ended before an answer"

    async def close(self) -> None:
        """Ends the idle connections."""
        for connection in self._idle:
            connection.close()

    async def _exchange(self, request: bytes, answer: Answer) -> _Connection:
        """One exchange, over an idle connection or a new one. Raises: OSError when none can be made."""
        while True:
            while self._idle and not self._idle[-1].open:
                self._idle.pop()
            if idle := bool(self._idle):
                connection = self._idle.pop()
            else:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
            await connection.exchange(request, answer)
            if connection.open:
                self._idle.append(connection)
            if connection.now or not idle:
                return connection
            # The server ended the idle connection as the request was on its way: no answer began.

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        fields = self._fields | {"cache_salt": prompt.salt} if prompt.salt else self._fields
        if self._target.backend == "openai":
            return {"prompt": prompt.content, "max_tokens": prompt.output_len} | fields
        messages = [{"role": "user", "content": prompt.content}] if isinstance(prompt.content, str) else prompt.content
        return {"messages": messages, "max_completion_tokens": prompt.output_len} | fields


def _refusal(body: bytes) -> str:
    """What an error answer says, in one line."""
    try:
        fields = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        fields = body.decode(errors="replace")
    return _message(fields.get("error", fields.get("detail", fields)) if isinstance(fields, dict) else fields)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
