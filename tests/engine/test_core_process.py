"""The core as a process of its own, with a tiny random model: how it starts, serves and ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine import own_folder
from engine.client import CoreClient, CoreDied
from engine.config import EngineConfig
from engine.kept import Kept, ProcessDied
from engine.model.errors import ModelError
from engine.process import CoreProcess, config_from_json, config_to_json
from engine.request import FinishReason, Request, SamplingParams
from engine.watchdog import Watchdog

END_SECONDS = 20

# Starts a core, says its process id, and is then killed: nothing of its own clean-up runs.
PARENT = """
import asyncio, sys
from engine.process import CoreProcess, config_from_json
import json

async def main():
    async with CoreProcess.start(config_from_json(json.loads(sys.argv[1])), progress=False) as core:
        print(core.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("tiny")
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 100,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    return EngineConfig(
        model=folder, load_format="dummy", device="cpu", dtype="float32", threads=1, memory_budget=16 << 20
    )


def request(name: str, **params: object) -> Request:
    return Request(name, (5, 6, 7), SamplingParams(temperature=0.0, ignore_eos=True, **params))


async def gone(pid: int) -> None:
    """Returns when the process has ended."""
    async with asyncio.timeout(END_SECONDS):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.02)


def test_settings_survive_the_pipe(config: EngineConfig) -> None:
    changed = EngineConfig(model=Path("/x"), memory_budget=0.5, logits_processors=("a:B", "c:D"))
    changed = replace(changed, scheduler="static", speculative_window=(1, 3))
    for each in (config, changed):
        assert config_from_json(json.loads(json.dumps(config_to_json(each)))) == each


async def test_it_serves_and_ends_when_it_is_told(config: EngineConfig) -> None:
    async with CoreProcess.start(config, progress=False) as core:
        client = await CoreClient.connect(core.socket)
        assert client.info.architecture == "LlamaForCausalLM"
        assert client.info.max_model_len == 2048
        stream = await client.submit(request("a", max_tokens=12))
        outputs = [output async for event in stream if isinstance(event, list) for output in event]
        assert sum(len(output.token_ids) for output in outputs) == 12
        assert outputs[-1].finish is FinishReason.LENGTH
        assert core.socket.stat().st_mode & 0o777 == 0o600
        await client.close()
        pid, folder = core.pid, core.socket.parent
    assert await core.wait() == 0
    assert not Path(f"/proc/{pid}").exists()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),  # which a count of looks would overrule
    ],
)
async def test_its_threads_soon_sleep_while_they_wait(config: EngineConfig, monkeypatch, given, expected) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    async with CoreProcess.start(config, progress=False) as core:
        lines = Path(f"/proc/{core.pid}/environ").read_text().split("\0")
    assert {name: value for name, _, value in (line.partition("=") for line in lines) if name in names} == expected


async def test_it_ends_in_the_middle_of_its_work(config: EngineConfig) -> None:
    async with CoreProcess.start(config, progress=False) as core:
        client = await CoreClient.connect(core.socket)
        stream = await client.submit(request("a", max_tokens=2000))
        await anext(stream)
        await core.stop()
        assert await core.wait() == 0
        with pytest.raises(CoreDied):
            [event async for event in stream]
        await client.close()


async def test_a_killed_core_is_noticed_at_once(config: EngineConfig) -> None:
    async with CoreProcess.start(config, progress=False) as core:
        client = await CoreClient.connect(core.socket)
        stream = await client.submit(request("a", max_tokens=2000))
        await anext(stream)
        os.kill(core.pid, signal.SIGKILL)
        async with asyncio.timeout(END_SECONDS):  # of the 300 that a step may take
            await client.closed()
        with pytest.raises(CoreDied):
            [event async for event in stream]
        assert await core.wait() == -signal.SIGKILL
        await client.close()


async def test_a_core_that_dies_is_started_again_but_not_for_ever(config: EngineConfig, monkeypatch) -> None:
    monkeypatch.setattr("engine.kept._FIRST_PAUSE", 0.01)
    async with CoreProcess.start(config, progress=False, restarts=1) as core:
        client = await CoreClient.connect(core.socket)
        first, stream = core.pid, await client.submit(request("a", max_tokens=2000))
        os.kill(first, signal.SIGKILL)
        with pytest.raises(CoreDied):
            [event async for event in stream]
        with pytest.raises(CoreDied):
            await client.stats()
        await client.reconnect()
        assert core.pid != first
        stream = await client.submit(request("a", max_tokens=3))
        outputs = [output async for event in stream if isinstance(event, list) for output in event]
        assert outputs[-1].finish is FinishReason.LENGTH
        os.kill(core.pid, signal.SIGKILL)
        with pytest.raises(ProcessDied, match="the engine core was killed by SIGKILL") as ended:
            await core.died()
        assert ended.value.status == -signal.SIGKILL
        await client.close()


class Dies(Kept):
    """Is started again and again, and ends at once each time."""

    async def launch(self) -> None:
        self._process = await asyncio.create_subprocess_exec("false")


