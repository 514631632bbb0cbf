"""Keys, CORS, labels, logs, and metrics of several workers."""

import concurrent.futures
import hashlib
import os
import re
import subprocess
import sys

import grpc
import httpx
import openai
import pytest

PATHS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/a/b"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/nowhere"),
]
NO_KEYS = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer key-on"},
    {"authorization": "Bearer key-one-more"},
    {"authorization": "Basic key-one"},
    {"authorization": "key-one"},
    {"authorization": b"Bearer k\xe9y"},
    {"api-key": "key-one"},
]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_every_path_wants_a_key(http, guarded, method, path):
    answer = http.request(method, f"{guarded.url}{path}")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)


@pytest.mark.parametrize("headers", NO_KEYS, ids=str)
def test_wrong_keys(http, guarded, engine, kit, headers):
    answer = http.post(f"{guarded.url}/v1/chat/completions", json=kit.CHAT, headers=headers)
    assert answer.status_code == 401
    assert not engine.calls


@pytest.mark.parametrize("shown", ["Bearer key-one", "Bearer key-two", "bearer key-one", "Bearer    key-one"])
def test_right_keys(http, guarded, engine, kit, shown):
    answer = http.post(f"{guarded.url}/v1/chat/completions", json=kit.CHAT, headers={"authorization": shown})
    assert answer.status_code == 200
    # the engine sees the gateway's own key, never the caller's
    assert engine.calls[0].metadata["authorization"] == "Bearer engine-secret"


def test_the_client_raises_authentication_error(guarded):
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


@pytest.mark.parametrize("path", ["/health", "/livez"])
def test_health_needs_no_key(http, guarded, path):
    assert http.get(f"{guarded.url}{path}").status_code == 200
    assert http.head(f"{guarded.url}{path}").status_code == 200


def test_keys_are_not_logged(http, guarded, kit):
    for key in ("key-one", "wrong-key-to-look-for"):
        http.post(f"{guarded.url}/v1/chat/completions", json=kit.CHAT, headers={"authorization": f"Bearer {key}"})
    kit.wait_until(lambda: "POST /v1/chat/completions" in guarded.log.read_text(), what="the access log")
    log = guarded.log.read_text()
    assert not re.search(r"key-one|key-two|engine-secret|wrong-key-to-look-for|Bearer", log)


def test_the_access_log_has_label_status_and_time(http, guarded, kit):
    headers = guarded.headers | {"x-request-id": "look-for-me"}
    http.post(f"{guarded.url}/v1/chat/completions?a=b", json=kit.CHAT | {"n": 0}, headers=headers)
    kit.wait_until(lambda: "look-for-me" in guarded.log.read_text(), what="the access log")
    lines = [line for line in guarded.log.read_text().splitlines() if "look-for-me" in line]
    assert len(lines) == 1
    assert re.search(r" INFO gateway gateway\.access: POST /v1/chat/completions 400 \d+\.\d{3}s look-for-me$", lines[0])


@pytest.mark.parametrize("level", ["info", "warning"])
def test_the_log_level_is_obeyed(own_engines, start_gateway, tmp_path, kit, level):
    with start_gateway(engines=[own_engines().address], log_level=level) as url:
        kit.wait_until(lambda: kit.is_healthy(url))
    assert ("is serving" in (tmp_path / "gateway.log").read_text()) == (level == "info")


