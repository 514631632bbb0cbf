"""Runs of an engine in this process, without a server: throughput of a data set, latency of one batch.

The figures and their names are those of `vllm bench throughput` and `vllm bench latency`. Knows no network.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine import LLM, FinishReason, Request, SamplingParams
from loadtest.records import Chain, LoadTestError, Message
from loadtest.tokens import Tokenizer

_Times = tuple[float, float]
"""Seconds on the clock, and of CPU time."""
PERCENTILES = (10, 25, 50, 75, 90, 99)


def token_prompts(
    chains: Sequence[Chain], tokenizer: Callable[[], Tokenizer], render: Callable[[list[Message]], list[int]]
) -> list[tuple[list[int], int]]:
    """The token ids of each request of a data set, and how many tokens it generates.

    Args:
        render: turns a chat into token ids.
    """
    prompts = [prompt for chain in chains for prompt in chain.prompts]
    texts = [prompt.content for prompt in prompts if isinstance(prompt.content, str)]
    encoded = iter(tokenizer().encode(texts) if texts else ())
    found = []
    for prompt in prompts:
        ids = next(encoded) if isinstance(prompt.content, str) else prompt.content
        chat = [message for message in ids if isinstance(message, dict)]
        ids = render(chat) if chat else ids
        found.append(([token for token in ids if isinstance(token, int)], prompt.output_len))
    return found


def throughput(llm: LLM, prompts: Sequence[tuple[list[int], int]], *, temperature: float, seed: int) -> dict[str, Any]:
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
    inputs = sum(len(ids) for ids, _ in prompts)
    outputs = sum(len(one.completions[0].token_ids) for one in generations)
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


def throughput_text(fields: dict[str, Any]) -> str:
    """The print-out of `throughput`."""
    return (
        f"Throughput: {fields['requests_per_second']:.2f} requests/s, "
        f"{fields['tokens_per_second']:.2f} total tokens/s, {fields['output_throughput']:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {fields['total_input_tokens']} ({fields['cached_tokens']} cached)\n"
        f"Total num output tokens:  {fields['total_output_tokens']}\n"
        f"Duration:  {fields['elapsed_time']:.2f} s"
    )


def latency(
    llm: LLM, *, batch_size: int, input_len: int, output_len: int, warmups: int, iterations: int
) -> dict[str, Any]:
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
    median = statistics.median(whole)
    return {
        "avg_latency": statistics.mean(whole),
        "latencies": whole,
        "percentiles": {str(each): float(np.percentile(whole, each)) for each in PERCENTILES},
        "median_time_to_first_token": statistics.median(first for (first, _), _, _ in times),
        "median_cpu_time_to_first_token": statistics.median(first for (_, first), _, _ in times),
        "median_time_per_output_token": batch_size / statistics.median(decode) if decode else None,
        "median_cpu_time_per_output_token": statistics.median(decode_cpu) if decode_cpu else None,
        "output_throughput": batch_size * output_len / median,
        "decode_throughput": statistics.median(decode) if decode else None,
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        **_engine(llm),
    }


def speculation(
    llm: LLM, prompts: Sequence[tuple[list[int], int]], *, pairs: int, temperature: float, seed: int
) -> dict[str, Any]:
    """All prompts at once with guesses and without, in turn, until their texts end by themselves. JSON fields: seconds.

    A pair's speed-up is the time without guesses over that with them; the first pair warms up. CPU time is the
    process's own: on a machine that others use it tells more than the clock.

    Raises: RequestRejected when the engine cannot take a prompt.
    """
    stats, texts = llm.core.stats(), dict[bool, list[list[int]]]()
    runs: dict[bool, list[_Times]] = {True: [], False: []}
    for number in range(pairs + 1):
        drafted, accepted = stats.draft_tokens, stats.accepted_tokens
        for guessing in (True, False) if number % 2 else (False, True):
            llm.core.scheduler.flush_cache()
            times, texts[guessing] = _guessed(llm, prompts, temperature, seed, guessing=guessing)
            runs[guessing].append(times)
        drafted, accepted = stats.draft_tokens - drafted, stats.accepted_tokens - accepted
    outputs = sum(len(text) for text in texts[True])
    kinds = {"speedup": 0, "cpu_speedup": 1}
    ratios = {
        name: sorted(off[kind] / on[kind] for on, off in zip(runs[True][1:], runs[False][1:], strict=True))
        for name, kind in kinds.items()
    }
    return {
        "num_requests": len(prompts),
        "pairs": pairs,
        "temperature": temperature,
        "total_output_tokens": outputs,
        "equal_answers": sum(on == off for on, off in zip(texts[True], texts[False], strict=True)),
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "elapsed_times": [on for on, _ in runs[True][1:]],
        "elapsed_times_without": [off for off, _ in runs[False][1:]],
        "output_throughput": outputs / statistics.median(on for on, _ in runs[True][1:]),
        "output_throughput_without": outputs / statistics.median(off for off, _ in runs[False][1:]),
        **{name: statistics.median(each) for name, each in ratios.items()},
        **{f"{name}_range": f"{each[0]:.2f} to {each[-1]:.2f}" for name, each in ratios.items()},
        **_engine(llm),
    }


def speculation_text(fields: dict[str, Any]) -> str:
    """The print-out of `speculation`."""
    return (
        f"Output tokens/s: {fields['output_throughput']:.2f} with guesses, "
        f"{fields['output_throughput_without']:.2f} without\n"
        f"Speed-up, median of {fields['pairs']}: {fields['speedup']:.3f} ({fields['speedup_range']}); "
        f"of CPU time {fields['cpu_speedup']:.3f} ({fields['cpu_speedup_range']})\n"
        f"Guessed tokens: {fields['draft_tokens']}, right: {fields['accepted_tokens']}, "
        f"of {fields['total_output_tokens']} output tokens\n"
        f"Equal answers: {fields['equal_answers']} of {fields['num_requests']}"
    )


def _guessed(
    llm: LLM, prompts: Sequence[tuple[list[int], int]], temperature: float, seed: int, *, guessing: bool
) -> tuple[_Times, list[list[int]]]:
    params = SamplingParams(temperature=temperature)
    requests = [
        Request(str(at), tuple(ids), replace(params, max_tokens=most, seed=seed + at), speculative=guessing)
        for at, (ids, most) in enumerate(prompts)
    ]
    texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
    began = time.perf_counter(), time.process_time()
    for request in requests:
        llm.core.scheduler.add(request)
    while llm.core.has_work:
        for update in llm.core.turn().updates:
            texts[update.request_id] += update.tokens
    return (time.perf_counter() - began[0], time.process_time() - began[1]), list(texts.values())


def latency_text(fields: dict[str, Any]) -> str:
    """The print-out of `latency`."""
    lines = [f"Avg latency: {fields['avg_latency']} seconds"]
    lines += [f"{each}% percentile latency: {value} seconds" for each, value in fields["percentiles"].items()]
    lines += [f"Median time to the last first token: {1000 * fields['median_time_to_first_token']:.2f} ms"]
    if fields["decode_throughput"] is not None:
        lines += [f"Median time per output token: {1000 * fields['median_time_per_output_token']:.2f} ms"]
        lines += [f"Decode alone: {fields['decode_throughput']:.2f} output tokens/s"]
    return "\n".join([*lines, f"Throughput: {fields['output_throughput']:.2f} output tokens/s"])


def _batch(llm: LLM, prompts: Sequence[tuple[int, ...]], output_len: int) -> tuple[_Times, _Times, int]:
    """Times until every sequence has its first token, until all have ended, and the tokens between."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=output_len, ignore_eos=True)
    requests = [Request(f"batch-{number}", prompt, params) for number, prompt in enumerate(prompts)]
    got = {request.request_id: 0 for request in requests}
    ends: dict[str, FinishReason] = {}
    first, later = (0.0, 0.0), 0
    wall, cpu = time.perf_counter(), time.process_time()

    def passed() -> _Times:
        return time.perf_counter() - wall, time.process_time() - cpu

    for request in requests:
        llm.core.scheduler.add(request)
    while llm.core.has_work:
        updates = llm.core.turn().updates
        waiting = not all(got.values())
        for update in updates:
            got[update.request_id] += len(update.tokens)
            if update.finish is not None:
                ends[update.request_id] = update.finish
        if waiting:
            first = passed()
        else:
            later += sum(len(update.tokens) for update in updates)
    end = passed()
    for name, count in got.items():
        _check(name, count, output_len, ends.get(name))
    return first, end, later


def _check(name: str, got: int, asked: int, finish: FinishReason | None) -> None:
    if got != asked or finish is not FinishReason.LENGTH:
        how = "without an end" if finish is None else f"with {finish.name}"
        raise LoadTestError(f"{name} ended {how} after {got} of {asked} tokens")


def _engine(llm: LLM) -> dict[str, Any]:
    info = llm.info
    names = ("architecture", "dtype", "device", "num_pages", "page_size")
    return {name: getattr(info, name) for name in names}
