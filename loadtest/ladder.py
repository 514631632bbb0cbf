"""The ladder: one load, run with one idea of serving more at each rung, so that each idea's worth can be read off.

Drives an engine core in this process: knows no server, no text and no tables. All rungs have the same weights, the same
KV pool and the same requests, all sent at once. As in life, the engine is told a cap for the answers' lengths, and not
the lengths themselves: an answer is ended from outside, as by a stop string.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from engine.build import build_core, new_scheduler
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import CoreInfo
from engine.request import FinishReason, Request, RequestRejected, SamplingParams
from engine.scheduler import Scheduler
from loadtest.metrics import metrics
from loadtest.records import LoadTestError, Record

Switches = dict[str, Any]
"""Fields of EngineConfig."""

BASE: Switches = {
    "scheduler": "static",
    "reserve_full_length": True,
    "prefix_cache": False,
    "chunked_prefill": False,
    "cuda_graphs": False,
    "overlap": False,
}
"""The first rung. Each further one turns one switch."""

_STEPS: tuple[tuple[str, Switches], ...] = (
    ("static batching", {}),
    ("continuous batching, KV reserved at full length", {"scheduler": "continuous"}),
    ("+ paged allocation", {"reserve_full_length": False}),
    ("+ prefix cache", {"prefix_cache": True}),
    ("+ chunked prefill", {"chunked_prefill": True}),
    ("+ CUDA graphs", {"cuda_graphs": True}),
    ("+ overlap", {"overlap": True}),
)
_OF_THE_RUNNER = ("cuda_graphs", "overlap")  # the others are the scheduler's alone

_FIGURES = ("request_throughput", "output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")

# Deciles (0 to 100%) of 519 prompts and answers of ShareGPT, in tokens of Qwen2.5: tests/data/lengths_sharegpt.csv.
_INPUT_DECILES = (4, 10, 17, 24, 45, 96, 212, 314, 421, 616, 998)
_OUTPUT_DECILES = (4, 12, 21, 36, 83, 141, 219, 284, 368, 525, 800)


@dataclass(frozen=True, slots=True)
class Rung:
    """A name, and all the switches as they stand on this rung."""

    name: str
    switches: Switches

    @property
    def of_the_runner(self) -> tuple[Any, ...]:
        """Rungs that have these in common share an engine."""
        return tuple(self.switches[name] for name in _OF_THE_RUNNER)


@dataclass(frozen=True, slots=True)
class Job:
    """A request: prompt ids, and after how many tokens its answer ends."""

    prompt: tuple[int, ...]
    output_len: int


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of every rung. Lengths are in tokens.

    Attributes:
        count: requests.
        max_input_len: cuts the drawn lengths of the prompts' own part.
        max_output_len: cuts the drawn lengths of the answers, and is the max_tokens of every request.
        prefix_len, prefix_groups: every prompt begins with one of so many common prefixes (length 0: none).
    """

    count: int
    max_input_len: int
    max_output_len: int
    prefix_len: int
    prefix_groups: int
    seed: int

    def jobs(self, vocab_size: int) -> list[Job]:
        """The requests, of random ids. The same load and vocabulary give the same requests."""
        draw = random.Random(self.seed)

        def ids(count: int) -> list[int]:
            return [draw.randrange(vocab_size) for _ in range(count)]

        prefixes = [ids(self.prefix_len) for _ in range(self.prefix_groups)]
        return [
            Job(
                (*draw.choice(prefixes), *ids(min(_drawn(draw, _INPUT_DECILES), self.max_input_len))),
                min(_drawn(draw, _OUTPUT_DECILES), self.max_output_len),
            )
            for _ in range(self.count)
        ]


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of all jobs on one rung: figures by name, and the answers."""

    figures: Mapping[str, float]
    answers: list[list[int]]


def rungs() -> list[Rung]:
    """All rungs in order, each with the switches of those below it."""
    found: list[Rung] = []
    for name, turned in _STEPS:
        found.append(Rung(name, (found[-1].switches if found else BASE) | turned))
    return found


def climb(
    config: EngineConfig, load: Load, *, repeat: int, kv_tokens: int | None, report: Callable[[str], object]
) -> dict[str, Any]:
    """Runs the load on every rung that the device has, `repeat` times, rung after rung before the next repetition.

    (On CUDA the rungs with other runner switches need an engine of their own, and follow when the others are done.)

    Args:
        config: everything but the switches.
        kv_tokens: tokens of KV that all rungs may use; None: what memory_budget gives.
        report: is told what is being run.

    Returns:
        fields of a result file: the load, `rungs` with the median of each figure over the repetitions and the spread of
        the throughput, `left_out` with those that the device lacks.

    Raises:
        LoadTestError: the requests do not fit the engine.
        ModelError: the model cannot be served as asked.
    """
    ladder, left = rungs(), rungs()
    answers: list[list[int]] = []
    passes: dict[str, list[Pass]] = {}
    pools: dict[str, int] = {}
    while left:
        group = [rung for rung in left if rung.of_the_runner == left[0].of_the_runner]
        left = left[len(group) :]
        core, info = build_core(replace(config, **group[-1].switches), progress=False)
        pages = _pages(info, kv_tokens)
        jobs = load.jobs(info.vocab_size)
        _run(core, _scheduler(config, group[-1], info, pages), jobs[: -(-load.count // 8)], load)  # warms up
        for number in range(repeat):
            for rung in group:
                report(f"{rung.name}, {number + 1} of {repeat}")
                one = _run(core, _scheduler(config, rung, info, pages), jobs, load)
                answers = answers or one.answers
                passes.setdefault(rung.name, []).append(one)
                pools[rung.name] = pages * info.page_size
        del core
        _free_device(info)
        if info.device == "cpu":
            break
    return {
        "kind": "ladder",
        "num_prompts": load.count,
        "max_input_len": load.max_input_len,
        "max_output_len": load.max_output_len,
        "prefix_len": load.prefix_len,
        "prefix_groups": load.prefix_groups,
        "seed": load.seed,
        "total_input_tokens": sum(len(job.prompt) for job in jobs),
        "total_output_tokens": sum(job.output_len for job in jobs),
        "repeat": repeat,
        "dtype": info.dtype,
        "device": info.device,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "rungs": _rows([rung for rung in ladder if rung.name in passes], passes, answers, pools),
        "left_out": [rung.name for rung in ladder if rung.name not in passes],
    }


def _rows(
    ladder: Sequence[Rung],
    passes: Mapping[str, Sequence[Pass]],
    answers: Sequence[list[int]],
    pools: Mapping[str, int],
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for rung in ladder:
        runs = passes[rung.name]
        row: dict[str, Any] = {"rung": rung.name, "switches": rung.switches, "kv_tokens": pools[rung.name]}
        row |= {name: statistics.median(run.figures[name] for run in runs) for name in runs[0].figures}
        rates = [run.figures["request_throughput"] for run in runs]
        row |= {"request_throughput_min": min(rates), "request_throughput_max": max(rates)}
        rate = row["request_throughput"]
        row["factor_before"] = rate / rows[-1]["request_throughput"] if rows else 1.0
        row["factor_first"] = rate / rows[0]["request_throughput"] if rows else 1.0
        # In bfloat16 another batch may flip a token; in float32 all are equal.
        row["equal_answers"] = min(
            sum(one == other for one, other in zip(run.answers, answers, strict=True)) for run in runs
        )
        rows.append(row)
    return rows


def _run(core: EngineCore, scheduler: Scheduler, jobs: Sequence[Job], load: Load) -> Pass:
    """All jobs at once, to their end."""
    core.scheduler = scheduler
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=load.max_output_len, ignore_eos=True)
    try:
        for number, job in enumerate(jobs):
            scheduler.add(Request(str(number), job.prompt, params))
    except RequestRejected as error:
        raise LoadTestError(f"the engine cannot take the load: {error}") from error
    answers: list[list[int]] = [[] for _ in jobs]
    times: list[list[float]] = [[] for _ in jobs]
    peak = 0
    began = time.perf_counter()
    while core.has_work:
        turn = core.turn()
        now = time.perf_counter()
        finished = sum(update.finish is not None for update in turn.updates)
        peak = max(peak, scheduler.num_running + finished)
        for update in turn.updates:
            if update.finish is FinishReason.ERROR:
                raise LoadTestError(f"a request failed: {update.message}")
            number = int(update.request_id)
            answers[number] += update.tokens
            times[number].append(now)
            if update.finish is None and len(answers[number]) >= jobs[number].output_len:
                scheduler.end_sequence(update.request_id, 0)
    duration = time.perf_counter() - began
    records = [
        Record(
            chain=number,
            ttft=at[0] - began,
            itls=[later - earlier for earlier, later in pairwise(at)],
            latency=at[-1] - began,
            prompt_tokens=len(job.prompt),
            output_tokens=len(answer),
        )
        for number, (job, at, answer) in enumerate(zip(jobs, times, answers, strict=True))
    ]
    fields, stats = metrics(records, duration, (50, 99)), scheduler.stats
    figures = {
        **{name: fields[name] for name in _FIGURES},
        "peak_running": peak,
        "steps": stats.steps,
        "preemptions": stats.preemptions,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
    }
    return Pass(figures, answers)


def _scheduler(config: EngineConfig, rung: Rung, info: CoreInfo, pages: int) -> Scheduler:
    """A fresh scheduler for an engine that is there already: its cache is empty, its counters are 0."""
    pool = msgspec.structs.replace(info, num_pages=pages)
    return new_scheduler(replace(config, **rung.switches, seed=0), pool)


def _pages(info: CoreInfo, kv_tokens: int | None) -> int:
    pages = info.num_pages if kv_tokens is None else kv_tokens // info.page_size
    if not 1 <= pages <= info.num_pages:
        raise LoadTestError(f"{kv_tokens} tokens of KV asked for; the pool holds {info.num_pages * info.page_size}")
    return pages


def _free_device(info: CoreInfo) -> None:
    """Gives back an engine's memory before the next engine measures what is free."""
    gc.collect()
    if info.device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()


def _drawn(draw: random.Random, deciles: Sequence[int]) -> int:
    """A length of the distribution with these deciles, evenly spread between them."""
    return round(float(np.interp(draw.random(), np.linspace(0, 1, len(deciles)), deciles)))
