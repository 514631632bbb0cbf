"""The engine's Prometheus metrics, read as Prometheus reads them: each end counted once, nothing left standing."""

import asyncio
import ssl
import time
import urllib.request

import grpc
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from engine.messages import CoreStats
from engine.request import FinishReason
from fulcrum.v1 import inference_pb2 as pb
from service.errors import draining
from service.figures import Figures
from service.metrics import VLLM_NAMES, MetricsServer
from service.record import ending

EOS = 257


def prompt(request_id="r", n=1, **fields):
    return pb.GenerateRequest(request_id=request_id, token_ids=pb.TokenIds(ids=[1, 2, 3]), n=n, **fields)


async def scrape(server):
    """(name, labels as a frozen set of pairs) -> value."""

    def read():
        with urllib.request.urlopen(f"http://{server.addresses.metrics_address}/metrics", timeout=20) as reply:
            return reply.read().decode()

    families = text_string_to_metric_families(await asyncio.to_thread(read))
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples), "a sample comes twice"
    return found


def value(samples, name, **labels):
    return samples.get((name, frozenset(labels.items())), 0.0)


def by_label(samples, name, label):
    return {dict(labels)[label]: value for (found, labels), value in samples.items() if found == name and value}


async def ended(call):
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass


async def stop_string(server, call, core):
    core.emit("r", 0, list(b"abc"))


async def client_cancels(server, call, core):
    call.cancel()


async def operator_aborts(server, call, core):
    await server.admin.Abort(pb.AbortRequest(request_ids=["r"]))


async def core_dies(server, call, core):
    core.die()


async def nothing(server, call, core):
    pass


def tokens(ids, finish):
    async def emit(server, call, core):
        core.emit("r", 0, ids, finish)

    return emit


@pytest.mark.parametrize(
    ("act", "reason", "vllm_reason", "fields", "settings"),
    [
        (tokens([65, EOS], FinishReason.EOS), "stop", "stop", {}, {}),
        (stop_string, "stop", "stop", {"stopping": pb.StoppingCriteria(stop=["b"])}, {}),
        (tokens([65, 66], FinishReason.LENGTH), "length", "length", {}, {}),
        (tokens([], FinishReason.ERROR), "error", "error", {}, {}),
        (operator_aborts, "abort", "abort", {}, {}),
        (client_cancels, "cancel", "abort", {}, {}),
        (core_dies, "unavailable", "abort", {}, {}),
        (nothing, "deadline", "abort", {}, {"request_timeout": 0.3}),
    ],
    ids=["eos", "stop string", "length", "error", "abort", "cancel", "core dies", "deadline"],
)
async def test_every_end_is_counted_once(make_core, serving, act, reason, vllm_reason, fields, settings):
    core = make_core()
    async with serving(core, metrics_port=0, **settings) as server:
        await ended(server.stub.Generate(prompt("bad", n=0)))  # refused: it has no end, since it never began
        call = server.stub.Generate(prompt(**fields))
        assert (await call.read()).HasField("accepted")
        core.start("r", cached_tokens=2)
        await act(server, call, core)
        await ended(call)
        async with asyncio.timeout(20):
            samples = {}  # a cancel is heard of a moment later
            while not samples or value(samples, "fulcrum_engine_live_requests"):
                samples = await scrape(server)
    assert by_label(samples, "fulcrum_service_finished_total", "reason") == {reason: 1}
    assert by_label(samples, "vllm:request_success_total", "finished_reason") == {vllm_reason: 1}
    well = reason in ("stop", "length")
    for name in ("request_seconds", "prefill_seconds", "decode_seconds", "request_generated_tokens"):
        assert value(samples, f"fulcrum_service_{name}_count") == well, name
    assert value(samples, "fulcrum_service_time_to_first_token_seconds_count") == well  # the others had no token
    alive = reason != "unavailable"
    assert value(samples, "fulcrum_engine_up") == alive
    assert (("fulcrum_engine_live_requests", frozenset()) in samples) == alive
    assert value(samples, "fulcrum_service_calls_total", method="Generate", code="INVALID_ARGUMENT") == 1


async def test_a_core_that_is_started_again_begins_anew_and_what_it_lost_stays_counted(make_core, serving):
    core = make_core()
    async with serving(core, metrics_port=0) as server:
        call = server.stub.Generate(prompt())
        await call.read()
        assert value(await scrape(server), "fulcrum_engine_live_requests") == 1
        core.die()
        await ended(call)
        assert value(await scrape(server), "fulcrum_engine_up") == 0
        core.revive()
        async with asyncio.timeout(20):
            while not value(samples := await scrape(server), "fulcrum_engine_up"):
                pass
    assert samples["fulcrum_engine_live_requests", frozenset()] == 0
    assert samples["fulcrum_engine_requests_accepted_total", frozenset()] == 0
    assert by_label(samples, "fulcrum_service_finished_total", "reason") == {"unavailable": 1}


