"""A load test of a running server: samples, sends, measures. The figures are those of `vllm bench serve`."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest.arrivals import arrival_times
from loadtest.datasets import DATASETS, Sampling
from loadtest.environment import environment
from loadtest.generator import generate
from loadtest.metrics import LATENCIES, metrics
from loadtest.records import Chain, LoadTestError, Message, Record, Target
from loadtest.report import SATURATED, Run, now, warnings
from loadtest.tokens import LocalTokenizer, RemoteTokenizer, Tokenizer, served_model, token_ids
from loadtest.worker import Load

_OF_TOKENS = ("prefix-trace", "shared-prefix")
_OF_FIXED_LENGTH = ("random", "prefix-trace", "shared-prefix")


@dataclass(frozen=True)
class LoadTest:
    """What `fulcrum bench serve` was asked for."""

    target: Target  # with an empty model where the server is to be asked for it
    dataset: str
    sampling: Sampling
    rate: float = math.inf  # requests (of multi-turn: conversations) per second; infinite: all at once
    burstiness: float = 1.0
    max_concurrency: int | None = None
    warmups: int = 0
    workers: int = 1
    self_timed: bool = False  # sends at the trace's own times
    tokenizer_path: Path | None = None  # a file or folder; else the server's own is asked, where one is needed
    objectives: Mapping[str, float] = field(default_factory=dict)  # these three: see loadtest.metrics
    percentiles: Sequence[float] = (50, 95, 99)
    selected: Sequence[str] = LATENCIES
    label: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)  # further fields of the result file
    progress: bool = True
    seconds: float = math.inf  # these two: see loadtest.worker.Load
    give_up: float = math.inf

    def __post_init__(self) -> None:
        chat = self.target.backend == "openai-chat"
        if chat and self.dataset in _OF_TOKENS:
            raise LoadTestError(f"{self.dataset} sends token ids, which a chat cannot: use --backend openai or grpc")
        if self.target.backend == "openai" and self.dataset == "multi-turn":
            raise LoadTestError("multi-turn sends chats: use --backend openai-chat or grpc")
        if self.self_timed and self.dataset != "prefix-trace":
            raise LoadTestError("--self-timed needs the times of a prefix-trace")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Made when first needed."""
        return LocalTokenizer.from_file(self.tokenizer_path) if self.tokenizer_path else RemoteTokenizer(self.target)

    def prepared(self) -> "LoadTest":
        """The same with the model's name and with what the data set implies.

        Raises: LoadTestError when the server has to be asked and cannot be.
        """
        target = self.target if self.target.model else replace(self.target, model=served_model(self.target))
        return replace(self, target=replace(target, ignore_eos=target.ignore_eos or self.dataset in _OF_FIXED_LENGTH))

    def chains(self) -> list[Chain]:
        """The requests. Raises: LoadTestError."""
        return DATASETS[self.dataset](self.sampling, self.tokenizer)

    def run(self, chains: Sequence[Chain]) -> Run:
        """Sends them all and gives the figures; after Ctrl-C, those of what has ended. Raises: LoadTestError."""
        if self.self_timed:
            times = [chain.timestamp or 0.0 for chain in chains]
        else:
            times = arrival_times(len(chains), self.rate, self.burstiness, self.sampling.seed)
        date, count = now(), sum(len(chain.prompts) for chain in chains)
        load = Load(times, self.max_concurrency, self.warmups, self.workers, self.seconds, self.give_up)
        # miniters=1: what has ended is shown at the next tick, however fast others ended before.
        with tqdm(total=count, unit="req", miniters=1, disable=not self.progress) as bar:
            outcome = generate(self.target, chains, load, bar.update)
        notes = self._count_tokens(outcome.records, chains)
        notes += [f"warm-up failed, {n} times: {error}" for error, n in Counter(outcome.warmup_errors).items()]
        figures = metrics(outcome.records, outcome.duration, self.percentiles, self.objectives, self.selected)
        fields = {
            **self._about(date, count),
            **figures,
            "unfinished": count - len(outcome.records) if outcome.interrupted else 0,
            "workers": len(outcome.usages),
            "client_cpu": [asdict(usage) for usage in outcome.usages],
            "client_saturated": any(usage.busy > SATURATED for usage in outcome.usages),
        }
        return Run(fields, outcome.records, [*notes, *warnings(fields, outcome.records)])

    def _count_tokens(self, records: Sequence[Record], chains: Sequence[Chain]) -> list[str]:
        """Counts the tokens of prompts and answers whose server did not. Returns a note if that cannot be done."""
        good = [record for record in records if not record.error]
        silent = [record for record in good if record.output_tokens is None]
        blind = [record for record in good if not record.prompt_tokens]
        contents = [chains[each.chain].prompts[each.turn].content for each in blind]
        if self.target.backend == "openai-chat":
            contents = [[Message(role="user", content=each)] if isinstance(each, str) else each for each in contents]
        try:
            outputs = self.tokenizer.encode([each.text for each in silent], special=False) if silent else []
            inputs = token_ids(self.tokenizer, contents)
        except (LoadTestError, KeyError, TypeError) as error:  # the latter: a /tokenize of another form
            why = error if isinstance(error, LoadTestError) else repr(error)
            return [f"tokens are unknown: the server tells no number, and to count them fails: {why}"]
        for record, ids in zip(silent, outputs, strict=True):
            record.output_tokens = len(ids)
            if not ids:
                record.error = "empty: the answer has no tokens"
        for record, ids in zip(blind, inputs, strict=True):
            record.prompt_tokens = len(ids)
        return []

    def _about(self, date: str, count: int) -> dict[str, Any]:
        return {
            **self.about,  # first, so that it hides no fact
            "date": date,
            "endpoint_type": self.target.backend,
            "backend": self.target.backend,
            "label": self.label,
            "model_id": self.target.model,
            "tokenizer_id": str(self.tokenizer_path) if self.tokenizer_path else None,
            "num_prompts": count,
            "request_rate": "inf" if math.isinf(self.rate) else self.rate,
            "burstiness": "inf" if math.isinf(self.burstiness) else self.burstiness,
            "max_concurrency": self.max_concurrency,
            "dataset": self.dataset,
            "dataset_path": self.sampling.path.name if self.sampling.path else None,
            "seed": self.sampling.seed,
            "ignore_eos": self.target.ignore_eos,
            "sampling": self.target.sampling,
            "goodput_objectives_ms": dict(self.objectives) or None,
            **environment(),
        }
