"""Times the GPU sampling kernels through CUDA graphs, and counts where their tokens differ from the twin's.

"qwen" is what Qwen2.5-Instruct asks for, with penalties over histories of 1,024 and 8,192 tokens; "adjust" is the part
of it that comes before the sampler.

    python tests/gpu/bench_sampling.py --output sampling.json

Two kinds of logits: "peaked" falls off as a language model's do (Zipf's law); "flat" is noise, as random weights give,
where a nucleus takes in half of the vocabulary.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sampler import Sampler
from engine.step import RowInit
from kernels.gpu.penalties import TABLE_WIDTH, adjust, bar, pack_adjustments
from kernels.gpu.sampling import SamplingScratch, greedy, pack_params, sample
from loadtest.environment import environment

VOCAB = 152_064
COUNTS = (1, 32, 128, 256, 512)
CALLS, REPLAYS = 10, 3
# Microseconds to stay within; those of "adjust" by its bytes at 4.2 TB/s, and four launches.
TARGETS = {("plain", 1): 15, ("plain", 256): 100, ("top_p", 1): 150, ("top_p", 256): 500}
TARGETS |= {("adjust 1k", 1): 15, ("adjust 1k", 32): 20, ("adjust 1k", 256): 80, ("adjust 8k", 256): 170}


def single(value: float) -> float:
    """As the parameter table holds it."""
    return float(np.float32(value))


PLAIN = SamplingParams(seed=1)
GREEDY = SamplingParams(seed=1, temperature=0.0)
TOP_P = SamplingParams(seed=1, top_p=single(0.9))
TOP_K = SamplingParams(seed=1, top_k=50)
MIN_P = SamplingParams(seed=1, min_p=single(0.05))
SCENES = {
    "greedy": [GREEDY],
    "plain": [PLAIN],
    "warm": [SamplingParams(seed=1, temperature=single(0.7))],
    "min_p": [MIN_P],
    "top_p": [TOP_P],
    "top_k": [TOP_K],
    "all": [SamplingParams(seed=1, temperature=single(0.7), top_k=50, top_p=single(0.9), min_p=single(0.05))],
    "mixed": [GREEDY, PLAIN, TOP_P, TOP_K, MIN_P, PLAIN, PLAIN, PLAIN],
}
QWEN = SamplingParams(
    seed=1, temperature=single(0.7), top_k=20, top_p=single(0.8), repetition_penalty=1.05, frequency_penalty=0.1
)
HISTORIES = {"1k": 1024, "8k": 8192}
SCENES |= {f"{part} {history}": [QWEN] for history in HISTORIES for part in ("adjust", "qwen")}


def make_logits(kind: str, count: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(count)
    noise = torch.randn(count, VOCAB, device="cuda", generator=generator)
    if kind == "flat":
        return (1.2 * noise).bfloat16()
    rank = torch.rand(count, VOCAB, device="cuda", generator=generator).argsort(-1) + 1
    return (18 - 1.5 * rank.log() + 0.5 * noise).bfloat16()


def microseconds(call: Callable[[], None]) -> float:
    """Of one call out of ten in a graph, the best of three replays."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    best = float("inf")
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1000 / CALLS)
    return best


