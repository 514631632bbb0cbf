"""Who calls: what a key in `authorization: Bearer KEY` may ask for. Knows no RPC; keys are never logged."""

from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from fulcrum.keys import MAX_PRIORITY, TENANT, Key, KeyRing, bearer, is_tenant
from service.errors import ApiError

Metadata = Iterable[tuple[str, str | bytes]] | None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and for how much at most.

    Args:
        tenant: "" where there are no keys.
        max_priority: highest priority of a request (None: no limit).
    """

    tenant: str
    max_priority: int | None


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Tells callers by their keys. Without keys everybody is taken (only loopback can be bound then).

    Args:
        ring: the keys.
        max_priority: as in ServiceConfig.
    """

    ring: KeyRing
    max_priority: int | None

    def caller(self, metadata: Metadata) -> Caller:
        """The caller that a call's metadata names. Raises ApiError UNAUTHENTICATED, PERMISSION_DENIED."""
        given = dict(metadata or ())
        key = None if self.ring.open else self._key(given)
        tenant, limit = given.get(TENANT), given.get(MAX_PRIORITY)
        if tenant is None:
            return Caller("", self.max_priority) if key is None else self._of_tenant(key.tenant, key.max_priority)
        if key is not None and not key.gateway:
            text = f"only the key of a gateway may speak for a tenant ({TENANT})"
            raise ApiError(grpc.StatusCode.PERMISSION_DENIED, "TENANT_FORBIDDEN", text)
        try:
            asked = None if limit is None else int(limit)
        except ValueError:
            asked = 0
        if not is_tenant(str(tenant)):
            text = f"{TENANT} does not hold a tenant's name"
            raise ApiError(grpc.StatusCode.PERMISSION_DENIED, "TENANT_FORBIDDEN", text)
        return self._of_tenant(str(tenant), asked)

    def admin(self, metadata: Metadata) -> None:
        """Lets pass whose key may administer. Raises ApiError UNAUTHENTICATED, PERMISSION_DENIED."""
        if not self._key(dict(metadata or ())).admin:
            text = "this API key may not administer the server"
            raise ApiError(grpc.StatusCode.PERMISSION_DENIED, "ADMIN_FORBIDDEN", text)

    def _of_tenant(self, tenant: str, max_priority: int | None) -> Caller:
        return Caller(tenant, (self.max_priority or 0) if max_priority is None else max_priority)

    def _key(self, metadata: dict[str, str | bytes]) -> Key:
        shown = bearer(metadata.get("authorization"))
        if shown is None:
            raise ApiError(
                grpc.StatusCode.UNAUTHENTICATED, "API_KEY_MISSING", "metadata 'authorization: Bearer KEY' is missing"
            )
        key = self.ring.find(shown)
        if key is None:
            raise ApiError(grpc.StatusCode.UNAUTHENTICATED, "API_KEY_INVALID", "the API key is not known here")
        return key
