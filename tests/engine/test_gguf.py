"""engine.model.gguf on files that the `gguf` package wrote, against their sources, transformers and the golden hash."""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig

from engine.model.errors import ModelError
from engine.model.gguf import GGUFCheckpoint
from engine.model.gguf_config import generation_config
from engine.model.gguf_header import read_gguf_metadata
from engine.model.rope import inverse_frequencies

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 256, 512, 4, 2, 64, 2, 96

# Written as the converters of llama.cpp do: Hugging Face name -> GGUF name.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Weights = dict[str, NDArray[np.float32]]


def random_weights(arch: str, *, tied: bool = False, bias: bool = False) -> Weights:
    """Random weights under Hugging Face names, for one of the three architectures."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows * HEAD_DIM, HIDDEN)
            if bias or arch == "qwen2":
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows * HEAD_DIM,)
        shapes[f"{at}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        if bias:
            shapes[f"{at}self_attn.o_proj.bias"] = (HIDDEN,)
        for name in ("gate", "up"):
            shapes[f"{at}mlp.{name}_proj.weight"] = (FFN, HIDDEN)
        shapes[f"{at}mlp.down_proj.weight"] = (HIDDEN, FFN)
        shapes[f"{at}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{at}post_attention_layernorm.weight"] = (HIDDEN,)
        if arch == "qwen3":
            shapes[f"{at}self_attn.q_norm.weight"] = (HEAD_DIM,)
            shapes[f"{at}self_attn.k_norm.weight"] = (HEAD_DIM,)
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def permuted(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head from (first half, second half) to pairs side by side, as GGUF wants them for llama."""
    rows = weights.reshape(heads, 2, HEAD_DIM // 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weights.shape))


def write_model(
    path: Path, arch: str, weights: Weights, kind: Kind = Kind.F32, extra: dict[str, Any] | None = None
) -> Path:
    """Writes a GGUF model. `extra`: further tensors (arrays), and metadata in place of the usual (None: without)."""
    writer = gguf.GGUFWriter(path, arch)
    metadata: dict[str, Any] = {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 2048,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.freq_base": 1e6,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    for key, value in (metadata | (extra or {})).items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
            case np.ndarray():
                writer.add_tensor(key, value)
    for name, array in weights.items():
        parts = name.removeprefix("model.layers.").split(".", 1)
        layer, rest = (f"blk.{parts[0]}.", parts[1]) if name.startswith("model.layers.") else ("", name)
        module, suffix = rest.rsplit(".", 1)
        values = array
        if arch == "llama" and NAMES[module] in ("attn_q", "attn_k"):
            values = permuted(array, HEADS if NAMES[module] == "attn_q" else KV_HEADS)
        stored = kind if values.ndim == 2 else Kind.F32
        writer.add_tensor(f"{layer}{NAMES[module]}.{suffix}", gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_back(path: Path) -> dict[str, torch.Tensor]:
    return dict(GGUFCheckpoint(path).tensors())


# -------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_equal_their_source(arch: str, tied: bool, tmp_path: Path) -> None:
    weights = random_weights(arch, tied=tied)
    path = write_model(tmp_path / "model.gguf", arch, weights)
    checkpoint = GGUFCheckpoint(path)
    tensors = dict(checkpoint.tensors())
    assert tensors.keys() == weights.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, torch.from_numpy(weights[name])), name
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    config = checkpoint.config
    assert config.tie_embeddings is tied
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (HIDDEN, FFN, LAYERS)
    assert (config.vocab_size, config.window, config.rope.theta) == (VOCAB, 2048, 1e6)
    assert config.rms_norm_eps == 1e-6  # the decimal that was meant, not its float32
    assert (config.qkv_bias, config.qk_norm) == (arch == "qwen2", arch == "qwen3")
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_every_quantisation_equals_its_source(kind: Kind, tmp_path: Path) -> None:
    """The rows of llama's q and k move while they are quantised: they must come back to their places."""
    weights = random_weights("llama")
    checkpoint = GGUFCheckpoint(write_model(tmp_path / "model.gguf", "llama", weights, kind))
    tensors = dict(checkpoint.tensors())
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    dtypes = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
    # Largest error of these formats, as a part of a block's largest value.
    parts = {Kind.F16: 2048, Kind.BF16: 256, Kind.Q8_0: 127, Kind.Q5_0: 15, Kind.Q5_1: 15, Kind.Q4_0: 7, Kind.Q4_1: 7}
    for name, tensor in tensors.items():
        source = torch.from_numpy(weights[name])
        if tensor.dim() == 1:
            assert torch.equal(tensor, source)
            continue
        assert tensor.dtype == dtypes.get(kind, torch.float32)
        rounded = gguf.dequantize(gguf.quantize(weights[name], kind), kind).reshape(source.shape)
        assert torch.equal(tensor.float(), torch.from_numpy(rounded)), name
        assert (tensor.float() - source).abs().max() <= source.abs().max() / parts[kind]


def q6_k_value(block: bytes, at: int) -> float:
    """One value of a Q6_K block by the format's definition: low nibbles, high bits, 16 scales, d."""
    ql, qh, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    [d] = struct.unpack("<e", block[208:210])
    half, inside = divmod(at, 128)
    quarter, lane = divmod(inside, 32)
    low = ql[half * 64 + (quarter % 2) * 32 + lane]
    nibble = low & 15 if quarter < 2 else low >> 4
    high = (qh[half * 32 + lane] >> (2 * quarter)) & 3
    scale = scales[half * 8 + quarter * 2 + lane // 16]
    return float(np.float32(d) * np.float32(scale) * np.float32((nibble | high << 4) - 32))


def test_q6_k(tmp_path: Path) -> None:
    weights = random_weights("qwen2")
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (FFN, 210), np.uint8)
    blocks[:, 208:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    del weights["model.layers.0.mlp.up_proj.weight"]
    path = tmp_path / "model.gguf"
    with pytest.MonkeyPatch.context() as patch:
        write = gguf.GGUFWriter.write_header_to_file

        def add_blocks(writer: gguf.GGUFWriter) -> None:
            writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=Kind.Q6_K)
            write(writer)

        patch.setattr(gguf.GGUFWriter, "write_header_to_file", add_blocks)
        write_model(path, "qwen2", weights)
    tensor = read_back(path)["model.layers.0.mlp.up_proj.weight"]
    assert tensor.shape == (FFN, HIDDEN)
    for row in (0, 5, FFN - 1):
        want = [q6_k_value(blocks[row].tobytes(), at) for at in range(256)]
        assert tensor[row].tolist() == pytest.approx(want, rel=1e-6)


def test_biases_of_llama_are_unpermuted_too(tmp_path: Path) -> None:
    weights = random_weights("llama", bias=True)
    path = write_model(tmp_path / "model.gguf", "llama", weights)
    for name, tensor in read_back(path).items():
        assert torch.equal(tensor, torch.from_numpy(weights[name])), name
    assert GGUFCheckpoint(path).config.qkv_bias
    assert GGUFCheckpoint(path).config.o_bias


def test_tensors_may_be_written_to(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "qwen3", random_weights("qwen3"))
    before = path.read_bytes()
    for _, tensor in GGUFCheckpoint(path).tensors():
        tensor.zero_()
    assert path.read_bytes() == before


def test_smollm2_equals_the_golden_conversion(default_model: Path, own_data: Path, tmp_path: Path) -> None:
    """The converted weights, stored as safetensors, have the hash of the reference's own conversion."""
    golden = json.loads((own_data / "smollm2_golden.json").read_text())["model"]["converted_sha256"]
    checkpoint = GGUFCheckpoint(default_model)
    assert checkpoint.config.eos_token_ids == (2,)
    assert checkpoint.config.window == 8192
    assert (checkpoint.config.rope.theta, checkpoint.config.rms_norm_eps) == (100000.0, 1e-5)
    path = tmp_path / "model.safetensors"
    save_file(dict(checkpoint.tensors()), path, {"format": "pt"})
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    path.unlink()  # half a gigabyte
    assert digest == golden["model.safetensors f32"]


# -------------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("extra", "want"),
    [
        ({}, ("default", 1.0, 0)),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, ("default", 1.0, 0)),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, ("linear", 4.0, 0)),
        ({"llama.rope.scale_linear": 2.0}, ("linear", 2.0, 0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 8.0,
                "llama.rope.scaling.original_context_length": 256,
            },
            ("yarn", 8.0, 256),
        ),
    ],
)
def test_rope_scaling(extra: dict[str, Any], want: tuple[str, float, int], tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "llama", random_weights("llama"), extra=extra)
    rope = GGUFCheckpoint(path).config.rope
    assert (rope.kind, rope.factor, rope.original_max_len) == want


