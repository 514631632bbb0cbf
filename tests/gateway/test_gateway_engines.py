"""Engines that die, come back, drain, share the load; and the small endpoints that ask them."""

import asyncio
import concurrent.futures
import json
import time
from importlib.metadata import version

import grpc
import httpx
import openai
import pytest

from gateway.config import GatewayConfig
from gateway.engines import Engine


def test_models(gateway, kit):
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="any", max_retries=0) as client:
        cards = client.models.list().data
        assert [card.id for card in cards] == [kit.MODEL, "alias"]
        assert cards[0].model_dump(exclude_unset=True) == {
            "id": kit.MODEL,
            "object": "model",
            "created": 1700000000,
            "owned_by": "fulcrum",
            "max_model_len": 2048,
        }
        assert client.models.retrieve(kit.MODEL).id == kit.MODEL
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("org/other")
        assert caught.value.code == "model_not_found"
        assert caught.value.param == "model"


def test_a_model_s_slash_need_not_be_escaped(http, gateway, kit):
    for path in (kit.MODEL, kit.MODEL.replace("/", "%2F")):
        assert http.get(f"{gateway}/v1/models/{path}").json()["id"] == kit.MODEL


def test_tokenize_and_detokenize(http, gateway, engine):
    answer = http.post(f"{gateway}/tokenize", json={"prompt": "hé"}).json()
    assert answer == {"count": 2, "max_model_len": 2048, "tokens": [104, 233], "token_strs": None}
    answer = http.post(f"{gateway}/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["h", "é"]
    chat = {"messages": [{"role": "user", "content": "ab"}], "add_generation_prompt": True}
    assert http.post(f"{gateway}/tokenize", json=chat).json()["tokens"] == [97, 98]
    assert http.post(f"{gateway}/detokenize", json={"tokens": [104, 233]}).json() == {"prompt": "hé"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": "x", "colour": "red"}, "colour"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
    ],
)
def test_bad_tokenize_and_detokenize(http, gateway, path, body, param):
    answer = http.post(f"{gateway}{path}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_unary_errors_are_translated_too(http, gateway, engine, kit):
    engine.unary_error = kit.status(
        grpc.StatusCode.INVALID_ARGUMENT, "x", kit.reason("INVALID_PARAMETER"), kit.violation("token_ids[1]")
    )
    error = http.post(f"{gateway}/detokenize", json={"tokens": [1, 9]}).json()["error"]
    assert (error["param"], error["message"]) == ("tokens[1]", "Invalid 'tokens[1]': bad")
    engine.unary_error = kit.status(grpc.StatusCode.NOT_FOUND, "no such model", kit.violation("model"))
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        answer = http.post(f"{gateway}{path}", json=body | {"model": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_version(http, gateway):
    assert http.get(f"{gateway}/version").json() == {"version": version("fulcrum-llm")}


def test_health_follows_the_engine(http, gateway, engine, kit):
    assert http.get(f"{gateway}/health").status_code == 200
    engine.set_serving(False)
    kit.wait_until(lambda: http.get(f"{gateway}/health").status_code == 503)
    answer = http.get(f"{gateway}/health")
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "unavailable"
    assert http.get(f"{gateway}/livez").status_code == 200
    assert http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT).status_code == 503
    engine.set_serving(True)
    kit.wait_until(lambda: http.get(f"{gateway}/health").status_code == 200)


def test_health_answers_while_requests_hang(http, gateway, engine, kit):
    go_on = asyncio.Event()

    async def script(request, context):
        await go_on.wait()
        async for event in kit.says("x")(request, context):
            yield event

    engine.script = script
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        path = f"{gateway}/v1/chat/completions"
        answers = [pool.submit(http.post, path, json=kit.CHAT) for _ in range(20)]
        try:
            kit.wait_until(lambda: len(engine.calls) == 20)
            assert http.get(f"{gateway}/health").status_code == 200
            assert not any(answer.done() for answer in answers)
        finally:
            engine.loop.call_soon_threadsafe(go_on.set)
        assert [answer.result().status_code for answer in answers] == [200] * 20


def test_death_and_return(http, own_engines, start_gateway, kit):
    engine = own_engines()
    engine.script = kit.hangs(kit.accepted(), kit.delta("x"))
    with start_gateway(engines=[engine.address]) as url:
        with http.stream("POST", f"{url}/v1/chat/completions", json=kit.CHAT | {"stream": True}) as answer:
            lines = answer.iter_lines()
            while '"content":"x"' not in next(lines):
                pass
            died = time.monotonic()
            engine.stop()
            rest = [line for line in lines if line]
            assert time.monotonic() - died < 10  # of the 600 that the request has
        assert '"code":"unavailable"' in rest[-1]
        assert "finish_reason" not in "".join(rest)

        kit.wait_until(lambda: http.get(f"{url}/health").status_code == 503)
        for stream in (False, True):
            answer = http.post(f"{url}/v1/chat/completions", json=kit.CHAT | {"stream": stream})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert "127.0.0.1" not in answer.text

        engine.start()
        engine.script = kit.says("back")
        kit.wait_until(lambda: kit.is_healthy(url), 10, "the engine to be found again")
        answer = http.post(f"{url}/v1/chat/completions", json=kit.CHAT)
        assert answer.json()["choices"][0]["message"]["content"] == "back"


def test_a_gateway_may_start_before_its_engine(http, own_engines, start_gateway, kit, tmp_path):
    engine, log = own_engines(), tmp_path / "gateway.log"
    engine.stop()
    with start_gateway(engines=[engine.address], wait=False) as url:
        assert http.get(f"{url}/health").status_code == 503
        assert http.get(f"{url}/livez").status_code == 200
        kit.wait_until(
            lambda: f"engine {engine.address} is not serving yet" in log.read_text(), what="the log to tell it"
        )
        engine.start()
        kit.wait_until(lambda: kit.is_healthy(url), 10, "the engine to be found")
        assert http.post(f"{url}/v1/chat/completions", json=kit.CHAT).status_code == 200
    assert "Traceback" not in log.read_text()


def test_engines_are_reached_without_a_proxy(own_engines, start_gateway, monkeypatch):
    """Also those that are not of this machine by their address; gRPC has `ipv4:` for this one."""
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    with start_gateway(engines=[f"ipv4:{own_engines().address}"]):
        pass  # it is healthy


def test_several_engines(http, own_engines, start_gateway, kit):
    engines = [own_engines(), own_engines()]
    with start_gateway(engines=[engine.address for engine in engines]) as url:

        def calls():
            seen = [len(engine.calls) for engine in engines]
            for engine in engines:
                engine.calls.clear()
            return seen

        def post(**fields):
            return http.post(f"{url}/v1/chat/completions", json=kit.CHAT | fields)

        def posts(number):
            assert all(post().status_code == 200 for _ in range(number))

        def both():
            calls()
            posts(2)
            return calls() == [1, 1]

        kit.wait_until(both, what="both engines to be known")

        def over_all_connections():
            calls()
            posts(16)
            peers = [{call.peer for call in engine.calls} for engine in engines]
            assert calls() == [8, 8], "in turn"
            return [len(own) for own in peers] == [4, 4]

        kit.wait_until(over_all_connections, what="each engine to be known over all connections")

        # refused as unavailable before the first message: the other one is asked, the caller sees nothing of it
        for stream in (False, True):
            engines[0].script = kit.refuses(grpc.StatusCode.UNAVAILABLE, "draining", kit.reason("DRAINING"))
            assert [post(stream=stream).status_code for _ in range(4)] == [200] * 4
            assert calls() == [2, 4]

        # a caller's error and a full queue are answers, not failures
        for code, status in ((grpc.StatusCode.INVALID_ARGUMENT, 400), (grpc.StatusCode.INTERNAL, 500)):
            for engine in engines:
                engine.script = kit.refuses(code)
            assert [post().status_code for _ in range(4)] == [status] * 4
            assert calls() == [2, 2]

        # after the first message nothing is repeated
        for engine in engines:
            engine.script = kit.refuses(grpc.StatusCode.UNAVAILABLE, after=[kit.accepted()])
        assert post().status_code == 503
        assert sum(calls()) == 1

        # one that is not serving is left out, and comes back
        for engine in engines:
            engine.script = kit.says("x")
        engines[1].set_serving(False)

        def only_the_first():
            calls()
            posts(4)
            return calls() == [4, 0]

        kit.wait_until(only_the_first)
        engines[1].set_serving(True)
        kit.wait_until(both)

        # one that is dead too
        engines[0].stop()
        kit.wait_until(lambda: post().status_code == 200)
        posts(8)


def test_an_engine_without_health_is_not_serving(http, start_gateway, kit):
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with start_gateway(engines=[f"127.0.0.1:{port}"], wait=False) as url:
            assert http.get(f"{url}/health").status_code == 503
    finally:
        server.stop(None)


@pytest.mark.parametrize("workers", [1, 2])
def test_stopping_lets_running_streams_finish(own_engines, start_gateway, kit, workers):
    engine = own_engines()
    go_on = asyncio.Event()

    async def script(request, context):
        yield kit.accepted()
        yield kit.delta("x")
        await go_on.wait()
        yield kit.finished()
        yield kit.usage()

    engine.script = script
    with httpx.Client(verify=False, timeout=20) as own:
        with start_gateway(engines=[engine.address], workers=workers) as url:
            answer = own.send(
                own.build_request("POST", f"{url}/v1/chat/completions", json=kit.CHAT | {"stream": True}), stream=True
            )
            lines = answer.iter_lines()
            while '"content":"x"' not in next(lines):
                pass
            # leaving the block sends SIGTERM and waits; the engine goes on a little later
            engine.loop.call_soon_threadsafe(engine.loop.call_later, 0.5, go_on.set)
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert not engine.calls[0].cancelled.is_set()


def test_what_outlasts_the_drain_is_told_so(own_engines, start_gateway, kit, tmp_path):
    engine = own_engines()
    engine.script = kit.hangs(kit.accepted(), kit.delta("x"))
    with httpx.Client(timeout=20) as own, concurrent.futures.ThreadPoolExecutor(1) as pool:
        with start_gateway(engines=[engine.address], shutdown_seconds=1) as url:
            path = f"{url}/v1/chat/completions"
            streamed = own.send(own.build_request("POST", path, json=kit.CHAT | {"stream": True}), stream=True)
            whole = pool.submit(httpx.post, path, json=kit.CHAT, timeout=20)
            kit.wait_until(lambda: len(engine.calls) == 2, what="both calls")
            lines = streamed.iter_lines()
            while '"content":"x"' not in next(lines):
                pass
        last = [line for line in lines if line][-1]
        error = {"message": "The server is going down.", "type": "server_error", "param": None, "code": "draining"}
        assert json.loads(last.removeprefix("data: ")) == {"error": error}
        answer = whole.result()
        assert (answer.status_code, answer.json()) == (503, {"error": error})
        assert answer.headers["retry-after"] == "1"
    assert all(call.cancelled.wait(10) for call in engine.calls)
    assert "Traceback" not in (tmp_path / "gateway.log").read_text()


async def test_one_connection_to_a_unix_socket_behind_which_is_one_process():
    assert [len(Engine(address, GatewayConfig(), []).links) for address in ("unix:/run/one.sock", "127.0.0.1:1")] == [
        1,
        4,
    ]
