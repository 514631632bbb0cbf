"""Where a server listens: addresses as they are written, Unix sockets, and the folder of those that nobody has named.

Knows no RPC and no setting.
"""

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc

from engine.own_folder import temporary_folder
from fulcrum.tls import Identity, server_credentials


def is_unix(address: str) -> bool:
    """Whether the address names a Unix socket."""
    return address.startswith("unix:")


def unix_path(address: str) -> Path:
    """The socket's path in unix:/PATH or unix:///PATH."""
    path = address.removeprefix("unix:")
    return Path(path.removeprefix("//") if path.startswith("///") else path)


def split_address(address: str, name: str = "address") -> tuple[str, int]:
    """HOST:PORT or [IPV6]:PORT, apart. Raises ValueError naming the setting `name`."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{name} must be HOST:PORT or unix:/PATH, not {address!r}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{name}: an IPv6 host is written in brackets, [HOST]:PORT, not {address!r}")
    return host, int(port)


def bind(server: grpc.aio.Server, address: str, identity: Identity | None, cleanup: AsyncExitStack) -> str:
    """Binds, and returns the address with its real port. A Unix socket is its owner's alone. Raises OSError."""
    if not is_unix(address):
        try:
            if identity is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, server_credentials(identity))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        return f"{address.rpartition(':')[0]}:{port}"
    path = unix_path(address)
    try:
        taken = _answers(path)  # grpc would take the name over, and leave the other server without
    except OSError as error:  # such as a path that is too long
        raise OSError(f"cannot listen on {address}: {error.strerror or error}") from error
    if taken:
        raise OSError(f"cannot listen on {address}: another server does")
    earlier = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    finally:
        os.umask(earlier)
    cleanup.callback(path.unlink, missing_ok=True)
    return f"unix:{path}"


def _answers(path: Path) -> bool:
    """Whether somebody listens on a Unix socket (a killed server leaves its file behind)."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:  # its queue is full: it is stopped, perhaps
            pass
    return True


@contextlib.contextmanager
def swept_runtime_dir() -> Iterator[None]:
    """Removes what killed servers have left there; no other server of ours binds there until the block is left."""
    folder = runtime_dir()
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for path in folder.glob("admin-*.sock"):
            if path.is_socket() and not _answers(path):
                path.unlink(missing_ok=True)
        yield
    finally:
        os.close(handle)


def runtime_dir() -> Path:
    """A folder of this user's own (0700) for sockets. Raises PermissionError where somebody else has taken its name."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "fulcrum" if base else temporary_folder() / f"fulcrum-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder that only user {os.getuid()} may enter")
    return folder