def test_yarn_is_what_the_config_said(tmp_path: Path) -> None:
    """Under the names that `convert_hf_to_gguf.py` has for the fields of a config.json."""
    said = {"attention_factor": 1.3125, "beta_fast": 16.0, "beta_slow": 2.0}
    names = (
        gguf.Keys.Rope.SCALING_YARN_ATTN_FACTOR,
        gguf.Keys.Rope.SCALING_YARN_BETA_FAST,
        gguf.Keys.Rope.SCALING_YARN_BETA_SLOW,
    )
    extra = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 8.0}
    extra |= {name.format(arch="llama"): value for name, value in zip(names, said.values(), strict=True)}
    path = write_model(tmp_path / "model.gguf", "llama", random_weights("llama"), extra=extra)
    rope = GGUFCheckpoint(path).config.rope
    assert {name: getattr(rope, name) for name in said} == said


@pytest.mark.parametrize(
    ("factor", "low", "high", "original"),
    [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 1.0, 3.0, 4096), (16.0, 2.0, 8.0, 8192)],
)
def test_llama3_frequencies_are_divided_as_the_file_says(
    factor: float, low: float, high: float, original: int, tmp_path: Path
) -> None:
    """Converters store how much slower transformers' llama3 frequencies are than the plain ones."""
    scaling = {
        "factor": factor, "low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original
    }  # fmt: skip
    theirs = LlamaConfig(
        head_dim=HEAD_DIM,
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e6, **scaling},
    )
    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = 1e6 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    divisors = np.asarray(plain / slowed.double().numpy()).astype(np.float32)
    weights = random_weights("llama")
    path = write_model(tmp_path / "model.gguf", "llama", weights, extra={"rope_freqs.weight": divisors})
    checkpoint = GGUFCheckpoint(path)
    torch.testing.assert_close(inverse_frequencies(checkpoint.config.rope, HEAD_DIM), slowed, rtol=1e-6, atol=0)
    assert dict(checkpoint.tensors()).keys() == weights.keys()


