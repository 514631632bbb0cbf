"""What a running server tells of itself: metrics, the dashboard and the alerts that use them, log lines, traces."""

import http.server
import itertools
import json
import re
import ssl
import subprocess
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/alerts.yaml"
LABEL = "look-for-me"
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
# Of Prometheus' own query language: what our expressions use of it, and what its server makes itself.
PROMQL = {
    "sum", "avg", "by", "rate", "deriv", "min_over_time", "resets", "histogram_quantile", "label_values", "or", "and",
    "up", "time", "on",
}  # fmt: skip
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


class Collector:
    """Takes what is sent to an OTLP/HTTP collector."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                collector.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list[Any]:
        """(service name, span), and the spans' ids and attributes in a form to compare."""
        import gzip

        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found = []
        for body in self.bodies:
            plain = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
            for resource in ExportTraceServiceRequest.FromString(plain).resource_spans:
                service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
                found += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return found


def has_otel() -> bool:
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.fixture(scope="module")
def told(
    fulcrum_process, tiny_model: Path, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """What a server of two service processes has told by the end: four answers, a refusal, a caller that has gone."""
    collector = Collector()
    log = tmp_path_factory.mktemp("observed") / "stderr.log"
    arguments = [
        "serve", str(tiny_model), "--load-format=dummy", "--dtype=float32", "--device=cpu", "--threads=1",
        "--memory-budget=32MiB", "--max-num-seqs=8", "--grpc-port=0", "--port=0", "--service-workers=2",
        "--metrics-port=0", "--log-format=json", "--log-level=debug", "--access-log",
        f"--https-cert={certificates / 'server.pem'}", f"--https-key={certificates / 'server.key'}",
        f"--tls-cert={certificates / 'server.pem'}", f"--tls-key={certificates / 'server.key'}",
    ]  # fmt: skip
    if has_otel():
        arguments.append(f"--otlp-endpoint=http://127.0.0.1:{collector.server.server_port}")
    serve = fulcrum_process(arguments, log, {})
    try:
        url = serve.expect(r"OpenAI API +(http\S+)/v1")
        metrics = serve.expect(r"metrics +(http\S+)")
        serve.expect(r"(Ctrl-C ends it)")
        body = {"model": "tiny-llama", "prompt": "a" * 40, "max_tokens": 4, "ignore_eos": True}
        headers = {"x-request-id": LABEL, "traceparent": f"00-{TRACE}-{CALLER}-01"}
        trust = ssl.create_default_context(cafile=certificates / "ca.pem")
        with httpx.Client(base_url=url, timeout=60, verify=trust) as client:
            answers = [client.post("/v1/completions", json=body, headers=headers).json()]
            answers += [client.post("/v1/completions", json=body).json() for _ in range(3)]
            assert client.post("/v1/completions", json=body | {"n": 0}).status_code == 400
            with client.stream("POST", "/v1/completions", json=body | {"max_tokens": 9000, "stream": True}) as stream:
                next(line for line in stream.iter_lines() if "text" in line)
            deadline = time.monotonic() + 30
            while 'finished_total{reason="cancel"} 1.0' not in (engine := client.get(metrics).text) or not re.search(
                r"^fulcrum_engine_live_requests 0\.0$", engine, re.MULTILINE
            ):
                assert time.monotonic() < deadline, engine
            gateway = client.get("/metrics").text
        assert serve.stop() == 0, log.read_text()
    finally:
        serve.kill()
        collector.server.shutdown()
        collector.server.server_close()
    assert len(engine.encode()) < 60_000  # as the document says of a scrape
    families = [*text_string_to_metric_families(engine), *text_string_to_metric_families(gateway)]
    samples = {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}
    command = ["openssl", "x509", "-enddate", "-noout", "-in", certificates / "server.pem"]
    end = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().removeprefix("notAfter=")
    return SimpleNamespace(answers=answers, families=families, samples=samples, log=log, collector=collector, end=end)


def names(families: list[Any]) -> set[str]:
    """Every name that a query may use."""
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def test_the_metrics_add_up(told: SimpleNamespace) -> None:
    samples = told.samples
    for gauge in ("running_sequences", "waiting_sequences", "live_requests", "used_pages", "kv_usage_ratio"):
        assert samples[f"fulcrum_engine_{gauge}",] == 0, gauge
    assert samples["fulcrum_engine_up",] == 1
    assert samples["fulcrum_service_finished_total", ("reason", "length")] == 4
    # There before the first, which would be no increase to Prometheus otherwise.
    assert samples["fulcrum_service_finished_total", ("reason", "error")] == 0
    assert samples["fulcrum_gateway_stream_errors_total", ("status", "503")] == 0
    usages = [answer["usage"] for answer in told.answers]
    assert [usage["completion_tokens"] for usage in usages] == [4] * 4
    assert samples["fulcrum_service_request_generated_tokens_sum",] == 16
    assert samples["fulcrum_service_prompt_tokens_total",] == 5 * 40
    # Two full pages of the prompt of 40 are found again by each after the first.
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached == 3 * 32
    assert samples["fulcrum_service_cached_tokens_total",] == cached + 32
    assert samples["fulcrum_engine_prefix_hit_tokens_total",] == cached + 32
    assert samples["fulcrum_service_request_seconds_count",] == 4
    assert samples["fulcrum_service_time_to_first_token_seconds_count",] == 5
    assert samples["fulcrum_engine_step_rows_count",] == samples["fulcrum_engine_steps_total",]
    model = (("engine", "0"), ("model_name", "tiny-llama"))
    assert samples["vllm:e2e_request_latency_seconds_count", *model] == 4
    assert samples["vllm:prompt_tokens_total", *model] == 5 * 40
    assert samples["fulcrum_gateway_completion_tokens_total",] == 16
    end = ssl.cert_time_to_seconds(told.end)
    for setting in ("tls_cert", "https_cert"):
        assert samples["fulcrum_certificate_expiry_timestamp_seconds", ("setting", setting)] == end


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def expressions(path: Path) -> list[str]:
    if path.suffix == ".json":
        dashboard = json.loads(path.read_text())
        variables = [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
        return variables + [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary"}
    return [rule["expr"] for rule in rules]


def labels_of(told: SimpleNamespace) -> dict[str, set[str]]:
    """What each name may be asked for, beside the instance and the job that Prometheus adds."""
    return {"up": {"job"}} | {name: {key for key, _ in pairs} for name, *pairs in told.samples}


def test_an_alert_says_what_its_expression_tells(told: SimpleNamespace) -> None:
    """Its summary names labels that its result has, and its limits are those of the document."""
    labels, said = labels_of(told), {}
    for rule in alerts():
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) - {"instance"}
        (name, *_) = [each for each in re.findall(r"[a-zA-Z_:][\w:]*", rule["expr"]) if each in labels]
        assert named <= labels[name], rule["alert"]
        assert not named or "by (" not in rule["expr"], rule["alert"]
        said[rule["alert"]] = rule["expr"]
    document = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"\| `fulcrum_service_finished_total` .*", document)
    assert set(re.search(r'reason=~"([^"]*)"', said["FulcrumSequencesFail"])[1].split("|")) <= set(
        re.findall(r"`(\w+)`", row)
    )
    for alert, limit, text in (
        ("FirstTokenLate", "> 5", "p99 above 5 s"),
        ("TokensSlow", "> 0.25", "p99 above 0.25 s"),
        ("SequencesFail", "> 0.01", "1% of the sequences"),
        ("HttpErrors", "> 0.05", "5% of HTTP"),
        ("KvCacheFull", "> on (instance) 0.1 * sum", "a sequence is preempted for every ten that end"),
        ("CertificateExpires", "< 14 * 86400", "within 14 days"),
        ("PrefixHitsCollapsed", "< 0.5 *", "half as often as over the last day"),
    ):
        assert limit in said[f"Fulcrum{alert}"]
        assert text in " ".join(document.split())


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yaml"])
def test_dashboard_and_alerts_ask_for_what_there_is(told: SimpleNamespace, file: str) -> None:
    known = names(told.families)
    labels = labels_of(told)
    found = expressions(ROOT / "deploy" / file)
    assert len(found) > 8
    for expression in found:
        assert expression.count("(") == expression.count(")"), expression
        bare = re.sub(r'"[^"]*"', "", expression)
        for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", bare):
            asked = set(re.findall(r"(\w+)!?[=~]", matchers)) - {"instance"}
            assert asked <= labels.get(name, set()), expression
        for grouped in re.findall(r"by \(([^)]*)\)", bare):
            each = [labels[name] for name in re.findall(r"[a-zA-Z_:][\w:]*", bare) if name in labels]
            assert all(set(grouped.split(", ")) <= own | {"instance"} for own in each), expression
        bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)", "", bare)
        words = set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - {"instance"}
        assert words & (known | {"up"}), expression
        assert words <= known | PROMQL, expression


