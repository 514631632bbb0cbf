"""Frames on a stream socket: a 4-byte little-endian length, then that many bytes of msgpack."""

import struct
from collections.abc import Iterator

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
# Far above any honest message (a step of 1,024 rows is about 50 KB, a prompt of a million tokens 5 MB).
MAX_FRAME_BYTES = 256 << 20


class FrameError(Exception):
    """The peer does not speak frames."""


def frame_length(header: bytes | bytearray) -> int:
    """The payload's length. Raises FrameError above MAX_FRAME_BYTES."""
    return _checked(_HEADER.unpack(header)[0])


def to_frame(payload: bytes) -> bytes:
    """Header and payload. Raises FrameError above MAX_FRAME_BYTES."""
    return _HEADER.pack(_checked(len(payload))) + payload


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Removes the complete frames from the front of a receive buffer and yields their payloads."""
    start = 0
    try:
        while (at := start + HEADER_BYTES) <= len(buffer):
            end = at + frame_length(buffer[start:at])
            if end > len(buffer):
                break
            start = end
            yield bytes(buffer[at:end])
    finally:
        del buffer[:start]


def _checked(length: int) -> int:
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is above the limit of {MAX_FRAME_BYTES}")
    return length
