"""What a model's files say about its shape and its defaults. Plain data: no torch, no weights."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.model.errors import ModelError
from engine.request import MOST_FLOAT

RopeType = Literal["default", "linear", "llama3", "yarn"]

# Files that break these are broken, or made to do harm.
MAX_JSON_BYTES = 64 << 20
MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Family:
    """What the architectures differ in, where config.json is silent or cannot say."""

    qkv_bias: bool = False
    bias_keys: bool = False  # attention_bias (q, k, v and o)
    mlp_bias_key: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    num_kv_heads: int | None = None  # None: num_attention_heads
    sliding_window: Literal["never", "always", "switched"] = "never"


# The defaults of transformers' configuration classes.
FAMILIES = {
    "LlamaForCausalLM": _Family(bias_keys=True, mlp_bias_key=True),
    "MistralForCausalLM": _Family(num_kv_heads=8, sliding_window="always"),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, num_kv_heads=32, sliding_window="switched"),
    "Qwen3ForCausalLM": _Family(bias_keys=True, qk_norm=True, head_dim=128, num_kv_heads=32, sliding_window="switched"),
}


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Sampling parameters where a request is silent, from generation_config.json. Off where that file is silent too."""

    temperature: Annotated[float, Meta(ge=0, le=MOST_FLOAT)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=MOST_FLOAT)] = 1.0

    @classmethod
    def from_hf(cls, generation: Mapping[str, Any]) -> "GenerationDefaults":
        """Reads the fields of a generation_config.json. Raises ModelError naming a field that is no number in range."""
        given = {name: value for name, value in generation.items() if value is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ModelError(f"generation_config.json: {error}") from error

    @classmethod
    def load(cls, path: Path) -> "GenerationDefaults":
        """Reads them from a folder in Hugging Face layout or a GGUF file. Raises ModelError as their readers do."""
        if path.is_dir():
            return cls.from_hf(read_json(path / "generation_config.json", optional=True))
        # Late: the GGUF reader needs the package gguf, a folder does not.
        from engine.model.gguf_config import generation_config
        from engine.model.gguf_header import read_gguf_metadata

        return cls.from_hf(generation_config(read_gguf_metadata(path)))


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embeddings (arXiv:2104.09864), and how their frequencies are stretched.

    "linear" divides all of them by factor; "llama3" only the low ones; "yarn" is arXiv:2309.00071.
    """

    theta: float
    kind: RopeType = "default"
    factor: float = 1.0  # how many times longer the context becomes
    original_max_len: int = 0  # tokens, the context before the stretching ("llama3" and "yarn")
    low_freq_factor: float = 1.0  # "llama3"
    high_freq_factor: float = 1.0  # "llama3"
    beta_fast: float = 32.0  # "yarn": rotations over the original context at which the ramp begins
    beta_slow: float = 1.0  # "yarn": and ends
    truncate: bool = True  # "yarn": whether the ramp's ends are rounded to whole dimensions
    attention_factor: float = 1.0  # "yarn": cos and sin are multiplied by it
    divisors: tuple[float, ...] = ()  # of each frequency on top of that, if any (all that GGUF has of llama3's)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder of the Llama, Mistral, Qwen2 or Qwen3 family."""

    architecture: str  # as config.json names it
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int
    rms_norm_eps: float
    window: int  # longest context in tokens, rope scaling counted in
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]  # how many tokens back each layer attends, itself included (None: all)
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]  # of config.json and generation_config.json, those within the vocabulary
    generation: GenerationDefaults

    @property
    def q_size(self) -> int:
        """Width of q: heads x head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of k, and of v."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Reads config.json and generation_config.json. Raises ModelError naming the file or field to blame."""
        generation = read_json(folder / "generation_config.json", optional=True)
        return cls.from_hf(read_json(folder / "config.json"), generation)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Reads the fields of a config.json and, where there is one, a generation_config.json.

        Raises:
            ModelError: an unsupported architecture, quantisation, activation or rope type; a field that is missing or
                makes no sense. The message names it.
        """
        family = _family(config)
        _refuse_unsupported(config)
        hidden_size = _positive(config, "hidden_size")
        num_layers = _positive(config, "num_hidden_layers", most=MAX_LAYERS)
        num_heads = _positive(config, "num_attention_heads")
        silent = {"num_key_value_heads": family.num_kv_heads}  # null is num_heads in every family
        num_kv_heads = _positive({**silent, **config}, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads ({num_heads}) is no multiple of num_key_value_heads ({num_kv_heads})"
            )
        if config.get("head_dim") is None and family.head_dim is None and hidden_size % num_heads:
            raise ModelError(
                f"config.json: hidden_size ({hidden_size}) is no multiple of num_attention_heads ({num_heads})"
            )
        head_dim = _positive(config, "head_dim", family.head_dim or hidden_size // num_heads)
        if head_dim % 2:
            raise ModelError(f"config.json: head_dim is {head_dim}; rotary embeddings need an even one")
        max_len = _positive(config, "max_position_embeddings")
        rope = _rope(config, max_len)
        attention_bias = family.bias_keys and _flag(config, "attention_bias")
        vocab_size = _positive(config, "vocab_size")
        return cls(
            architecture=config["architectures"][0],
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            window=_window(rope, max_len),
            rope=rope,
            layer_windows=_layer_windows(config, family, num_layers),
            tie_embeddings=_flag(config, "tie_word_embeddings"),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family.mlp_bias_key and _flag(config, "mlp_bias"),
            qk_norm=family.qk_norm,
            eos_token_ids=_eos_token_ids(vocab_size, config, generation or {}),
            generation=GenerationDefaults.from_hf(generation or {}),
        )


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file ({} for an absent optional one). Raises ModelError naming the file."""
    if optional and not path.exists():
        return {}
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def _family(config: Mapping[str, Any]) -> _Family:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or str(names[0]) not in FAMILIES:
        raise ModelError(
            f"config.json: architectures is {names!r:.200}, which is not supported; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[names[0]]


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config") is not None:
        raise ModelError(
            "config.json: quantization_config: quantised checkpoints are not supported (but GGUF files are)"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config.json: hidden_act is {activation!r:.200}; only 'silu' is supported")


def _eos_token_ids(vocab_size: int, *configs: Mapping[str, Any]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for config in configs:
        ids = config.get("eos_token_id")
        for token in ids if isinstance(ids, list) else [ids] if ids is not None else []:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ModelError(f"eos_token_id is {ids!r:.200}, not a token id or a list of them")
            found[token] = None
    return tuple(token for token in found if token < vocab_size)


def _layer_windows(config: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int | None, ...]:
    on = family.sliding_window == "always" or (
        family.sliding_window == "switched" and _flag(config, "use_sliding_window")
    )
    window = config.get("sliding_window", 4096) if on else None
    if window is None:
        return (None,) * num_layers
    window = _positive({"sliding_window": window}, "sliding_window")
    kinds = config.get("layer_types")
    if family.sliding_window == "always":
        return (window,) * num_layers
    if kinds is None:
        full = config.get("max_window_layers", 28)
        if not _is_number(full):
            raise ModelError(f"config.json: max_window_layers is {full!r:.200}, not a number")
        return tuple(None if layer < full else window for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(str(kind) not in known for kind in kinds):
        raise ModelError(f"config.json: layer_types must name {num_layers} layers, each one of {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)


def _rope(config: Mapping[str, Any], max_len: int) -> RopeConfig:
    """Both spellings: `rope_theta` beside `rope_scaling`, and `rope_parameters` of transformers 5."""
    spellings = [key for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    rope, *others = [_rope_of(config, key, max_len) for key in spellings or ["rope_scaling"]]
    if others and others != [rope]:
        raise ModelError("config.json: rope_parameters and rope_scaling say different things; leave one out")
    return rope


def _rope_of(config: Mapping[str, Any], key: str, max_len: int) -> RopeConfig:
    given = config.get(key) or {}
    if not isinstance(given, dict):
        raise ModelError(f"config.json: {key} is {given!r:.200}, not an object")
    if given and all(isinstance(value, dict) for value in given.values()):
        raise ModelError(f"config.json: {key} differs between layers, which is not supported")
    theta = _number({"rope_theta": given.get("rope_theta", config.get("rope_theta"))}, "rope_theta", 10000.0)
    if given.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported")
    kind = given.get("rope_type", given.get("type", "default" if "factor" not in given else None))

    def number(name: str, default: float | None = None) -> float:
        return _number(given, name, default, of=f"{key} of type {kind!r}")

    def original_length() -> int:
        name = "original_max_position_embeddings"
        return _positive(config if config.get(name) else given, name, max_len)

    match kind:
        case "default":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, "linear", number("factor"))
        case "llama3":
            bands = number("low_freq_factor"), number("high_freq_factor")
            return RopeConfig(theta, "llama3", number("factor"), original_length(), *bands)
        case "yarn":
            original = original_length()
            factor = number("factor", max_len / original)
            return RopeConfig(
                theta,
                "yarn",
                factor,
                original,
                beta_fast=number("beta_fast", 32.0),
                beta_slow=number("beta_slow", 1.0),
                truncate=bool(given.get("truncate", True)),
                attention_factor=number("attention_factor", _yarn_attention_factor(given, factor)),
            )
    raise ModelError(f"config.json: rope type {kind!r:.200} is not supported; supported: default, linear, llama3, yarn")


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """The temperature of arXiv:2309.00071, section 3.4, as a factor on cos and sin; two mscale keys change it."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(_number(given, "mscale")) / mscale(_number(given, "mscale_all_dim"))
    return mscale(1.0)


def _window(rope: RopeConfig, max_len: int) -> int:
    """Linear scaling stretches max_position_embeddings; yarn the original length; llama3 has it counted in already."""
    window = float(max_len)
    if rope.kind == "linear":
        window *= rope.factor
    elif rope.kind == "yarn":
        window = rope.original_max_len * rope.factor
    if not 1 <= window <= MAX_SIZE:
        raise ModelError(f"config.json: the window is stretched to {window:g} tokens")
    return int(window)


def _positive(config: Mapping[str, Any], name: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {name} is {value!r:.200}, not a positive integer")
    if value > most:
        raise ModelError(f"config.json: {name} is above {most}")
    return value


def _number(config: Mapping[str, Any], name: str, default: float | None = None, of: str = "") -> float:
    """A positive number. `of`: where in the file it is."""
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json: {of} lacks {name}")
    if not _is_number(value) or value <= 0:
        raise ModelError(f"config.json: {name}{of and ' of '}{of} is {value!r:.200}, not a positive number")
    return float(value)


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value not in (None, True, False):
        raise ModelError(f"config.json: {name} is {value!r:.200}, not a boolean")
    return bool(value)


def _is_number(value: object) -> bool:
    if isinstance(value, int):  # larger ones are no floats, which is what they all become
        return not isinstance(value, bool) and abs(value) < 2**1000
    return isinstance(value, float) and math.isfinite(value)
