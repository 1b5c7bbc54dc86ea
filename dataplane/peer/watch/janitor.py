"""What happens by the clock: lease limits, warm pages ahead of use, the end of puts that wait in a
standstill, and that of an embedded peer that nobody wants, with nothing that anybody can want.

One loop, a few times a second. It decides nothing that a message decides.

A standstill is when everybody waits for everybody: a put that waits for room must be told, not
kept. Every peer says who of its clients could still free something; whoever has producers waiting
asks. It must be found a few times in a row with nothing done in between: a claim that is just being
met looks the same. A peer that does not answer may be busy, so its silence ends no wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dataplane.errors import DataplaneError
from dataplane.launch import runs
from dataplane.launch.settings import LINGER_S
from dataplane.peer.host import Caller
from dataplane.wire.peering import CanFree, Stirring

if TYPE_CHECKING:
    from dataplane.peer.peer import Peer

log = logging.getLogger(__name__)

TICK_S = 0.2
PREFAULT_AHEAD_BYTES = 256 << 20
PREFAULT_STEP_BYTES = 16 << 20
ARRIVAL_S = 5.0
"""Whoever started this peer has so long to come, however short it is to linger."""
LOOKS = 3
LOOK_EVERY_S = 0.2
LOOK_AGAIN_S = 2.0
"""After somebody was seen who may free something."""
ASK_S = 2.0


def is_alive(answers: Iterable[Stirring]) -> bool:
    """Whether some of these hosts, so far as they answered, can free rows without being freed."""
    filled, busy = set[str](), set[str]()
    for answer in answers:
        filled |= set(answer.filled)
        busy |= set(answer.busy)
        if answer.held:
            return True
    return bool(filled & busy)


def is_standstill(answers: list[Stirring]) -> bool:
    """Whether nobody is left at all these hosts who could free space.

    Nothing is leased, no claim can be met (those that wait could not, and rows that are ready have
    nobody else to claim them), and every client of partitions with rows waits in a call.
    """
    if is_alive(answers) or not any(answer.filled for answer in answers):
        return False
    return any(answer.claims for answer in answers) or not any(a.claimable for a in answers)


class Standstill:
    def __init__(self, peer: Peer) -> None:
        self.peer, self.host, self.mesh = peer, peer.host, peer.mesh
        self._looks = 0
        self._done: list[int] = []
        """operations of the hosts at the last look"""
        self._looking: asyncio.Task[None] | None = None
        self._next_look = 0.0
        self._alive = ""
        """where somebody was seen at the last look: asked first the next time"""
        self.mesh.handlers[CanFree] = self._asked

    @property
    def can_spill(self) -> bool:
        """Whether bytes, but no rows, still find room where nobody frees any."""
        return self.peer.spilling is not None and not self.peer.spilling.exhausted

    def lasts(self, for_bytes: bool, for_rows: bool) -> bool:
        """Called by the clock: was it found often enough by now? for_bytes, for_rows: what
        producers of this host wait for room for."""
        waits = for_rows or for_bytes and not self.can_spill
        if not waits or is_alive([self._here()]):
            self._looks = 0
        elif self.host.solo:
            self._note([self._here()])
        elif (self._looking is None or self._looking.done()) and self.host.now() > self._next_look:
            self._looking = self.mesh.spawn(self._look())
        found = self._looks >= LOOKS
        if found:
            self._looks = 0  # who begins to wait after this is told of what is seen from then on
        return found

    async def _look(self) -> None:
        answers: list[Stirring] = []
        for address in sorted(self.host.roster.members, key=lambda m: m != self._alive):
            try:
                answers.append(await self.mesh.call(address, CanFree(), timeout_s=ASK_S))
                alive = is_alive(answers)
            except DataplaneError:
                alive = True
            if alive:
                self._alive, self._looks = address, 0
                self._next_look = self.host.now() + LOOK_AGAIN_S
                return
        self._next_look = self.host.now() + LOOK_EVERY_S
        self._note(answers)

    def _note(self, answers: list[Stirring]) -> None:
        done = [answer.done for answer in answers]
        same = done == self._done or not self._looks
        self._looks = self._looks + 1 if same and is_standstill(answers) else 0
        self._done = done

    def _asked(self, caller: Caller, body: CanFree) -> Stirring:
        """Producers wait for room: no claim that waits here keeps rows from those who take some."""
        self.peer.calls.producers_wait()
        return self._here()

    def _here(self) -> Stirring:
        entries = [entry for entry in self.host.entries.values() if len(entry.store)]
        drop = any(entry.store.definition.free == "drop" for entry in entries)
        leased = any(len(entry.store.leases) for entry in entries)
        busy = set[str]().union(*(s.partitions for s in self.peer.sessions if not s.waiting))
        return Stirring(
            filled=[entry.name for entry in entries],
            busy=sorted(busy),
            held=leased or drop or self.peer.room.starved > 0,
            claims=self.peer.claims.waiting,
            claimable=any(one.rows.ready(None) for e in entries for one in e.store.stages.values()),
            done=self.host.progress.done,
        )


class Janitor:
    def __init__(self, peer: Peer) -> None:
        config = peer.config
        self.host = peer.host
        self.peer = peer
        self.expired_leases = 0
        self._linger_s = config.linger_s
        self._linger_unread_s = config.linger_unread_s
        # The run has no name: when all that it had is sealed and drained, it ends with its last
        # client, so that the same command after it in a script begins anew.
        self._brief = runs.is_unnamed(config.run) and config.linger_s == LINGER_S
        self._began = self._over = False
        self._faulted = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set, by somebody or by this when the peer has lingered long enough."""
        peer, lingers = self.peer, self._linger_s is not None
        peer.sessions.last_seen = self.host.now()  # to be let in may have taken long
        self._began = True
        faulting: asyncio.Future[None] | None = None
        while not stop.is_set():
            now = self.host.now()
            self.expired_leases += peer.finishing.expire(now)
            if peer.standstill.lasts(peer.room.producers > 0, peer.share.writers > 0):
                peer.share.end_in_vain()
                if not peer.standstill.can_spill:
                    peer.room.end_in_vain()
            wanted = self.is_wanted() or peer.membership.plane_is_wanted()
            if lingers and not wanted:
                peer.door.shut()  # who came now would lose this peer in its first call
                log.info("nobody is left: peer %r ends", self.host.name)
                stop.set()
                return
            if faulting is None or faulting.done():
                faulting = peer.mesh.spawn(self._prefault())
            try:
                async with asyncio.timeout(TICK_S):
                    await stop.wait()
            except TimeoutError:
                pass

    def is_wanted(self) -> bool:
        """Whether somebody uses this peer, or did so a short while ago. While one of a plane's
        peers is wanted, all that came with their clients stay."""
        sessions = self.peer.sessions
        if not self._began:
            return True
        if self._over:
            return False
        if self._linger_s is None or len(sessions):
            return bool(len(sessions))
        unread = len(self.host.lent) > 0
        unread |= any(len(entry.store) for entry in self.host.entries.values())
        if runs.has_ended(self.peer.config.run):
            unread = False  # nobody can come any more
        if self.is_over():
            return False
        linger_s = max(self._linger_s, self._linger_unread_s or 0) if unread else self._linger_s
        if not sessions.came:
            linger_s = max(linger_s, ARRIVAL_S)
        return self.host.now() - sessions.last_seen <= linger_s

    def is_over(self) -> bool:
        """Whether the run has no name, and had partitions of which nothing can come, and clients,
        of which none is left. It stays so: nobody is let in any more."""
        if self._brief and not self._over and self.peer.sessions.came:
            entries = self.host.entries.values()
            finished = bool(entries) and all(e.store.sealed and not len(e.store) for e in entries)
            self._over = finished and self.peer.door.is_deserted
            if self._over:
                self.peer.door.shut()
        return self._over

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
