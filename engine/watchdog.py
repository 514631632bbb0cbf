"""Ends a process whose work does not come to an end, and says where it stands: a device may hang for ever."""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

EXIT_STATUS: Final = 75
"""What the process ends with: EX_TEMPFAIL of sysexits.h."""


class Watchdog:
    """Watches one thread's pieces of work, each of which is a `with` block.

    Args:
        seconds: that a piece of work may take.
        describe: what is being worked on, asked when that has passed.
    """

    def __init__(self, seconds: float, describe: Callable[[], str]) -> None:
        self._seconds = seconds
        self._describe = describe
        self._began: float | None = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._began = None

    def _watch(self) -> None:
        pause, looks = min(1.0, self._seconds / 4), 0
        began: float | None = None
        while True:
            time.sleep(pause)
            before, began = began, self._began
            # Not by the clock, which goes on while the whole process is stopped.
            looks = looks + 1 if began is not None and began == before else 0
            if looks * pause >= self._seconds:
                try:
                    logger.critical(
                        "no progress for %g s: %s. The stacks of all threads:", self._seconds, self._describe()
                    )
                    faulthandler.dump_traceback(all_threads=True)
                finally:  # whatever cannot be said; nothing of a hanging thread can be unwound
                    os._exit(EXIT_STATUS)
