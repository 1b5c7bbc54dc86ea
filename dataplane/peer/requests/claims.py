"""Claims of this host's clients: sent to their partition's shard, copied here, and handed out.

A claim is one request to the shard's primary, which replies when it has rows for it. This peer
repeats the request after a link breaks or the shard moves, with the claim's number and age. When no
caller waits for the claim, this peer sends a withdrawal until the shard confirms.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Any

import msgspec

from dataplane.errors import (
    ClaimTimeout,
    DataplaneError,
    DeadlineExceeded,
    FrameTooLarge,
    LeaseExpired,
    RowsGone,
    RowsLost,
    counted,
)
from dataplane.memory.admission import Admission
from dataplane.metadata.shard.reasons import Subject
from dataplane.peer.host import ByLabel, Host, call_context
from dataplane.peer.net.router import Router, ends
from dataplane.peer.notices import Telling
from dataplane.peer.requests.leases import Finishing, Lease, Part
from dataplane.peer.requests.reads import Reading
from dataplane.peer.requests.waits import Waits
from dataplane.peer.room.admission import Room
from dataplane.peer.sessions import Session
from dataplane.wire.messages import Body, Claim, Claimed, Request

log = logging.getLogger(__name__)

TOLD_FROM = 8
"""From this many attempts on, the log says how often a claim's rows were gone."""


class _Claiming(msgspec.Struct, eq=False):
    """A client's claim. number: the shard's name for it; a new one if the claim must get other
    rows. op: the client's number for it, which a retry repeats."""

    number: int
    session: Session
    body: Claim
    began: float
    op: int

    def left_s(self, now: float) -> float | None:
        """Return the seconds left of the claim's wait, or of its round trip if it does not wait.
        None: no limit."""
        until = ends(self.body.timeout_ms, self.began)
        return None if until == math.inf else max(0.0, until - now)

    @property
    def part(self) -> Part:
        body = self.body
        return self.session.id, body.partition, body.generation, body.stage

    def __str__(self) -> str:
        stage, name = self.body.stage, self.body.partition
        if self.body.plan is not None:
            return f"plan for stage {stage!r} of partition {name!r}"
        want = self.body.want
        if want.budget_tag is not None:
            much = f"{want.unit} with a budget of {want.budget:g} (tag `{want.budget_tag}`)"
        else:
            much = counted(want.count, want.unit[:-1])
        return f"claim of {much} for stage {stage!r} of partition {name!r}"


