"""Bytes of messages, as protobuf writes them: how many fields they have, counted before they are read; and the message
that comes for every token, made by hand.
"""

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from fulcrum.v1 import inference_pb2 as pb

# Tags of the wire format: field number << 3 | 2 (a length and that many bytes) or 0 (a number).
_DELTA = pb.GenerateResponse.DELTA_FIELD_NUMBER << 3 | 2
_INDEX = pb.Delta.INDEX_FIELD_NUMBER << 3
_TEXT = pb.Delta.TEXT_FIELD_NUMBER << 3 | 2
_ONE_BYTE = 1 << 7  # numbers below it take one byte


def text_delta(index: int, text: str) -> bytes:
    """GenerateResponse(delta=Delta(index=index, text=text)), serialized; three times as fast where all is short."""
    raw = text.encode()
    size = len(raw)
    if size >= _ONE_BYTE - 4 or not 0 <= index < _ONE_BYTE or not size:
        return pb.GenerateResponse(delta=pb.Delta(index=index, text=text)).SerializeToString()
    if index:
        return b"%c%c%c%c%c%c%b" % (_DELTA, size + 4, _INDEX, index, _TEXT, size, raw)
    return b"%c%c%c%c%b" % (_DELTA, size + 2, _TEXT, size, raw)


def serialized(message: Message | bytes) -> bytes:
    """The message's bytes, which it may be already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def field_beyond(payload: bytes, kind: Descriptor, most: int) -> str | None:
    """Where in a message its field number `most` + 1 is, such as "chat.messages"; None where there are fewer.

    Those of the messages in it count too, and 32 bytes of packed numbers as one. To read a field that is two bytes long
    takes a hundred, and nothing else goes on meanwhile. What is no message is counted as far as it is one.
    """
    count, found = 0, [("", 0, len(payload), kind)]
    while found:
        path, at, end, kind = found.pop()
        known = kind.fields_by_number
        while at < end:
            tag, at = _varint(payload, at)
            field = known.get(tag >> 3)
            count += 1
            match tag & 7:
                case 0:
                    _, at = _varint(payload, at)
                case 1:
                    at += 8
                case 2:
                    size, at = _varint(payload, at)
                    if field is not None and field.message_type is not None:
                        found.append((f"{path}{field.name}.", at, min(at + size, end), field.message_type))
                    elif field is not None and field.is_packed:
                        count += size >> 5
                    at += size
                case 5:
                    at += 4
            if count > most:
                return f"{path}{field.name if field is not None else tag >> 3}"
    return None


def _varint(payload: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and what follows it: beyond the end, where that cuts it."""
    if at < len(payload) and payload[at] < _ONE_BYTE:
        return payload[at], at + 1
    value = shift = 0
    for byte in payload[at : at + 10]:
        value |= (byte & 127) << shift
        shift += 7
        at += 1
        if byte < _ONE_BYTE:
            return value, at
    return value, len(payload)
