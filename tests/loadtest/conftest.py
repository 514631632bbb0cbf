"""A mock OpenAI server whose every delay is known."""

import asyncio
import json
import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

Handler = Callable[["Call"], Any]


@dataclass
class Call:
    """One request as it arrived, and the way to answer it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter

    async def head(self, status: str = "200 OK", kind: str = "text/event-stream") -> None:
        self.writer.write(f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        await self.writer.drain()

    async def send(self, data: str) -> None:
        raw = data.encode()
        self.writer.write(b"%x\r\n%b\r\n" % (len(raw), raw))
        await self.writer.drain()

    async def event(self, fields: dict[str, Any]) -> None:
        await self.send(f"data: {json.dumps(fields)}\n\n")

    async def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def refuse(self, status: str, message: str) -> None:
        await self.head(status, "application/json")
        await self.send(json.dumps({"error": {"message": message}}))
        await self.end()


@dataclass
class MockServer:
    """Runs in a thread of its own, with its own event loop."""

    handler: Handler
    calls: list[Call] = field(default_factory=list)
    url: str = ""
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                _, path, _ = line.decode().split(" ", 2)
                headers = {}
                while (line := await reader.readline()).strip():
                    name, _, value = line.decode().partition(":")
                    headers[name.lower()] = value.strip()
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                call = Call(path, headers, json.loads(raw) if raw else {}, writer)
                self.calls.append(call)
                await self.handler(call)
                if writer.is_closing():
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
def mock_server() -> Callable[[Handler], AbstractContextManager[MockServer]]:
    """Starts a server that answers with `handler`, on a free port of `host`."""

    @contextmanager
    def start(handler: Handler, host: str = "127.0.0.1") -> Iterator[MockServer]:
        mock = MockServer(handler)
        loop = asyncio.new_event_loop()
        started = threading.Event()

        async def main() -> None:
            server = await asyncio.start_server(mock.serve, host, 0)
            mock.port = server.sockets[0].getsockname()[1]
            mock.url = f"http://{f'[{host}]' if ':' in host else host}:{mock.port}"
            started.set()

        def run() -> None:
            asyncio.set_event_loop(loop)
            loop.run_until_complete(main())
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert started.wait(10)
        try:
            yield mock
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)

    return start


async def completion(
    call: Call, *, first: float = 0.0, gap: float = 0.0, together: int = 1, usage: bool = True
) -> None:
    """Streams max_tokens tokens, `together` in an event: the first after `first` seconds, others `gap` later each."""
    tokens = call.body["max_tokens"]
    await call.head()
    await asyncio.sleep(first)
    for done in range(0, tokens, together):
        if done:
            await asyncio.sleep(gap)
        finish = "length" if done + together >= tokens else None
        await call.event(
            {"choices": [{"index": 0, "text": " a" * min(together, tokens - done), "finish_reason": finish}]}
        )
    if usage:
        prompt = call.body["prompt"]
        counts = {
            "prompt_tokens": len(prompt if isinstance(prompt, list) else prompt.split()),
            "completion_tokens": tokens,
        }
        await call.event({"choices": [], "usage": counts})
    await call.send("data: [DONE]\n\n")
    await call.end()


@pytest.fixture
def stream() -> Callable[..., Any]:
    """A completion of known delays."""
    return completion


@pytest.fixture
def no_children() -> Iterator[None]:
    """Fails when the test leaves a process behind."""
    yield
    assert not multiprocessing.active_children()


@pytest.fixture
def unused_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
