"""How far the backup is behind, and the wait for it: nothing leaves before it has caught up."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

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
        self._waiting = OrderedDict[asyncio.Future[None], int]()
        """with the number of operations that each waits for, which only grows"""
        self.on_awaited: Callable[[], None] = lambda: None
        """called when somebody begins to wait for the backup"""

    def __repr__(self) -> str:
        word = "required" if self.required else "not required"
        return f"<Progress {self.confirmed} of {self.done}, {word}>"

    @property
    def is_settled(self) -> bool:
        return not self.required or self.confirmed >= self.done

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for the backup."""
        return bool(self._waiting)

    def move(self, confirmed: int) -> None:
        """The backup has so many operations."""
        self.confirmed = confirmed
        self.wake()

    def wake(self) -> None:
        waiting = self._waiting
        while waiting and (not self.required or self.confirmed >= next(iter(waiting.values()))):
            reached, _ = waiting.popitem(last=False)
            if not reached.done():
                reached.set_result(None)

    def reached(self, until: float) -> asyncio.Future[None]:
        """Done when the backup has all that was done up to now. Unavailable when it is not in time
        (monotonic)."""
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.is_settled:
            reached.set_result(None)
        else:
            self._waiting[reached] = self.done
            reached.add_done_callback(self._waits_no_more)
            in_time(reached, until, _late)
            self.on_awaited()
        return reached

    def _waits_no_more(self, reached: asyncio.Future[None]) -> None:
        """Out of time, or given up: a backup that is not there may be awaited again and again."""
        self._waiting.pop(reached, None)


def _late() -> Unavailable:
    return Unavailable(
        "the backup of this host's peer did not confirm the call in time, which may or "
        "may not have taken effect: repeat it when the roster names another backup"
    )
