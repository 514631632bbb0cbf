"""Weight files that are not right: one clear error that names the file and the tensor."""

import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from engine.model.checkpoint import open_checkpoint
from engine.model.decoder import Decoder
from engine.model.errors import ModelError
from engine.model.weights import load_weights

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, tools):
    return tools.make_model(tmp_path_factory.mktemp("sharded"), "llama", shard="60KB")[0]


@pytest.fixture
def folder(sharded, tmp_path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def load(folder: Path) -> Decoder:
    checkpoint = open_checkpoint(folder)
    decoder = Decoder(checkpoint.config, torch.float32, torch.device("cpu"))
    load_weights(decoder, checkpoint, progress=False)
    return decoder


def index_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def change(folder: Path, tensors: dict[str, torch.Tensor | None]) -> str:
    """Rewrites the shard that holds layer 1's q_proj, and the index with it; returns the shard's name."""
    shard = index_of(folder)[Q]
    held = load_file(folder / shard) | tensors
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / shard, {"format": "pt"})
    weight_map = {name: file for name, file in index_of(folder).items() if tensors.get(name, 0) is not None}
    weight_map |= {name: shard for name, tensor in tensors.items() if tensor is not None}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return shard


def test_whole_checkpoint_loads(folder):
    """The weights are those of the files, wherever the shards were cut."""
    assert len(set(index_of(folder).values())) > 3
    decoder = load(folder)
    shard = index_of(folder)["model.embed_tokens.weight"]
    assert torch.equal(decoder.embedding, load_file(folder / shard)["model.embed_tokens.weight"])


def test_missing_shard(folder):
    """A shard that the index names is not there."""
    shard = index_of(folder)[Q]
    (folder / shard).unlink()
    with pytest.raises(ModelError, match=f"{shard}: missing"):
        load(folder)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.99])
def test_truncated_file(keep, folder):
    """A file cut anywhere."""
    shard = folder / index_of(folder)[Q]
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ModelError, match=f"{shard.name}: unreadable or truncated"):
        load(folder)


def test_wrong_shape(folder):
    """The tensor, its file and both shapes are named."""
    shard = change(folder, {Q: torch.zeros(64, 32)})
    with pytest.raises(ModelError, match=rf"{shard}: tensor {Q} has the shape \(64, 32\), not \(64, 64\)"):
        load(folder)


def test_wrong_type(folder):
    """Integers and 8-bit floats are no weights that this engine computes with."""
    for dtype in (torch.int64, torch.float8_e4m3fn):
        change(folder, {Q: torch.zeros(64, 64).to(dtype)})
        with pytest.raises(ModelError, match=f"tensor {Q} is {dtype}"):
            load(folder)


@pytest.mark.parametrize("name", ["model.layers.9.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.bias", "x"])
def test_unexpected_tensor(name, folder):
    """A tensor without a place in the model is not skipped."""
    shard = change(folder, {name: torch.zeros(64)})
    with pytest.raises(ModelError, match=f"{shard}: unexpected tensor {name}"):
        load(folder)


def test_missing_tensor(folder):
    """A tensor that no file holds."""
    change(folder, {Q: None})
    with pytest.raises(ModelError, match=f"tensor {Q} is missing"):
        load(folder)


def test_index_and_file_disagree(folder):
    """An index with unknown keys fails loudly, and so does a shard with more than the index says."""
    index = folder / "model.safetensors.index.json"
    weight_map = index_of(folder)
    index.write_text(json.dumps({"weight_map": weight_map | {"ghost.weight": weight_map[Q]}}))
    with pytest.raises(ModelError, match=f"{weight_map[Q]}: lacks the tensor ghost.weight"):
        load(folder)
    index.write_text(json.dumps({"weight_map": {name: file for name, file in weight_map.items() if name != Q}}))
    with pytest.raises(ModelError, match=f"{weight_map[Q]}: has, though the index does not say so, the tensor {Q}"):
        load(folder)


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b.safetensors"}}'])
def test_bad_index(index, folder):
    """An index that is none, or points out of the folder."""
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"index\.json"):
        load(folder)


def test_not_a_model(tmp_path, folder):
    """Nothing there, a folder without weights, a file of another kind."""
    with pytest.raises(ModelError, match="no such file or folder"):
        open_checkpoint(tmp_path / "absent")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="has neither"):
        load(folder)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"notes\.txt"):
        open_checkpoint(tmp_path / "notes.txt")


class Listed:
    """A checkpoint of given tensors, for what a safetensors file cannot hold."""

    def __init__(self, folder: Path, more: list[tuple[str, torch.Tensor]]) -> None:
        self.path = self.file = folder
        self._real, self._more = open_checkpoint(folder), more
        self.config, self.total_bytes = self._real.config, 0

    def tensors(self):
        yield from self._real.tensors()
        yield from self._more


def test_duplicate_tensor(folder):
    """A tensor that comes twice."""
    checkpoint = Listed(folder, [(Q, torch.zeros(64, 64))])
    decoder = Decoder(checkpoint.config, torch.float32, torch.device("cpu"))
    with pytest.raises(ModelError, match=f"tensor {Q} is there twice"):
        load_weights(decoder, checkpoint, progress=False)


def test_harmless_keys_are_skipped(folder):
    """Rotary frequencies of old checkpoints follow from the configuration; nothing else may be left over."""
    change(folder, {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    load(folder)


@pytest.mark.parametrize("scale", [1, -1], ids=["equal", "another"])
def test_tied_head_may_be_stored(scale, tmp_path, tools, caplog):
    """An lm_head.weight that is not the embedding is what the model was trained with, whatever is tied."""
    folder, _ = tools.make_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    file = folder / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" not in weights
    save_file(weights | {"lm_head.weight": scale * weights["model.embed_tokens.weight"]}, file, {"format": "pt"})
    output = tools.Driver(tools.make_runner(folder)).generate([[1, 2, 3]], 10)[0]
    assert output == tools.oracle(LlamaForCausalLM.from_pretrained(folder), [1, 2, 3], output)
    assert ("lm_head.weight is not the embedding" in caplog.text) == (scale == -1)


def test_untied_head_must_be_stored(folder):
    """Without tied embeddings a missing lm_head.weight is an error."""
    shard = folder / index_of(folder)["lm_head.weight"]
    held = load_file(shard)
    del held["lm_head.weight"]
    save_file(held, shard, {"format": "pt"})
    weight_map = {name: file for name, file in index_of(folder).items() if name != "lm_head.weight"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight is missing"):
        load(folder)


def test_tensors_stream(folder):
    """When a tensor is read, the ones before it are no longer held by anybody (the two at hand aside)."""

    class Watched(Listed):
        def tensors(self):
            read = []
            for name, tensor in self._real.tensors():
                assert sum(one() is not None for one in read) <= 2
                read.append(weakref.ref(tensor))
                yield name, tensor

    checkpoint = Watched(folder, [])
    load_weights(Decoder(checkpoint.config, torch.float32, torch.device("cpu")), checkpoint, progress=False)


def test_progress_bar(folder, capsys):
    """The bar goes to stderr, and only when asked for."""
    load(folder)
    assert capsys.readouterr().err == ""
    checkpoint = open_checkpoint(folder)
    load_weights(Decoder(checkpoint.config, torch.float32, torch.device("cpu")), checkpoint, progress=True)
    captured = capsys.readouterr()
    assert "loading weights" in captured.err
    assert captured.out == ""
