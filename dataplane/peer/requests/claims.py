"""Claims of this host's clients: asked of their partition's shard, brought here, handed out.

A claim is one request to the shard's primary, which answers when it has rows for it. Who asks has
all the patience: it asks again where a link broke or the shard moved, under the claim's number and
at its age, and tells the shard, until that has answered, when nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import msgspec

from dataplane.errors import (
    ClaimTimeout,
    DataplaneError,
    DeadlineExceeded,
    FieldUnknown,
    FrameTooLarge,
    LeaseExpired,
    RowsGone,
    RowsLost,
    StaleEpoch,
    Unavailable,
)
from dataplane.memory.admission import Admission
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.shard.reasons import Subject
from dataplane.peer import rows as rowset
from dataplane.peer.host import ByLabel, Caller, Host, call_deadline
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.net.router import Router
from dataplane.peer.notices import LAST_S, Telling
from dataplane.peer.requests.finishes import Finishing
from dataplane.peer.requests.leases import Leases, Part
from dataplane.peer.requests.reads import Reading, Resolved
from dataplane.peer.requests.waits import Waits
from dataplane.peer.room.admission import Room
from dataplane.peer.sessions import Session
from dataplane.wire.messages import Body, Claim, Claimed, Request
from dataplane.wire.peering import Granted, Withdraw
from dataplane.wire.tables import Table

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often a claim is granted rows that went meanwhile before that is its caller's business."""
ASK_S = 60.0
"""A claim that waits asks again after so long, should its answer have been lost without a word."""
AT_ONCE_S = 0.3
"""A claim that does not wait has so long for its way to the shard and back."""


class BytesLost(Exception):
    """Rows were granted whose bytes went with a peer: their shard does not know that yet, or where
    second copies are."""


class _Waiting(msgspec.Struct, eq=False):
    """A client's claim. number: under which the shard knows it; another one where it has to be
    granted other rows."""

    number: int
    session: Session
    body: Claim
    began: float
    until: float
    """the end of its wait, and where it does not wait, with time to ask"""
    asks: str = ""
    """the process that was asked, by address and incarnation"""
    answer: asyncio.Future[Any] | None = None
    settled: bool = False
    """the shard has answered, and knows that"""

    def left_s(self, now: float) -> float | None:
        """None: for ever."""
        return None if self.until == math.inf else max(0.0, self.until - now)

    @property
    def part(self) -> Part:
        body = self.body
        return self.session.id, body.partition, body.generation, body.stage

    def __str__(self) -> str:
        stage, name = self.body.stage, self.body.partition
        if self.body.plan is not None:
            return f"plan of stage {stage!r} of partition {name!r}"
        want = self.body.want
        much = f"{want.budget:g} of {want.budget_tag!r}" if want.budget_tag else str(want.count)
        return f"claim of {much} ({want.unit}) for stage {stage!r} of partition {name!r}"


