"""What happens by the clock: lease limits, warm pages ahead of use, leaving when nobody is left.

One loop, a few times a second. It decides nothing that a message decides.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dataplane.peer.membership.lingering import Lingering

if TYPE_CHECKING:
    from dataplane.peer.peer import Peer

log = logging.getLogger(__name__)

TICK_S = 0.2
PREFAULT_AHEAD_BYTES = 256 << 20
PREFAULT_STEP_BYTES = 16 << 20


class Janitor:
    def __init__(self, peer: Peer, lingering: Lingering) -> None:
        self.host = peer.host
        self.peer = peer
        self.lingering = lingering
        self.expired_leases = 0
        self._faulted = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set, by somebody or by this when the peer has lingered long enough."""
        peer, lingers = self.peer, self.lingering.linger_s is not None
        self.lingering.begin()
        faulting: asyncio.Task[None] | None = None
        while not stop.is_set():
            now = self.host.now()
            self.expired_leases += peer.finishing.expire(now)
            if peer.standstill.lasts(peer.room.producers > 0, peer.share.writers > 0):
                peer.share.end_in_vain()
                if not peer.standstill.can_spill:
                    peer.room.end_in_vain()
            wanted = self.lingering.is_wanted() or peer.membership.plane_is_wanted()
            if lingers and not wanted:
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

    async def _prefault(self) -> None:
        """Keep some pages above the highest use warm: the first touch of a page is the slow one.

        Not before half of them are used: a short burst of puts needs the processor for itself.
        """
        space, loop = self.host.space, asyncio.get_running_loop()
        ahead = min(PREFAULT_AHEAD_BYTES, space.size_bytes // 4)
        if self._faulted - space.high_water > ahead // 2:
            return
        while self._faulted < (goal := min(space.high_water + ahead, space.size_bytes)):
            start, step = self._faulted, min(PREFAULT_STEP_BYTES, goal - self._faulted)
            self._faulted += step
            await loop.run_in_executor(None, self.host.arena.prefault, start, step)