@pytest.mark.parametrize(
    ("error", "remaining", "reason"),
    [
        (asyncio.CancelledError(), None, "cancel"),
        (asyncio.CancelledError(), 60.0, "cancel"),
        (asyncio.CancelledError(), 0.0, "deadline"),
        (grpc.aio.InternalError(), 0.01, "deadline"),
        (draining(), 60.0, "unavailable"),
        (ValueError(), 0.0, "error"),
    ],
)
def test_a_caller_that_leaves_at_his_deadline_has_run_out_of_time(error, remaining, reason):
    assert ending(error, remaining) == reason


async def test_a_call_whose_deadline_has_passed_is_counted_as_its_caller_sees_it(make_core, serving):
    core = make_core()
    async with serving(core, metrics_port=0) as server:
        call = server.stub.Generate(prompt(), timeout=0.3)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await core.until(lambda: core.aborted == ["r"])
        assert (
            value(await scrape(server), "fulcrum_service_calls_total", method="Generate", code="DEADLINE_EXCEEDED") == 1
        )


async def test_sequences_that_ended_and_those_that_did_not(make_core, serving):
    """Of four, two end; then the caller goes."""
    core = make_core()
    async with serving(core, metrics_port=0) as server:
        call = server.stub.Generate(prompt(n=4))
        await call.read()
        core.start("r")
        for index in range(2):
            core.emit("r", index, [65], FinishReason.LENGTH)
        for kind in ("started", "delta", "finished", "delta", "finished"):
            assert (await call.read()).HasField(kind)
        call.cancel()
        await core.until(lambda: core.aborted == ["r"])
        samples = await scrape(server)
        assert value(samples, "fulcrum_service_calls_total", method="Generate", code="CANCELLED") == 1
        assert by_label(samples, "fulcrum_service_finished_total", "reason") == {"length": 2, "cancel": 2}


async def test_times_and_tokens_are_those_of_the_usage(make_core, serving):
    core = make_core()
    async with serving(core, metrics_port=0) as server:
        began = time.monotonic()
        call = server.stub.Generate(prompt(stopping=pb.StoppingCriteria(max_tokens=50)))
        await call.read()
        core.start("r", cached_tokens=2)
        assert (await call.read()).HasField("started")
        for token in (65, 66, 67):
            core.emit("r", 0, [token])
            assert (await call.read()).HasField("delta")
        core.emit("r", 0, [68, 69], FinishReason.LENGTH)
        while not (reply := await call.read()).HasField("usage"):
            pass
        await ended(call)
        passed, usage = time.monotonic() - began, reply.usage
        samples = await scrape(server)
        waits = (await server.admin.GetStats(pb.GetStatsRequest())).waits

    def observed(name):
        full = f"fulcrum_service_{name}"
        return value(samples, f"{full}_count"), pytest.approx(value(samples, f"{full}_sum"))

    assert observed("queue_seconds") == (1, usage.queue_seconds)
    assert observed("time_to_first_token_seconds") == (1, usage.queue_seconds + usage.prefill_seconds)
    assert (waits.first_tokens, waits.inter_tokens) == (1, 4)
    assert waits.first_token_seconds == pytest.approx(usage.queue_seconds + usage.prefill_seconds)
    assert waits.inter_token_seconds == pytest.approx(usage.decode_seconds)
    assert observed("prefill_seconds") == (1, usage.prefill_seconds)
    assert observed("decode_seconds") == (1, usage.decode_seconds)
    assert observed("inter_token_seconds") == (4, usage.decode_seconds)
    assert observed("time_per_output_token_seconds") == (1, usage.decode_seconds / 4)
    total = usage.queue_seconds + usage.prefill_seconds + usage.decode_seconds
    assert total <= value(samples, "fulcrum_service_request_seconds_sum") <= passed
    assert observed("request_prompt_tokens") == (1, 3)
    assert observed("request_generated_tokens") == (1, 5)
    assert observed("request_max_tokens") == (1, 50)
    assert value(samples, "fulcrum_service_prompt_tokens_total") == 3
    assert value(samples, "fulcrum_service_cached_tokens_total") == 2


