"""From parsed options to the rooms' own settings, and from a command's options to a child's command line."""

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import grpc

from engine.config import EngineConfig
from fulcrum.tls import channel_credentials
from gateway.config import GatewayConfig
from service.config import AUTO, ServiceConfig

Params = Mapping[str, Any]
_Settings = TypeVar("_Settings")

# Handed to children in their environment, which only their owner can read.
_SECRETS = ("api_key", "engine_key", "gateway_key")
# Where a child is to have these, its command line says so.
_OF_THE_PARENT = tuple(
    f"FULCRUM_{name}"
    for name in (
        *("API_KEY_FILE", "TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA", "HTTPS_CERT", "HTTPS_KEY", "HTTPS_CLIENT_CA"),
        *("ENGINE_CA", "ENGINE_CERT", "ENGINE_CERT_KEY", "ENGINE_TLS_NAME", "ENGINE_ADMIN"),
    )
)


class ConfigError(click.ClickException):
    """A setting is wrong: one line, exit status 2."""

    exit_code = 2


def engine_config(params: Params, model: Path) -> EngineConfig:
    """The engine core's settings. Raises ConfigError."""
    return _checked(
        lambda: EngineConfig(
            model=model,
            dtype=params["dtype"],
            device=params["device"],
            load_format=params["load_format"],
            memory_budget=params["memory_budget"],
            max_model_len=params["max_model_len"],
            page_size=params["page_size"],
            max_num_seqs=params["max_num_seqs"],
            max_num_batched_tokens=params["max_num_batched_tokens"],
            scheduler=params["scheduler"],
            prefix_cache=params["prefix_cache"],
            chunked_prefill=params["chunked_prefill"],
            reserve_full_length=params["reserve_full_length"],
            admission=params["admission"],
            max_queue_requests=params["max_queue_requests"],
            max_queue_tokens=params["max_queue_tokens"],
            look_ahead=params["look_ahead"],
            speculative=params["speculative"],
            speculative_length=params["speculative_length"],
            speculative_window=params["speculative_window"],
            overlap=params["overlap"],
            cuda_graphs=params["cuda_graphs"],
            attention=params["attention"],
            logits_processors=params["logits_processor"],
            step_timeout=params["step_timeout"],
            trace_requests=params["trace_requests"],
            threads=params["threads"],
        )
    )


def service_config(params: Params, model: Path, *, grpc_port: int, admin: bool = True) -> ServiceConfig:
    """The settings of a service process; of several, one alone serves administration. Raises ConfigError."""
    return _checked(
        lambda: ServiceConfig(
            model=model,
            served_model_names=served_names(params),
            address=join_address(params["host"], grpc_port),
            admin_address=(params["admin_address"] or AUTO) if admin else None,
            api_keys=params["api_key"],
            api_key_file=params["api_key_file"],
            gateway_keys=params["gateway_key"],
            tls_cert=params["tls_cert"],
            tls_key=params["tls_key"],
            tls_client_ca=params["tls_client_ca"],
            max_priority=params["max_priority"],
            share_prefixes=params["share_prefixes"],
            log_requests=params["log_requests"],
            chat_template=params["chat_template"],
            tool_parser=params["tool_parser"],
            reasoning_parser=params["reasoning_parser"],
            tokenizer=params["tokenizer"],
            request_timeout=params["request_timeout"],
            grammar_timeout=params["grammar_timeout"],
            metrics_host=params["metrics_host"],
            metrics_port=params["metrics_port"],
            otlp_endpoint=params["otlp_endpoint"],
            grace_seconds=params["grace"],
            reuse_port=(params["service_workers"] or 1) > 1,
        )
    )


