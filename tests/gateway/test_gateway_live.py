"""The page's files and who may see the live view; what is relayed of it, and when that ends."""

import asyncio
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1 import inference_pb2_grpc


class FakeAdmin(inference_pb2_grpc.AdminServiceServicer):
    """Tells its stats ten times a second, for as long as somebody listens."""

    watchers = 0

    async def WatchStats(self, request, context):
        self.watchers += 1
        try:
            while True:
                waits = pb.Waits(first_tokens=2, first_token_seconds=0.5)
                yield pb.WatchStatsResponse(stats=pb.Stats(steps=9, step_rows=[1, 2]), waits=waits)
                await asyncio.sleep(0.1)
        finally:
            self.watchers -= 1

    async def GetCache(self, request, context):
        nodes = [pb.CacheNode(pages=2, locks=1, hits=5), pb.CacheNode(parent=1, pages=1, hits=3, age=1)]
        return pb.GetCacheResponse(pages=b"\0\1\1\2", nodes=nodes, total_nodes=2)


@pytest.fixture
def admin(engine, tmp_path: Path) -> Iterator[FakeAdmin]:
    """AdminService at `unix:{tmp_path}/admin`, on the engine's loop."""
    fake = FakeAdmin()

    async def start() -> grpc.aio.Server:
        server = grpc.aio.server()
        inference_pb2_grpc.add_AdminServiceServicer_to_server(fake, server)
        server.add_insecure_port(f"unix:{tmp_path}/admin")
        await server.start()
        return server

    server = engine.run(start())
    yield fake
    engine.run(server.stop(0))


@pytest.mark.parametrize(("path", "kind"), [("/", "html"), ("/page/page.css", "css"), ("/page/page.js", "javascript")])
def test_the_files_need_no_key_and_nothing_from_elsewhere(http, guarded, path, kind):
    answer = http.get(f"{guarded.url}{path}")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == f"text/{kind}; charset=utf-8"
    policy = answer.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"} <= set(policy)
    assert "unsafe" not in " ".join(policy)
    assert not re.search(r"innerHTML|insertAdjacent|\beval\b|<style|style=\"|\son\w+=|javascript:", answer.text)
    assert set(re.findall(r"https?://[^\"'\s]+", answer.text)) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("path", ["/page/", "/page/../live.py", "/page/%2e%2e/live.py", "/page/index.html"])
def test_there_is_no_other_file(http, gateway, path):
    assert http.get(f"{gateway}{path}").status_code == 404


def test_without_an_address_there_is_no_live_view(http, gateway, guarded):
    answer = http.get(f"{gateway}/page/live")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_live_view")
    assert "--engine-admin" in answer.json()["error"]["message"]
    assert http.get(f"{guarded.url}/page/live", headers=guarded.headers).status_code == 403  # a key without admin


def test_an_administrator_sees_it_and_others_do_not(http, engine, kit, admin, start_gateway, tmp_path):
    lines = {"acme": "", "ops": " admin"}
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{t} sha256:{hashlib.sha256(t.encode()).hexdigest()}{r}\n" for t, r in lines.items()))
    settings = {"api_key_file": str(keys), "engine_key": "own", "engine_admin": f"unix:{tmp_path}/admin"}
    with start_gateway(engines=[engine.address], **settings) as url:
        for headers, status in (({}, 401), ({"authorization": "Bearer acme"}, 403)):
            assert http.get(f"{url}/page/live", headers=headers).status_code == status
        assert admin.watchers == 0
        ops = {"authorization": "Bearer ops"}
        whole = http.get(f"{url}/page/live", headers=ops)  # which ends by itself, so that a drain need not wait for it
        assert whole.headers["content-type"].startswith("text/event-stream")
        first, *more = kit.events(whole.text)
        assert len(more) > 1
        assert first["stats"]["steps"] == 9
        assert first["stats"]["used_pages"] == 0
        assert "step_rows" not in first["stats"]
        assert (first["waits"]["first_tokens"], first["waits"]["first_token_seconds"]) == (2, 0.5)
        assert (first["pages"], first["total_nodes"]) == ("0112", 2)
        assert first["nodes"] == [[0, 2, 1, 5, 0], [1, 1, 0, 3, 1]]
        kit.wait_until(lambda: admin.watchers == 0, what="the first to be over")
        with http.stream("GET", f"{url}/page/live", headers=ops) as stream:
            lines = stream.iter_lines()  # let go, it would end the stream
            next(lines)
            assert admin.watchers == 1
        kit.wait_until(lambda: admin.watchers == 0, what="the relay to end with its browser")


def test_an_engine_that_is_gone_is_told(engine, start_gateway, kit, tmp_path):
    with start_gateway(engines=[engine.address], engine_admin=f"unix:{tmp_path}/nobody") as url:
        (event,) = kit.events(httpx.get(f"{url}/page/live", timeout=20).text)
    assert (event["error"]["type"], event["error"]["code"]) == ("server_error", "unavailable")
    assert "nobody" not in event["error"]["message"]
