"""A chat of two turns. The second finds the first one's pages in the prefix cache.

python examples/grpc_chat.py [HOST:PORT]
"""

import sys

from fulcrum.client import chat_request, message
from fulcrum.sync_client import SyncFulcrumClient
from fulcrum.v1.inference_pb2 import SamplingParams, StoppingCriteria

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
QUESTIONS = ("Name three colours that a lighthouse may have.", "Which of them is seen best from the sea?")


def main() -> None:
    """Asks one question after the other."""
    messages = [message("system", "You answer in one sentence.")]
    with SyncFulcrumClient(ADDRESS) as client:
        for question in QUESTIONS:
            messages.append(message("user", question))
            request = chat_request(
                messages, sampling=SamplingParams(temperature=0), stopping=StoppingCriteria(max_tokens=48)
            )
            done = client.complete(request, deadline=60)
            messages.append(done.choices[0].message())
            print(f"user: {question}\nassistant: {done.text}")
            print(f"({done.usage.prompt_tokens} prompt tokens, {done.usage.cached_tokens} of them cached)")


if __name__ == "__main__":
    main()
