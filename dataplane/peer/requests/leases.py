"""The leases of this host's clients: who holds which rows of which partition, and until when. Also
their end: ack, release or drop, with added fields, as one operation at the shard.

A lease has the number by which the partition's shard knows it. It ends when it is finished or
its session ends. This peer then releases what it held, and resends that to the shard until it
confirms. A repeated claim gets the same reply until the client has used its lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from dataplane.errors import DataplaneError, LeaseExpired, counted
from dataplane.memory.admission import Admission
from dataplane.peer.host import Caller, Entry
from dataplane.peer.net.router import Router
from dataplane.peer.requests.puts import Committed, Writing
from dataplane.peer.sessions import Session
from dataplane.wire.messages import Body, Done, Finish, PutDone, Request
from dataplane.wire.packed import U4, column

log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
"""The pause between log lines about a stage whose rows a client held when it ended."""
MAX_LOGGED = 256
"""The most stages that are remembered for these log lines."""
STALL_S = 0.5
"""This peer looks at the clock more often than this, unless it was stopped or had no processor
time. Hard limits do not count such time, because acks may have arrived in it that are not read
yet."""

Part = tuple[int, str, int, str]
"""A process in a plan: its session, partition, generation and stage."""


class Lease(msgspec.Struct, eq=False):
    number: int
    partition: str
    generation: int
    stage: str
    rows: int
    session: Session
    deadline: float | None = None
    finished: set[int] = set()
    """rows that ended, by their index in the claim"""
    plan: bool = False
    """whether it is a part in a plan"""
    claimed: int = 0
    """the claim's operation number"""
    kept: list[int] = []
    """pins on the values of failed acks, which the next ack of the same rows will name"""


class Leases:
    def __init__(
        self, unpin: Callable[[int, list[int]], None] = lambda session, pins: None
    ) -> None:
        """unpin: releases pins of a session."""
        self._unpin = unpin
        self._leases: dict[int, Lease] = {}
        self._looked_at: float | None = None
        self._leaving: dict[asyncio.Future[Any], Part] = {}
        """processes that left a plan, until its shard knows. Until then a process may not join the
        plan again"""

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, lease: Lease) -> None:
        self._leases[lease.number] = lease
        lease.session.leases.add(lease.number)

    def limit(self, number: int, deadline: float) -> None:
        """Set a lease's hard limit, which starts when its holder has the rows. A lease that has
        ended gets none."""
        lease = self._leases.get(number)
        if lease is not None:
            lease.deadline = deadline

    def look(self, now: float) -> None:
        """Extend the hard limits by the time in which this peer did not run."""
        stalled_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if stalled_s <= STALL_S:
            return
        for lease in self._leases.values():
            if lease.deadline is not None:
                lease.deadline += stalled_s

    def overdue(self, now: float) -> list[Lease]:
        """Return the leases whose hard limit has passed."""
        self.look(now)
        every = self._leases.values()
        return [one for one in every if one.deadline is not None and one.deadline <= now]

    def of(self, session: Session, number: int, now: float) -> Lease:
        """Return a lease of this session. Raise LeaseExpired if the session does not hold it, or
        its hard limit has passed."""
        self.look(now)
        lease = self._leases.get(number) if number in session.leases else None
        if lease is not None:
            self._heard(lease)
        if lease is None or (lease.deadline is not None and now >= lease.deadline):
            raise LeaseExpired(
                "this lease has ended: it was acked, released or dropped, or it timed out. An "
                "earlier attempt of this call may have taken effect: read the rows to find out, "
                "or claim again",
                lease=number,
            )
        return lease

    def close(self, lease: Lease) -> None:
        """End a lease."""
        lease.session.leases.discard(lease.number)
        if lease.kept:
            self._unpin(lease.session.id, lease.kept)
            lease.kept = []
        self._heard(lease)
        self._leases.pop(lease.number, None)

    def rows_of(self, session: Session) -> int:
        """The number of rows that a session has leased and not finished."""
        held = [self._leases[number] for number in session.leases if number in self._leases]
        return sum([lease.rows - len(lease.finished) for lease in held])

    def leave(self, session: Session, number: int) -> Lease | None:
        """Remove the lease from its session. Return it, or None if the session does not hold it."""
        lease = self._leases[number] if number in session.leases else None
        if lease is not None:
            self.close(lease)
        return lease

    # plans

    def leaves(self, told: asyncio.Future[Any], part: Part) -> None:
        """Note a message that tells the shard that this process leaves the plan. told: its
        confirmation."""
        self._leaving[told] = part
        told.add_done_callback(self._leaving.pop)

    def leaving(self, part: Part) -> list[asyncio.Future[Any]]:
        """Return messages that the shard must confirm before this process may join the plan
        again."""
        return [told for told, one in self._leaving.items() if one == part]

    @staticmethod
    def _heard(lease: Lease) -> None:
        """Forget the claim's operation, because its client has the rows and will not repeat it."""
        lease.session.repeats.claimed.pop(lease.claimed, None)


