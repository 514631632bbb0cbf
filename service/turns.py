"""Work that waits is done in turn: whoever has sent much of it does not hold up the others. Knows no work."""

import asyncio
from collections import deque


class Turns:
    """Admits so much at once; of what waits, one piece of everyone after another. Belongs to one event loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of their turns

    async def take(self, whose: str) -> None:
        """Returns when it is the caller's turn, who then has a place until `leave`."""
        if self._free:
            self._free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(whose, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it came at the same moment
                self.leave()
            raise

    def leave(self) -> None:
        """Gives the place to whose turn it is."""
        while self._waiting:
            whose = next(iter(self._waiting))
            queue = self._waiting.pop(whose)
            place = queue.popleft()
            if queue:
                self._waiting[whose] = queue  # behind the others
            if not place.done():
                place.set_result(None)
                return
        self._free += 1
