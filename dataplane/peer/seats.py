"""The homes of stages that sit at this peer, and what this peer tells the homes elsewhere.

A home holds soft state only (`metadata.homes`): who has how much ready, which claims wait. Its
instructions are carried out here. What this peer itself tells homes elsewhere is in `reports`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dataplane.errors import ClaimTimeout, DataplaneError, PartitionGone, StaleEpoch, StreamEnd
from dataplane.metadata.counts import Counts, Lane
from dataplane.metadata.homes import StageHome
from dataplane.metadata.instructions import (
    ClaimId,
    Complete,
    Ended,
    Order,
    Return,
    Starved,
    Unmeetable,
    Watch,
)
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.mesh import Mesh
from dataplane.peer.partitions import Partitions
from dataplane.peer.reports import Reports, SeatKey
from dataplane.wire import peering
from dataplane.wire.messages import Body, Done, Wait
from dataplane.wire.peering import Demand, Report, Settled, Supplied, Withdraw
from dataplane.wire.tables import Where

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Seat:
    """One stage's home."""

    entry: Entry
    stage: str
    home: StageHome
    demands: dict[ClaimId, Demand] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)
    returning: dict[ClaimId, asyncio.Task[object]] = field(default_factory=dict)
    """claims that give back what they hold: nothing more is granted to them before that is done"""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False
    """the partition is gone, or its claims queue elsewhere: what was ordered before ends here"""

    @property
    def lost(self) -> int:
        """Rows that the stage never had and never will."""
        return sum(counts.lost_rows for counts in self.counts.values())


def _lane(where: Where | None) -> Lane:
    """The lane that a filter's figures are reported under, whatever the unit."""
    return Lane("rows", b"" if where is None else msgspec.msgpack.encode(where))