def gateway_config(params: Params, engines: tuple[str, ...]) -> GatewayConfig:
    """The gateway's settings. Raises ConfigError."""
    optional = {} if params["request_timeout"] is None else {"request_timeout": params["request_timeout"]}
    return _checked(
        lambda: GatewayConfig(
            host=params["host"],
            port=params["port"],
            engines=engines,
            api_keys=params["api_key"],
            api_key_file=params["api_key_file"],
            engine_key=params.get("engine_key"),
            engine_admin=params.get("engine_admin"),
            https_cert=params["https_cert"],
            https_key=params["https_key"],
            https_client_ca=params["https_client_ca"],
            engine_ca=params.get("engine_ca"),
            engine_cert=params.get("engine_cert"),
            engine_cert_key=params.get("engine_cert_key"),
            engine_tls_name=params.get("engine_tls_name"),
            cors_origins=params["cors_origin"],
            workers=params["workers"] or 1,
            shutdown_seconds=int(params["grace"]),
            access_log=params["access_log"],
            log_level=params["log_level"],
            log_format=params["log_format"],
            otlp_endpoint=params["otlp_endpoint"],
            **optional,
        )
    )


def engine_credentials(params: Params) -> grpc.ChannelCredentials | None:
    """For TLS to the engine, where it speaks that. Raises ConfigError."""
    if params["engine_ca"] is None:
        return None
    return _checked(lambda: channel_credentials(params["engine_ca"], params["engine_cert"], params["engine_cert_key"]))


def _checked(make: Callable[[], _Settings]) -> _Settings:
    try:
        return make()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def key_variables(api_keys: Sequence[str], *, engine_key: str = "", gateway_keys: Sequence[str] = ()) -> dict[str, str]:
    """The environment that hands a child its secrets; empty values unset what it would inherit."""
    return dict.fromkeys(_OF_THE_PARENT, "") | {
        "FULCRUM_API_KEY": " ".join(api_keys),
        "FULCRUM_ENGINE_KEY": engine_key,
        "FULCRUM_GATEWAY_KEY": " ".join(gateway_keys),
    }


def served_names(params: Params) -> tuple[str, ...]:
    """What requests may call the model: as told, else the hub id, or the name of the folder or file."""
    if params["served_model_name"]:
        return tuple(params["served_model_name"])
    if params["model"] is None:
        from engine.hub import SMOLLM2

        return (SMOLLM2.name,)
    path = Path(params["model"]).expanduser()
    if not path.exists():
        return (str(params["model"]),)
    return (path.stem if path.suffix.lower() == ".gguf" else path.resolve().name,)


def join_address(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def child_arguments(command: click.Command, params: Params, **changed: Any) -> list[str]:
    """The command line that gives `command` those of `params` that it knows, secrets left out."""
    values = {**params, **changed}
    options, arguments = [], []
    for param in command.params:
        name = param.name
        value = None if name is None or name in _SECRETS else values.get(name)
        if value is None or param.opts == ["--supervised"]:
            continue
        if isinstance(param, click.Argument):
            arguments.append(str(value))
        elif param.secondary_opts:
            options.append(param.opts[0] if value else param.secondary_opts[0])
        elif isinstance(param, click.Option) and param.is_flag:
            options += [param.opts[0]] if value else []
        else:
            options += [f"{param.opts[0]}={each}" for each in (value if param.multiple else (value,))]
    return [str(command.name), *options, "--", *arguments]


@contextlib.contextmanager
def reserved_port(host: str, port: int, *, shared: bool) -> Iterator[int]:
    """The port, checked to be free; where several processes are to share it, held (and found, if it is 0) meanwhile.

    Raises: ConfigError.
    """
    check_port(host, port, "--grpc-port")
    if not shared:
        yield port
        return
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # Bound but not listening: it takes no connections, and only processes that share it can bind it too.
    with socket.socket(family, kind) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
        yield holder.getsockname()[1]


def check_port(host: str, port: int, option: str) -> None:
    """Raises ConfigError where the port is taken, before anything slow begins."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {join_address(host, port)} ({option}): {error.strerror}") from error
