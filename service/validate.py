"""From GenerateRequest to the engine's parameters: every field is checked here, once, and named when it is wrong.

Knows neither tokenizer nor template: what depends on the prompt's length is checked by `fit` after tokenization.
"""

import json
import math
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.protobuf.message import Message

from engine.messages import CoreInfo
from engine.model.config import GenerationDefaults
from engine.request import RejectReason, Request, RequestRejected, SamplingParams
from fulcrum import limits
from fulcrum.v1 import inference_pb2 as pb
from service.auth import Caller
from service.errors import ApiError, Violation, draining, invalid
from service.grammar_worker import Constraint

# The engine's names of fields -> the proto's.
_PROTO_PATHS = {
    "max_tokens": "stopping.max_tokens",
    "stop_token_ids": "stopping.stop_token_ids",
    "logit_bias": "sampling.logit_bias",
    "n": "n",
}

MAX_STOP_CHARACTERS = 1000
MAX_REQUEST_ID_BYTES = 128
MAX_GRAMMAR_BYTES = 64 << 10

# Range of each sampling parameter, and whether its lower end is out of it.
_RANGES = {
    "temperature": (0, 2, False),
    "top_k": (0, 2**32, False),
    "top_p": (0, 1, True),
    "min_p": (0, 1, False),
    "presence_penalty": (-2, 2, False),
    "frequency_penalty": (-2, 2, False),
    "repetition_penalty": (0, 2, True),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked GenerateRequest.

    Args:
        job: for the engine, defaults applied; `fit` adds the prompt and what it leaves of max_tokens.
        max_tokens: None where the request is silent; 0 where only the prompt's logprobs are wanted.
        stop: stop strings.
        include_stop: leaves the matched stop in the text.
        text, token_ids: what the deltas carry.
        constraint: what the text must follow.
    """

    job: Request
    max_tokens: int | None
    stop: tuple[str, ...]
    include_stop: bool
    text: bool
    token_ids: bool
    skip_special_tokens: bool
    constraint: Constraint | None


class Violations(list[Violation]):
    """Gathers the bad fields of one request."""

    def unless(self, good: bool, field: str, description: str) -> None:
        """Adds a violation unless `good`."""
        if not good:
            self.append(Violation(field, description))

    def number(self, field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
        """Adds a violation unless `value` is finite and in [low, high] (in (low, high] with `above`)."""
        good = math.isfinite(value) and (low < value if above else low <= value) and value <= high
        self.unless(good, field, f"must be in {'(' if above else '['}{low:g}, {high:g}], not {value:g}")

    def most(self, field: str, count: int, most: int, what: str = "are given") -> bool:
        """Adds a violation where `count` is more than `most`; whether it is not."""
        good = count <= most
        self.unless(good, field, f"{count} {what}; at most {most} are taken")
        return good

    def token_ids(self, field: str, ids: Collection[int], vocab_size: int) -> None:
        """Adds a violation for the first id that is out of the vocabulary."""
        if max(ids, default=0) >= vocab_size:
            position, token_id = next(place for place in enumerate(ids) if place[1] >= vocab_size)
            place = f"{field}[{position}]"
            self.append(Violation(place, f"token id {token_id} is out of the vocabulary of {vocab_size}"))

    def check(self) -> None:
        """Raises ApiError INVALID_ARGUMENT when anything was added."""
        if self:
            raise invalid(self)


def plan(request: pb.GenerateRequest, info: CoreInfo, defaults: GenerationDefaults, caller: Caller) -> Plan:
    """Checks everything that does not depend on the prompt's length.

    Raises ApiError: INVALID_ARGUMENT naming every bad field, PERMISSION_DENIED.
    """
    bad = Violations()
    sampling, stopping, output = request.sampling, request.stopping, request.output
    # Before any of them is looked at.
    bad.most("sampling.logit_bias", len(sampling.logit_bias), limits.LISTED_IDS)
    bad.most("stopping.stop", len(stopping.stop), limits.STOPS)
    bad.most("stopping.stop_token_ids", len(stopping.stop_token_ids), limits.LISTED_IDS)
    bad.most("choices", len(request.choices.choices), limits.CHOICES)
    bad.check()
    fine = len(request.request_id.encode()) <= MAX_REQUEST_ID_BYTES and request.request_id.isprintable()
    bad.unless(fine, "request_id", f"must be printable and of at most {MAX_REQUEST_ID_BYTES} bytes")
    params = _sampling(request, info, defaults, bad)
    _check_stopping(stopping, info, bad, least=0 if output.HasField("prompt_logprobs") else 1)
    for field in ("top_logprobs", "prompt_logprobs"):
        if output.HasField(field):
            bad.number(f"output.{field}", getattr(output, field), 0, min(limits.TOP_LOGPROBS, info.vocab_size))
    fine = len(request.cache.salt.encode()) <= limits.SALT_BYTES
    bad.unless(fine, "cache.salt", f"must be of at most {limits.SALT_BYTES} bytes")
    constraint = _constraint(request, bad)
    bad.check()
    if caller.max_priority is not None and request.priority > caller.max_priority:
        text = f"priority {request.priority} is above this caller's limit of {caller.max_priority}"
        raise ApiError(grpc.StatusCode.PERMISSION_DENIED, "PRIORITY_TOO_HIGH", text, field="priority")
    if "\0" in request.cache.salt:  # which ends the tenant's name in the engine's own salts
        text = "cache.salt: this salt is another tenant's"
        raise ApiError(grpc.StatusCode.PERMISSION_DENIED, "SALT_FORBIDDEN", text, field="cache.salt")
    job = Request(
        request_id=request.request_id or uuid.uuid4().hex,
        prompt=(),
        params=params,
        priority=request.priority,
        salt=request.cache.salt,
        bypass_cache=request.cache.bypass,
        tenant=caller.tenant,
        speculative=given(request, "speculative", True),
    )
    return Plan(
        job,
        max_tokens=given(stopping, "max_tokens", None),
        stop=tuple(dict.fromkeys(stopping.stop)),
        include_stop=stopping.include_stop,
        text=given(output, "text", True),
        token_ids=output.token_ids,
        skip_special_tokens=given(output, "skip_special_tokens", True),
        constraint=constraint,
    )


def given(message: Message, field: str, default: Any) -> Any:
    """The value of an optional field, or the default where it is not set."""
    return getattr(message, field) if message.HasField(field) else default


def fit(plan: Plan, prompt: Sequence[int], prompt_field: str, info: CoreInfo) -> Request:
    """The plan's job with this prompt (token ids), and max_tokens settled.

    Raises ApiError INVALID_ARGUMENT: prompt empty, out of the vocabulary, or beyond the window with its completion.
    """
    bad = Violations()
    room = info.max_model_len - len(prompt)
    if room > 0:  # longer prompts are refused below, without a look at each token
        bad.unless(len(prompt) > 0, prompt_field, "the prompt is empty")
        bad.token_ids(f"{prompt_field}.ids" if prompt_field == "token_ids" else prompt_field, prompt, info.vocab_size)
        bad.check()
    # Where the whole KV pool is smaller than the window, it bounds what a silent request gets.
    default = min(room, max(1, _pool_tokens(info) - len(prompt)))
    max_tokens = default if plan.max_tokens is None else plan.max_tokens
    if room < 1 or max_tokens > room:
        wanted = f" and max_tokens {plan.max_tokens}" if plan.max_tokens is not None else ""
        field = prompt_field if room < 1 else "stopping.max_tokens"
        numbers = {"prompt_tokens": len(prompt), "max_tokens": plan.max_tokens}
        raise window_exceeded(field, info.max_model_len, f"the prompt has {len(prompt)}{wanted}", **numbers)
    least = plan.job.params.min_tokens
    text = f"{least} is more than the {max_tokens} tokens that may be generated"
    bad.unless(least <= max_tokens, "stopping.min_tokens", text)
    bad.check()
    return replace(plan.job, prompt=tuple(prompt), params=replace(plan.job.params, max_tokens=max(1, max_tokens)))


def window_exceeded(field: str, window: int, but: str, **numbers: int | None) -> ApiError:
    """CONTEXT_LENGTH_EXCEEDED, with the numbers for a program to read. Clients know it by the beginning of its text."""
    code, text = grpc.StatusCode.INVALID_ARGUMENT, f"This model's maximum context length is {window} tokens, but {but}"
    metadata = {**numbers, "max_model_len": window}
    return ApiError(code, "CONTEXT_LENGTH_EXCEEDED", text, field=field, metadata=metadata)


def refusal(rejected: RequestRejected, job: Request, prompt_field: str, info: CoreInfo) -> ApiError:
    """The engine's refusal as a status. `prompt_field`: where the prompt came from."""
    code, text = grpc.StatusCode, str(rejected)
    field = _PROTO_PATHS.get(rejected.field, prompt_field)
    match rejected.reason:
        case RejectReason.DUPLICATE_ID:
            text = f"a request with id {job.request_id!r} is live"
            return ApiError(code.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", text, field="request_id")
        case RejectReason.TOO_LARGE:
            numbers = {
                "prompt_tokens": len(job.prompt),
                "max_tokens": job.params.max_tokens,
                "kv_tokens": _pool_tokens(info),
            }
            return ApiError(code.INVALID_ARGUMENT, "KV_EXHAUSTED", text, field=field, metadata=numbers)
        case RejectReason.QUEUE_FULL:
            return ApiError(code.RESOURCE_EXHAUSTED, "QUEUE_FULL", text, retry_after=1.0)
        case RejectReason.DRAINING:
            return draining()
        case RejectReason.INVALID | RejectReason.UNKNOWN_GRAMMAR:
            return ApiError(code.INVALID_ARGUMENT, "INVALID_PARAMETER", text, field=field)


def _pool_tokens(info: CoreInfo) -> int:
    return info.num_pages * info.page_size


def _sampling(
    request: pb.GenerateRequest, info: CoreInfo, defaults: GenerationDefaults, bad: Violations
) -> SamplingParams:
    sampling, stopping, output = request.sampling, request.stopping, request.output
    values: dict[str, Any] = {}
    for field, (low, high, above) in _RANGES.items():
        values[field] = given(sampling, field, None)
        if values[field] is None:
            values[field] = getattr(defaults, field, 0.0)  # the model's own, whatever it is
        else:
            bad.number(f"sampling.{field}", values[field], low, high, above=above)
    values["top_k"] = min(values["top_k"], info.vocab_size)
    for token_id, bias in sampling.logit_bias.items():
        field = f"sampling.logit_bias[{token_id}]"
        bad.unless(token_id < info.vocab_size, field, f"the token id is out of the vocabulary of {info.vocab_size}")
        bad.number(field, bias, -100, 100)
    n = given(request, "n", 1)
    bad.number("n", n, 1, min(limits.N, info.max_num_seqs))
    return SamplingParams(
        **values,
        seed=given(sampling, "seed", None),
        logit_bias=dict(sampling.logit_bias),
        min_tokens=stopping.min_tokens,
        stop_token_ids=tuple(dict.fromkeys(stopping.stop_token_ids)),
        ignore_eos=stopping.ignore_eos,
        n=n,
        top_logprobs=given(output, "top_logprobs", None),
        prompt_logprobs=given(output, "prompt_logprobs", None),
    )


def _check_stopping(stopping: pb.StoppingCriteria, info: CoreInfo, bad: Violations, *, least: int) -> None:
    if stopping.HasField("max_tokens"):
        low, high = stopping.min_tokens, stopping.max_tokens
        bad.unless(high >= least, "stopping.max_tokens", "must be at least 1 (or 0, with prompt_logprobs)")
        bad.unless(low <= high, "stopping.min_tokens", f"{low} is more than max_tokens, {high}")
    for position, stop in enumerate(stopping.stop):
        text = f"must have 1 to {MAX_STOP_CHARACTERS} characters, not {len(stop)}"
        bad.unless(0 < len(stop) <= MAX_STOP_CHARACTERS, f"stopping.stop[{position}]", text)
    bad.token_ids("stopping.stop_token_ids", stopping.stop_token_ids, info.vocab_size)


def _constraint(request: pb.GenerateRequest, bad: Violations) -> Constraint | None:
    kind = request.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "json_object":
        bad.unless(request.json_object, kind, "must be true when set")
        return Constraint(kind, "")
    if kind == "choices":
        choices = request.choices.choices
        bad.unless(len(choices) > 0, kind, f"must be 1 to {limits.CHOICES}")
        bad.unless(all(choices), kind, "none may be empty")
        text = json.dumps(list(choices), ensure_ascii=False)
    else:
        text = getattr(request, kind)
        bad.unless(bool(text), kind, "is empty")
    bad.most(kind, len(text.encode()), MAX_GRAMMAR_BYTES, "bytes are given")
    return Constraint(kind, text)
