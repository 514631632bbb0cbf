"""An engine core without a model: the real scheduler behind the real socket, and a runner that draws random tokens.

`python -m loadtest.frontend_core SOCKET`, started by `loadtest.frontend` to measure what surrounds the model. Standard
input brings the settings as one line of JSON and then stays open: its end is the process's. Standard output carries one
line when the socket listens.
"""

import gc
import json
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from engine.core import EngineCore
from engine.core_server import CoreServer
from engine.messages import CoreInfo
from engine.scheduler import Scheduler
from engine.step import Step, StepResult
from loadtest.tokens import COMMON_IDS

_POOL = 1 << 18
# So many different tokens, because most text is made of few; a service looks each up for the first time once.
_DISTINCT = 4096


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What the rig's core is like.

    Attributes:
        rows: most sequences in a step.
        step_seconds: shortest time from one step to the next, as if a device computed meanwhile.
        max_model_len: tokens of prompt and completion.
        vocab_size: of the tokenizer; only ordinary tokens of it are drawn.
    """

    rows: int
    step_seconds: float
    max_model_len: int
    vocab_size: int


class RandomRunner:
    """Draws tokens, and takes the time that it is told to take."""

    def __init__(self, settings: CoreSettings) -> None:
        ids = range(COMMON_IDS.start, min(COMMON_IDS.stop, settings.vocab_size))
        self._tokens = tuple(random.Random(0).choices(ids[:: max(1, len(ids) // _DISTINCT)], k=_POOL))
        self._seconds = settings.step_seconds
        self._at = 0
        self._due = 0.0

    def launch(self, step: Step) -> Step:
        """Nothing is computed."""
        self._due = max(time.monotonic(), self._due + self._seconds)
        return step

    def collect(self, launched: Step) -> StepResult:
        """One token for each sample, when the step's time has passed."""
        count = len(launched.samples)
        if self._at + count > _POOL:
            self._at = 0
        tokens = self._tokens[self._at : self._at + count]
        self._at += count
        time.sleep(max(0.0, self._due - time.monotonic()))
        return StepResult(tokens)


def main() -> None:
    """Serves until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = CoreSettings(**json.loads(sys.stdin.buffer.readline()))
    page_size = 16
    pages = settings.rows * -(-settings.max_model_len // page_size)
    budget = max(8192, settings.rows)
    scheduler = Scheduler(
        num_pages=pages,
        page_size=page_size,
        max_num_seqs=settings.rows,
        max_num_batched_tokens=budget,
        max_model_len=settings.max_model_len,
        vocab_size=settings.vocab_size,
        eos_token_ids=[0],
    )
    info = CoreInfo(
        architecture="Random",
        vocab_size=settings.vocab_size,
        max_model_len=settings.max_model_len,
        eos_token_ids=[0],
        dtype="none",
        device="none",
        page_size=page_size,
        num_pages=pages,
        max_num_seqs=settings.rows,
        max_num_batched_tokens=budget,
        version="0",
    )
    core = EngineCore(scheduler, RandomRunner(settings))
    server = CoreServer(core, info, Path(sys.argv[1]), lifeline=sys.stdin.buffer)
    gc.collect()
    gc.freeze()
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    server.run()


if __name__ == "__main__":
    main()
