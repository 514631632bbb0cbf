"""Reads the model in a GGUF file: its configuration, and its weights under their Hugging Face names.

Knows neither the layers that the weights go into nor what the tokenizer's metadata mean.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from engine.model.config import ModelConfig
from engine.model.errors import ModelError
from engine.model.gguf_config import generation_config, hf_config
from engine.model.gguf_header import TensorInfo, read_gguf

# Part of the configuration, not of the weights: how Llama 3 stretches its context.
ROPE_DIVISORS = "rope_freqs.weight"
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFCheckpoint:
    """The model in one GGUF file: `config`, `metadata`, and `tensors()` under Hugging Face names.

    Raises:
        ModelError: not a GGUF file, truncated, an architecture or a quantisation that is not supported.
    """

    def __init__(self, path: Path) -> None:
        file = read_gguf(path)
        self.path = self.file = path
        self.metadata = file.metadata
        self._data = file.data
        self._infos = file.tensors
        if self.metadata.get("split.count", 0) not in (0, 1):
            raise ModelError(f"{path}: one of several files; join them first: llama-gguf-split --merge FIRST WHOLE")
        self._check_kinds()
        self._dimensions = hf_config(self.metadata, self._infos, path)
        self.config = ModelConfig.from_hf(self._dimensions, generation_config(self.metadata))
        if ROPE_DIVISORS in self._infos:
            divisors = self._read(self._infos.pop(ROPE_DIVISORS)).flatten().tolist()
            # Positive, and no infinities or NaN.
            if len(divisors) != self.config.head_dim // 2 or not all(1e-6 < one < 1e6 for one in divisors):
                raise ModelError(f"{path}: tensor {ROPE_DIVISORS} does not hold a divisor for each frequency")
            self.config = replace(self.config, rope=replace(self.config.rope, divisors=tuple(divisors)))

    @property
    def total_bytes(self) -> int:
        """Size of all that `tensors()` yields."""
        sizes = {GGMLQuantizationType.F16: 2, GGMLQuantizationType.BF16: 2}
        return sum(math.prod(info.shape) * sizes.get(info.kind, 4) for info in self._infos.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (Hugging Face name, tensor on the CPU), one in memory at a time.

        F16 and BF16 come as they are stored, everything else as float32.

        Raises:
            ModelError: a tensor that no supported architecture has.
        """
        for info in self._infos.values():
            yield _hf_name(info.name, self.path), self._read(info)

    def _check_kinds(self) -> None:
        for info in self._infos.values():
            try:
                gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[info.kind][1]), np.uint8), info.kind)
            except NotImplementedError as error:
                raise ModelError(
                    f"{self.path}: tensor {info.name} has the quantisation {info.kind.name}, which is not supported"
                ) from error

    def _read(self, info: TensorInfo) -> torch.Tensor:
        rows = np.frombuffer(self._data, np.uint8, info.nbytes, info.start).reshape(-1, info.row_bytes)
        rows = self._unpermuted(info, rows)
        if info.kind in (GGMLQuantizationType.F16, GGMLQuantizationType.BF16):
            dtype = torch.float16 if info.kind == GGMLQuantizationType.F16 else torch.bfloat16
            return torch.from_numpy(np.array(rows)).view(dtype).reshape(info.shape)
        values = gguf.dequantize(rows, info.kind).astype(np.float32, copy=False).reshape(info.shape)
        # Stored floats are a view of the read-only file.
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def _unpermuted(self, info: TensorInfo, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Undoes the order of q and k rows that GGUF has for llama, whose rotary pairs lie side by side there.

        Rows are quantised one by one, so they can be moved before they are dequantised. In a bias, a row is one value.
        """
        match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", info.name)
        if self.metadata["general.architecture"] != "llama" or match is None:
            return rows
        heads = self._dimensions["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        if match[2] == "bias":
            rows = rows.reshape(info.shape[0], -1)
        if rows.shape[0] % (2 * heads):
            raise ModelError(f"{self.path}: tensor {info.name} has {rows.shape[0]} rows for {heads} heads")
        # (head, pair, half) -> (head, half, pair)
        return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _hf_name(name: str, path: Path) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in TENSORS:
        raise ModelError(f"{path}: unexpected tensor {name:.200}")
    layer = f"model.layers.{match[1]}." if match[1] is not None else ""
    return f"{layer}{TENSORS[match[2]]}.{match[3]}"
