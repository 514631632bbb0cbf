"""The client without asyncio: what is served, tokens, a whole answer, a streamed one.

python examples/grpc_sync.py [HOST:PORT]
"""

import sys

from fulcrum.client import FulcrumError
from fulcrum.sync_client import SyncFulcrumClient
from fulcrum.v1.inference_pb2 import Delta, GenerateRequest, SamplingParams, StoppingCriteria, TokenizeRequest

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"


def main() -> None:
    """Everything once."""
    request = GenerateRequest(
        text="Once upon a time", sampling=SamplingParams(temperature=0), stopping=StoppingCriteria(max_tokens=16)
    )
    with SyncFulcrumClient(ADDRESS) as client:
        model = client.get_model()
        print("model:", model.served_names[0], "window:", model.max_model_len)
        print("tokens:", list(client.tokenize(TokenizeRequest(text=request.text)).token_ids))

        done = client.complete(request, deadline=60)
        print("whole:", repr(done.text), "tokens:", done.usage.completion_tokens)

        with client.generate(request, deadline=60) as events:  # leaving the block early stops the work
            print("streamed:", repr("".join(event.text for event in events if isinstance(event, Delta))))

        request.stopping.max_tokens = 0
        try:
            client.complete(request)
        except FulcrumError as error:
            print("refused:", error.code.name, error.reason, *error.violations)


if __name__ == "__main__":
    main()
