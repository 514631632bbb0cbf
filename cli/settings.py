"""From parsed options to the rooms' own settings, and from a command's options to a child's command line."""

import contextlib
import inspect
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click
import grpc

from engine.config import EngineConfig
from fulcrum.keys import checked_key
from fulcrum.tls import channel_credentials
from gateway.config import GatewayConfig
from service.config import ServiceConfig
from service.parsers.registry import AUTO

Params = Mapping[str, Any]
_Record = TypeVar("_Record")

# Handed to children in their environment, which only their owner can read.
_SECRETS = ("api_keys", "engine_key", "gateway_keys")
# Where a child is to have these, its command line says so.
_OF_THE_PARENT = tuple(
    f"FULCRUM_{name}"
    for name in (
        *("API_KEY_FILE", "TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA", "HTTPS_CERT", "HTTPS_KEY", "HTTPS_CLIENT_CA"),
        *("ENGINE_CA", "ENGINE_CERT", "ENGINE_CERT_KEY", "ENGINE_TLS_NAME", "ENGINE_ADMIN", "METRICS_PORT"),
    )
)


class ConfigError(click.ClickException):
    """A setting is wrong: one line, exit status 2."""

    exit_code = 2


def engine_config(params: Params, model: Path) -> EngineConfig:
    """The engine core's settings. Raises ConfigError."""
    return _checked(lambda: record(EngineConfig, params, model=model, seed=None))  # a command's seed is its samples'


def service_config(params: Params, model: Path, *, grpc_port: int, admin: bool = True) -> ServiceConfig:
    """The settings of a service process; of several, one alone serves administration. Raises ConfigError."""
    own = {
        "model": model,
        "served_model_names": served_names(params),
        "address": join_address(params["host"], grpc_port),
        "admin_address": (params["admin_address"] or AUTO) if admin else None,
        "grace_seconds": params["grace"],
        "reuse_port": (params["service_workers"] or 1) > 1,
    }
    return _checked(lambda: record(ServiceConfig, params, **own))


def gateway_config(params: Params, engines: tuple[str, ...]) -> GatewayConfig:
    """The gateway's settings. Raises ConfigError."""
    return _checked(lambda: record(GatewayConfig, params, engines=engines, shutdown_seconds=params["grace"]))


def record(kind: Callable[..., _Record], params: Params, **own: Any) -> _Record:
    """A dataclass out of `own` and of the options named as its other fields; where one is None, its default stays."""
    names = inspect.signature(kind).parameters
    return kind(**{name: params[name] for name in names if params.get(name) is not None} | own)


def engine_credentials(params: Params) -> grpc.ChannelCredentials | None:
    """For TLS to the engine, where it speaks that. Raises ConfigError."""
    if params["engine_ca"] is None:
        return None
    return _checked(lambda: channel_credentials(params["engine_ca"], params["engine_cert"], params["engine_cert_key"]))


def first_key(params: Params) -> str | None:
    """The key that a client shows: of several, which a server's variable may hold, the first. Raises ConfigError."""
    keys = (params["api_key"] or "").split()
    return _checked(lambda: checked_key("api_key", keys[0])) if keys else None


def is_http(url: str) -> bool:
    """Whether this is http(s)://HOST[:PORT], with or without a path."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return False
    return bool(known) and url.isascii() and url.isprintable()


def _checked(make: Callable[[], _Record]) -> _Record:
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
    if params["served_model_names"]:
        return tuple(params["served_model_names"])
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
        # Connections of a server that has just ended keep its port for a minute, though gRPC itself could listen there.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(address)
        yield holder.getsockname()[1]


def check_ports(params: Params, *options: str) -> None:
    """Raises ConfigError where the port of one of these options is taken, or is another's too."""
    known: dict[tuple[str, int], str] = {}
    for option in options:
        host = params["metrics_host" if option == "--metrics-port" else "host"]
        port = params[option.removeprefix("--").replace("-", "_")]
        check_port(host, port, option)
        if port and (other := known.setdefault((host, port), option)) != option:
            raise ConfigError(f"{other} and {option} are both {port}")


def check_port(host: str, port: int | None, option: str) -> None:
    """Raises ConfigError where the port, if there is one, is taken: before anything slow begins."""
    if port is None:
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # the latter of names that no host can have
        why = error.strerror if isinstance(error, OSError) else "this is no host's name"
        raise ConfigError(f"cannot listen on {join_address(host, port)} ({option}): {why}") from error
