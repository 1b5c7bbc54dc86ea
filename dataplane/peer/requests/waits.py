"""Calls that wait at a partition's shard: for rows to become ready or to leave, for permits to open
groups, and, in `claims`, for rows of their own.

They ask in turns. The end of each turn reports the reason for the wait, which goes into the log
of the waiting process, and finally into the message of its ClaimTimeout.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from dataplane.errors import (
    ClaimTimeout,
    DataplaneError,
    DeadlineExceeded,
    LimitExceeded,
    StaleEpoch,
    Unavailable,
    duration,
)
from dataplane.metadata.shard import reasons
from dataplane.peer.host import Host, call_context, waits_s
from dataplane.peer.net.router import Router
from dataplane.peer.notices import Telling, Why
from dataplane.peer.requests.directory import Directory
from dataplane.peer.sessions import HeldPermit, Session
from dataplane.wire.messages import Admit, Admitted, Body, Claim, Done, Request, Wait, Withdraw

MAX_PERMITS = 65_536
"""The most permits that one client holds."""
UNSAID = "the peer that serves the partition has not reported the reason yet"


@dataclass(eq=False, repr=False)
class Waits:
    host: Host
    router: Router
    sessions: Iterable[Session]
    directory: Directory

    async def until_met(
        self,
        session: Session,
        what: object,
        body: Claim | Wait | Admit,
        first: Awaitable[Body] | None = None,
    ) -> Any:
        """Return the reply of the shard. At the deadline, raise ClaimTimeout with the reason; its
        cause is the outcome of the last turn. first: the first turn, if it has started."""
        own, subject = not isinstance(body, Wait) and body.own, _subject(body)
        told: DataplaneError | None = None
        """the outcome of the last turn that stated a reason"""
        told_at = 0.0

        def why() -> Why:
            if told is None:  # use the reason of another call
                return self.host.notices.why(subject) or UNSAID, {}
            return self._why(session, body, told, self.host.now() - told_at)

        def hear(said: DataplaneError) -> None:
            nonlocal told, told_at
            if isinstance(said, ClaimTimeout | Unavailable):
                told, told_at = said, self.host.now()
                sentence, details = why()
                self.host.notices.set_reason(subject, sentence, details.get("reason", ""))
                if strangers := _producers(said):
                    self.router.mesh.spawn(self.directory.learn(strangers))

        async def learn() -> None:
            if told is not None:  # a producer may have ended since the last turn
                await self.directory.learn(_producers(told))

        caller = self.host.caller(session.id)
        with Telling(self.host, what, subject, why, soon=own, learn=learn):
            try:
                return await self.router.wait(body, caller, hear, first)
            except (ClaimTimeout, DeadlineExceeded, StaleEpoch, Unavailable) as exc:
                if body.timeout_ms:
                    await learn()
                age_ms = 0 if isinstance(body, Wait) else body.waited_ms
                within_s = call_context.get().delayed_s + (age_ms + body.timeout_ms) / 1000
                reason, details = why()
                late = f"{what} timed out after {duration(within_s)}: {reason}"
                raise ClaimTimeout(late, **details) from exc

    def _why(
        self, session: Session, body: Claim | Wait | Admit, said: DataplaneError, since_s: float
    ) -> Why:
        """ "509 of 512 groups ready; 3 rows lack `reward`, leased by pid 7 on host b for 90 s"."""
        if isinstance(body, Admit):
            return said.message, said.details
        unit = body.want.unit if isinstance(body, Claim) else body.unit
        near: int | str = ""
        if isinstance(said, ClaimTimeout):
            told = dict(said.details)
            near = told.pop("near", "")
            facts = self.directory.facts(unit, told, body.partition, since_s)
            facts.needed = _needed(body)
        else:
            home = self.host.roster.home(body.partition)
            facts = reasons.Facts(unit, silent=f"{self.router.mesh.others.name(home)} at {home}")
        if isinstance(body, Wait) and body.key is not None:
            return reasons.of_key(body.key, near, facts), facts.details
        for_rows = not (isinstance(body, Wait) and body.below)
        why = reasons.reason(facts, body.stage, _wanted(body), session.label, for_rows)
        others = (s for s in self.sessions if body.partition in s.partitions)
        alone = self.host.solo and all(other.is_of(session) for other in others)
        # Say so if only this client can end its own wait.
        own = isinstance(body, Wait) or body.own
        own = own and reasons.only_own(facts, body.stage, session.label, alone)
        return f"{why}; {reasons.OWN}" if own else why, facts.details | {"only_own": own}

    # asked for by clients of this host

    async def wait(self, session: Session, request: Request, body: Wait) -> Body:
        """Wait until the shard confirms the condition. Raises ClaimTimeout, StreamEnd or
        PartitionGone."""
        of = f"stage {body.stage!r}" if body.key is None else f"row {body.key!r}"
        what = f"wait for {of} of partition {body.partition!r}"
        done: Body = await self.until_met(session, what, body)
        return done

    async def admit(self, session: Session, request: Request, body: Admit) -> Body:
        """Return a permit to open groups. Raises ClaimTimeout, PartitionGone, PartitionSealed,
        PartitionConflict or InvalidCall."""
        for number, held in session.permits.items():
            if request.op and held.op == request.op:  # a retry: the reply was lost
                return Admitted(number, held.version)
        if len(session.permits) >= MAX_PERMITS:
            raise LimitExceeded(
                f"this client already has {MAX_PERMITS} `with part.admit(…)` blocks open, "
                "the maximum: exit some of them first",
                limit=MAX_PERMITS,
            )
        number = next(self.host.numbers)
        one = msgspec.structs.replace(body, number=number, label=session.label)
        what = f"admit({body.count}) of partition {body.partition!r}"
        session.waiting += 1
        try:
            admitted: Admitted = await self.until_met(session, what, one)
        except BaseException:  # the shard keeps the call or its permit until it confirms
            self.router.withdraw(body.partition, body.generation, number)
            raise
        finally:
            session.waiting -= 1
        of = body.partition, body.generation
        session.permits[number] = HeldPermit(*of, request.op, admitted.version)
        return admitted

    async def withdraw(self, session: Session, request: Request, body: Withdraw) -> Body:
        """Return permits, resending until the shard confirms, even if the client no longer
        waits. Raises Unavailable."""
        if told := self.give_back(session, body.numbers):
            left_s = waits_s(-1)
            await asyncio.wait(told, timeout=left_s if math.isfinite(left_s) else None)
            if not all(one.done() for one in told):
                raise Unavailable(
                    f"the peer that serves partition {body.partition!r} is not responding. "
                    "It will free the permits that this call returns once it responds again, so do "
                    "not repeat the call",
                    partition=body.partition,
                )
        return Done()

    def give_back(self, session: Session, permits: list[int]) -> list[asyncio.Future[None]]:
        """Return permits that no client will use. The futures are done when their shards
        confirm."""
        told: list[asyncio.Future[None]] = []
        for number in permits:
            held = session.permits.pop(number, None)
            if held is not None:
                told.append(self.router.withdraw(held.partition, held.generation, number))
        return told


def _subject(body: Claim | Wait | Admit) -> reasons.Subject:
    """Return what a call waits for. Calls with equal subjects share one log line."""
    if isinstance(body, Admit):
        limits = body.generation, body.max_lag, body.per_version
        return reasons.Subject("admit", body.partition, "", limits)
    kind, want = ("claim", body.want) if isinstance(body, Claim) else ("wait", body)
    key = body.key if isinstance(body, Wait) else None
    among = body.generation, want.unit, str(want.where), key
    return reasons.Subject(kind, body.partition, body.stage, among)


def _producers(said: DataplaneError) -> list[int]:
    """Return the sessions that a shard named as producers of rows."""
    return [session for session, _, _ in said.details.get("producers", ())]


def _needed(body: Claim | Wait) -> int:
    """Return how many units a call needs at least, or 0 if it counts none."""
    if isinstance(body, Wait):
        return body.count
    return body.want.minimum or body.want.count


def _wanted(body: Claim | Wait) -> str:
    """Return what a call waits for, in words."""
    if isinstance(body, Wait):
        if body.count:
            return f"{body.count} wanted"
        return f"fewer than {body.below} unfinished wanted"
    want = body.want
    if want.budget_tag is None:
        least = f" (at least {want.minimum})" if 0 < want.minimum < want.count else ""
        return f"{want.count} wanted{least}" if want.count else ""
    return (
        f"and the claim returns once its budget of {want.budget:g} (tag `{want.budget_tag}`) is "
        "full or the partition is sealed"
    )