def test_the_documented_metrics_are_there(told: SimpleNamespace) -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8").partition("## Metrics")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `((?:fulcrum|vllm)[\w:]+)[^`]*` \| (\w+) \|", text, re.MULTILINE))
    kinds = {family.name + ("_total" if family.type == "counter" else ""): family.type for family in told.families}
    assert {name: kinds.get(name) for name in rows} == rows
    own = {name for name in kinds if re.match(r"fulcrum_(service|gateway)_.*(?<!_created)$", name)}
    assert own <= set(rows)
    aliases = set(re.findall(r"`(vllm:\w+)`", text))
    assert aliases == {name for name in kinds if name.startswith("vllm:")}


def test_every_line_of_the_log_is_an_object_and_those_of_a_request_name_it(told: SimpleNamespace) -> None:
    # gRPC's core writes by itself: "I1130 09:51:59.386585 ..."
    lines = [line for line in told.log.read_text().splitlines() if not re.match(r"[IWE]\d{4} ", line)]
    objects = [json.loads(line) for line in lines]
    for each in objects:
        assert {"time", "level", "process", "logger", "message"} <= set(each)
        assert datetime.fromisoformat(each["time"]).utcoffset() == timedelta(0)
    assert {"service", "gateway"} <= {each["process"] for each in objects}
    expiring = {each["process"]: each for each in objects if each["logger"] == "telemetry.expiry"}
    assert {name: each["message"].split()[0] for name, each in expiring.items()} == {
        "service": "tls_cert",
        "gateway": "https_cert",
    }
    ours = [each for each in objects if each.get("x_request_id") == LABEL]
    assert {each["request_id"] for each in ours} == {told.answers[0]["id"].removeprefix("cmpl-")}
    assert [each["logger"] for each in ours] == ["service.servicer", "service.servicer", "gateway.access"]
    access = ours[-1]
    assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/completions", 200)
    assert 0 < access["seconds"] < 60