class Seats:
    def __init__(self, host: Host, mesh: Mesh, partitions: Partitions) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self._seats: dict[SeatKey, Seat] = {}
        self.reports = Reports(host, mesh, self.anew)
        partitions.on_phase.append(self._on_phase)
        mesh.on_parted.append(self._tell_again)
        mesh.handlers |= {
            Report: self._report,
            Demand: self._demand,
            Withdraw: self._withdraw,
            peering.Watch: self._watch,
            Wait: self._wait,
        }

    def changed(self, entry: Entry, stages: set[str]) -> None:
        """Figures of these stages changed here."""
        self._tell_homes(entry, stages, self.reports.changed)

    def anew(self, entry: Entry, stages: set[str]) -> None:
        """Their homes may know nothing of these stages here."""
        self._tell_homes(entry, stages, self.reports.anew)

    def _tell_homes(
        self, entry: Entry, stages: set[str], report: Callable[[str, Entry, str], None]
    ) -> None:
        for stage in stages:
            home = self.host.roster.stage_home(entry.name, stage)
            if home != self.host.address:
                report(home, entry, stage)
                continue
            seat = self._seats.get((entry.name, entry.generation, stage))
            if seat is not None:
                self._refresh(seat)
                self._pump(seat)

    async def tell(self, entry: Entry, stage: str) -> None:
        """Report a stage to its home now."""
        home = self.host.roster.stage_home(entry.name, stage)
        if home != self.host.address:
            await self.reports.tell(home, entry, stage)

    def is_hungry(self, entry: Entry, stage: str) -> bool:
        """Does demand queue at a home that sits here?"""
        seat = self._seats.get((entry.name, entry.generation, stage))
        return seat is not None and seat.home.hungry

    def _tell_again(self, address: str) -> None:
        """A home there may have forgotten what it was told, or be another."""
        for entry in self.host.entries.values():
            stages = entry.definition.stages
            home = self.host.roster.stage_home
            self.anew(entry, {s for s in stages if home(entry.name, s) == address})

    # the home

    def turned(self) -> None:
        """A new roster: all soft state goes. Claims queue again, and every peer reports again."""
        for seat in self._seats.values():
            self._close(seat, "moved")
        self._seats.clear()
        for entry in self.host.entries.values():
            self.anew(entry, set(entry.definition.stages))

    def _close(self, seat: Seat, outcome: str) -> None:
        seat.closed = True
        for claim in list(seat.demands):
            self._settle(seat, claim, outcome)
        seat.changed.set()

    async def _seat(self, partition: str, generation: int, stage: str) -> Seat:
        key = (partition, generation, stage)
        seat = self._seats.get(key)
        if seat is None:
            entry = await self.partitions.entry(partition, generation, stage)
            seat = self._seats.get(key)
            if seat is None:
                seat = Seat(entry, stage, StageHome(self.host.roster.hosts))
                seat.home.sealed(entry.sealed)
                self._seats[key] = seat
        self._refresh(seat)
        return seat

    def _refresh(self, seat: Seat) -> None:
        """This peer's own figures, as they are now."""
        entry, here = seat.entry, self.host.address
        key = (entry.name, entry.generation, seat.stage)
        for where in [None, *self.reports.watched.get(key, [])]:
            counts = entry.store.counts(seat.stage, where)
            if where is None:
                seat.counts[here] = counts
            seat.home.report(here, _lane(where), counts, entry.store.sealing)

    async def _report(self, caller: Caller, body: Report) -> Body:
        seat = await self._seat(body.partition, body.generation, body.stage)
        if caller.epoch != self.host.roster.epoch:  # it may have taken rows over meanwhile
            raise StaleEpoch(f"the roster changed before stage {body.stage!r} was looked up here")
        if caller.address not in self.host.roster.hosts:
            return Done()  # it has no rows, and the end of a stage must not wait for it
        seat.home.admit(caller.address)
        counts = Counts(*msgspec.structs.astuple(body.counts))
        if body.where is None:
            seat.counts[caller.address] = counts
        seat.home.report(caller.address, _lane(body.where), counts, body.sealed)
        self._pump(seat)
        return Done()

    async def _demand(self, caller: Caller, body: Demand) -> Body:
        seat = await self._seat(body.partition, body.generation, body.stage)
        claim = ClaimId(caller.address, body.number)
        seat.demands[claim] = body
        seat.home.demand(claim, body.want, credit_bytes=body.credit_bytes)
        self._pump(seat)
        return Done()

    async def _withdraw(self, caller: Caller, body: Withdraw) -> Body:
        # As a demand does: of one that still waits for the seat this must not be ahead.
        try:
            seat = await self._seat(body.partition, body.generation, body.stage)
        except PartitionGone:
            return Done()
        claim = ClaimId(caller.address, body.number)
        seat.demands.pop(claim, None)
        seat.home.withdraw(claim)
        self._pump(seat)
        return Done()

    def _pump(self, seat: Seat) -> None:
        """Carry out what the home decided. Supplied orders come back here with new figures."""
        if seat.closed or self.host.silent:  # what it orders here would be refused, again and again
            return
        seat.changed.set()
        seat.changed = asyncio.Event()
        for instruction in seat.home.instructions():
            match instruction:
                case Order():
                    self.mesh.spawn(self._order(seat, instruction))
                case Complete(claim, _, told):
                    if told:
                        seat.demands.pop(claim, None)
                    else:
                        self._settle(seat, claim, "complete")
                case Ended(claim):
                    self._settle(seat, claim, "lost" if seat.lost else "ended")
                case Unmeetable(claim):
                    self._settle(seat, claim, "unmeetable")
                case Starved(claim, needed_bytes):
                    self._settle(seat, claim, "starved", needed_bytes)
                case Return(claim):
                    body = Settled(claim.number, "return")
                    seat.returning[claim] = self._tell(claim, body)
                case Watch():
                    self.mesh.spawn(self._tell_watch(seat, instruction))

    def _settle(self, seat: Seat, claim: ClaimId, outcome: str, needed_bytes: int = 0) -> None:
        seat.demands.pop(claim, None)
        self._tell(claim, Settled(claim.number, outcome, needed_bytes))  # type: ignore[arg-type]

    def _tell(self, claim: ClaimId, body: Settled) -> asyncio.Task[Any]:
        """Until the claim's peer has heard it: the claim waits for nothing else."""

        def find() -> str | None:
            return claim.peer if claim.peer in self.host.roster.members else None

        return self.mesh.spawn(self.mesh.insist(find, body))

    async def _order(self, seat: Seat, order: Order) -> None:
        """One supplier leases to the claim. What one that does not answer supplied is not known:
        the claim gives back what it has, and queues anew."""
        demand = seat.demands.get(order.claim)
        entry = seat.entry
        reply = Supplied(0, 0, False)
        unknown = False
        returning = seat.returning.pop(order.claim, None)
        if returning is not None:
            await asyncio.wait([returning])
        if demand is not None:
            body = peering.Order(
                entry.name,
                entry.generation,
                seat.stage,
                order.claim.peer,
                order.claim.number,
                order.want_remaining,
                order.exact,
                demand.holder,
                demand.label,
                demand.lease_ms,
                demand.fields,
                order.credit_bytes,
            )
            try:
                reply = await self.mesh.call(order.peer, body)
            except DataplaneError as exc:
                log.warning("%s could not supply stage %r: %s", order.peer, seat.stage, exc)
                unknown = not isinstance(exc, StaleEpoch | PartitionGone)
        if reply.ended:
            seat.demands.pop(order.claim, None)
            seat.home.withdraw(order.claim)
        seat.home.supplied(
            order.claim,
            order.peer,
            reply.units,
            reply.amount,
            reply.blocked,
            reply.nbytes,
            reply.needed_bytes,
        )
        if unknown and order.claim in seat.demands:
            seat.home.withdraw(order.claim)
            self._settle(seat, order.claim, "moved")
        self._refresh(seat)
        self._pump(seat)

    # lanes with a filter

    async def _tell_watch(self, seat: Seat, watch: Watch) -> None:
        """Peers that count this lane tell its figures at once. Each is told until it has heard, or
        it is not wanted any more: a claim may wait for what only this peer can tell."""
        entry = seat.entry
        where = watch.lane.filter
        body = peering.Watch(entry.name, entry.generation, seat.stage, where, watch.on)

        def find(peer: str) -> str | None:
            wanted = seat.home.watches(watch.lane) == watch.on
            there = peer in self.host.roster.members
            return peer if wanted and there and self._is_in_force(seat) else None

        peers = self.host.roster.hosts if watch.peer is None else [watch.peer]
        telling = (self.mesh.insist(functools.partial(find, peer), body) for peer in peers)
        await asyncio.gather(*telling)

    def _is_in_force(self, seat: Seat) -> bool:
        return self._seats.get((seat.entry.name, seat.entry.generation, seat.stage)) is seat

    async def _watch(self, caller: Caller, body: peering.Watch) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation, body.stage)
        if body.where is not None:
            self.reports.watch(entry, body.stage, body.where, body.on)
        self.anew(entry, {body.stage})
        return Done()

    # waiting without claiming

    async def _wait(self, caller: Caller, body: Wait) -> Body:
        """Until the figures of all peers together satisfy it; StreamEnd when they never can.

        ClaimTimeout when its time is up: the asker says why, or asks again.
        """
        seat = await self._seat(body.partition, body.generation, body.stage)
        if not self._has_heard_all(seat):
            self.mesh.spawn(self._tell_watch(seat, Watch(_lane(None), True)))
        try:
            async with asyncio.timeout(None if body.timeout_ms < 0 else body.timeout_ms / 1000):
                while not self._is_satisfied(seat, body):
                    await seat.changed.wait()
                    if self.host.entries.get(body.partition) is not seat.entry:
                        raise PartitionGone(f"partition {body.partition!r} was dropped")
                    if not self._is_in_force(seat):
                        raise StaleEpoch(f"stage {body.stage!r} is looked after anew: ask again")
        except TimeoutError:
            raise ClaimTimeout(f"stage {body.stage!r} is not there yet") from None
        return Done()

    def _has_heard_all(self, seat: Seat) -> bool:
        """A peer that has not reported yet may have what is waited for, or be full of it."""
        return seat.counts.keys() >= set(self.host.roster.hosts)

    def _is_satisfied(self, seat: Seat, body: Wait) -> bool:
        totals = list(seat.counts.values())
        if body.count and sum(c.ready(body.unit) for c in totals) >= body.count:
            return True
        if not self._has_heard_all(seat):
            return False
        outstanding = sum(c.outstanding(body.unit) for c in totals)
        if body.below and outstanding < body.below:
            return True
        if body.count and seat.entry.sealed and outstanding < body.count:
            remaining = sum(c.remaining(body.unit) for c in totals)
            raise StreamEnd(
                f"partition {body.partition!r} is sealed: stage {body.stage!r} has {remaining} "
                f"{body.unit} left, {body.count} will never be ready",
                remaining=remaining,
            )
        return False

    # phases

    def _on_phase(self, entry: Entry, phase: str) -> None:
        for key in [k for k in self._seats if k[:2] == entry.key]:
            seat = self._seats[key]
            if phase == "dropped":
                del self._seats[key]
                self._close(seat, "dropped")
            else:
                seat.home.sealed(entry.sealed)
                self._refresh(seat)
                self._pump(seat)
        if phase == "dropped":
            self.reports.forget(entry)
