"""Starts and ends the core process. Imports no torch: the parent serves the network and must stay light."""

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.kept import Kept
from engine.model.errors import ModelError
from engine.own_folder import OwnFolder

logger = logging.getLogger(__name__)

_STOP_SECONDS = 10.0
# How often torch's threads look for each other before they sleep. Those that only look keep a core from the one that
# they wait for, beside another process, and those that only sleep are slow to wake: docs/benchmarks.md has both.
_SPINS = {"GOMP_SPINCOUNT": "1000"}


def config_to_json(config: EngineConfig) -> dict[str, Any]:
    """The settings as JSON values."""
    values: dict[str, Any] = msgspec.to_builtins(config, enc_hook=str)
    return values


def config_from_json(values: Mapping[str, Any]) -> EngineConfig:
    """The reverse of `config_to_json`. Raises msgspec.ValidationError."""
    return msgspec.convert(values, EngineConfig, dec_hook=lambda kind, value: kind(value))


class CoreProcess(Kept):
    """A running core process; one that dies is started again at the same socket.

    Attributes:
        socket: the Unix socket that it serves.
    """

    def __init__(self, socket: Path, settings: Mapping[str, Any], restarts: int) -> None:
        super().__init__("engine core", restarts)
        self.socket = socket
        self._settings = settings

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls,
        config: EngineConfig,
        *,
        progress: bool = True,
        log_format: str = "text",
        restarts: int = 0,
        folder: Path | None = None,
    ) -> AsyncIterator["CoreProcess"]:
        """Keeps a core process for as long as the block lasts; it serves when the block is entered.

        Args:
            restarts: after so many deaths, none of which the core survived by a minute, it is not started again.
            folder: where its socket is made (None: in one of its own).

        Raises:
            ModelError: the core could not be made; the message says why.
        """
        settings = {"config": config_to_json(config), "progress": progress, "log_format": log_format}
        with OwnFolder() if folder is None else contextlib.nullcontext(str(folder)) as name:
            core = cls(Path(name) / "core.sock", settings, restarts)
            try:
                await core.keep()
                yield core
            finally:
                await core.stop()

    async def launch(self) -> None:
        """Starts the process, and waits for its answer. Raises ModelError."""
        self.socket.unlink(missing_ok=True)  # a killed core leaves it behind
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "engine.core_main", str(self.socket)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=({} if "OMP_WAIT_POLICY" in os.environ else _SPINS) | os.environ,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            # Kept open from here on: the core ends when this pipe does, however we end.
            process.stdin.write(json.dumps(self._settings).encode() + b"\n")
            await process.stdin.drain()
        except (ConnectionError, RuntimeError):  # the latter from uvloop, where the pipe has been closed already
            pass  # it died at once; its silence below says so
        line = await process.stdout.readline()
        if not line:
            raise ModelError(f"the engine core ended with status {await process.wait()} while it started")
        error = json.loads(line)["error"]
        if error is not None:
            raise ModelError(error)

    async def stop(self) -> None:
        """Ends the process: by the end of its standard input (SIGTERM while it starts), and SIGKILL after 10 s."""
        await self.let_go()
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        if not self.serves:  # it looks at its input when it does, and at SIGTERM no longer
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        except TimeoutError:
            logger.warning("the engine core did not end within %g s: killing it", _STOP_SECONDS)
            process.kill()
            await process.wait()
