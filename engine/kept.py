"""A process that is started again when it dies, later each time. Knows nothing of what it does."""

import asyncio
import logging
import signal
import time
from abc import ABC, abstractmethod
from typing import NoReturn

from engine.model.errors import ModelError

logger = logging.getLogger(__name__)

# Before a process that died is started again.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
# One that has lived so long had not died of how it was started.
_STEADY_SECONDS = 60.0


class ProcessDied(Exception):
    """A process has ended that should not have, and is not started again.

    Attributes:
        status: its exit status (negative: the signal that killed it).
    """

    def __init__(self, name: str, status: int) -> None:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        super().__init__(f"the {name} {how}")
        self.status = status


class Kept(ABC):
    """A process that is kept from `keep` until `let_go`.

    Args:
        name: what it is, for people.
        restarts: after so many deaths, none of which it survived by a minute, it is not started again.
        speaks: when it ends by itself it has said why, and is not started again either.
    """

    def __init__(self, name: str, restarts: int, *, speaks: bool = False) -> None:
        self.name = name
        self.serves = False
        self._restarts = restarts
        self._speaks = speaks
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[NoReturn] | None = None

    @abstractmethod
    async def launch(self) -> None:
        """Sets `_process`, and returns when it serves. Raises ProcessDied, ModelError, OSError: it never does."""

    async def keep(self) -> None:
        """Starts it, and from then on again whenever it dies. Raises what `launch` does, where that fails now."""
        await self.launch()
        self.serves = True
        self._keeping = asyncio.create_task(self._keep())

    async def died(self) -> NoReturn:
        """Raises ProcessDied when it is not started again; never returns."""
        assert self._keeping is not None
        await asyncio.shield(self._keeping)
        raise AssertionError

    async def let_go(self) -> None:
        """From now on it may end."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    @property
    def pid(self) -> int:
        """Process id of the present process."""
        assert self._process is not None
        return self._process.pid

    async def wait(self) -> int:
        """Returns the exit status when the present process has ended (negative: the signal that killed it)."""
        assert self._process is not None
        return await self._process.wait()

    async def _keep(self) -> NoReturn:
        deaths = 0
        while True:
            began, status = time.monotonic(), await self.wait()
            deaths = 1 if time.monotonic() - began >= _STEADY_SECONDS else deaths + 1
            death = ProcessDied(self.name, status)
            if deaths > self._restarts or (self._speaks and self.serves and status >= 0):
                raise death
            pause = min(_FIRST_PAUSE * 2 ** (deaths - 1), _LONGEST_PAUSE)
            logger.error("%s: it is started again in %g s", death, pause)
            await asyncio.sleep(pause)
            self.serves = False
            try:
                await self.launch()
            except (ModelError, ProcessDied, OSError) as error:
                logger.error("the %s could not be started again: %s", self.name, error)
            else:
                self.serves = True
                logger.warning("the %s serves again", self.name)
