"""A logits processor of one's own: no three tokens in a row occur twice in a sequence.

    fulcrum serve --logits-processor examples.logits_processors:NoRepeatTrigram

The module must be importable where the engine runs (for a module in the current folder: PYTHONPATH=.).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.logits import LogitsRow


class NoRepeatTrigram:
    """Forbids every token that would complete a trigram which the sequence, prompt included, already holds."""

    size = 3

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device

    def __call__(self, logits: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
        """Sets the logits of forbidden tokens to -inf, in place."""
        for row_logits, row in zip(logits, rows, strict=True):
            if len(row.token_ids) < self.size:
                continue
            ngrams = row.token_ids.unfold(0, self.size, 1)  # (length - 2, 3)
            same_start = (ngrams[:, :-1] == row.token_ids[1 - self.size :]).all(-1)
            row_logits[ngrams[same_start, -1].to(torch.int64)] = -torch.inf
        return logits
