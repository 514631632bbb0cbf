"""What a streamed token costs: real processes around a very small model."""

from pathlib import Path

import pytest

from loadtest.frontend import measure


@pytest.mark.parametrize(("backend", "workers"), [("openai", 2), ("grpc", 1)])
def test_it_measures_every_process(default_model: Path, backend: str, workers: int) -> None:
    load = {"rows": 8, "tokens": 40, "requests": 16, "layers": 2, "clients": 1}
    costs = measure(default_model, [f"--service-workers={workers}"], backend=backend, **load)
    assert costs.tokens == 16 * 40
    assert 0 < costs.events <= costs.tokens
    kinds = {kind: len(each) for kind, each in costs.processes.items() if sum(each)}
    assert {"core", "service", "client"} <= kinds.keys()
    assert kinds["service"] >= workers
    assert ("gateway" in kinds) or backend == "grpc"
    assert all(cost > 0 for each in costs.processes.values() for cost in each)
