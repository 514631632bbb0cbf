"""What a request must keep to, checked where it enters the scheduler. Knows no other request."""

from dataclasses import dataclass

from engine.request import RejectReason, Request, RequestRejected

MAX_LISTED_IDS = 1024  # of logit_bias, and of stop_token_ids: a row of the device's tables holds them


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one engine.

    Args:
        max_model_len: most tokens of prompt and completion.
        vocab_size: token ids are below it.
        pool_tokens: tokens that the whole KV pool holds.
    """

    max_model_len: int
    vocab_size: int
    pool_tokens: int

    def check(self, request: Request) -> None:
        """Raises: RequestRejected, INVALID or TOO_LARGE, naming the field."""
        params = request.params
        if not request.prompt:
            raise RequestRejected(RejectReason.INVALID, "the prompt is empty", "prompt")
        for name, value in (("n", params.n), ("max_tokens", params.max_tokens)):
            if value < 1:
                raise RequestRejected(RejectReason.INVALID, f"{name} must be at least 1, not {value}", name)
        for name, top in (("top_logprobs", params.top_logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if top is not None and not 0 <= top <= self.vocab_size:
                message = f"{name} must be in [0, {self.vocab_size}], not {top}"
                raise RequestRejected(RejectReason.INVALID, message, name)
        self._check_ids("prompt", request.prompt)
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", tuple(params.logit_bias))):
            self._check_ids(name, ids)
            if len(ids) > MAX_LISTED_IDS:
                message = f"{name} has {len(ids)} token ids; at most {MAX_LISTED_IDS} are taken"
                raise RequestRejected(RejectReason.INVALID, message, name)
        prompt, length = len(request.prompt), len(request.prompt) + params.max_tokens
        asked = f"{prompt} prompt tokens and max_tokens {params.max_tokens} are {length} tokens"
        field = "prompt" if prompt >= min(self.max_model_len, self.pool_tokens) else "max_tokens"
        if length > self.max_model_len:
            raise RequestRejected(RejectReason.INVALID, f"{asked}; the window is {self.max_model_len}", field)
        if length > self.pool_tokens:
            raise RequestRejected(RejectReason.TOO_LARGE, f"{asked}; the KV pool holds {self.pool_tokens}", field)

    def _check_ids(self, field: str, ids: tuple[int, ...]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            message = f"{field} has token ids outside the vocabulary (0 to {self.vocab_size - 1})"
            raise RequestRejected(RejectReason.INVALID, message, field)
