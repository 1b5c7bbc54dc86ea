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
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from dataplane.errors import (
    ClaimTimeout,
    DeadlineExceeded,
    RowsGone,
    RowsLost,
    StageUndefined,
    Unavailable,
)
from dataplane.metadata.credit import PullCredit
from dataplane.metadata.reasons import Subject
from dataplane.peer import outcomes
from dataplane.peer import rows as rowset
from dataplane.peer.credit import Credit
from dataplane.peer.host import Caller, Entry, Host, Known
from dataplane.peer.leases import Handed, Leases, Part
from dataplane.peer.losses import LossReports
from dataplane.peer.mesh import Mesh
from dataplane.peer.meters import ByLabel
from dataplane.peer.notices import Telling
from dataplane.peer.partitions import Partitions
from dataplane.peer.reading import Reading, Resolved
from dataplane.peer.seats import Seats
from dataplane.peer.sessions import Session
from dataplane.peer.supplying import Supplying
from dataplane.peer.waits import Waits
from dataplane.wire.messages import Body, Claim, Claimed, Done, Request
from dataplane.wire.peering import Demand, Grant, Granted, Settled, Withdraw
from dataplane.wire.tables import Table

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often a claim is granted rows that went meanwhile before that is its caller's business."""
GIVE_BACK_S = 0.2
"""A claim that ends in vain waits so long until what it held is back."""
LEARN_S = 1.0
"""A new roster, by which shards learn that bytes are lost, is awaited for so long."""


@dataclass(slots=True)
class Waiting:
    """A claim of this host that queues at its stage's home."""

    entry: Known
    home: str
    parts: list[Handed] = field(default_factory=list)
    needed_bytes: int = 0
    """what it has to pull at once, where that is why it was sent away"""
    settled: asyncio.Future[str] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


