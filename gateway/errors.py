"""Errors as OpenAI's clients expect them, and how a gRPC status becomes one."""

import logging
import math
import re
from dataclasses import dataclass
from typing import Any

import grpc
from starlette.responses import JSONResponse

from fulcrum.client import FulcrumError
from telemetry.logs import about

logger = logging.getLogger(__name__)

StatusCode = grpc.StatusCode

# gRPC code -> (HTTP status, error type, error code when the engine names none)
STATUSES: dict[StatusCode, tuple[int, str, str | None]] = {
    StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error", None),
    StatusCode.OUT_OF_RANGE: (400, "invalid_request_error", None),
    StatusCode.FAILED_PRECONDITION: (400, "invalid_request_error", None),
    StatusCode.PERMISSION_DENIED: (403, "permission_error", "permission_denied"),
    StatusCode.NOT_FOUND: (404, "invalid_request_error", "not_found"),
    StatusCode.ALREADY_EXISTS: (409, "conflict_error", "already_exists"),
    StatusCode.ABORTED: (409, "conflict_error", "aborted"),
    StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    StatusCode.UNIMPLEMENTED: (501, "server_error", "not_implemented"),
    StatusCode.UNAVAILABLE: (503, "server_error", "unavailable"),
    # The gateway did not cancel, so the engine went away under the call.
    StatusCode.CANCELLED: (503, "server_error", "unavailable"),
    StatusCode.DEADLINE_EXCEEDED: (504, "server_error", "timeout"),
}
UNAVAILABLE_TEXT = "No engine is available right now. Please try again."
RETRY_SECONDS = 1

# Names of GenerateRequest and TokenizeRequest that differ from OpenAI's or vLLM's.
GROUPS = ("sampling.", "stopping.", "output.", "cache.", "chat.")
PARAMS = {
    "text": "prompt",
    "token_ids": "prompt",
    "token_ids.ids": "prompt",
    "chat": "messages",
    "include_stop": "include_stop_str_in_output",
    "salt": "cache_salt",
    "template_kwargs_json": "chat_template_kwargs",
}
# The parts of a tool and of a tool call lie one level deeper in HTTP.
FUNCTION = re.compile(r"(tool(?:s|_calls)\[\d+\]\.)(name|arguments|description|parameters)(?:_json)?$")
# Where the fault lies when the engine names no field.
REASON_PARAMS = {"CONTEXT_LENGTH_EXCEEDED": "prompt", "TEMPLATE_ERROR": "prompt", "MODEL_NOT_FOUND": "model"}


@dataclass(eq=False)
class ApiError(Exception):
    """One error as the caller sees it.

    Args:
        status: HTTP status.
        message: for people.
        type: OpenAI's class of error.
        param: the request field at fault, by its HTTP name.
        code: for programs.
        retry_after: seconds, for the header.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The answer, with the headers that go with it."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (409, 501):  # what an operator has ended, OpenAI's clients would send again
            headers["x-should-retry"] = "false"
        if self.status == 408:  # the rest may still come
            headers["connection"] = "close"
        return JSONResponse(self.body(), self.status, headers)


def no_engine() -> ApiError:
    """The answer while no engine is SERVING."""
    return ApiError(503, UNAVAILABLE_TEXT, "server_error", code="unavailable", retry_after=RETRY_SECONDS)


def going_down() -> ApiError:
    """How requests end that still run when the gateway's own drain is over."""
    return ApiError(503, "The server is going down.", "server_error", code="draining", retry_after=RETRY_SECONDS)


def internal_error() -> ApiError:
    """The answer to a fault of the server's own: it tells nothing of the inside."""
    text = "The server had an error while processing the request."
    return ApiError(500, text, "server_error", code="internal_error")


def invalid(param: str, why: str) -> ApiError:
    """400: the value of this field is wrong."""
    return ApiError(400, f"Invalid '{param}': {why}.", param=param, code="invalid_value")


def from_rpc(error: grpc.aio.AioRpcError, names: dict[str, str], label: str) -> ApiError:
    """Translates a call's status.

    Args:
        error: as raised by grpc.
        names: what this endpoint calls a field where PARAMS says otherwise (such as prompt -> messages), or the
            beginning of one (tools[0].function -> tools[0]).
        label: the request's x-request-id, for the log.
    """
    told = FulcrumError.from_rpc(error)
    code, reason, message = told.code, told.reason, told.message or told.code.name
    fields = about(x_request_id=label)
    if code not in STATUSES or reason == "TENANT_FORBIDDEN":
        # UNAUTHENTICATED too: the gateway's key is wrong, which is not the caller's fault.
        logger.error("request %s: the engine answered %s: %s", label, code.name, message, extra=fields)
        return internal_error()
    http, kind, default_code = STATUSES[code]
    if code is StatusCode.RESOURCE_EXHAUSTED and not reason:
        # The transport's: a message over the limit.
        return ApiError(413, "The request, or its answer, is larger than the engine takes.", code="request_too_large")
    if http in (503, 504) and not reason:
        # The text is the transport's: it names addresses.
        logger.warning("request %s: the engine answered %s: %s", label, code.name, message, extra=fields)
        message = "The request did not finish in time." if http == 504 else UNAVAILABLE_TEXT
    error_code = reason.lower() or default_code
    field, description = told.violations[0] if told.violations else ("", "")
    param = None
    if field:
        param = http_name(field, names)
    elif reason in REASON_PARAMS:
        param = names.get(REASON_PARAMS[reason], REASON_PARAMS[reason])
    if reason == "INVALID_PARAMETER" and told.violations:
        # The engine's text has its own name of the field; and the code is the one of the gateway's own checks.
        message, error_code = f"Invalid '{param}': {description}", "invalid_value"
    if reason == "INVALID_GRAMMAR" and param is not None:
        message = f"Invalid '{param}': {message}"
    if http == 404 and param == "model":
        error_code = "model_not_found"
    retry_after = max(math.ceil(told.retry_after or 0), RETRY_SECONDS) if http in (429, 503) else None
    return ApiError(http, message, kind, param, error_code, retry_after)


def http_name(field: str, names: dict[str, str]) -> str:
    """What the HTTP request calls a field of the proto: `stopping.include_stop` -> `include_stop_str_in_output`."""
    for group in GROUPS:
        field = field.removeprefix(group)
    stem, bracket, rest = field.partition("[")
    name = FUNCTION.sub(r"\1function.\2", PARAMS.get(stem, stem) + bracket + rest)
    begun = [old for old in names if name == old or name.startswith((f"{old}.", f"{old}["))]
    longest = max(begun, key=len, default="")
    return names.get(longest, "") + name[len(longest) :]
