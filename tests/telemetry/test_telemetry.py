"""Log lines and trace headers, whatever is put into them."""

import http.server
import json
import logging
import socket
import sys
import threading
import time

import pytest
from click.testing import CliRunner

from cli.main import main
from service.config import ServiceConfig
from telemetry.logs import about, formatter
from telemetry.tracing import Tracer, passed_on


def test_a_json_line_is_one_line_with_its_fields_and_its_traceback():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("a.b", logging.ERROR, "f.py", 1, "of %s\n", ("x\u2028",), sys.exc_info())
    record.created = 1700000000.25
    record.fields = about(request_id="r1", x_request_id="-", status=None)["fields"]
    line = formatter("json", "core").format(record)
    assert "\n" not in line
    read = json.loads(line)
    assert read.pop("exception").endswith("ValueError: two\nlines")
    assert read == {
        "time": "2023-11-14T22:13:20.250+00:00",  # date -u -d @1700000000
        "level": "error",
        "process": "core",
        "logger": "a.b",
        "message": "of x\u2028\n",
        "request_id": "r1",
    }
    assert formatter("text", "core").format(record).partition("\n")[0].endswith(" ERROR core a.b: of x\u2028")


def test_trace_headers_that_gRPC_cannot_carry_are_left_out():
    good = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "a=1,b=2"}
    assert passed_on(good | {"cookie": "c"}) == tuple(good.items())
    for bad in ("", "é", "a\nb", "\x00", "x" * 513):
        assert passed_on({"traceparent": bad, "tracestate": bad}) == ()


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://a/b", "http://"])
def test_wrong_endpoints_are_refused_by_name(url):
    with pytest.raises(ValueError, match="otlp_endpoint must be http://HOST:PORT"):
        ServiceConfig(model="m", served_model_names=("m",), otlp_endpoint=url)


def test_without_opentelemetry_the_flag_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    result = CliRunner().invoke(main, ["gateway", "--otlp-endpoint=http://127.0.0.1:4318"])
    assert result.exit_code == 2
    assert "otlp_endpoint needs OpenTelemetry: pip install 'fulcrum-llm[otel]'" in result.stderr


def test_a_collector_that_does_not_answer_does_not_hold_up_the_end():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = Tracer(f"http://127.0.0.1:{silent.getsockname()[1]}", "x")
        tracer.serve("POST", [("traceparent", "nonsense")], time.monotonic()).end()
        began = time.monotonic()
        tracer.close()
        assert time.monotonic() - began < 8  # OpenTelemetry itself would wait for 10


@pytest.mark.parametrize("sampler", ["always_on", "always_off"])
def test_the_variables_of_opentelemetry_hold(monkeypatch, sampler):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    taken = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            taken.append((self.headers["x-tenant"], self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    variables = {"SERVICE_NAME": "my-engine", "EXPORTER_OTLP_HEADERS": "x-tenant=acme", "TRACES_SAMPLER": sampler}
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        tracer = Tracer(f"http://127.0.0.1:{collector.server_port}", "engine")
        tracer.serve("POST", [], time.monotonic()).end()
        tracer.close()
        collector.shutdown()
    assert [(tenant, b"my-engine" in body) for tenant, body in taken] == [("acme", True)] * (sampler == "always_on")