def test_preflight(http, guarded):
    asked = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    answer = http.options(f"{guarded.url}/v1/chat/completions", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in answer.headers["access-control-allow-headers"]
    stranger = http.options(f"{guarded.url}/v1/chat/completions", headers=asked | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in stranger.headers


def test_browsers_may_read_answers_and_errors(http, guarded, kit):
    origin = {"origin": "https://app.example"}
    good = http.post(f"{guarded.url}/v1/chat/completions", json=kit.CHAT, headers=guarded.headers | origin)
    bad = http.post(f"{guarded.url}/v1/chat/completions", json=kit.CHAT, headers=origin)
    streamed = http.post(
        f"{guarded.url}/v1/chat/completions", json=kit.CHAT | {"stream": True}, headers=guarded.headers | origin
    )
    for answer, status in ((good, 200), (bad, 401), (streamed, 200)):
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_no_cors_unless_asked_for(http, gateway, kit):
    answer = http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT, headers={"origin": "https://app.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(
            (host, 200)
            for host in ("localhost", "LOCALHOST:8000", "a.localhost", "127.0.0.1:1", "[::1]:8000", "10.1.2.3")
        ),
        *(
            (host, 403)
            for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil", "")
        ),
        *((host, 403) for host in ("[::1", "127.0.0.1x", ":8000", "xn--localhost", "0x7f.1")),
    ],
)
def test_without_keys_a_name_from_elsewhere_is_not_answered(http, gateway, guarded, host, status):
    """DNS rebinding: a page of evil.example, whose name leads here now, would read the answers."""
    answer = http.get(f"{gateway}/v1/models", headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "host_not_allowed"
    # Who has a key may call the server by whatever name it has.
    assert http.get(f"{guarded.url}/v1/models", headers=guarded.headers | {"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ("my-label_1.2:3/4=+A", "my-label_1.2:3/4=+A"),
        ("a b\tc<script>", "abcscript"),
        ("x" * 500, "x" * 128),
        (b"caf\xe9", "caf"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_labels_are_echoed_and_passed_on(http, gateway, engine, kit, given, label, stream):
    body = kit.CHAT | {"stream": stream}
    answer = http.post(f"{gateway}/v1/chat/completions", json=body, headers={"x-request-id": given})
    assert answer.headers["x-request-id"] == label
    assert engine.calls[0].metadata["x-request-id"] == label
    assert engine.calls[0].request.request_id == ""


def test_traces_are_passed_on(http, gateway, engine, kit):
    trace = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "vendor=1"}
    http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT, headers=trace)
    http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT, headers={"traceparent": b"caf\xe9"})
    assert trace.items() <= engine.calls[0].metadata.items()
    assert "traceparent" not in engine.calls[1].metadata


def test_labels_are_minted(http, gateway, engine, kit):
    labels = set()
    for headers in ({}, {"x-request-id": ""}, {"x-request-id": "<>"}):
        answer = http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT, headers=headers)
        labels.add(answer.headers["x-request-id"])
    assert len(labels) == 3
    assert labels == {call.metadata["x-request-id"] for call in engine.calls}


