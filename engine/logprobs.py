"""How logprobs travel from the runner to their reader: a record of 4 + 8 k bytes for each token. Knows no torch.

A record is the token's own logprob, then the k likeliest tokens, likeliest first, each as its id and its logprob: int32
and float32, little endian. Logprobs are natural logarithms of the model's raw distribution: the softmax of its logits
in float32, before bias, penalties, users' processors, masks and temperature. (-inf is one, too.)
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.step import Step


class TokenLogprob(NamedTuple):
    """A token's logprob, and (token id, logprob) of the likeliest tokens at its place, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def read_logprobs(records: bytes | bytearray, top: int) -> Iterator[TokenLogprob]:
    """The records of tokens for which `top` of the likeliest were asked for."""
    for own, *rest in struct.iter_unpack("<f" + "if" * top, records):
        yield TokenLogprob(own, tuple(zip(rest[::2], rest[1::2], strict=True)))


def split_records(
    step: Step, packed: list[NDArray[np.signedinteger[Any]]]
) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """What a runner computed as StepResult has it: a record for each of step.logprobs, and those of its prompts.

    Args:
        packed: of `kernels.logprobs`: of step.logprobs together if there are any, then of each of step.prompt_logprobs.
    """
    if not packed:
        return (), ()
    samples = packed.pop(0) if step.logprobs else ()
    records = zip(samples, step.logprobs, strict=True)
    return tuple(one[: 1 + 2 * top].tobytes() for one, (_, top) in records), tuple(part.tobytes() for part in packed)
