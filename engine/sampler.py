"""From logits to tokens: which stage works on which rows, in the order that SamplingParams documents.

Every row's parameters lie in tensors on the device, indexed by row; what a step's rows do not use is skipped. Knows nothing of
the model, of pages or of when a sequence ends.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.logits import LogitsProcessor, LogitsRow, apply_logits_processors
from engine.request import SamplingParams
from engine.step import RowInit
from kernels.sampling import (
    draw,
    min_p_filter,
    presence_frequency_penalty,
    repetition_penalty,
    scale,
    token_counts,
    token_weights,
    top_k_filter,
    top_p_filter,
    uniform,
)

# Below this a temperature is greedy: dividing by it would only overflow.
GREEDY_TEMPERATURE: Final = 1e-5


class _Uses(enum.IntFlag):
    """The stages that a row needs."""

    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    BIAS = 16
    REPETITION = 32
    PRESENCE_FREQUENCY = 64


def _uses(params: SamplingParams, vocab_size: int) -> _Uses:
    uses = _Uses(0)
    if params.logit_bias:
        uses |= _Uses.BIAS
    if params.repetition_penalty != 1:
        uses |= _Uses.REPETITION
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        uses |= _Uses.PRESENCE_FREQUENCY
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


class Sampler:
    """Chooses one token for each row of a step.

    Args:
        vocab_size: V, the width of the logits.
        device: where logits and token ids are.
        max_num_seqs: how many rows there are.
        processors: user logits processors, applied in order to every step.
    """

    def __init__(
        self, *, vocab_size: int, device: torch.device, max_num_seqs: int, processors: Sequence[LogitsProcessor]
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._processors = tuple(processors)
        # On the host, to decide without asking the device which stages a step needs.
        self._inits: list[RowInit | None] = [None] * max_num_seqs
        self._uses = np.zeros(max_num_seqs, dtype=np.uint8)
        self._top_k_host = np.zeros(max_num_seqs, dtype=np.int64)
        # Generated tokens start at, and the stop mask ends at, these lengths of the row.
        self._prompt_length_host = np.zeros(max_num_seqs, dtype=np.int64)
        self._masked_until = np.zeros(max_num_seqs, dtype=np.int64)
        self._stop_ids: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * max_num_seqs
        self._bias_ids: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * max_num_seqs
        self._bias: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * max_num_seqs
        # On the device, one column a row: a new row costs two small copies.
        self._floats = torch.zeros(6, max_num_seqs, dtype=torch.float64, device=device)
        self._ints = torch.zeros(4, max_num_seqs, dtype=torch.int64, device=device)
        self._temperature, self._min_p, self._repetition, self._presence, self._frequency = self._floats[:5].to(
            torch.float32
        )
        self._top_p = self._floats[5]
        self._top_k, self._seed, self._index, self._prompt_length = self._ints
