"""What the core does, in a line of its log every 10 s."""

import logging
import time
from typing import Final

from engine.core import EngineCore

logger = logging.getLogger(__name__)

_EVERY_SECONDS: Final = 10.0


class ThroughputLog:
    """A line every 10 s while busy; its rates are over the busy time alone."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._due = time.monotonic() + _EVERY_SECONDS
        self._busy = 0.0
        self._prefilled = self._generated = 0

    def tick(self, seconds: float) -> None:
        """Called after every turn, with how long it took."""
        self._busy += seconds
        now = time.monotonic()
        if now < self._due:
            return
        stats = self._core.stats()
        logger.info(
            "running %d, waiting %d, prefill %.0f tokens/s, decode %.0f tokens/s, KV in use %.1f%%, prefix hits %.1f%%",
            stats.running_sequences,
            stats.waiting_sequences,
            (stats.prefill_tokens - self._prefilled) / self._busy,
            (stats.generated_tokens - self._generated) / self._busy,
            100 * stats.used_pages / max(1, stats.total_pages),
            100 * stats.prefix_hit_tokens / max(1, stats.prefix_query_tokens),
        )
        self._due, self._busy = now + _EVERY_SECONDS, 0.0
        self._prefilled, self._generated = stats.prefill_tokens, stats.generated_tokens