@dataclass(eq=False, repr=False)
class Claims:
    host: Host
    router: Router
    finishing: Finishing
    reading: Reading
    waits: Waits
    room: Room

    def __post_init__(self) -> None:
        self.leases = self.finishing.leases
        self.far_bytes = ByLabel()
        """by stage: bytes of granted values that are on other hosts"""
        self.waiting = 0

    # requests to the shard

    async def claim(self, session: Session, request: Request, body: Claim) -> Body:
        """Claim rows. Do not wait if the shard and the values of enough rows are local. If granted
        rows are gone before their values arrive, return the others to the stage and claim again,
        until the claim's deadline."""
        now = self.host.now()
        one = _Claiming(next(self.host.numbers), session, body, now, request.op)
        first: Any = None
        if body.plan is None and self.host.entry(body.partition, body.generation) is not None:
            first = self.router.begin_here(self._asked(one, now), self.host.caller(session.id))
        failed = 0
        while True:
            granted = first if isinstance(first, Claimed) else await self._granted(one, first)
            try:
                return await self._hand_out(one, granted)
            except (RowsGone, RowsLost) as exc:
                failed += 1
                if not await self.reading.pause(failed, ends(body.timeout_ms, one.began)):
                    raise ClaimTimeout(
                        f"{one} failed, because the claimed rows were dropped or lost before "
                        f"their values arrived ({exc.message}): claim again"
                    ) from exc
                if failed >= TOLD_FROM:
                    log.warning(
                        "%s: claiming again, because the granted rows were dropped or lost before "
                        "their values arrived (%d times so far): %s",
                        one,
                        failed,
                        exc,
                    )
            first = None
            one.number = next(self.host.numbers)

    async def _granted(self, one: _Claiming, answer: asyncio.Future[Any] | None) -> Claimed:
        """Return the shard's grant, wherever the shard is then. Raise the shard's error, or
        ClaimTimeout after withdrawing the claim."""
        session, settled = one.session, False  # the shard knows that the claim is over
        session.waiting += 1
        self.waiting += 1
        try:
            if one.body.plan is not None and (before := self.leases.leaving(one.part)):
                _, late = await asyncio.wait(before, timeout=one.left_s(self.host.now()))
                if late:
                    raise ClaimTimeout(
                        f"{one} failed, because this rank's share of the previous plan is "
                        "still being released: call part.plan(…) again"
                    )
            while True:
                asked, first, answer = self._asked(one, self.host.now()), answer, None
                try:
                    granted: Claimed = await self.waits.until_met(session, one, asked, first)
                    if self.host.now() > call_context.get().until:  # the client has given up
                        raise ClaimTimeout(
                            f"{one} timed out, because the local peer was suspended or busy "
                            "when the rows became ready: claim again"
                        )
                    settled = True
                    return granted
                except LeaseExpired:
                    one.number = next(self.host.numbers)  # the lease ended before its reply arrived
        except FrameTooLarge:
            raise  # no message can hold the grant, so it is withdrawn
        except ClaimTimeout as exc:
            # The shard keeps a waiting claim's place for another turn, even past its deadline.
            settled = one.body.timeout_ms == 0 and isinstance(exc.__cause__, ClaimTimeout)
            raise
        except DataplaneError:
            settled = True
            raise
        finally:
            session.waiting -= 1
            self.waiting -= 1
            if not settled:
                self._withdraw(one)

    def _asked(self, one: _Claiming, now: float) -> Claim:
        """Return the claim as the shard gets it, with the time that is left."""
        body, waited_ms = one.body, int(1000 * (now - one.began))
        return msgspec.structs.replace(
            body,
            timeout_ms=min(body.timeout_ms, max(0, body.timeout_ms - waited_ms)),
            lease_ms=0,
            number=one.number,
            label=one.session.label,
            waited_ms=waited_ms,
            most_bytes=0 if self.host.solo else self.host.space.quota_bytes[Admission.PULL],
        )

    def _withdraw(self, one: _Claiming) -> None:
        """Withdraw a claim that no caller waits for. Its rows return to the stage, also those of a
        later grant."""
        of = one.body
        told = self.router.withdraw(of.partition, of.generation, one.number)
        if of.plan is not None:
            self.leases.leaves(told, one.part)

    # replies to the client

    async def _hand_out(self, one: _Claiming, granted: Claimed) -> Body:
        """Give the lease to the session, and pull its values if they are remote."""
        body, table, session = one.body, granted.table, one.session
        lease = Lease(
            granted.lease,
            body.partition,
            body.generation,
            body.stage,
            table.rows.count,
            session,
            plan=granted.plan is not None,
            claimed=one.op,
        )
        self.leases.open(lease)
        needed_bytes = 0
        try:
            if needed_bytes := self.room.needed(table):
                await self._has_room(one, needed_bytes)
                self.far_bytes.add(body.stage, needed_bytes)
            found = self.reading.resolve(table, session.id)
            table, pin = found if isinstance(found, tuple) else await found
        except BaseException as exc:
            self.finishing.release(session, granted.lease)
            if isinstance(exc, DeadlineExceeded):
                raise ClaimTimeout(
                    f"the values of leased rows of partition {body.partition!r} did not "
                    f"arrive in time ({exc.message}), so the rows were returned to the stage: "
                    "claim again with a longer timeout="
                ) from exc
            raise
        finally:
            if needed_bytes:
                self.room.back(one.number)
        return Claimed(granted.lease, pin, table, granted.plan)

    async def _has_room(self, one: _Claiming, needed_bytes: int) -> None:
        """Wait for space for all values that the lease copies here. Raise ClaimTimeout."""
        if self.room.promise(one.number, needed_bytes):
            return
        one.session.waiting += 1
        subject = Subject("pull", one.body.partition, one.body.stage)
        try:
            with Telling(self.host, one, subject, lambda: self.room.why(needed_bytes)):
                left_s = one.left_s(self.host.now())
                if not await self.room.promised(one.number, one.session.id, needed_bytes, left_s):
                    why, details = self.room.why(needed_bytes)
                    raise ClaimTimeout(f"{one} timed out: {why}", **details)
        finally:
            one.session.waiting -= 1

    def answered(self, asked: Claim, claimed: Claimed) -> None:
        """Note that the client gets its rows now. A lease= limit starts here, so no earlier wait
        counts."""
        if asked.lease_ms:
            now = self.host.now()
            self.leases.look(now)
            self.leases.limit(claimed.lease, now + asked.lease_ms / 1000)
