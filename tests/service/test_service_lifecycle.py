"""Health, reflection, keys, drain, a dying engine, addresses and pings of the real server."""

import asyncio
import contextlib
import gc
import json
import re
import shlex
import socket
import stat
import struct
import subprocess
import sys
import time
import weakref
from asyncio.subprocess import PIPE
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from engine.client import CoreDied
from engine.request import FinishReason
from fulcrum.client import keepalive
from fulcrum.v1 import inference_pb2 as pb
from service.errors import draining, engine_dead
from service.figures import Figures
from service.guard import Guard
from service.live import LiveCalls
from service.server import ADMIN, HEALTH, INFERENCE

Status = health_pb2.HealthCheckResponse
KEY = (("authorization", "Bearer s3cret"),)
REFLECTION = "grpc.reflection.v1.ServerReflection"


def prompt(request_id="r", **fields):
    return pb.GenerateRequest(request_id=request_id, token_ids=pb.TokenIds(ids=[1, 2, 3]), **fields)


async def begin(server, request_id="r", **fields):
    call = server.stub.Generate(prompt(request_id, **fields))
    assert (await call.read()).HasField("accepted")
    server.core.start(request_id)
    assert (await call.read()).HasField("started")
    return call


async def end_of(call):
    """The error that ends the call; None for OK."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    return None


def mode_of(path):
    """The permission bits of a file, None where there is none."""
    return stat.S_IMODE(Path(path).stat().st_mode) if Path(path).exists() else None


async def code_of(awaitable):
    try:
        await awaitable
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


# -------------------- health, reflection


async def test_health_check(make_core, serving):
    async with serving(make_core()) as server:
        health = health_pb2_grpc.HealthStub(server.channel)
        for service in ("", INFERENCE, ADMIN):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == Status.SERVING
        unknown = health.Check(health_pb2.HealthCheckRequest(service="no.such.Service"))
        assert await code_of(unknown) is grpc.StatusCode.NOT_FOUND
        reply = await health_pb2_grpc.HealthStub(server.admin_channel).Check(
            health_pb2.HealthCheckRequest(service=ADMIN)
        )
        assert reply.status == Status.SERVING


async def test_health_watch_streams_changes(make_core, serving):
    core = make_core()
    async with serving(core) as server:
        health = health_pb2_grpc.HealthStub(server.channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest(service=service)) for service in ("", INFERENCE)]
        for watch in watches:
            assert (await watch.read()).status == Status.SERVING
        unknown = health.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
        assert (await unknown.read()).status == Status.SERVICE_UNKNOWN
        await core.drain()
        for watch in watches:
            assert (await watch.read()).status == Status.NOT_SERVING
            watch.cancel()
        unknown.cancel()


async def test_who_watches_health_without_reading_holds_up_nobody(make_core, serving):
    core = make_core()
    async with serving(core) as server:
        writer = await call_by_hand(server, f"/{HEALTH}/Watch".encode())
        watch = health_pb2_grpc.HealthStub(server.channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
        assert (await watch.read()).status == Status.SERVING
        core.die()
        assert (await watch.read()).status == Status.NOT_SERVING
        core.revive()
        assert (await watch.read()).status == Status.SERVING
        server.stop.set()
        await server.task
        writer.close()


async def call_by_hand(server, path, further=(), message=b""):
    """A call by a client whose streams have a window of 0: until its answer has begun."""
    host, port = server.addresses.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, struct.pack(">HI", 4, 0)))
    fields = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x", b"te": b"trailers"}
    fields[b"content-type"] = b"application/grpc"
    told = (*fields.items(), *further)
    head = b"".join(b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in told)
    writer.write(frame(1, 4, 1, head) + frame(0, 1, 1, struct.pack(">BI", 0, len(message)) + message))
    while (at := await reader.readexactly(9))[3] != 1:
        await reader.readexactly(int.from_bytes(at[:3], "big"))
    return writer


def frame(kind, flags, stream, payload):
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


async def test_health_answers_while_everything_is_busy(make_core, serving):
    core = make_core()
    async with serving(core) as server:
        calls = [await begin(server, f"r{number}") for number in range(50)]
        health = health_pb2_grpc.HealthStub(server.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=20)).status == Status.SERVING
        assert not any(call.done() for call in calls)
        for call in calls:
            call.cancel()
        await core.until(lambda: len(core.aborted) == 50)


async def test_reflection_refuses_what_is_no_message(make_core, serving, details, caplog):
    async with serving(make_core()) as server:
        reflect = server.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflect(iter([b"\xff"]), timeout=20).read()
        error = details(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
    assert "DecodeError" not in caplog.text


@pytest.mark.parametrize("keys", [(), ("s3cret",)])
@pytest.mark.parametrize("path", [f"{HEALTH}/Check", f"{INFERENCE}/GetModel", f"{REFLECTION}/ServerReflectionInfo"])
async def test_a_caller_that_goes_while_it_is_answered_is_no_fault(make_core, serving, caplog, path, keys):
    async with serving(make_core(), api_keys=keys) as server:
        for _ in range(5):
            (await call_by_hand(server, f"/{path}".encode())).close()
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_reflection_lists_and_describes(make_core, serving, version):
    async with serving(make_core()) as server:
        for channel, own in ((server.channel, INFERENCE), (server.admin_channel, ADMIN)):
            ask = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            call = ask(
                iter(
                    [
                        reflection_pb2.ServerReflectionRequest(list_services=""),
                        reflection_pb2.ServerReflectionRequest(file_containing_symbol=own),
                    ]
                )
            )
            names = [service.name for service in (await call.read()).list_services_response.service]
            assert names == sorted([own, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"])
            files = (await call.read()).file_descriptor_response.file_descriptor_proto
            assert any(b"fulcrum/v1/inference.proto" in file for file in files)


@pytest.mark.parametrize("address", ["main", "admin"])
async def test_grpcurl_works_through_reflection(make_core, serving, address):
    core = make_core()
    core.reply = lambda request: [(0, [*b"hi"], None), (0, [*b"!"], FinishReason.LENGTH)]
    async with serving(core) as server:

        async def grpcurl(*arguments):
            command = [Path(sys.executable).with_name("grpcurl"), "-plaintext", *arguments]
            process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
            out, errors = await process.communicate()
            assert process.returncode == 0, errors
            return out.decode()

        text = (Path(__file__).parents[2] / "docs/operations.md").read_text()
        check, drain = (shlex.split(line)[2:] for line in re.findall(r"(?m)^grpcurl -plaintext .*", text))
        if address == "admin":
            path = server.addresses.admin_addresses[0].removeprefix("unix:")
            assert '"steps": "41"' in await grpcurl("-unix", path, f"{ADMIN}/GetStats")
            assert ADMIN in await grpcurl("-unix", path, "list")
            drain[drain.index("ADMIN_SOCKET")] = path
            assert json.loads(await grpcurl(*drain)) == {}
            assert core.draining
            return
        check[check.index("127.0.0.1:50051")] = server.addresses.address
        assert '"SERVING"' in await grpcurl(*check)
        assert INFERENCE in await grpcurl(server.addresses.address, "list")
        assert "rpc Generate" in await grpcurl(server.addresses.address, "describe", INFERENCE)
        body = json.dumps({"text": "hello", "stopping": {"maxTokens": 3}})
        out = await grpcurl("-d", body, server.addresses.address, f"{INFERENCE}/Generate")
        assert out.index('"accepted"') < out.index('"text": "hi!"') < out.index('"FINISH_REASON_LENGTH"')
        # This grpcurl writes the proto's own names of fields, and reads those and camelCase.
        assert re.search(r'"completion_?[tT]okens": 3', out[out.index('"usage"') :])
        assert core.requests[-1].params.max_tokens == 3


# -------------------- keys


async def test_keys(make_core, serving, details, caplog):
    core = make_core()
    core.reply = lambda request: [(0, [65], FinishReason.LENGTH)]
    async with serving(core, api_keys=("other", "s3cret")) as server:
        for metadata, reason in (
            ((), "API_KEY_MISSING"),
            ((("authorization", "s3cret"),), "API_KEY_MISSING"),
            ((("authorization", "Basic s3cret"),), "API_KEY_MISSING"),
            ((("authorization", "Bearer s3cre"),), "API_KEY_INVALID"),
            ((("authorization", "Bearer s3cretx"),), "API_KEY_INVALID"),
            ((("authorization", "Bearer"),), "API_KEY_MISSING"),
        ):
            error = details(await end_of(server.stub.Generate(prompt(), metadata=metadata)))
            assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, reason)
        assert core.requests == []
        for metadata in (KEY, (("authorization", "bearer other"),)):
            assert await end_of(server.stub.Generate(prompt(), metadata=metadata)) is None
        # A probe needs none; reflection does.
        health = health_pb2_grpc.HealthStub(server.channel)
        assert await code_of(health.Check(health_pb2.HealthCheckRequest())) is grpc.StatusCode.OK
        reflect = server.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        assert (await end_of(reflect(iter([b""])))).code() is grpc.StatusCode.UNAUTHENTICATED
    assert "s3cre" not in caplog.text
    assert "s3cret" not in repr(server.config)


async def test_so_many_watch_health_without_a_key_and_no_more(make_core, serving, details, monkeypatch):
    monkeypatch.setattr("service.guard._MAX_UNKNOWN_WATCHES", 2)
    async with serving(make_core(), api_keys=("s3cret",)) as server:
        health, whole = health_pb2_grpc.HealthStub(server.channel), health_pb2.HealthCheckRequest()
        watches = [health.Watch(whole), health.Watch(whole)]
        for watch in watches:
            assert (await watch.read()).status == Status.SERVING
        error = details(await end_of(health.Watch(whole)))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHES")
        assert await code_of(health.Check(whole)) is grpc.StatusCode.OK
        assert (await health.Watch(whole, metadata=KEY).read()).status == Status.SERVING
        watches[0].cancel()
        async with asyncio.timeout(20):
            while await code_of(health.Watch(whole).read()) is not grpc.StatusCode.OK:
                pass


# -------------------- the end


async def test_drain_lets_running_requests_finish(make_core, serving, details):
    core = make_core()
    async with serving(core, grace_seconds=20.0) as server:
        call = await begin(server)
        watch = health_pb2_grpc.HealthStub(server.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == Status.SERVING
        server.stop.set()
        assert (await watch.read()).status == Status.NOT_SERVING
        error = details(await end_of(server.stub.Generate(prompt("late"))))
        assert (error.code, error.reason, error.retry_after) == (grpc.StatusCode.UNAVAILABLE, "DRAINING", 1.0)
        assert not server.task.done()
        core.emit("r", 0, [65], FinishReason.LENGTH)
        assert await end_of(call) is None
        async with asyncio.timeout(10):  # well within the grace: an open Watch does not hold it up
            await server.task
        assert core.aborted == []


async def test_what_outlives_the_grace_ends_unavailable(make_core, serving, details):
    core = make_core()
    async with serving(core, grace_seconds=0.2) as server:
        calls = [await begin(server, "r0"), await begin(server, "r1", n=2)]
        server.stop.set()
        for call in calls:
            error = details(await end_of(call))
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        await server.task
        assert sorted(core.aborted) == ["r0", "r1"]


async def test_a_dead_core_ends_every_stream_at_once(make_core, serving, details):
    core = make_core(max_model_len=1 << 20)
    async with serving(core) as server:
        reading, stuck = await begin(server, "reading"), await begin(server, "stuck")
        for _ in range(100):
            core.emit("stuck", 0, [65] * 4000)
            await asyncio.sleep(0)
        core.die()
        for call in (reading, stuck):
            error = details(await end_of(call))
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD")
            assert error.retry_after > 0
        health = health_pb2_grpc.HealthStub(server.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(service=INFERENCE))).status == Status.NOT_SERVING
        assert details(await end_of(server.stub.Generate(prompt("next")))).reason == "ENGINE_DEAD"
        for call in (
            server.admin.GetStats(pb.GetStatsRequest()),
            server.admin.FlushCache(pb.FlushCacheRequest()),
            server.admin.Abort(pb.AbortRequest(request_ids=["x"])),
            server.admin.Drain(pb.DrainRequest()),
        ):
            assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
        watch = health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await watch.read()).status == Status.NOT_SERVING
        core.revive()
        assert (await watch.read()).status == Status.SERVING
        watch.cancel()
        call = await begin(server, "again")
        core.emit("again", 0, [65], FinishReason.LENGTH)
        assert await end_of(call) is None


@pytest.fixture
def live(monkeypatch):
    """What ends the calls of each server that is started."""
    made = []

    class Known(LiveCalls):
        def __init__(self, timeout):
            super().__init__(timeout)
            made.append(self)

    monkeypatch.setattr("service.server.LiveCalls", Known)
    return made


async def test_a_call_that_is_ended_while_its_first_message_is_written_hears_of_it(make_core, serving, details, live):
    """Its metadata go with that message; grpc.aio sent them again with the status, gRPC took neither, and it hung."""
    core = make_core()
    submit = core.submit

    async def submitted(request):
        asyncio.get_running_loop().call_soon(live[0].interrupt, engine_dead)
        return await submit(request)

    core.submit = submitted
    async with serving(core) as server:
        for name in map(str, range(9)):
            error = details(await end_of(server.stub.Generate(prompt(name), timeout=20)))
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD")
            assert core.aborted[-1] == name


async def test_a_caller_that_goes_while_his_ended_call_s_first_message_is_written_is_no_fault(
    make_core, serving, caplog, live
):
    core = make_core()
    async with serving(core) as server:
        for name in "abc":
            message = prompt(name).SerializeToString()
            writer = await call_by_hand(server, f"/{INFERENCE}/Generate".encode(), message=message)
            live[0].interrupt(engine_dead)
            for _ in range(5):  # until its handler knows
                await asyncio.sleep(0)
            writer.close()
        await core.until(lambda: sorted(core.aborted) == [*"abc"])
        gc.collect()
    assert "Traceback" not in caplog.text


async def test_a_core_that_answers_nothing_while_calls_are_open_does_not_serve_until_it_does(
    make_core, serving, monkeypatch, caplog
):
    core = make_core(step_timeout=0.1)
    stats, answers = core.stats, asyncio.Event()

    async def silent():
        await answers.wait()
        return await stats()

    monkeypatch.setattr(core, "stats", silent)
    async with serving(core) as server:
        health = health_pb2_grpc.HealthStub(server.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
        assert (await watch.read()).status == Status.SERVING
        call = await begin(server)
        assert (await watch.read()).status == Status.NOT_SERVING
        answers.set()
        assert (await watch.read()).status == Status.SERVING
        core.emit("r", 0, [65], FinishReason.LENGTH)
        assert await end_of(call) is None
        watch.cancel()
    assert "the engine core has not answered for 0.1 s, with 1 requests open" in caplog.messages
    assert caplog.messages[-1] == "the engine core answers again"


async def test_who_starts_beside_a_draining_core_does_not_say_that_it_serves(make_core, serving):
    core = make_core()
    await core.drain()
    async with serving(core) as server:
        health = health_pb2_grpc.HealthStub(server.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == Status.NOT_SERVING


async def test_a_drain_outlives_any_number_of_cores(make_core, serving):
    core = make_core()
    async with serving(core) as server:
        await server.admin.Drain(pb.DrainRequest())
        drain = core.drain

        async def dies():
            core.drain = drain
            core.die()
            raise CoreDied("gone")

        core.drain = dies
        core.die()
        core.revive()
        await core.until(lambda: core.drain == drain)
        assert not core.draining
        core.revive()
        await core.until(lambda: core.draining)


# -------------------- admin


async def test_admin_stats_and_flush(make_core, serving, details):
    core = make_core()
    async with serving(core) as server:
        call = await begin(server)
        stats = (await server.admin.GetStats(pb.GetStatsRequest())).stats
        assert (stats.live_requests, stats.requests_accepted, stats.steps, stats.total_pages) == (1, 1, 41, 512)
        watch = server.admin.WatchStats(pb.WatchStatsRequest(interval_seconds=0.1))
        assert (await watch.read()).stats.live_requests == 1
        call.cancel()
        await core.until(lambda: not core.streams)
        while (await watch.read()).stats.live_requests:
            pass
        watch.cancel()
        cache = await server.admin.GetCache(pb.GetCacheRequest())
        node = pb.CacheNode(parent=0, pages=2, locks=0, hits=7, age=1)
        assert cache == pb.GetCacheResponse(pages=b"\0\1\2\2", nodes=[node], total_nodes=1)
        assert (await server.admin.FlushCache(pb.FlushCacheRequest())).pages_freed == 12
        for interval in (0.0, float("nan"), float("inf"), -1.0):
            bad = server.admin.WatchStats(pb.WatchStatsRequest(interval_seconds=interval))
            assert details(await end_of(bad)).fields == ["interval_seconds"]
        for off in (
            server.admin.GetTrace(pb.GetTraceRequest(request_id="r")),
            server.admin.GetSteps(pb.GetStepsRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await off
            assert details(refused.value).reason == "TRACES_OFF"


async def test_a_client_of_4_mb_gets_the_latest_of_any_number_of_steps(make_core, serving):
    async with serving(make_core(traces=True)) as server:
        steps = (await server.admin.GetSteps(pb.GetStepsRequest())).steps
        assert (len(steps), steps[-1].step_id) == (32_768, 59_999)
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
            await server.admin.GetSteps(pb.GetStepsRequest(last=60_000))


async def test_admin_drain_waits_for_the_running_requests(make_core, serving, details):
    core = make_core()
    async with serving(core) as server:
        call = await begin(server)
        draining = asyncio.ensure_future(server.admin.Drain(pb.DrainRequest()))
        health = health_pb2_grpc.HealthStub(server.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status == Status.SERVING:
            pass
        watch.cancel()
        assert details(await end_of(server.stub.Generate(prompt("late")))).reason == "DRAINING"
        assert not draining.done()
        core.emit("r", 0, [65], FinishReason.LENGTH)
        assert await end_of(call) is None
        assert (await draining).requests_aborted == 0


async def test_admin_drain_with_a_grace_ends_what_is_left_in_every_process(make_core, serving, details):
    core = make_core()
    async with serving(core) as server, serving(core, admin_address=None) as other:
        ended = [
            asyncio.create_task(end_of(await begin(each, str(number)))) for number, each in enumerate((server, other))
        ]
        assert (await server.admin.Drain(pb.DrainRequest(grace_seconds=0.1))).requests_aborted == 2
        assert [details(each).reason for each in await asyncio.gather(*ended)] == ["DRAINING", "DRAINING"]
        bad = server.admin.Drain(pb.DrainRequest(grace_seconds=float("nan")))
        assert await code_of(bad) is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_admin_service_is_not_on_the_main_address(make_core, serving):
    async with serving(make_core()) as server:
        stray = server.channel.unary_unary(f"/{ADMIN}/GetStats")
        assert await code_of(stray(b"")) is grpc.StatusCode.UNIMPLEMENTED
        path = server.addresses.admin_addresses[0].removeprefix("unix:")
        assert mode_of(path) == 0o600
    assert mode_of(path) is None


async def test_the_default_admin_socket_lies_in_a_folder_of_ones_own(make_core, serving, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with serving(make_core(), admin_address="auto") as server:
        port = server.addresses.address.rpartition(":")[2]
        assert server.addresses.admin_addresses[0] == f"unix:{tmp_path}/fulcrum/admin-{port}.sock"
        assert mode_of(tmp_path / "fulcrum") == 0o700
        assert await code_of(server.admin.GetStats(pb.GetStatsRequest())) is grpc.StatusCode.OK
    (tmp_path / "fulcrum").chmod(0o755)
    with pytest.raises(PermissionError, match="only user"):
        async with serving(make_core(), admin_address="auto"):
            pass


async def test_admin_sockets_that_killed_servers_left_are_removed_at_a_start(make_core, serving, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "fulcrum"
    folder.mkdir(mode=0o700)
    (folder / "admin-0.sock").touch()  # is none
    with contextlib.ExitStack() as sockets:
        bound = {name: sockets.enter_context(socket.socket(socket.AF_UNIX)) for name in ("admin-1", "admin-2", "other")}
        for name, each in bound.items():
            each.bind(str(folder / f"{name}.sock"))
        bound["admin-2"].listen(0)  # alive, but it takes none up, and one waits already
        sockets.enter_context(socket.socket(socket.AF_UNIX)).connect(str(folder / "admin-2.sock"))
        async with serving(make_core(), admin_address="auto") as server:
            own = Path(server.addresses.admin_addresses[0].removeprefix("unix:")).name
            kept = {"admin-0.sock", "admin-2.sock", "other.sock"}
            assert {path.name for path in folder.iterdir()} == kept | {own}
        assert {path.name for path in folder.iterdir()} == kept


# -------------------- addresses


async def test_a_unix_address_serves(make_core, serving, tmp_path):
    async with serving(make_core(), address=f"unix:{tmp_path}/main.sock") as server:
        assert server.addresses.address == f"unix:{tmp_path}/main.sock"
        assert (await server.stub.GetModel(pb.GetModelRequest())).vocab_size == 258


async def test_an_own_address_beside_the_shared_one(make_core, serving, tmp_path):
    path = tmp_path / "own.sock"
    core = make_core()
    async with serving(core, reuse_port=True, own_address=f"unix:{path}") as server:
        assert server.addresses.own_address == f"unix:{path}"
        assert mode_of(path) == 0o600
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert reply.status == Status.SERVING
        reply = await health_pb2_grpc.HealthStub(server.channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == Status.SERVING
    assert not path.exists()


async def test_a_port_in_use_is_a_clear_error(make_core, serving):
    async with serving(make_core()) as server:
        with pytest.raises(OSError, match="cannot listen on"):
            async with serving(make_core(), address=server.addresses.address, admin_address=None):
                pass


async def test_a_path_that_is_too_long_is_a_clear_error(make_core, serving, tmp_path):
    address = f"unix:{tmp_path}/{'x' * 100}"
    with pytest.raises(OSError, match=f"cannot listen on {address}: AF_UNIX path too long"):
        async with serving(make_core(), admin_address=address):
            pass


async def test_two_processes_worth_of_servers_share_a_port(make_core, serving):
    async with serving(make_core(), reuse_port=True) as first:
        shared = first.addresses.address
        async with serving(make_core(), address=shared, reuse_port=True, admin_address=None) as second:
            assert second.addresses.address == shared
            assert second.addresses.admin_addresses == []
            assert (await second.stub.GetModel(pb.GetModelRequest())).vocab_size == 258


# -------------------- calls of what is not served


async def test_whatever_is_called_the_server_serves_on(make_core, serving):
    async with serving(make_core()) as server:
        for path in (
            b"/\xff",
            b"/fulcrum.v1.InferenceService/\xc3",
            b"/",
            b"",
            b"/fulcrum.v1.InferenceService/Nothing",
        ):
            (await call_by_hand(server, path)).close()
        assert await code_of(server.channel.unary_unary("/\xff")(b"")) is grpc.StatusCode.UNIMPLEMENTED
        assert (await server.stub.GetModel(pb.GetModelRequest())).max_model_len == 4096


async def test_metadata_that_are_no_text_are_not_logged(make_core, serving, caplog):
    async with serving(make_core(), api_keys=("s3cret",)) as server:
        bad = [(b"authorization", b"Bearer s3cret\xff"), (b"x-request-id", b"\xff")]
        (await call_by_hand(server, f"/{INFERENCE}/GetModel".encode(), bad)).close()
        assert (await server.stub.GetModel(pb.GetModelRequest(), metadata=KEY)).max_model_len == 4096
    assert "s3cret" not in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_burst_of_calls_is_answered(make_core, serving):
    async with serving(make_core()) as server:
        calls = [code_of(server.stub.GetModel(pb.GetModelRequest())) for _ in range(5000)]
        assert set(await asyncio.gather(*calls)) == {grpc.StatusCode.OK}


async def test_a_server_that_accepts_no_more_ends(make_core, serving, monkeypatch):
    async def crash(self):
        await self._request_call()
        raise ValueError("as grpcio's own loop would")

    monkeypatch.setattr("service.aio_server._Acceptor._refuse", crash)
    with contextlib.suppress(ValueError):  # once more, at the end
        async with serving(make_core()) as server:
            assert await code_of(server.channel.unary_unary("/nothing")(b"")) is not grpc.StatusCode.OK
            with pytest.raises(ValueError, match="own loop"):
                await server.task


# -------------------- pings


def ping_until(port, interval, count):
    """Speaks HTTP/2 by hand: PINGs on a connection without calls. The error code of a GOAWAY, or None."""

    def frame(kind, payload, flags=0):
        return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + bytes(4) + payload

    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, b""))
        inbox, acks, sent, due = b"", 0, 0, time.monotonic()
        while acks < count:
            if sent == acks:
                time.sleep(max(0, due - time.monotonic()))
                sock.sendall(frame(6, struct.pack(">Q", sent)))
                sent, due = sent + 1, time.monotonic() + interval
            data = sock.recv(65536)
            if not data:
                return -1
            inbox += data
            while len(inbox) >= 9 and len(inbox) >= 9 + (size := int.from_bytes(inbox[:3], "big")):
                kind, flags, payload = inbox[3], inbox[4], inbox[9 : 9 + size]
                inbox = inbox[9 + size :]
                if kind == 7:
                    return int.from_bytes(payload[4:8], "big")
                if kind == 6 and flags & 1:
                    acks += 1
                elif kind == 6:
                    sock.sendall(frame(6, payload, 1))
                elif kind == 4 and not flags & 1:
                    sock.sendall(frame(4, b"", 1))
    return None


async def test_a_client_that_stands_still_is_given_up(make_core, serving, monkeypatch):
    monkeypatch.setattr("service.server._KEEPALIVE", keepalive(1.0, within=0.2))  # a server asks no sooner
    async with serving(make_core()) as server, asyncio.timeout(20):
        host, port = server.addresses.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        await reader.read()  # to the end
        writer.close()


async def test_pings_without_calls_are_tolerated_down_to_the_interval(make_core, serving):
    async with serving(make_core(), min_ping_seconds=0.2) as server:
        port = int(server.addresses.address.rpartition(":")[2])
        assert await asyncio.to_thread(ping_until, port, 0.2, 10) is None
        enhance_your_calm = 0xB
        assert await asyncio.to_thread(ping_until, port, 0.01, 30) == enhance_your_calm


@pytest.mark.full
async def test_pings_every_five_seconds_are_tolerated(make_core, serving):
    async with serving(make_core()) as server:
        port = int(server.addresses.address.rpartition(":")[2])
        assert await asyncio.to_thread(ping_until, port, 5.0, 6) is None


# -------------------- the process


def test_importing_the_service_loads_no_torch():
    code = "import service, service.config, sys; assert not {'torch', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_a_caller_that_goes_while_it_is_refused_is_no_fault():
    """Of an exception other than a cancel grpc would write a traceback to the log."""

    class Gone:
        async def read(self):
            return b""

        async def abort(self, code, message, trailers):
            raise grpc.aio.InternalError("the call has ended")

    async def refuse(request, context):
        raise draining()

    async def continuation(details):
        return grpc.unary_stream_rpc_method_handler(refuse, pb.GenerateRequest.FromString)

    figures = Figures()
    guard = Guard(lambda _: None, figures)
    handler = await guard.intercept_service(continuation, SimpleNamespace(method="/x/Generate", invocation_metadata=()))
    with pytest.raises(asyncio.CancelledError):
        await handler.stream_stream(None, Gone())
    calls = next(metric for metric in figures.metrics() if metric.name == "fulcrum_service_calls")
    assert [(each.labels, each.value) for each in calls.samples] == [({"method": "Generate", "code": "UNAVAILABLE"}, 1)]


@pytest.mark.parametrize("gone", [asyncio.CancelledError, grpc.aio.InternalError])
async def test_a_refusal_that_nobody_hears_keeps_no_message(gone):
    """The frame that tells an error is in a ring with it, and they hold the message until the collector looks."""
    messages = []

    class Message:
        @classmethod
        def read(cls, payload):
            messages.append(weakref.ref(message := cls()))
            return message

    async def read():
        return b""

    async def abort(code, message, trailers):
        raise gone("the call has ended")

    async def refuse(request, context):
        raise draining()

    async def continuation(details):
        return grpc.unary_stream_rpc_method_handler(refuse, Message.read)

    guard = Guard(lambda _: None, Figures())
    handler = await guard.intercept_service(continuation, SimpleNamespace(method="/x/Generate", invocation_metadata=()))
    gc.disable()
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await handler.stream_stream(None, SimpleNamespace(read=read, abort=abort))
        assert [message() for message in messages] == [None]
    finally:
        gc.enable()


async def test_a_unix_socket_that_is_served_is_not_taken_over_but_a_dead_one_is(make_core, serving, tmp_path):
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # its file stays
    async with serving(make_core(), admin_address=f"unix:{path}") as first:
        with pytest.raises(OSError, match="another server does"):
            async with serving(make_core(), admin_address=f"unix:{path}"):
                pass
        assert (await first.admin.GetStats(pb.GetStatsRequest())).stats.steps == 41
    assert not path.exists()


async def test_a_core_that_cannot_be_followed_ends_the_server(make_core, serving):
    """Who keeps it starts it again; alone it would be NOT_SERVING for ever."""
    core = make_core()

    async def reconnect():
        raise CoreDied("of another version")

    async def served():
        async with serving(core) as server:
            core.die()
            async with asyncio.timeout(20):
                await asyncio.wait([server.task])

    core.reconnect = reconnect
    with pytest.raises(CoreDied, match="another version"):
        await served()
