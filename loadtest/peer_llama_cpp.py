"""llama.cpp's server, for `loadtest.peers_cpu`, as the PyPI package xllamacpp carries it. A program of its own.

It runs in an interpreter that has xllamacpp and need not have this project: it imports nothing of ours. The first line
of standard output is JSON {"url", "version"}; it ends when standard input does.
"""

import json
import sys
from importlib.metadata import version

import xllamacpp  # type: ignore[import-not-found,unused-ignore]


def main(model: str, threads: str, slots: str, slot_tokens: str) -> None:
    """Serves MODEL (a GGUF file) on a free port, with so many slots for sequences of so many tokens."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = int(slots)
    params.n_ctx = int(slots) * int(slot_tokens)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.n_gpu_layers = 0
    params.verbosity = 0
    server = xllamacpp.Server(params)
    sys.stdout.write(json.dumps({"url": server.listening_address, "version": version("xllamacpp")}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
