"""One form for every process's log lines, on standard error: time, level, process, logger, message."""

import logging


def configure(level: str, process: str) -> None:
    """Sends this process's log to standard error."""
    form = f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=form, force=True)
    for noisy in ("httpx", "httpcore", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
