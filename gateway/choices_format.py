"""Writes chats and completions as OpenAI's JSON: whole, and as chunks. Knows no gRPC call and no HTTP server.

The JSON around a streamed piece is made once per choice; a token costs one string escape and one concatenation. What is
long in a whole answer is written as it comes: no call takes longer than the logprobs of one of the engine's messages.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fulcrum.v1 import inference_pb2 as pb
from gateway.errors import ApiError
from gateway.logprobs import LISTS, Logprobs, TextLogprobs, prompt_logprobs, token_logprobs
from gateway.schemas import ChatRequest, CompletionRequest, Sampling
from gateway.sse import DONE, HOLE, Written, around, commas, event, quote

# The fields of a choice that goes on.
OPEN = {"logprobs": None, "finish_reason": None}
REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


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

    def add(self, usage: pb.Usage) -> None:
        """Those of one prompt's choices."""
        self.prompt += usage.prompt_tokens
        self.completion += usage.completion_tokens
        self.cached += usage.cached_tokens
        self.reasoning += usage.reasoning_tokens

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        details = {"completion_tokens_details": {"reasoning_tokens": self.reasoning}} if self.reasoning else {}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        } | details


class Echo(NamedTuple):
    """A prompt that is a part of the answer: its text; where logprobs are told, its first token's bytes.

    One for all choices of the prompt: with 128 of each a body of 16 MiB would take 2 GB.
    """

    text: str
    first: bytes


class Said:
    """What a choice has said; `logprobs` are of its tokens, `prompt` of its prompt's, which its siblings share."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[pb.ToolCallDelta, list[str]]] = {}  # a call's first piece, and its arguments
        self.logprobs, self.prompt = Written(), Written()
        self.ending: dict[str, Any] = {}

    def add(self, delta: pb.Delta) -> None:
        """It goes on."""
        self._texts.append(delta.text)
        self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            self._calls.setdefault(call.index, (call, []))[1].append(call.arguments)

    @property
    def text(self) -> str:
        """Its content."""
        return "".join(self._texts)

    def message(self) -> dict[str, Any]:
        """OpenAI's message."""
        calls = [tool_call(first, "".join(arguments)) for _, (first, arguments) in sorted(self._calls.items())]
        text = self.text
        message = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
        return message | reasoned("".join(self._reasoning)) | ({"tool_calls": calls} if calls else {})


def tool_call(first: pb.ToolCallDelta, arguments: str) -> dict[str, Any]:
    """OpenAI's tool call, of which this is the first piece."""
    return {"id": first.id, "type": "function", "function": {"name": first.name, "arguments": arguments}}


def length(delta: pb.Delta) -> int:
    """Characters of a piece."""
    return len(delta.text) + len(delta.reasoning) + sum(len(call.arguments) for call in delta.tool_calls)


