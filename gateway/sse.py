"""Writes answers as OpenAI's JSON: whole, and as server-sent events. Knows no gRPC call and no HTTP server.

The JSON around a streamed piece is made once per choice; a token costs one string escape and one concatenation.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from json.encoder import encode_basestring
from typing import Any

DONE = b"data: [DONE]\n\n"
ACCEPTED = b": accepted\n\n"
HEARTBEAT = b": keep-alive\n\n"

# The fields of a choice that goes on.
OPEN = {"logprobs": None, "finish_reason": None}

# Some readers of event streams take these for line ends; inside JSON they may be escaped.
LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def compact(value: object) -> str:
    """JSON without spaces, safe inside a line of an event stream."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(LINE_ENDS)


def event(value: object) -> bytes:
    """One server-sent event."""
    return f"data: {compact(value)}\n\n".encode()


def quote(text: str) -> str:
    """A JSON string, safe inside a line of an event stream."""
    quoted: str = encode_basestring(text)
    return quoted if quoted.isascii() else quoted.translate(LINE_ENDS)


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer says. `id` is the engine's; `created` is in Unix seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(slots=True)
class TokenCounts:
    """Tokens of an answer."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ended.

    Args:
        reason: OpenAI's finish_reason.
        matched: the stop string or stop token id that was met, if one was.
    """

    reason: str
    matched: str | int | None


class Format(ABC):
    """One answer's JSON. Subclasses say what a choice looks like."""

    id_prefix: str
    streamed_object: str
    whole_object: str

    def __init__(self, head: Head, choices: int, nulls: bool) -> None:
        """Makes what surrounds the pieces. `nulls`: chunks say "usage": null, as they do when usage will follow."""
        self._head = asdict(head) | {"id": self.id_prefix + head.id}
        self._tail = {"usage": None} if nulls else {}
        self._choices = choices
        self._around = [self._halves(index) for index in range(choices)]

    @abstractmethod
    def opening(self) -> bytes:
        """What is sent as soon as the request is accepted."""

    @abstractmethod
    def _streamed_choice(self, index: int, text: str | None) -> dict[str, Any]:
        """A choice in a chunk; text is None in its last one."""

    @abstractmethod
    def _whole_choice(self, index: int, text: str) -> dict[str, Any]:
        """A choice of the answer that is not streamed."""

    def piece(self, index: int, text: str) -> bytes:
        """A piece of a choice's text."""
        before, after = self._around[index]
        return f"{before}{quote(text)}{after}".encode()

    def ending(self, index: int, ending: Ending) -> bytes:
        """The last event of a choice."""
        return self._chunk([self._streamed_choice(index, None) | close(ending)])

    def closing(self, counts: TokenCounts) -> bytes:
        """The end of a stream: the event that carries the usage and no choice, if one is wanted, and [DONE]."""
        if not self._tail:
            return DONE
        return event({"object": self.streamed_object, "choices": []} | self._head | {"usage": counts.usage()}) + DONE

    def whole(self, texts: list[str], endings: list[Ending], counts: TokenCounts) -> dict[str, Any]:
        """The answer that is not streamed."""
        pairs = enumerate(zip(texts, endings, strict=True))
        choices = [self._whole_choice(index, text) | close(ending) for index, (text, ending) in pairs]
        return {"object": self.whole_object, "choices": choices} | self._head | {"usage": counts.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        return event({"object": self.streamed_object, "choices": choices} | self._head | self._tail)

    def _halves(self, index: int) -> tuple[str, str]:
        # The first place where it stands is the text: nothing that a caller chose comes before the choices.
        choice = self._streamed_choice(index, "\0") | OPEN
        before, _, after = self._chunk([choice]).decode().partition('"\\u0000"')
        return before, after


class ChatFormat(Format):
    """chat.completion and chat.completion.chunk."""

    id_prefix = "chatcmpl-"
    streamed_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def opening(self) -> bytes:
        """The first chunk of each choice: its role."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk([{"index": index, "delta": delta} | OPEN]) for index in range(self._choices))

    def _streamed_choice(self, index: int, text: str | None) -> dict[str, Any]:
        return {"index": index, "delta": {} if text is None else {"content": text}}

    def _whole_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "message": {"role": "assistant", "content": text, "refusal": None}}


class CompletionFormat(Format):
    """text_completion. An echo (the prompt's text, for each choice) comes before the choice's own text."""

    id_prefix = "cmpl-"
    streamed_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, head: Head, choices: int, nulls: bool, echo: list[str] | None) -> None:
        """As Format."""
        super().__init__(head, choices, nulls)
        self._echo = echo

    def opening(self) -> bytes:
        """The echoes; without them a comment, so that the first byte comes as early as a chat's."""
        if self._echo is None:
            return ACCEPTED
        return b"".join(self.piece(index, text) for index, text in enumerate(self._echo))

    def _streamed_choice(self, index: int, text: str | None) -> dict[str, Any]:
        return {"index": index, "text": text or ""}

    def _whole_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text if self._echo is None else self._echo[index] + text}


def close(ending: Ending) -> dict[str, Any]:
    """The fields of a choice that has ended."""
    return {"logprobs": None, "finish_reason": ending.reason, "stop_reason": ending.matched}