def twin_tokens(
    logits: Tensor, rows: list[SamplingParams], lengths: list[int], history: Tensor
) -> tuple[Tensor, Tensor]:
    """What the engine's torch sampler chooses; half of a history is its prompt."""
    sampler = Sampler(vocab_size=VOCAB, device=logits.device, max_num_seqs=len(rows), processors=())
    for row, params in enumerate(rows):
        sampler.add_row(RowInit(row, (0,), history.shape[1] // 2, params, 0, ()))
    return sampler.sample(logits.float(), range(len(rows)), history, lengths)


def make_adjust(logits: Tensor, rows: list[SamplingParams], ids: Tensor, history: Tensor) -> Callable[[], Tensor]:
    """A call that returns the logits with penalties, of rows whose tokens are all of `history`."""
    table = torch.zeros(len(rows), TABLE_WIDTH, dtype=torch.int32)
    for entry, row in zip(table, rows, strict=True):
        packed = pack_adjustments(
            repetition=row.repetition_penalty,
            presence=row.presence_penalty,
            frequency=row.frequency_penalty,
            prompt_length=history.shape[1] // 2,
            bias={},
            barred=(),
            barred_until=0,
        )
        entry[: len(packed)] = torch.tensor(packed)
    table = table.to("cuda")
    adjusted = torch.empty(logits.shape, dtype=torch.float32, device="cuda")
    counts = torch.zeros(logits.shape, dtype=torch.int32, device="cuda")
    lengths, no_mask = (torch.full_like(ids, value) for value in (history.shape[1], -1))

    def call() -> Tensor:
        adjust(logits, ids, lengths, history, table, adjusted, counts)
        bar(adjusted, ids, lengths, table, no_mask, counts)
        return adjusted

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="rows of a step")
    parser.add_argument("--checked", type=int, default=128, help="rows compared with the twin in each scene")
    options = parser.parse_args()
    began = time.perf_counter()
    largest = max(options.counts)
    scratch = SamplingScratch.allocate(largest, "cuda")
    tokens, failed = (torch.zeros(largest, dtype=torch.int32, device="cuda") for _ in range(2))
    ids = torch.arange(largest, dtype=torch.int32, device="cuda")
    results = []
    for kind in ("peaked", "flat"):
        for count in options.counts:
            logits = make_logits(kind, count)
            for name, pattern in SCENES.items():
                rows = [pattern[i % len(pattern)] for i in range(count)]
                table = [
                    pack_params(
                        temperature=row.temperature, top_p=row.top_p, min_p=row.min_p, top_k=row.top_k, seed=1, index=0
                    )
                    for row in rows
                ]
                params = torch.tensor(table, dtype=torch.int32, device="cuda")
                out = (tokens[:count], failed[:count])
                filters = any(row.top_k > 0 or row.top_p < 1 for row in rows)
                part, _, known = name.partition(" ")
                generator = torch.Generator("cuda").manual_seed(1)
                shape = (count, HISTORIES.get(known, 1))
                history = torch.randint(VOCAB, shape, dtype=torch.int32, device="cuda", generator=generator)
                # The ids serve as lengths too where there is no history: another random number for each row.
                lengths, prepare = ids[:count], None
                if known:
                    history[:, -64:] = logits.topk(64).indices  # so that penalties decide
                    lengths = torch.full_like(lengths, HISTORIES[known])
                    prepare = make_adjust(logits, rows, ids[:count], history)

                def call(
                    logits: Tensor = logits,
                    params: Tensor = params,
                    out: tuple[Tensor, Tensor] = out,
                    filters: bool = filters,
                    lengths: Tensor = lengths,
                    part: str = part,
                    prepare: Callable[[], Tensor] | None = prepare,
                ) -> None:
                    if prepare is not None:
                        logits = prepare()
                    if part == "greedy":
                        greedy(logits, ids[: len(logits)], *out, scratch)
                    elif part != "adjust":
                        sample(logits, ids[: len(logits)], lengths, params, *out, scratch, filters=filters)

                result = {"logits": kind, "scene": name, "rows": count, "us": round(microseconds(call), 1)}
                if count <= options.checked and part != "adjust":
                    expected, bad = twin_tokens(logits, rows, lengths.tolist(), history)
                    differ = (expected != out[0]) | (bad != (out[1] > 0))
                    result |= {"checked": count, "differences": int(differ.sum())}
                results.append(result)
                print(result, f"{time.perf_counter() - began:.1f} s", flush=True)  # noqa: T201
    missed = [r for r in results if r["us"] > TARGETS.get((r["scene"], r["rows"]), float("inf"))]
    times: dict[tuple[str, str], dict[str, float]] = {}
    for each in results:
        times.setdefault((each["scene"], each["logits"]), {})[f"us_{each['rows']}"] = each["us"]
    report = environment() | {
        "vocab_size": VOCAB,
        "seconds": round(time.perf_counter() - began, 1),
        "results": results,
        "by_scene": [{"scene": scene, "logits": kind} | us for (scene, kind), us in times.items()],
        "missed": missed,
        "differences": sum(r.get("differences", 0) for r in results),
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{'':20}" + "".join(f"{n:>9}" for n in options.counts))  # noqa: T201
    for (scene, kind), us in times.items():
        print(f"{kind:8}{scene:12}" + "".join(f"{each:9.1f}" for each in us.values()))  # noqa: T201
    print(f"{report['differences']} tokens differ from the twin's; {len(missed)} of the times are above target")  # noqa: T201


if __name__ == "__main__":
    main()
