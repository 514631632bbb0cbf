"""Executes the scheduler's steps on a CUDA device. Knows no requests and no policy.

A step costs the host one packed copy to the device, the replay of two graphs (body; what samples alone need, with
sampling) and one copy back. Nothing waits for the device but `collect`. Its twin is `engine.runner.ModelRunner`, which
runs the same steps in plain torch.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.device import CUDA_BUDGET, LoadedModel, allowed_bytes, pages_within
from engine.gpu.forward import Forward
from engine.gpu.graphs import Graphs, padded, sample_sizes, token_sizes
from engine.gpu.inputs import Ints, RowState, Shape, StepInputs, on_device, pinned
from engine.logits import load_logits_processors
from engine.logprobs import split_records
from engine.model.errors import ModelError
from engine.request import SamplingParams
from engine.sampler import LEAST_REPETITION_PENALTY, Sampler
from engine.step import DeviceLost, PageUpdate, PromptLogprobs, RowInit, RowWork, Sample, Step, StepResult
from kernels.gpu import penalties, sampling
from kernels.gpu.rows import append_tokens, copy_pages, write_runs
from kernels.logprobs import SLICE, hidden_logprobs, token_logprobs

_MOST_ROWS = 1024  # what the kernels hold
# Samples whose logits are adjusted at once: two numbers of 32 bits for each token of the vocabulary.
_ADJUSTED = 256
# The same where users' processors change them, and how many copies those may make.
_PROCESSED, _PROCESSED_COPIES = 64, 8
# Of each logit that logprobs are made of: as the model computes it, in float32, and what its softmax needs.
_LOGPROB_BYTES = 12
# Recorded to learn what a graph takes; the driver's figures are coarse.
_TRIALS = 8
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device is working on.

    Args:
        step: what it was asked to do.
        sampled: (2, max_samples) int32 on the host: tokens, and 1 where their logits were not finite.
        logprobs: as of `engine.runner.Launched`.
        began, ended: around the step's kernels; `sampled` is there when the copy behind them is `done`.
    """

    step: Step
    sampled: Tensor
    logprobs: list[Tensor]
    began: torch.cuda.Event | None = None
    ended: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None


