"""The homes of stages that sit at this peer, which are those of the shards that it serves.

A home holds soft state only (`metadata.homes`): which claims wait. Its instructions are carried out
here.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from dataplane.errors import ClaimTimeout, DataplaneError, PartitionGone, StaleEpoch, StreamEnd
from dataplane.metadata.counts import Counts
from dataplane.metadata.homes import StageHome
from dataplane.metadata.instructions import (
    ClaimId,
    Complete,
    Ended,
    Order,
    Starved,
    Unmeetable,
)
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.mesh import Mesh
from dataplane.peer.partitions import Partitions
from dataplane.peer.supplying import Supplied, Supplying
from dataplane.wire.messages import Body, Done, Wait
from dataplane.wire.peering import Demand, Settled, Withdraw

log = logging.getLogger(__name__)

SeatKey = tuple[str, int, str]


@dataclass(slots=True)
class Seat:
    """One stage's home."""

    entry: Entry
    stage: str
    home: StageHome
    demands: dict[ClaimId, Demand] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False
    """the partition is gone, or its claims queue elsewhere: what was ordered before ends here"""

    @property
    def counts(self) -> Counts:
        """As they are now."""
        return self.entry.store.counts(self.stage)

    def look(self) -> None:
        """Let the home see what changed."""
        self.home.changed(self.entry.sealed)


class Seats:
    def __init__(
        self, host: Host, mesh: Mesh, partitions: Partitions, supplying: Supplying
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self.supplying = supplying
        self._seats: dict[SeatKey, Seat] = {}
        partitions.on_phase.append(self._on_phase)
        mesh.handlers |= {
            Demand: self._demand,
            Withdraw: self._withdraw,
            Wait: self._wait,
        }

    def changed(self, entry: Entry, stages: set[str]) -> None:
        """Figures of these stages changed here."""
        for stage in stages:
            seat = self._seats.get((entry.name, entry.generation, stage))
            if seat is not None:
                seat.look()
                self._pump(seat)

    def is_hungry(self, entry: Entry, stage: str) -> bool:
        """Does demand queue at a home that sits here?"""
        seat = self._seats.get((entry.name, entry.generation, stage))
        return seat is not None and seat.home.hungry

    # the home

    def turned(self) -> None:
        """A new roster: all soft state goes, and claims queue again."""
        for seat in self._seats.values():
            self._close(seat, "moved")
        self._seats.clear()

    def _close(self, seat: Seat, outcome: str) -> None:
        seat.closed = True
        for claim in list(seat.demands):
            self._settle(seat, claim, outcome)
        seat.changed.set()

    def _seat(self, partition: str, generation: int, stage: str) -> Seat:
        key = (partition, generation, stage)
        seat = self._seats.get(key)
        if seat is None:
            entry = self.host.shard(partition, generation)
            entry.store.state.stage(stage)
            home = StageHome(
                lambda where: entry.store.counts(stage, where),
                lambda lane: entry.store.near(stage, lane.unit, lane.filter),
            )
            seat = self._seats[key] = Seat(entry, stage, home)
        seat.look()
        return seat

    def _demand(self, caller: Caller, body: Demand) -> Body:
        seat = self._seat(body.partition, body.generation, body.stage)
        claim = ClaimId(caller.address, body.number)
        seat.demands[claim] = body
        seat.home.demand(claim, body.want, credit_bytes=body.credit_bytes)
        self._pump(seat)
        return Done()

    def _withdraw(self, caller: Caller, body: Withdraw) -> Body:
        try:
            seat = self._seat(body.partition, body.generation, body.stage)
        except PartitionGone:
            return Done()
        claim = ClaimId(caller.address, body.number)
        seat.demands.pop(claim, None)
        seat.home.withdraw(claim)
        self._pump(seat)
        return Done()

    def _pump(self, seat: Seat) -> None:
        """Carry out what the home decided. What came of an order is told to it."""
        if seat.closed or self.host.silent:  # what it orders here would be refused, again and again
            return
        seat.changed.set()
        seat.changed = asyncio.Event()
        for instruction in seat.home.instructions():
            match instruction:
                case Order():
                    self.mesh.spawn(self._order(seat, instruction))
                case Complete(claim, told):
                    if told:
                        seat.demands.pop(claim, None)
                    else:
                        self._settle(seat, claim, "complete")
                case Ended(claim):
                    self._settle(seat, claim, "lost" if seat.counts.lost_rows else "ended")
                case Unmeetable(claim):
                    self._settle(seat, claim, "unmeetable")
                case Starved(claim, needed_bytes):
                    self._settle(seat, claim, "starved", needed_bytes)

    def _settle(self, seat: Seat, claim: ClaimId, outcome: str, needed_bytes: int = 0) -> None:
        seat.demands.pop(claim, None)
        self._tell(claim, Settled(claim.number, outcome, needed_bytes))  # type: ignore[arg-type]

    def _tell(self, claim: ClaimId, body: Settled) -> None:
        """Until the claim's peer has heard it: the claim waits for nothing else."""

        def find() -> str | None:
            return claim.peer if claim.peer in self.host.roster.members else None

        self.mesh.spawn(self.mesh.insist(find, body))

    async def _order(self, seat: Seat, order: Order) -> None:
        """Lease to the claim. Where that fails, what came of it is not known: the claim gives back
        what it has, and queues anew."""
        demand = seat.demands.get(order.claim)
        reply = Supplied()
        unknown = False
        if demand is not None:
            try:
                reply = await self.supplying.supply(seat.entry, demand, order)
            except DataplaneError as exc:
                log.warning("stage %r could not be supplied: %s", seat.stage, exc)
                unknown = not isinstance(exc, StaleEpoch)
        if reply.ended:
            seat.demands.pop(order.claim, None)
            seat.home.withdraw(order.claim)
        elif unknown and order.claim in seat.demands:
            seat.home.withdraw(order.claim)
            self._settle(seat, order.claim, "moved")
        seat.home.supplied(
            order.claim,
            reply.units,
            reply.amount,
            reply.blocked,
            reply.nbytes,
            reply.needed_bytes,
        )
        seat.look()
        self._pump(seat)

    def _is_in_force(self, seat: Seat) -> bool:
        return self._seats.get((seat.entry.name, seat.entry.generation, seat.stage)) is seat

    # waiting without claiming

    async def _wait(self, caller: Caller, body: Wait) -> Body:
        """Until the figures satisfy it; StreamEnd when they never can.

        ClaimTimeout when its time is up: the asker says why, or asks again.
        """
        seat = self._seat(body.partition, body.generation, body.stage)
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

    def _is_satisfied(self, seat: Seat, body: Wait) -> bool:
        counts = seat.counts
        if body.count and counts.ready(body.unit) >= body.count:
            return True
        outstanding = counts.outstanding(body.unit)
        if body.below and outstanding < body.below:
            return True
        if body.count and seat.entry.sealed and outstanding < body.count:
            remaining = counts.remaining(body.unit)
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
                seat.look()
                self._pump(seat)
