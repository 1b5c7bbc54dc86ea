"""Claims: met in full from this peer, or queued at the stage's home until granted.

A waiting claim holds nothing but grants that the home ordered for it. When it ends otherwise (time
is up, the client went away) everything it held goes back. One waiting claim is one future here and
one demand at the home.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dataplane.errors import (
    ClaimTimeout,
    DataplaneError,
    FieldUnknown,
    PartitionGone,
    StageUndefined,
    StreamEnd,
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
from dataplane.wire.messages import (
    Body,
    Claim,
    Claimed,
    Done,
    Finish,
    Request,
    StatsDone,
    Wait,
    Want,
)
from dataplane.wire.peering import (
    Demand,
    Grant,
    Granted,
    Missing,
    Order,
    Settled,
    Supplied,
    Withdraw,
)
from dataplane.wire.tables import Table

log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
WAIT_TURN_S = 10.0
MAX_PEERS_ASKED = 8
"""How many peers are asked why rows are missing, for one message."""


@dataclass(slots=True)
class Waiting:
    """A claim of this host that queues at its stage's home."""

    entry: Entry
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
        settle: Callable[[Entry], None],
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self.seats = seats
        self.leases = leases
        self.reading = reading
        self.settle = settle
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Waiting] = {}
        self._queued: dict[tuple[str, int, str], int] = {}
        mesh.handlers |= {
            Order: self._order,
            Grant: self._grant,
            Settled: self._settled,
            Missing: self._missing,
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
        number = next(self._numbers)
        waiting = self._waiting[number] = Waiting(entry)
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
                why, details = await self._why(entry, body.stage, body.want.unit, body.want)
                raise ClaimTimeout(
                    f"claim of stage {body.stage!r} of {entry.name!r}: {why} after "
                    f"{body.timeout_ms / 1000:g} s",
                    **details,
                )
            await asyncio.wait([waiting.settled], timeout=left)
            if self.host.now() - start >= LOG_EVERY_S and not waiting.settled.done():
                why, _ = await self._why(entry, body.stage, body.want.unit, body.want)
                log.info("a claim of stage %r of %r still waits: %s", body.stage, entry.name, why)
                start = self.host.now()
        outcome = waiting.settled.result()
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
        try:
            await self.mesh.call(self.host.roster.stage_home(entry.name, body.stage), withdraw)
        except DataplaneError as exc:
            log.warning("a claim could not be withdrawn: %s", exc)
        for part, _ in waiting.parts:
            await self._release(part, entry)

    async def _release(self, part: Part, entry: Entry) -> None:
        body = Finish(part.lease, "release", partition=entry.name, generation=entry.generation)
        try:
            await self.mesh.call(part.address, body)
        except DataplaneError as exc:
            log.info("a granted lease had ended already: %s", exc)

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

    # waiting without claiming

    async def wait(self, session: Session, request: Request, body: Wait) -> Body:
        """The home is asked again and again: what it holds for a waiter ends with the waiter."""
        entry = await self.partitions.entry(body.partition, body.generation)
        home = self.host.roster.stage_home(body.partition, body.stage)
        end = self.host.now() + body.timeout_ms / 1000 if body.timeout_ms >= 0 else math.inf
        while True:
            left = max(0.0, end - self.host.now())
            asked = msgspec.structs.replace(body, timeout_ms=int(min(left, WAIT_TURN_S) * 1000))
            try:
                return await self.mesh.call(home, asked)  # type: ignore[no-any-return]
            except ClaimTimeout as exc:
                if left > WAIT_TURN_S:
                    continue
                why, details = await self._why(entry, body.stage, body.unit, None)
                raise ClaimTimeout(
                    f"waiting for stage {body.stage!r} of {entry.name!r}: {why} after "
                    f"{body.timeout_ms / 1000:g} s",
                    **details,
                ) from exc

    # what is missing

    def _missing(self, caller: Caller, body: Missing) -> Body:
        entry = self.host.entry(body.partition, body.generation)
        if entry is None:
            return StatsDone({})
        found = entry.store.missing(body.stage, body.unit, now=self.host.now())
        found["leases"] = [
            [self.host.labels.get(holder, f"client {holder:x}"), rows, age]
            for holder, rows, age in found["leases"]
        ]
        return StatsDone(found)

    async def _why(
        self, entry: Entry, stage: str, unit: str, want: Want | None
    ) -> tuple[str, dict[str, Any]]:
        """ "509 of 512 groups ready; 3 lack `reward`, leased by pid 7 on host b for 90 s"."""
        asked = Missing(entry.name, entry.generation, stage, unit)  # type: ignore[arg-type]
        members = self.host.roster.members[:MAX_PEERS_ASKED]
        answers = await asyncio.gather(
            *(self.mesh.call(m, asked, timeout_s=2.0) for m in members), return_exceptions=True
        )
        found = [a.stats for a in answers if isinstance(a, StatsDone) and a.stats]
        silent = sum(isinstance(a, BaseException) for a in answers)
        ready = sum(f["ready"] for f in found)
        total = sum(f["units"] for f in found)
        missing: dict[str, int] = {}
        for f in found:
            for name, count in f["missing"].items():
                missing[name] = missing.get(name, 0) + count
        leases = [lease for f in found for lease in f["leases"]]
        opened = sum(f["open_groups"] for f in found)
        parts = [f"{ready} of {total} {unit} ready"]
        if want is not None and want.budget_tag is None:
            parts[0] += f", {want.count} wanted"
        parts += [f"{count} rows lack `{name}`" for name, count in missing.items()]
        if opened and unit == "groups":
            parts.append(f"{opened} groups are still open")
        parts += [f"{rows} rows leased by {who} for {age:.0f} s" for who, rows, age in leases[:3]]
        if silent:
            parts.append(f"{silent} peers did not answer")
        details = {"ready": ready, "units": total, "missing": missing, "leases": leases}
        return "; ".join(parts), details


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