def test_a_trace_leads_from_http_to_the_core(told: SimpleNamespace) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    spans = [(service, span) for service, span in told.collector.spans() if span.trace_id.hex() == TRACE]
    by_name = {span.name: span for _, span in spans}
    assert sorted(service for service, _ in spans) == ["fulcrum-engine"] * 4 + ["fulcrum-gateway"]
    http_span, call = by_name["POST /v1/completions"], by_name["fulcrum.v1.InferenceService/Generate"]
    assert http_span.parent_span_id.hex() == CALLER
    assert call.parent_span_id == http_span.span_id
    phases = [by_name[name] for name in ("queue", "prefill", "decode")]
    assert {phase.parent_span_id for phase in phases} == {call.span_id}
    times = [http_span.start_time_unix_nano, call.start_time_unix_nano]
    times += [time for phase in phases for time in (phase.start_time_unix_nano, phase.end_time_unix_nano)]
    times += [call.end_time_unix_nano, http_span.end_time_unix_nano]
    slack = 1_000_000  # each is converted by a reading of two clocks of its own
    assert all(before <= after + slack for before, after in itertools.pairwise(times))
    assert [event.name for event in call.events] == ["tokenized", "accepted", "started", "first token", "finished"]
    attributes = {each.key: each.value for each in call.attributes}
    assert attributes["gen_ai.usage.input_tokens"].int_value == 40
    assert attributes["gen_ai.usage.output_tokens"].int_value == 4
    assert [each.string_value for each in attributes["gen_ai.response.finish_reasons"].array_value.values] == ["length"]
    assert attributes["gen_ai.response.id"].string_value == told.answers[0]["id"].removeprefix("cmpl-")
    status = {each.key: each.value for each in http_span.attributes}["http.response.status_code"].int_value
    assert status == 200


def test_what_went_wrong_is_in_its_trace(told: SimpleNamespace) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    calls = [span for _, span in told.collector.spans() if span.name.endswith("/Generate")]
    failed = [span for span in calls if span.status.code == 2]
    assert len(calls) == 5
    assert [span.status.message for span in failed] == ["cancel"]
