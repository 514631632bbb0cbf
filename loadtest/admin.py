"""What a load test asks of a Fulcrum engine's operator address: an empty prefix cache, and its counters."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from fulcrum.v1.inference_pb2 import FlushCacheRequest, GetStatsRequest, GetStatsResponse, Stats
from fulcrum.v1.inference_pb2_grpc import AdminServiceStub
from loadtest.records import LoadTestError, Target

_SECONDS = 30.0


def flush_cache(address: str, target: Target) -> int:
    """Has the engine at `address` (HOST:PORT or unix:/PATH) forget every cached prefix; with the target's key.

    Returns: the pages freed.
    Raises: LoadTestError.
    """
    with _stub(address, "the cache at {} cannot be flushed") as stub:
        request = FlushCacheRequest()
        return int(stub.FlushCache(request, metadata=_metadata(target), timeout=_SECONDS).pages_freed)


def stats(address: str, target: Target) -> Stats:
    """The gauges and counters of the engine at `address`. Raises: LoadTestError."""
    with _stub(address, "{} gives no statistics") as stub:
        answer: GetStatsResponse = stub.GetStats(GetStatsRequest(), metadata=_metadata(target), timeout=_SECONDS)
        return answer.stats


@contextmanager
def _stub(address: str, failure: str) -> Iterator[AdminServiceStub]:
    try:
        with grpc.insecure_channel(address) as channel:
            yield AdminServiceStub(channel)
    except grpc.RpcError as error:
        raise LoadTestError(f"{failure.format(address)}: {error.code().name}: {error.details()}") from error


def _metadata(target: Target) -> tuple[tuple[str, str], ...]:
    key = target.headers.get("authorization")
    return (("authorization", key),) if key else ()
