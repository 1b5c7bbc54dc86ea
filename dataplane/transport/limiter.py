"""A first-come, first-served limit on the bytes in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress


class ResourceLimiter:
    """A limit for one event loop. A request over the whole limit runs alone instead of never."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    def __repr__(self) -> str:
        return (
            f"<ResourceLimiter {self.used_bytes}/{self.limit_bytes} bytes, {self.waiting} waiting>"
        )

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._queue)

    async def acquire(self, nbytes: int) -> None:
        """Wait for space in order of arrival. `release` frees it, and so does cancelling the
        wait."""
        if not self._queue and self._fits(nbytes):
            self.used_bytes += nbytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (nbytes, turn)
        self._queue.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(nbytes)  # the space was granted just as the wait was cancelled
            else:
                with suppress(ValueError):  # already skipped by `_admit`
                    self._queue.remove(entry)
                self._admit()
            raise

    def release(self, nbytes: int) -> None:
        self.used_bytes -= nbytes
        self._admit()

    def _admit(self) -> None:
        while self._queue and (self._queue[0][1].cancelled() or self._fits(self._queue[0][0])):
            nbytes, turn = self._queue.popleft()
            if not turn.cancelled():
                self.used_bytes += nbytes
                turn.set_result(None)

    def _fits(self, nbytes: int) -> bool:
        return self.used_bytes == 0 or self.used_bytes + nbytes <= self.limit_bytes
