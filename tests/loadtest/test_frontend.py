"""The front end's rig: real processes over a core without a model."""

from pathlib import Path

import pytest

from loadtest.frontend import Setup, measure


@pytest.mark.parametrize(("backend", "service_workers"), [("openai", 2), ("grpc", 1)])
def test_it_measures_every_process(default_model: Path, backend: str, service_workers: int) -> None:
    setup = Setup(
        model=default_model,
        rows=8,
        tokens=40,
        requests=16,
        step_ms=10.0,
        service_workers=service_workers,
        workers=1,
        clients=1,
        backend=backend,
    )
    costs = measure(setup)
    assert costs.tokens == 16 * 40
    # Two rounds of 40 steps that take 10 ms each.
    assert costs.seconds >= 0.8
    assert 0 < costs.events <= costs.tokens
    assert min(costs.core, costs.service, costs.client) > 0
    assert (costs.gateway > 0) is (backend != "grpc")
    assert len(costs.service_shares) == service_workers
    assert sum(costs.service_shares) == pytest.approx(1)
