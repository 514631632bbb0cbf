"""Tenants, priorities, salts and administration: what each key may do."""

import asyncio
import hashlib
import stat
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from engine.request import FinishReason
from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1 import inference_pb2_grpc

Code = grpc.StatusCode


@pytest.fixture
def key_file(tmp_path):
    rights = {"acme": "", "beta": "priority=5", "gw": "gateway", "root": "admin"}
    path = tmp_path / "keys"
    path.write_text(
        "".join(
            f"{name} sha256:{hashlib.sha256(name.encode()).hexdigest()} {right}\n" for name, right in rights.items()
        )
    )
    return path


@pytest.fixture
def core(make_core):
    core = make_core()
    core.reply = lambda request: [(0, [65], FinishReason.LENGTH)]
    return core


def as_caller(key=None, tenant=None, priority=None):
    pairs = {"authorization": key and f"Bearer {key}", "x-fulcrum-tenant": tenant, "x-fulcrum-max-priority": priority}
    return tuple((name, value) for name, value in pairs.items() if value is not None)


async def ends(call):
    """(status, reason, field) of the end of a call."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("caller", "limit"),
    [
        (as_caller("acme"), 0),
        (as_caller("beta"), 5),
        (as_caller("plain"), 0),
        (as_caller("gw", "acme"), 0),
        (as_caller("gw", "acme", "9"), 9),
        (as_caller("gw", "acme", "-2"), -2),
        (as_caller("gw", "acme", "high"), 0),
        (as_caller("acme", None, "9"), 0),  # only a gateway's word counts
        (as_caller("own", "acme", "4"), 4),
    ],
)
async def test_priorities(core, serving, details, key_file, caller, limit):
    async with serving(core, api_keys=("plain",), api_key_file=key_file, gateway_keys=("own",)) as server:
        request = pb.GenerateRequest(text="x", priority=limit)
        assert await ends(server.stub.Generate(request, metadata=caller)) is None
        request.priority += 1
        error = details(await ends(server.stub.Generate(request, metadata=caller)))
        assert (error.code, error.reason, error.fields) == (Code.PERMISSION_DENIED, "PRIORITY_TOO_HIGH", ["priority"])


async def test_the_servers_limit_is_for_keys_without_one(core, serving, details, key_file):
    async with serving(core, api_key_file=key_file, max_priority=7) as server:
        for key, limit in (("acme", 7), ("beta", 5)):
            request = pb.GenerateRequest(text="x", priority=limit)
            assert await ends(server.stub.Generate(request, metadata=as_caller(key))) is None
            request.priority += 1
            error = await ends(server.stub.Generate(request, metadata=as_caller(key)))
            assert error.code() is Code.PERMISSION_DENIED


@pytest.mark.parametrize("shared", [False, True])
async def test_salts_are_a_tenants_own(core, serving, details, key_file, shared):
    async def salt(caller, given=""):
        request = pb.GenerateRequest(text="x", cache=pb.CacheOptions(salt=given))
        assert await ends(server.stub.Generate(request, metadata=caller)) is None
        return core.requests[-1].salt

    callers = [as_caller("acme"), as_caller("beta"), as_caller("plain"), as_caller("gw")]
    keys = {"api_keys": ("plain",), "api_key_file": key_file}
    async with serving(core, **keys, share_prefixes=shared) as server:
        assert len({await salt(caller) for caller in callers}) == (1 if shared else 4)
        assert len({await salt(caller, "s") for caller in callers}) == 4
        # By the gateway it is the same tenant as by his own key.
        for given in ("", "s"):
            assert await salt(as_caller("gw", "acme"), given) == await salt(as_caller("acme"), given)
            assert [request.tenant for request in core.requests[-2:]] == ["acme", "acme"]
        # What another tenant's salt looks like inside is refused.
        request = pb.GenerateRequest(text="x", cache=pb.CacheOptions(salt="acme\0s"))
        error = details(await ends(server.stub.Generate(request, metadata=as_caller("beta"))))
        assert (error.code, error.reason, error.fields) == (Code.PERMISSION_DENIED, "SALT_FORBIDDEN", ["cache.salt"])


@pytest.mark.parametrize("tenant", ["beta", "acme", "", "a/b", "x" * 65])
@pytest.mark.parametrize("key", ["acme", "plain", "root", "gw"])
async def test_only_a_gateway_speaks_for_a_tenant(core, serving, details, key_file, key, tenant):
    async with serving(core, api_keys=("plain",), api_key_file=key_file) as server:
        error = await ends(server.stub.Generate(pb.GenerateRequest(text="x"), metadata=as_caller(key, tenant)))
        if key == "gw" and tenant in ("beta", "acme"):
            assert error is None
        else:
            assert (error.code(), details(error).reason) == (Code.PERMISSION_DENIED, "TENANT_FORBIDDEN")
            assert not core.requests


async def test_a_server_without_keys_takes_anybodys_word(core, serving):
    """A gateway with keys in front of a loopback engine without."""
    async with serving(core) as server:
        for caller, priority in ((as_caller(None, "acme", "3"), 3), (as_caller(None, "beta"), 0), ((), 1000)):
            request = pb.GenerateRequest(text="x", priority=priority)
            assert await ends(server.stub.Generate(request, metadata=caller)) is None
        request = pb.GenerateRequest(text="x", priority=1)
        assert (await ends(server.stub.Generate(request, metadata=as_caller(None, "beta")))).code() is (
            Code.PERMISSION_DENIED
        )
        assert len({request.salt for request in core.requests}) == 3


async def test_without_a_key_no_message_is_waited_for(core, serving, details):
    """Messages are large: what comes without a key is not kept."""

    async def silence():
        await asyncio.Event().wait()
        yield b""

    async with serving(core, api_keys=("plain",)) as server:
        for method in ("Generate", "Tokenize", "GetModel"):
            call = server.channel.stream_stream(f"/fulcrum.v1.InferenceService/{method}")(silence(), timeout=20)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            error = details(caught.value)
            assert (error.code, error.reason) == (Code.UNAUTHENTICATED, "API_KEY_MISSING")
        # A probe has none either, and is told of the whole server.
        for method in ("Check", "Watch"):
            call = server.channel.stream_stream(f"/grpc.health.v1.Health/{method}")(silence(), timeout=20)
            assert health_pb2.HealthCheckResponse.FromString(await call.read()).status == 1  # SERVING
            call.cancel()


async def test_administration_over_tcp_needs_an_admin(core, serving, key_file, tmp_path):
    async def answer(caller):
        try:
            await server.admin.GetStats(pb.GetStatsRequest(), metadata=caller)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return Code.OK

    keys = {"api_keys": ("plain",), "api_key_file": key_file}
    async with serving(core, **keys, admin_address="127.0.0.1:0") as server:
        assert await answer(as_caller("root")) is Code.OK
        for key in ("acme", "plain", "gw"):
            assert await answer(as_caller(key)) is Code.PERMISSION_DENIED
        for key in (None, "unknown"):
            assert await answer(as_caller(key)) is Code.UNAUTHENTICATED
        # An admin's key is a tenant's too; and AdminService is nowhere else.
        assert await ends(server.stub.Generate(pb.GenerateRequest(text="x"), metadata=as_caller("root"))) is None
    async with serving(core, **keys) as server:  # a Unix socket: who may open it may administer
        assert await answer(()) is Code.OK
    own = f"unix:{tmp_path}/own"
    async with serving(core, **keys, admin_address="127.0.0.1:0", own_address=own) as server:
        assert await answer(()) is Code.UNAUTHENTICATED
        _, beside = server.addresses.admin_addresses
        assert stat.S_IMODE(Path(beside.removeprefix("unix:")).stat().st_mode) == 0o600
        async with grpc.aio.insecure_channel(beside) as channel:
            server.admin = inference_pb2_grpc.AdminServiceStub(channel)
            assert await answer(()) is Code.OK
