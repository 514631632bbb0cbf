"""Hand-made bytes are those that protobuf writes, and its fields are counted right."""

import random

import pytest
from google.protobuf.message import Message

from fulcrum.v1 import inference_pb2 as pb
from service.wire import field_beyond, serialized, text_delta


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


def fields_of(message: Message) -> int:
    """How many fields a message has on the wire, and those in it; packed numbers are one field."""
    count = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            count += len(value) * 3  # an entry, its key and its value
        elif field.message_type is not None:
            several = value if field.is_repeated else [value]
            count += sum(1 + fields_of(one) for one in several)
        else:
            count += len(value) if field.is_repeated and not field.is_packed else 1
    return count


CHAT = pb.Chat(
    messages=[
        pb.ChatMessage(role="user", content=[pb.ContentPart(text="hi"), pb.ContentPart(text="x" * 300)]),
        pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="c", name="f", arguments_json="{}")] * 2),
        pb.ChatMessage(),
    ],
    tools=[pb.Tool(name="f", strict=True)],
    tool_choice=pb.ToolChoice(function="f"),
)
MESSAGES = [
    pb.GenerateRequest(),
    pb.GenerateRequest(
        chat=CHAT, sampling=pb.SamplingParams(temperature=0.5, seed=2**63, logit_bias={1: 2.0, 300: -1.0})
    ),
    pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 2**31]), stopping=pb.StoppingCriteria(stop=["a", "b"], min_tokens=300)
    ),
    pb.WatchStatsRequest(interval_seconds=0.5),
    pb.TokenizeRequest(chat=CHAT, add_special_tokens=False),
]


@pytest.mark.parametrize("message", MESSAGES, ids=range(len(MESSAGES)))
def test_the_fields_of_a_message_are_counted(message: Message) -> None:
    payload, count = message.SerializeToString(), fields_of(message)
    assert field_beyond(payload, message.DESCRIPTOR, count) is None
    if count:
        assert field_beyond(payload, message.DESCRIPTOR, count - 1) is not None


def test_the_field_that_is_too_much_is_named_by_its_path() -> None:
    many = [
        ("chat.messages", pb.Chat(messages=[pb.ChatMessage()] * 50)),
        ("chat.messages.content", pb.Chat(messages=[pb.ChatMessage(content=[pb.ContentPart()] * 50)])),
        ("chat.tools", pb.Chat(tools=[pb.Tool()] * 50)),
    ]
    for path, chat in many:
        assert (
            field_beyond(pb.GenerateRequest(chat=chat).SerializeToString(), pb.GenerateRequest.DESCRIPTOR, 50) == path
        )
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 3200))  # 32 of them count as one
    assert field_beyond(ids.SerializeToString(), pb.GenerateRequest.DESCRIPTOR, 102) is None
    assert field_beyond(ids.SerializeToString(), pb.GenerateRequest.DESCRIPTOR, 101) == "token_ids.ids"


def test_whatever_the_bytes_are_they_are_counted_to_their_end() -> None:
    """Bytes that are no message, and such as have been cut: none is looked for beyond the end."""
    draw = random.Random(1)
    whole = MESSAGES[1].SerializeToString()
    for payload in [
        *(draw.randbytes(draw.randrange(40)) for _ in range(3000)),
        *(whole[:at] for at in range(len(whole))),
    ]:
        assert field_beyond(payload, pb.GenerateRequest.DESCRIPTOR, 100) is None
    assert field_beyond(b"\xff" * 99, pb.GenerateRequest.DESCRIPTOR, 100) is None
    assert field_beyond(b"\x5b" * 99, pb.GenerateRequest.DESCRIPTOR, 98) == "regex"  # groups within groups
