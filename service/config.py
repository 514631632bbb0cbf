"""The service's settings, checked where they enter. Knows nothing of the engine's own (engine/config.py)."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from fulcrum import limits
from fulcrum.keys import KeyRing, is_loopback
from fulcrum.tls import Identity, identity
from service.addresses import is_unix, split_address
from service.parsers.registry import AUTO, check_names
from telemetry.tracing import check_endpoint


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Settings of one service process.

    Args:
        model: a folder in Hugging Face layout or a GGUF file: tokenizer, template and generation defaults come from it.
        served_model_names: what `model` may be called in requests; the first is the principal one.
        address: HOST:PORT (port 0: any free one) or unix:/PATH, for InferenceService, health and reflection.
        own_address: a second one for the same, of this process alone where several share `address`: who connects there
            chooses the process, and so can spread his calls evenly. Beside its Unix socket lie the process's figures,
            which whoever serves the metrics reads: the sockets of one engine have a folder of their own.
        admin_address: the same for AdminService. AUTO is a Unix socket that only its owner may open (0600), without a
            key; a TCP address needs a key with `admin`, and `own_address` has one beside it for those who need none.
            None: this process serves none (another worker does).
        api_keys: who may call. Without any, only loopback and Unix addresses may be bound.
        api_key_file: further keys, of several tenants (fulcrum.keys).
        gateway_keys: these may speak for tenants.
        tls_cert, tls_key: PEM files: TCP addresses speak TLS alone. Unix sockets never do.
        tls_client_ca: and their clients must have a certificate of these authorities.
        max_priority: highest `priority` of callers whose key does not say. None: no limit without keys, 0 with keys.
        log_requests: write each accepted request into the log, prompt and all.
        share_prefixes: requests without a salt share cached prefixes with those of other tenants.
        chat_template: a jinja file instead of the model's own template.
        tool_parser, reasoning_parser: how the model writes tool calls and reasoning: a name known to service.parsers,
            AUTO (the template tells) or "none" (they stay in the text as they are).
        tokenizer: a folder or file instead of the model's own tokenizer.
        request_timeout: seconds after which a Generate ends DEADLINE_EXCEEDED, whatever deadline its caller set.
        max_message_bytes: the one limit on a message, both ways.
        metrics_host, metrics_port: where Prometheus metrics are served over HTTP, or HTTPS with `tls_cert`, to whoever
            asks (port 0: any free one; None: nowhere).
        otlp_endpoint: where traces are sent (telemetry.tracing; None: nowhere).
        grace_seconds: how long running requests may go on when the server drains.
        min_ping_seconds: keepalive pings of clients are tolerated down to this interval, also without calls.
        reuse_port: several service processes share one port (SO_REUSEPORT).
        tokenizer_threads: threads that render and tokenize beside the event loop; as many again for large prompts.
        grammar_timeout: seconds that the compilation of a schema, regex or grammar may take.
    """

    model: Path
    served_model_names: tuple[str, ...]
    address: str = "127.0.0.1:50051"
    own_address: str | None = None
    admin_address: str | None = AUTO
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None
    gateway_keys: tuple[str, ...] = field(default=(), repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    max_priority: int | None = None
    share_prefixes: bool = False
    log_requests: bool = False
    chat_template: Path | None = None
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO
    tokenizer: Path | None = None
    request_timeout: float | None = None
    max_message_bytes: int = limits.MESSAGE_BYTES
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    otlp_endpoint: str | None = None
    grace_seconds: float = 30.0
    min_ping_seconds: float = 5.0
    reuse_port: bool = False
    tokenizer_threads: int = 2
    grammar_timeout: float = 10.0

    def __post_init__(self) -> None:
        """Raises: ValueError naming the setting that is wrong."""
        if not self.served_model_names or not all(self.served_model_names):
            raise ValueError("served_model_names: at least one, none of them empty")
        self.identity()
        ring = self.key_ring()
        for name in ("address", "own_address"):
            address = getattr(self, name)
            if address is not None and not is_unix(address):
                host, _ = split_address(address, name)
                if ring.open and not is_loopback(host):
                    text = (
                        f"{address} can be reached from other machines: that needs an API key (api_key, api_key_file)"
                    )
                    raise ValueError(f"{name}: {text}")
        if self.admin_address not in (None, AUTO) and not is_unix(self.admin_address):
            split_address(self.admin_address, "admin_address")
            if not ring.has_admin:
                text = f"a TCP address ({self.admin_address}) needs an API key with admin, in api_key_file"
                raise ValueError(f"admin_address: {text}")
        check_endpoint(self.otlp_endpoint)
        check_names(self.tool_parser, self.reasoning_parser)
        for name in ("request_timeout", "min_ping_seconds", "grammar_timeout"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0 seconds, not {value}")
        if not (math.isfinite(self.grace_seconds) and self.grace_seconds >= 0):
            raise ValueError(f"grace_seconds must be at least 0, not {self.grace_seconds}")
        if not 4096 <= self.max_message_bytes < 1 << 31:
            raise ValueError(f"max_message_bytes must be in [4096, 2^31), not {self.max_message_bytes}")
        if self.metrics_port is not None and not 0 <= self.metrics_port < 1 << 16:
            raise ValueError(f"metrics_port must be in [0, 65535], not {self.metrics_port}")
        if self.tokenizer_threads < 1:
            raise ValueError(f"tokenizer_threads must be at least 1, not {self.tokenizer_threads}")

    def key_ring(self) -> KeyRing:
        """The keys that callers are known by. Raises: ValueError naming the setting that is wrong."""
        return KeyRing(self.api_keys, self.api_key_file, self.gateway_keys)

    def certificates(self) -> dict[str, Path | None]:
        """What telemetry.expiry is to tell of."""
        return {"tls_cert": self.tls_cert, "tls_client_ca": self.tls_client_ca}

    def identity(self) -> Identity | None:
        """What this server shows to TLS clients. Raises: ValueError naming the setting that is wrong."""
        return identity("tls", self.tls_cert, self.tls_key, self.tls_client_ca)