async def test_a_process_is_started_again_later_each_time(monkeypatch) -> None:
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("engine.kept.asyncio.sleep", sleep)
    kept = Dies("nobody", restarts=8)
    await kept.keep()
    with pytest.raises(ProcessDied, match="the nobody ended with status 1"):
        await asyncio.wait_for(kept.died(), END_SECONDS)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30]


SERVES = """
import signal, sys

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("serves", flush=True)
sys.stdin.read()
"""


async def test_one_that_has_just_begun_to_serve_ends_at_once(tmp_path: Path, caplog) -> None:
    """It leaves signals to its parent, who does not know yet that it serves."""
    core = CoreProcess(tmp_path / "socket", {}, restarts=0)
    pipe = asyncio.subprocess.PIPE
    core._process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVES, stdin=pipe, stdout=pipe)
    assert await core._process.stdout.readline() == b"serves\n"
    await core.stop()
    assert await core.wait() == 0
    assert "killing" not in caplog.text


HANGS = """
import time

class Hangs:
    def __init__(self, **about): pass

    def __call__(self, logits, rows):
        while any(row.params.max_tokens == 77 for row in rows):
            time.sleep(0.05)
        return logits
"""


async def test_a_step_that_hangs_is_told_with_its_place(config: EngineConfig, tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    settings = replace(config, logits_processors=("hangs:Hangs",), step_timeout=1.0)
    async with CoreProcess.start(settings, progress=False) as core:
        client = await CoreClient.connect(core.socket)
        stream = await client.submit(request("a", max_tokens=77))
        with pytest.raises(CoreDied):
            [event async for event in stream]
        assert await core.wait() == 75
        await client.close()
    told = capfd.readouterr().err
    assert "no progress for 1 s: 1 sequences run; in flight: nothing" in told
    assert f'File "{tmp_path}/hangs.py", line 9 in __call__' in told


def test_a_process_that_was_stopped_has_not_hung(monkeypatch) -> None:
    """The clock goes on meanwhile, and is far ahead when its threads run again."""

    class Clock:
        now = 0.0
        entered, looked = threading.Event(), threading.Event()

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            assert self.entered.wait(10)
            if self.now:
                self.looked.set()
                threading.Event().wait()  # for ever: it is a daemon
            self.now = 1000.0

    clock, ends = Clock(), []
    monkeypatch.setattr("engine.watchdog.time", clock)
    monkeypatch.setattr("os._exit", ends.append)
    with Watchdog(300.0, str):
        clock.entered.set()
        assert clock.looked.wait(10)
    assert ends == []


async def test_it_ends_when_its_parent_is_killed(config: EngineConfig) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, json.dumps(config_to_json(config))], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(await asyncio.to_thread(parent.stdout.readline))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    await gone(pid)


async def test_signals_to_all_processes_are_left_to_the_parent(config: EngineConfig) -> None:
    async with CoreProcess.start(config, progress=False) as core:
        client = await CoreClient.connect(core.socket)
        os.kill(core.pid, signal.SIGINT)
        os.kill(core.pid, signal.SIGTERM)
        assert (await client.stats()).live_requests == 0
        await client.close()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model": Path("/nowhere/at/all")}, "/nowhere/at/all"),
        ({"logits_processors": ("no_such_module:Class",)}, "no_such_module"),
        ({"logits_processors": ("unittest.mock:Mock",)}, "unittest.mock:Mock returned Mock, not a tensor"),
    ],
)
async def test_what_cannot_start_says_why(config: EngineConfig, changed: dict[str, object], named: str) -> None:
    settings = config_from_json(config_to_json(config) | changed)
    with pytest.raises(ModelError, match=named):
        async with CoreProcess.start(settings, progress=False):
            pass


def test_sockets_fit_where_the_path_of_temporary_files_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a cluster makes a folder for each job: a socket's address has room for 107 bytes (unix(7))."""
    (tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    with own_folder.OwnFolder() as own, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{own}/core.sock")


def test_folders_of_killed_engines_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(own_folder, "_LONGEST", 1000)
    folders = {name: tmp_path / f"fulcrum-own-{name}" for name in ("dead", "young", "live")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "core.sock").touch()
    other = tmp_path / "fulcrum-1000"
    other.mkdir()
    (tmp_path / "fulcrum-own-link").symlink_to(other)
    hour_ago = time.time() - 3600
    for path in (folders["dead"], folders["live"], other):
        os.utime(path, (hour_ago, hour_ago))
    lock = own_folder._locked(folders["live"])
    own_folder.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "fulcrum-1000", "fulcrum-own-link", "fulcrum-own-live", "fulcrum-own-young",
    ]  # fmt: skip
    assert (folders["live"] / "core.sock").exists()
    os.close(lock)
    own_folder.sweep()
    assert not folders["live"].exists()
    with own_folder.OwnFolder() as own:
        os.utime(own, (hour_ago, hour_ago))
        own_folder.sweep()
        assert Path(own).exists()
    assert not Path(own).exists()
