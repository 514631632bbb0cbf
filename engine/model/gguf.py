"""Reads the model in a GGUF file: its configuration, and its weights under their Hugging Face names.

Knows neither the layers that the weights go into nor what the tokenizer's metadata mean.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from engine.model.config import ModelConfig
from engine.model.errors import ModelError
from engine.model.gguf_header import TensorInfo, read_gguf, read_gguf_metadata

__all__ = ["GGUFCheckpoint", "read_gguf_metadata"]

# GGUF architecture -> (architectures[0], model_type) of the Hugging Face config.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}

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
# Part of the configuration, not of the weights.
ROPE_FACTORS = "rope_freqs.weight"


class GGUFCheckpoint:
    """The model in one GGUF file: `config`, `metadata`, and `tensors()` under Hugging Face names.

    Raises:
        ModelError: not a GGUF file, truncated, an architecture or a quantisation that is not supported.
    """

    def __init__(self, path: Path) -> None:
        file = read_gguf(path)
        self.path = path
        self.metadata = file.metadata
        self._data = file.data
        self._infos = file.tensors
        self._check_kinds()
        self._dimensions = hf_config(self.metadata, self._infos, path)
        if ROPE_FACTORS in self._infos:
            factors = self._read(self._infos.pop(ROPE_FACTORS)).double().numpy()
            self._dimensions["rope_scaling"] = _llama3_scaling(factors, self._dimensions, path)
        self.config = ModelConfig.from_hf(self._dimensions, generation_config(self.metadata))

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
        # (head, pair, half) -> (head, half, pair)
        return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _hf_name(name: str, path: Path) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in TENSORS:
        raise ModelError(f"{path}: unexpected tensor {name}")
    layer = f"model.layers.{match[1]}." if match[1] is not None else ""
    return f"{layer}{TENSORS[match[2]]}.{match[3]}"


def hf_config(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], path: Path) -> dict[str, Any]:
    """Translates GGUF metadata into the fields of a Hugging Face config.json.

    Raises:
        ModelError: an unsupported architecture, or a field that is missing or not uniform over the layers.
    """
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{path}: the GGUF architecture {arch!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )

    def field(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise ModelError(f"{path}: {arch}.{key} is missing from the GGUF metadata")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{path}: {arch}.{key} differs from layer to layer, which is not supported")
            return value[0]
        return value

    if field("expert_count", 0):
        raise ModelError(f"{path}: a mixture of experts ({arch}.expert_count) is not supported")
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path}: tensor token_embd.weight is missing")
    heads = field("attention.head_count")
    hidden = field("embedding_length")
    head_dim = field("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if field(key, head_dim) != head_dim:
            raise ModelError(f"{path}: {arch}.{key} is {field(key)}, but only the head size {head_dim} is supported")
    architecture, model_type = ARCHITECTURES[arch]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": field("context_length"),
        # Stored as float32: 1e-5 comes back as 9.999999747e-06 and is meant as 1e-5.
        "rms_norm_eps": float(f"{field('attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_theta": float(field("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }
    if scaling := _rope_scaling(metadata, arch, path):
        config["rope_scaling"] = scaling
    if window := metadata.get(f"{arch}.attention.sliding_window"):
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
        if arch == "llama":
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    if "tokenizer.ggml.bos_token_id" in metadata:
        config["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
    return config


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Translates GGUF metadata into the fields of a Hugging Face generation_config.json: ends and sampling defaults."""
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    sampling = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    for key, name in sampling.items():
        if f"general.sampling.{key}" in metadata:
            value = metadata[f"general.sampling.{key}"]
            config[name] = float(f"{value:.7g}") if isinstance(value, float) else value
    return config


def _rope_scaling(metadata: Mapping[str, Any], arch: str, path: Path) -> dict[str, Any] | None:
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    # Before scaling types there was one factor, for linear.
    factor = metadata.get(f"{arch}.rope.scaling.factor", metadata.get(f"{arch}.rope.scale_linear", 1.0))
    if kind == "none" and factor != 1.0:
        kind = "linear"
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        if original := metadata.get(f"{arch}.rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = original
        # On top of the paper's 0.1 ln(factor) + 1 (arXiv:2309.00071, section 3.4).
        if (extra := metadata.get(f"{arch}.rope.scaling.attn_factor", 1.0)) != 1.0:
            scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
        for name in ("beta_fast", "beta_slow"):
            if value := metadata.get(f"{arch}.rope.scaling.yarn_{name}"):
                scaling[name] = value
        return scaling
    raise ModelError(f"{path}: the rope scaling {kind!r} is not supported; supported: linear, yarn, llama3")


def _llama3_scaling(factors: NDArray[np.float64], config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Finds the parameters of Llama 3's rope scaling, of which GGUF stores only the divisors of the frequencies.

    Between the two bands, 1/divisor = (1 - s)/factor + s with s = (old / wavelength - low) / (high - low): a straight
    line in the frequency, which two points fix. `old` can be chosen freely, as only old/low and old/high have effect.

    Args:
        factors: divisors, float64[head_dim / 2].
    """
    dim = config["head_dim"]
    frequencies = config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    if factors.shape != frequencies.shape:
        raise ModelError(f"{path}: tensor {ROPE_FACTORS} has {factors.size} entries, not {frequencies.size}")
    factor, old = float(factors.max()), 8192
    low, high = 1.0, 4.0  # Llama 3.1 and 3.2

    def divisors() -> NDArray[np.float64]:
        smooth = np.clip((old * frequencies / (2 * math.pi) - low) / (high - low), 0, 1)
        divisor: NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
        return divisor

    between = (factors > 1 + 1e-5) & (factors < factor * (1 - 1e-5))
    if not np.allclose(divisors(), factors, rtol=1e-5) and between.sum() >= 2:
        smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        slope, offset = np.polyfit(frequencies[between], smooth, 1)
        width = old / (2 * math.pi * slope)
        low, high = float(f"{-offset * width:.5g}"), float(f"{(1 - offset) * width:.5g}")
    if not np.allclose(divisors(), factors, rtol=1e-4):
        raise ModelError(f"{path}: tensor {ROPE_FACTORS} holds other factors than Llama 3's rope scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": old,
    }
