"""The ladder: one load, run with one idea of serving more at each rung, so that each idea's worth can be read off.

Drives an engine core in this process: knows no server and no text. All rungs have the same weights, the same
KV pool and the same requests, all sent at once. As in life, the engine is told a cap for the answers' lengths, and not
the lengths themselves: an answer is ended from outside, as by a stop string.
"""

import gc
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, groupby
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
from loadtest.offline import turns
from loadtest.records import Fields, Job, LoadTestError, Record
from loadtest.tables import medians

Switches = dict[str, Any]
"""Fields of EngineConfig."""

_STATIC: Switches = {
    "scheduler": "static",
    "reserve_full_length": True,
    "prefix_cache": False,
    "chunked_prefill": False,
    "cuda_graphs": False,
    "overlap": False,
}
_TURNED: dict[str, Switches] = {
    "static batching": _STATIC,
    "continuous batching, KV reserved at full length": {"scheduler": "continuous"},
    "+ paged allocation": {"reserve_full_length": False},
    "+ prefix cache": {"prefix_cache": True},
    "+ chunked prefill": {"chunked_prefill": True},
    "+ CUDA graphs": {"cuda_graphs": True},
    "+ overlap": {"overlap": True},
}
RUNGS: dict[str, Switches] = dict(zip(_TURNED, accumulate(_TURNED.values(), operator.or_), strict=True))
"""All rungs in order, each with the switches of those below it and one more."""

_FIGURES = ("request_throughput", "output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")

