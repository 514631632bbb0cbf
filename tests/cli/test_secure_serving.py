"""Keys, tenants and TLS of the whole: real processes around a tiny random model, and what their logs do not say."""

import json
import os
import shlex
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
from click.testing import CliRunner

from cli.main import main

MARKER = "marzipan-und-mandelkern"
PASTE = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def new_key(file: Path, *arguments: str) -> str:
    """Adds a key to the file, and returns it."""
    made = CliRunner().invoke(main, ["key", *arguments])
    with file.open("a") as lines:
        lines.write(made.stdout)
    return made.stderr.strip()


@pytest.fixture
def options(tiny_model: Path) -> list[str]:
    return [
        *(str(tiny_model), "--load-format=dummy", "--dtype=float32", "--device=cpu", "--threads=1"),
        *("--memory-budget=32MiB", "--max-num-seqs=8", "--max-model-len=2000", "--log-level=debug"),
    ]


def paste(line: str, **variables: str) -> str:
    run = subprocess.run(["sh", "-c", line], env=PASTE | variables, capture_output=True, text=True, check=False)
    return run.stdout + run.stderr


def test_serve_with_keys_and_tls(fulcrum, await_end, options: list[str], certificates: Path, tmp_path: Path) -> None:
    keys, ca = tmp_path / "keys", certificates / "ca.pem"
    acme, second, beta = new_key(keys, "acme"), new_key(keys, "acme"), new_key(keys, "beta", "--priority=3")
    operator = new_key(keys, "ops", "--admin")
    tls = [f"--{part}={certificates / f'server.{kind}'}" for part, kind in (
        ("tls-cert", "pem"), ("tls-key", "key"), ("https-cert", "pem"), ("https-key", "key"),
    )]  # fmt: skip
    tls.append(f"--https-client-ca={ca}")
    serve = fulcrum(
        *("serve", *options, *tls, "--port=0", "--grpc-port=0", "--access-log", f"--api-key-file={keys}"),
        *("--workers=2", "--admin-address=127.0.0.1:0", "--trace-requests=9"),
    )
    address = serve.expect(r"gRPC +(\S+)")
    administration = serve.expect(r"admin +(\S+)")
    url = serve.expect(r"OpenAI API +(https://\S+)")
    curl, grpcurl = serve.expect(r"(?m)^  (curl .*)$"), serve.expect(r"(?m)^  (grpcurl .*)$")
    serve.expect(r"(Ctrl-C ends it)")

    # The lines that are printed work.
    curl = curl.replace("CLIENT", str(certificates / "client"))
    assert "choices" in json.loads(paste(f"{curl} --silent", FULCRUM_API_KEY=acme))
    assert '"accepted"' in paste(grpcurl, FULCRUM_API_KEY=acme)
    assert "Unauthenticated" in paste(grpcurl, FULCRUM_API_KEY="sk-unknown")
    chat = [sys.executable, "-m", "cli", "chat", f"--address={address}", f"--engine-ca={ca}", "--max-tokens=2"]
    several = f"{acme} {beta}"  # a server's own variable; a client shows the first
    assert "Error" not in paste(f"echo hello | {shlex.join(chat)}", FULCRUM_API_KEY=several)

    mutual = ssl.create_default_context(cafile=ca)
    mutual.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    with httpx.Client(verify=mutual, trust_env=False, timeout=60) as trusting:

        def cached(key: str, text: str = MARKER * 4, **more: object) -> int:
            client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, http_client=trusting)
            fields = {"max_tokens": 2, "extra_body": more} if more else {"max_tokens": 2}
            usage = client.completions.create(model="tiny-llama", prompt=text, **fields).usage
            return usage.prompt_tokens_details.cached_tokens

        # A tenant's keys share prefixes; another tenant learns nothing, by neither API nor salt.
        assert [cached(key) for key in (acme, second, beta, beta)] == [0, 80, 0, 80]
        assert [cached(key, cache_salt="s") for key in (acme, second, beta)] == [0, 80, 0]
        over_grpc = shlex.join([
            "grpcurl", "-cacert", str(ca), "-H", "authorization: Bearer KEY", "-H", "x-fulcrum-tenant: acme", "-d",
            json.dumps({"text": MARKER}), address, "fulcrum.v1.InferenceService/Generate",
        ])  # fmt: skip
        assert "PermissionDenied" in paste(over_grpc.replace("KEY", beta))

        assert cached(beta, priority=3) == 80
        for key, fields in ((beta, {"priority": 4}), (acme, {"priority": 1}), (acme, {"cache_salt": "beta\0"})):
            with pytest.raises(openai.PermissionDeniedError):
                cached(key, **fields)

        # Refusals and errors, whose texts may quote the request to its sender.
        for body in (
            {"prompt": MARKER, "max_tokens": 10**6},
            {"prompt": MARKER, MARKER: 1},
            {"prompt": MARKER, "stop": [MARKER] * 99},
            {"prompt": [MARKER, ""]},
            {"prompt": MARKER, "guided_json": {"type": MARKER}},
        ):
            headers = {"authorization": f"Bearer {acme}"}
            assert trusting.post(f"{url}/completions", json=body, headers=headers).status_code == 400
        for path in ("tokenize", "detokenize"):
            trusting.post(f"{url.removesuffix('/v1')}/{path}", json={"prompt": MARKER}, headers=headers)

        # An operator reads a request's timeline over TLS.
        body = {"prompt": "a", "max_tokens": 1}
        answered = trusting.post(f"{url}/completions", json=body, headers=headers).json()["id"].removeprefix("cmpl-")
        traced = f"{sys.executable} -m cli trace {answered} --admin-address={administration} --engine-ca={ca}"
        assert "finished" in paste(traced, FULCRUM_API_KEY=operator)
        assert "PERMISSION_DENIED" in paste(traced, FULCRUM_API_KEY=acme)

        # The page's live view is there for an operator, whatever address the administration has.
        live, operating = f"{url.removesuffix('/v1')}/page/live", {"authorization": f"Bearer {operator}"}
        assert trusting.get(live, headers=headers).status_code == 403
        with trusting.stream("GET", live, headers=operating) as stream:
            assert '"total_pages"' in next(stream.iter_lines())

        # A key that is taken out is refused within a second, and what a call takes.
        keys.write_text("".join(line for line in keys.read_text().splitlines(keepends=True) if "beta" in line))
        until = time.monotonic() + 20
        while trusting.get(f"{url}/models", headers=headers).status_code == 200:
            assert time.monotonic() < until
        while "Unauthenticated" not in paste(grpcurl, FULCRUM_API_KEY=acme):  # each process looks by itself
            assert time.monotonic() < until
        assert cached(beta) == 80

    family = serve.descendants()
    assert serve.stop() == 0
    await_end(family)
    log = serve.log.read_text()
    assert f"INFO gateway fulcrum.keys: api_key_file {keys} has changed: 1 keys" in log
    assert "is accepted" in log, "the most verbose log is looked at"
    assert "DEBUG" in log
    for secret in (MARKER, acme, beta, "Bearer", str([*MARKER.encode()])[1:-1]):
        assert secret not in log
    assert "Traceback" not in log