def test_divisors_come_on_top_of_a_scaling(tmp_path: Path) -> None:
    """As ggml's rope has it: each frequency divided by its own divisor, and then scaled."""
    divisors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    extra = {"rope_freqs.weight": divisors, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = GGUFCheckpoint(write_model(tmp_path / "m.gguf", "llama", random_weights("llama"), extra=extra)).config
    expected = 1e6 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM) / divisors / 4
    np.testing.assert_allclose(inverse_frequencies(config.rope, HEAD_DIM).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("divisors", [[1.0] * 31, [1.0] * 31 + [0.0], [1.0] * 31 + [float("nan")]])
def test_divisors_that_make_no_sense_are_named(divisors: list[float], tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.array(divisors, np.float32)}
    path = write_model(tmp_path / "model.gguf", "llama", random_weights("llama"), extra=extra)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        GGUFCheckpoint(path)


def test_several_ends_and_sampling_defaults(tmp_path: Path) -> None:
    extra = {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 2,
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.8,
    }
    path = write_model(tmp_path / "model.gguf", "qwen2", random_weights("qwen2"), extra=extra)
    assert generation_config(read_gguf_metadata(path)) == {
        "eos_token_id": [2, 5], "temperature": 0.7, "top_k": 20, "top_p": 0.8
    }  # fmt: skip
    config = GGUFCheckpoint(path).config
    assert config.eos_token_ids == (2, 5)
    assert (config.generation.temperature, config.generation.top_k, config.generation.top_p) == (0.7, 20, 0.8)


def test_sliding_window(tmp_path: Path) -> None:
    for arch, name in (("llama", "MistralForCausalLM"), ("qwen2", "Qwen2ForCausalLM")):
        extra = {f"{arch}.attention.sliding_window": 512}
        config = GGUFCheckpoint(write_model(tmp_path / "m.gguf", arch, random_weights(arch), extra=extra)).config
        assert config.architecture == name
        assert config.layer_windows == (512,) * LAYERS


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
        ({"llama.attention.head_count_kv": [2, 4]}, r"head_count_kv differs from layer to layer"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"split.no": 0, "split.count": 3}, "one of several files"),
        ({"llama.rope.dimension_count": 32}, r"rope\.dimension_count is 32"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope' is not supported"),
        ({"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}, r"unexpected tensor blk\.0\.attn_sinks\.weight"),
        ({"blk.0.extra.weight": np.zeros((4, 32), np.int8)}, r"blk\.0\.extra\.weight has the quantisation I8"),
    ],
)
def test_model_that_is_not_supported(extra: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "llama", random_weights("llama"), extra=extra)
    with pytest.raises(ModelError, match=words) as caught:
        read_back(path)
    assert str(path) in str(caught.value)


def test_uniform_values_per_layer_are_taken(tmp_path: Path) -> None:
    extra = {"llama.attention.head_count_kv": [KV_HEADS] * LAYERS}
    path = write_model(tmp_path / "model.gguf", "llama", random_weights("llama"), extra=extra)
    assert GGUFCheckpoint(path).config.num_kv_heads == KV_HEADS


def test_unknown_architecture(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "gemma3", random_weights("qwen3"))
    with pytest.raises(ModelError, match="'gemma3' is not supported; supported: llama, qwen2, qwen3"):
        GGUFCheckpoint(path)


# --------------------------------------------------------------------------------------------------------- broken files


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_model(
        tmp_path_factory.mktemp("good") / "model.gguf", "qwen3", random_weights("qwen3"),
        extra={"tokenizer.ggml.tokens": ["a", "é", "字"], "tokenizer.ggml.scores": [0.5, -1.0], "general.flag": True},
    ).read_bytes()  # fmt: skip


def test_metadata_are_plain_values(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(good)
    metadata = read_gguf_metadata(tmp_path / "m.gguf")
    assert metadata["tokenizer.ggml.tokens"] == ["a", "é", "字"]
    assert metadata["tokenizer.ggml.scores"] == [0.5, -1.0]
    assert metadata["general.flag"] is True
    assert metadata["general.architecture"] == "qwen3"
    assert metadata["qwen3.block_count"] == LAYERS


def cut(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at]


def put(at: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + value + data[at + len(value) :]


def replace(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data.replace(old, new, 1)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut(0), "not a GGUF file"),
        (cut(3), "not a GGUF file"),
        (put(0, b"GGML"), "not a GGUF file"),
        (put(4, struct.pack("<I", 1)), "version 1 is not supported"),
        (put(4, struct.pack(">I", 3)), "big-endian"),
        (cut(20), "truncated"),
        (cut(200), "truncated"),
        (cut(-1), r"truncated GGUF file, tensor .* ends at byte"),
        (put(8, struct.pack("<Q", 1 << 60)), "GGUF"),  # a tensor count beyond reason
        (put(16, struct.pack("<Q", 1 << 60)), "GGUF"),  # metadata without end
        (put(24, struct.pack("<Q", 1 << 62)), "truncated"),  # the length of the first key
        (replace("é".encode(), b"\xff\xff"), "invalid UTF-8"),
        (replace(b"general.flag" + struct.pack("<I", 7), b"general.flag" + struct.pack("<I", 99)), "value type 99"),
    ],
)
def test_broken_file(good: bytes, damage: Callable[[bytes], bytes], words: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(damage(good))
    with pytest.raises(ModelError, match=words) as caught:
        GGUFCheckpoint(path)
    assert str(path) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        GGUFCheckpoint(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="none"):
        read_gguf_metadata(tmp_path / "none.gguf")


def test_any_cut_of_the_header_is_a_model_error(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for size in range(0, 1200, 37):
        path.write_bytes(good[:size])
        with pytest.raises(ModelError):
            GGUFCheckpoint(path)
