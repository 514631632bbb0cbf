"""The two files of `fulcrum batch`: requests, checked as a whole before the first is sent, and answers, which are only
ever appended to. Knows no network, and of a request only what surrounds its body.
"""

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_SYNC_SECONDS = 1.0
_FAULTS_TOLD = 20


class BatchFileError(ValueError):
    """A file is not what it should be; the message names the lines."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request."""

    custom_id: str
    url: str
    body: dict[str, Any]


class Requests:
    """The requests of an input file, of which only the names are kept: the file is read again for their bodies.

    Blank lines and further fields of a line are ignored.
    """

    def __init__(self, path: Path) -> None:
        """Raises: BatchFileError that names every line at fault (twenty of them at most); OSError."""
        self._path = path
        self._lines: dict[str, int] = {}
        faults: list[str] = []
        for number, line in _lines(path):
            try:
                row = _row(line)
                if (earlier := self._lines.setdefault(row.custom_id, number)) != number:
                    raise ValueError(f"custom_id {row.custom_id!r} is that of line {earlier} too")
            except ValueError as error:
                faults.append(f"{path}: line {number}: {error}")
        if len(faults) > _FAULTS_TOLD:
            faults[_FAULTS_TOLD:] = [f"and {len(faults) - _FAULTS_TOLD} more"]
        if faults:
            raise BatchFileError("\n".join(faults))

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, custom_id: object) -> bool:
        return custom_id in self._lines

    def rows(self, done: Container[str]) -> Iterator[Row]:
        """The requests that are not done, in their order. Raises: OSError."""
        for _, line in _lines(self._path):
            row = _row(line)
            if row.custom_id not in done:
                yield row


class Answers:
    """An output file, held by one process at a time. Close it.

    A line is written in one piece when its answer is there, and reaches the disk within a second or with the next
    line after that. So a process may be killed at any moment: what is lost is at most the last line, which is then
    cut off here and counts as not done.

    Attributes:
        done: custom_id of every answer in the file.
        failed: how many of them are errors.
    """

    def __init__(self, path: Path, requests: Requests) -> None:
        """Raises: BatchFileError for a file that holds anything else than answers to these requests; OSError."""
        self.done: set[str] = set()
        self.failed = 0
        self._synced = time.monotonic()
        self._file = path.open("a+b")
        try:
            self._lock(path)
            self._resume(path, requests)
            _sync_folder(path.parent)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def add(self, answer: dict[str, Any]) -> None:
        """Appends an answer. Raises: OSError."""
        self._file.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        self._count(answer)
        if time.monotonic() - self._synced >= _SYNC_SECONDS:
            self._sync()

    def close(self) -> None:
        """Brings everything to the disk. Raises: OSError."""
        with self._file:
            self._sync()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BatchFileError(f"{path}: another process writes to it") from error

    def _resume(self, path: Path, requests: Requests) -> None:
        """Reads the answers that are there, and cuts off what a killed process left of its last line."""
        whole = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                answer = json.loads(line)
                custom_id = answer["custom_id"]
                known = custom_id in requests
                if known and custom_id not in self.done:
                    self._count(answer)
                    whole += len(line)
                    continue
            except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
                raise BatchFileError(f"{path}: line {number} is no answer of a batch") from error
            why = "is answered by an earlier line" if known else "is not in the input"
            raise BatchFileError(f"{path}: line {number}: custom_id {custom_id!r} {why}")
        self._file.truncate(whole)

    def _count(self, answer: dict[str, Any]) -> None:
        failed = answer["error"] is not None or answer["response"]["status_code"] >= 400
        self.done.add(answer["custom_id"])
        self.failed += failed


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that hold something, with their numbers from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _row(line: bytes) -> Row:
    """Raises: ValueError."""
    try:
        fields = json.loads(line, parse_constant=_no_number, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError("it must be a JSON object")
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be a string, and not empty")
    if fields.get("method") != "POST":
        raise ValueError("method must be POST")
    if url not in URLS:
        raise ValueError(f"url must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError("body must be a JSON object")
    if body.get("stream"):
        raise ValueError("body.stream must not be true: answers of a batch come whole")
    return Row(custom_id, url, body)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # and would be sent as Infinity
        raise ValueError(f"{text} is more than a number holds")
    return value


def _sync_folder(folder: Path) -> None:
    """Makes the name of a new file last. Where folders cannot be synced, that is not ours to mend."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
