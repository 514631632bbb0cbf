"""Settings are checked where they enter; and the JSON of events, without a server."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum.v1 import inference_pb2 as pb
from gateway.choices_format import ChatFormat, CompletionFormat, Head
from gateway.config import GatewayConfig
from gateway.schemas import IGNORED, UNSERVED, ChatRequest, CompletionRequest


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com", ""])
def test_open_addresses_need_a_key(host):
    with pytest.raises(ValueError, match="API key"):
        GatewayConfig(host=host)
    GatewayConfig(host=host, api_keys=("secret",))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_loopback_needs_none(host):
    GatewayConfig(host=host)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 65536),
        ("port", -1),
        ("channels_per_engine", 0),
        ("max_body_bytes", 0),
        ("max_prompts", 0),
        ("request_timeout", 0.0),
        ("request_timeout", float("nan")),
        ("request_timeout", float("inf")),
        ("heartbeat_seconds", 0.0),
        ("shutdown_seconds", -1),
        ("shutdown_seconds", float("inf")),
        ("shutdown_seconds", float("nan")),
        ("engines", ()),
        ("engines", ("",)),
        ("engines", ("127.0.0.1:50051", "localhost")),
        ("engines", ("http://127.0.0.1:50051",)),
        ("engine_admin", "https://localhost:50052"),
        ("engine_admin", "/run/admin.sock"),
        ("api_keys", ("two words",)),
        ("api_keys", ("",)),
        ("api_keys", ("naïve",)),
        ("engine_key", "secret\n"),
        ("api_key_file", Path("/nowhere/keys")),
        ("https_cert", Path("/nowhere/cert.pem")),
        ("engine_ca", Path("/nowhere/ca.pem")),
        ("engine_ca", Path(__file__)),
        ("engine_cert", Path("/nowhere/cert.pem")),
        ("engine_tls_name", "engine"),
    ],
)
def test_bad_settings_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        GatewayConfig(**{field: value})


def test_settings_hide_keys():
    config = GatewayConfig(api_keys=("secret",), engine_key="hidden")
    assert "secret" not in repr(config)
    assert "hidden" not in repr(config)


def test_a_field_is_in_one_list_only():
    served = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert not served & UNSERVED.keys()
    assert not served & IGNORED
    assert not IGNORED & UNSERVED.keys()


HEAD = Head("1", 2, 'evil "\\u0000" \u2028 model', "fp")
SHAPES = {
    usage: (
        (ChatFormat(HEAD, 3, ChatRequest(messages=[{"role": "user", "content": "a"}], **more)), ("delta", "content")),
        (CompletionFormat(HEAD, 3, CompletionRequest(prompt="p", **more)), ("text",)),
    )
    for usage in (False, True)
    for more in [{"stream": True, "stream_options": {"include_usage": usage}}]
}


def test_a_delta_that_says_nothing_is_no_event():
    for shape, _ in SHAPES[True]:
        assert shape.delta(0, pb.Delta(token_ids=[5])) == b""


@given(st.text(min_size=1), st.booleans(), st.integers(0, 2))
def test_any_text_survives(text, usage, index):
    for shape, path in SHAPES[usage]:
        (line,) = shape.delta(index, pb.Delta(text=text)).decode().splitlines()[:-1]
        chunk = json.loads(line.removeprefix("data: "))
        value = chunk["choices"][0]
        assert value["index"] == index
        for key in path:
            value = value[key]
        assert value == text
        assert chunk["model"] == HEAD.model
        assert ("usage" in chunk) is usage
