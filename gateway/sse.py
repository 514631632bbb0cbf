"""Writes answers as OpenAI's JSON: whole, and as server-sent events. Knows no gRPC call and no HTTP server.

The JSON around a streamed piece is made once per choice; a token costs one string escape and one concatenation.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from json.encoder import encode_basestring
from typing import Any, NamedTuple

from fulcrum.v1 import inference_pb2 as pb
from gateway.errors import ApiError
from gateway.logprobs import Logprobs, TextLogprobs, prompt_logprobs, token_logprobs

DONE = b"data: [DONE]\n\n"
# Blank lines, no comment: the client of `vllm bench serve` 0.26 loses all that follows a comment in a chunk of its own.
HEARTBEAT = b"\n\n"

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
    reasoning: int = 0

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        details = {"completion_tokens_details": {"reasoning_tokens": self.reasoning}} if self.reasoning else {}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        } | details


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ended.

    Args:
        reason: OpenAI's finish_reason.
        matched: the stop string or stop token id that was met, if one was.
    """

    reason: str
    matched: str | int | None


class CallPiece(NamedTuple):
    """A piece of a tool call; `id` and `name` are in its first one."""

    call: int
    id: str
    name: str
    arguments: str

    def delta(self) -> dict[str, Any]:
        """OpenAI's delta of it."""
        if not self.id:
            return {"index": self.call, "function": {"arguments": self.arguments}}
        return {"index": self.call, **self.whole()}

    def whole(self) -> dict[str, Any]:
        """OpenAI's tool call, where this is all of it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Echo(NamedTuple):
    """A prompt that is a part of the answer: its text; where logprobs are told, the bytes of its first token."""

    text: str
    first: bytes


class SaidPiece(NamedTuple):
    """A choice goes on by this."""

    text: str
    reasoning: str
    calls: tuple[CallPiece, ...]
    logprobs: Logprobs


class Said:
    """What a choice has said, in `pieces`; `prompt`: the logprobs of its prompt's tokens."""

    def __init__(self) -> None:
        self.pieces: list[SaidPiece] = []
        self.prompt: list[pb.TokenLogprob] = []

    @property
    def text(self) -> str:
        """Its content."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def logprobs(self) -> list[pb.TokenLogprob]:
        """Of its tokens."""
        return [token for piece in self.pieces for token in piece.logprobs]

    def message(self) -> dict[str, Any]:
        """OpenAI's message."""
        pieces: dict[int, list[CallPiece]] = {}
        for call in (call for piece in self.pieces for call in piece.calls):
            pieces.setdefault(call.call, []).append(call)
        calls = [
            parts[0]._replace(arguments="".join(part.arguments for part in parts)).whole()
            for _, parts in sorted(pieces.items())
        ]
        content = None if calls and not self.text else self.text
        message = {"role": "assistant", "content": content, "refusal": None}
        reasoning = "".join(piece.reasoning for piece in self.pieces)
        return message | reasoned(reasoning) | ({"tool_calls": calls} if calls else {})


