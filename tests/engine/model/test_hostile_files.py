"""Model files that somebody made to do harm: each ends in a ModelError with a clear message, or loads; nothing else."""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.model.checkpoint import open_checkpoint
from engine.model.config import FAMILIES, GenerationDefaults, ModelConfig
from engine.model.errors import ModelError
from engine.model.gguf_header import read_gguf

MEMORY = 64 << 20  # the files have some KB
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def survives(path: Path) -> str | None:
    """Reads everything; returns the error's message."""
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        assert checkpoint.total_bytes >= 0
        for _ in checkpoint.tensors():
            assert checkpoint.file.exists()
        GenerationDefaults.load(path)
    except ModelError as error:
        told = str(error)
    else:
        told = None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MEMORY
    assert told is None or 0 < len(told) < 2000
    return told


# ------------------------------------------------------------------------------------------------------ GGUF

U8, I32, U32, F32, BOOL, STRING, ARRAY, U64, F64 = 0, 5, 4, 6, 7, 8, 9, 10, 12
FORMS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    U32: "<I",
    I32: "<i",
    F32: "<f",
    BOOL: "<B",
    U64: "<Q",
    11: "<q",
    F64: "<d",
}


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def packed(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(packed(inner, item) for item in items)
    return struct.pack(FORMS[kind], value)


def gguf(
    pairs: list[tuple[str, int, Any]],
    tensors: list[tuple[str, list[int], int, int]],
    counts: tuple[int, int] | None = None,
    data: bytes = bytes(4096),
) -> bytes:
    """A GGUF file, byte by byte. `tensors`: (name, dimensions, type, offset); `counts`: lies about both."""
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", 3, tensor_count, pair_count)
    head += b"".join(text(key) + struct.pack("<I", kind) + packed(kind, value) for key, kind, value in pairs)
    for name, dimensions, kind, offset in tensors:
        head += text(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        head += struct.pack("<IQ", kind, offset)
    return head + bytes(-len(head) % 32) + data


PAIRS: list[tuple[str, int, Any]] = [
    ("general.architecture", STRING, "llama"),
    ("llama.block_count", U32, 1),
    ("llama.context_length", U32, 64),
    ("llama.embedding_length", U32, 8),
    ("llama.feed_forward_length", U32, 16),
    ("llama.attention.head_count", U32, 2),
    ("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
    ("tokenizer.ggml.eos_token_id", U32, 1),
]
TENSORS = [
    ("token_embd.weight", [8, 4], 0, 0),
    ("blk.0.attn_q.weight", [8, 8], 0, 128),
    ("output_norm.weight", [8], 1, 384),
]
KEYS = [
    *(key for key, _, _ in PAIRS),
    *(f"llama.{key}" for key in (
        "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.sliding_window",
        "expert_count", "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
        "rope.scale_linear", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast",
    )),
    *("general.alignment", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eot_token_id", "general.sampling.temp"),
    *("general.sampling.top_k", "qwen2.block_count"),
]  # fmt: skip
scalars = st.one_of(
    st.tuples(st.just(U32), st.sampled_from([0, 1, 2, 3, 8, 2**31, 2**32 - 1])),
    st.tuples(st.just(I32), st.integers(-(2**31), 2**31 - 1)),
    st.tuples(st.just(U64), st.sampled_from([0, 2**31, 2**63, 2**64 - 1])),
    st.tuples(st.just(F32), st.floats(width=32)),
    st.tuples(st.just(F64), st.floats()),
    st.tuples(st.just(BOOL), st.integers(0, 255)),
    st.tuples(st.just(STRING), st.sampled_from(["", "llama", "yarn", "linear", "qwen2", "\ud800", "x" * 50])),
)
values = st.one_of(
    scalars,
    st.lists(st.integers(0, 3), max_size=3).map(lambda items: (ARRAY, (U32, items))),
    st.lists(st.just((U32, [1])), max_size=2).map(lambda items: (ARRAY, (ARRAY, items))),
    st.lists(st.just("x"), max_size=2).map(lambda items: (ARRAY, (STRING, items))),
)
huge = st.one_of(st.integers(0, 40), st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64 - 1]))
tensors = st.tuples(
    st.sampled_from(
        ["token_embd.weight", "output.weight", "blk.0.attn_q.weight", "blk.0.attn_k.bias", "rope_freqs.weight"]
    ),
    st.lists(huge, max_size=5),
    st.one_of(st.integers(0, 40), st.just(2**32 - 1)),
    huge,
)


@given(
    changed=st.dictionaries(st.sampled_from(KEYS), values, max_size=4),
    dropped=st.sets(st.integers(0, len(PAIRS) - 1), max_size=1),
    more=st.lists(tensors, max_size=3),
)
@example(changed={"llama.block_count": (U32, 2**32 - 1)}, dropped=set(), more=[])
@example(changed={"general.alignment": (U32, 0)}, dropped=set(), more=[])
@example(changed={"llama.rope.freq_base": (F32, float("inf"))}, dropped=set(), more=[])
@example(changed={"llama.attention.key_length": (U32, 2**31)}, dropped=set(), more=[("rope_freqs.weight", [4], 0, 512)])
@FUZZ
def test_gguf_headers_with_other_values(tmp_path, changed, dropped, more):
    path = tmp_path / "model.gguf"
    pairs = [pair for number, pair in enumerate(PAIRS) if number not in dropped and pair[0] not in changed]
    pairs += [(key, kind, value) for key, (kind, value) in changed.items()]
    path.write_bytes(gguf(pairs, TENSORS + more))
    survives(path)


@given(st.lists(st.tuples(st.integers(0, 900), st.binary(min_size=1, max_size=9)), max_size=4), st.integers(0, 6000))
@FUZZ
def test_gguf_files_with_other_bytes(tmp_path, patches, end):
    data = bytearray(gguf(PAIRS, TENSORS))
    for at, piece in patches:
        data[at : at + len(piece)] = piece
    path = tmp_path / "model.gguf"
    path.write_bytes(data[:end])
    survives(path)


def nested(depth: int) -> tuple[int, Any]:
    value: tuple[int, Any] = (U32, [1])
    for _ in range(depth):
        value = (ARRAY, [value])
    return value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gguf(PAIRS, TENSORS, counts=(2**63, len(PAIRS))), "header ends past"),
        (gguf(PAIRS, TENSORS, counts=(3, 2**64 - 1)), ""),
        (gguf([*PAIRS, ("x", ARRAY, nested(50))], TENSORS), "nested too deep"),
        (gguf([*PAIRS, PAIRS[1]], TENSORS), "llama.block_count is there twice"),
        (gguf(PAIRS, [*TENSORS, TENSORS[0]]), "token_embd.weight is there twice"),
        (gguf(PAIRS, [*TENSORS, ("output.weight", [8, 4], 0, 64)]), "overlap"),
        (gguf(PAIRS, [("token_embd.weight", [8, 4], 0, 2**64 - 128)]), "truncated"),
        (gguf(PAIRS, [("token_embd.weight", [8, 2**60], 0, 0)]), "truncated"),
        (gguf(PAIRS, [("token_embd.weight", [8, 0], 0, 0)]), "shape"),
        (gguf(PAIRS, [("token_embd.weight", [1] * 5, 0, 0)]), "5 dimensions"),
        (gguf(PAIRS, [("token_embd.weight", [8, 4], 99, 0)]), "quantisation type 99"),
        (gguf([*PAIRS, ("general.alignment", U32, 0)], TENSORS), "general.alignment"),
        (gguf([*PAIRS, ("general.alignment", STRING, "x")], TENSORS), "general.alignment"),
    ],
)
def test_what_a_hostile_gguf_header_is_told(tmp_path, data, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    told = survives(path)
    assert told is not None
    assert message in told


def test_a_gguf_header_is_bounded(tmp_path, monkeypatch):
    """Its lists take up to 32 bytes a byte."""
    monkeypatch.setattr("engine.model.gguf_header.MAX_HEADER_BYTES", 1 << 12)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf([*PAIRS, ("x", ARRAY, (U8, [0] * 5000))], TENSORS))
    with pytest.raises(ModelError, match="header is longer than 4096 bytes"):
        read_gguf(path)


