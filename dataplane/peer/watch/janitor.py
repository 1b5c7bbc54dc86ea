"""Periodic work: lease limits, prefaulting pages, samples of rates, records of arena usage, ending
puts in a deadlock, and stopping an embedded peer that no client uses.

One loop, a few times a second. It decides nothing that a message decides.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from typing import TYPE_CHECKING

from dataplane.launch import runs
from dataplane.launch.settings import LINGER_S
from dataplane.memory.arena import Arena
from dataplane.wire.events import EventRecord, Kind

if TYPE_CHECKING:
    from dataplane.peer.peer import Peer

log = logging.getLogger(__name__)

TICK_S = 0.2
STALL_S = 0.25
"""A peer that wakes up this late had no processor time, or was stopped."""
SAMPLE_S = 1.0
"""How often rates are sampled, and at most how often the use of the arena is recorded. It is
recorded if it has changed by `SAMPLE_SHARE`."""
SAMPLE_SHARE = 0.01
PREFAULT_AHEAD_BYTES = 256 << 20
ARRIVAL_S = 5.0
"""How long the starter of this peer has to connect, however short its linger time."""


class Janitor:
    def __init__(self, peer: Peer) -> None:
        config = peer.config
        self.host = peer.host
        self.peer = peer
        self.expired_leases = 0
        self._linger_s = config.linger_s
        self._linger_unread_s = config.linger_unread_s
        self._unnamed = runs.is_unnamed(config.run)
        # An unnamed run ends with its last client once its partitions are sealed and drained, so
        # that a process that connects again starts a new one.
        self._brief = self._unnamed and config.linger_s == LINGER_S
        self._began = self._over = False
        self._faulted = 0
        self._sampled = -math.inf, -1
        """when the usage of the arena was recorded, and that usage in bytes"""

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, by another part or by this loop when the peer has lingered
        long enough."""
        peer, lingers = self.peer, self._linger_s is not None
        peer.sessions.last_seen = self.host.now()  # joining may have taken long
        self._began = True
        faulting: asyncio.Future[None] | None = None
        restores: asyncio.Future[None] | None = None
        due = self.host.now() + TICK_S
        while not stop.is_set():
            now = self.host.now()
            if now - due > STALL_S:
                self.host.events.add(EventRecord(Kind.STALL), due)
            due = now + TICK_S
            if now - self.host.metered_at >= SAMPLE_S:
                self.host.meter()
            if restores is None or restores.done():
                restores = peer.mesh.spawn(peer.partitions.end_restores())
            self._sample(now)
            self.expired_leases += peer.finishing.expire(now)
            if peer.standstill.lasts(peer.room.producers > 0, peer.metadata_quota.writers > 0):
                peer.metadata_quota.fail_waiting()
                if not peer.standstill.can_spill:
                    peer.room.fail_waiting()
            wanted = self.is_wanted() or peer.membership.plane_is_wanted()
            if lingers and not wanted:
                peer.door.shut()  # a client accepted now would lose this peer at its first call
                log.info("peer %r: no clients left, shutting down", self.host.name)
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
        """Whether a client uses this peer, or did a short while ago. While one peer of a run is
        in use, all peers that were started with their clients stay."""
        sessions = self.peer.sessions
        if not self._began:
            return True
        if self._over:
            return False
        if self._linger_s is None or len(sessions):
            return bool(len(sessions))
        unread = len(self.host.remote_references) > 0 or self.host.rows > 0
        if self.is_over():
            return False
        linger_s = max(self._linger_s, self._linger_unread_s or 0) if unread else self._linger_s
        if not sessions.came:
            linger_s = max(linger_s, ARRIVAL_S)
        return self.host.now() - sessions.last_seen <= linger_s

    def is_over(self) -> bool:
        """Whether an unnamed run has had clients, has none left, and cannot get any: the process
        that it is named after has exited, or its partitions cannot lead to anything. This is
        final, because the peer then admits no client."""
        if self._unnamed and not self._over and self.peer.sessions.came:
            entries = self.host.entries.values()
            finished = self._brief and bool(entries)
            finished = finished and all(e.store.sealed and not len(e.store) for e in entries)
            if finished or runs.has_ended(self.peer.config.run):
                self._over = self.peer.door.is_deserted
            if self._over:
                self.peer.door.shut()
        return self._over

    def _sample(self, now: float) -> None:
        space = self.host.space
        at, told = self._sampled
        used, size = space.used_bytes, space.size_bytes
        changed = told < 0 or abs(used - told) >= SAMPLE_SHARE * size
        if changed and now - at >= SAMPLE_S:
            self._sampled = now, used
            self.host.events.add(EventRecord(Kind.ARENA, nbytes=used))

    async def _prefault(self) -> None:
        """Keep some pages above the highest use allocated, because the first touch of a page is
        slow. Starts when half of them are used: a short burst of puts needs the processor for
        itself. A child process touches the pages (`memory.prefault` says why), and ends with this
        call."""
        space = self.host.space
        ahead = min(PREFAULT_AHEAD_BYTES, space.size_bytes // 4)
        start, goal = self._faulted, min(space.high_water + ahead, space.size_bytes)
        if start - space.high_water > ahead // 2 or start >= goal:
            return
        self._faulted = goal
        try:
            await prefaulted(self.host.arena, start, goal - start)
        except OSError as exc:
            log.warning(
                "arena: could not start the process that prefaults %d bytes: %s", goal - start, exc
            )


async def prefaulted(arena: Arena, start: int, length: int) -> None:
    """Wait for the process that allocates pages, which ends with this call. Raises OSError if it
    cannot start."""
    child, loop, ended = arena.prefault(start, length), asyncio.get_running_loop(), asyncio.Event()
    try:
        pidfd = os.pidfd_open(child.pid)
        try:
            loop.add_reader(pidfd, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
    finally:
        child.kill()
        child.wait()
