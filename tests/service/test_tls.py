"""TLS and mutual TLS of the gRPC server, with grpcurl and our own clients; and certificates that change."""

import asyncio
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.request
from asyncio.subprocess import PIPE
from pathlib import Path

import grpc
import pytest

from engine.request import FinishReason
from fulcrum.client import FulcrumClient, FulcrumError
from fulcrum.sync_client import SyncFulcrumClient
from fulcrum.tls import channel_credentials, server_context
from fulcrum.v1 import inference_pb2 as pb
from service.config import ServiceConfig

REQUEST = pb.GenerateRequest(text="x")


@pytest.fixture
def core(make_core):
    core = make_core()
    core.reply = lambda request: [(0, [*b"ok"], FinishReason.LENGTH)]
    return core


def pair(folder, name="server"):
    return {"tls_cert": folder / f"{name}.pem", "tls_key": folder / f"{name}.key"}


async def answer(address, credentials, **settings):
    async with FulcrumClient(address, credentials=credentials, retries=0, **settings) as client:
        try:
            return (await client.complete(REQUEST)).text
        except FulcrumError as error:
            return error.code


async def grpcurl(*arguments):
    command = [Path(sys.executable).with_name("grpcurl"), "-d", '{"text": "x"}', *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, "fulcrum.v1.InferenceService/Generate", stdout=PIPE, stderr=PIPE
    )
    out, errors = await process.communicate()
    return '"text": "ok"' in out.decode() if process.returncode == 0 else errors.decode()


async def test_tls(core, serving, certificates, tmp_path, caplog):
    own = f"unix:{tmp_path}/own.sock"
    async with serving(core, **pair(certificates), own_address=own) as server:
        address = server.addresses.address
        trust = channel_credentials(certificates / "ca.pem")
        assert await answer(address, trust) == "ok"
        assert await answer(address.replace("127.0.0.1", "localhost"), trust) == "ok"
        assert await answer(own, None) == "ok"  # Unix sockets stay plain
        # Neither without TLS, nor where the server's certificate is of nobody that the client trusts.
        refused = grpc.StatusCode.UNAVAILABLE
        assert await answer(address, None) is refused
        assert await answer(address, channel_credentials(certificates / "stranger.pem")) is refused
        with SyncFulcrumClient(address, credentials=trust) as client:
            assert (await asyncio.to_thread(client.complete, REQUEST)).text == "ok"
        assert await grpcurl("-cacert", certificates / "ca.pem", address) is True
        assert "certificate" in await grpcurl("-cacert", certificates / "stranger.pem", address)
        assert f"tls_cert {certificates / 'server.pem'} expires in" in caplog.text  # within two days


async def test_mutual_tls(core, serving, certificates):
    ca = certificates / "ca.pem"
    async with serving(core, **pair(certificates), tls_client_ca=ca) as server:
        address = server.addresses.address

        def shown(name):
            return channel_credentials(ca, certificates / f"{name}.pem", certificates / f"{name}.key")

        assert await answer(address, shown("client")) == "ok"
        for credentials in (channel_credentials(ca), shown("stranger"), None):
            assert await answer(address, credentials) is grpc.StatusCode.UNAVAILABLE
        client = ["-cert", certificates / "client.pem", "-key", certificates / "client.key"]
        assert await grpcurl("-cacert", ca, *client, address) is True
        assert await grpcurl("-cacert", ca, address) is not True


async def test_a_name_that_is_not_the_hosts(core, serving, certificates):
    async with serving(core, **pair(certificates, "other")) as server:
        trust = channel_credentials(certificates / "ca.pem")
        assert await answer(server.addresses.address, trust) is grpc.StatusCode.UNAVAILABLE
        assert await answer(server.addresses.address, trust, tls_name="server.example") == "ok"


async def test_administration_over_tcp_speaks_tls(core, serving, certificates, tmp_path):
    from fulcrum.keys import Key, digest

    (tmp_path / "keys").write_text(Key("ops", digest("sk-1"), admin=True).line())
    settings = {"api_key_file": tmp_path / "keys", "admin_address": "127.0.0.1:0"}
    async with serving(core, **pair(certificates), **settings) as server:
        trust = channel_credentials(certificates / "ca.pem")
        async with grpc.aio.secure_channel(server.addresses.admin_addresses[0], trust) as channel:
            get = channel.unary_unary("/fulcrum.v1.AdminService/GetStats", None, pb.GetStatsResponse.FromString)
            assert (await get(b"", metadata=(("authorization", "Bearer sk-1"),))).stats.steps == 41


