"""Four ways to end a request. Each frees its pages within a step of the engine.

python examples/grpc_abort.py [HOST:PORT [ADMIN_ADDRESS]]

ADMIN_ADDRESS is unix:/PATH as the server prints it; without it the operator's way is left out.
"""

import asyncio
import sys
from contextlib import aclosing

import grpc.aio

from fulcrum.client import FulcrumClient, FulcrumError
from fulcrum.v1.inference_pb2 import AbortRequest, AbortResponse, Delta, GenerateRequest, StoppingCriteria
from fulcrum.v1.inference_pb2_grpc import AdminServiceStub

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
ADMIN_ADDRESS = sys.argv[2] if len(sys.argv) > 2 else None


def endless(request_id: str = "") -> GenerateRequest:
    """A request that would go on for long."""
    stopping = StoppingCriteria(max_tokens=4000, ignore_eos=True)
    return GenerateRequest(request_id=request_id, text="Count: 1, 2, 3,", stopping=stopping)


async def first_text(client: FulcrumClient, request: GenerateRequest) -> str:
    """Leaves the stream at its first text: that cancels the call."""
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            if isinstance(event, Delta) and event.text:
                return event.text
    return ""


async def abort(admin_address: str, request_id: str) -> str:
    """Ends somebody's request, as an operator."""
    async with grpc.aio.insecure_channel(admin_address) as channel:
        reply = await AdminServiceStub(channel).Abort(AbortRequest(request_ids=[request_id]))
    return AbortResponse.Outcome.Name(reply.results[0].outcome)


async def main() -> None:
    """All four."""
    async with FulcrumClient(ADDRESS) as client:
        print("left after:", repr(await first_text(client, endless())))

        task = asyncio.create_task(client.complete(endless()))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait([task])
        print("task cancelled:", task.cancelled())

        try:
            await client.complete(endless(), deadline=0.5)
        except FulcrumError as error:
            print("deadline:", error.code.name)

        if ADMIN_ADDRESS is not None:
            async with aclosing(client.generate(endless("example-1"))) as events:
                await anext(events)  # Accepted
                print("abort:", await abort(ADMIN_ADDRESS, "example-1"))
                try:
                    async for _ in events:
                        pass
                except FulcrumError as error:
                    print("its caller sees:", error.code.name, error.reason)


if __name__ == "__main__":
    asyncio.run(main())
