"""Looks at the processes below one, as Linux tells of them."""

import contextlib
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """All processes below this one. What ends while it is looked at has no children (proc(5): ENOENT, ESRCH)."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for child in map(int, (thread / "children").read_text().split()):
                    found += [child, *descendants(child)]
    return found
