"""What hit rate this engine's prefix cache gives on a trace, without a model: scheduler and KV pool alone."""

from collections.abc import Iterable
from dataclasses import replace

from engine.core import EngineCore
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.step import Step, StepResult
from loadtest.trace import GENERATED, Hits, TraceRequest


class _NoModel:
    """A runner that computes nothing: every token is the same."""

    def launch(self, step: Step) -> StepResult:
        return StepResult((GENERATED,) * len(step.samples))

    def collect(self, launched: StepResult) -> StepResult:
        return launched


def simulated_hits(
    requests: Iterable[TraceRequest], *, num_pages: int, page_size: int, concurrency: int, max_batched_tokens: int
) -> Hits:
    """Replays a trace, `concurrency` requests at a time, the next one as soon as one has ended.

    Raises: RequestRejected when a request is larger than the pool.
    """
    longest = 1 << 40  # neither window nor vocabulary bounds a run without a model
    scheduler = Scheduler(
        num_pages=num_pages,
        page_size=page_size,
        max_num_seqs=concurrency,
        max_num_batched_tokens=max_batched_tokens,
        max_model_len=longest,
        vocab_size=longest,
        eos_token_ids=(),
    )
    core, coming, live, added = EngineCore(scheduler, _NoModel()), iter(requests), 0, 0
    params = SamplingParams(temperature=0.0, seed=0)
    while True:
        while live < concurrency and (request := next(coming, None)) is not None:
            scheduler.add(Request(str(added), request.prompt, replace(params, max_tokens=request.output_len)))
            added, live = added + 1, live + 1
        if not live:
            break
        live -= sum(update.finish is not None for update in core.turn().updates)
    scheduler.check_integrity()
    return Hits(scheduler.stats.prefix_query_tokens, scheduler.stats.prefix_hit_tokens)
