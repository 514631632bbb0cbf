"""Frames on a stream socket: a 4-byte little-endian length, then that many bytes of msgpack."""

import struct
from collections.abc import Iterator

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
# Far above any honest message (a step of 1,024 rows is about 50 KB, a prompt of a million tokens 5 MB).
MAX_FRAME_BYTES = 256 << 20


class FrameError(Exception):
    """The peer does not speak frames."""


def frame_length(header: bytes) -> int:
    """The payload's length. Raises FrameError above MAX_FRAME_BYTES."""
    length: int = _HEADER.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is above the limit of {MAX_FRAME_BYTES}")
    return length


def to_frame(payload: bytes) -> bytes:
    """Header and payload. Raises FrameError above MAX_FRAME_BYTES."""
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(payload)} bytes is above the limit of {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(payload)) + payload


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Removes the complete frames from the front of a receive buffer and yields their payloads."""
    start = 0
    try:
        while len(buffer) - start >= HEADER_BYTES:
            length = frame_length(bytes(buffer[start : start + HEADER_BYTES]))
            end = start + HEADER_BYTES + length
            if len(buffer) < end:
                break
            payload = bytes(buffer[start + HEADER_BYTES : end])
            start = end
            yield payload
    finally:
        del buffer[:start]