def test_errors_carry_the_label(http, gateway, engine, kit):
    engine.script = kit.refuses(grpc.StatusCode.INTERNAL)
    for path, status in (("/v1/chat/completions", 500), ("/nowhere", 404)):
        answer = http.post(f"{gateway}{path}", json=kit.CHAT, headers={"x-request-id": "l"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, "l")


def metric(text, name):
    """The sum of a metric's samples whose text begins with `name`."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def test_any_worker_tells_one_truth(guarded, engine, kit):
    chats = 'fulcrum_gateway_http_requests_total{method="POST",path="/v1/chat/completions",status="200"}'

    def request(method, path, **options):
        with httpx.Client(verify=False, timeout=20) as fresh:  # a new connection, so that any worker may take it
            return fresh.request(method, f"{guarded.url}{path}", headers=guarded.headers, **options)

    def scrape(_=None):
        return request("GET", "/metrics").text

    before = scrape()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [kit.CHAT | {"stream": number % 2 == 0} for number in range(40)]
        answers = list(pool.map(lambda body: request("POST", "/v1/chat/completions", json=body), jobs))
        assert {answer.status_code for answer in answers} == {200}
        peers = {call.peer for call in engine.calls}
        assert len(peers) > 4, "one worker alone has four connections to the engine"
        kit.wait_until(lambda: metric(scrape(), chats) - metric(before, chats) == 40)
        scrapes = list(pool.map(scrape, range(8)))
    for after in scrapes:
        for name, grown in (
            (chats, 40),
            ("fulcrum_gateway_prompt_tokens_total", 40 * 5),
            ("fulcrum_gateway_cached_tokens_total", 40 * 2),
            ("fulcrum_gateway_completion_tokens_total", 40 * 3),
            ("fulcrum_gateway_time_to_first_text_seconds_count", 40),
            ('fulcrum_gateway_http_request_seconds_count{path="/v1/chat/completions"}', 40),
        ):
            assert metric(after, name) - metric(before, name) == grown, name


def test_a_full_disk_takes_no_metrics(tmp_path):
    program = (
        "from gateway.metrics import Metrics\nfrom telemetry.expiry import Certificates\n"
        "metrics = Metrics(Certificates({}))\n"
        "for path in map(str, range(20)):\n"
        "    for status in map(str, range(30)): metrics.requests.labels('GET', path, status).inc()\n"
        "    metrics.seconds.labels(path).observe(1)\n"
        "assert metrics.render()\n"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    files = [path.stat() for path in tmp_path.iterdir()]
    assert len(files) == 2
    assert all(found.st_blocks * 512 >= found.st_size > 0 for found in files)  # no hole is left to be filled later


def test_metrics_of_one_process(http, gateway, engine, kit):
    engine.script = kit.refuses(grpc.StatusCode.ABORTED, after=[kit.accepted()])
    before = http.get(f"{gateway}/metrics")
    assert before.headers["content-type"].startswith("text/plain")
    http.post(f"{gateway}/v1/chat/completions", json=kit.CHAT | {"stream": True})
    http.get(f"{gateway}/some/unknown/path")
    http.get(f"{gateway}/v1/models/a/b/c")
    after = http.get(f"{gateway}/metrics").text
    for name in (
        'fulcrum_gateway_stream_errors_total{status="409"}',
        'fulcrum_gateway_http_requests_total{method="GET",path="other",status="404"}',
        'fulcrum_gateway_http_requests_total{method="GET",path="/v1/models/{name:path}",status="404"}',
    ):
        assert metric(after, name) - metric(before.text, name) == 1, name
    assert "unknown/path" not in after


def test_long_prompts_and_long_pieces(http, guarded, engine, kit):
    """Beyond gRPC's default limit of 4 MiB, both ways."""
    long = "é" * (3 << 20)
    engine.script = kit.says(long)
    answer = http.post(f"{guarded.url}/v1/completions", json={"prompt": long}, headers=guarded.headers)
    assert engine.calls[0].request.text == long
    assert answer.json()["choices"][0]["text"] == long


def test_the_engine_is_told_whose_request_it_is(http, own_engines, start_gateway, tmp_path, kit):
    """A caller's tenant and limit go to the engine; what callers say of it themselves does not."""
    keys = tmp_path / "keys"
    lines = {"acme": "", "beta": "priority=5"}
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in lines}
    keys.write_text("".join(f"{name} sha256:{hashes[name]} {options}\n" for name, options in lines.items()))
    engine = own_engines()

    def status(key):
        forged = {"x-fulcrum-tenant": "beta", "x-fulcrum-max-priority": "99"}
        headers = {"authorization": f"Bearer {key}"} | forged
        return http.post(f"{url}/v1/chat/completions", json=kit.CHAT, headers=headers).status_code

    with start_gateway(engines=[engine.address], api_key_file=str(keys), api_keys=["plain"], engine_key="own") as url:
        for key, expected in (
            ("acme", {"x-fulcrum-tenant": "acme"}),
            ("beta", {"x-fulcrum-tenant": "beta", "x-fulcrum-max-priority": "5"}),
            ("plain", {"x-fulcrum-tenant": "default"}),
        ):
            assert status(key) == 200
            seen = engine.calls[-1].metadata
            assert {name: seen[name] for name in seen if name.startswith("x-fulcrum-")} == expected
            assert seen["authorization"] == "Bearer own"
        keys.write_text(f"beta sha256:{hashes['beta']}\n")
        kit.wait_until(lambda: status("acme") == 401)
        assert status("beta") == status("plain") == 200
