"""The homes of stages that sit at this peer, and what this peer tells the homes elsewhere.

A home holds soft state only (`metadata.homes`): who has how much ready, which claims wait. Its
instructions are carried out here. Each peer reports a stage's figures when they changed, coalesced.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import astuple, dataclass, field

import msgspec

from dataplane.errors import ClaimTimeout, DataplaneError, PartitionGone, StreamEnd
from dataplane.metadata.counts import Counts, Lane
from dataplane.metadata.homes import (
    ClaimId,
    Complete,
    Ended,
    Order,
    Return,
    StageHome,
    Unmeetable,
    Watch,
)
from dataplane.peer.host import Entry, Host
from dataplane.peer.mesh import Caller, Mesh
from dataplane.peer.partitions import Partitions
from dataplane.wire import peering
from dataplane.wire.messages import Body, Done, Wait
from dataplane.wire.peering import Counted, Demand, Report, Settled, Supplied, Withdraw
from dataplane.wire.tables import Owner, Where

log = logging.getLogger(__name__)

REPORT_DELAY_S = 0.002
"""How long changes of a stage are gathered before its home elsewhere is told."""

SeatKey = tuple[str, int, str]


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
    lost: int = 0
    """rows that the stage had not had when the peer that had them was lost"""


def _lane(where: Where | None) -> Lane:
    """The lane that a filter's figures are reported under, whatever the unit."""
    return Lane("rows", b"" if where is None else msgspec.msgpack.encode(where))


