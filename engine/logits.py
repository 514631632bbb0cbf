"""User logits processors: what they are called with, and how they are found. Knows nothing of sampling."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """What a processor may know of one row of the logits.

    Args:
        token_ids: (length,) int32 on the device, read only: the prompt and every token generated before this step.
        prompt_length: how many of them are the prompt.
        index: which of the request's n continuations.
        params: the request's sampling parameters.
    """

    token_ids: Tensor
    prompt_length: int
    index: int
    params: SamplingParams


class LogitsProcessor(Protocol):
    """Changes the logits of a step before a token is chosen.

    The class is constructed once as `Class(vocab_size=int, device=torch.device)`. On CUDA a step of more than 64 rows
    calls it several times, with some of the rows each.
    """

    def __call__(self, logits: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
        """Returns the new logits, (N, V) float32 on the same device; may write into `logits` and return it.

        Args:
            logits: (N, V) float32, after logit_bias and penalties.
            rows: N, in the order of the logits.
        """
        ...


class LogitsProcessorError(RuntimeError):
    """A user logits processor raised, or returned something that is not logits; the message names the processor."""


def load_logits_processors(specs: Sequence[str], *, vocab_size: int, device: torch.device) -> list[LogitsProcessor]:
    """Imports and constructs the processors "package.module:Class", in order.

    Raises:
        ValueError: naming the spec and what is wrong with it.
    """
    return [_load(spec, vocab_size, device) for spec in specs]


def _load(spec: str, vocab_size: int, device: torch.device) -> LogitsProcessor:
    module_name, colon, class_name = spec.partition(":")
    if not colon or not all(name.isidentifier() for name in (*module_name.split("."), class_name)):
        raise ValueError(f"logits processor {spec!r}: must be of the form package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does while it is imported
        raise ValueError(f"logits processor {spec!r}: cannot import {module_name}: {error!r}") from error
    try:
        processor: LogitsProcessor = getattr(module, class_name)(vocab_size=vocab_size, device=device)
    except Exception as error:  # it is not there, or whatever the user's constructor does
        raise ValueError(f"logits processor {spec!r}: cannot construct {class_name}: {error!r}") from error
    if not callable(processor):
        raise ValueError(f"logits processor {spec!r}: a {class_name} is not callable (it needs a __call__ method)")
    return processor


def apply_logits_processors(processors: Sequence[LogitsProcessor], logits: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
    """The logits after all processors; each is held to its word.

    Raises:
        LogitsProcessorError: naming the processor that raised or returned a wrong type, shape, dtype or device.
    """
    for processor in processors:
        name = f"{type(processor).__module__}:{type(processor).__qualname__}"
        try:
            result: object = processor(logits, rows)
        except Exception as error:  # whatever the user's processor does
            raise LogitsProcessorError(f"logits processor {name} raised {error!r}") from error
        if not isinstance(result, Tensor):
            raise LogitsProcessorError(f"logits processor {name} returned {type(result).__name__}, not a tensor")
        for what in ("shape", "dtype", "device"):
            if (got := getattr(result, what)) != (wanted := getattr(logits, what)):
                raise LogitsProcessorError(f"logits processor {name} returned {what} {got}, not {wanted}")
        logits = result
    return logits