# Deciles (0 to 100%) of 519 prompts and answers of ShareGPT, in tokens of Qwen2.5: tests/data/lengths_sharegpt.csv.
_INPUT_DECILES = (4, 10, 17, 24, 45, 96, 212, 314, 421, 616, 998)
_OUTPUT_DECILES = (4, 12, 21, 36, 83, 141, 219, 284, 368, 525, 800)


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of every rung. Lengths are in tokens."""

    num_prompts: int
    max_input_len: int  # cuts the drawn lengths of the prompts' own part
    max_output_len: int  # cuts the drawn lengths of the answers, and is the max_tokens of every request
    prefix_len: int  # of common prefixes, one of which each prompt begins with
    prefix_groups: int  # how many of these there are
    seed: int

    def jobs(self, vocab_size: int) -> list[Job]:
        """The requests, of random ids. The same load and vocabulary give the same requests."""
        draw = random.Random(self.seed)

        def ids(count: int) -> list[int]:
            return [draw.randrange(vocab_size) for _ in range(count)]

        def length(deciles: Sequence[int]) -> int:
            """Of the distribution with these deciles, evenly spread between them."""
            return round(float(np.interp(draw.random(), np.linspace(0, 1, len(deciles)), deciles)))

        prefixes = [ids(self.prefix_len) for _ in range(self.prefix_groups)]
        return [
            Job(
                (*draw.choice(prefixes), *ids(min(length(_INPUT_DECILES), self.max_input_len))),
                min(length(_OUTPUT_DECILES), self.max_output_len),
            )
            for _ in range(self.num_prompts)
        ]


def climb(
    config: EngineConfig, load: Load, *, repeat: int, kv_tokens: int | None, report: Callable[[str], object]
) -> Fields:
    """Runs the load on every rung that the device has, `repeat` times, rung after rung before the next repetition.

    (On CUDA the rungs with other graphs or overlap need an engine of their own, and follow when the others are done.)

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
    first: list[list[int]] = []
    runs: dict[str, list[Fields]] = {}
    for _, rungs in groupby(RUNGS, lambda name: (RUNGS[name]["cuda_graphs"], RUNGS[name]["overlap"])):
        group = list(rungs)
        core, info = build_core(replace(config, **RUNGS[group[-1]]), progress=False)
        pages = info.num_pages if kv_tokens is None else kv_tokens // info.page_size
        if not 1 <= pages <= info.num_pages:
            raise LoadTestError(f"{kv_tokens} tokens of KV asked for; the pool holds {info.num_pages * info.page_size}")
        jobs = load.jobs(info.vocab_size)
        run(core, _scheduler(config, group[-1], info, pages), jobs[: -(-load.num_prompts // 8)], load)  # warms up
        for number in range(repeat):
            for name in group:
                report(f"{name}, {number + 1} of {repeat}")
                figures, answers = run(core, _scheduler(config, name, info, pages), jobs, load)
                first = first or answers
                # In bfloat16 another batch may flip a token; in float32 all are equal.
                equal = sum(one == other for one, other in zip(answers, first, strict=True))
                more = {"equal_answers": equal, "kv_tokens": pages * info.page_size}
                runs.setdefault(name, []).append({**figures, **more})
        del core
        gc.collect()  # so that the next engine finds the device's memory free
        if info.device == "cpu":
            break
        import torch

        torch.cuda.empty_cache()
    return {
        "kind": "ladder",
        **asdict(load),
        "total_input_tokens": sum(len(job.prompt) for job in jobs),
        "total_output_tokens": sum(job.output_len for job in jobs),
        "repeat": repeat,
        "dtype": info.dtype,
        "device": info.device,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "rungs": _rows(runs),
        "left_out": [name for name in RUNGS if name not in runs],
    }


def _rows(runs: Mapping[str, Sequence[Fields]]) -> list[Fields]:
    rows: list[Fields] = []
    for rung, passes in runs.items():
        row: Fields = {"rung": rung, "switches": RUNGS[rung]}
        row |= medians(passes, list(passes[0]))
        row |= {name: min(one[name] for one in passes) for name in ("equal_answers", "kv_tokens")}
        rates = [one["request_throughput"] for one in passes]
        row |= {"request_throughput_min": min(rates), "request_throughput_max": max(rates)}
        for name, other in (("factor_before", rows[-1:]), ("factor_first", rows[:1])):
            row[name] = row["request_throughput"] / other[0]["request_throughput"] if other else 1.0
        rows.append(row)
    return rows


def run(core: EngineCore, scheduler: Scheduler, jobs: Sequence[Job], load: Load) -> tuple[Fields, list[list[int]]]:
    """All jobs at once, to their end: figures, and the answers. Raises: LoadTestError."""
    core.scheduler = scheduler
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=load.max_output_len, ignore_eos=True)
    answers: list[list[int]] = [[] for _ in jobs]
    times: list[list[float]] = [[] for _ in jobs]
    peak, now = 0, 0.0
    try:
        for (now, _), updates in turns(core, [Request(str(n), job.prompt, params) for n, job in enumerate(jobs)]):
            peak = max(peak, scheduler.num_running + sum(update.finish is not None for update in updates))
            for update in updates:
                if update.finish is FinishReason.ERROR:
                    raise LoadTestError(f"a request failed: {update.message}")
                number = int(update.request_id)
                answers[number] += update.tokens
                times[number].append(now)
                if update.finish is None and len(answers[number]) >= jobs[number].output_len:
                    scheduler.end_sequence(update.request_id, 0)
    except RequestRejected as error:
        raise LoadTestError(f"the engine cannot take the load: {error}") from error
    records = []
    for job, at, answer in zip(jobs, times, answers, strict=True):
        records.append(Record(latency=at[-1], prompt_tokens=len(job.prompt), output_tokens=len(answer)))
        records[-1].heard(at)
    figures, stats = metrics(records, now, (50, 99)), scheduler.stats
    counted = {name: getattr(stats, name) for name in ("steps", "preemptions", "prefix_hit_tokens")}
    return {name: figures[name] for name in _FIGURES} | {"peak_running": peak} | counted, answers


def _scheduler(config: EngineConfig, rung: str, info: CoreInfo, pages: int) -> Scheduler:
    """A fresh scheduler for an engine that is there already: its cache is empty, its counters are 0."""
    pool = msgspec.structs.replace(info, num_pages=pages)
    return new_scheduler(replace(config, **RUNGS[rung], seed=0), pool)
