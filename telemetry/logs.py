"""The form of every process's log lines: text for people, or a JSON object a line for machines."""

import json
import logging
from datetime import UTC, datetime
from typing import Any

FORMATS = ("text", "json")


def configure(level: str, form: str, process: str) -> None:
    """Sends this process's log to standard error. Raises: ValueError for a level that is none."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(form, process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "huggingface_hub", "opentelemetry", "uvicorn"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))


def formatter(form: str, process: str) -> logging.Formatter:
    """One of FORMATS, for a process of this name."""
    if form == "json":
        return JsonFormatter(process)
    return logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s")


def about(**fields: object) -> dict[str, Any]:
    """The `extra` of a logging call, which JSON lines show as fields of their own; not those that are None or "-".

    request_id is the engine's name of a request, x_request_id its caller's.
    """
    return {"fields": {name: value for name, value in fields.items() if value not in (None, "-")}}


class JsonFormatter(logging.Formatter):
    """time (UTC), level, process, logger, message, the fields of `about`, and the traceback of an exception."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
