"""Translates GGUF metadata into the fields of Hugging Face's configuration files. Knows no weights and no torch."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.model.errors import ModelError
from engine.model.gguf_header import TensorInfo

# GGUF architecture -> architectures[0] of the Hugging Face config.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def hf_config(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], path: Path) -> dict[str, Any]:
    """Translates GGUF metadata into the fields of a Hugging Face config.json.

    Raises:
        ModelError: an unsupported architecture, or a field that is missing or not uniform over the layers.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ModelError(
            f"{path}: the GGUF architecture {arch!r:.200} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )

    def field(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise ModelError(f"{path}: {arch}.{key} is missing from the GGUF metadata")
        if isinstance(value, list):
            if not value or any(other != value[0] for other in value):
                raise ModelError(f"{path}: {arch}.{key} differs from layer to layer, which is not supported")
            return value[0]
        return value

    def size(key: str, default: int | None = None) -> int:
        value = field(key, default)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{path}: {arch}.{key} is {value!r:.200}, not a positive integer")
        return value

    if field("expert_count", 0):
        raise ModelError(f"{path}: a mixture of experts ({arch}.expert_count) is not supported")
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path}: tensor token_embd.weight is missing")
    heads = size("attention.head_count")
    hidden = size("embedding_length")
    head_dim = size("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if field(key, head_dim) != head_dim:
            raise ModelError(
                f"{path}: {arch}.{key} is {field(key)!r:.200}, but only the head size {head_dim} is supported"
            )
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": _decimal(_number(metadata, f"{arch}.attention.layer_norm_rms_epsilon", path)),
        "rope_theta": _number(metadata, f"{arch}.rope.freq_base", path, 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }
    if scaling := _rope_scaling(metadata, arch, path):
        config["rope_scaling"] = scaling
    if window := metadata.get(f"{arch}.attention.sliding_window"):
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
        if arch == "llama":
            config["architectures"] = ["MistralForCausalLM"]
    return config


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Translates GGUF metadata into the fields of a Hugging Face generation_config.json: ends and sampling defaults."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    # Unhashable ones too: config.py refuses what is no id.
    config: dict[str, Any] = {
        "eos_token_id": [end for n, end in enumerate(ends) if end is not None and end not in ends[:n]]
    }
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
            config[name] = _decimal(value) if isinstance(value, float) else value
    return config


def _decimal(value: float) -> float:
    """The decimal that was meant: as float32, 1e-5 comes back as 9.999999747e-06."""
    return float(f"{value:.7g}")


def _number(metadata: Mapping[str, Any], key: str, path: Path, default: float | None = None) -> float:
    """A positive number. Raises: ModelError."""
    value = metadata.get(key, default)
    if value is None:
        raise ModelError(f"{path}: {key} is missing from the GGUF metadata")
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{path}: {key} is {value!r:.200}, not a positive number")
    return float(value)


def _rope_scaling(metadata: Mapping[str, Any], arch: str, path: Path) -> dict[str, Any] | None:
    kind = metadata.get(f"{arch}.rope.scaling.type", "linear")
    # Before scaling types there was one factor, for linear.
    key = f"{arch}.rope.scaling.factor"
    key = key if key in metadata else f"{arch}.rope.scale_linear"
    # Converters write 0 where there is none.
    factor = 0.0 if metadata.get(key) == 0 else _decimal(_number(metadata, key, path, 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        if original := metadata.get(f"{arch}.rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = original
        # On top of the paper's 0.1 ln(factor) + 1 (arXiv:2309.00071, section 3.4).
        if (extra := _number(metadata, f"{arch}.rope.scaling.attn_factor", path, 1.0)) != 1.0:
            scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
        # As the converter writes what a config.json gives.
        names = {"attn_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        for theirs, name in names.items():
            if value := metadata.get(f"{arch}.rope.scaling.yarn_{theirs}"):
                scaling[name] = value
        return scaling
    raise ModelError(f"{path}: the rope scaling {kind!r:.200} is not supported; supported: linear, yarn")
