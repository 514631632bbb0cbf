"""What config.json and generation_config.json mean, by transformers' own classes; and what is refused, by name."""

import json

import pytest
import torch
import transformers

from engine.model.config import GenerationDefaults, ModelConfig
from engine.model.errors import ModelError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def parse(generation=None, **changes):
    return ModelConfig.from_hf({**LLAMA, **changes}, generation)


def test_eos_is_the_union():
    """config.json names one end of sequence, generation_config.json several; all of them count."""
    assert parse({"eos_token_id": [95, 93]}, eos_token_id=93).eos_token_ids == (93, 95)
    assert parse({"eos_token_id": 7}).eos_token_ids == (2, 7)
    assert parse({}, eos_token_id=None).eos_token_ids == ()
    assert parse({}, eos_token_id=[4, 5, 4]).eos_token_ids == (4, 5)
    assert parse({"eos_token_id": [100]}, eos_token_id=[99, 2**40]).eos_token_ids == (99,)  # of 100 tokens


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(("said", "length"), [({}, 4), ({"eos_token_id": 2}, 1)], ids=["silent", "named"])
def test_a_class_s_own_end_is_none_where_the_files_are_silent(model_at, family, said, length):
    """AutoConfig then says 2, but `generate` of a model that was loaded does not stop there."""
    folder, _ = model_at(family)
    named = json.loads((folder / "config.json").read_text())
    del named["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(named | said))
    (folder / "generation_config.json").unlink()

    def always_two(_, scores):
        return torch.full_like(scores, -1e9).index_fill(1, torch.tensor([2]), 0.0)

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.eos_token_id == 2
    theirs = model.generate(torch.tensor([[5]]), max_new_tokens=4, logits_processor=[always_two])
    assert theirs.tolist() == [[5] + [2] * length]
    assert ModelConfig.from_folder(folder).eos_token_ids == tuple(said.values())


def test_generation_defaults():
    """Only what generation_config.json says; off otherwise."""
    given = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True}
    assert parse(given).generation == GenerationDefaults(0.7, 0.8, 20, 0.0, 1.05)
    assert parse().generation == GenerationDefaults(1.0, 1.0, 0, 0.0, 1.0)
    assert parse({"top_k": -1, "temperature": None}).generation == GenerationDefaults()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_silent_fields_have_transformers_defaults(family):
    """A config.json that says no more than it must is read as transformers reads it."""
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    sparse = {**LLAMA, "architectures": [f"{names[family]}ForCausalLM"], "num_attention_heads": 32, "hidden_size": 128}
    theirs = transformers.AutoConfig.for_model(family, **sparse)
    ours = ModelConfig.from_hf(sparse)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 4)
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert set(ours.layer_windows) == {theirs.sliding_window if family == "mistral" else None}
    assert ours.rope.theta == 10000.0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_null_is_not_silence(family):
    """Without num_key_value_heads Qwen has 32 KV heads; where it is null, as many as query heads."""
    null = {**LLAMA, "architectures": [f"{family.capitalize()}ForCausalLM"], "num_key_value_heads": None}
    theirs = transformers.AutoConfig.for_model(family, **null)
    assert ModelConfig.from_hf(null).num_kv_heads == theirs.num_key_value_heads == 4


def test_families_differ_in_bias_and_norm():
    """Qwen2 has biases on q, k and v only; Qwen3 normalises q and k; Llama's attention_bias covers o too."""
    qwen2 = parse(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    qwen3 = parse(architectures=["Qwen3ForCausalLM"], num_key_value_heads=2)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)
    llama = parse(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.num_kv_heads) == (True, True, True, 4)


def test_layer_windows():
    """max_window_layers layers attend to everything; layer_types, where given, decides."""
    qwen = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4, "sliding_window": 8}
    assert parse(**qwen).layer_windows == (None,) * 4
    assert parse(**qwen, use_sliding_window=True, max_window_layers=3).layer_windows == (None, None, None, 8)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert parse(**qwen, use_sliding_window=True, layer_types=kinds).layer_windows == (8, None, 8, None)


@pytest.mark.parametrize(
    ("rope", "window"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        (YARN, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        ({**YARN, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 2048),
        (None, 2048),
    ],
)
def test_window(rope, window):
    """Rope scaling stretches the context, in llama3 already within max_position_embeddings."""
    assert parse(rope_scaling=rope).window == window
    new = {"rope_theta": 5e5, **rope} if rope else None
    assert parse(rope_parameters=new).window == window
    assert parse(rope_parameters=new, rope_scaling=rope, rope_theta=5e5).window == window  # for old and new readers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"factor": 4.0}}, "rope type None"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "lacks low_freq_factor"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": YARN}, "rope_parameters and rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4, "sliding_window": 0}, "sliding_window"),
    ],
)
def test_refused(changes, message):
    """One clear error that names the field."""
    with pytest.raises(ModelError, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1},
        {"temperature": 1e39},
        {"top_p": 0},
        {"top_k": 1.5},
        {"min_p": 2},
        {"repetition_penalty": "high"},
    ],
)
def test_refused_generation_defaults(given):
    """A default outside its range is named."""
    with pytest.raises(ModelError, match=next(iter(given))):
        parse(given)


def test_folder(tmp_path):
    """Bad or absent files are named; generation_config.json may be absent."""
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        ModelConfig.from_folder(tmp_path)
    for bad in ("{", "[]", '"\udcff"'):
        (tmp_path / "config.json").write_bytes(bad.encode(errors="surrogateescape"))
        with pytest.raises(ModelError, match=r"config\.json: not"):
            ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_folder(tmp_path) == parse()
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 9}))
    assert ModelConfig.from_folder(tmp_path).generation.top_k == GenerationDefaults.load(tmp_path).top_k == 9
