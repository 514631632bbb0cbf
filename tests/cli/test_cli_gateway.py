"""`fulcrum gateway` as a process: starts, answers, refuses, ends; and as a child that its parent outlives or not."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from cli.child import HURRY_SECONDS, Child, stop_in_turn
from engine.kept import ProcessDied

NO_ENGINE = "127.0.0.1:1"


def status(url: str) -> int:
    try:
        return urllib.request.urlopen(url, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    ("workers", "number", "children"),
    [([], signal.SIGINT, 0), ([], signal.SIGHUP, 0), (["--workers=2"], signal.SIGTERM, 2)],
)
def test_gateway_starts_and_ends(fulcrum, await_end, number: signal.Signals, workers: list[str], children: int) -> None:
    process = fulcrum("gateway", "--engine", NO_ENGINE, "--port=0", *workers)
    page = process.expect(r"page        (http://127\.0\.0\.1:\d+)/\n")
    url = process.expect(r"OpenAI API  (http://127\.0\.0\.1:\d+)/v1")
    assert page == url
    assert status(f"{url}/livez") == 200
    assert status(f"{url}/health") == 503
    family = process.descendants()
    assert len(family) == children
    assert process.stop(number) == 0
    await_end(family)


def test_connections_are_as_many_as_the_hard_limit_of_files_allows(fulcrum) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        process = fulcrum("gateway", "--engine", NO_ENGINE, "--port=0")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    url = process.expect(r"OpenAI API  (http://127\.0\.0\.1:\d+)/v1")
    host, port = url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
        assert status(f"{url}/livez") == 200


def test_a_taken_port_is_one_line_and_status_2(fulcrum) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = fulcrum("gateway", f"--port={port}")
        assert process.wait() == 2
    assert process.log.read_text() == f"Error: cannot listen on 127.0.0.1:{port} (--port): Address already in use\n"


async def test_a_child_reports_and_stops() -> None:
    child = Child("gateway", ["gateway", f"--engine={NO_ENGINE}", "--port=0"], {}, 0)
    try:
        await asyncio.wait_for(child.keep(), 60)
        assert await asyncio.to_thread(status, f"http://{child.report['address']}/livez") == 200
    finally:
        await child.stop(30, asyncio.Event())
    assert await child.wait() == 0


async def test_children_stopped_in_turn_end_within_the_grace_and_15_seconds(monkeypatch) -> None:
    """Though each takes all that it is given, and has to be hurried then."""
    now = 100.0

    class Slow(Child):
        async def stop(self, grace: float, hurry: asyncio.Event) -> None:
            nonlocal now
            now += grace + HURRY_SECONDS

    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    await stop_in_turn([Slow(name, (), {}, 0) for name in ("gateway", "engine")], 20.0, asyncio.Event())
    assert now == 100 + 20 + 15


async def test_a_child_that_cannot_start_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    child = Child("gateway", ["gateway", "--host=0.0.0.0", "--port=0"], {"FULCRUM_API_KEY": ""}, 5)
    with pytest.raises(ProcessDied) as caught:
        await asyncio.wait_for(child.keep(), 60)
    await child.stop(0, asyncio.Event())
    assert caught.value.status == 2
    assert "needs an API key (api_key, api_key_file)" in capfd.readouterr().err


async def test_a_child_that_is_killed_serves_again_at_the_same_address_but_not_for_ever(monkeypatch) -> None:
    monkeypatch.setattr("engine.kept._FIRST_PAUSE", 0.01)
    child = Child("gateway", ["gateway", f"--engine={NO_ENGINE}", "--port=0"], {}, 1, speaks=True)
    await asyncio.wait_for(child.keep(), 60)
    url, killed = f"http://{child.report['address']}/livez", child.pid
    child.again = [f"--port={url.rpartition(':')[2].removesuffix('/livez')}"]
    os.kill(killed, signal.SIGKILL)
    async with asyncio.timeout(60):
        while child.pid == killed or not child.serves:
            await asyncio.sleep(0.02)
    assert await asyncio.to_thread(status, url) == 200
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ProcessDied, match="the gateway was killed by SIGKILL"):
        await asyncio.wait_for(child.died(), 10)
    await child.stop(0, asyncio.Event())


@pytest.mark.parametrize("speaks", [True, False])
async def test_a_child_that_ends_by_itself_is_started_again_unless_it_has_said_why(monkeypatch, speaks: bool) -> None:
    monkeypatch.setattr("engine.kept._FIRST_PAUSE", 0.01)
    child = Child("gateway", ["gateway", f"--engine={NO_ENGINE}", "--port=0"], {}, 5, speaks=speaks)
    await asyncio.wait_for(child.keep(), 60)
    ended = child.pid
    os.kill(ended, signal.SIGTERM)
    if speaks:
        with pytest.raises(ProcessDied, match="the gateway ended with status 0"):
            await asyncio.wait_for(child.died(), 30)
    else:
        async with asyncio.timeout(60):
            while child.pid == ended or not child.serves:
                await asyncio.sleep(0.02)
    await child.stop(30, asyncio.Event())


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path) -> None:
    """Closing our end of its standard input is all that a SIGKILL of the parent does."""
    child = subprocess.Popen(
        [sys.executable, "-m", "cli", "gateway", f"--engine={NO_ENGINE}", "--port=0", "--supervised"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert child.stdout.readline().startswith(b'{"address"')
        child.stdin.close()
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_the_gateway_needs_nothing_of_the_engine() -> None:
    """What the `gateway` extra does not install cannot be imported here."""
    absent = ["torch", "tokenizers", "safetensors", "gguf", "huggingface_hub", "numpy", "msgspec", "jinja2", "tqdm"]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({absent}))
sys.argv = ["fulcrum", "gateway", "--engine={NO_ENGINE}", "--port=0", "--supervised"]
from cli.main import main
main()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as gateway:
        try:
            address = json.loads(gateway.stdout.readline())["address"]
            assert status(f"http://{address}/livez") == 200
        finally:
            gateway.stdin.close()
            assert gateway.wait(30) == 0
