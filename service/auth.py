"""Who calls: API keys in `authorization: Bearer KEY`. Knows no RPC; keys are kept as hashes and never logged."""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from service.errors import ApiError

_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """What the holder of a key may ask for. Tenants and salts of their own join here.

    Args:
        max_priority: highest priority of a request (None: no limit).
    """

    max_priority: int | None


class Authenticator:
    """Tells callers by their keys. Without keys everybody is taken (only loopback can be bound then).

    Args:
        keys: the keys that are taken.
        max_priority: as in ServiceConfig.
    """

    def __init__(self, keys: Iterable[str], max_priority: int | None) -> None:
        self._hashes = tuple(_digest(key) for key in keys)
        self._caller = Caller(0 if self._hashes and max_priority is None else max_priority)

    def caller(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
        """The caller that a call's metadata names. Raises ApiError UNAUTHENTICATED."""
        if not self._hashes:
            return self._caller
        given = next((value for key, value in metadata or () if key == "authorization"), None)
        if not isinstance(given, str) or not given.lower().startswith(_SCHEME):
            raise ApiError(
                grpc.StatusCode.UNAUTHENTICATED, "API_KEY_MISSING", "metadata 'authorization: Bearer KEY' is missing"
            )
        digest = _digest(given[len(_SCHEME) :].strip())
        # Every hash is compared, so that the time tells nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._hashes]
        if not any(matches):
            raise ApiError(grpc.StatusCode.UNAUTHENTICATED, "API_KEY_INVALID", "the API key is not known here")
        return self._caller


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
