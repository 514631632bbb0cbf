"""What hit rate this engine's prefix cache gives on a trace, without a model: scheduler and KV pool alone."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import CoreInfo
from engine.request import Request, RequestRejected, SamplingParams
from engine.scheduler import WATERMARK, Scheduler
from engine.step import Step, StepResult
from loadtest.records import Job, LoadTestError
from loadtest.trace import GENERATED, Hits, hit_row
from loadtest.vllm_cache import vllm_hits

_ANY = 1 << 40  # neither window nor vocabulary bounds a run without a model


class NoModel:
    """A runner that computes nothing: every token is the same."""

    def launch(self, step: Step) -> StepResult:
        """The whole step."""
        return StepResult((GENERATED,) * len(step.samples))

    def collect(self, launched: StepResult) -> StepResult:
        """What `launch` brought."""
        return launched


def simulated_hits(
    requests: Iterable[Job],
    *,
    num_pages: int,
    page_size: int,
    concurrency: int,
    max_batched_tokens: int,
    as_vllm: bool = False,
) -> Hits:
    """Replays a trace, `concurrency` requests at a time, the next one as soon as one has ended.

    Args:
        as_vllm: with its policy: strictly first come, no pages to spare, one page of the pool reserved.

    Raises: RequestRejected when a request is larger than the pool.
    """
    config = EngineConfig(Path(), look_ahead=0) if as_vllm else EngineConfig(Path())
    info = CoreInfo(_ANY, _ANY, [], page_size, num_pages - as_vllm, concurrency, max_batched_tokens)
    scheduler = Scheduler(config, info, watermark=0 if as_vllm else WATERMARK)
    core, params, coming = EngineCore(scheduler, NoModel()), SamplingParams(temperature=0.0, seed=0), iter(requests)
    live = added = 0
    while True:
        while live < concurrency and (request := next(coming, None)) is not None:
            scheduler.add(Request(str(added), request.prompt, replace(params, max_tokens=request.output_len)))
            added, live = added + 1, live + 1
        if not live:
            break
        live -= sum(update.finish is not None for update in core.turn().updates)
    scheduler.check_integrity()
    return Hits(scheduler.stats.prefix_query_tokens, scheduler.stats.prefix_hit_tokens)


def simulate(
    requests: Sequence[Job], page_sizes: Sequence[int], pools: Sequence[int | None], **loop: int
) -> list[dict[str, Any]]:
    """One row of JSON fields for each page size and pool (tokens; None: ample), with the references' rates beside ours.

    "same_policy_hit_rate" is ours with vLLM's policy of admission: what is left to differ is the accounting.

    Args:
        loop: concurrency and max_batched_tokens.

    Raises: LoadTestError when a request is larger than a pool.
    """
    prompts, rows = [request.prompt for request in requests], []
    for page_size in page_sizes:
        for pool in pools:
            pages = {"num_pages": _ample(requests, page_size) if pool is None else pool // page_size}
            pages |= {"page_size": page_size, **loop}
            try:
                ours, same = (simulated_hits(requests, as_vllm=as_vllm, **pages) for as_vllm in (False, True))
            except RequestRejected as error:
                raise LoadTestError(f"a pool of {pool} tokens is too small: {error}") from error
            theirs = vllm_hits(requests, **pages)
            rates = {"same_policy_hit_rate": same.rate, "vllm_rules_hit_rate": theirs.rate}
            rows.append(hit_row(ours, prompts, page_size, pool) | rates)
    return rows


def _ample(requests: Sequence[Job], page_size: int) -> int:
    """Pages that hold every token of the trace, and what the scheduler keeps in reserve."""
    pages = sum(-(-(len(request.prompt) + request.output_len) // page_size) for request in requests)
    return int(pages * (1 + 2 * WATERMARK)) + 2
