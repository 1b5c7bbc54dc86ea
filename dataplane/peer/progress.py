"""How far the backup is behind, and the wait for it: nothing leaves before it has caught up."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from dataplane.errors import Unavailable


class Progress:
    def __init__(self) -> None:
        self.done = 0
        """operations of this peer's shards so far"""
        self.confirmed = 0
        """of them, those that the backup has"""
        self.required = False
        """the roster calls the backup in sync, so it must have them"""
        self._moved = asyncio.Event()
        self._holds: set[asyncio.Task[Any]] = set()

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
    def _has_all(self) -> bool:
        return not self.required or self.confirmed >= self.done

    def move(self, confirmed: int) -> None:
        """The backup has so many operations."""
        self.confirmed = confirmed
        self.wake()

    def wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def settled(self, until: float) -> None:
        """Until the backup has all that was done up to now. Unavailable when it is not in time."""
        goal, holds = self.done, list(self._holds)
        left = until - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, left) if math.isfinite(left) else None):
                if holds:
                    await asyncio.wait(holds)
                while self.required and self.confirmed < goal:
                    await self._moved.wait()
        except TimeoutError:
            raise Unavailable(
                "the backup of this host's peer did not confirm the call in time, which may or may "
                "not have taken effect: repeat it when the roster names another backup, or, with "
                "replicas=2, when there is room for the second copies"
            ) from None
