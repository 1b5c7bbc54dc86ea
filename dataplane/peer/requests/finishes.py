"""The end of leases: ack, release, drop, with what was added, as one operation at the shard.

A session that ends releases all it held, which the shard is told until it has answered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from dataplane.errors import LeaseExpired
from dataplane.memory.admission import Admission
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.net.router import Router
from dataplane.peer.requests.grants import NONE, Committed, Grants
from dataplane.peer.requests.leases import Lease, Leases
from dataplane.peer.sessions import Session
from dataplane.peer.shards.metadata_share import MetadataShare
from dataplane.peer.shards.references import References
from dataplane.peer.shards.replication import Copying
from dataplane.wire.messages import Body, Done, Finish, PutDone, Request
from dataplane.wire.records import U4, column


@dataclass(eq=False, repr=False)
class Finishing:
    host: Host
    mesh: Mesh
    router: Router
    leases: Leases
    grants: Grants
    references: References
    copying: Copying
    share: MetadataShare
    carry: Callable[[Session, Request, Finish, Committed], Awaitable[PutDone]]
    """as `Writing.carry`"""
    settle: Callable[[Entry], None]

    def __post_init__(self) -> None:
        self.abandoned_leases = 0
        """that clients held when they ended"""
        self.mesh.handlers[Finish] = self._finish_here

    def finish(self, session: Session, request: Request, body: Finish) -> Body | Awaitable[Body]:
        committed = NONE
        try:
            lease = self.leases.of(session, body.lease, self.host.now())
            if body.outcome == "leave":
                self.release(session, body.lease, heard=False)
                return Done()
            if not request.rid and body.outcome == "release" and body.index is None:
                self.release(session, body.lease)  # nobody would say it again
                return Done()
            if body.columns:
                committed = self.grants.commit(
                    session, body.columns, body.ranges, body.shared, Admission.CONTINUE
                )
        except BaseException:
            self.grants.refused(session, body.ranges)
            raise
        if body.pin:
            self.host.space.unpin(session.id, [body.pin])
        asked = _at_shard(lease, body, committed)
        if not self.host.serves(lease.partition) or self._makes_copies(asked):
            return self._finish_carried(lease, request, body, asked, committed)
        try:
            done = self._finish_at(asked)
        except BaseException as exc:
            self.grants.keep_where_full(session, committed, exc)
            self.grants.let_be(committed)
            if isinstance(exc, LeaseExpired):
                self.leases.close(lease)
            raise
        return self._finished(lease, body, done)

    async def _finish_carried(
        self, lease: Lease, request: Request, body: Finish, asked: Finish, committed: Committed
    ) -> Body:
        try:
            done = await self.carry(lease.session, request, asked, committed)
        except LeaseExpired:
            self.leases.close(lease)
            raise
        return self._finished(lease, body, done)

    def _finished(self, lease: Lease, body: Finish, done: PutDone) -> Body:
        """The lease ends with its last row, and not before: what the shard did not answer for is
        repeated, or released when the session ends."""
        leave = body.outcome != "keep"
        if leave and body.index is not None:
            lease.finished.update(column(body.index, U4).tolist())
        if leave and (body.index is None or len(lease.finished) >= lease.rows):
            self.leases.close(lease)
        return PutDone(self.grants.ahead(lease.session, body.want_bytes), done.kept)

    def _finish_at(self, body: Finish) -> PutDone:
        """At the shard: adds and ack are one operation."""
        entry = self.host.entry(body.partition, body.generation)
        if entry is None:
            raise LeaseExpired(f"partition {body.partition!r} is gone, and its leases with it")
        merely = body.outcome == "release" and not (body.columns or body.tags)
        released = merely and not entry.store.is_leased(body.lease)
        if body.again and (released or entry.store.has_finished(body.lease, body.index)):
            self.references.passed_over(body)
            return PutDone()
        self.share.check_values(body.inline)
        kept = entry.store.finish(body)
        self.settle(entry)
        return PutDone(kept=kept)

    def _finish_here(self, caller: Caller, body: Finish) -> Body | Awaitable[Body]:
        entry = self._makes_copies(body)
        return self._finish_at(body) if entry is None else self._finish_with_copies(entry, body)

    def _makes_copies(self, body: Finish) -> Entry | None:
        entry = self.host.entry(body.partition, body.generation)
        return entry if entry and entry.copies is not None and body.columns else None

    async def _finish_with_copies(self, entry: Entry, body: Finish) -> Body:
        async with self.copying.beforehand(entry, body):
            return self._finish_at(body)

    def release_all(self, session: Session) -> None:
        """The session ended: its rows go back to their stages, as they were claimed."""
        self.abandoned_leases += len(session.leases)
        for lease in list(session.leases):
            self.release(session, lease)

    def release(self, session: Session, lease_id: int, heard: bool = True) -> None:
        """A lease that nobody holds any more; unknown ones have ended already. Of a part in a plan
        of which its holder never heard, the plan goes on without."""
        lease = self.leases.leave(session, lease_id)
        if lease is not None:
            self._give_back(lease, "release" if heard or not lease.plan else "leave")

    def expire(self, now: float) -> int:
        """Leases over a hard limit that this peer keeps. Returns how many there were."""
        passed = self.leases.overdue(now)
        for lease in passed:
            self.leases.close(lease)
            self._give_back(lease)
        return len(passed)

    def _give_back(self, lease: Lease, outcome: Literal["release", "leave"] = "release") -> None:
        of = lease.partition, lease.generation
        body = Finish(lease.number, outcome, partition=of[0], generation=of[1])
        told = self.router.tell(body)
        if lease.plan:
            self.leases.leaves(told, (lease.session.id, *of, lease.stage))


def _at_shard(lease: Lease, body: Finish, committed: Committed) -> Finish:
    """What a client asked for, as its shard is told."""
    return Finish(
        lease.number,
        body.outcome,
        body.index,
        committed.columns,
        body.specs,
        body.tags,
        owners=committed.owners,
        partition=lease.partition,
        generation=lease.generation,
        inline=body.inline,
    )
