"""The events of this peer and of other peers, for a client of this host, with the offset of their
clocks.

A client asks its peer for the records of one peer after another, page by page, so no reply is
larger than a page. An offset comes from the quickest of a few exchanges with that peer. Its
error is at most half of the round trip.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from dataplane.errors import InvalidCall
from dataplane.metadata.shard.leases import Lease, Member
from dataplane.metadata.shard.stages import Stage
from dataplane.peer.host import Caller, Entry
from dataplane.peer.sessions import Session
from dataplane.wire.events import MAX_RECORDS_PER_MESSAGE, EventRecord, Events, EventsDone, Kind
from dataplane.wire.messages import Request

if TYPE_CHECKING:
    from dataplane.peer.peer import Peer

EXCHANGES = 4
"""Clock exchanges with a peer before its records are read."""
FRESH_S = 60.0
"""An offset older than this is measured again."""
ASK_S = 2.0
DRIFT = 1e-4
"""The most that two clocks drift apart, in seconds per second."""
MAX_GOING_ON = 1_024
"""The most waits and leases in progress in one reply, the longest first."""


class _Clock(NamedTuple):
    """Another peer's clock: how far ahead it was at `asked`, and the error of that figure."""

    offset: float
    uncertain: float
    asked: float

    def uncertain_at(self, now: float) -> float:
        return self.uncertain + DRIFT * (now - self.asked)


class Timeline:
    def __init__(self, peer: Peer) -> None:
        self.peer, self.host, self.mesh = peer, peer.host, peer.mesh
        self._clocks: dict[str, tuple[int, _Clock]] = {}
        """by address, with the peer's incarnation"""

    async def events(self, session: Session, request: Request, body: Events) -> EventsDone:
        """Return a page of one peer's records. Raises InvalidCall for an unknown peer, or
        Unavailable."""
        address = body.address or self.host.address
        if address == self.host.address:
            return self.events_here(self.host.caller(), body)
        if address not in self.host.roster.members:
            raise InvalidCall(
                f"no peer of this run has the address {address!r}: choose an address that "
                "`dataplane status` shows"
            )
        known = self._clocks.get(address)
        if known is None or self.host.now() - known[1].asked > FRESH_S:
            for _ in range(EXCHANGES):
                await self._asked(address, Events(limit=0))
        since = body.since
        if since > 0 and address in self._clocks:
            _, clock = self._clocks[address]
            since += clock.offset - clock.uncertain_at(self.host.now())
        return await self._asked(address, Events(since=since, after=body.after, limit=body.limit))

    async def _asked(self, address: str, body: Events) -> EventsDone:
        asked = self.host.now()
        done: EventsDone = await self.mesh.call(address, body, timeout_s=ASK_S)
        now = self.host.now()
        clock = _Clock(done.now - (asked + now) / 2, (now - asked) / 2, now)
        incarnation, known = self._clocks.get(address, (0, clock))
        if incarnation != done.incarnation or clock.uncertain <= known.uncertain_at(now):
            known = clock
        members = self.host.roster.members
        self._clocks = {at: one for at, one in self._clocks.items() if at in members}
        self._clocks[address] = done.incarnation, known
        done.offset, done.uncertain = known.offset, known.uncertain_at(now)
        return done

    def events_here(self, caller: Caller, body: Events) -> EventsDone:
        """Return a page of this peer's own records."""
        host, ring = self.host, self.host.events
        limit = min(max(0, body.limit), MAX_RECORDS_PER_MESSAGE)
        first, records = ring.after(body.after, body.since, limit)
        is_all = limit > 0 and first + len(records) > ring.last
        going_on = self._going_on() if is_all else []
        workers = {one.worker for one in (*records, *going_on)} - {0}
        named = {worker: name for worker in workers if (name := self._name(worker))}
        return EventsDone(
            host.address,
            self.peer.sessions.where,
            host.incarnation,
            host.now(),
            ring.kept,
            first,
            ring.last,
            records,
            going_on,
            named,
            list(host.roster.members),
            former=dict(self.mesh.others.former),
        )

    def _name(self, worker: int) -> str:
        """Return the label of a client, the same while it lives and after it ended. "" if it is
        unknown here."""
        return self.host.labels.get(worker) or self.peer.sessions.label(worker)

    def _going_on(self) -> list[EventRecord]:
        """Return waits, leases and the period with the current backup, which have not ended."""
        found = self.peer.calls.going_on() + self.peer.room.going_on()
        found += self.peer.log_sender.going_on()
        for entry in self.host.entries.values():
            leases = entry.store.leases
            found += [
                self._lease(entry, one, one.stage, one.many_left)
                for one in islice(leases, MAX_GOING_ON)
            ]
            found += [
                self._lease(entry, one, one.plan.lease.stage)
                for one in leases.members
                if not one.acked
            ]
        found.sort(key=lambda one: -one.seconds)
        return found[:MAX_GOING_ON]

    def _lease(self, entry: Entry, of: Lease | Member, stage: Stage, rows: int = 0) -> EventRecord:
        now = self.host.now()
        return EventRecord(
            Kind.LEASE_BEGIN,
            now,
            partition=entry.name,
            generation=entry.generation,
            stage=stage.name,
            rows=rows,
            seconds=max(0.0, now - of.started),
            worker=of.holder,
            lease=of.number,
        )
