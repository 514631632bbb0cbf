"""Starts and ends the core process. Imports no torch: the parent serves the network and must stay light."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from engine.config import EngineConfig
from engine.model.errors import ModelError
from engine.own_folder import OwnFolder

logger = logging.getLogger(__name__)

_STOP_SECONDS = 10.0
# Before a core that died is started again.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
# One that has lived so long had not died of how it was started.
_STEADY_SECONDS = 60.0


def config_to_json(config: EngineConfig) -> dict[str, Any]:
    """The settings as JSON values."""
    return dataclasses.asdict(config) | {"model": str(config.model)}


def config_from_json(values: Mapping[str, Any]) -> EngineConfig:
    """The reverse of `config_to_json`. Raises ValueError, TypeError."""
    values = dict(values)
    tuples = {name: tuple(values[name]) for name in ("logits_processors", "speculative_window")}
    return EngineConfig(**values | tuples | {"model": Path(values["model"])})


class CoreEnded(Exception):
    """The core process has ended, and is not started again.

    Attributes:
        status: its exit status (negative: the signal that killed it).
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"the engine core ended with status {status}")
        self.status = status


class CoreProcess:
    """A running core process; one that dies is started again at the same socket.

    Attributes:
        socket: the Unix socket that it serves.
    """

    def __init__(self, socket: Path, settings: Mapping[str, Any], restarts: int) -> None:
        self.socket = socket
        self._settings = settings
        self._restarts = restarts
        self._process: asyncio.subprocess.Process | None = None
        self._serves = False

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls, config: EngineConfig, *, progress: bool = True, log_format: str = "text", restarts: int = 0
    ) -> AsyncIterator["CoreProcess"]:
        """Keeps a core process for as long as the block lasts; it serves when the block is entered.

        Args:
            restarts: after so many deaths, none of which the core survived by a minute, it is not started again.

        Raises:
            ModelError: the core could not be made; the message says why.
        """
        settings = {"config": config_to_json(config), "progress": progress, "log_format": log_format}
        with OwnFolder() as folder:
            core = cls(Path(folder) / "core.sock", settings, restarts)
            try:
                await core._launch()
                yield core
            finally:
                await core.stop()

    @property
    def pid(self) -> int:
        """Process id of the present process."""
        assert self._process is not None
        return self._process.pid

    async def keep(self) -> NoReturn:
        """Starts it again whenever it dies, later each time. Raises CoreEnded when that has happened too often."""
        deaths = 0
        while True:
            began, status = time.monotonic(), await self.wait()
            if time.monotonic() - began >= _STEADY_SECONDS:
                deaths = 0
            deaths += 1
            if deaths > self._restarts:
                raise CoreEnded(status)
            pause = min(_FIRST_PAUSE * 2 ** (deaths - 1), _LONGEST_PAUSE)
            logger.error("the engine core ended with status %d: it is started again in %g s", status, pause)
            await asyncio.sleep(pause)
            try:
                await self._launch()
            except ModelError as error:
                logger.error("the engine core could not be started again: %s", error)

    async def _launch(self) -> None:
        self.socket.unlink(missing_ok=True)  # a killed core leaves it behind
        self._serves = False
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "engine.core_main", str(self.socket)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
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
        self._serves = True

    async def wait(self) -> int:
        """Returns the exit status when the present process has ended (negative: the signal that killed it)."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Ends the process: by the end of its standard input (SIGTERM while it starts), and SIGKILL after 10 s."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        if self._serves and process.stdin is not None:
            process.stdin.close()
        else:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        except TimeoutError:
            logger.warning("the engine core did not end within %g s: killing it", _STOP_SECONDS)
            process.kill()
            await process.wait()