@dataclass(eq=False, repr=False)
class Claims:
    host: Host
    mesh: Mesh
    router: Router
    leases: Leases
    finishing: Finishing
    reading: Reading
    waits: Waits
    room: Room

    def __post_init__(self) -> None:
        self.far_bytes = ByLabel()
        """by stage: what claims were granted of values that other hosts have"""
        # no claim of another peer, or of this one's last life, has the same number
        self._numbers = itertools.count(1 + secrets.randbits(62))
        self._waiting: set[_Waiting] = set()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # asked

    def claim(self, session: Session, request: Request, body: Claim) -> Body | Awaitable[Body]:
        """At once where the shard is here, and has enough that lies here."""
        now, until = self.host.now(), math.inf
        if body.timeout_ms >= 0:
            until = now + body.timeout_ms / 1000
        if body.timeout_ms == 0:
            until = min(now + AT_ONCE_S, call_deadline.get())
        one = _Waiting(next(self._numbers), session, body, now, until)
        here = self.host.entry(body.partition, body.generation) is not None
        if not here or self.host.silent or body.plan is not None:
            return self._until_here(one)
        answer = self._ask(one)
        if not answer.done() or answer.exception() is not None:
            return self._until_here(one, answer)
        handed = self._hand_out(one, answer.result())
        return handed if isinstance(handed, Body) else self._until_here(one, handed=handed)

    async def _until_here(
        self,
        one: _Waiting,
        answer: asyncio.Future[Any] | None = None,
        handed: Body | Awaitable[Body] | None = None,
    ) -> Body:
        """Claims again where rows that were granted are gone before they are here."""
        body = one.body
        for failed in itertools.count(1):
            try:
                if handed is None:
                    handed = self._hand_out(one, await self._granted(one, answer))
                return handed if isinstance(handed, Body) else await handed
            except (BytesLost, RowsGone) as exc:
                if failed == ATTEMPTS:
                    raise _given_up(exc, body.partition) from None
                if isinstance(exc, BytesLost):
                    await self.reading.learn()
            answer = handed = None
            one.number = next(self._numbers)
        raise AssertionError("it counts for ever")

    async def _granted(self, one: _Waiting, answer: asyncio.Future[Any] | None) -> Granted:
        """What the shard answers, wherever that is then: rows, or why there never will be any.
        ClaimTimeout, of which the shard is told."""
        body, session = one.body, one.session
        look = self.waits.looks(session, body, lambda: one.number, body.own)
        among = (body.generation, body.want.unit, str(body.want.where))
        subject = Subject("claim", body.partition, body.stage, among)
        session.waiting += 1
        self._waiting.add(one)
        try:
            with Telling(self.host, one, subject, look, body.own):
                granted = await self._answered(one, answer)
                if granted is None:
                    raise _in_vain(one, *await look(LAST_S))
            return granted
        finally:
            session.waiting -= 1
            self._waiting.discard(one)
            if not one.settled:
                self._withdraw(one)

    async def _answered(self, one: _Waiting, answer: asyncio.Future[Any] | None) -> Granted | None:
        """None when its time is up."""
        one.settled = False
        if one.body.plan is not None and (before := self.leases.leaving(one.part)):
            await asyncio.wait(before, timeout=one.left_s(self.host.now()))

        async def attempt(roster: Roster, left_s: float) -> Granted | None:
            nonlocal answer
            one.asks = _process(roster, roster.home(one.body.partition))
            one.answer, answer = answer or self._ask(one), None
            try:
                await asyncio.wait([one.answer], timeout=None if left_s == math.inf else left_s)
                if not one.answer.done():
                    return None
                if one.answer.cancelled():
                    raise StaleEpoch("the shard is elsewhere now")
                granted: Granted = one.answer.result()
                return granted
            finally:
                one.answer.cancel()

        while True:
            try:
                granted = await self.router.reach(attempt, one.until)
            except (StaleEpoch, Unavailable):
                return None
            except LeaseExpired:
                one.number = next(self._numbers)  # what it was granted went before it heard
            except FrameTooLarge:
                raise  # it was granted what no message carries: that is withdrawn
            except DataplaneError as exc:
                one.settled = True
                if isinstance(exc, ClaimTimeout):  # it was not to wait
                    return None
                raise
            else:
                one.settled = granted is not None
                return granted

    def _ask(self, one: _Waiting) -> asyncio.Future[Any]:
        """The shard's primary, as the roster names it now."""
        roster, body = self.host.roster, one.body
        caller = Caller(self.host.address, self.host.incarnation, one.session.id)
        asked = Claim(
            body.partition,
            body.generation,
            body.stage,
            body.want,
            body.fields,
            declare=body.declare,
            timeout_ms=0 if body.timeout_ms == 0 else -1,
            number=one.number,
            label=one.session.label,
            waited_ms=int(1000 * (self.host.now() - one.began)),
            most_bytes=0 if self.host.solo else self.host.space.share_bytes[Admission.PULL],
            plan=body.plan,
            rank=body.rank,
        )
        home = roster.home(body.partition)
        return self.mesh.ask(home, asked, caller=caller, timeout_s=ASK_S, epoch=roster.epoch)

    def _withdraw(self, one: _Waiting) -> None:
        """Nobody waits for it: what it was granted goes back, and what comes of it later."""
        of = one.body
        told = self.router.tell(Withdraw(of.partition, of.generation, of.stage, one.number))
        if of.plan is not None:
            self.leases.leaves(told, one.part)

    def turned(self) -> None:
        """A new roster: whose shard another process has now asks there."""
        roster = self.host.roster
        for one in self._waiting:
            home = roster.home(one.body.partition)
            if one.answer is not None and one.asks != _process(roster, home):
                one.answer.cancel()

    # handed out

    def _hand_out(self, one: _Waiting, granted: Granted) -> Body | Awaitable[Body]:
        """The lease becomes the session's; its bytes are brought here if they are elsewhere."""
        body, table = one.body, granted.table
        rows = rowset.count(table.rows)
        self.leases.open(
            one.session,
            granted.lease,
            body.partition,
            body.generation,
            body.stage,
            rows,
            0 if granted.plan is None else one.number,
        )
        try:
            if body.fields and granted.plan is None:
                _check_fields(table, body.fields)
            needed_bytes = self.room.needed(table)
            resolved = None if needed_bytes else self.reading.resolve(table, one.session.id)
        except BaseException:
            self.finishing.release(one.session, granted.lease)
            raise
        if isinstance(resolved, tuple):
            return self._claimed(one, granted, *resolved)
        return self._pulled(one, granted, needed_bytes, resolved)

    async def _pulled(
        self,
        one: _Waiting,
        granted: Granted,
        needed_bytes: int,
        resolved: Awaitable[Resolved] | None,
    ) -> Body:
        try:
            if resolved is None:
                await self._has_room(one, needed_bytes)
                self.far_bytes.add(one.body.stage, needed_bytes)
                now = self.reading.resolve(granted.table, one.session.id)
                table, pin = now if isinstance(now, tuple) else await now
            else:
                table, pin = await resolved
        except BaseException as exc:
            self.finishing.release(one.session, granted.lease)
            if isinstance(exc, RowsLost):
                raise BytesLost from exc
            if isinstance(exc, DeadlineExceeded):
                raise _too_late(exc, one.body.partition) from exc
            raise
        finally:
            self.room.back(one.number)
        return self._claimed(one, granted, table, pin)

    async def _has_room(self, one: _Waiting, needed_bytes: int) -> None:
        """Room for all that it brings here, under its lease. ClaimTimeout."""
        if self.room.promise(one.number, needed_bytes):
            return

        async def look(limit_s: float) -> tuple[str, dict[str, Any]]:
            return self.room.why(needed_bytes)

        one.session.waiting += 1
        subject = Subject("pull", one.body.partition, one.body.stage)
        try:
            with Telling(self.host, one, subject, look):
                left_s = one.left_s(self.host.now())
                if not await self.room.promised(one.number, needed_bytes, left_s):
                    why, details = self.room.why(needed_bytes)
                    raise ClaimTimeout(f"{one} is out of time: {why}", **details)
        finally:
            one.session.waiting -= 1

    def _claimed(self, one: _Waiting, granted: Granted, table: Table, pin: int) -> Claimed:
        """A hard limit begins now: neither waiting nor bringing the values here takes of it."""
        if one.body.lease_ms:
            self.leases.limit(granted.lease, self.host.now() + one.body.lease_ms / 1000)
        return Claimed(granted.lease, pin, table, granted.plan)


