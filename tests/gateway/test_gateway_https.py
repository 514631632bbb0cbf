"""HTTPS: curl and the openai client, two workers, a certificate that changes, and clients that must have one."""

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from urllib.parse import urlsplit

import httpx
import openai


def curl(url, *options):
    command = ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "20", f"{url}/v1/models", *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout or run.stderr


def test_https(own_engines, start_gateway, certificates, tmp_path, kit):
    def install(name):
        for kind in ("pem", "key"):
            shutil.copy(certificates / f"{name}.{kind}", tmp_path / f"gateway.{kind}")

    def complete(ca):
        with (
            httpx.Client(verify=ssl.create_default_context(cafile=ca), trust_env=False) as trusting,
            openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, http_client=trusting) as client,
        ):
            stream = client.chat.completions.create(**kit.CHAT, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    install("server")
    files = {"https_cert": str(tmp_path / "gateway.pem"), "https_key": str(tmp_path / "gateway.key")}
    ca = certificates / "ca.pem"
    with start_gateway(engines=[own_engines().address], api_keys=["k"], workers=2, **files) as url:
        assert url.startswith("https://")
        assert '"owned_by":"fulcrum"' in curl(url, "--cacert", ca, "-H", "Authorization: Bearer k")
        assert '"invalid_api_key"' in curl(url, "--cacert", ca)
        assert "certificate" in curl(url, "--cacert", certificates / "stranger.pem")
        assert "fulcrum" not in curl(url.replace("https", "http"), "-H", "Authorization: Bearer k")
        assert complete(ca) == "Hello world"

        install("stranger")  # the same addresses, signed by itself: each worker shows it to who comes next
        for _ in range(8):
            assert "certificate" in curl(url, "--cacert", ca)
        assert complete(certificates / "stranger.pem") == "Hello world"


def test_clients_that_keep_connections_do_not_hold_up_the_end(own_engines, start_gateway, certificates, kit):
    """They read nothing meanwhile, and so do not answer the goodbye of TLS."""
    engine, go_on = own_engines(), threading.Event()

    async def ends_in_the_drain(request, context):
        yield kit.accepted()
        yield kit.delta("x")
        await asyncio.to_thread(go_on.wait, 20)
        yield kit.finished()
        yield kit.usage()

    engine.script = ends_in_the_drain
    files = {"https_cert": str(certificates / "server.pem"), "https_key": str(certificates / "server.key")}
    trust = ssl.create_default_context(cafile=certificates / "ca.pem")
    with httpx.Client(timeout=20, verify=trust) as client:
        with start_gateway(engines=[engine.address], **files) as url:
            request = client.build_request("POST", f"{url}/v1/chat/completions", json=kit.CHAT | {"stream": True})
            stream = client.send(request, stream=True)
            lines = stream.iter_lines()
            while '"content":"x"' not in next(lines):
                pass
            assert client.get(f"{url}/livez").status_code == 200  # over a second connection, which is idle then
            begun = time.monotonic()
            threading.Thread(target=lambda: (kit.wait_until(lambda: not kit.is_healthy(url)), go_on.set())).start()
        assert time.monotonic() - begun < 10  # of a grace of 30
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_client_certificates(own_engines, start_gateway, certificates, tmp_path, kit):
    def context(name, version=ssl.TLSVersion.TLSv1_3):
        made = ssl.create_default_context(cafile=certificates / "ca.pem")
        made.maximum_version = version
        if name:
            made.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
        return made

    def ask(shown, session=None):
        """The beginning of an answer (b"": the server hangs up) and the session."""
        address = urlsplit(url)
        with contextlib.suppress(ssl.SSLError, ConnectionError), socket.socket() as plain:
            plain.settimeout(20)
            plain.connect((address.hostname, address.port))
            with shown.wrap_socket(plain, server_hostname="localhost", session=session) as connection:
                connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n\r\n")
                return connection.recv(12), connection.session
        return b"", None

    authorities = tmp_path / "authorities.pem"
    shutil.copy(certificates / "ca.pem", authorities)
    files = {"https_cert": str(certificates / "server.pem"), "https_key": str(certificates / "server.key")}
    files["https_client_ca"] = str(authorities)
    with start_gateway(wait=False, engines=[own_engines().address], api_keys=["k"], **files) as url:
        own = ["--cert", certificates / "client.pem", "--key", certificates / "client.key"]
        trust = ["--cacert", certificates / "ca.pem"]
        kit.wait_until(lambda: "invalid_api_key" in curl(url, *trust, *own), 30, "the gateway to serve")
        assert '"owned_by":"fulcrum"' in curl(url, *trust, *own, "-H", "Authorization: Bearer k")

        known = context("client")
        answer, session = ask(known)
        assert answer == b"HTTP/1.1 200"
        for refused in (context(None), context("stranger"), context("client", ssl.TLSVersion.TLSv1_2)):
            assert ask(refused)[0] == b""

        # An authority that is removed lets nobody in any more, whatever session a client still has.
        assert not session.has_ticket
        shutil.copy(certificates / "stranger.pem", authorities)
        for kept in (None, session):
            assert ask(known, kept)[0] == b""
        assert ask(context("stranger"))[0] == b"HTTP/1.1 200"
