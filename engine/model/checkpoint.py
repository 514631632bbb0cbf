"""The files of a model: its configuration, and its tensors under their Hugging Face names. Knows no layers."""

import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.config import ModelConfig, read_json
from engine.model.errors import ModelError
from engine.model.gguf import GGUFCheckpoint

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHARD = re.compile(r"[\w.-]{1,200}\.safetensors", re.ASCII)


def open_checkpoint(path: Path) -> "Checkpoint":
    """Opens a folder in Hugging Face layout or a GGUF file.

    Raises:
        ModelError: neither of them, or its configuration is unsupported.
    """
    if path.is_dir():
        return FolderCheckpoint(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    return GGUFCheckpoint(path)


class FolderCheckpoint:
    """config.json, and safetensors in one file or in shards.

    Raises:
        ModelError: a file is missing or unreadable, or the configuration is unsupported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = ModelConfig.from_folder(path)
        self.file = path  # that `tensors()` reads

    @property
    def total_bytes(self) -> int:
        """Size of the weight files."""
        return sum(file.stat().st_size for file in self._files())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, tensor), file by file, one in memory at a time.

        Raises:
            ModelError: a file is missing, truncated or holds other tensors than the index says.
        """
        for file, expected in self._files().items():
            self.file = file
            try:
                with safe_open(file, framework="pt") as shard:
                    names = set(shard.keys())
                    if expected is not None and names != expected:
                        name = min(names ^ expected)
                        what = "lacks" if name in expected else "has, though the index does not say so,"
                        raise ModelError(f"{file}: {what} the tensor {name}")
                    for name in sorted(names):
                        yield name, shard.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: unreadable or truncated: {error}") from error

    def _files(self) -> dict[Path, set[str] | None]:
        """The weight files, and the names of the tensors that each must hold (None: not said)."""
        index = self.path / INDEX
        if not index.exists():
            single = self.path / SINGLE
            if not single.exists():
                raise ModelError(f"{self.path}: has neither {SINGLE} nor {INDEX}")
            return {single: None}
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ModelError(f"{index}: has no weight_map")
        files: dict[Path, set[str] | None] = {}
        for file in sorted(set(weight_map.values())):
            if _SHARD.fullmatch(file) is None:
                raise ModelError(f"{index}: {file!r:.200} is no name of a safetensors file")
            if not (self.path / file).exists():
                raise ModelError(f"{self.path / file}: missing, but named in {INDEX}")
            files[self.path / file] = {name for name, where in weight_map.items() if where == file}
        return files


Checkpoint = FolderCheckpoint | GGUFCheckpoint
