"""From GenerateRequest to the engine's parameters: every field is checked here, once, and named when it is wrong.

Knows neither tokenizer nor template: what depends on the prompt's length is checked by `fit` after tokenization.
"""

import json
import math
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import grpc

from engine.limits import MAX_LISTED_IDS
from engine.messages import CoreInfo
from engine.model.config import GenerationDefaults
from engine.request import RejectReason, Request, RequestRejected, SamplingParams
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

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1000
MAX_TOP_LOGPROBS = 20
MAX_REQUEST_ID_BYTES = 128
MAX_SALT_BYTES = 256
MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1024
MAX_MESSAGES = 8192
MAX_PARTS = 2048  # of a message
MAX_CALLS = 128  # of a message
MAX_ARGUMENTS_BYTES = 256 << 10  # of a call: 30 ms to read at the worst
MAX_KWARGS_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked GenerateRequest, all but the prompt.

    Args:
        params: defaults applied; params.max_tokens means something only after `fit`.
        max_tokens: None where the request is silent; 0 where only the prompt's logprobs are wanted.
        stop: stop strings.
        include_stop: leaves the matched stop in the text.
        constraint: what the text must follow.
        text, token_ids: what the deltas carry.
    """

    request_id: str
    params: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    include_stop: bool
    text: bool
    token_ids: bool
    skip_special_tokens: bool
    priority: int
    salt: str
    bypass_cache: bool
    speculative: bool
    constraint: Constraint | None = None


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
    bad.most("sampling.logit_bias", len(sampling.logit_bias), MAX_LISTED_IDS)
    bad.most("stopping.stop", len(stopping.stop), MAX_STOP_STRINGS)
    bad.most("stopping.stop_token_ids", len(stopping.stop_token_ids), MAX_LISTED_IDS)
    bad.most("choices", len(request.choices.choices), MAX_CHOICES)
    bad.check()
    bad.unless(
        len(request.request_id.encode()) <= MAX_REQUEST_ID_BYTES and request.request_id.isprintable(),
        "request_id",
        f"must be printable and of at most {MAX_REQUEST_ID_BYTES} bytes",
    )
    params = _sampling(request, info, defaults, bad)
    _check_stopping(stopping, info, bad, least=0 if output.HasField("prompt_logprobs") else 1)
    for field in ("top_logprobs", "prompt_logprobs"):
        if output.HasField(field):
            bad.number(f"output.{field}", getattr(output, field), 0, min(MAX_TOP_LOGPROBS, info.vocab_size))
    bad.unless(
        len(request.cache.salt.encode()) <= MAX_SALT_BYTES, "cache.salt", f"must be of at most {MAX_SALT_BYTES} bytes"
    )
    constraint = _constraint(request, bad)
    bad.check()
    if caller.max_priority is not None and request.priority > caller.max_priority:
        raise ApiError(
            grpc.StatusCode.PERMISSION_DENIED,
            "PRIORITY_TOO_HIGH",
            f"priority {request.priority} is above this caller's limit of {caller.max_priority}",
            field="priority",
        )
    if "\0" in request.cache.salt:  # which ends the tenant's name in the engine's own salts
        text = "cache.salt: this salt is another tenant's"
        raise ApiError(grpc.StatusCode.PERMISSION_DENIED, "SALT_FORBIDDEN", text, field="cache.salt")
    return Plan(
        request_id=request.request_id or uuid.uuid4().hex,
        params=params,
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        stop=tuple(dict.fromkeys(stopping.stop)),
        include_stop=stopping.include_stop,
        text=output.text if output.HasField("text") else True,
        token_ids=output.token_ids,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        priority=request.priority,
        salt=request.cache.salt,
        bypass_cache=request.cache.bypass,
        speculative=request.speculative if request.HasField("speculative") else True,
        constraint=constraint,
    )


def fit(plan: Plan, prompt: Sequence[int], prompt_field: str, info: CoreInfo) -> SamplingParams:
    """The parameters with max_tokens settled, for a prompt of these token ids.

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
        raise window_exceeded(
            prompt_field if room < 1 else "stopping.max_tokens",
            info.max_model_len,
            f"the prompt has {len(prompt)}{wanted}",
            prompt_tokens=len(prompt),
            max_tokens=plan.max_tokens,
        )
    bad.unless(
        plan.params.min_tokens <= max_tokens,
        "stopping.min_tokens",
        f"{plan.params.min_tokens} is more than the {max_tokens} tokens that may be generated",
    )
    bad.check()
    return replace(plan.params, max_tokens=max(1, max_tokens))


