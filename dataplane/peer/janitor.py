"""What happens by the clock: lease limits, warm pages ahead of use, leaving when nobody is left.

One loop, a few times a second. It decides nothing that a message decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dataplane.peer.claims import Claims
from dataplane.peer.host import Entry, Host
from dataplane.peer.room import Room
from dataplane.peer.sessions import Sessions

log = logging.getLogger(__name__)

TICK_S = 0.2
PREFAULT_AHEAD_BYTES = 256 << 20
PREFAULT_STEP_BYTES = 16 << 20


class Janitor:
    def __init__(
        self,
        host: Host,
        sessions: Sessions,
        room: Room,
        claims: Claims,
        settle: Callable[[Entry], None],
    ) -> None:
        self.host = host
        self.sessions = sessions
        self.room = room
        self.claims = claims
        self.settle = settle
        self._faulted = 0

    async def run(
        self, stop: asyncio.Event, linger_s: float | None, linger_unread_s: float | None
    ) -> None:
        """Until `stop` is set, by somebody or by this when the peer has lingered long enough."""
        faulting: asyncio.Task[None] | None = None
        while not stop.is_set():
            now = self.host.now()
            for entry in list(self.host.entries.values()):
                ended = entry.store.expire(now)
                if ended:
                    log.info("%d leases of %r were over their limit", len(ended), entry.name)
                    self.settle(entry)
            self.room.check_stuck()
            if self._may_leave(now, linger_s, linger_unread_s):
                log.info("nobody is left: peer %r ends", self.host.name)
                stop.set()
                return
            if faulting is None or faulting.done():
                faulting = asyncio.create_task(self._prefault())
            try:
                async with asyncio.timeout(TICK_S):
                    await stop.wait()
            except TimeoutError:
                pass

    def _may_leave(self, now: float, linger_s: float | None, linger_unread_s: float | None) -> bool:
        if linger_s is None or len(self.sessions):
            return False
        unread = any(entry.store.unread for entry in self.host.entries.values())
        linger = max(linger_s, linger_unread_s or 0) if unread else linger_s
        return now - self.sessions.last_seen > linger

    async def _prefault(self) -> None:
        """Keep some pages above the highest use warm: the first touch of a page is the slow one."""
        space, loop = self.host.space, asyncio.get_running_loop()
        ahead = min(PREFAULT_AHEAD_BYTES, space.size_bytes // 4)
        while self._faulted < (goal := min(space.high_water + ahead, space.size_bytes)):
            start, step = self._faulted, min(PREFAULT_STEP_BYTES, goal - self._faulted)
            self._faulted += step
            await loop.run_in_executor(None, self.host.arena.prefault, start, step)