def test_the_untouched_gguf_file_loads(tmp_path):
    (tmp_path / "model.gguf").write_bytes(gguf(PAIRS, TENSORS))
    assert survives(tmp_path / "model.gguf") is None


# ------------------------------------------------------------------------------------------------------ folders

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 4, "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
}  # fmt: skip
HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
    "b": {"dtype": "BF16", "shape": [8], "data_offsets": [32, 48]},
}


def safetensors(header: Any, length: int | None = None, data: bytes = bytes(48)) -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head) if length is None else length) + head + data


def folder(tmp_path: Path, weights: bytes, config: Any = CONFIG) -> Path:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(weights)
    return tmp_path


json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.sampled_from([0, 1, -1, 2, 2**31, 2**63, 10**400]), st.floats(allow_nan=False),
        st.sampled_from(["", "x", "linear", "yarn", "llama3", "default", "full_attention"]),
    ),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(
        ["rope_type", "rope_theta", "factor", "original_max_position_embeddings", "mscale", "mscale_all_dim",
         "low_freq_factor", "high_freq_factor", "beta_fast", "attention_factor", "x"]), inner, max_size=5),
    max_leaves=8,
)  # fmt: skip
FIELDS = [
    *CONFIG,
    *("num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters", "rope_theta", "sliding_window"),
    *("use_sliding_window", "max_window_layers", "layer_types", "hidden_act", "quantization_config", "attention_bias"),
    *("original_max_position_embeddings", "partial_rotary_factor", "torch_dtype", "tie_word_embeddings"),
]


