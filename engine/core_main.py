"""The core process: `python -m engine.core_main SOCKET`, started by `engine.process`.

Standard input brings the settings as one line of JSON and then stays open: its end means that the parent has gone.
Standard output carries one line of JSON when the socket listens, or why it never will.
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

from engine.model.errors import ModelError
from engine.process import config_from_json
from engine.watchdog import Watchdog
from telemetry.garbage import collect_rarely
from telemetry.logs import formatter

logger = logging.getLogger(__name__)


def main() -> int:
    """Serves until standard input ends. Returns the exit status."""
    # Ctrl-C goes to the whole process group; the parent decides when the core ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Only now: to import torch takes seconds.
    from engine.build import build_core
    from engine.core_server import CoreServer

    # The reply must be alone on its pipe: whatever a library prints goes to standard error.
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.buffer.readline())
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(settings["log_format"], "core"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        config = config_from_json(settings["config"])
        core, info = build_core(config, progress=settings["progress"])
    except (ModelError, ValueError) as error:
        _answer(reply, error=str(error))
        return 1
    except (RuntimeError, MemoryError) as error:  # torch, above all for want of memory, or a user's logits processor
        logger.exception("the engine could not be made")
        _answer(reply, error=f"{type(error).__name__}: {error}")
        return 1
    watchdog = Watchdog(config.step_timeout, core.describe) if config.step_timeout else None
    server = CoreServer(core, info, Path(sys.argv[1]), lifeline=sys.stdin.buffer, watchdog=watchdog)
    # A service manager sends it to all processes at once: the parent drains first, and needs the core for that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    collect_rarely()
    _answer(reply, error=None)
    server.run()
    return 0


def _answer(reply: TextIO, *, error: str | None) -> None:
    reply.write(json.dumps({"error": error}) + "\n")
    reply.close()


if __name__ == "__main__":
    sys.exit(main())