def _process(roster: Roster, address: str) -> str:
    """Who answers there, in its present life."""
    return f"{address} {roster.incarnations[roster.members.index(address)]}"


def _check_fields(table: Table, asked: list[str]) -> None:
    """FieldUnknown for a field that none of these rows has."""
    there = {c.field for c in table.columns}
    others = f" (there are {sorted(there)})" if there else ""
    for name in asked:
        if name not in there:
            raise FieldUnknown(
                f"no row of this claim has a field {name!r}, the rows were given back: claim it "
                f"without, or name the field as it was put{others}",
                field=name,
            )


def _in_vain(one: _Waiting, why: str, details: dict[str, Any]) -> ClaimTimeout:
    """Its time is up. why: what it waited for."""
    within_s = one.body.timeout_ms / 1000
    what = "claim" if one.body.plan is None else "plan"
    return ClaimTimeout(
        f"{what} of stage {one.body.stage!r} of {one.body.partition!r} was not met within "
        f"{within_s:g} s: {why}",
        **details,
    )


def _too_late(exc: DeadlineExceeded, partition: str) -> ClaimTimeout:
    """Of a claim whose rows were granted, and whose values did not arrive."""
    return ClaimTimeout(
        f"rows of {partition!r} were granted, but their values did not arrive in time, and the "
        f"rows went back: {exc.message}"
    )


def _given_up(exc: Exception, partition: str) -> Exception:
    """What the caller is told in the end of a claim that was granted what went meanwhile."""
    if isinstance(exc, BytesLost):
        return Unavailable(
            f"values of rows of {partition!r} went with a peer, and the peer that has the rows "
            f"does not know yet ({exc.__cause__}): claim again",
            partition=partition,
        )
    return exc
