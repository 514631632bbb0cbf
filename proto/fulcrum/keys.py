"""API keys: whose a key is and what it may ask for. Gateway and engine read them from the same file.

A line of the file: TENANT sha256:HEX [priority=N] [admin] [gateway]. Blank lines, and what follows a #, are skipped.
Keys are random and long, so that one round of SHA-256 hides them.
"""

import hashlib
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

# Metadata in which a gateway, and nobody else, names the tenant that it speaks for, and that tenant's limit.
TENANT, MAX_PRIORITY = "x-fulcrum-tenant", "x-fulcrum-max-priority"
# Of keys that are given without a file.
DEFAULT_TENANT = "default"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_PRIORITY = re.compile(r"priority=(-?[0-9]{1,9})")
_SCHEME = "bearer "
_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Key:
    """What the holder of a key may do.

    Args:
        tenant: whose it is; cached prefixes are shared within a tenant.
        digest: SHA-256 of the key.
        max_priority: highest priority of a request (None: the server's limit for all).
        admin: may call AdminService over TCP.
        gateway: may speak for other tenants.
    """

    tenant: str
    digest: bytes
    max_priority: int | None = None
    admin: bool = False
    gateway: bool = False

    def line(self) -> str:
        """The key as a line of the file."""
        options = [] if self.max_priority is None else [f"priority={self.max_priority}"]
        options += [name for name in ("admin", "gateway") if getattr(self, name)]
        return " ".join((self.tenant, f"sha256:{self.digest.hex()}", *options))


def digest(key: str) -> bytes:
    """The hash by which a key is known."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_tenant(name: str) -> bool:
    """Whether a tenant may be called so."""
    return _NAME.fullmatch(name) is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address bound to `host`: the one that may be open without a key."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bearer(authorization: object) -> str | None:
    """The key in `Bearer KEY`, or None where there is none."""
    if not isinstance(authorization, str) or not authorization.lower().startswith(_SCHEME):
        return None
    return authorization[len(_SCHEME) :].strip()


def checked_key(name: str, key: str) -> str:
    """The key. Raises: ValueError naming the setting `name`, where no header can carry it."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{name}: a key is printable ASCII without blanks")
    return key


class KeyRing:
    """The keys of a server. A changed file is read again within half a second, at the next question.

    Attributes:
        open: there are no keys, and everybody is let in.
    """

    def __init__(self, keys: Iterable[str] = (), path: Path | None = None, gateway_keys: Iterable[str] = ()) -> None:
        """Reads the file.

        Args:
            keys: of the tenant `default`.
            path: the file with further ones.
            gateway_keys: these may speak for other tenants.

        Raises: ValueError: a key that no header can carry, or a file that is unreadable, wrong or without keys.
        """
        self._given = [_given("api_keys", key) for key in keys]
        self._given += [_given("gateway_keys", key, gateway=True) for key in gateway_keys]
        self._path = path
        self._version: tuple[int, ...] = ()
        self._looked = time.monotonic()
        self._filed: list[Key] = []
        if path is not None:
            try:
                self._version = _version(path)
                self._filed = read_keys(path)
            except OSError as error:
                raise ValueError(f"api_key_file {path}: {error.strerror or error}") from error
            if not self._filed:
                raise ValueError(f"api_key_file {path}: there is no key in it")
        self.open = not self._given and path is None

    @property
    def has_admin(self) -> bool:
        """Whether a key may call AdminService over TCP."""
        return any(key.admin for key in self._filed)

    def find(self, shown: str) -> Key | None:
        """What is known of a key. Every hash is compared, so that the time tells nothing."""
        self._refresh()
        hashed = digest(shown)
        found = None
        for key in (*self._given, *self._filed):
            if hmac.compare_digest(hashed, key.digest):
                found = key
        return found

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._looked < _POLL_SECONDS:
            return
        self._looked = now
        try:
            version = _version(self._path)
            if version == self._version:
                return
            if not version[-1]:
                raise ValueError(f"api_key_file {self._path}: it is empty, as one that is being written")
            self._filed = read_keys(self._path)
        except (OSError, ValueError) as error:
            version = ()
            if self._version:  # once, not at every look
                logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("api_key_file %s has changed: %d keys", self._path, len(self._filed))
        self._version = version


def read_keys(path: Path) -> list[Key]:
    """The keys in a file. Raises: OSError; ValueError naming the line, never its text."""
    keys = []
    for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").splitlines(), 1):
        if words := line.partition("#")[0].split():
            try:
                keys.append(_parsed(words))
            except ValueError as error:
                raise ValueError(f"api_key_file {path}, line {number}: {error}") from error
    return keys


def _parsed(words: list[str]) -> Key:
    hashed = _HASH.fullmatch(words[1]) if len(words) > 1 else None
    if hashed is None or not is_tenant(words[0]):
        raise ValueError("must be TENANT sha256:HEX [priority=N] [admin] [gateway]; `fulcrum key TENANT` makes one")
    max_priority = None
    for word in words[2:]:
        if limit := _PRIORITY.fullmatch(word):
            max_priority = int(limit[1])
        elif word not in ("admin", "gateway"):
            raise ValueError("an option is none of priority=N, admin and gateway")
    return Key(words[0], bytes.fromhex(hashed[1]), max_priority, "admin" in words[2:], "gateway" in words[2:])


def _given(name: str, key: str, *, gateway: bool = False) -> Key:
    return Key(DEFAULT_TENANT, digest(checked_key(name, key)), gateway=gateway)


def _version(path: Path) -> tuple[int, ...]:
    """Changes when the file does; its size comes last."""
    found = path.stat()
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size
