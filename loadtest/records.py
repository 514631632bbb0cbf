"""The records of a load test: what is asked, and what came of it. Plain data: knows no network and no arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypedDict

import click

Fields = dict[str, Any]
"""A result file's."""


class Message(TypedDict):
    """Of a chat."""

    role: str
    content: str


Content = str | list[int] | list[Message]
"""A text, token ids, or the messages of a chat."""


def messages_of(content: Content) -> list[Message]:
    """The messages of a chat; none of another content."""
    return [] if isinstance(content, str) else [each for each in content if isinstance(each, dict)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request.

    Attributes:
        content: what is sent.
        output_len: tokens to generate at most.
        prompt_len: tokens, as counted here; 0 where only the server knows.
        salt: the server shares cached prefixes only between requests of the same salt.
    """

    content: Content
    output_len: int
    prompt_len: int = 0
    salt: str = ""


class Job(NamedTuple):
    """A request of a run without a server: prompt ids, and after how many tokens its answer ends."""

    prompt: tuple[int, ...]
    output_len: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Prompts that are sent one after another, each when the answer to the former has ended: mostly a single one.

    Attributes:
        prompts: at least one.
        timestamp: seconds from the start at which a trace sends the first one; None where there is no trace.
    """

    prompts: tuple[Prompt, ...]
    timestamp: float | None = None


@dataclass(slots=True)
class Record:
    """What came of one request. Times are in seconds of the machine's monotonic clock, equal in all its processes.

    An *event* is a message of the stream that carries output.

    Attributes:
        chain, turn: which request it was.
        start: when it was sent.
        ttft: from the start to the first event.
        itls: from each event to the next.
        latency: from the start to the end of the answer.
        prompt_tokens, output_tokens, cached_tokens: as the server counts; output_tokens is None where it does not.
        text: the answer.
        error: why it failed; empty when it did not.
    """

    chain: int = 0
    turn: int = 0
    start: float = 0.0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    latency: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int | None = None
    cached_tokens: int = 0
    text: str = ""
    error: str = ""

    def heard(self, times: Sequence[float]) -> None:
        """Takes the times of its events."""
        if times:
            self.ttft, self.itls = times[0] - self.start, [later - one for one, later in pairwise(times)]


@dataclass(frozen=True, slots=True)
class Target:
    """What a load test speaks to, and how it asks.

    Attributes:
        backend: "openai" (completions), "openai-chat" or "grpc".
        url: SCHEME://HOST:PORT of the server, without a path at its end; the scheme https means TLS, for gRPC too.
        endpoint: path of the HTTP call.
        model: the name that the server knows.
        headers: further HTTP headers, or gRPC metadata.
        sampling: temperature, top_p, ...; only what is set is sent.
        ignore_eos: goes on past the end-of-sequence token.
        extra_body: further fields of the HTTP body.
    """

    backend: str
    url: str
    endpoint: str
    model: str
    headers: dict[str, str]
    sampling: dict[str, float]
    ignore_eos: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """CPU time of one worker process in cores: over the whole run, and in its busiest second.

    `busy` is the share of its busiest second in which it ran or waited for a core: how near it was to its limit.
    A run that is shorter than a second counts as one, so that its first milliseconds do not look like saturation.
    """

    mean: float
    peak: float
    busy: float


class LoadTestError(click.ClickException):
    """A load test cannot be run as it was asked for; the message is for the person who asked: a command prints it."""
