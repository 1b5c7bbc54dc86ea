"""Claims: met in full from this peer, or queued at the stage's home until granted.

A waiting claim holds nothing but grants that the home ordered for it. When it ends otherwise (time
is up, the client went away) everything it held goes back. One waiting claim is one future here and
one demand at the home.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from dataplane.errors import (
    ClaimTimeout,
    DataplaneError,
    FieldUnknown,
    PartitionGone,
    RowsGone,
    RowsLost,
    StageUndefined,
    StreamEnd,
    Unavailable,
    ValueTooLarge,
)
from dataplane.peer import rows as rowset
from dataplane.peer.host import Entry, Host
from dataplane.peer.leases import Leases, Part
from dataplane.peer.mesh import Caller, Mesh
from dataplane.peer.partitions import Partitions
from dataplane.peer.reading import Reading, Resolved
from dataplane.peer.seats import Seats
from dataplane.peer.sessions import Session
from dataplane.peer.waits import Waits
from dataplane.wire.messages import (
    Body,
    Claim,
    Claimed,
    Done,
    Finish,
    Request,
)
from dataplane.wire.peering import (
    Demand,
    Grant,
    Granted,
    Order,
    Settled,
    Supplied,
    Withdraw,
)
from dataplane.wire.tables import Owner, Table

log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
ATTEMPTS = 3
"""How often a claim queues before its home's going away, or its rows', is its caller's business."""
AWAY = "away"


