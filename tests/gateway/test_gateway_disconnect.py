"""A client that leaves takes its work with it; a client that reads slowly slows it down. Raw sockets."""

import asyncio
import json
import socket
import threading
from urllib.parse import urlsplit

import pytest

# Seconds in which an engine hears that a caller has left: far less than a request may take (600 s).
SOON = 20


def connect(gateway, path, body, times=1):
    """Sends a request, or the same one several times, and does not read the answer."""
    url = urlsplit(gateway)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(raw)}\r\n\r\n"
    connection = socket.create_connection((url.hostname, url.port), timeout=10)
    connection.sendall((head.encode() + raw) * times)
    return connection


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", ["queued", "accepted", "decoding"])
@pytest.mark.parametrize("prompts", [1, 3])
def test_leaving_cancels(gateway, engine, kit, stage, stream, prompts, reset):
    events = {"queued": [], "accepted": [kit.accepted()], "decoding": [kit.accepted(), kit.started(), kit.delta("x")]}
    engine.script = kit.hangs(*events[stage])
    body = {"prompt": ["p"] * prompts, "stream": stream}
    connection = connect(gateway, "/v1/completions", body)
    kit.wait_until(lambda: len(engine.calls) == prompts)
    if stream and stage == "decoding":
        received = b""
        while b'"text":"x"' not in received:
            piece = connection.recv(65536)
            assert piece, received
            received += piece
    if reset:
        linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()
    for call in engine.calls:
        assert call.cancelled.wait(SOON)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leaving_with_a_request_in_the_pipeline_cancels_what_runs(gateway, engine, kit, stream):
    engine.script = kit.hangs(kit.accepted(), kit.started(), kit.delta("x"))
    connection = connect(gateway, "/v1/completions", {"prompt": "p", "stream": stream}, times=2)
    kit.wait_until(lambda: len(engine.calls) == 1)
    connection.close()
    assert engine.calls[0].cancelled.wait(SOON)
    assert len(engine.calls) == 1


def test_leaving_cancels_other_calls_too(gateway, engine, kit):
    """Tokenize, Detokenize and GetModel hang for as long as the engine does."""
    entered, left = threading.Event(), threading.Event()
    original = engine._maybe_fail

    async def hang(context):
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    engine._maybe_fail = hang
    try:
        connection = connect(gateway, "/tokenize", {"prompt": "p"})
        assert entered.wait(SOON)
        connection.close()
        assert left.wait(SOON)
    finally:
        engine._maybe_fail = original


def test_leaving_before_the_body_is_there_starts_nothing(gateway, engine, http):
    url = urlsplit(gateway)
    with socket.create_connection((url.hostname, url.port), timeout=10) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: 100\r\n\r\n{")
    assert http.post(f"{gateway}/v1/completions", json={"prompt": "p"}).status_code == 200
    assert len(engine.calls) == 1


def test_gone_clients_are_counted(gateway, engine, kit, http):
    def gone():
        lines = http.get(f"{gateway}/metrics").text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if "_requests_total{" in line and 'status="499"' in line
        )

    before = gone()
    engine.script = kit.hangs(kit.accepted())
    for number, stream in enumerate((False, True)):
        connection = connect(gateway, "/v1/completions", {"prompt": "p", "stream": stream})
        kit.wait_until(lambda: len(engine.calls) == number + 1)  # noqa: B023
        connection.close()
    kit.wait_until(lambda: gone() == before + 2)


def test_a_slow_reader_slows_the_engine(gateway, engine, kit):
    """64 MiB of text for a reader that takes nothing: what lies in between stays small."""
    sent, piece, total = [0], "x" * 65536, 1024

    async def script(request, context):
        yield kit.accepted()
        for _ in range(total):
            yield kit.delta(piece)
            sent[0] += 1

    engine.script = script
    connection = connect(gateway, "/v1/completions", {"prompt": "p", "stream": True})
    seen = []

    def settled():
        seen.append(sent[0])
        return len(seen) > 200 and len(set(seen[-200:])) == 1

    kit.wait_until(lambda: sent[0] > 0)
    kit.wait_until(settled, 30, "the engine to be held back")
    assert sent[0] < total / 2
    connection.close()
    assert engine.calls[0].cancelled.wait(SOON)


def test_who_reads_nothing_is_let_go(start_gateway, engine, kit):
    """It would hold its connection for as long as it likes, whatever the request's deadline. Who reads stays."""

    async def script(request, context):
        yield kit.accepted()
        while True:
            yield kit.delta("x" * 65536)

    engine.script = script
    with start_gateway(engines=[engine.address], arrival_seconds=2) as url:
        connections = []
        for number in (1, 2):
            connections.append(connect(url, "/v1/completions", {"prompt": "p", "stream": True}))
            kit.wait_until(lambda: len(engine.calls) == number)  # noqa: B023
        still, reads = engine.calls  # the one that reads begins last, and at once
        while not still.cancelled.is_set():
            assert connections[1].recv(1 << 20)
        assert not reads.cancelled.is_set()
        for connection in connections:
            connection.close()
