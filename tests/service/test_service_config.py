"""ServiceConfig refuses what would be unsafe or senseless, naming the setting."""

from pathlib import Path

import pytest

from service.config import ServiceConfig


def config(**settings):
    return ServiceConfig(**({"model": Path("m"), "served_model_names": ("m",)} | settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"address": "localhost:0"},
        {"address": "127.8.9.1:1"},
        {"address": "[::1]:50051"},
        {"address": "unix:/run/x.sock"},
        {"address": "0.0.0.0:50051", "api_keys": ("k",)},
        {"admin_address": None},
        {"admin_address": "unix:/run/x.sock"},
        {"address": "0.0.0.0:50051", "gateway_keys": ("k",)},
    ],
)
def test_accepted(settings):
    config(**settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"served_model_names": ()}, "served_model_names"),
        ({"served_model_names": ("a", "")}, "served_model_names"),
        ({"address": "0.0.0.0:50051"}, "API key"),
        ({"address": "[::]:50051"}, "API key"),
        ({"address": "example.org:50051"}, "API key"),
        ({"address": "::1:50051"}, "brackets"),
        ({"address": "50051"}, "HOST:PORT"),
        ({"address": "localhost:99999"}, "HOST:PORT"),
        ({"address": "localhost:x", "api_keys": ("k",)}, "HOST:PORT"),
        ({"admin_address": "127.0.0.1:1"}, "admin_address"),
        ({"admin_address": "127.0.0.1:1", "api_keys": ("k",)}, "admin_address.*with admin"),
        ({"api_key_file": Path("/nowhere/keys")}, "api_key_file /nowhere/keys: No such file"),
        ({"gateway_keys": ("a b",)}, "gateway_keys"),
        ({"api_keys": ("",)}, "api_keys"),
        ({"api_keys": ("a b",)}, "api_keys"),
        ({"request_timeout": 0.0}, "request_timeout"),
        ({"request_timeout": float("nan")}, "request_timeout"),
        ({"grace_seconds": -1.0}, "grace_seconds"),
        ({"min_ping_seconds": 0.0}, "min_ping_seconds"),
        ({"max_message_bytes": 10}, "max_message_bytes"),
        ({"metrics_port": 70000}, "metrics_port"),
        ({"tokenizer_threads": 0}, "tokenizer_threads"),
    ],
)
def test_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        config(**settings)