async def test_metrics_speak_tls(core, serving, certificates):
    ca = certificates / "ca.pem"
    settings = {"tls_client_ca": ca, "metrics_port": 0, "address": "0.0.0.0:0", "api_keys": ("k",)}
    async with serving(core, **pair(certificates), **settings) as server:
        where = server.addresses.metrics_address
        assert where.startswith("127.0.0.1:")  # not where the RPCs are served

        def scraped(scheme, name=None):
            context = ssl.create_default_context(cafile=ca)
            if name:
                context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
            try:
                with urllib.request.urlopen(f"{scheme}://{where}/metrics", context=context, timeout=20) as reply:
                    return "fulcrum_engine_up 1.0" in reply.read().decode()
            except OSError:
                return False

        host, port = where.split(":")
        with socket.create_connection((host, int(port))):  # it says nothing, and nobody waits for it
            for shown in (("https", "client"), ("https", "stranger"), ("https",), ("http", "client")):
                assert await asyncio.to_thread(scraped, *shown) is (shown == ("https", "client"))


async def test_metrics_where_they_are_asked_for(core, serving):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    async with serving(core, metrics_port=0, metrics_host="::1") as server:
        url = f"http://{server.addresses.metrics_address}/metrics"
        assert url.startswith("http://[::1]:")
        reply = await asyncio.to_thread(urllib.request.urlopen, url, timeout=20)
        with reply:
            assert reply.status == 200


async def test_a_new_certificate_is_shown_without_a_restart(core, serving, certificates, tmp_path, caplog):
    def install(name):
        for kind in ("pem", "key"):
            shutil.copy(certificates / f"{name}.{kind}", tmp_path / f"server.{kind}")

    install("stranger")
    async with serving(core, **pair(tmp_path)) as server:
        trust = channel_credentials(certificates / "ca.pem")
        assert await answer(server.addresses.address, trust) is grpc.StatusCode.UNAVAILABLE
        install("server")
        assert await answer(server.addresses.address, trust) == "ok"
        # Half of a pair changes nothing, until the other half is there too.
        shutil.copy(certificates / "other.pem", tmp_path / "server.pem")
        assert await answer(server.addresses.address, trust) == "ok"
        assert "tls_key" in caplog.text
        shutil.copy(certificates / "other.key", tmp_path / "server.key")
        assert await answer(server.addresses.address, trust) is grpc.StatusCode.UNAVAILABLE
        assert await answer(server.addresses.address, trust, tls_name="server.example") == "ok"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tls_cert": "server.pem"}, "tls_cert and tls_key must both be given"),
        ({"tls_key": "server.key"}, "tls_cert and tls_key must both be given"),
        ({"tls_client_ca": "ca.pem"}, "tls_cert and tls_key must both be given"),
        ({"tls_cert": "none", "tls_key": "server.key"}, "tls_cert .*none: No such file"),
        ({"tls_cert": "server.pem", "tls_key": "none"}, "tls_key .*none: No such file"),
        ({"tls_cert": "server.key", "tls_key": "server.key"}, "tls_cert .*: holds no certificate in PEM form"),
        ({"tls_cert": "server.pem", "tls_key": "server.pem"}, "tls_key .*: holds no private key"),
        ({"tls_cert": "server.pem", "tls_key": "locked"}, "tls_key .*: holds no private key .*passphrase"),
        ({"tls_cert": "server.pem", "tls_key": "client.key"}, "tls_key .*client.key: is not the key of tls_cert"),
        ({"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "ca.key"}, "tls_client_ca .*: holds no"),
        ({"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "."}, "tls_client_ca"),
    ],
)
def test_wrong_files_are_named(certificates, settings, message):
    if settings.get("tls_key") == "locked":
        command = "openssl pkcs8 -topk8 -in server.key -out locked -v2 aes-256-cbc -passout pass:secret"
        subprocess.run(command.split(), cwd=certificates, check=True)
    files = {name: certificates / file for name, file in settings.items()}
    with pytest.raises(ValueError, match=message):
        ServiceConfig(model=Path("m"), served_model_names=("m",), **files)


def test_old_versions_of_tls_are_not_spoken(certificates):
    config = ServiceConfig(model=Path("m"), served_model_names=("m",), **pair(certificates))
    assert server_context(config.identity()).minimum_version >= ssl.TLSVersion.TLSv1_2
