"""What a load test asks of a Fulcrum engine's operator address: an empty prefix cache, and its counters."""

from typing import Any

import grpc

from fulcrum.client import FulcrumError
from fulcrum.sync_client import admin_service
from fulcrum.v1.inference_pb2 import FlushCacheRequest, GetStatsRequest, Stats
from loadtest.records import LoadTestError, Target


def flush_cache(
    address: str, target: Target, credentials: grpc.ChannelCredentials | None = None, tls_name: str | None = None
) -> int:
    """Has the engine at `address` (HOST:PORT or unix:/PATH) forget every cached prefix; with the target's key.

    Returns: the pages freed.
    Raises: LoadTestError.
    """
    try:
        with admin_service(address, **_key(target), credentials=credentials, tls_name=tls_name) as (stub, given):
            return int(stub.FlushCache(FlushCacheRequest(), **given).pages_freed)
    except FulcrumError as error:
        raise LoadTestError(f"the cache at {address} cannot be flushed: {error}") from error


def stats(address: str, target: Target) -> Stats:
    """The gauges and counters of the engine at `address`. Raises: LoadTestError."""
    try:
        with admin_service(address, **_key(target)) as (stub, given):
            now: Stats = stub.GetStats(GetStatsRequest(), **given).stats
            return now
    except FulcrumError as error:
        raise LoadTestError(f"{address} gives no statistics: {error}") from error


def _key(target: Target) -> dict[str, Any]:
    key = target.headers.get("authorization")
    return {"metadata": (("authorization", key),) if key else ()}