def test_apart_with_mutual_tls(fulcrum, await_end, options: list[str], certificates: Path, tmp_path: Path) -> None:
    """The gateway shows the engine a certificate and a key; of another key health and the log tell."""
    pem = {name: certificates / f"{name}.pem" for name in ("ca", "server", "client", "other")}
    engine = fulcrum(
        *("engine", *options, "--grpc-port=0", f"--tls-cert={pem['other']}", f"--tls-key={certificates / 'other.key'}"),
        f"--tls-client-ca={pem['ca']}",
        FULCRUM_GATEWAY_KEY="sk-own",
        FULCRUM_API_KEY="sk-plain",
    )
    address = engine.expect(r"gRPC +(\S+)")
    engine.expect(r"(grpcurl)")
    trust = [f"--engine={address}", f"--engine-ca={pem['ca']}", "--engine-tls-name=server.example"]
    trust += [f"--engine-cert={pem['client']}", f"--engine-cert-key={certificates / 'client.key'}"]

    def statuses(key: str, awaited: str) -> tuple[int, int]:
        gateway = fulcrum("gateway", "--port=0", *trust, FULCRUM_ENGINE_KEY=key, FULCRUM_API_KEY="sk-user")
        url = gateway.expect(r"OpenAI API +(\S+)/v1")
        until = time.monotonic() + 30
        while awaited not in gateway.log.read_text():
            assert time.monotonic() < until, f"the log does not say: {awaited}"
        body, headers = {"prompt": "x", "max_tokens": 1}, {"authorization": "Bearer sk-user"}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
        health = httpx.get(f"{url}/health", timeout=60)
        assert gateway.stop() == 0
        assert gateway.log.read_text().count(awaited) == 1
        return health.status_code, answer.status_code

    refused = f"engine {address} does not take the key of this gateway: "
    assert statuses("sk-own", f"engine {address} is serving") == (200, 200)
    assert statuses("sk-wrong", f"{refused}the API key is not known here") == (503, 503)  # not the user's 401
    assert statuses("sk-plain", f"{refused}only the key of a gateway may speak for a tenant") == (503, 503)
    family = engine.descendants()
    assert engine.stop() == 0
    await_end(family)
