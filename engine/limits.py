"""What a request must keep to, checked where it enters the scheduler. Knows no other request."""

from math import inf

from engine.messages import CoreInfo
from engine.request import MOST_FLOAT, RejectReason, Request, RequestRejected

MAX_LISTED_IDS = 1024  # of logit_bias, and of stop_token_ids: a row of the device's tables holds them

_RANGES = {
    **dict.fromkeys(("n", "max_tokens"), (1, inf)),
    "min_tokens": (0, inf),
    "temperature": (0, MOST_FLOAT),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-MOST_FLOAT, MOST_FLOAT),
    "frequency_penalty": (-MOST_FLOAT, MOST_FLOAT),
    "repetition_penalty": (0, MOST_FLOAT),
}


def check_limits(request: Request, info: CoreInfo) -> None:
    """Raises: RequestRejected, INVALID or TOO_LARGE, naming the field."""
    params, vocab_size = request.params, info.vocab_size

    def refuse(field: str, message: str, reason: RejectReason = RejectReason.INVALID) -> None:
        raise RequestRejected(reason, message, field)

    if not request.prompt:
        refuse("prompt", "the prompt is empty")
    ranges = _RANGES | dict.fromkeys(("top_logprobs", "prompt_logprobs"), (0, vocab_size))
    for name, (least, most) in ranges.items():
        number = getattr(params, name)
        if number is not None and not least <= number <= most:
            refuse(name, f"{name} must be in [{least}, {most}], not {number}")
    listed = {"stop_token_ids": params.stop_token_ids, "logit_bias": params.logit_bias}
    for name, ids in ({"prompt": request.prompt} | listed).items():
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            refuse(name, f"{name} has token ids outside the vocabulary (0 to {vocab_size - 1})")
    for name, ids in listed.items():
        if len(ids) > MAX_LISTED_IDS:
            refuse(name, f"{name} has {len(ids)} token ids; at most {MAX_LISTED_IDS} are taken")
    for token_id, bias in params.logit_bias.items():
        # -inf bars a token, on every device.
        if not (bias == -inf or -MOST_FLOAT <= bias <= MOST_FLOAT):
            refuse("logit_bias", f"logit_bias of token {token_id} must be in [{-MOST_FLOAT}, {MOST_FLOAT}], not {bias}")
    prompt, length = len(request.prompt), len(request.prompt) + params.max_tokens
    pool = info.num_pages * info.page_size
    asked = f"{prompt} prompt tokens and max_tokens {params.max_tokens} are {length} tokens"
    name = "prompt" if prompt >= min(info.max_model_len, pool) else "max_tokens"
    if length > info.max_model_len:
        refuse(name, f"{asked}; the window is {info.max_model_len}")
    if length > pool:
        refuse(name, f"{asked}; the KV pool holds {pool}", RejectReason.TOO_LARGE)
