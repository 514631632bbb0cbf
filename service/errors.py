"""Errors as gRPC statuses with google.rpc details. Knows nothing of what went wrong inside.

`ApiError` is the one way to refuse a call or to end it: what else escapes one becomes INTERNAL (service/guard.py).
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import grpc
from google.protobuf.any import pack
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

DOMAIN = "fulcrum"
DETAILS_KEY = "grpc-status-details-bin"  # where google.rpc.Status travels, by convention of every gRPC library
# Trailers are held to 8 KiB by default, on both sides; there the message takes up to 4.3 bytes a byte, the details 1.3.
_MAX_MESSAGE_BYTES = 800
_MAX_VIOLATIONS = 8
_MAX_VIOLATION_BYTES = 160


class Violation(NamedTuple):
    """One bad field, by its path in the request's proto, such as `sampling.temperature`."""

    field: str
    description: str


class ApiError(Exception):
    """A call is refused, or ends, with this status.

    Args:
        code: the gRPC status code.
        reason: machine-readable, such as CONTEXT_LENGTH_EXCEEDED (google.rpc.ErrorInfo.reason).
        message: for a person to read; cut to 800 bytes.
        field: the request's field that is to blame, as a proto path.
        violations: several bad fields (instead of `field`).
        retry_after: seconds after which a retry may help.
        metadata: numbers for a program to read; None says nothing.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        field: str = "",
        violations: Sequence[Violation] = (),
        retry_after: float | None = None,
        metadata: Mapping[str, int | None] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = _clean(message, _MAX_MESSAGE_BYTES)
        self.violations = tuple(violations) or ((Violation(field, message),) if field else ())
        self.retry_after = retry_after
        self.metadata = {name: str(number) for name, number in (metadata or {}).items() if number is not None}

    def status(self) -> Status:
        """The google.rpc.Status that travels in the trailers."""
        details: list[Message] = [ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata)]
        if self.violations:
            bad = BadRequest()
            for violation in self.violations[:_MAX_VIOLATIONS]:
                field, description = (_clean(text, _MAX_VIOLATION_BYTES) for text in violation)
                bad.field_violations.add(field=field, description=description)
            details.append(bad)
        if self.retry_after is not None:
            details.append(RetryInfo(retry_delay=timedelta(seconds=self.retry_after)))
        code: int = self.code.value[0]
        return Status(code=code, message=self.message, details=list(map(pack, details)))

    def trailers(self) -> tuple[tuple[str, bytes], ...]:
        """Trailing metadata that carries `status()`."""
        return ((DETAILS_KEY, self.status().SerializeToString()),)


def invalid(violations: Sequence[Violation]) -> ApiError:
    """INVALID_ARGUMENT naming every bad field."""
    first = violations[0]
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    text = f"{first.field}: {first.description}{more}"
    return ApiError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER", text, violations=violations)


def draining() -> ApiError:
    """UNAVAILABLE: the server goes down and takes nothing new."""
    return ApiError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "the server is draining", retry_after=1.0)


def engine_dead() -> ApiError:
    """UNAVAILABLE: the core process is gone, and with it every running request."""
    return ApiError(grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD", "the engine is gone", retry_after=5.0)


def grammar_compiler_dead() -> ApiError:
    """UNAVAILABLE: the process that compiles grammars has died, and so has its successor."""
    text = "the grammar compiler is gone"
    return ApiError(grpc.StatusCode.UNAVAILABLE, "GRAMMAR_COMPILER_DEAD", text, retry_after=5.0)


def _clean(text: str, limit: int) -> str:
    """Proto strings hold no lone surrogates, which a JSON escape or a template may have made."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= limit:
        return encoded.decode()
    return encoded[: limit - 3].decode("utf-8", "ignore") + "..."