def window_exceeded(field: str, window: int, but: str, **numbers: int | None) -> ApiError:
    """CONTEXT_LENGTH_EXCEEDED, with the numbers for a program to read. Clients know it by the beginning of its text."""
    given = {**numbers, "max_model_len": window}
    return ApiError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "CONTEXT_LENGTH_EXCEEDED",
        f"This model's maximum context length is {window} tokens, but {but}",
        field=field,
        metadata={name: str(number) for name, number in given.items() if number is not None},
    )


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
            metadata = {name: str(number) for name, number in numbers.items()}
            return ApiError(code.INVALID_ARGUMENT, "KV_EXHAUSTED", text, field=field, metadata=metadata)
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
    given, stopping, output = request.sampling, request.stopping, request.output

    def chosen(field: str, default: float, low: float, high: float, *, above: bool = False) -> float:
        if not given.HasField(field):
            return default  # the model's own, whatever it is
        value: float = getattr(given, field)
        bad.number(f"sampling.{field}", value, low, high, above=above)
        return value

    temperature = chosen("temperature", defaults.temperature, 0, 2)
    top_k = int(chosen("top_k", defaults.top_k, 0, 2**32))
    top_p = chosen("top_p", defaults.top_p, 0, 1, above=True)
    min_p = chosen("min_p", defaults.min_p, 0, 1)
    repetition = chosen("repetition_penalty", defaults.repetition_penalty, 0, 2, above=True)
    bad.number("sampling.presence_penalty", given.presence_penalty, -2, 2)
    bad.number("sampling.frequency_penalty", given.frequency_penalty, -2, 2)
    for token_id, bias in given.logit_bias.items():
        field = f"sampling.logit_bias[{token_id}]"
        bad.unless(token_id < info.vocab_size, field, f"the token id is out of the vocabulary of {info.vocab_size}")
        bad.number(field, bias, -100, 100)
    n = request.n if request.HasField("n") else 1
    bad.number("n", n, 1, min(MAX_N, info.max_num_seqs))
    return SamplingParams(
        temperature=temperature,
        top_k=min(top_k, info.vocab_size),
        top_p=top_p,
        min_p=min_p,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=repetition,
        seed=given.seed if given.HasField("seed") else None,
        logit_bias=dict(given.logit_bias),
        min_tokens=stopping.min_tokens,
        stop_token_ids=tuple(dict.fromkeys(stopping.stop_token_ids)),
        ignore_eos=stopping.ignore_eos,
        n=n,
        top_logprobs=output.top_logprobs if output.HasField("top_logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
    )


def _check_stopping(stopping: pb.StoppingCriteria, info: CoreInfo, bad: Violations, *, least: int) -> None:
    if stopping.HasField("max_tokens"):
        bad.unless(
            stopping.max_tokens >= least, "stopping.max_tokens", "must be at least 1 (or 0, with prompt_logprobs)"
        )
        bad.unless(
            stopping.min_tokens <= stopping.max_tokens,
            "stopping.min_tokens",
            f"{stopping.min_tokens} is more than max_tokens, {stopping.max_tokens}",
        )
    for position, stop in enumerate(stopping.stop):
        bad.unless(
            0 < len(stop) <= MAX_STOP_CHARACTERS,
            f"stopping.stop[{position}]",
            f"must have 1 to {MAX_STOP_CHARACTERS} characters, not {len(stop)}",
        )
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
        bad.unless(len(choices) > 0, kind, f"must be 1 to {MAX_CHOICES}")
        bad.unless(all(choices), kind, "none may be empty")
        text = json.dumps(list(choices), ensure_ascii=False)
    else:
        text = getattr(request, kind)
        bad.unless(bool(text), kind, "is empty")
    bad.most(kind, len(text.encode()), MAX_GRAMMAR_BYTES, "bytes are given")
    return Constraint(kind, text)