class Seats:
    def __init__(self, host: Host, mesh: Mesh, partitions: Partitions) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self._seats: dict[SeatKey, Seat] = {}
        self._watched: dict[SeatKey, list[Where]] = {}
        self._due: dict[SeatKey, asyncio.TimerHandle] = {}
        partitions.on_phase.append(self._on_phase)
        mesh.on_parted.append(self._tell_again)
        mesh.others.on_lost.append(self._forget)
        mesh.handlers |= {
            Report: self._report,
            Demand: self._demand,
            Withdraw: self._withdraw,
            peering.Watch: self._watch,
            Wait: self._wait,
        }

    # what this peer tells

    def changed(self, entry: Entry, stages: set[str]) -> None:
        """Figures of these stages changed here."""
        for stage in stages:
            key = (entry.name, entry.generation, stage)
            if self.host.roster.stage_home(entry.name, stage) == self.host.address:
                seat = self._seats.get(key)
                if seat is not None:
                    self._refresh(seat)
                    self._pump(seat)
            elif key not in self._due:
                self._due[key] = asyncio.get_running_loop().call_later(
                    REPORT_DELAY_S, self._send_report, entry, stage
                )

    def _send_report(self, entry: Entry, stage: str) -> None:
        self._due.pop((entry.name, entry.generation, stage), None)
        self.mesh.spawn(self.tell(entry, stage))

    async def tell(self, entry: Entry, stage: str) -> None:
        """Report a stage to its home elsewhere; a home that cannot be reached is told later."""
        home = self.host.roster.stage_home(entry.name, stage)
        if home == self.host.address or self.host.entries.get(entry.name) is not entry:
            return
        for where in [None, *self._watched.get((entry.name, entry.generation, stage), [])]:
            counts = Counted(*astuple(entry.store.counts(stage, where)))
            body = Report(entry.name, entry.generation, stage, counts, entry.store.sealing, where)
            try:
                await self.mesh.call(home, body)
            except DataplaneError:
                loop = asyncio.get_running_loop()
                loop.call_later(1.0, self.changed, entry, {stage})
                return

    def is_hungry(self, entry: Entry, stage: str) -> bool:
        """Does demand queue at a home that sits here?"""
        seat = self._seats.get((entry.name, entry.generation, stage))
        return seat is not None and seat.home.hungry

    def _tell_again(self, address: str) -> None:
        """A home there may have forgotten what it was told, or be another."""
        for entry in self.host.entries.values():
            stages = entry.definition.stages
            home = self.host.roster.stage_home
            self.changed(entry, {s for s in stages if home(entry.name, s) == address})

    # the home

    def _forget(self, gone: Owner) -> None:
        """A peer is lost: its rows, its claims, and what was ordered from it."""
        address = gone.peer
        for seat in self._seats.values():
            counts = seat.counts.pop(address, None)
            seat.lost += counts.outstanding("rows") if counts is not None else 0
            for claim in [c for c in seat.demands if c.peer == address]:
                del seat.demands[claim]
            seat.home.forget(address)
            self._pump(seat)

    async def _seat(self, partition: str, generation: int, stage: str) -> Seat:
        key = (partition, generation, stage)
        seat = self._seats.get(key)
        if seat is None:
            entry = await self.partitions.entry(partition, generation)
            seat = self._seats.get(key)
            if seat is None:
                seat = Seat(entry, stage, StageHome(self.host.roster.members))
                seat.home.sealed(entry.sealed)
                self._seats[key] = seat
        self._refresh(seat)
        return seat

    def _refresh(self, seat: Seat) -> None:
        """This peer's own figures, as they are now."""
        entry, here = seat.entry, self.host.address
        for where in [None, *self._watched.get((entry.name, entry.generation, seat.stage), [])]:
            counts = entry.store.counts(seat.stage, where)
            if where is None:
                seat.counts[here] = counts
            seat.home.report(here, _lane(where), counts, entry.store.sealing)

    async def _report(self, caller: Caller, body: Report) -> Body:
        seat = await self._seat(body.partition, body.generation, body.stage)
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
        seat.home.demand(claim, body.want)
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
        seat.changed.set()
        seat.changed = asyncio.Event()
        for instruction in seat.home.instructions():
            match instruction:
                case Order():
                    self.mesh.spawn(self._order(seat, instruction))
                case Complete(claim):
                    self._settle(seat, claim, "complete")
                case Ended(claim):
                    self._settle(seat, claim, "lost" if seat.lost else "ended")
                case Unmeetable(claim):
                    self._settle(seat, claim, "unmeetable")
                case Return(claim):
                    body = Settled(claim.number, "return")
                    seat.returning[claim] = self.mesh.spawn(self.mesh.call(claim.peer, body))
                case Watch():
                    self.mesh.spawn(self._tell_watch(seat, instruction))

    def _settle(self, seat: Seat, claim: ClaimId, outcome: str) -> None:
        seat.demands.pop(claim, None)
        body = Settled(claim.number, outcome)  # type: ignore[arg-type]
        self.mesh.spawn(self.mesh.call(claim.peer, body))

    async def _order(self, seat: Seat, order: Order) -> None:
        """One supplier leases to the claim; a supplier that fails has supplied nothing."""
        demand = seat.demands.get(order.claim)
        entry = seat.entry
        reply = Supplied(0, 0, False)
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
            )
            try:
                reply = await self.mesh.call(order.peer, body)
            except DataplaneError as exc:
                log.warning("%s could not supply stage %r: %s", order.peer, seat.stage, exc)
        seat.home.supplied(order.claim, order.peer, reply.units, reply.amount, reply.blocked)
        self._refresh(seat)
        self._pump(seat)

    # lanes with a filter

    async def _tell_watch(self, seat: Seat, watch: Watch) -> None:
        """Peers that count this lane tell its figures at once."""
        entry = seat.entry
        where = watch.lane.filter
        body = peering.Watch(entry.name, entry.generation, seat.stage, where, watch.on)
        if watch.peer is None:
            await self.mesh.call_all(body)
        else:
            await self.mesh.call(watch.peer, body)

    async def _watch(self, caller: Caller, body: peering.Watch) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        watched = self._watched.setdefault((body.partition, body.generation, body.stage), [])
        if body.where is not None and body.on and body.where not in watched:
            watched.append(body.where)
        elif not body.on and body.where in watched:
            watched.remove(body.where)
        self.changed(entry, {body.stage})
        return Done()

    # waiting without claiming

    async def _wait(self, caller: Caller, body: Wait) -> Body:
        """Until the figures of all peers together satisfy it; StreamEnd when they never can.

        ClaimTimeout when its time is up: the asker says why, or asks again.
        """
        seat = await self._seat(body.partition, body.generation, body.stage)
        try:
            async with asyncio.timeout(None if body.timeout_ms < 0 else body.timeout_ms / 1000):
                while not self._is_satisfied(seat, body):
                    await seat.changed.wait()
                    if self.host.entries.get(body.partition) is not seat.entry:
                        raise PartitionGone(f"partition {body.partition!r} was dropped")
        except TimeoutError:
            raise ClaimTimeout(f"stage {body.stage!r} is not there yet") from None
        return Done()

    @staticmethod
    def _is_satisfied(seat: Seat, body: Wait) -> bool:
        totals = list(seat.counts.values())
        outstanding = sum(c.outstanding(body.unit) for c in totals)
        if body.below and outstanding < body.below:
            return True
        if body.count and sum(c.ready(body.unit) for c in totals) >= body.count:
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
                for claim in list(seat.demands):
                    self._settle(seat, claim, "dropped")
                seat.changed.set()
            else:
                seat.home.sealed(entry.sealed)
                self._refresh(seat)
                self._pump(seat)
        if phase == "dropped":
            for key in [k for k in self._watched if k[:2] == entry.key]:
                del self._watched[key]
