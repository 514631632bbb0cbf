"""The default model, served by real processes; each test talks to them as a user would."""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import openai
import pytest

from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1 import inference_pb2_grpc as rpc
from tests.processes import descendants

START_SECONDS = 120
TOOL_TEMPLATE = """\
{% for tool in tools or [] %}{{ tool.function.name }}
{% endfor %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}"""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a running `fulcrum serve` is reached."""

    http: str  # http://HOST:PORT
    grpc: str
    admin: str
    model: str
    pid: int

    def family(self) -> list[int]:
        """Its process and all below it."""
        return [self.pid, *descendants(self.pid)]

    def resident(self) -> float:
        """MB that all of these have in memory."""
        pages = 0
        for pid in self.family():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

    def open_files(self) -> int:
        """File descriptors of all of these."""
        count = 0
        for pid in self.family():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                count += len(os.listdir(f"/proc/{pid}/fd"))
        return count


@contextmanager
def serving(model: Path, log: Path, *flags: str) -> Iterator[Addresses]:
    """`fulcrum serve` with the default model in float32, and further flags, until it is left."""
    # fmt: off
    command = [
        sys.executable, "-m", "cli", "serve", str(model), "--port", "0", "--grpc-port", "0", "--grace", "2",
        "--dtype", "float32", "--served-model-name", "smollm2",
        "--threads", "1",  # more would wait for one another whenever something else needs a core
        "--trace-requests", "64",
        *flags,
    ]
    # fmt: on
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, stdin=subprocess.DEVNULL, text=True)
    try:
        banner = _read_banner(process, log)
        found = {
            name: re.search(pattern, banner)
            for name, pattern in {
                "http": r"OpenAI API\s+(http://\S+)/v1",
                "grpc": r"gRPC\s+(\S+)",
                "admin": r"admin\s+(\S+)",
            }.items()
        }
        assert all(found.values()), banner
        yield Addresses(
            model="smollm2", pid=process.pid, **{name: match.group(1) for name, match in found.items() if match}
        )
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.returncode == 0, log.read_text()[-2000:]


@pytest.fixture(scope="session")
def serve_model() -> Callable[..., AbstractContextManager[Addresses]]:
    """serve_model(model, log, *flags): `fulcrum serve` as a context manager."""
    return serving


@pytest.fixture(scope="session")
def serve_tiny(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., AbstractContextManager[Addresses]]:
    """serve_tiny(pages, *flags): the tiny random model with a pool of so many pages; its log holds no traceback."""

    @contextmanager
    def serve(pages: int, *flags: str) -> Iterator[Addresses]:
        log = tmp_path_factory.mktemp("tiny") / "stderr.log"
        page = 2 * 2 * 2 * 16 * 4 * 16  # bytes: K and V, layers, KV heads, head_dim, float32, tokens of a page
        pool = ("--memory-budget", str(pages * page), "--max-model-len", "512")
        with serving(tiny_model, log, "--load-format", "dummy", *pool, *flags) as addresses:
            yield addresses
        assert "Traceback" not in log.read_text()

    return serve


@pytest.fixture(scope="session")
def tool_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat template that takes tools."""
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TOOL_TEMPLATE)
    return path


@pytest.fixture(scope="session")
def served(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """The default model as it is, for all tests of this folder."""
    with serving(default_model, tmp_path_factory.mktemp("e2e") / "stderr.log") as addresses:
        yield addresses


@pytest.fixture(scope="session")
def serve_with_template(
    default_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], AbstractContextManager[Addresses]]:
    """Serves the default model with another chat template."""

    def serve(source: str) -> AbstractContextManager[Addresses]:
        folder = tmp_path_factory.mktemp("e2e")
        (folder / "template.jinja").write_text(source)
        return serving(default_model, folder / "stderr.log", "--chat-template", str(folder / "template.jinja"))

    return serve


def _read_banner(process: subprocess.Popen[str], log: Path) -> str:
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    banner = ""
    while "Ctrl-C ends it" not in banner:
        line = lines.get(timeout=START_SECONDS)
        if line is None:
            pytest.fail(f"fulcrum serve ended: {banner}\n{log.read_text()[-3000:]}")
        banner += line
    return banner


@pytest.fixture
async def client(served: Addresses) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official asynchronous client."""
    async with openai.AsyncOpenAI(base_url=f"{served.http}/v1", api_key="none", timeout=300, max_retries=0) as client:
        yield client


@pytest.fixture
async def engine(served: Addresses) -> AsyncIterator[rpc.InferenceServiceStub]:
    """The generated stub on the gRPC port."""
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        yield rpc.InferenceServiceStub(channel)


class Admin:
    """The operator's stub."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = rpc.AdminServiceStub(channel)

    async def stats(self) -> pb.Stats:
        """Gauges and counters of this moment."""
        return (await self.stub.GetStats(pb.GetStatsRequest())).stats

    async def idle(self) -> pb.Stats:
        """The stats once nothing runs (a cancelled call reaches the core a moment after it has been cancelled)."""
        async for reply in self.stub.WatchStats(pb.WatchStatsRequest(interval_seconds=0.1), timeout=60):
            if reply.stats.live_requests == 0:
                return reply.stats
        raise AssertionError("the stream of stats ended")


@pytest.fixture
async def admin(served: Addresses) -> AsyncIterator[Admin]:
    """The operator's stub on the admin socket."""
    async with grpc.aio.insecure_channel(served.admin) as channel:
        yield Admin(channel)