class GpuRunner:
    """The model, its KV pool and its rows, on a CUDA device (or interpreted on a CPU, in tests).

    Attributes:
        model_config: shape of the model.
        num_pages: pages of the KV pool that the scheduler may use. One more is there for padding.
        max_model_len: longest sequence, tokens.
        dtype, device: of weights and KV.

    Raises:
        ModelError: the budget leaves no room for the KV pool, or there are too many rows.
        ValueError: a logits processor cannot be loaded.
    """

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        rows, tokens, samples = config.step_limits(model.device.type)
        if rows > _MOST_ROWS:
            raise ModelError(f"max_num_seqs ({rows}) must be at most {_MOST_ROWS} on this device")
        self.device, self.dtype, self.max_model_len = model.device, model.dtype, model.max_model_len
        self.model_config = model.config
        self.page_bytes = model.page_bytes(config.page_size)
        self._page_size = config.page_size
        self._cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._ended: torch.cuda.Event | None = None
        self._record = config.cuda_graphs and self._cuda
        self._sample_sizes, self._token_sizes = sample_sizes(samples), token_sizes(tokens)
        self._graphs = Graphs()
        with torch.inference_mode(), self._on_stream():
            vocab_size = self.model_config.vocab_size
            self._forward = Forward(model, max_tokens=tokens, max_samples=samples)
            self._inputs = StepInputs(tokens, samples, self._forward.block_m, vocab_size, self.device)
            self._sampled = torch.zeros(2, samples, dtype=torch.int32, device=self.device)
            self._scratch = sampling.SamplingScratch.allocate(samples, self.device)
            self._processors = load_logits_processors(
                config.logits_processors, vocab_size=vocab_size, device=self.device
            )
            self._sampler = Sampler(
                vocab_size=vocab_size, device=self.device, max_num_seqs=rows, processors=self._processors
            )
            at_once = min(samples, _PROCESSED if self._processors else _ADJUSTED)
            self._adjusted = torch.empty(at_once, vocab_size, dtype=torch.float32, device=self.device)
            self._counts = torch.zeros(at_once, vocab_size, dtype=torch.int32, device=self.device)
            max_pages = math.ceil(self.max_model_len / config.page_size)
            self._state = RowState(rows, self.max_model_len, max_pages, self.device)
            self._kv_cache = self._new_pool(1)
            self.num_pages = self._affordable_pages(config)
            del self._kv_cache
            self._kv_cache = self._new_pool(self.num_pages + 1)

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Begins a step and returns at once.

        A step may be launched before the one before it is collected: nothing of its tokens is needed on the host.
        """
        with self._guarded(), self._on_stream():
            for init in step.inits:
                self._sampler.add_row(init)
            changes = self._state.changes(step, _packed)
            if changes is not None:
                write_runs(changes.runs, changes.payload, self._state.flat, changes.longest)
            began = self._event()
            logprobs: list[Tensor] = []
            if step.works:
                shape, rows, lengths, ends = self._inputs.send(step, self._padded)
                self._run("chunks" if shape.chunks else "decodes", shape.tokens)
                if shape.num_samples:
                    self._run_head(shape, rows, lengths, bool(step.masks))
                logprobs = [*self._logprobs(step), *self._prompt_logprobs(step, ends)]
            if step.copies:
                copy_pages(on_device(np.array(step.copies, np.int32), self.device), self._kv_cache)
            ended = self._event()
            sampled, *logprobs = (_on_host(part) for part in (self._sampled, *logprobs))
            return Launched(step, sampled, logprobs, began, ended, self._event())

    def collect(self, launched: Launched) -> StepResult:
        """Waits for a launched step and returns what it sampled."""
        busy = gap = 0.0
        if launched.done is not None:
            with self._guarded():
                launched.done.synchronize()
            assert launched.began is not None
            assert launched.ended is not None
            busy = launched.began.elapsed_time(launched.ended) / 1e3
            gap = self._ended.elapsed_time(launched.began) / 1e3 if self._ended is not None else 0.0
            self._ended = launched.ended
        step = launched.step
        tokens, failed = launched.sampled[:, : len(step.samples)].tolist()
        bad = tuple(index for index, fails in enumerate(failed) if fails)
        return StepResult(
            tuple(tokens), bad, busy, gap, *split_records(step, [one.numpy() for one in launched.logprobs])
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Records the graphs; without them, runs a step of each kind, so that the first request finds all compiled."""
        with self._on_stream():
            for key in self._graph_keys() if self._record else self._trial_keys():
                if self._record:
                    self._graphs.record(key, partial(self._launch, *key))
                else:
                    self._launch(*key)
            self._warm_up_rest()
        self._ended = None

    def _warm_up_rest(self) -> None:
        """What no graph holds: changes of rows, users' processors, logprobs, copies of pages, both ways."""
        # Compiled for few rows, and for more; before any step, while all inputs are zeros.
        for count in {1, min(33, self._sample_sizes[-1])}:
            self._head("adjusted", count)
        length = min(self._page_size, self.max_model_len - 1, self._token_sizes[-1])
        params = SamplingParams(temperature=0.0, seed=0)
        init = RowInit(0, (0,) * length, length, params, 0, ())
        page = PageUpdate(0, 0, (self.num_pages,))
        prefill = Step(0, (init,), (page,), (RowWork(0, 0, length),), (Sample(0, 0),))
        prefill = replace(
            prefill, logprobs=((0, 1),), prompt_logprobs=(PromptLogprobs(0, 1, length, 1),) * (length > 1)
        )
        self.collect(self.launch(prefill))
        copy = ((self.num_pages, self.num_pages),)
        self.collect(self.launch(Step(1, (), (), (RowWork(0, length - 1, 1),), (Sample(0, 0),), copies=copy)))
        # In the stream of the steps: nothing else would keep them from running before it.
        self._kv_cache.zero_()

    # What a step is made of.

    def _run(self, kind: str, size: int) -> None:
        self._graphs.run((kind, size), partial(self._launch, kind, size))

    def _run_head(self, shape: Shape, rows: Ints, lengths: Ints, masked: bool) -> None:
        """Draws and appends the samples' tokens."""
        sampler = self._sampler
        if self._processors:
            self._head("adjusted", shape.num_samples, (rows, lengths))
        elif masked or sampler.adjusts(rows, lengths):
            self._run("adjusted", shape.samples)
        else:
            kind = "filtered" if sampler.filters(rows) else "drawn" if sampler.draws(rows) else "greedy"
            self._run(kind, shape.samples)

    def _logprobs(self, step: Step) -> Iterator[Tensor]:
        """The records of all of step.logprobs in one tensor, if there are any."""
        if not step.logprobs:
            return
        indexes, tops = np.array(step.logprobs, np.int32).T
        parts = []
        for first in range(0, len(indexes), SLICE):
            at = on_device(indexes[first : first + SLICE], self.device)
            logits = self._forward.all_logits.index_select(0, at).float()
            parts.append(token_logprobs(logits, self._sampled[0].index_select(0, at), int(tops.max())))
        yield torch.cat(parts)

    def _prompt_logprobs(self, step: Step, ends: Ints) -> Iterator[Tensor]:
        """The records of each of step.prompt_logprobs. `ends`: where the last token of each work is."""
        for number, first, end, top in step.prompt_logprobs:
            row, start, length = step.works[number]
            begin = int(ends[number]) - (start + length - first)
            chunk = (begin, row, first - 1, end - first)
            hidden = self._forward.hidden(self._state, self._kv_cache, chunk)
            yield hidden_logprobs(hidden, self._state.token_ids[row, first:end], top, self._forward.logits_of)

    def _launch(self, kind: str, size: int) -> None:
        """The launches of one graph."""
        if kind in ("chunks", "decodes"):
            self._forward.body(self._inputs, self._state, self._kv_cache, size, chunks=kind == "chunks")
        else:
            self._head(kind, size)

    def _head(self, kind: str, size: int, processed: tuple[Ints, Ints] | None = None) -> None:
        """The samples' logits, tokens drawn from them and appended.

        Args:
            processed: the samples' rows and lengths, where users' processors are to change the logits.
        """
        inputs, state, scratch = self._inputs, self._state, self._scratch
        rows, lengths = inputs.sample_rows[:size], inputs.lengths[:size]
        tokens, failed = self._sampled[0, :size], self._sampled[1, :size]
        logits = self._forward.logits(inputs, state, self._kv_cache, size)
        if kind == "greedy":
            sampling.greedy(logits, rows, tokens, failed, scratch)
        elif kind == "adjusted":
            for first in range(0, size, len(self._adjusted)):
                part = slice(first, min(first + len(self._adjusted), size))
                at, adjusted = (rows[part], lengths[part]), self._adjusted[: part.stop - first]
                penalties.adjust(logits[part], *at, state.token_ids, state.adjustments, adjusted, self._counts)
                if processed is not None:
                    known = (processed[0][part], processed[1][part])
                    adjusted.copy_(self._sampler.process(adjusted, *known, state.token_ids))
                penalties.bar(adjusted, *at, state.adjustments, inputs.mask_of[part], inputs.masks)
                sampling.sample(adjusted, *at, state.params, tokens[part], failed[part], scratch)
        else:
            sampling.sample(logits, rows, lengths, state.params, tokens, failed, scratch, filters=kind == "filtered")
        append_tokens(rows, lengths, tokens, state.token_ids)

    # Sizes and memory.

    def _padded(self, shape: Shape) -> Shape:
        if not self._record:
            return shape
        tokens = padded(shape.tokens, self._token_sizes if shape.chunks else self._sample_sizes)
        return replace(shape, tokens=tokens, samples=padded(shape.samples, self._sample_sizes))

    def _graph_keys(self) -> list[tuple[str, int]]:
        """Largest first: the smaller ones then fit into memory that is there."""
        kinds = {"chunks": self._token_sizes, "decodes": self._sample_sizes}
        kinds |= dict.fromkeys(("greedy", "drawn", "filtered", "adjusted"), self._sample_sizes)
        return [(kind, size) for kind, sizes in kinds.items() for size in reversed(sizes)]

    def _trial_keys(self) -> list[tuple[str, int]]:
        keys = self._graph_keys()
        return [keys[at] for at in np.linspace(0, len(keys) - 1, _TRIALS).astype(int)]

    def _affordable_pages(self, config: EngineConfig) -> int:
        """Pages that fit into the budget beside what the driver says is in use, and the graphs still to come."""
        if not self._cuda:
            assert isinstance(config.memory_budget, int)
            return config.memory_budget // self.page_bytes
        total = torch.cuda.get_device_properties(self.device).total_memory
        allowed = allowed_bytes(config.memory_budget, total, CUDA_BUDGET)
        for key in self._trial_keys():
            self._launch(*key)
        taken = self._taken()
        if self._record:
            for key in self._trial_keys():
                self._graphs.record(key, partial(self._launch, *key))
            # Another process on the device may give memory back meanwhile: that is not multiplied.
            taken += max(0, self._taken() - taken) * len(self._graph_keys()) // len(self._graphs)
            self._graphs = Graphs()
        logits = _PROCESSED_COPIES * self._adjusted.nbytes if self._processors else 0
        logits += _LOGPROB_BYTES * SLICE * self.model_config.vocab_size
        padding_page = self.page_bytes
        return pages_within(allowed - taken - logits - _SPARE_BYTES - padding_page, self.page_bytes, self._page_size)

    def _taken(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def _new_pool(self, pages: int) -> Tensor:
        """(layers, pages, page_size, 2, kv_heads, head_dim), zero; in memory each head of a page is one piece."""
        model = self.model_config
        shape = (model.num_layers, pages, 2, model.num_kv_heads, self._page_size, model.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device).permute(0, 1, 4, 2, 3, 5)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Tells the end of the device from the failure of a step: after an error of the first kind all calls fail."""
        try:
            yield
        except torch.AcceleratorError as error:
            raise DeviceLost(str(error)) from error

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def _event(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _on_host(tensor: Tensor) -> Tensor:
    """A copy that is there when the stream has come so far."""
    return pinned(tensor.numel(), tensor.device).view(tensor.shape).copy_(tensor, non_blocking=True)


def _packed(init: RowInit) -> tuple[Ints, Ints]:
    params = init.params
    assert params.seed is not None
    values = sampling.pack_params(
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        top_k=params.top_k,
        seed=params.seed,
        index=init.index,
    )
    adjustments = penalties.pack_adjustments(
        repetition=max(params.repetition_penalty, LEAST_REPETITION_PENALTY),
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        prompt_length=init.prompt_length,
        bias=params.logit_bias,
        barred=init.stop_mask,
        # No token is drawn behind max_tokens, and what the window holds fits into the table's integers.
        barred_until=init.prompt_length + min(params.min_tokens, params.max_tokens),
    )
    return np.array(values, np.int32), adjustments
