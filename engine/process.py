"""Starts and ends the core process. Imports no torch: the parent serves the network and must stay light."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.model.errors import ModelError

logger = logging.getLogger(__name__)

_STOP_SECONDS = 10.0


def config_to_json(config: EngineConfig) -> dict[str, Any]:
    """The settings as JSON values."""
    return dataclasses.asdict(config) | {"model": str(config.model)}


def config_from_json(values: Mapping[str, Any]) -> EngineConfig:
    """The reverse of `config_to_json`. Raises ValueError, TypeError."""
    values = dict(values)
    tuples = {name: tuple(values[name]) for name in ("logits_processors", "speculative_window")}
    return EngineConfig(**values | tuples | {"model": Path(values["model"])})


class CoreProcess:
    """A running core process.

    Attributes:
        socket: the Unix socket that it serves.
        pid: its process id.
    """

    def __init__(self, process: asyncio.subprocess.Process, socket: Path) -> None:
        self._process = process
        self._serves = False
        self.socket = socket
        self.pid = process.pid

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls, config: EngineConfig, *, progress: bool = True, log_format: str = "text"
    ) -> AsyncIterator["CoreProcess"]:
        """Runs a core process for as long as the block lasts; it serves when the block is entered.

        Raises:
            ModelError: the core could not be made; the message says why.
        """
        with tempfile.TemporaryDirectory(prefix="fulcrum-") as folder:
            socket = Path(folder) / "core.sock"
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "engine.core_main",
                str(socket),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            core = cls(process, socket)
            try:
                settings = {"config": config_to_json(config), "progress": progress, "log_format": log_format}
                await core._hand_over(settings)
                yield core
            finally:
                await core.stop()

    async def _hand_over(self, settings: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            # Kept open from here on: the core ends when this pipe does, however we end.
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            pass  # it died at once; its silence below says so
        line = await self._process.stdout.readline()
        if not line:
            raise ModelError(f"the engine core ended with status {await self._process.wait()} while it started")
        error = json.loads(line)["error"]
        if error is not None:
            raise ModelError(error)
        self._serves = True

    async def wait(self) -> int:
        """Returns the exit status when the process has ended (negative: the signal that killed it)."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Ends the process: by the end of its standard input (SIGTERM while it starts), and SIGKILL after 10 s."""
        if self._process.returncode is not None:
            return
        if self._serves and self._process.stdin is not None:
            self._process.stdin.close()
        else:
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
        except TimeoutError:
            logger.warning("the engine core did not end within %g s: killing it", _STOP_SECONDS)
            self._process.kill()
            await self._process.wait()