def reasoned(text: str) -> dict[str, str]:
    """Reasoning under both of its names (vLLM's first one is reasoning_content)."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


class ChoicesFormat(ABC):
    """An answer of several choices, whole or as a stream of chunks. Subclasses say what a choice looks like.

    Attributes:
        size: characters that it has before anything is generated.
    """

    size = 0
    id_prefix: str
    streamed_object: str
    whole_object: str

    def __init__(self, head: Head, choices: int, body: Sampling) -> None:
        """Makes what surrounds the pieces. Chunks say "usage": null when usage will follow, or tell it so far."""
        self._head = asdict(head) | {"id": self.id_prefix + head.id}
        self._tail = {"usage": None} if body.include_usage else {}
        self._continuous = body.continuous_usage
        self._so_far: dict[int, TokenCounts] = {}  # of the choices that have started, where chunks tell it
        self._choices = choices
        self._halves: dict[int, tuple[str, str]] = {}
        self._said: defaultdict[int, Said] = defaultdict(Said)

    @abstractmethod
    def opening(self) -> Iterator[bytes]:
        """What is sent as soon as the request is accepted."""

    def started(self, indexes: range, started: pb.Started) -> None:
        """The first step of these choices: what their prompt has is known."""
        if self._continuous:
            counts = {"prompt": started.prompt_tokens, "cached": started.cached_tokens}
            self._so_far |= {index: TokenCounts(**counts) for index in indexes}

    def delta(self, index: int, delta: pb.Delta) -> bytes:
        """A chunk; b"" where a delta says nothing."""
        counts = self._so_far.get(index)
        if counts is not None:
            counts.completion += len(delta.token_ids)
        if delta.reasoning or delta.tool_calls or delta.logprobs or (counts is not None and delta.text):
            return self._chunk(self._choice(index, delta))
        if not (text := delta.text):
            return b""
        if index not in self._halves:
            # The first place where it stands is the text: nothing that a caller chose comes before the choices.
            before, _, after = self._chunk(self._choice(index, pb.Delta(text=HOLE))).decode().partition(f'"{HOLE}"')
            self._halves[index] = before, after
        before, after = self._halves[index]
        return f"{before}{quote(text)}{after}".encode()

    def prompt(self, indexes: range, logprobs: Logprobs) -> Iterable[bytes]:
        """The next logprobs of the prompt of these choices, where they are told in streams."""
        return ()

    def ending(self, index: int, finished: pb.Finished) -> bytes:
        """The last chunk of a choice."""
        return self._chunk(self._choice(index, pb.Delta()) | close(finished))

    def closing(self, counts: TokenCounts) -> bytes:
        """The chunk that has the usage and no choice, if one is wanted, and [DONE]."""
        if not self._tail:
            return DONE
        return event({"object": self.streamed_object, "choices": []} | self._head | {"usage": counts.usage()}) + DONE

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that breaks."""
        return event(error.body())

    def keep(self, index: int, delta: pb.Delta) -> int:
        """A choice of a whole answer goes on. Returns: about how many characters more the answer has."""
        said = self._said[index]
        said.add(delta)
        told = said.logprobs.add(self._told(index, delta.logprobs)) if delta.logprobs else 0
        return length(delta) + told

    @abstractmethod
    def keep_prompt(self, indexes: range, logprobs: Logprobs) -> int:
        """The next logprobs of the prompt of these choices. Returns: as `keep`."""

    def keep_ending(self, index: int, finished: pb.Finished) -> None:
        """A choice has ended."""
        self._said[index].ending = close(finished)

    def whole(self, counts: TokenCounts) -> Iterator[str]:
        """The answer, in pieces."""
        return around(self._answer(counts), self._whole_choices())

    def _answer(self, counts: TokenCounts) -> dict[str, Any]:
        return {"object": self.whole_object, "choices": [HOLE]} | self._head | {"usage": counts.usage()}

    def _whole_choices(self) -> Iterator[str]:
        for index in range(self._choices):
            if index:
                yield ","
            yield from self._whole_choice(index, self._said[index])

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        counts = self._so_far.get(choice["index"])
        tail = self._tail if counts is None else {"usage": counts.usage()}
        return event({"object": self.streamed_object, "choices": [choice]} | self._head | tail)

    @abstractmethod
    def _choice(self, index: int, delta: pb.Delta) -> dict[str, Any]:
        """A choice that goes on, in a chunk."""

    @abstractmethod
    def _whole_choice(self, index: int, said: Said) -> Iterator[str]:
        """A choice of the answer that is not streamed."""

    @abstractmethod
    def _told(self, index: int, logprobs: Logprobs) -> dict[str, list[Any]]:
        """The lists of a choice's logprobs, as far as these go."""


