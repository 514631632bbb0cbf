"""Finds a marker in a growing text. Knows nothing of what the marker means."""


class Until:
    """The text up to a marker, given out as soon as no marker can begin in it.

    Blanks right before the marker belong to it, so they are held back too.
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._blanks: list[str] = []
        self._held = ""  # the beginning of a marker, perhaps

    def step(self, piece: str) -> tuple[str, str, str]:
        """Takes a piece; returns the text before the marker, the marker with its blanks ("": not yet), and the rest."""
        if not self._held and piece.isspace():
            self._blanks.append(piece)  # however many come, each costs the same
            return "", "", ""
        text = self._held + piece
        at = text.find(self._marker)
        end = at if at >= 0 else len(text) - partial(text, self._marker, len(text))
        before = text[:end].rstrip()
        blanks = text[len(before) : end]
        if before:
            before = self._release() + before
        self._blanks.append(blanks)
        if at < 0:
            self._held = text[end:]
            return before, "", ""
        self._held = ""
        return before, self._release() + self._marker, text[at + len(self._marker) :]

    def finish(self) -> str:
        """Returns what was held back: no marker came of it."""
        held, self._held = self._held, ""
        return self._release() + held

    def _release(self) -> str:
        blanks = "".join(self._blanks)
        self._blanks.clear()
        return blanks


def partial(text: str, marker: str, most: int) -> int:
    """The length, `most` at most, of the longest end of `text` that is the beginning of `marker` and not all of it."""
    for size in range(min(most, len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
