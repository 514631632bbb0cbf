"""The gateway's settings, checked where they enter. Knows nothing of HTTP or gRPC."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from fulcrum.keys import KeyRing, checked_key, is_loopback
from fulcrum.tls import Identity, channel_credentials, identity
from telemetry.tracing import check_endpoint

LEAST = {"max_body_bytes": 1, "max_prompts": 1, "channels_per_engine": 1}


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Settings of one gateway.

    Args:
        host: address to bind; anything but loopback needs a key.
        port: TCP port (0: any free one).
        engines: HOST:PORT (or unix:PATH) of each engine server; all serve the same model.
        api_keys: keys that callers may show as `Authorization: Bearer KEY`.
        api_key_file: further keys, of several tenants (fulcrum.keys).
        engine_key: the key that this gateway shows to the engines; it must be one of their gateway keys.
        engine_admin: HOST:PORT (or unix:PATH) of an engine's AdminService, for the live view (None: there is none).
            Over TCP `engine_key` must be one with admin.
        https_cert, https_key: PEM files: HTTPS is served, and nothing else.
        https_client_ca: PEM file: and its clients must have a certificate of these authorities.
        engine_ca: PEM file: engines at TCP addresses speak TLS, with a certificate of these authorities.
        engine_cert, engine_cert_key: PEM files: the certificate that this gateway shows to engines that ask for one.
        engine_tls_name: the name in the engines' certificates, where it is not their host's.
        cors_origins: origins that browsers may call from ("*": any).
        request_timeout: longest life of a request, seconds (None: no limit). A caller may ask for less.
        heartbeat_seconds: a silent event stream carries blank lines this often.
        arrival_seconds: a request's headers may take so long to come, and then its body; and its client may be so long
            in taking what lies ready of the answer.
        max_body_bytes: largest request body.
        max_prompts: most prompts in one completions call.
        channels_per_engine: connections to each engine (several reach the processes behind one port).
        shutdown_seconds: how long running requests may go on after a stop signal.
        access_log: write a line for each request.
        otlp_endpoint: where traces are sent (telemetry.tracing; None: nowhere).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    engines: tuple[str, ...] = ("127.0.0.1:50051",)
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None
    engine_key: str | None = field(default=None, repr=False)
    engine_admin: str | None = None
    https_cert: Path | None = None
    https_key: Path | None = None
    https_client_ca: Path | None = None
    engine_ca: Path | None = None
    engine_cert: Path | None = None
    engine_cert_key: Path | None = None
    engine_tls_name: str | None = None
    cors_origins: tuple[str, ...] = ()
    request_timeout: float | None = 600.0
    heartbeat_seconds: float = 15.0
    arrival_seconds: float = 120.0
    max_body_bytes: int = 16 << 20
    max_prompts: int = 256
    channels_per_engine: int = 4
    shutdown_seconds: float = 30.0
    access_log: bool = False
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        """Raises: ValueError naming the field that is wrong."""
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        check_endpoint(self.otlp_endpoint)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be 0 to 65535, not {self.port}")
        for name in ("request_timeout", "heartbeat_seconds", "arrival_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number of seconds, not {value}")
        if not 0 <= self.shutdown_seconds < float("inf"):
            raise ValueError(f"shutdown_seconds must be at least 0, not {self.shutdown_seconds}")
        admin = () if self.engine_admin is None else (self.engine_admin,)
        for name, addresses in (("engines", self.engines or ("",)), ("engine_admin", admin)):
            for address in addresses:
                if re.fullmatch(r"unix:.+|[^/]+:\d{1,5}", address) is None:
                    raise ValueError(f"{name} must be HOST:PORT or unix:/PATH, not {address!r}")
        if self.engine_key:
            checked_key("engine_key", self.engine_key)
        self.identity()
        self.engine_credentials()
        if self.key_ring().open and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} is reachable from other machines: that needs an API key (api_key, api_key_file)"
            )

    def key_ring(self) -> KeyRing:
        """The keys that callers are known by. Raises: ValueError naming the field that is wrong."""
        return KeyRing(self.api_keys, self.api_key_file)

    def certificates(self) -> dict[str, Path | None]:
        """What telemetry.expiry is to tell of."""
        return {name: getattr(self, name) for name in ("https_cert", "https_client_ca", "engine_ca", "engine_cert")}

    def identity(self) -> Identity | None:
        """What this server shows to HTTPS clients. Raises: ValueError naming the field that is wrong."""
        return identity("https", self.https_cert, self.https_key, self.https_client_ca)

    def engine_credentials(self) -> grpc.ChannelCredentials | None:
        """For TLS to the engines. Raises: ValueError naming the field that is wrong."""
        if self.engine_ca is not None:
            return channel_credentials(self.engine_ca, self.engine_cert, self.engine_cert_key)
        if self.engine_cert or self.engine_cert_key or self.engine_tls_name:
            raise ValueError("engine_cert, engine_cert_key and engine_tls_name need engine_ca")
        return None
