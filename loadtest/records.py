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
    """One request."""

    content: Content
    output_len: int  # tokens to generate at most
    prompt_len: int = 0  # tokens, as counted here; 0 where only the server knows
    salt: str = ""  # the server shares cached prefixes only between requests of the same salt


class Job(NamedTuple):
    """A request of a run without a server: prompt ids, and after how many tokens its answer ends."""

    prompt: tuple[int, ...]
    output_len: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Prompts (at least one) that are sent one after another, each when the answer to the former has ended."""

    prompts: tuple[Prompt, ...]
    timestamp: float | None = None  # seconds from the start at which a trace sends the first one


@dataclass(slots=True)
class Record:
    """What came of one request. Times are in seconds of the machine's monotonic clock, equal in all its processes.

    An *event* is a message of the stream that carries output. Tokens are as the server counts.
    """

    chain: int = 0
    turn: int = 0  # which request of the chain it was
    start: float = 0.0  # when it was sent
    ttft: float = 0.0  # from the start to the first event
    itls: list[float] = field(default_factory=list)  # from each event to the next
    latency: float = 0.0  # from the start to the end of the answer
    prompt_tokens: int = 0
    output_tokens: int | None = None  # None: the server tells no number
    cached_tokens: int = 0
    text: str = ""
    error: str = ""  # why it failed

    def heard(self, times: Sequence[float]) -> None:
        """Takes the times of its events."""
        if times:
            self.ttft, self.itls = times[0] - self.start, [later - one for one, later in pairwise(times)]


@dataclass(frozen=True, slots=True)
class Target:
    """What a load test speaks to, and how it asks."""

    backend: str  # "openai" (completions), "openai-chat" or "grpc"
    url: str  # SCHEME://HOST:PORT, without a path at its end; the scheme https means TLS, for gRPC too
    endpoint: str  # path of the HTTP call
    model: str  # the name that the server knows
    headers: dict[str, str]  # of HTTP, or gRPC metadata
    sampling: dict[str, float]  # temperature, top_p, ...; only what is set is sent
    ignore_eos: bool = False  # goes on past the end-of-sequence token
    extra_body: dict[str, Any] = field(default_factory=dict)  # further fields of the HTTP body


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """CPU time of one worker process in cores.

    A run that is shorter than a second counts as one, so that its first milliseconds do not look like saturation.
    """

    mean: float  # over the whole run
    peak: float  # in its busiest second
    busy: float  # share of that second in which it ran or waited for a core: how near it was to its limit


class LoadTestError(click.ClickException):
    """A load test cannot be run as it was asked for; the message is for the person who asked: a command prints it."""