def _named(entry: Known, body: Claim) -> str:
    want = body.want
    much = f"{want.budget:g} of {want.budget_tag!r}" if want.budget_tag else str(want.count)
    return f"claim of {much} ({want.unit}) for stage {body.stage!r} of partition {entry.name!r}"


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
        losses: LossReports,
        supplying: Supplying,
        credit: Credit,
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self.seats = seats
        self.leases = leases
        self.reading = reading
        self.waits = waits
        self.losses = losses
        self.supplying = supplying
        self.credit = credit
        self.far_bytes = ByLabel()
        """by stage: what claims were granted of values that other hosts have"""
        # not from 1: what was ordered for a claim of this peer's last life must find none here
        self._numbers = itertools.count(host.incarnation)
        self._waiting: dict[int, Waiting] = {}
        self._queued: dict[tuple[str, int, str], int] = {}
        mesh.on_parted.append(self._parted)
        mesh.handlers |= {
            Grant: self._grant,
            Settled: self._settled,
        }

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # from this host's clients

    def claim(self, session: Session, request: Request, body: Claim) -> Body | Awaitable[Body]:
        """At once where this peer has it all and nobody was there before, else queued."""
        entry = self.host.known(body.partition, body.generation)
        if entry is None or body.stage not in entry.definition.stages:
            return self._claim_after_attaching(session, body)
        if isinstance(entry, Entry) and self._may_take(entry, body.stage):
            fields = outcomes.fields_of(entry, body)
            credit = None
            if not self.host.solo:
                credit = PullCredit(self.host.address, self.credit.room, fields)
            granted = self.supplying.take(entry, body.stage, body.want, session.id, fields, credit)
            if granted is not None:
                number = next(self._numbers)
                self.credit.promise(number, self.credit.of(granted.table))
                handed = self._hand_out(number, session, entry, body, [granted])
                if isinstance(handed, Body):
                    return handed
                return self._or_queued(handed, session, entry, body)
        return self._queue(session, entry, body)

    async def _or_queued(
        self, handed: Awaitable[Body], session: Session, entry: Known, body: Claim
    ) -> Body:
        end = self.host.now() + body.timeout_ms / 1000 if body.timeout_ms >= 0 else None
        try:
            return await handed
        except (outcomes.BytesLost, RowsGone):
            return await self._queue(
                session, entry, outcomes.what_is_left(body, end, self.host.now())
            )

    def _may_take(self, entry: Entry, stage: str) -> bool:
        """Queued demand goes before later local claims; after the seal the home decides."""
        key = (entry.name, entry.generation, stage)
        return not (entry.sealed or self._queued.get(key) or self.seats.is_hungry(entry, stage))

    async def _claim_after_attaching(self, session: Session, body: Claim) -> Body:
        entry = await self.partitions.known(body.partition, body.generation, body.stage)
        if body.stage not in entry.definition.stages:
            if body.declare is None:
                raise StageUndefined(
                    f"partition {body.partition!r} has the stages "
                    f"{sorted(entry.definition.stages)}, not {body.stage!r}: declare it in "
                    "plane.partition(stages=…) or give this claim fields=[…]",
                    stage=body.stage,
                )
            await self.partitions.add_stage(entry, body.stage, body.declare)
            entry = await self.partitions.known(body.partition, body.generation, body.stage)
        return await self._queue(session, entry, body)

    async def _queue(self, session: Session, entry: Known, body: Claim) -> Body:
        """Until granted. Again where the home went away, rows that were granted are gone, or more
        had to be pulled than there was room for."""
        end = self.host.now() + body.timeout_ms / 1000 if body.timeout_ms >= 0 else None
        failed = 0
        while True:
            try:
                return await self._queue_once(session, entry, body)
            except outcomes.Starved as starved:
                await self._await_room(session, starved.needed_bytes, entry, body, end)
            except Unavailable as exc:
                if end is None or self.host.now() < end:
                    raise
                raise outcomes.in_vain(entry, body, str(exc), {}) from exc
            except (outcomes.HomeMoved, outcomes.HomeAway):
                log.debug("a claim of %r queues anew at its home", entry.name)
            except (outcomes.BytesLost, RowsGone) as exc:
                failed += 1
                if failed == ATTEMPTS:
                    raise outcomes.given_up(exc, entry) from None
                if isinstance(exc, outcomes.BytesLost):
                    await self.host.another_roster(self.host.roster, self.host.now() + LEARN_S)
            body = outcomes.what_is_left(body, end, self.host.now())

    async def _await_room(
        self, session: Session, needed_bytes: int, entry: Known, body: Claim, end: float | None
    ) -> None:
        """Holding nothing, until so many bytes may be pulled. ClaimTimeout, ValueTooLarge."""
        claim = _named(entry, body)
        self.credit.check(needed_bytes, claim)

        async def look(limit_s: float) -> tuple[str, dict[str, Any]]:
            return self.credit.why(needed_bytes)

        session.waiting += 1
        try:
            with Telling(self.host, claim, Subject("pull", entry.name, body.stage), look):
                left_s = None if end is None else max(0.0, end - self.host.now())
                if not await self.credit.wait(needed_bytes, left_s):
                    why, details = self.credit.why(needed_bytes)
                    raise ClaimTimeout(f"{claim} is out of time: {why}", **details)
        finally:
            session.waiting -= 1

    async def _queue_once(self, session: Session, entry: Known, body: Claim) -> Body:
        number = next(self._numbers)
        home = self.host.roster.home(entry.name)
        waiting = self._waiting[number] = Waiting(entry, home)
        key = (entry.name, entry.generation, body.stage)
        self._queued[key] = self._queued.get(key, 0) + 1
        session.waiting += 1
        try:
            await self._demand(number, session, waiting, body)
            await self._await_settled(session, waiting, entry, body)
        except BaseException:
            await asyncio.shield(self._give_up(number, waiting, entry, body))
            raise
        finally:
            session.waiting -= 1
            self._waiting.pop(number, None)
            self._queued[key] -= 1
            if not self._queued[key]:
                del self._queued[key]
        handed = self._hand_out(number, session, entry, body, waiting.parts)
        return handed if isinstance(handed, Body) else await handed

    async def _demand(self, number: int, session: Session, waiting: Waiting, body: Claim) -> None:
        entry = waiting.entry
        demand = Demand(
            entry.name,
            entry.generation,
            body.stage,
            number,
            body.want,
            session.id,
            session.label,
            0,  # its hard limit begins when it is met, not with each part that it waits with
            outcomes.fields_of(entry, body),
            self.credit.room(),
        )

        def home() -> str:
            waiting.home = self.host.roster.home(entry.name)
            return waiting.home

        await self.mesh.reach(home, demand)

    async def _await_settled(
        self, session: Session, waiting: Waiting, entry: Known, body: Claim
    ) -> None:
        """Returns when all parts are here. ClaimTimeout, StreamEnd, PartitionGone otherwise."""
        if not waiting.settled.done():
            await self._until_settled(session, waiting, entry, body)
        outcome = waiting.settled.result()
        if outcome == "lost":
            raise outcomes.rows_lost(body, await self.losses.latest(entry.name, entry.generation))
        outcomes.check(outcome, entry, body, waiting.needed_bytes)

    async def _until_settled(
        self, session: Session, waiting: Waiting, entry: Known, body: Claim
    ) -> None:
        want = body.want
        left_s = body.timeout_ms / 1000 if body.timeout_ms >= 0 else math.inf
        look = self.waits.looks(session, entry, body.stage, want.unit, want)
        told = self.waits.explain(self.host.now() + left_s, look)
        among = (entry.generation, want.unit, str(want.where))
        subject = Subject("claim", entry.name, body.stage, among)
        mine = self.leases.among(session.leases, entry.name, body.stage)
        try:
            with Telling(self.host, _named(entry, body), subject, look, soon=mine):
                done, _ = await asyncio.wait(
                    [waiting.settled], timeout=None if left_s == math.inf else left_s
                )
            if not done:
                raise outcomes.in_vain(entry, body, *await told)
        finally:
            told.cancel()

    async def _give_up(self, number: int, waiting: Waiting, entry: Known, body: Claim) -> None:
        """Withdraw, and give back what was granted meanwhile."""
        self._waiting.pop(number, None)
        withdraw = Withdraw(entry.name, entry.generation, body.stage, number)
        roster, home = self.host.roster, waiting.home

        def find() -> str | None:
            # under a roster that moves shards the home forgets it by itself
            return home if self.host.roster.places_like(roster) else None

        self.mesh.spawn(self.mesh.insist(find, withdraw))
        self.credit.back(number)
        release = self.supplying.release
        if back := [self.mesh.spawn(release(handed.part, entry)) for handed in waiting.parts]:
            await asyncio.wait(back, timeout=GIVE_BACK_S)

    def _parted(self, address: str) -> None:
        """A home there may have forgotten the claims that queue at it: they queue again."""
        for waiting in self._waiting.values():
            if waiting.home == address and not waiting.settled.done():
                waiting.settled.set_result(outcomes.AWAY)

    def turned(self) -> None:
        """A new roster: every home begins anew, and waiting claims queue again."""
        for waiting in self._waiting.values():
            if not waiting.settled.done():
                waiting.settled.set_result(outcomes.MOVED)

    def _hand_out(
        self, number: int, session: Session, entry: Known, body: Claim, parts: list[Handed]
    ) -> Body | Awaitable[Body]:
        """The lease becomes the session's; its bytes are brought here if they are elsewhere."""
        lease = self.leases.open(
            session, entry.name, entry.generation, body.stage, [h.part for h in parts]
        )
        try:
            outcomes.check_fields([handed.table for handed in parts], body.fields)
            resolved = self.reading.gather(parts, session.id)
        except BaseException:
            self.credit.back(number)
            self._take_back(session, lease.id, entry)
            raise
        if isinstance(resolved, tuple):
            return self._claimed(lease.id, body, *resolved)
        self.far_bytes.add(body.stage, self.credit.promised(number))
        return self._pulled(number, session, lease.id, entry, body, resolved)

    async def _pulled(
        self,
        number: int,
        session: Session,
        lease_id: int,
        entry: Known,
        body: Claim,
        pulled: Awaitable[Resolved],
    ) -> Body:
        try:
            table, pin = await pulled
        except BaseException as exc:
            self._take_back(session, lease_id, entry)
            if isinstance(exc, RowsLost):
                raise outcomes.BytesLost from exc
            if isinstance(exc, DeadlineExceeded):
                raise outcomes.too_late(exc, entry) from exc
            raise
        finally:
            self.credit.back(number)
        return self._claimed(lease_id, body, table, pin)

    def _claimed(self, lease_id: int, body: Claim, table: Table, pin: int) -> Claimed:
        """A hard limit begins now: neither waiting nor bringing the values here takes of it."""
        if body.lease_ms:
            self.leases.limit(lease_id, self.host.now() + body.lease_ms / 1000)
        return Claimed(lease_id, pin, table)

    def _take_back(self, session: Session, lease_id: int, entry: Known) -> None:
        lease = self.leases.leave(session, lease_id)
        for part in lease.parts if lease else ():
            self.mesh.spawn(self.supplying.release(part, entry))

    def unheld(self, asked: list[int]) -> list[int]:
        """Those of granted leases that no client of this host has, or is about to have. No claim
        that waits keeps one, or is granted it later: its home does not count it."""
        settled = [w for w in self._waiting.values() if w.settled.done()]
        held = self.leases.numbers() | {h.part.lease for w in settled for h in w.parts}
        refused = sorted(set(asked) - held)
        self.leases.refuse(refused)
        for waiting in self._waiting.values():
            if not waiting.settled.done():
                waiting.parts = [h for h in waiting.parts if h.part.lease not in refused]
        return refused

    # from homes

    def _grant(self, caller: Caller, body: Grant) -> Body:
        waiting = self._waiting.get(body.number)
        if waiting is None or waiting.settled.done() or not self.host.roster.has(caller.owner):
            return Granted(False)
        if self.leases.is_refused(body.lease):
            return Granted(False)
        needed_bytes = self.credit.of(body.table)
        if not self.credit.promise(body.number, needed_bytes):
            waiting.needed_bytes = self.credit.promised(body.number) + needed_bytes
            waiting.settled.set_result(outcomes.STARVED)
            return Granted(False)
        part = Part(caller.owner, body.lease, rowset.count(body.table.rows))
        waiting.parts.append(Handed(part, body.table))
        if body.complete:
            waiting.settled.set_result(outcomes.COMPLETE)
        return Granted(True)

    def _settled(self, caller: Caller, body: Settled) -> Body:
        waiting = self._waiting.get(body.number)
        if waiting is None or waiting.settled.done():
            return Done()
        waiting.needed_bytes = self.credit.promised(body.number) + body.needed_bytes
        waiting.settled.set_result(body.outcome)
        return Done()
