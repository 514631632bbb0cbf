"""Reads the header of a GGUF file: its metadata, and where its tensors lie. Knows no model and no torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import math
import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from engine.model.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# What ggml allows; a larger count means that the header is broken.
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
# Ten times what the largest vocabularies take; a list may take 32 bytes for each of these.
MAX_HEADER_BYTES = 128 << 20

# By their numbers in GGUFValueType.
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # as in Hugging Face, slowest dimension first (GGUF stores it reversed)
    start: int  # byte in the file
    row_bytes: int  # stored size of one run of the last dimension
    nbytes: int  # and of all


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open file: `data` is mapped, read-only; `tensors` are by their GGUF names."""

    path: Path
    data: mmap.mmap
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """A cursor over the file's head; every read is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.end = min(len(data), MAX_HEADER_BYTES)

    def take(self, size: int) -> int:
        """Advances by `size` bytes and returns where they begin."""
        start = self.at
        if size > self.end - start:
            if self.end < len(self.data):
                raise ModelError(f"{self.path}: broken GGUF file, its header is longer than {self.end} bytes")
            raise ModelError(f"{self.path}: truncated GGUF file, its header ends past byte {len(self.data)}")
        self.at += size
        return start

    def number(self, form: str) -> int:
        """Reads an unsigned number; `form` is of `struct`."""
        return int(struct.unpack_from(form, self.data, self.take(struct.calcsize(form)))[0])

    def text(self) -> str:
        """Reads a length and that many bytes of UTF-8."""
        size = self.number("<Q")
        start = self.take(size)
        try:
            return str(self.data[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: broken GGUF header, invalid UTF-8 at byte {start + error.start}") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        """Reads a value of a GGUFValueType."""
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                raise ModelError(f"{self.path}: broken GGUF header, arrays nested too deep at byte {self.at}")
            inner, count = self.number("<I"), self.number("<Q")
            if inner in SCALARS:
                return self.numbers(inner, count)
            return [self.value(inner, depth + 1) for _ in range(count)]
        if kind not in SCALARS:
            raise ModelError(f"{self.path}: broken GGUF header, unknown value type {kind} at byte {self.at}")
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: int, count: int) -> list[Any]:
        """Reads `count` scalars of a kind."""
        dtype = np.dtype(SCALARS[kind])
        values: list[Any] = np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize)).tolist()
        return values


def _read_metadata(cursor: _Cursor) -> tuple[dict[str, Any], int]:
    """Returns the metadata and the count of tensors; the cursor stands on the first tensor's info then."""
    path = cursor.path
    if len(cursor.data) < len(MAGIC) or cursor.data[:4] != MAGIC:
        raise ModelError(f"{path}: not a GGUF file (it begins with {cursor.data[:4]!r}, not {MAGIC!r})")
    cursor.take(4)
    version = cursor.number("<I")
    if version not in VERSIONS:
        hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
        raise ModelError(f"{path}: GGUF version {version} is not supported{hint}; supported: {VERSIONS}")
    tensor_count, pair_count = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.text()
        if key in metadata:
            raise ModelError(f"{path}: broken GGUF header, {key:.200} is there twice")
        metadata[key] = cursor.value(cursor.number("<I"))
    return metadata, tensor_count


def _read_tensor_infos(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    path = cursor.path
    infos = []
    for _ in range(count):
        name = cursor.text()
        dimensions = cursor.number("<I")
        if dimensions > MAX_DIMENSIONS:
            raise ModelError(f"{path}: broken GGUF header, tensor {name:.200} has {dimensions} dimensions")
        shape = tuple(cursor.number("<Q") for _ in range(dimensions))[::-1]
        infos.append((name, shape, cursor.number("<I"), cursor.number("<Q")))
    start = cursor.at + -cursor.at % alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, number, offset in infos:
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise ModelError(f"{path}: tensor {name:.200} has the unknown quantisation type {number}") from error
        if name in tensors:
            raise ModelError(f"{path}: broken GGUF header, tensor {name:.200} is there twice")
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % block:
            raise ModelError(f"{path}: tensor {name:.200} of shape {shape} does not fit the blocks of {kind.name}")
        row_bytes = shape[-1] // block * block_bytes
        info = TensorInfo(name, kind, shape, start + offset, row_bytes, math.prod(shape[:-1]) * row_bytes)
        if info.start + info.nbytes > len(cursor.data):
            raise ModelError(
                f"{path}: truncated GGUF file, tensor {name:.200} ends at byte {info.start + info.nbytes}"
                f" of {len(cursor.data)}"
            )
        tensors[name] = info
    in_order = sorted(tensors.values(), key=lambda info: info.start)
    for one, other in pairwise(in_order):
        if other.start < one.start + one.nbytes:
            raise ModelError(f"{path}: broken GGUF file, tensors {one.name:.200} and {other.name:.200} overlap")
    return tensors


def _open(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # an empty file cannot be mapped
        raise ModelError(f"{path}: not a GGUF file (it is empty)") from error
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Returns the file's metadata as plain Python values, without looking at the tensors.

    Raises:
        ModelError: not a GGUF file, or a broken one.
    """
    return _read_metadata(_Cursor(path, _open(path)))[0]


def read_gguf(path: Path) -> GGUFFile:
    """Opens the file and reads its whole header.

    Raises:
        ModelError: not a GGUF file, truncated, or with a tensor of an unknown kind.
    """
    data = _open(path)
    cursor = _Cursor(path, data)
    metadata, count = _read_metadata(cursor)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= MAX_HEADER_BYTES:
        raise ModelError(f"{path}: broken GGUF header, general.alignment is {alignment!r:.200}")
    return GGUFFile(path, data, metadata, _read_tensor_infos(cursor, count, alignment))
