"""The peer, put together: which part handles which message, and what follows from a change.

`settle` is called after everything that changed a store: references that ended go to their owners,
waiting puts are looked at, and the homes learn what became ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from dataplane.errors import PartitionGone
from dataplane.launch.config import PeerConfig
from dataplane.memory.arena import Arena
from dataplane.memory.space import Space
from dataplane.metadata.directory import Directory
from dataplane.metadata.operations import Operations
from dataplane.metadata.roster import Roster, canonical
from dataplane.peer.changes import Changes
from dataplane.peer.claims import Claims
from dataplane.peer.door import Door
from dataplane.peer.finishing import Finishing
from dataplane.peer.grants import Grants
from dataplane.peer.host import Entry, Host
from dataplane.peer.janitor import Janitor
from dataplane.peer.leases import Leases
from dataplane.peer.mesh import Mesh
from dataplane.peer.once import Once
from dataplane.peer.partitions import Partitions
from dataplane.peer.pulls import Pulls
from dataplane.peer.reading import Reading
from dataplane.peer.room import Room
from dataplane.peer.routing import Routing
from dataplane.peer.seats import Seats
from dataplane.peer.sessions import Session, Sessions
from dataplane.peer.stats import Reporting
from dataplane.peer.waits import Waits
from dataplane.peer.writing import Writing
from dataplane.transport.engine import BulkEngine
from dataplane.transport.tickets import plane_key
from dataplane.wire import messages as m
from dataplane.wire.peering import Release, Tally
from dataplane.wire.records import EXTENT, column
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

MUTATING = (m.Put, m.Finish, m.Tag, m.Drop, m.Close, m.Claim, m.Reset)
"""Answered once per operation id; a retry gets the same answer."""


class Peer:
    def __init__(self, config: PeerConfig) -> None:
        self.config = config
        roster = Roster.from_seeds(config.seeds)
        address = canonical(config.listen) if config.listen and config.seeds else roster.members[0]
        arena = Arena.create(config.arena_bytes, f"dataplane-{config.name}")
        self.host = Host(
            plane=config.plane,
            name=config.name,
            incarnation=secrets.randbits(53),
            address=address,
            roster=roster,
            arena=arena,
            space=Space(arena.size_bytes),
            operations=Operations(),
            lease_numbers=itertools.count(1),
            directory=Directory(),
        )
        self.host.space.waste_bytes = self._waste
        self.mesh = Mesh(self.host, self._bulk_addresses)
        self.room = Room(self.host, self._is_stuck)
        self.partitions = Partitions(self.host, self.mesh, self.settle)
        self.routing = Routing(self.host, self.mesh)
        self.leases = Leases()
        self.pulls = Pulls(self.host, self.mesh, self.room)
        self.reading = Reading(
            self.host, self.mesh, self.partitions, self.routing, self.leases, self.pulls
        )
        self.grants = Grants(self.host, self.mesh, self.partitions, self.room)
        self.writing = Writing(
            self.host, self.mesh, self.partitions, self.routing, self.grants, self.settle
        )
        self.finishing = Finishing(self.host, self.mesh, self.leases, self.grants, self.settle)
        self.seats = Seats(self.host, self.mesh, self.partitions)
        self.changes = Changes(
            self.host, self.mesh, self.partitions, self.routing, self.settle, self.seats.tell
        )
        self.waits = Waits(self.host, self.mesh, self.partitions)
        self.claims = Claims(
            self.host,
            self.mesh,
            self.partitions,
            self.seats,
            self.leases,
            self.reading,
            self.waits,
            self.settle,
        )
        self.once = Once(self.host.operations)
        self.sessions = Sessions(self.host, self._session_ended)
        self.door = Door(self.host, self.sessions, self._handlers(), self._unsent)
        self.reporting = Reporting(
            self.host, self.mesh, self.door, self.room, self.claims, self.pulls
        )
        self.door.handlers[m.Stats] = self.reporting.stats
        self.janitor = Janitor(self.host, self.sessions, self.room, self.claims, self.settle)

    # life

    async def start(self, socket_path: str) -> None:
        if not self.host.solo:
            bind_host = self.host.address.removeprefix("tcp://").rsplit(":", 1)[0]
            engine = BulkEngine(
                self.host.arena.rw_fd,
                self.host.arena.size_bytes,
                bind_host.strip("[]"),
                owner=self.host.owner,
                key=plane_key(self.host.plane, self.host.roster.epoch),
                pin=self.pulls.pin,
                unpin=self.pulls.unpin,
            )
            await engine.start()
            self.pulls.engine = engine
            self.mesh.listen()  # now that a greeting can say where bytes are read
        self.door.open(socket_path)

    async def run(self, stop: asyncio.Event) -> None:
        await self.janitor.run(stop, self.config.linger_s, self.config.linger_unread_s)

    async def close(self) -> None:
        await self.door.close()
        await self.mesh.close()
        if self.pulls.engine is not None:
            await self.pulls.engine.stop()

    def _bulk_addresses(self) -> list[str]:
        return list(self.pulls.engine.address) if self.pulls.engine else []

    # what follows from a change

    def settle(self, entry: Entry) -> None:
        freed = False
        for owner, ranges, counts in entry.store.freed():
            freed |= self._let_go(owner, ranges, counts)
        if freed:
            self.room.pump()
        for keys, groups in zip(entry.store.unnamed(), (False, True), strict=True):
            if keys and not self.host.solo:
                self.mesh.spawn(self.routing.forget(entry, keys, groups))
        changed = entry.store.dirty()
        if changed:
            self.seats.changed(entry, changed)
        closed = entry.store.closed_groups
        if closed != entry.told_closed:
            entry.told_closed = closed
            if entry.definition.groups is not None:
                self.mesh.spawn(self._tell_closed(entry, closed))

    def _let_go(self, owner: Owner, ranges: Any, counts: Any) -> bool:
        """Values that a shard no longer holds; their bytes may be another peer's."""
        if owner == self.host.owner:
            return bool(self.host.space.release(ranges, counts))
        body = Release(ranges.tobytes(), np.asarray(counts, "<u4").tobytes())
        self.mesh.spawn(self.mesh.insist(owner.peer, body))
        return False

    async def _tell_closed(self, entry: Entry, closed: int) -> None:
        home = self.host.roster.home(entry.name)
        with contextlib.suppress(PartitionGone):
            await self.mesh.insist(home, Tally(entry.name, entry.generation, closed))

    def _session_ended(self, session: Session) -> None:
        self.finishing.release_all(session)
        self.room.pump()

    def _unsent(self, session: Session, request: m.Request, body: m.Body) -> None:
        """The client gave up the call: what its answer hands out comes back.

        Nor is it handed out to a repetition: that gets what was done, or claims anew.
        """
        space = self.host.space
        match body:
            case m.Claimed(lease, pin, _):
                self.finishing.release(session, lease)
                space.unpin(session.id, [pin])
                self.host.operations.forget(session.id, request.op)
            case m.Reserved():
                space.give_back(session.id, column(body.extents, EXTENT))
                space.unpin(session.id, [body.pin])
            case m.PutDone():
                space.give_back(session.id, column(body.extents, EXTENT))
                body.extents = b""
            case m.ReadDone() | m.Fetched():
                space.unpin(session.id, [body.pin])
            case _:
                return
        self.room.pump()

    def _waste(self) -> int:
        """Bytes of dead values in blocks that others keep alive: a block of packs dies whole."""
        wasted = 0
        for entry in self.host.entries.values():
            blocks, alive = entry.store.packs(self.host.owner)
            wasted += int(self.host.space.ranges.extents(blocks)["length"].sum()) - alive
        return max(0, wasted)

    def _is_stuck(self) -> bool:
        """Is there nobody who could still free space?

        Nothing is leased, no claim can be met (those that wait could not, and rows that are ready
        have nobody else to claim them), and every client of these partitions waits in a call.
        """
        entries = [entry for entry in self.host.entries.values() if len(entry.store)]
        if not self.host.solo or not entries:
            return False
        if any(entry.store.leased or entry.definition.free == "drop" for entry in entries):
            return False
        filled = {entry.name for entry in entries}
        concerned = [session for session in self.sessions if session.partitions & filled]
        if not all(session.waiting for session in concerned):
            return False
        return self.claims.waiting > 0 or not any(entry.store.claimable for entry in entries)

    # which message goes where

    def _handlers(self) -> dict[type[m.Body], Any]:
        writing, reading, claims = self.writing, self.reading, self.claims
        grants, finishing, changes = self.grants, self.finishing, self.changes
        table: dict[type[m.Body], Any] = {
            m.Define: self._define,
            m.Seal: self._seal,
            m.Close: changes.close,
            m.Reset: changes.reset,
            m.Reserve: grants.reserve,
            m.GiveBack: grants.give_back,
            m.Unpin: grants.unpin,
            m.Put: writing.put,
            m.Tag: changes.tag,
            m.Drop: changes.drop,
            m.Read: reading.read,
            m.Claim: claims.claim,
            m.Fetch: reading.fetch,
            m.Finish: finishing.finish,
            m.Wait: self.waits.wait,
        }
        for body in MUTATING:
            table[body] = self._once(table[body])
        return table

    async def _define(self, session: Session, request: m.Request, body: m.Define) -> m.Body:
        session.partitions.add(body.partition)
        return await self.partitions.define(
            body.partition, body.definition, request.deadline_ms / 1000
        )

    async def _seal(self, session: Session, request: m.Request, body: m.Seal) -> m.Body:
        await self.mesh.call(self.host.roster.home(body.partition), body)
        return m.Done()

    def _once(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Answer a repeated operation as the first time."""

        def once(session: Session, request: m.Request, body: m.Body) -> Any:
            if not request.op:
                return handler(session, request, body)
            start = functools.partial(handler, session, request, body)
            return self.once.run(session.id, request.op, request.floor, start)

        return once
