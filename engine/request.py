"""What is asked of the engine, and how it ends. Plain data: no torch, no text."""

import enum
from dataclasses import dataclass, field

MOST_FLOAT = 3.4e38  # as large as a float32, which numbers become on the device


class FinishReason(enum.IntEnum):
    """How a sequence ended."""

    EOS = 1  # one of the model's end-of-sequence tokens
    STOP_TOKEN = 2  # one of the request's stop token ids
    LENGTH = 3  # max_tokens, or the model's window
    ABORT = 4  # the client went away, or somebody aborted it
    ERROR = 5  # the step that computed it failed
    STOP_STRING = 6  # the service found a stop string in the text
    GRAMMAR = 7  # its grammar has no way on, or takes too much time or memory to follow


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, with every default already applied (the service resolves unset fields).

    Order of effects: on the raw logits logit_bias, repetition_penalty, presence_penalty and frequency_penalty; user
    logits processors; the mask of min_tokens, or of the grammar; temperature; then top_k, top_p (of what top_k leaves)
    and min_p.

    Args:
        temperature: 0 is greedy (anything below 1e-5 is taken as 0).
        top_k: 0 is off, and so is the vocabulary's size or more; ties with the k-th likeliest stay.
        top_p: 1 is off; keeps the smallest set of tokens whose probability reaches top_p, at least one; of ties the
            lowest ids.
        min_p: 0 is off; keeps tokens at least min_p times as likely as the likeliest.
        presence_penalty, frequency_penalty: over the generated tokens (OpenAI's definition).
        repetition_penalty: over prompt and generated tokens (CTRL, arXiv:1909.05858); 1 is off.
        seed: None is minted by the engine. Random numbers depend on (seed, index, position) alone.
        logit_bias: added to the logits of these token ids.
        max_tokens: most tokens to generate, at least 1.
        min_tokens: no end-of-sequence and no stop token before this many.
        stop_token_ids: end the sequence; the token is part of the output.
        ignore_eos: goes on past the model's end-of-sequence tokens.
        n: continuations of the one prompt.
        top_logprobs: of each generated token its logprob, and of how many of the likeliest at its place; None is off.
        prompt_logprobs: the same of the prompt's tokens from the second on, once whatever n is. Such a prompt is
            computed, not looked up in the prefix cache.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its n continuations.

    Args:
        request_id: unique among live requests.
        prompt: token ids, at least one.
        priority: higher is sooner; ties by arrival.
        salt: prefixes are shared only between requests of the same salt.
        bypass_cache: neither reads nor fills the prefix cache.
        tenant: whose request it is; tenants are served fairly beside each other (`engine.waiting`).
        arrival: time.monotonic() at the service, seconds.
        marks: what else happened to it there, and when, for its trace: ("tokenized", seconds).
        grammar: key of the grammar that the text must follow (`engine.grammar`), "" for none. It decides alone when the
            text may end: ignore_eos is without effect, and min_tokens bars stop tokens only while others may come.
        speculative: tokens may be guessed where the engine does so; what is generated stays the same.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    bypass_cache: bool = False
    tenant: str = ""
    arrival: float = 0.0
    marks: tuple[tuple[str, float], ...] = ()
    grammar: str = ""
    speculative: bool = True


class RejectReason(enum.IntEnum):
    """Why a request was not taken."""

    DUPLICATE_ID = 1
    # Prompt + max_tokens beyond the window, or ids outside the vocabulary: never right, however often it is sent.
    INVALID = 2
    # Larger than the whole KV pool: a retry never helps.
    TOO_LARGE = 3
    QUEUE_FULL = 4
    DRAINING = 5
    UNKNOWN_GRAMMAR = 6  # not held (any more): it is to be loaded first


class RequestRejected(Exception):
    """The engine did not take a request.

    Attributes:
        reason: why.
        field: the field of the request that is to blame, or "".
    """

    def __init__(self, reason: RejectReason, message: str, field: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field
