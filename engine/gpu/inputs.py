"""What a step tells the device: one array of integers, made on the host and copied once. Knows no model.

The flattened tokens are ordered: works of one token first (decodes, those of a row together), then chunks of prompts,
then padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.errors import ModelError
from engine.step import RowInit, Step
from kernels.gpu.penalties import TABLE_WIDTH
from kernels.gpu.prefill_attention import max_tiles, prefill_tiles

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a step is.

    Args:
        tokens, samples: with padding.
        num_samples: without.
        chunks: whether it has works of more than one token.
    """

    tokens: int
    samples: int
    num_samples: int
    chunks: bool


class StepInputs:
    """The array on the device, in parts.

    Attributes:
        num_decodes: (1,) works of one token.
        num_samples: (1,) samples.
        num_tiles: (2,) of `prefill_attention`: how many tiles, and its kernel's counter.
        rows, positions: (max_tokens,) of each token; row -1 is padding.
        last: (max_samples,) the token whose logits each sample is drawn from.
        last_rows, last_positions: (max_samples,) that token's.
        sample_rows, lengths: (max_samples,) the row of each sample (-1 is padding), and how many tokens it follows.
        mask_of: (max_samples,) which of the step's masks limits each sample; -1: none.
        tiles: (max_tiles, 4) of `prefill_attention`.
        masks: (max_samples, V / 32) of `kernels.gpu.penalties`; sent beside the array, in a step that has some.

    Args:
        max_tokens, max_samples: largest step.
        block_m: queries of a tile.
        vocab_size: V, the width of a mask in bits.
    """

    def __init__(self, max_tokens: int, max_samples: int, block_m: int, vocab_size: int, device: torch.device) -> None:
        self._block_m = block_m
        tiles = max_tiles(max_tokens, 2 * max_samples, block_m)
        sizes = (1, 1, 2, max_tokens, max_tokens, *[max_samples] * 6, 4 * tiles)
        # Tiles begin where their four integers can be read at once.
        starts = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes)]).tolist()
        self._parts = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self._all = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        parts = [self._all[part] for part in self._parts]
        self.num_decodes, self.num_samples, self.num_tiles, self.rows, self.positions = parts[:5]
        self.last, self.last_rows, self.last_positions, self.sample_rows, self.lengths, self.mask_of = parts[5:11]
        self.tiles = parts[11].view(tiles, 4)
        self.masks = torch.empty(max_samples, -(-vocab_size // 32), dtype=torch.int32, device=device)

    def send(self, step: Step, pad: Callable[[Shape], Shape]) -> tuple[Shape, Ints, Ints, Ints]:
        """Copies a step's works and samples to the device, in the order of its stream.

        Args:
            pad: makes the shape larger where that is wanted.

        Returns:
            The shape; for each sample its row, and how many of that row's tokens it follows; for each work where its
            last token is.
        """
        host = pinned(self._all.numel(), self._all.device)
        array: Ints = host.numpy()
        num_decodes, num_samples, num_tiles, rows, positions, *of_samples, tiles = (array[part] for part in self._parts)
        last, last_rows, last_positions, sample_rows, sample_lengths, mask_of = of_samples
        works = _integers(step.works, 3)
        several = works[:, 2] > 1
        order = np.lexsort((works[:, 0], several)) if step.drafts else np.argsort(several, kind="stable")
        ordered = works[order]
        ends = np.cumsum(ordered[:, 2])
        firsts = ends - ordered[:, 2]
        total = int(ends[-1])
        # More single tokens than a step has samples occur in static batching alone: the rest are chunks.
        decodes = min(int(np.count_nonzero(ordered[:, 2] == 1)), len(last))
        count = len(step.samples)
        shape = pad(Shape(total, count, count, total > decodes))
        padded, padded_samples = shape.tokens, shape.samples
        num_decodes[0], num_samples[0] = decodes, count
        rows[:total] = np.repeat(ordered[:, 0], ordered[:, 2])
        rows[total:padded] = -1
        positions[:total] = np.arange(total) + np.repeat(ordered[:, 1] - firsts, ordered[:, 2])
        positions[total:padded] = 0
        num_tiles[:] = 0
        if shape.chunks:
            chunks = prefill_tiles(np.column_stack((firsts, ordered))[decodes:].tolist(), self._block_m)
            num_tiles[0] = len(chunks)
            tiles[: chunks.size] = chunks.ravel()

        samples = _integers(step.samples, 2)
        token_of = np.empty(len(works), np.int32)
        token_of[order] = ends - 1
        drawn_from, drawn_rows = samples.T
        known = works[drawn_from, 1] + works[drawn_from, 2]
        last[:count], last_rows[:count], last_positions[:count] = token_of[drawn_from], works[drawn_from, 0], known - 1
        sample_rows[:count], sample_lengths[:count] = drawn_rows, known
        last[count:padded_samples], sample_rows[count:padded_samples] = 0, -1
        sample_lengths[count:padded_samples] = 0
        mask_of[:padded_samples] = -1
        for mask, (sample, _) in enumerate(step.masks):
            mask_of[sample] = mask
        if step.masks:
            bits = np.frombuffer(b"".join(bits for _, bits in step.masks), np.int32)
            self.masks[: len(step.masks)].copy_(on_device(bits, self._all.device).view(len(step.masks), -1))
        self._all.copy_(host, non_blocking=True)
        return shape, drawn_rows, known, token_of


class Changes(NamedTuple):
    """What `kernels.gpu.rows.write_runs` takes: runs (R, 3), their values, and the longest run."""

    runs: Tensor
    payload: Tensor
    longest: int


class RowState:
    """Everything that the device keeps of the rows, in one array, so that one kernel brings a step's changes.

    Attributes:
        token_ids: (rows, max_model_len + 1) int32; one column more for the token sampled to the window's end.
        page_table: (rows, max_pages) int32.
        params: (rows, 8) int32, of `kernels.gpu.sampling`.
        adjustments: (rows, TABLE_WIDTH) int32, of `kernels.gpu.penalties`.
    """

    def __init__(self, rows: int, max_model_len: int, max_pages: int, device: torch.device) -> None:
        widths = (max_model_len + 1, max_pages, 8, TABLE_WIDTH)
        if rows * sum(widths) >= 1 << 31:
            raise ModelError(
                f"{rows} sequences of {max_model_len} tokens are too many: lower max_num_seqs or max_model_len"
            )
        self._starts = [rows * sum(widths[:part]) for part in range(len(widths))]
        self._widths = widths
        self.flat = torch.zeros(rows * sum(widths), dtype=torch.int32, device=device)
        ends = [*self._starts[1:], len(self.flat)]
        self.token_ids, self.page_table, self.params, self.adjustments = (
            self.flat[start:end].view(rows, width) for start, end, width in zip(self._starts, ends, widths, strict=True)
        )

    def changes(self, step: Step, pack: Callable[[RowInit], tuple[Ints, Ints]]) -> "Changes | None":
        """What a step changes in the rows before its works, on the device in the order of its stream; None: nothing.

        Args:
            pack: a row of `params`, and the beginning of one of `adjustments`.
        """
        pieces: list[tuple[int, Ints]] = []
        tokens, pages, sampling, adjustments = self._starts
        for init in step.inits:
            params, adjustment = pack(init)
            pieces.append((tokens + init.row * self._widths[0], np.array(init.tokens, np.int32)))
            pieces.append((sampling + init.row * self._widths[2], params))
            pieces.append((adjustments + init.row * self._widths[3], adjustment))
        for row, start, guesses in step.drafts:
            pieces.append((tokens + row * self._widths[0] + start, np.array(guesses, np.int32)))
        for update in step.page_updates:
            offset = pages + update.row * self._widths[1] + update.first
            pieces.append((offset, np.array(update.pages, np.int32)))
        if not pieces:
            return None
        lengths = np.array([len(values) for _, values in pieces])
        runs = np.stack(([offset for offset, _ in pieces], np.cumsum(lengths) - lengths, lengths), 1)
        # Kernels are compiled anew for a payload that is not aligned as the last one was.
        padding = np.zeros(-runs.size % 4, np.int32)
        values = (values for _, values in pieces)
        packed = np.concatenate([runs.ravel(), padding, *values], dtype=np.int32, casting="same_kind")
        array = on_device(packed, self.flat.device)
        return Changes(array[: runs.size].view(-1, 3), array[runs.size + padding.size :], int(lengths.max()))


def _integers(records: Sequence[tuple[int, ...]], width: int) -> Ints:
    """(N, width); several times faster than numpy's own reading of tuples."""
    return np.fromiter(chain.from_iterable(records), np.int32, width * len(records)).reshape(-1, width)


def pinned(size: int, device: torch.device) -> Tensor:
    """Integers on the host that `device` can read while it works; torch reuses them when it has."""
    return torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")


def on_device(array: Ints, device: torch.device) -> Tensor:
    """The array on the device, copied in the order of its stream."""
    host = pinned(array.size, device)
    host.numpy()[:] = array.ravel()
    return host.to(device, non_blocking=True).view(array.shape)
