"""From logits to tokens: which stage works on which rows of a step, in the order that SamplingParams documents.

The rows' parameters lie on the host. A stage that no row of the step needs is skipped; one that some need sees only
those. Knows nothing of the model, of pages or of when a sequence ends.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.logits import LogitsProcessor, LogitsRow, apply_logits_processors
from engine.request import SamplingParams
from engine.step import RowInit
from kernels.sampling import (
    draw,
    min_p_bound,
    min_p_filter,
    penalize,
    scale,
    token_weights,
    top_k_filter,
    top_p_filter,
    uniform,
)

# Below this a temperature is greedy: dividing by it would only overflow.
GREEDY_TEMPERATURE: Final = 1e-5
# A lower repetition penalty counts as this: dividing by it would overflow too, and this one favours what has occurred
# without bounds already.
LEAST_REPETITION_PENALTY: Final = 1e-5


Integers = NDArray[np.integer[Any]]
# (position among the rows, bits of the tokens that may be drawn), as in Step.masks.
Masks = Sequence[tuple[int, bytes]]


class _Uses(enum.IntFlag):
    """The stages that a row needs."""

    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    BIAS = 16
    PENALTIES = 32


def _uses(params: SamplingParams, vocab_size: int) -> _Uses:
    uses = _Uses(0)
    if params.logit_bias:
        uses |= _Uses.BIAS
    if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
        uses |= _Uses.PENALTIES
    if params.temperature < GREEDY_TEMPERATURE:
        return uses  # no filter takes the likeliest token away
    uses |= _Uses.RANDOM
    if 0 < params.top_k < vocab_size:
        uses |= _Uses.TOP_K
    if params.top_p < 1:
        uses |= _Uses.TOP_P
    if params.min_p > 0:
        uses |= _Uses.MIN_P
    return uses


@dataclass(frozen=True, slots=True)
class _Batch:
    """The rows of a step and how many tokens of each are known: on the host to decide, on the device to compute."""

    host_row: NDArray[np.int64]
    host_length: NDArray[np.int64]
    row: Tensor
    length: Tensor

    def select(self, host_at: NDArray[np.int64], at: Tensor) -> "_Batch":
        return _Batch(self.host_row[host_at], self.host_length[host_at], self.row[at], self.length[at])


class Sampler:
    """Chooses one token for each row of a step.

    Args:
        vocab_size: V, the width of the logits.
        device: where logits and token ids are.
        max_num_seqs: how many rows there are.
        processors: user logits processors, applied in order in every step.
    """

    def __init__(
        self, *, vocab_size: int, device: torch.device, max_num_seqs: int, processors: Sequence[LogitsProcessor]
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._processors = tuple(processors)
        # On the host: the device is never asked which stages a step needs, and is given what those need.
        self._params: dict[int, SamplingParams] = {}
        self._uses = np.zeros(max_num_seqs, dtype=np.uint8)
        self._masked_until = np.zeros(max_num_seqs, dtype=np.int64)  # the row's length once min_tokens are generated
        self._stop_ids = [np.empty(0, dtype=np.int64)] * max_num_seqs
        self._bias_ids = [np.empty(0, dtype=np.int64)] * max_num_seqs
        self._bias = [np.empty(0, dtype=np.float32)] * max_num_seqs
        self._floats = np.zeros((6, max_num_seqs), dtype=np.float64)
        self._temperature, self._top_p, self._min_p, self._repetition, self._presence, self._frequency = self._floats
        self._ints = np.zeros((4, max_num_seqs), dtype=np.int64)
        self._top_k, self._seed, self._index, self._prompt_length = self._ints

    def add_row(self, init: RowInit) -> None:
        """A sequence takes a row, its seed set; what the row held before is forgotten."""
        params, row = init.params, init.row
        assert params.seed is not None
        self._params[row] = params
        self._uses[row] = _uses(params, self._vocab_size)
        self._stop_ids[row] = np.array(init.stop_mask, dtype=np.int64)
        self._masked_until[row] = init.prompt_length + params.min_tokens if init.stop_mask else 0
        self._bias_ids[row] = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias[row] = np.array(list(params.logit_bias.values()), dtype=np.float32)
        floats = (
            params.temperature,
            params.top_p,
            params.min_p,
            max(params.repetition_penalty, LEAST_REPETITION_PENALTY),
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._floats[:, row] = floats
        seed = ((params.seed + 2**63) % 2**64) - 2**63  # the same 64 bits, as a signed integer
        self._ints[:, row] = (min(params.top_k, self._vocab_size), seed, init.index, init.prompt_length)

    def sample(
        self, logits: Tensor, rows: Sequence[int], token_ids: Tensor, num_tokens: Sequence[int], masks: Masks = ()
    ) -> tuple[Tensor, Tensor]:
        """One token for each row, that depends on that row alone.

        Args:
            logits: (N, V) float32, of the last known token of each row; not changed.
            rows: N rows, each added before.
            token_ids: (max_num_seqs, max_len) int32: every row's tokens, prompt first.
            num_tokens: N: how many tokens of each row are known. Anything may stand behind them.
            masks: of the rows that a grammar limits.

        Returns:
            (N,) int64 tokens, and (N,) bool: whose logits (after user processors and masks) hold a NaN or +inf, or
            nothing above -inf. Their token is 0.

        Raises:
            LogitsProcessorError: a user's processor raised, or returned something that is not logits.
        """
        row, length = np.asarray(rows, dtype=np.int64), np.asarray(num_tokens, dtype=np.int64)
        batch = _Batch(row, length, self._put(row), self._put(length))
        logits = self._allow(self._adjust(logits, batch, token_ids), masks)
        random = self._positions(batch, _Uses.RANDOM)
        if random.size and random.size == batch.host_row.size:
            largest = logits.amax(-1)  # twenty times cheaper on a CPU than with the index
            tokens = self._draw(logits, largest, batch)
        else:
            largest, tokens = logits.max(-1)
            if random.size:
                at = self._put(random)
                tokens[at] = self._draw(logits[at], largest[at], batch.select(random, at))
        failed = ~largest.isfinite()
        return tokens.masked_fill_(failed, 0), failed

    def draws(self, rows: Integers) -> bool:
        """Whether one of these rows needs a random number."""
        return bool((self._uses[rows] & _Uses.RANDOM).any())

    def filters(self, rows: Integers) -> bool:
        """Whether one of these rows has top_k or top_p."""
        return bool((self._uses[rows] & (_Uses.TOP_K | _Uses.TOP_P)).any())

    def adjusts(self, rows: Integers, num_tokens: Integers) -> bool:
        """Whether one of these rows has bias, penalties or barred stop tokens."""
        stages = (self._uses[rows] & (_Uses.BIAS | _Uses.PENALTIES)) != 0
        return bool((stages | (num_tokens < self._masked_until[rows])).any())

    def process(self, logits: Tensor, rows: Integers, num_tokens: Integers, token_ids: Tensor) -> Tensor:
        """What users' processors make of the logits of rows (as in `sample`), into which they may write.

        Raises:
            LogitsProcessorError: a processor raised, or returned something that is not logits.
        """
        return apply_logits_processors(self._processors, logits, self._logits_rows(rows, num_tokens, token_ids))

    def _adjust(self, logits: Tensor, batch: _Batch, token_ids: Tensor) -> Tensor:
        """The logits after bias, penalties, user processors and stop mask: all that changes the order of tokens."""
        biased = self._positions(batch, _Uses.BIAS)
        penalized = self._positions(batch, _Uses.PENALTIES)
        masked = np.flatnonzero(batch.host_length < self._masked_until[batch.host_row])
        if biased.size or self._processors:
            logits = logits.clone()  # these write into it
        if biased.size:
            bias = np.concatenate([self._bias[row] for row in batch.host_row[biased]])
            logits.index_put_(self._entries(self._bias_ids, batch, biased), self._put(bias), accumulate=True)
        if penalized.size:
            # The history as it is on the device now: tokens that the host has not seen yet included.
            history = token_ids[:, : int(batch.host_length[penalized].max())]

            def penalties(part: _Batch, logits: Tensor) -> Tensor:
                return penalize(
                    logits,
                    history[part.row],
                    self._put(self._prompt_length[part.host_row]),
                    part.length,
                    repetition=self._put(self._repetition[part.host_row]).float(),
                    presence=self._put(self._presence[part.host_row]).float(),
                    frequency=self._put(self._frequency[part.host_row]).float(),
                )

            logits = self._stage(penalized, penalties, batch, logits)
        if self._processors:
            logits = self.process(logits, batch.host_row, batch.host_length, token_ids)
        if masked.size:
            barred = torch.full((), -torch.inf, device=self._device)
            logits = logits.index_put(self._entries(self._stop_ids, batch, masked), barred)
        return logits

    def _allow(self, logits: Tensor, masks: Masks) -> Tensor:
        """Leaves -inf where a mask has no bit."""
        if not masks:
            return logits
        at = self._put(np.array([position for position, _ in masks], np.int64))
        octets = self._put(np.frombuffer(b"".join(bits for _, bits in masks), np.uint8).reshape(len(masks), -1).copy())
        bits = octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=self._device) & 1
        barred = bits.flatten(1)[:, : self._vocab_size] == 0
        return logits.index_copy(0, at, logits[at].masked_fill(barred, -torch.inf))

    def _draw(self, logits: Tensor, largest: Tensor, batch: _Batch) -> Tensor:
        """Temperature, top_k, top_p, min_p, and a token out of what is left."""

        def top_k(part: _Batch, weights: Tensor, scores: Tensor) -> Tensor:
            largest_k = int(self._top_k[part.host_row].max())
            return top_k_filter(weights, scores, self._put(self._top_k[part.host_row]), largest_k)

        def top_p(part: _Batch, weights: Tensor, scores: Tensor) -> Tensor:
            min_p, eligible = self._min_p[part.host_row], None
            if min_p.any():
                eligible = scores >= min_p_bound(self._put(min_p).float())
            return top_p_filter(weights, self._put(self._top_p[part.host_row]), eligible)

        def min_p(part: _Batch, weights: Tensor, scores: Tensor) -> Tensor:
            return min_p_filter(weights, scores, self._put(self._min_p[part.host_row]).float())

        scores = scale(logits, largest, self._put(self._temperature[batch.host_row]).float())
        weights = token_weights(scores)
        weights = self._stage(self._positions(batch, _Uses.TOP_K), top_k, batch, weights, scores)
        weights = self._stage(self._positions(batch, _Uses.TOP_P), top_p, batch, weights, scores)
        weights = self._stage(self._positions(batch, _Uses.MIN_P), min_p, batch, weights, scores)
        seed, index = self._put(self._seed[batch.host_row]), self._put(self._index[batch.host_row])
        return draw(weights, uniform(seed, index, batch.length))

    def _stage(
        self, needed: NDArray[np.int64], change: Callable[..., Tensor], batch: _Batch, values: Tensor, *also: Tensor
    ) -> Tensor:
        """Puts change(part of the batch, its values, its rows of `also`) in the place of the values that need it."""
        if needed.size == 0:
            return values
        if needed.size == batch.host_row.size:
            return change(batch, values, *also)
        at = self._put(needed)
        return values.index_copy(0, at, change(batch.select(needed, at), values[at], *(other[at] for other in also)))

    def _positions(self, batch: _Batch, stage: _Uses) -> NDArray[np.int64]:
        """Which of the batch's rows need the stage."""
        return np.flatnonzero(self._uses[batch.host_row] & stage)

    def _entries(
        self, ids: list[NDArray[np.int64]], batch: _Batch, positions: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """Index of the logits of each row's own token ids, for the rows at these positions."""
        chosen = [ids[row] for row in batch.host_row[positions]]
        return self._put(np.repeat(positions, [len(row) for row in chosen])), self._put(np.concatenate(chosen))

    def _logits_rows(self, rows: Integers, num_tokens: Integers, token_ids: Tensor) -> list[LogitsRow]:
        prompts, indexes = self._prompt_length[rows].tolist(), self._index[rows].tolist()
        return [
            LogitsRow(token_ids[row, :length], prompt_length, index, self._params[row])
            for row, length, prompt_length, index in zip(
                rows.tolist(), num_tokens.tolist(), prompts, indexes, strict=True
            )
        ]

    def _put(self, array: Integers | NDArray[np.float32] | NDArray[np.float64]) -> Tensor:
        host = torch.from_numpy(array)
        if self._device.type == "cuda":
            host = host.pin_memory()  # the copy would wait for the device otherwise
        return host.to(self._device, non_blocking=True)
