"""The asyncio client: many requests at once, each with several choices; they share the engine's steps.

python examples/grpc_async.py [HOST:PORT]
"""

import asyncio
import sys

from fulcrum.client import Completion, FulcrumClient
from fulcrum.v1.inference_pb2 import GenerateRequest, SamplingParams, StoppingCriteria

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
ANIMALS = ("fox", "crow", "otter")


async def main() -> None:
    """Asks about all animals at once."""
    async with FulcrumClient(ADDRESS) as client:

        def ask(animal: str) -> asyncio.Task[Completion]:
            request = GenerateRequest(
                text=f"A wild {animal} is an animal that",
                n=2,
                sampling=SamplingParams(temperature=0.8, seed=7),
                stopping=StoppingCriteria(max_tokens=16, stop=["\n"]),
            )
            return asyncio.create_task(client.complete(request, deadline=60))

        for animal, done in zip(ANIMALS, await asyncio.gather(*map(ask, ANIMALS)), strict=True):
            for choice in done.choices:
                print(f"{animal}: {choice.text!r} ({choice.finished.completion_tokens} tokens)")


if __name__ == "__main__":
    asyncio.run(main())
