"""How far the backup is behind, and the wait for it: nothing leaves before it has caught up."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from dataplane.errors import Unavailable
from dataplane.peer.tasks import in_time


class Progress:
    def __init__(self) -> None:
        self.done = 0
        """operations of this peer's shards so far"""
        self.confirmed = 0
        """of them, those that the backup has"""
        self.required = False
        """the roster calls the backup in sync, so it must have them"""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        """with the number of operations that each waits for, which only grows"""
        self._holds: set[asyncio.Task[Any]] = set()
        self.on_awaited: Callable[[], None] = lambda: None
        """called when somebody begins to wait for the backup"""

    def __repr__(self) -> str:
        word = "required" if self.required else "not required"
        return f"<Progress {self.confirmed} of {self.done}, {word}>"

    def hold(self, task: asyncio.Task[Any]) -> None:
        """Nothing leaves before this is done either: a second copy of bytes is on its way here."""
        self._holds.add(task)
        task.add_done_callback(self._holds.discard)

    @property
    def is_settled(self) -> bool:
        return not self._holds and self._has_all

    @property
    def is_held(self) -> bool:
        """Whether something else than the backup is waited for."""
        return bool(self._holds)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for the backup."""
        return bool(self._waiting)

    @property
    def _has_all(self) -> bool:
        return not self.required or self.confirmed >= self.done

    def move(self, confirmed: int) -> None:
        """The backup has so many operations."""
        self.confirmed = confirmed
        self.wake()

    def wake(self) -> None:
        waiting = self._waiting
        while waiting and (not self.required or self.confirmed >= waiting[0][0]):
            _, reached = waiting.popleft()
            if not reached.done():
                reached.set_result(None)

    def reached(self, until: float) -> asyncio.Future[None]:
        """Done when the backup has all that was done up to now. Unavailable when it is not in time
        (monotonic)."""
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._has_all:
            reached.set_result(None)
        else:
            self._waiting.append((self.done, reached))
            in_time(reached, until, _late)
            self.on_awaited()
        return reached

    def confirmation(self, until: float) -> Awaitable[None]:
        """As `settled`, and as `reached` where nothing but the backup is waited for: without a
        task."""
        return self.settled(until) if self._holds else self.reached(until)

    async def settled(self, until: float) -> None:
        """Until the backup has all that was done up to now, and what holds it up is done.
        Unavailable when it is not in time (monotonic)."""
        if self._holds:
            left = until - time.monotonic()
            limit_s = max(0.0, left) if math.isfinite(left) else None
            _, late = await asyncio.wait(list(self._holds), timeout=limit_s)
            if late:
                raise _late()
        await self.reached(until)


def _late() -> Unavailable:
    return Unavailable(
        "the backup of this host's peer did not confirm the call in time, which may or "
        "may not have taken effect: repeat it when the roster names another backup, or, with "
        "replicas=2, when there is room for the second copies"
    )