def _is_repeated(failure: BaseException) -> bool:
    """Return whether the shard had already applied the call, and only the reply was lost."""
    return isinstance(failure, LeaseExpired) and failure.details.get("repeated") is True


@dataclass(eq=False, repr=False)
class Finishing:
    router: Router
    leases: Leases
    writing: Writing

    def __post_init__(self) -> None:
        self.host, self.grants = self.writing.host, self.writing.grants
        self.abandoned_leases = 0
        """leases that clients held when they ended"""
        self._logged: dict[tuple[str, str], float] = {}
        """by partition and stage, when such a lease was last logged"""

    async def finish(self, session: Session, request: Request, body: Finish) -> Body:
        try:
            lease = self.leases.of(session, body.lease, self.host.now())
            if body.outcome == "leave":
                self.release(session, body.lease, heard=False)
                return Done()
            if not request.rid and body.outcome == "release" and body.index is None:
                self.release(session, body.lease)  # a one-way message, which no client retries
                return Done()
            committed = self.grants.commit(session, body.values, Admission.CONTINUE)
            if body.again:
                self._keep_written(lease, committed)
        except BaseException:
            self.grants.refused(session, body.values)
            raise
        if body.pin:
            self.host.space.unpin(session.id, [body.pin])
        body.values = committed.values
        body.partition, body.generation = lease.partition, lease.generation
        keep = partial(self._keep, lease, body, committed)
        try:
            done = await self.writing.store(session, body, committed, self._finish_at, keep)
        except LeaseExpired as exc:
            if not _is_repeated(exc):
                self.leases.close(lease)
                raise
            done = PutDone()
        return self._finished(lease, body, committed, done)

    def _keep(self, lease: Lease, body: Finish, committed: Committed, failure: object) -> None:
        """Keep the values of an ack that failed, because the client retries the ack. The peer keeps
        their chunks until the lease ends, and tells the client the numbers."""
        over = isinstance(failure, LeaseExpired) or lease.number not in lease.session.leases
        if over or not isinstance(failure, DataplaneError):
            return
        if body.outcome != "ack":
            self.grants.keep_where_full(lease.session, committed, failure)
            # A retry would get the same failure, so the client makes a new call.
            failure.details.setdefault("chunks", b"")
            return
        failure.details["chunks"] = self._keep_written(lease, committed)

    def _keep_written(self, lease: Lease, committed: Committed) -> bytes:
        """Keep what the message wrote until the lease ends. Return chunk numbers."""
        written = committed.written
        if len(written):
            lease.kept.append(self.host.space.keep(lease.session.id, written)[0])
        return written.tobytes()

    def _finished(self, lease: Lease, body: Finish, committed: Committed, done: PutDone) -> Body:
        """End the lease with its last row. Rows that the shard did not answer for are finished by a
        retry, or released when the session ends."""
        leave, before = body.outcome != "keep", len(lease.finished)
        if body.outcome == "abandon":
            self._abandoned(
                lease, "closed its client", ". Call batch.ack() once the rows are processed"
            )
        if leave and body.index is not None:
            lease.finished.update(column(body.index, U4).tolist())
        if body.outcome == "ack":
            upto = lease.rows if body.index is None else len(lease.finished)
            self.host.acked_by_clients.add(lease.stage, upto - before)
        if leave and (body.index is None or len(lease.finished) >= lease.rows):
            self.leases.close(lease)
        chunks = committed.written.tobytes() if body.again else b""
        ahead = self.grants.ahead(lease.session, body.want_bytes)
        return PutDone(ahead, done.kept, chunks=chunks)

    def finish_here(self, caller: Caller, body: Finish) -> Body | Awaitable[Body]:
        entry = self.host.entry(body.partition, body.generation)
        if entry is None:
            raise LeaseExpired(
                f"partition {body.partition!r} no longer exists, so its leases have "
                "ended: discard the batch without acking it"
            )
        return self.writing.apply(entry, caller, body, self._finish_at)

    def _finish_at(self, entry: Entry, caller: Caller, body: Finish) -> PutDone:
        """Add fields and end the lease, as one operation of the shard."""
        self.writing.metadata_quota.check(body.values, has_new_rows=False)
        return PutDone(kept=entry.store.finish(body, self.host.now()))

    def release_all(self, session: Session) -> None:
        """Return the rows of a session that ended to their stages, as they were claimed."""
        for number in list(session.leases):
            if (lease := self.leases.leave(session, number)) is not None:
                self._tell(lease, "abandon").add_done_callback(partial(self._given_back, lease))

    def _given_back(self, lease: Lease, told: asyncio.Task[bool]) -> None:
        if not told.cancelled() and told.exception() is None and told.result():
            self._abandoned(lease, "exited without closing its client")

    def _abandoned(self, lease: Lease, how: str, advice: str = "") -> None:
        """Log that a client ended while it held this lease, once a minute per stage."""
        self.abandoned_leases += 1
        key, now = (lease.partition, lease.stage), self.host.now()
        if now - self._logged.get(key, -LOG_EVERY_S) < LOG_EVERY_S:
            return
        self._logged = {k: at for k, at in self._logged.items() if now - at < LOG_EVERY_S}
        if len(self._logged) >= MAX_LOGGED:
            return
        self._logged[key] = now
        log.warning(
            "partition %r, stage %r: %s %s while holding %s that it had not acked, released or "
            "dropped, so the rows were returned to the stage%s. Logged at most once a "
            "minute per stage",
            lease.partition,
            lease.stage,
            lease.session.who,
            how,
            counted(lease.rows - len(lease.finished), "row"),
            advice,
        )

    def release(self, session: Session, lease_id: int, heard: bool = True) -> None:
        """Release a lease that no client holds any more. A no-op for a lease that has ended. If the
        holder never received its part in a plan, the plan continues without it."""
        lease = self.leases.leave(session, lease_id)
        if lease is not None:
            self._tell(lease, "release" if heard or not lease.plan else "leave")

    def _tell(
        self, lease: Lease, outcome: Literal["release", "leave", "abandon", "expire"]
    ) -> asyncio.Task[bool]:
        of = lease.partition, lease.generation
        told = self.router.tell(Finish(lease.number, outcome, partition=of[0], generation=of[1]))
        if lease.plan:
            self.leases.leaves(told, (lease.session.id, *of, lease.stage))
        return told

    def expire(self, now: float) -> int:
        """End leases whose hard limit has passed. Return how many there were."""
        passed = self.leases.overdue(now)
        for lease in passed:
            self.leases.leave(lease.session, lease.number)
            self._tell(lease, "expire")
        return len(passed)
