"""The Generate calls of this process that are open, to be refused, waited for or ended all at once. Knows no RPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import grpc

from service.errors import ApiError


class LiveCalls:
    """Admission to, and the end of, the calls of one process.

    Args:
        timeout: seconds after which a call ends DEADLINE_EXCEEDED (None: never).
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._scopes: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusal: Callable[[], ApiError] | None = None
        self._ended: dict[asyncio.Timeout, Callable[[], ApiError]] = {}

    def __len__(self) -> int:
        return len(self._scopes)

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Holds an open call. Raises the ApiError of `refuse` at once, that of `interrupt` where it waits."""
        if self._refusal is not None:
            raise self._refusal()
        scope = asyncio.timeout(self._timeout)
        try:
            async with scope:
                self._scopes.add(scope)
                self._idle.clear()
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            if scope in self._ended:
                raise self._ended[scope]() from None
            text = f"the server's limit of {self._timeout:g} s for a request has passed"
            raise ApiError(grpc.StatusCode.DEADLINE_EXCEEDED, "REQUEST_TIMEOUT", text) from None
        finally:
            self._scopes.discard(scope)
            self._ended.pop(scope, None)
            if not self._scopes:
                self._idle.set()

    def refuse(self, error: Callable[[], ApiError]) -> None:
        """New calls are refused from now on; open ones go on."""
        self._refusal = error

    def end(self, error: Callable[[], ApiError]) -> int:
        """Refuses new calls and ends every open one, also one that waits for its reader. Returns how many were open."""
        self._refusal = error
        return self.interrupt(error)

    def interrupt(self, error: Callable[[], ApiError]) -> int:
        """Ends every open call, also one that waits for its reader; new ones are taken. Returns how many were open."""
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            if not scope.expired():
                self._ended[scope] = error
                scope.reschedule(now)
        return len(self._scopes)

    async def idle(self, seconds: float) -> bool:
        """Waits until no call is open, that many seconds at most. Whether that came."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self._idle.is_set()