@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4))
@example("LlamaForCausalLM", {"num_hidden_layers": 2**40})
@example("LlamaForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 1e308}})
@example("LlamaForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": "x", "mscale_all_dim": 1}})
@example("LlamaForCausalLM", {"rms_norm_eps": 10**400})
@example("LlamaForCausalLM", {"architectures": [[]]})
@example("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": "x"})
@settings(FUZZ, max_examples=150)
def test_configurations(architecture, changed):
    tracemalloc.start()
    told = "fine"
    try:
        ModelConfig.from_hf(CONFIG | {"architectures": [architecture]} | changed, changed)
    except ModelError as error:
        told = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MEMORY
    assert 0 < len(told) < 2000


offsets = st.lists(st.one_of(st.integers(-1, 60), st.sampled_from([2**31, 2**63, -(2**63), 2**64])), max_size=3)
entry = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(
            [
                "F64",
                "F32",
                "F16",
                "BF16",
                "I64",
                "U8",
                "BOOL",
                "F8_E4M3",
                "F8_E5M2",
                "F8_E8M0",
                "F4",
                "U16",
                "C64",
                "x",
                1,
            ]
        ),
        "shape": st.lists(st.one_of(st.integers(-1, 8), st.sampled_from([2**31, 2**63, 2**64])), max_size=4),
        "data_offsets": offsets,
    }
)


@given(st.dictionaries(st.sampled_from(["a", "b", "__metadata__", "\ud800", ""]), entry | json_values, max_size=3))
@FUZZ
def test_safetensors_headers_with_other_values(tmp_path, changed):
    survives(folder(tmp_path, safetensors(HEADER | changed)))


@given(st.sampled_from(["F64", "F8_E4M3", "F8_E8M0", "F4", "U16", "C64", "BOOL", "I8"]), st.integers(0, 48))
@FUZZ
def test_whole_safetensors_files_of_every_dtype(tmp_path, dtype, size):
    """Headers that are right but for what the tensors are."""
    for shape in ([size], [size * 2], [size // 2], [size // 8], [0, 2**40], [2**62, 0]):
        header = {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}
        survives(folder(tmp_path, safetensors(header, data=bytes(size))))


@given(st.lists(st.tuples(st.integers(0, 300), st.binary(min_size=1, max_size=9)), max_size=4), st.integers(0, 400))
@FUZZ
def test_safetensors_files_with_other_bytes(tmp_path, patches, end):
    data = bytearray(safetensors(HEADER))
    for at, piece in patches:
        data[at : at + len(piece)] = piece
    survives(folder(tmp_path, bytes(data[:end])))


@pytest.mark.parametrize(
    "weights",
    [
        b"",
        safetensors(HEADER, length=2**63),
        safetensors(HEADER, length=2**64 - 1),
        safetensors(b"[" * 100_000),
        safetensors(b'{"a":' * 100_000),
        safetensors(HEADER | {"b": {"dtype": "BF16", "shape": [8], "data_offsets": [16, 32]}}),
        safetensors({"a": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 48]}}),
        safetensors(HEADER, data=bytes(20)),
        b"\x80\x04\x95 a pickle of old",
    ],
)
def test_hostile_safetensors_files_are_named(tmp_path, weights):
    assert "model.safetensors: unreadable or truncated" in survives(folder(tmp_path, weights))


@pytest.mark.parametrize(
    "index",
    [
        "[" * 200_000,
        '{"weight_map": ' * 100_000,
        '{"weight_map": {"a": "../../etc/passwd"}}',
        '{"weight_map": {"a": ".."}}',
        '{"weight_map": {"a": "\\u0000"}}',
        '{"weight_map": {"a": "\\ud800.safetensors"}}',
        json.dumps({"weight_map": {"a": "x" * 5000}}),
        '{"weight_map": {"a": "pytorch_model.bin"}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": []}',
        f'{{"weight_map": {"9" * 10_000}}}',
        "\x00",
    ],
)
def test_hostile_indexes_are_named(tmp_path, index):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    folder(tmp_path, safetensors(HEADER))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    told = survives(tmp_path)
    assert told is not None
    assert str(tmp_path) in told


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_files_are_bounded(tmp_path, name):
    folder(tmp_path, safetensors(HEADER))
    for content in ("[" * 200_000, '{"a":' * 200_000, " " * (65 << 20)):
        (tmp_path / name).write_text(content)
        told = survives(tmp_path)
        assert told is not None
        assert name in told