class ChatFormat(ChoicesFormat):
    """chat.completion and chat.completion.chunk."""

    id_prefix = "chatcmpl-"
    streamed_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, head: Head, choices: int, body: ChatRequest) -> None:
        super().__init__(head, choices, body)
        self._logprobs, self._prompt_top = body.logprobs, body.prompt_logprobs
        self._prompt = Written()

    def opening(self) -> Iterator[bytes]:
        """The first chunk of each choice: its role."""
        delta = {"role": "assistant", "content": ""}
        yield b"".join(self._chunk({"index": index, "delta": delta} | OPEN) for index in range(self._choices))

    def _choice(self, index: int, delta: pb.Delta) -> dict[str, Any]:
        said: dict[str, Any] = reasoned(delta.reasoning) | ({"content": delta.text} if delta.text else {})
        if delta.tool_calls:
            said["tool_calls"] = [
                {"index": call.index}
                | (tool_call(call, call.arguments) if call.id else {"function": {"arguments": call.arguments}})
                for call in delta.tool_calls
            ]
        told = {"logprobs": self._told(index, delta.logprobs) | {"refusal": None}} if delta.logprobs else {}
        return {"index": index, "delta": said} | OPEN | told

    def keep_prompt(self, indexes: range, logprobs: Logprobs) -> int:
        """The next logprobs of the prompt."""
        return self._prompt.add({"prompt": prompt_logprobs(logprobs, self._prompt_top or 0)})

    def whole(self, counts: TokenCounts) -> Iterator[str]:
        """The answer, in pieces."""
        if self._prompt_top is None:
            return super().whole(counts)
        answer = self._answer(counts) | {"prompt_logprobs": [HOLE]}
        return around(answer, self._whole_choices(), commas(["null", *self._prompt["prompt"]]))

    def _told(self, index: int, logprobs: Logprobs) -> dict[str, list[Any]]:
        return {"content": token_logprobs(logprobs)}

    def _whole_choice(self, index: int, said: Said) -> Iterator[str]:
        choice = {"index": index, "message": said.message()} | said.ending
        if not self._logprobs:
            return around(choice | {"logprobs": None})
        return around(choice | {"logprobs": {"content": [HOLE], "refusal": None}}, commas(said.logprobs["content"]))


class CompletionFormat(ChoicesFormat):
    """text_completion. An echo (the prompt's text, for each choice) comes before the choice's own text."""

    id_prefix = "cmpl-"
    streamed_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, head: Head, choices: int, body: CompletionRequest, echo: list[Echo] | None = None) -> None:
        super().__init__(head, choices, body)
        self._echo, self._prompt_top = echo, body.prompt_logprobs
        self.size = sum(len(one.text) for one in echo or ())
        self._logprobs: list[TextLogprobs] = []
        if body.logprobs is not None:
            echoes = echo or [Echo("", b"")] * choices
            self._logprobs = [TextLogprobs(body.logprobs, one.text) for one in echoes]

    def opening(self) -> Iterator[bytes]:
        """The echoes, if any."""
        for index, echo in enumerate(self._echo or ()):
            told = self._logprobs[index].first(echo.first) if self._logprobs else None
            yield self._chunk(self._choice(index, pb.Delta(text=echo.text)) | {"logprobs": told})

    def prompt(self, indexes: range, logprobs: Logprobs) -> Iterator[bytes]:
        """Of an echo, whose text has been sent."""
        if self._echo is not None and self._logprobs:
            for index in indexes:
                told = {"logprobs": self._logprobs[index].prompt(logprobs)}
                yield self._chunk(self._choice(index, pb.Delta()) | told)

    def _choice(self, index: int, delta: pb.Delta) -> dict[str, Any]:
        told = {"logprobs": self._told(index, delta.logprobs)} if delta.logprobs else {}
        return {"index": index, "text": delta.text} | OPEN | told

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

    def _whole_choice(self, index: int, said: Said) -> Iterator[str]:
        prompt = self._echoed(index)
        text = said.text if self._echo is None else self._echo[index].text + said.text
        choice, holes = {"index": index, "text": text, "logprobs": None} | said.ending, []
        if self._logprobs:
            choice["logprobs"] = {name: [HOLE] for name in LISTS}
            holes = [commas(prompt[name] + said.logprobs[name]) for name in LISTS]
        if self._prompt_top is not None:
            choice["prompt_logprobs"] = [HOLE]
            holes.append(commas(["null", *prompt["prompt"]]))
        return around(choice, *holes)


def close(finished: pb.Finished) -> dict[str, Any]:
    """The fields of a choice that has ended. As with vLLM, an end-of-sequence token is no stop_reason."""
    matched = finished.WhichOneof("matched")
    reason = getattr(finished, matched) if matched in ("stop", "stop_token_id") else None
    return {"finish_reason": REASONS[finished.reason], "stop_reason": reason}
