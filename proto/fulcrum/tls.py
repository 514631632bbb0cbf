"""Certificates from PEM files: checked when a server starts, and read again when they change."""

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate chain and its key. `identity` makes one out of settings.

    Args:
        cert, key: PEM files; the key has no passphrase.
        client_ca: only clients with a certificate of these authorities may connect.
        names: of the three settings, for messages.
    """

    cert: Path
    key: Path
    client_ca: Path | None
    names: tuple[str, str, str]

    def context(self) -> ssl.SSLContext:
        """For a server (TLS 1.2 and later; with client_ca 1.3). Raises: ValueError naming the setting that is wrong."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _check_certificates(self.names[0], self.cert)
        if self.client_ca is not None:
            _check_certificates(self.names[2], self.client_ca)
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
            # No session is resumed: its certificate would not be looked at again, though its authority were removed.
            context.minimum_version, context.num_tickets = ssl.TLSVersion.TLSv1_3, 0
        try:
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except ssl.SSLError as error:
            fault = "holds no private key in PEM form, or one with a passphrase"
            if "MISMATCH" in str(error):
                fault = f"is not the key of {self.names[0]} {self.cert}"
            raise ValueError(f"{self.names[1]} {self.key}: {fault}") from error
        except OSError as error:
            raise ValueError(f"{self.names[1]} {self.key}: {error.strerror or error}") from error
        return context

    def version(self) -> tuple[object, ...]:
        """Changes when a file does."""
        found: list[object] = []
        for path in (self.cert, self.key, self.client_ca):
            try:
                stat = None if path is None else path.stat()
            except OSError as error:
                found.append(error.errno)
            else:
                found.append(stat and (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size))
        return tuple(found)


def identity(prefix: str, cert: Path | None, key: Path | None, client_ca: Path | None = None) -> Identity | None:
    """The identity that the settings PREFIX_cert, PREFIX_key and PREFIX_client_ca name; None where there are none.

    Raises: ValueError naming the setting that is missing or wrong.
    """
    names = (f"{prefix}_cert", f"{prefix}_key", f"{prefix}_client_ca")
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise ValueError(f"{names[0]} and {names[1]} must both be given")
    found = Identity(cert, key, client_ca, names)
    found.context()
    return found


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """For one port of a gRPC server; each new connection looks whether the files have changed. Raises: ValueError."""

    def load() -> grpc.ServerCertificateConfiguration:
        identity.context()
        roots = None if identity.client_ca is None else identity.client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration(
            [(identity.key.read_bytes(), identity.cert.read_bytes())], root_certificates=roots
        )

    watched = _Watched(identity, load)
    return grpc.dynamic_ssl_server_credentials(
        watched.value,
        watched.renewed,  # type: ignore[arg-type]  # the stub does not know that None means "as before"
        require_client_authentication=identity.client_ca is not None,
    )


def server_context(identity: Identity) -> ssl.SSLContext:
    """For an HTTPS server; each new connection looks whether the files have changed. Raises: ValueError."""
    watched = _Watched(identity, identity.context)

    def greet(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        watched.renewed()
        connection.context = watched.value

    # Called at each handshake, whether or not the client names a server.
    watched.value.sni_callback = greet
    return watched.value


def channel_credentials(ca: Path, cert: Path | None = None, key: Path | None = None) -> grpc.ChannelCredentials:
    """For a gRPC client.

    Args:
        ca: authorities of which the server must have a certificate.
        cert, key: the client's own, for a server that asks for one.

    Raises: ValueError naming the file (as engine_ca, engine_cert, engine_cert_key) that is missing or wrong.
    """
    _check_certificates("engine_ca", ca)
    if (cert is None) != (key is None):
        raise ValueError("engine_cert and engine_cert_key must both be given")
    if cert is None or key is None:
        return grpc.ssl_channel_credentials(ca.read_bytes())
    Identity(cert, key, None, ("engine_cert", "engine_cert_key", "")).context()
    return grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), cert.read_bytes())


def _check_certificates(name: str, path: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ValueError(f"{name} {path}: holds no certificate in PEM form") from error
    except OSError as error:
        raise ValueError(f"{name} {path}: {error.strerror or error}") from error


class _Watched(Generic[_Value]):
    """What was last made of an identity's files."""

    def __init__(self, identity: Identity, load: Callable[[], _Value]) -> None:
        self._identity = identity
        self._load = load
        self._version = identity.version()
        self.value = load()

    def renewed(self) -> _Value | None:
        """The new value, where the files have changed and are right; `value` is it then. Called by any thread."""
        version = self._identity.version()
        if version == self._version:
            return None
        self._version = version  # wrong files are told once: one may be there before the other
        try:
            self.value = self._load()
        except (ValueError, OSError) as error:
            logger.error("the certificate stays as it was: %s", error)
            return None
        logger.info("the certificate %s has changed", self._identity.cert)
        return self.value
