"""Hand-made bytes are those that protobuf writes."""

import pytest

from fulcrum.v1 import inference_pb2 as pb
from service.wire import serialized, text_delta


@pytest.mark.parametrize("index", [0, 1, 127, 128, 70_000])
@pytest.mark.parametrize("size", [0, 1, 118, 119, 120, 121, 122, 123, 124, 125, 126, 127, 128, 129, 20_000])
@pytest.mark.parametrize("char", ["x", "é", "\U0001f600"])
def test_a_delta_is_what_protobuf_writes(index: int, size: int, char: str) -> None:
    text = char * (size // len(char.encode())) + "y" * (size % len(char.encode()))
    expected = pb.GenerateResponse(delta=pb.Delta(index=index, text=text)).SerializeToString()
    assert text_delta(index, text) == expected


def test_bytes_are_messages_already() -> None:
    message = pb.GenerateResponse(usage=pb.Usage(prompt_tokens=3))
    assert serialized(message) == message.SerializeToString()
    assert serialized(b"\x08\x01") == b"\x08\x01"
