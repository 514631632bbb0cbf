"""Executes the scheduler's steps in plain torch, on any device. Knows no requests and no policy."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import EngineConfig
from engine.container import usable_memory
from engine.device import CUDA_BUDGET, LoadedModel, allowed_bytes, pages_within
from engine.logits import load_logits_processors
from engine.logprobs import split_records
from engine.model.config import ModelConfig
from engine.request import SamplingParams
from engine.sampler import Sampler
from engine.step import RowInit, RowWork, Sample, Step, StepResult
from kernels.attention import AttentionPlan, Query, plan_attention
from kernels.logprobs import hidden_logprobs, token_logprobs

_CPU_BUDGET = 2 << 30  # bytes of KV


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device is working on.

    Args:
        step: what it was asked to do.
        sampled: (2, N) int64 on the host: a token for each of step.samples, and whether its logits were not finite.
        logprobs: records (`kernels.logprobs`) of the samples that have them, as wide as the widest asked for, and of
            each of step.prompt_logprobs; on the host too.
        done: recorded when all of it is there; None where it is already.
    """

    step: Step
    sampled: Tensor
    logprobs: list[Tensor]
    done: torch.cuda.Event | None


class ModelRunner:
    """The model, its KV pool and its rows, in plain torch: the CPU's runner, and the reference of `engine.gpu.runner`.

    Attributes:
        model_config: shape of the model.
        num_pages: pages of the KV pool that the scheduler may use. One more is there for padding and warm-up.
        max_model_len: longest sequence, tokens.
        dtype, device: of weights and KV.

    Raises:
        ModelError: the budget leaves no room for the KV pool.
        ValueError: a logits processor cannot be loaded.
    """

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        self.device, self.dtype, self.max_model_len = model.device, model.dtype, model.max_model_len
        self.model_config: ModelConfig = model.config
        self.page_bytes = model.page_bytes(config.page_size)
        self._decoder = model.decoder
        self._decoder.pack()
        self._page_size = config.page_size
        limits = self._limits = config.step_limits(model.device.type)
        with torch.inference_mode():
            # One column more: the token that the last position of the window is sampled to.
            self._token_ids = torch.zeros(
                limits.max_num_seqs, self.max_model_len + 1, dtype=torch.int32, device=self.device
            )
            self._sampler = Sampler(
                vocab_size=self.model_config.vocab_size,
                device=self.device,
                max_num_seqs=limits.max_num_seqs,
                processors=load_logits_processors(
                    config.logits_processors, vocab_size=self.model_config.vocab_size, device=self.device
                ),
            )
            self.num_pages = self._affordable_pages(config)
            self._kv_cache = self._new_pool(self.num_pages + 1)
            self._page_table = torch.full(
                (limits.max_num_seqs, math.ceil(self.max_model_len / config.page_size)),
                self.num_pages,
                dtype=torch.int32,
                device=self.device,
            )

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Begins a step and returns at once where the device works by itself (on a CPU it is complete).

        A step may be launched before the one before it is collected: nothing of its tokens is needed on the host.
        """
        for init in step.inits:
            tokens = torch.tensor(init.tokens, dtype=torch.int32)
            self._token_ids[init.row, : len(tokens)] = tokens.to(self.device)
            self._sampler.add_row(init)
        for update in step.page_updates:
            pages = torch.tensor(update.pages, dtype=torch.int32)
            self._page_table[update.row, update.first : update.first + len(update.pages)] = pages.to(self.device)
        for draft in step.drafts:
            guesses = torch.tensor(draft.tokens, dtype=torch.int32)
            self._token_ids[draft.row, draft.start : draft.start + len(guesses)] = guesses.to(self.device)
        if step.works:
            sampled, *logprobs = self._run(step)
        else:
            sampled, logprobs = torch.empty(2, 0, dtype=torch.int64), []
        if step.copies:
            sources, destinations = torch.tensor(step.copies, device=self.device).T
            self._kv_cache.index_copy_(1, destinations, self._kv_cache.index_select(1, sources))
        if self.device.type == "cpu":
            return Launched(step, sampled, logprobs, None)
        # Its own event, so that collecting this step does not wait for steps launched after it.
        on_host, *logprobs = (part.to("cpu", non_blocking=True) for part in (sampled, *logprobs))
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self.device))
        return Launched(step, on_host, logprobs, done)

    def collect(self, launched: Launched) -> StepResult:
        """Waits for a launched step and returns what it sampled."""
        if launched.done is not None:
            launched.done.synchronize()
        tokens, failed = launched.sampled.tolist()
        bad = tuple(index for index, fails in enumerate(failed) if fails)
        logprobs, prompt_logprobs = split_records(launched.step, [part.numpy() for part in launched.logprobs])
        return StepResult(tuple(tokens), bad, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def warm_up(self) -> None:
        """Runs a prefill and a decode step, so that the first request does not pay for what is made lazily.

        They write into the page that no sequence owns, and leave rows behind that the next RowInit voids.
        """
        length = min(self._page_size, self.max_model_len - 1)
        params = SamplingParams(temperature=0.0, seed=0)
        init = RowInit(row=0, tokens=(0,) * length, prompt_length=length, params=params, index=0, stop_mask=())
        prefill = Step(0, (init,), (), (RowWork(0, 0, length),), (Sample(0, 0),))
        decode = Step(1, (), (), (RowWork(0, length - 1, 1),), (Sample(0, 0),))
        for step in (prefill, decode):
            self.collect(self.launch(step))
        with torch.inference_mode():
            self._kv_cache[:, self.num_pages].zero_()

    def _run(self, step: Step) -> list[Tensor]:
        """Computes the works, draws the samples.

        Returns: (2, N) int64, the samples' tokens and which of them failed; then what `Launched.logprobs` holds.
        """
        rows, starts, lengths = np.array(step.works, np.int64).T
        # Works of a row that follow one another are one query: its context is read once.
        order = np.lexsort((starts, rows))
        rows, starts, lengths = rows[order], starts[order], lengths[order]
        ends = np.cumsum(lengths)
        joined = (rows[1:] == rows[:-1]) & (starts[1:] == (starts + lengths)[:-1])
        heads = np.flatnonzero(np.concatenate(([True], ~joined)))
        queries = zip(rows[heads], starts[heads], np.add.reduceat(lengths, heads), strict=True)
        positions = torch.from_numpy(np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)).to(self.device)
        tokens = self._token_ids[torch.from_numpy(np.repeat(rows, lengths)).to(self.device), positions]
        plan = self._plan_attention([Query(*map(int, query)) for query in queries], self._page_table)
        last = np.empty_like(ends)
        last[order] = ends - 1
        # Siblings share the logits of one work: computed once, repeated for each.
        works = np.array([sample.work for sample in step.samples], np.int64)
        used, which = np.unique(works, return_inverse=True)
        drawn_from = torch.from_numpy(last[used]).to(self.device)
        if not step.prompt_logprobs:
            hidden = self._decoder.forward(tokens, positions, self._kv_cache, plan, drawn_from)
            return list(self._sample(hidden, which, step))
        hidden = self._decoder.forward(tokens, positions, self._kv_cache, plan)
        return [*self._sample(hidden[drawn_from], which, step), *self._prompt_logprobs(hidden, last, step)]

    def _plan_attention(self, queries: Sequence[Query], page_table: Tensor) -> AttentionPlan:
        model = self.model_config
        return plan_attention(
            queries,
            page_table,
            page_size=self._page_size,
            group=model.num_heads // model.num_kv_heads,
            dtype=self.dtype,
            windows=model.layer_windows,
        )

    def _sample(self, hidden: Tensor, which: NDArray[np.int64], step: Step) -> Iterator[Tensor]:
        """As `_run`, but for the prompts; `which` is where in hidden (N, D) each sample's token is."""
        works, samples = step.works, step.samples
        if not samples:
            yield torch.empty(2, 0, dtype=torch.int64, device=self.device)
            return
        logits = self._decoder.logits(hidden)
        if not np.array_equal(which, np.arange(len(hidden))):
            logits = logits[torch.from_numpy(which).to(self.device)]
        rows = [sample.row for sample in samples]
        lengths = [works[sample.work].start + works[sample.work].length for sample in samples]
        tokens, failed = self._sampler.sample(logits, rows, self._token_ids, lengths, step.masks)
        at = (torch.tensor(rows, device=self.device), torch.tensor(lengths, device=self.device))
        self._token_ids.index_put_(at, tokens.int())
        yield torch.stack((tokens, failed.long()))
        if step.logprobs:
            indexes, tops = zip(*step.logprobs, strict=True)
            asked = torch.tensor(indexes, device=self.device)
            yield token_logprobs(logits[asked], tokens[asked], max(tops))

    def _prompt_logprobs(self, hidden: Tensor, last: NDArray[np.int64], step: Step) -> Iterator[Tensor]:
        """The records of each of step.prompt_logprobs; `last`: where in hidden (T, D) each work's last token is."""
        for number, first, end, top in step.prompt_logprobs:
            row, start, length = step.works[number]
            begin = int(last[number]) - (start + length - first)
            before = hidden[begin : begin + end - first]
            yield hidden_logprobs(before, self._token_ids[row, first:end], top, self._decoder.logits)

    def _affordable_pages(self, config: EngineConfig) -> int:
        on_cpu = self.device.type == "cpu"
        memory = usable_memory() if on_cpu else torch.cuda.get_device_properties(self.device).total_memory
        allowed = allowed_bytes(config.memory_budget, memory, min(_CPU_BUDGET, memory) if on_cpu else CUDA_BUDGET)
        return pages_within(allowed if on_cpu else allowed - self._peak_bytes(), self.page_bytes, self._page_size)

    def _peak_bytes(self) -> int:
        """Most device memory in use while the largest step runs over a pool just large enough for it."""
        tokens = self._limits.max_num_batched_tokens
        length = min(tokens, self.max_model_len)
        counts = [length] * (tokens // length)
        pages = math.ceil(length / self._page_size)
        table = torch.arange(len(counts) * pages, device=self.device).view(len(counts), pages)
        pool = self._new_pool(len(counts) * pages)
        torch.cuda.reset_peak_memory_stats(self.device)
        plan = self._plan_attention([Query(row, 0, length) for row in range(len(counts))], table)
        positions = torch.arange(length, device=self.device).repeat(len(counts))
        hidden = self._decoder.forward(torch.zeros_like(positions), positions, pool, plan)
        self._decoder.logits(hidden[: self._limits.max_samples])
        peak = torch.cuda.max_memory_allocated(self.device) - pool.nbytes
        del pool, hidden
        torch.cuda.empty_cache()
        return peak

    def _new_pool(self, pages: int) -> Tensor:
        """(layers, pages, page_size, 2, kv_heads, head_dim), zero."""
        model = self.model_config
        shape = (model.num_layers, pages, self._page_size, 2, model.num_kv_heads, model.head_dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # numpy's zeros are the system's: memory is taken when a page is first written, not now.
        return torch.from_numpy(np.zeros(pages * self.page_bytes, np.uint8)).view(self.dtype).view(shape)
