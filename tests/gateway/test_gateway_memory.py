"""What a request made ends with it: Python's collector, which would find rings, looks seldom."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from fulcrum.v1 import inference_pb2 as pb
from gateway.answer import Answer
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.engines import Generation


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Cycle:
    """As uvicorn's: it knows the scope, holds what came of the body, and is what is sent by."""

    def __init__(self, path: str, body: bytes) -> None:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        self.scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
        self.scope |= {"query_string": b"", "state": {}}
        self.body, self.status = body, 0

    async def receive(self) -> dict[str, Any]:
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/nothing", b"{}", 404),
        ("/health", b"{}", 405),
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b"{}", 400),
    ],
)
async def test_a_refused_request_leaves_no_ring(path: str, body: bytes, status: int) -> None:
    app, cycle = create_app(GatewayConfig()), Cycle(path, body)
    await app(cycle.scope, cycle.receive, cycle.send)
    assert cycle.status == status
    kept = weakref.ref(cycle)
    del cycle
    assert kept() is None


@pytest.mark.parametrize("prompts", [1, 2])
async def test_an_answer_that_is_done_leaves_no_ring(prompts: int) -> None:
    """It holds the calls, and they the prompts."""

    def generation() -> Generation:
        usage = pb.GenerateResponse(usage=pb.Usage())
        finished = pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_STOP))
        events = iter((finished, usage, None))

        async def read() -> Any:
            return next(events)

        return Generation(pb.Accepted(), read, lambda: True)

    answer = Answer([generation() for _ in range(prompts)], 1)
    while await answer.next() is not None:
        pass
    answer.close()
    await asyncio.sleep(0)
    kept = weakref.ref(answer)
    del answer
    assert kept() is None
