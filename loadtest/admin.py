"""What a load test asks of a Fulcrum engine's operator address: an empty prefix cache, and its counters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from fulcrum.client import FulcrumError
from fulcrum.sync_client import admin_service
from loadtest.records import LoadTestError, Target


@contextmanager
def operator(
    address: str, target: Target, credentials: grpc.ChannelCredentials | None = None, tls_name: str | None = None
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """AdminService at `address` (HOST:PORT or unix:/PATH) and what each call takes, the target's key among it.

    Raises: LoadTestError where a call of the block fails.
    """
    key = target.headers.get("authorization")
    metadata = (("authorization", key),) if key else ()
    try:
        with admin_service(address, metadata=metadata, credentials=credentials, tls_name=tls_name) as service:
            yield service
    except FulcrumError as error:
        raise LoadTestError(f"the operator address {address}: {error}") from error
