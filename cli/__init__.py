"""The `fulcrum` command: parses, starts, supervises. Holds no serving logic of its own."""

import os

# Read once, when gRPC is imported: so before everything else.
# Its newer reader hands each message through one thread more, a third of what a streamed token costs a gateway.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
# Its handlers around fork() kill, by SIGSEGV, 1 of 100 children that are started while calls are served (cores,
# compilers of grammars). Ours execute another program at once, and have no need of them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
