"""Temporary folders for sockets, which do not outlive a killed process for long: the next one removes what it left."""

import fcntl
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "fulcrum-own-"
_YOUNG_SECONDS = 60.0  # one that may not be locked yet
_LONGEST = 70  # bytes: with the names of folder and socket behind it, a socket's address may have 107


def temporary_folder() -> Path:
    """The system's for temporary files (TMPDIR), or /tmp where that one's path is too long for sockets in it."""
    folder = tempfile.gettempdir()
    return Path(folder if len(os.fsencode(folder)) <= _LONGEST else "/tmp")


class OwnFolder(tempfile.TemporaryDirectory[str]):
    """A folder that is locked while its process lives: the lock ends with it, however it ends."""

    def __init__(self) -> None:
        """Makes it, and removes this user's folders of processes that were killed."""
        sweep()
        super().__init__(prefix=_PREFIX, dir=temporary_folder())
        self._lock: int | None = _locked(Path(self.name))

    def cleanup(self) -> None:
        """Removes it."""
        super().cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sweep() -> None:
    """Removes this user's folders that nobody has locked."""
    for folder in temporary_folder().glob(f"{_PREFIX}*"):
        try:
            found = folder.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > _YOUNG_SECONDS:
                lock = _locked(folder)
                try:
                    shutil.rmtree(folder)
                finally:
                    os.close(lock)
        except OSError as error:  # it is in use, a link, or somebody else removes it too
            logger.debug("%s stays: %s", folder, error)


def _locked(folder: Path) -> int:
    """A file descriptor that holds the lock. Raises: OSError where another one does."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
