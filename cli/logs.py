"""Where every process's log goes: standard error."""

import logging

from telemetry.logs import formatter


def configure(level: str, form: str, process: str) -> None:
    """Sends this process's log to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(form, process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
