"""Messages between the core process and its clients: msgpack over a Unix socket, one frame a step and client.

A frame is a 4-byte little-endian length and a msgpack array whose first entry is the message's tag.
"""

from typing import Literal

import msgspec

from engine.grammar import Vocabulary
from engine.request import FinishReason, RejectReason, Request


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """Client to core: take this request; answered with None once it is queued."""

    call_id: int
    request: Request


class EndSequences(msgspec.Struct, tag="end", array_like=True):
    """Client to core: these (request id, index) are complete (a stop string was found). Nothing more comes of them."""

    sequences: list[tuple[str, int]]


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """Client to core: end these requests, the client's own; whoever's with a call_id, answered with those live."""

    request_ids: list[str]
    call_id: int = 0


CallMethod = Literal["stats", "cache", "flush_cache", "drain", "trace", "steps"]


class Call(msgspec.Struct, tag="call", array_like=True):
    """Client to core: a question.

    The answers: a CoreStats; a CacheView, at most a second old; the pages freed; the requests still live; a list of
    TraceEvent, empty where nothing is kept of the request; a list of StepTrace, the latest, oldest first.
    """

    call_id: int
    method: CallMethod
    argument: str = ""  # of "trace": the request's id; of "steps": how many; of "drain": "end", what runs is to end


class Note(msgspec.Struct, tag="note", array_like=True):
    """Client to core: for the trace of a request, something happened to it just now."""

    request_id: str
    kind: str


class LoadGrammar(msgspec.Struct, tag="grammar", array_like=True):
    """Client to core: hold this compiled grammar for requests that name its key; answered with None once it does.

    `vocabulary` comes with the first one of a connection.
    """

    call_id: int
    key: str
    data: bytes
    vocabulary: Vocabulary | None = None


class CoreInfo(msgspec.Struct, tag="info", array_like=True):
    """Core to client, first thing on a connection: what is served."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_samples: int = 0  # tokens drawn in a step, those behind guesses too; 0: one a sequence
    architecture: str = ""
    dtype: str = ""
    device: str = ""
    version: str = ""
    traces: bool = False  # whether timelines are kept
    step_timeout: float = 0.0  # seconds that a step may take; 0: any time


class SequenceOutput(msgspec.Struct, array_like=True):
    """New tokens of one sequence, and its end if it came.

    Where they are asked for, `logprobs` has one record (`engine.logprobs`) for each of the tokens, and
    `prompt_logprobs` the next ones of the prompt's, which come before all tokens of all indexes.
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish: FinishReason | None = None
    logprobs: bytearray = msgspec.field(default_factory=bytearray)
    prompt_logprobs: bytearray = msgspec.field(default_factory=bytearray)


class RequestStart(msgspec.Struct, array_like=True):
    """The request's first step has been scheduled."""

    request_id: str
    cached_tokens: int
    at: float  # time.monotonic(), which all processes of a machine share


class Outputs(msgspec.Struct, tag="outputs", array_like=True):
    """Core to client: what one turn of the core brought its requests."""

    started: list[RequestStart]
    sequences: list[SequenceOutput]


STEP_BOUNDS = tuple(1 << power for power in range(15))  # of the buckets below: at most 1, 2, 4, ... 16384, and more


def _buckets() -> list[int]:
    return [0] * (len(STEP_BOUNDS) + 1)


class CoreStats(msgspec.Struct, array_like=True):
    """Gauges of this moment, counters since the core started. Field for field the proto's Stats."""

    uptime_seconds: float = 0.0
    running_sequences: int = 0
    waiting_sequences: int = 0
    live_requests: int = 0
    total_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    used_pages: int = 0
    steps: int = 0
    last_step_rows: int = 0
    max_step_rows: int = 0
    last_step_tokens: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    requests_accepted: int = 0
    requests_rejected: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    schedule_seconds: float = 0.0
    execute_seconds: float = 0.0
    process_seconds: float = 0.0
    device_busy_seconds: float = 0.0
    device_gap_seconds: float = 0.0
    launch_seconds: float = 0.0
    collect_seconds: float = 0.0
    scheduled_rows: int = 0
    scheduled_tokens: int = 0
    step_rows: list[int] = msgspec.field(default_factory=_buckets)
    step_tokens: list[int] = msgspec.field(default_factory=_buckets)


class Reply(msgspec.Struct, tag="reply", array_like=True):
    """Core to client: the answer to a call, of the type that the call's message says."""

    call_id: int
    answer: msgspec.Raw


class Refusal(msgspec.Struct, tag="refusal", array_like=True):
    """Core to client, in the place of a Reply: why not (`engine.request.RequestRejected`)."""

    call_id: int
    reason: RejectReason
    message: str
    field: str


class CoreState(msgspec.Struct, tag="state", array_like=True):
    """Core to every client, whenever it changes: a draining core takes no new requests, an ending one has no time left
    for those that run.
    """

    draining: bool
    ending: bool = False


ToCore = Submit | EndSequences | Abort | Call | LoadGrammar | Note
FromCore = CoreInfo | CoreState | Outputs | Reply | Refusal
