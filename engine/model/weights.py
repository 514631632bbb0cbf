"""Fills a decoder with weights: every one exactly once, and nothing else."""

import logging
import re

import torch
from torch import Tensor
from tqdm import tqdm

from engine.model.checkpoint import Checkpoint
from engine.model.decoder import Decoder
from engine.model.errors import ModelError
from kernels.linear import Linear

logger = logging.getLogger(__name__)

# Old checkpoints hold the rotary frequencies, which follow from the configuration.
_HARMLESS = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_DUMMY_STD = 0.02


def load_weights(decoder: Decoder, checkpoint: Checkpoint, *, progress: bool) -> None:
    """Streams the checkpoint's tensors into the decoder, cast to its dtype.

    A head that is stored and differs from an embedding that it should be tied to is kept apart, as transformers does.

    Args:
        progress: show a bar on stderr.

    Raises:
        ModelError: a tensor that is missing, unexpected, there twice or of a wrong shape; or an unreadable file.
    """
    wanted = decoder.weights()
    loaded: set[str] = set()
    with tqdm(
        desc="loading weights", total=checkpoint.total_bytes, unit="B", unit_scale=True, disable=not progress
    ) as bar:
        for name, tensor in checkpoint.tensors():
            bar.update(tensor.numel() * tensor.element_size())
            if name in loaded:
                raise ModelError(f"{checkpoint.file}: tensor {name} is there twice")
            if name == "lm_head.weight" and decoder.config.tie_embeddings:
                wanted[name] = torch.empty_like(decoder.embedding)
            if name not in wanted:
                if _HARMLESS.fullmatch(name):
                    continue
                raise ModelError(f"{checkpoint.file}: unexpected tensor {name}")
            _copy(tensor, wanted[name], f"{checkpoint.file}: tensor {name}")
            loaded.add(name)
    missing = [name for name in wanted if name not in loaded]
    if missing:
        also = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelError(f"{checkpoint.path}: tensor {missing[0]} is missing{also}")
    head = wanted.get("lm_head.weight")
    if decoder.config.tie_embeddings and head is not None and not torch.equal(head, decoder.embedding):
        logger.warning("%s: lm_head.weight is not the embedding, though config.json ties them", checkpoint.path)
        decoder.lm_head = Linear(head)


def fill_dummy(decoder: Decoder, seed: int) -> None:
    """Fills the decoder on its device: norms with 1, everything else with seeded N(0, 0.02)."""
    weights = decoder.weights()
    device = decoder.embedding.device
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, _DUMMY_STD, generator=generator)


def _copy(tensor: Tensor, target: Tensor, what: str) -> None:
    if tensor.shape != target.shape:
        raise ModelError(f"{what} has the shape {tuple(tensor.shape)}, not {tuple(target.shape)}")
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ModelError(f"{what} is {tensor.dtype}, which is not supported")
    target.copy_(tensor)
