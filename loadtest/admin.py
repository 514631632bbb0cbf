"""What a load test asks of a Fulcrum engine's operator address: an empty prefix cache."""

import asyncio

import grpc
import grpc.aio

from fulcrum.v1.inference_pb2 import FlushCacheRequest
from fulcrum.v1.inference_pb2_grpc import AdminServiceStub
from loadtest.records import LoadTestError, Target

_SECONDS = 30.0


def flush_cache(address: str, target: Target) -> int:
    """Has the engine at `address` (HOST:PORT or unix:/PATH) forget every cached prefix; with the target's key.

    Returns: the pages freed.
    Raises: LoadTestError.
    """
    return asyncio.run(_flush_cache(address, target))


async def _flush_cache(address: str, target: Target) -> int:
    key = target.headers.get("authorization")
    metadata = (("authorization", key),) if key else ()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            call = AdminServiceStub(channel).FlushCache(FlushCacheRequest(), metadata=metadata, timeout=_SECONDS)
            return int((await call).pages_freed)
    except grpc.aio.AioRpcError as error:
        raise LoadTestError(
            f"the cache at {address} cannot be flushed: {error.code().name}: {error.details()}"
        ) from error
