"""When to launch the next step while the device works on one: as late as the device stays busy.

What arrives until then has part in that step, instead of waiting for the one after it. How long a step takes is known
from earlier ones of about its size; an estimate is a lower bound of what was seen of late, so that it errs towards
launching early. Knows no device and no clock: it is told the time, in seconds of any one clock.
"""

from engine.step import Step

# An estimate rises by this much at most with each step of its kind, and falls at once.
_RISE = 1.02
# Of the estimate, and on top of what scheduling and launching took: room for what was not foreseen.
_TRUST = 0.97
_SPARE_SECONDS = 0.0005


class Pacer:
    """Follows the steps of one device.

    Call `launched` after the launch of a step, `collected` when its result is there, or it has failed.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, bool], float] = {}
        self._launch_seconds = 0.0
        self._kinds: list[tuple[int, bool]] = []  # of the steps in flight, oldest first
        self._oldest_began = 0.0

    def hold(self, now: float) -> float:
        """Seconds to wait before the next step is scheduled; 0 if that is due, or nothing is known."""
        if len(self._kinds) != 1:
            return 0.0
        expected = self._seconds.get(self._kinds[0])
        if expected is None:
            return 0.0
        due = self._oldest_began + expected * _TRUST - self._launch_seconds - _SPARE_SECONDS
        return max(0.0, due - now)

    def launched(self, step: Step, began: float, now: float) -> None:
        """A step has been launched, whose scheduling began at `began`."""
        spent = now - began
        self._launch_seconds = max(spent, 0.9 * self._launch_seconds)
        if not self._kinds:
            self._oldest_began = now
        self._kinds.append(_kind(step))

    def collected(self, busy_seconds: float, now: float) -> None:
        """The oldest step in flight has ended (busy_seconds 0: unknown); the next one, if there is one, began then."""
        kind = self._kinds.pop(0)
        self._oldest_began = now
        if busy_seconds > 0:
            self._seconds[kind] = min(busy_seconds, self._seconds.get(kind, busy_seconds) * _RISE)


def _kind(step: Step) -> tuple[int, bool]:
    """Steps of a kind take about as long: their tokens to within a sixteenth, and whether they hold chunks."""
    tokens = step.num_tokens
    coarse = max(0, tokens.bit_length() - 5)
    return tokens >> coarse << coarse, tokens > len(step.works)