def reasoned(text: str) -> dict[str, str]:
    """Reasoning under both of its names (vLLM's first one is reasoning_content)."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


class Format(ABC):
    """One answer's JSON, whole or as a stream of events."""

    @abstractmethod
    def opening(self) -> bytes:
        """What is sent as soon as the request is accepted."""

    @abstractmethod
    def piece(self, index: int, text: str) -> bytes:
        """A piece of a choice's text."""

    @abstractmethod
    def parts(
        self, index: int, text: str, reasoning: str, calls: Iterable[CallPiece], logprobs: Logprobs = ()
    ) -> bytes:
        """A piece of a choice that is not its text alone."""

    def prompt(self, index: int, logprobs: Logprobs) -> bytes:
        """The next logprobs of a choice's prompt; b"" where they are not told in streams."""
        return b""

    @abstractmethod
    def ending(self, index: int, ending: Ending) -> bytes:
        """The last event of a choice."""

    @abstractmethod
    def closing(self, counts: TokenCounts) -> bytes:
        """The end of a stream."""

    @abstractmethod
    def whole(self, choices: list[Said], endings: list[Ending], counts: TokenCounts) -> dict[str, Any]:
        """The answer that is not streamed."""

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that breaks."""
        return event(error.body())


class ChoicesFormat(Format):
    """An answer of several choices. Subclasses say what one looks like."""

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
    def _streamed_choice(self, index: int, text: str | None) -> dict[str, Any]:
        """A choice in a chunk; text is None in its last one."""

    @abstractmethod
    def _whole_choice(self, index: int, said: Said) -> dict[str, Any]:
        """A choice of the answer that is not streamed."""

    def piece(self, index: int, text: str) -> bytes:
        """A piece of a choice's text."""
        before, after = self._around[index]
        return f"{before}{quote(text)}{after}".encode()

    def ending(self, index: int, ending: Ending) -> bytes:
        """The last event of a choice."""
        return self._chunk([self._streamed_choice(index, None) | OPEN | close(ending)])

    def closing(self, counts: TokenCounts) -> bytes:
        """The end of a stream: the event that carries the usage and no choice, if one is wanted, and [DONE]."""
        if not self._tail:
            return DONE
        return event({"object": self.streamed_object, "choices": []} | self._head | {"usage": counts.usage()}) + DONE

    def whole(self, choices: list[Said], endings: list[Ending], counts: TokenCounts) -> dict[str, Any]:
        """The answer that is not streamed."""
        pairs = enumerate(zip(choices, endings, strict=True))
        closed = [self._whole_choice(index, said) | close(ending) for index, (said, ending) in pairs]
        return {"object": self.whole_object, "choices": closed} | self._head | {"usage": counts.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        return event({"object": self.streamed_object, "choices": choices} | self._head | self._tail)

    def _halves(self, index: int) -> tuple[str, str]:
        # The first place where it stands is the text: nothing that a caller chose comes before the choices.
        choice = self._streamed_choice(index, "\0") | OPEN
        before, _, after = self._chunk([choice]).decode().partition('"\\u0000"')
        return before, after


class ChatFormat(ChoicesFormat):
    """chat.completion and chat.completion.chunk."""

    id_prefix = "chatcmpl-"
    streamed_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self, head: Head, choices: int, nulls: bool, *, logprobs: bool = False, prompt_logprobs: int | None = None
    ) -> None:
        """As ChoicesFormat, and which logprobs are told, of how many of the likeliest tokens in the prompt."""
        super().__init__(head, choices, nulls)
        self._logprobs, self._prompt_top = logprobs, prompt_logprobs

    def opening(self) -> bytes:
        """The first chunk of each choice: its role."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk([{"index": index, "delta": delta} | OPEN]) for index in range(self._choices))

    def _streamed_choice(self, index: int, text: str | None) -> dict[str, Any]:
        return {"index": index, "delta": {} if text is None else {"content": text}}

    def parts(
        self, index: int, text: str, reasoning: str, calls: Iterable[CallPiece], logprobs: Logprobs = ()
    ) -> bytes:
        """A chunk whose delta has reasoning, content and tool calls, in this order, where it has them."""
        delta: dict[str, Any] = reasoned(reasoning) | ({"content": text} if text else {})
        if tool_calls := [piece.delta() for piece in calls]:
            delta["tool_calls"] = tool_calls
        told = {"logprobs": {"content": token_logprobs(logprobs), "refusal": None}} if logprobs else {}
        return self._chunk([{"index": index, "delta": delta} | OPEN | told])

    def whole(self, choices: list[Said], endings: list[Ending], counts: TokenCounts) -> dict[str, Any]:
        """The answer that is not streamed."""
        answer = super().whole(choices, endings, counts)
        if self._prompt_top is not None:
            answer["prompt_logprobs"] = prompt_logprobs(choices[0].prompt, self._prompt_top)
        return answer

    def _whole_choice(self, index: int, said: Said) -> dict[str, Any]:
        told = {"content": token_logprobs(said.logprobs), "refusal": None} if self._logprobs else None
        return {"index": index, "message": said.message(), "logprobs": told}


class CompletionFormat(ChoicesFormat):
    """text_completion. An echo (the prompt's text, for each choice) comes before the choice's own text."""

    id_prefix = "cmpl-"
    streamed_object = "text_completion"
    whole_object = "text_completion"

    def __init__(
        self,
        head: Head,
        choices: int,
        nulls: bool,
        echo: list[Echo] | None,
        *,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> None:
        """As ChoicesFormat, and which logprobs are told, of how many of the likeliest tokens."""
        super().__init__(head, choices, nulls)
        self._echo = echo
        self._prompt_top = prompt_logprobs
        self._logprobs: list[TextLogprobs] = []
        if logprobs is not None:
            texts = [one.text for one in echo] if echo is not None else [""] * choices
            self._logprobs = [TextLogprobs(logprobs, text) for text in texts]

    def opening(self) -> bytes:
        """The echoes, if any."""
        echoes = self._echo or []
        if not self._logprobs:
            return b"".join(self.piece(index, echo.text) for index, echo in enumerate(echoes))
        pairs = enumerate(zip(echoes, self._logprobs, strict=False))
        return b"".join(self._with(index, echo.text, told.first(echo.first)) for index, (echo, told) in pairs)

    def prompt(self, index: int, logprobs: Logprobs) -> bytes:
        """Of an echo, whose text has been sent."""
        if self._echo is None or not self._logprobs:
            return b""
        return self._with(index, "", self._logprobs[index].prompt(logprobs))

    def _streamed_choice(self, index: int, text: str | None) -> dict[str, Any]:
        return {"index": index, "text": text or ""}

    def parts(
        self, index: int, text: str, reasoning: str, calls: Iterable[CallPiece], logprobs: Logprobs = ()
    ) -> bytes:
        """Text and logprobs: a continuation has nothing else."""
        return self._with(index, text, self._logprobs[index].answer(logprobs))

    def _with(self, index: int, text: str, logprobs: dict[str, Any]) -> bytes:
        return self._chunk([self._streamed_choice(index, text) | OPEN | {"logprobs": logprobs}])

    def _whole_choice(self, index: int, said: Said) -> dict[str, Any]:
        echo = self._echo[index] if self._echo is not None else None
        choice = self._streamed_choice(index, said.text if echo is None else echo.text + said.text)
        choice["logprobs"] = None
        if self._logprobs:
            told = self._logprobs[index]
            parts = [told.first(echo.first), told.prompt(said.prompt)] if echo is not None else []
            parts.append(told.answer(said.logprobs))
            choice["logprobs"] = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        if self._prompt_top is not None:
            choice["prompt_logprobs"] = prompt_logprobs(said.prompt, self._prompt_top)
        return choice


def close(ending: Ending) -> dict[str, Any]:
    """The fields of a choice that has ended."""
    return {"finish_reason": ending.reason, "stop_reason": ending.matched}
