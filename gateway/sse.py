"""Writes answers as OpenAI's JSON: whole, and as server-sent events. Knows no gRPC call and no HTTP server.

The JSON around a streamed piece is made once per choice; a token costs one string escape and one concatenation. What is
long in a whole answer is written as it comes: no call takes longer than the logprobs of one of the engine's messages.
"""

import json
import secrets
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from json.encoder import encode_basestring
from typing import Any, NamedTuple

from gateway.errors import ApiError
from gateway.logprobs import LISTS, Logprobs, TextLogprobs, prompt_logprobs, token_logprobs

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


# In the place of JSON that is written already. Nobody can have said it.
HOLE = secrets.token_hex(16)


def around(value: object, *holes: Iterable[str]) -> Iterator[str]:
    """JSON of a value, in pieces, with these in the place of its HOLEs."""
    first, *behind = compact(value).split(f'"{HOLE}"')
    yield first
    for hole, text in zip(holes, behind, strict=True):
        yield from hole
        yield text


def commas(pieces: Iterable[str]) -> Iterator[str]:
    """The pieces of a list."""
    for number, piece in enumerate(pieces):
        yield f",{piece}" if number else piece


class Written:
    """Lists of JSON as they grow, by name: the entries are written when they come."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[str]] = {}

    def add(self, lists: dict[str, list[Any]]) -> int:
        """The next entries of each list. Returns: how many characters they take."""
        size = 0
        for name, entries in lists.items():
            text = compact(entries)[1:-1]
            size += len(text)
            if text:
                self._pieces.setdefault(name, []).append(text)
        return size

    def __getitem__(self, name: str) -> list[str]:
        return self._pieces.get(name, [])


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


class Said:
    """What a choice has said; `logprobs` are of its tokens, `prompt` of its prompt's, which its siblings share."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[CallPiece]] = {}
        self.logprobs, self.prompt = Written(), Written()

    def add(self, text: str, reasoning: str, calls: Iterable[CallPiece]) -> None:
        """It goes on."""
        self._texts.append(text)
        self._reasoning.append(reasoning)
        for piece in calls:
            self._calls.setdefault(piece.call, []).append(piece)

    @property
    def text(self) -> str:
        """Its content."""
        return "".join(self._texts)

    def message(self) -> dict[str, Any]:
        """OpenAI's message."""
        calls = [
            parts[0]._replace(arguments="".join(part.arguments for part in parts)).whole()
            for _, parts in sorted(self._calls.items())
        ]
        text = self.text
        message = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
        return message | reasoned("".join(self._reasoning)) | ({"tool_calls": calls} if calls else {})


