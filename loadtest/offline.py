"""Runs of an engine in this process, without a server: throughput of a data set, latency of one batch.

The figures and their names are those of `vllm bench throughput` and `vllm bench latency`. Knows no network.
"""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine import LLM, FinishReason, Request, SamplingParams
from engine.core import EngineCore
from engine.sequence import SequenceUpdate
from loadtest.records import Fields, Job, LoadTestError

PERCENTILES = (10, 25, 50, 75, 90, 99)
Times = tuple[float, float]
"""Seconds on the clock, and of CPU time."""


def throughput(llm: LLM, prompts: Sequence[Job], *, temperature: float, seed: int) -> Fields:
    """All prompts at once, each with all its tokens. JSON fields: seconds, and rates per second.

    Raises: RequestRejected when the engine cannot take a prompt; LoadTestError when one does not get all its tokens.
    """
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    each = [replace(params, max_tokens=length, seed=seed + number) for number, (_, length) in enumerate(prompts)]
    began = time.perf_counter()
    generations = llm.generate([ids for ids, _ in prompts], each)
    elapsed = time.perf_counter() - began
    for number, (one, (_, length)) in enumerate(zip(generations, prompts, strict=True)):
        completion = one.completions[0]
        _check(f"prompt {number}", len(completion.token_ids), length, completion.finish)
    inputs, outputs = sum(len(ids) for ids, _ in prompts), sum(length for _, length in prompts)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(prompts),
        "total_num_tokens": inputs + outputs,
        "requests_per_second": len(prompts) / elapsed,
        "tokens_per_second": (inputs + outputs) / elapsed,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "output_throughput": outputs / elapsed,
        "cached_tokens": sum(one.cached_tokens for one in generations),
        **_engine(llm),
    }


def throughput_text(fields: Fields) -> str:
    """The print-out of `throughput`."""
    return (
        f"Throughput: {fields['requests_per_second']:.2f} requests/s, "
        f"{fields['tokens_per_second']:.2f} total tokens/s, {fields['output_throughput']:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {fields['total_input_tokens']} ({fields['cached_tokens']} cached)\n"
        f"Total num output tokens:  {fields['total_output_tokens']}\n"
        f"Duration:  {fields['elapsed_time']:.2f} s"
    )


def latency(llm: LLM, *, batch_size: int, input_len: int, output_len: int, warmups: int, iterations: int) -> Fields:
    """The same batch again and again, of new random prompts each time, so that none is cached. JSON fields: seconds.

    Decode alone is what comes after all sequences have their first token: the tokens from then to the end, over that
    time; the time per output token is the batch size over that rate. CPU times are those of this process, all threads
    together: where others use the machine too, they say more.

    Raises: RequestRejected when the engine cannot take the batch; LoadTestError when it cannot run it at once, or
        when a sequence does not get all its tokens.
    """
    if batch_size > llm.info.max_num_seqs:
        raise LoadTestError(f"a batch of {batch_size} does not run at once: --max-num-seqs is {llm.info.max_num_seqs}")
    generator, times = random.Random(0), []
    for number in range(warmups + iterations):
        prompts = [tuple(generator.choices(range(llm.info.vocab_size), k=input_len)) for _ in range(batch_size)]
        measured = _batch(llm, prompts, output_len)
        if number >= warmups:
            times.append(measured)
    whole = [end for _, (end, _), _ in times]
    decode = [later / (end - first) for (first, _), (end, _), later in times if later]
    decode_cpu = [batch_size * (end - first) / later for (_, first), (_, end), later in times if later]
    return {
        "avg_latency": statistics.mean(whole),
        "latencies": whole,
        "percentiles": {str(each): float(np.percentile(whole, each)) for each in PERCENTILES},
        "median_time_to_first_token": statistics.median(first for (first, _), _, _ in times),
        "median_cpu_time_to_first_token": statistics.median(first for (_, first), _, _ in times),
        "median_time_per_output_token": batch_size / statistics.median(decode) if decode else None,
        "median_cpu_time_per_output_token": statistics.median(decode_cpu) if decode_cpu else None,
        "output_throughput": batch_size * output_len / statistics.median(whole),
        "decode_throughput": statistics.median(decode) if decode else None,
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        **_engine(llm),
    }


def latency_text(fields: Fields) -> str:
    """The print-out of `latency`."""
    lines = [f"Avg latency: {fields['avg_latency']} seconds"]
    lines += [f"{each}% percentile latency: {value} seconds" for each, value in fields["percentiles"].items()]
    lines += [f"Median time to the last first token: {1000 * fields['median_time_to_first_token']:.2f} ms"]
    if fields["decode_throughput"] is not None:
        lines += [f"Median time per output token: {1000 * fields['median_time_per_output_token']:.2f} ms"]
        lines += [f"Decode alone: {fields['decode_throughput']:.2f} output tokens/s"]
    return "\n".join([*lines, f"Throughput: {fields['output_throughput']:.2f} output tokens/s"])


def _batch(llm: LLM, prompts: Sequence[tuple[int, ...]], output_len: int) -> tuple[Times, Times, int]:
    """Times until every sequence has its first token, until all have ended, and the tokens between."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=output_len, ignore_eos=True)
    got, ends = [0] * len(prompts), dict[int, FinishReason | None]()
    first = end = (0.0, 0.0)
    later = 0
    for end, updates in turns(llm.core, [Request(str(at), prompt, params) for at, prompt in enumerate(prompts)]):
        if not all(got):
            first = end
        else:
            later += sum(len(update.tokens) for update in updates)
        for update in updates:
            got[int(update.request_id)] += len(update.tokens)
            ends[int(update.request_id)] = update.finish
    for number, count in enumerate(got):
        _check(f"sequence {number}", count, output_len, ends.get(number))
    return first, end, later


def turns(core: EngineCore, requests: Sequence[Request]) -> Iterator[tuple[Times, list[SequenceUpdate]]]:
    """Runs the requests together: the times since the beginning at the end of each turn, and what it brought."""
    wall, cpu = time.perf_counter(), time.process_time()
    for request in requests:
        core.scheduler.add(request)
    while core.has_work:
        updates = core.turn().updates
        yield (time.perf_counter() - wall, time.process_time() - cpu), updates


def _check(name: str, got: int, asked: int, finish: FinishReason | None) -> None:
    if got != asked or finish is not FinishReason.LENGTH:
        how = "without an end" if finish is None else f"with {finish.name}"
        raise LoadTestError(f"{name} ended {how} after {got} of {asked} tokens")


def _engine(llm: LLM) -> dict[str, Any]:
    names = ("architecture", "dtype", "device", "num_pages", "page_size")
    return {name: getattr(llm.info, name) for name in names}
