"""What hit rate this engine's prefix cache gives on a trace, without a model: scheduler and KV pool alone."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from engine.core import EngineCore
from engine.request import Request, RequestRejected, SamplingParams
from engine.scheduler import WATERMARK, Scheduler
from engine.step import Step, StepResult
from loadtest.records import LoadTestError
from loadtest.trace import GENERATED, Hits, TraceRequest, hit_fields
from loadtest.vllm_cache import vllm_hits


class NoModel:
    """A runner that computes nothing: every token is the same."""

    def launch(self, step: Step) -> StepResult:
        """The whole step."""
        return StepResult((GENERATED,) * len(step.samples))

    def collect(self, launched: StepResult) -> StepResult:
        """What `launch` brought."""
        return launched


def simulated_hits(
    requests: Iterable[TraceRequest],
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
    longest = 1 << 40  # neither window nor vocabulary bounds a run without a model
    policy: dict[str, Any] = {"look_ahead": 0, "watermark": 0} if as_vllm else {}
    scheduler = Scheduler(
        num_pages=num_pages - as_vllm,
        page_size=page_size,
        max_num_seqs=concurrency,
        max_num_batched_tokens=max_batched_tokens,
        max_model_len=longest,
        vocab_size=longest,
        eos_token_ids=(),
        **policy,
    )
    core, coming, live, added = EngineCore(scheduler, NoModel()), iter(requests), 0, 0
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


def simulate(
    requests: Sequence[TraceRequest],
    *,
    page_sizes: Sequence[int],
    pools: Sequence[int | None],
    concurrency: int,
    max_batched_tokens: int,
) -> list[dict[str, Any]]:
    """One row of JSON fields for each page size and pool (tokens; None: ample), with the references' rates beside ours.

    "same_policy_hit_rate" is ours with vLLM's policy of admission: what is left to differ is the accounting.

    Raises: LoadTestError when a request is larger than a pool.
    """
    prompts, rows = [request.prompt for request in requests], []
    loop = {"concurrency": concurrency, "max_batched_tokens": max_batched_tokens}
    for page_size in page_sizes:
        for pool in pools:
            num_pages = _ample(requests, page_size) if pool is None else pool // page_size
            pages: dict[str, Any] = {"num_pages": num_pages, "page_size": page_size, **loop}
            try:
                ours = simulated_hits(requests, **pages)
                same = simulated_hits(requests, as_vllm=True, **pages)
            except RequestRejected as error:
                raise LoadTestError(f"a pool of {pool} tokens is too small: {error}") from error
            reference = vllm_hits(requests, num_blocks=num_pages, block_size=page_size, **loop)
            rows.append(
                {"page_size": page_size, "pool_tokens": pool, "num_pages": num_pages}
                | hit_fields(ours, prompts, page_size, None if pool is None else num_pages)
                | {"same_policy_hit_rate": same.rate, "vllm_rules_hit_rate": reference.rate}
            )
    return rows


def _ample(requests: Sequence[TraceRequest], page_size: int) -> int:
    """Pages that hold every token of the trace, and what the scheduler keeps in reserve."""
    pages = sum(-(-(len(request.prompt) + request.output_len) // page_size) for request in requests)
    return int(pages * (1 + 2 * WATERMARK)) + 2