async def test_the_figures_of_all_processes_are_summed(make_core, serving, tmp_path):
    core = make_core()
    core.reply = lambda request: [(0, [65, 66], FinishReason.LENGTH)]
    first = serving(core, metrics_port=0, own_address=f"unix:{tmp_path}/0")
    second = serving(core, admin_address=None, own_address=f"unix:{tmp_path}/1")
    async with first as one, second as two:
        for number in range(5):
            await ended((one, two)[number % 2].stub.Generate(prompt(str(number))))
        samples = await scrape(one)
        waits = (await one.admin.GetStats(pb.GetStatsRequest())).waits
    assert (waits.first_tokens, waits.inter_tokens) == (5, 0)  # both tokens of an answer came together
    assert value(samples, "fulcrum_service_calls_total", method="Generate", code="OK") == 5
    assert value(samples, "fulcrum_service_finished_total", reason="length") == 5
    assert value(samples, "fulcrum_service_request_generated_tokens_sum") == 10
    buckets = by_label(samples, "fulcrum_service_request_generated_tokens_bucket", "le")
    assert (buckets.get("1.0"), buckets["2.0"], buckets["+Inf"]) == (None, 5, 5)


def test_a_histogram_is_prometheus_own():
    """Also on the bounds themselves, which belong to the lower bucket."""
    bounds = (0.5, 1, 2.5)
    other = Histogram("fulcrum_service_x", "X.", buckets=bounds, registry=(theirs := CollectorRegistry()))
    figures = Figures()
    own = figures._histogram("x", "X.", bounds)
    for seen in (0.0, 0.125, 0.5, 0.5, 0.75, 1.0, 2.5, 2.625, 100.0):
        own.observe(seen)
        other.observe(seen)
    own.observe(0.625, times=3)
    for _ in range(3):
        other.observe(0.625)

    class Ours:
        def collect(self):
            return [metric for metric in figures.metrics() if metric.name == "fulcrum_service_x"]

    ours = CollectorRegistry()
    ours.register(Ours())
    lines = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == lines


async def test_every_figure_of_the_core_and_every_name_of_vllm(make_core, serving):
    core = make_core()
    stats = CoreStats(used_pages=3, total_pages=12, generated_tokens=99, scheduled_tokens=70)
    stats.step_tokens[:3] = [2, 0, 5]

    async def answer():
        return stats

    core.stats = answer
    core.reply = lambda request: [(0, [65, 66], FinishReason.LENGTH)]
    async with serving(core, metrics_port=0) as server:
        await ended(server.stub.Generate(prompt()))
        samples = await scrape(server)
    names = {name for name, _ in samples}
    for field in CoreStats.__struct_fields__:
        full = f"fulcrum_engine_{field}"
        assert names & {full, f"{full}_total", f"{full}_bucket"}, field
    labels = {"model_name": "bytes", "engine": "0"}
    for alias in VLLM_NAMES.values():
        assert names & {alias, f"{alias}_total", f"{alias}_bucket"}, alias
    assert value(samples, "vllm:kv_cache_usage_perc", **labels) == 0.25
    assert value(samples, "vllm:generation_tokens_total", **labels) == 99
    assert value(samples, "vllm:iteration_tokens_total_sum", **labels) == 70
    assert value(samples, "vllm:iteration_tokens_total_bucket", le="1.0", **labels) == 2
    assert value(samples, "vllm:iteration_tokens_total_bucket", le="4.0", **labels) == 7
    assert value(samples, "vllm:iteration_tokens_total_count", **labels) == 7


@pytest.mark.parametrize(("error", "level"), [(KeyError("ours"), "ERROR"), (ssl.SSLEOFError("theirs"), "DEBUG")])
async def test_what_goes_wrong_in_a_scrape_is_a_record_of_the_log(error, level, caplog, capfd):
    """Not a traceback in the middle of it: a scraper that leaves is nobody's fault here."""

    class Broken(Collector):
        def collect(self):
            raise error
            yield

        def describe(self):
            return iter(())

    caplog.set_level("DEBUG", "service.metrics")
    server = MetricsServer("127.0.0.1", 0, None, [Broken()])
    with pytest.raises(OSError, match=r"500|closed|reset"):
        await asyncio.to_thread(urllib.request.urlopen, f"http://{server.address}/metrics", timeout=20)
    await server.close()
    assert [record.levelname for record in caplog.records if record.message == "a scrape failed"] == [level]
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_disk_takes_no_figures(tmp_path):
    path = tmp_path / "0.figures"
    Figures(path)
    found = path.stat()
    assert found.st_blocks * 512 >= found.st_size > 0  # no hole is left to be filled later