def reasoned(text: str) -> dict[str, str]:
    """Reasoning under both of its names (vLLM's first one is reasoning_content)."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


class Format(ABC):
    """One answer's JSON, whole or as a stream of events."""

    @abstractmethod
    def opening(self) -> Iterator[bytes]:
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

    # The answer that is not streamed.

    @abstractmethod
    def keep(self, index: int, text: str, reasoning: str, calls: Iterable[CallPiece], logprobs: Logprobs) -> int:
        """A choice goes on. Returns: about how many characters more the answer has."""

    def keep_prompt(self, indexes: range, logprobs: Logprobs) -> int:
        """The next logprobs of the prompt of these choices. Returns: as `keep`."""
        return 0

    @abstractmethod
    def whole(self, endings: list[Ending], counts: TokenCounts) -> Iterator[str]:
        """The answer, in pieces."""

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
        self._halves: dict[int, tuple[str, str]] = {}
        self._said: defaultdict[int, Said] = defaultdict(Said)

    @abstractmethod
    def _streamed_choice(self, index: int, text: str | None) -> dict[str, Any]:
        """A choice in a chunk; text is None in its last one."""

    @abstractmethod
    def _whole_choice(self, index: int, said: Said, ending: dict[str, Any]) -> Iterator[str]:
        """A choice of the answer that is not streamed."""

    @abstractmethod
    def _told(self, index: int, logprobs: Logprobs) -> dict[str, list[Any]]:
        """The lists of a choice's logprobs, as far as these go."""

    def piece(self, index: int, text: str) -> bytes:
        """A piece of a choice's text."""
        if index not in self._halves:
            # The first place where it stands is the text: nothing that a caller chose comes before the choices.
            before, _, after = self._chunk([self._streamed_choice(index, HOLE) | OPEN]).decode().partition(f'"{HOLE}"')
            self._halves[index] = before, after
        before, after = self._halves[index]
        return f"{before}{quote(text)}{after}".encode()

    def ending(self, index: int, ending: Ending) -> bytes:
        """The last event of a choice."""
        return self._chunk([self._streamed_choice(index, None) | OPEN | close(ending)])

    def closing(self, counts: TokenCounts) -> bytes:
        """The end of a stream: the event that carries the usage and no choice, if one is wanted, and [DONE]."""
        if not self._tail:
            return DONE
        return event({"object": self.streamed_object, "choices": []} | self._head | {"usage": counts.usage()}) + DONE

    def keep(self, index: int, text: str, reasoning: str, calls: Iterable[CallPiece], logprobs: Logprobs) -> int:
        """A choice goes on."""
        said = self._said[index]
        said.add(text, reasoning, calls)
        told = said.logprobs.add(self._told(index, logprobs)) if logprobs else 0
        return len(text) + len(reasoning) + sum(len(call.arguments) for call in calls) + told

    def whole(self, endings: list[Ending], counts: TokenCounts) -> Iterator[str]:
        """The answer, in pieces."""
        return around(self._answer(counts), self._whole_choices(endings))

    def _answer(self, counts: TokenCounts) -> dict[str, Any]:
        return {"object": self.whole_object, "choices": [HOLE]} | self._head | {"usage": counts.usage()}

    def _whole_choices(self, endings: list[Ending]) -> Iterator[str]:
        for index, ending in enumerate(endings):
            if index:
                yield ","
            yield from self._whole_choice(index, self._said[index], close(ending))

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        return event({"object": self.streamed_object, "choices": choices} | self._head | self._tail)


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
        self._prompt = Written()

    def opening(self) -> Iterator[bytes]:
        """The first chunk of each choice: its role."""
        delta = {"role": "assistant", "content": ""}
        yield b"".join(self._chunk([{"index": index, "delta": delta} | OPEN]) for index in range(self._choices))

    def _streamed_choice(self, index: int, text: str | None) -> dict[str, Any]:
        return {"index": index, "delta": {} if text is None else {"content": text}}

    def parts(
        self, index: int, text: str, reasoning: str, calls: Iterable[CallPiece], logprobs: Logprobs = ()
    ) -> bytes:
        """A chunk whose delta has reasoning, content and tool calls, in this order, where it has them."""
        delta: dict[str, Any] = reasoned(reasoning) | ({"content": text} if text else {})
        if tool_calls := [piece.delta() for piece in calls]:
            delta["tool_calls"] = tool_calls
        told = {"logprobs": self._told(index, logprobs) | {"refusal": None}} if logprobs else {}
        return self._chunk([{"index": index, "delta": delta} | OPEN | told])

    def keep_prompt(self, indexes: range, logprobs: Logprobs) -> int:
        """The next logprobs of the prompt."""
        return self._prompt.add({"prompt": prompt_logprobs(logprobs, self._prompt_top or 0)})

    def whole(self, endings: list[Ending], counts: TokenCounts) -> Iterator[str]:
        """The answer, in pieces."""
        if self._prompt_top is None:
            return super().whole(endings, counts)
        answer = self._answer(counts) | {"prompt_logprobs": [HOLE]}
        return around(answer, self._whole_choices(endings), commas(["null", *self._prompt["prompt"]]))

    def _told(self, index: int, logprobs: Logprobs) -> dict[str, list[Any]]:
        return {"content": token_logprobs(logprobs)}

    def _whole_choice(self, index: int, said: Said, ending: dict[str, Any]) -> Iterator[str]:
        choice = {"index": index, "message": said.message()} | ending
        if not self._logprobs:
            return around(choice | {"logprobs": None})
        return around(choice | {"logprobs": {"content": [HOLE], "refusal": None}}, commas(said.logprobs["content"]))


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

    def opening(self) -> Iterator[bytes]:
        """The echoes, if any."""
        for index, echo in enumerate(self._echo or ()):
            if self._logprobs:
                yield self._with(index, echo.text, self._logprobs[index].first(echo.first))
            else:
                yield self.piece(index, echo.text)

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
        return self._with(index, text, self._told(index, logprobs))

    def _with(self, index: int, text: str, logprobs: dict[str, Any]) -> bytes:
        return self._chunk([self._streamed_choice(index, text) | OPEN | {"logprobs": logprobs}])

    def _told(self, index: int, logprobs: Logprobs) -> dict[str, list[Any]]:
        return self._logprobs[index].answer(logprobs)

    def keep_prompt(self, indexes: range, logprobs: Logprobs) -> int:
        """The next logprobs of the prompt: written once for all of these choices."""
        prompt = self._echoed(indexes[0])
        for index in indexes:
            self._said[index].prompt = prompt
        size = 0
        if self._echo is not None and self._logprobs:
            size += prompt.add(self._logprobs[indexes[0]].prompt(logprobs))
        if self._prompt_top is not None:
            size += prompt.add({"prompt": prompt_logprobs(logprobs, self._prompt_top)})
        return size * len(indexes)

    def _echoed(self, index: int) -> Written:
        """What is told of the prompt of a choice, its first token at least."""
        prompt = self._said[index].prompt
        if self._echo is not None and self._logprobs and not prompt["tokens"]:
            prompt.add(self._logprobs[index].first(self._echo[index].first))
        return prompt

    def _whole_choice(self, index: int, said: Said, ending: dict[str, Any]) -> Iterator[str]:
        prompt = self._echoed(index)
        text = said.text if self._echo is None else self._echo[index].text + said.text
        choice, holes = self._streamed_choice(index, text) | {"logprobs": None} | ending, []
        if self._logprobs:
            choice["logprobs"] = {name: [HOLE] for name in LISTS}
            holes = [commas(prompt[name] + said.logprobs[name]) for name in LISTS]
        if self._prompt_top is not None:
            choice["prompt_logprobs"] = [HOLE]
            holes.append(commas(["null", *prompt["prompt"]]))
        return around(choice, *holes)


def close(ending: Ending) -> dict[str, Any]:
    """The fields of a choice that has ended."""
    return {"finish_reason": ending.reason, "stop_reason": ending.matched}
