"""HTTPS: curl and the openai client, two workers, and a certificate that changes."""

import shutil
import ssl
import subprocess

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