@dataclass(slots=True)
class Waiting:
    """A claim of this host that queues at its stage's home."""

    entry: Entry
    home: str
    parts: list[tuple[Part, Table]] = field(default_factory=list)
    settled: asyncio.Future[str] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Claims:
    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        partitions: Partitions,
        seats: Seats,
        leases: Leases,
        reading: Reading,
        waits: Waits,
        settle: Callable[[Entry], None],
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self.seats = seats
        self.leases = leases
        self.reading = reading
        self.waits = waits
        self.settle = settle
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Waiting] = {}
        self._queued: dict[tuple[str, int, str], int] = {}
        self._lent: dict[str, set[int]] = {}
        """which sessions of other peers have had rows from here"""
        mesh.on_parted.append(self._parted)
        mesh.others.on_lost.append(self._lost)
        mesh.handlers |= {
            Order: self._order,
            Grant: self._grant,
            Settled: self._settled,
        }

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # from this host's clients

    def claim(self, session: Session, request: Request, body: Claim) -> Body | Awaitable[Body]:
        """At once where this peer has it all and nobody was there before, else queued."""
        entry = self.host.entry(body.partition, body.generation)
        if entry is None or body.stage not in entry.definition.stages:
            return self._claim_after_attaching(session, body)
        if self._may_take(entry, body.stage):
            taken = entry.store.take(
                body.stage, body.want, session.id, now=self.host.now(), lease_ms=body.lease_ms
            )
            if taken.lease is not None:
                granted = self._granted(entry, taken.lease, self._fields(entry, body))
                return self._hand_out(session, entry, body, [granted])
        return self._queue(session, entry, body)

    def _granted(self, entry: Entry, lease: int, fields: list[str] | None) -> tuple[Part, Table]:
        """Leased rows with what they have here of the fields that are asked for."""
        known = None if fields is None else entry.store.known(fields)
        table = entry.store.table(lease, known)
        self.settle(entry)
        return Part(self.host.address, lease, rowset.count(table.rows)), table

    def _may_take(self, entry: Entry, stage: str) -> bool:
        """Queued demand goes before later local claims; after the seal the home decides."""
        key = (entry.name, entry.generation, stage)
        return not (
            entry.store.sealing or self._queued.get(key) or self.seats.is_hungry(entry, stage)
        )

    @staticmethod
    def _fields(entry: Entry, body: Claim) -> list[str]:
        return entry.definition.stages[body.stage] if body.fields is None else body.fields

    async def _claim_after_attaching(self, session: Session, body: Claim) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        if body.stage not in entry.definition.stages:
            if body.declare is None:
                raise StageUndefined(
                    f"partition {body.partition!r} has the stages "
                    f"{sorted(entry.definition.stages)}, not {body.stage!r}: declare it in "
                    "plane.partition(stages=…) or give this claim fields=[…]",
                    stage=body.stage,
                )
            await self.partitions.add_stage(entry, body.stage, body.declare)
        return await self._queue(session, entry, body)

    async def _queue(self, session: Session, entry: Entry, body: Claim) -> Body:
        """Until granted. Again where the home went away, or rows that were granted are gone."""
        end = self.host.now() + body.timeout_ms / 1000
        for _ in range(1, ATTEMPTS):
            with contextlib.suppress(_HomeAway, RowsGone):
                return await self._queue_once(session, entry, body)
            if body.timeout_ms >= 0:
                left = max(0, int((end - self.host.now()) * 1000))
                body = msgspec.structs.replace(body, timeout_ms=left)
        try:
            return await self._queue_once(session, entry, body)
        except _HomeAway:
            raise Unavailable(
                f"the peer at which claims of stage {body.stage!r} of {entry.name!r} queue goes "
                "away again and again: see its log, then claim again",
                partition=entry.name,
            ) from None

    async def _queue_once(self, session: Session, entry: Entry, body: Claim) -> Body:
        number = next(self._numbers)
        home = self.host.roster.stage_home(entry.name, body.stage)
        waiting = self._waiting[number] = Waiting(entry, home)
        key = (entry.name, entry.generation, body.stage)
        self._queued[key] = self._queued.get(key, 0) + 1
        session.waiting += 1
        try:
            await self._demand(number, session, entry, body)
            await self._await_settled(waiting, entry, body)
        except BaseException:
            await asyncio.shield(self._give_up(number, waiting, entry, body))
            raise
        finally:
            session.waiting -= 1
            self._waiting.pop(number, None)
            self._queued[key] -= 1
            if not self._queued[key]:
                del self._queued[key]
        handed = self._hand_out(session, entry, body, waiting.parts)
        return handed if isinstance(handed, Body) else await handed

    async def _demand(self, number: int, session: Session, entry: Entry, body: Claim) -> None:
        demand = Demand(
            entry.name,
            entry.generation,
            body.stage,
            number,
            body.want,
            session.id,
            session.label,
            body.lease_ms,
            self._fields(entry, body),
        )
        await self.mesh.call(self.host.roster.stage_home(entry.name, body.stage), demand)

    async def _await_settled(self, waiting: Waiting, entry: Entry, body: Claim) -> None:
        """Returns when all parts are here. ClaimTimeout, StreamEnd, PartitionGone otherwise."""
        start = self.host.now()
        end = start + body.timeout_ms / 1000 if body.timeout_ms >= 0 else None
        while not waiting.settled.done():
            left = LOG_EVERY_S if end is None else min(LOG_EVERY_S, end - self.host.now())
            if left <= 0:
                why, details = await self.waits.why(entry, body.stage, body.want.unit, body.want)
                raise ClaimTimeout(
                    f"claim of stage {body.stage!r} of {entry.name!r}: {why} after "
                    f"{body.timeout_ms / 1000:g} s",
                    **details,
                )
            await asyncio.wait([waiting.settled], timeout=left)
            if self.host.now() - start >= LOG_EVERY_S and not waiting.settled.done():
                why, _ = await self.waits.why(entry, body.stage, body.want.unit, body.want)
                log.info("a claim of stage %r of %r still waits: %s", body.stage, entry.name, why)
                start = self.host.now()
        outcome = waiting.settled.result()
        if outcome == AWAY:
            raise _HomeAway
        if outcome == "lost":
            raise RowsLost(
                f"partition {entry.name!r} is sealed and stage {body.stage!r} has had every row "
                "that is left, but some were lost with their peer: see part.stats() for what is "
                "there, and put the others into a new partition",
                partition=entry.name,
            )
        if outcome == "ended":
            raise StreamEnd(
                f"partition {entry.name!r} is sealed and stage {body.stage!r} has had every row"
            )
        if outcome == "dropped":
            raise PartitionGone(f"partition {entry.name!r} was dropped", partition=entry.name)
        if outcome == "unmeetable":
            raise ValueTooLarge(
                f"the next unit alone exceeds the budget of {body.want.budget:g} "
                f"{body.want.budget_tag!r}: claim with a larger budget, or rows=1"
            )

    async def _give_up(self, number: int, waiting: Waiting, entry: Entry, body: Claim) -> None:
        """Withdraw, and give back what was granted meanwhile."""
        self._waiting.pop(number, None)
        withdraw = Withdraw(entry.name, entry.generation, body.stage, number)
        self.mesh.spawn(self.mesh.insist(waiting.home, withdraw))
        for part, _ in waiting.parts:
            await self._release(part, entry)

    async def _release(self, part: Part, entry: Entry) -> None:
        body = Finish(part.lease, "release", partition=entry.name, generation=entry.generation)
        try:
            await self.mesh.insist(part.address, body)
        except DataplaneError as exc:
            log.info("a granted lease had ended already: %s", exc)

    def _parted(self, address: str) -> None:
        """A home there may have forgotten the claims that queue at it: they queue again."""
        for waiting in self._waiting.values():
            if waiting.home == address and not waiting.settled.done():
                waiting.settled.set_result(AWAY)

    def _lost(self, gone: Owner) -> None:
        """Rows come back from that peer's clients; those whose bytes were there go."""
        holders = self._lent.pop(gone.peer, set())
        for entry in list(self.host.entries.values()):
            back = sum(entry.store.release_holder(holder) for holder in holders)
            lost = entry.store.lost(gone)
            if back or lost.rows.keys:
                log.warning(
                    "with peer %s partition %r lost %d rows, and %d were given back to it",
                    gone.peer,
                    entry.name,
                    rowset.count(lost.rows),
                    back,
                )
            self.settle(entry)

    def _hand_out(
        self, session: Session, entry: Entry, body: Claim, parts: list[tuple[Part, Table]]
    ) -> Body | Awaitable[Body]:
        """The lease becomes the session's; its bytes are brought here if they are elsewhere."""
        lease = self.leases.open(
            session, entry.name, entry.generation, body.stage, [part for part, _ in parts]
        )
        try:
            joined = rowset.join([table for _, table in parts])
            _check_fields(joined, body.fields)
            resolved = self.reading.resolve(joined, session.id)
        except BaseException:
            self._take_back(session, lease.id, entry)
            raise
        if isinstance(resolved, tuple):
            table, pin = resolved
            return Claimed(lease.id, pin, table)
        return self._pulled(session, lease.id, entry, resolved)

    async def _pulled(
        self, session: Session, lease_id: int, entry: Entry, pulled: Awaitable[Resolved]
    ) -> Body:
        try:
            table, pin = await pulled
        except BaseException:
            self._take_back(session, lease_id, entry)
            raise
        return Claimed(lease_id, pin, table)

    def _take_back(self, session: Session, lease_id: int, entry: Entry) -> None:
        lease = self.leases.leave(session, lease_id)
        for part in lease.parts if lease else ():
            self.mesh.spawn(self._release(part, entry))

    # from homes and suppliers

    async def _order(self, caller: Caller, body: Order) -> Body:
        """Lease what is ordered, and hand it to the claim's peer; unwanted, it goes back."""
        entry = await self.partitions.entry(body.partition, body.generation)
        self.host.label(body.holder, body.label)
        if body.claimant != self.host.address:
            self._lent.setdefault(body.claimant, set()).add(body.holder)
        taken = entry.store.take(
            body.stage,
            body.want,
            body.holder,
            now=self.host.now(),
            lease_ms=body.lease_ms,
            partial=not body.exact,
        )
        if taken.lease is None:
            return Supplied(0, 0.0, taken.blocked)
        part, table = self._granted(entry, taken.lease, body.fields)
        try:
            reply: Granted = await self.mesh.call(
                body.claimant, Grant(body.number, taken.lease, table)
            )
            wanted = reply.wanted
        except DataplaneError as exc:
            log.warning("%s could not be handed its rows: %s", body.claimant, exc)
            wanted = False
        if not wanted:
            await self._release(part, entry)
            return Supplied(0, 0.0, False)
        return Supplied(taken.units, taken.amount, taken.blocked)

    def _grant(self, caller: Caller, body: Grant) -> Body:
        waiting = self._waiting.get(body.number)
        if waiting is None or waiting.settled.done():
            return Granted(False)
        part = Part(caller.address, body.lease, rowset.count(body.table.rows))
        waiting.parts.append((part, body.table))
        return Granted(True)

    async def _settled(self, caller: Caller, body: Settled) -> Body:
        waiting = self._waiting.get(body.number)
        if waiting is None or waiting.settled.done():
            return Done()
        if body.outcome != "return":
            waiting.settled.set_result(body.outcome)
            return Done()
        parts, waiting.parts = waiting.parts, []
        for part, _ in parts:
            await self._release(part, waiting.entry)
        return Done()


class _HomeAway(Exception):
    """The home of a waiting claim went away."""


def _check_fields(table: Table, asked: list[str] | None) -> None:
    """FieldUnknown for a field that none of these rows has."""
    there = {c.field for c in table.columns}
    for name in asked or ():
        if name not in there:
            raise FieldUnknown(
                f"no row of this claim has a field {name!r}, the rows were given back; claim "
                f"without it (there are {sorted(there)})",
                field=name,
            )
