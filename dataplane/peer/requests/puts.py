"""put: rows enter at the shard of their partition, here or at another peer.

Values are committed as ranges of this host first, then the rows. What a shard refuses is released
again, so that a failure leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from dataplane.memory.admission import Admission
from dataplane.metadata.shard.puts import plan_put
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.requests.grants import Committed, Grants
from dataplane.peer.sessions import Session, caller_of
from dataplane.peer.shards.metadata_share import MetadataShare
from dataplane.peer.shards.references import References
from dataplane.peer.shards.replication import Copying
from dataplane.wire.checkpoint import Restore
from dataplane.wire.journal import Wrote
from dataplane.wire.messages import Body, Finish, Put, PutDone, Request
from dataplane.wire.records import DIGEST, U4, column

Mode = Literal["new", "replace"]


@dataclass(eq=False, repr=False)
class Writing:
    host: Host
    mesh: Mesh
    grants: Grants
    references: References
    copying: Copying
    share: MetadataShare
    settle: Callable[[Entry], None]

    def __post_init__(self) -> None:
        self.mesh.handlers[Put] = self._put_here

    def put(self, session: Session, request: Request, body: Put) -> Body | Awaitable[Body]:
        """At once where the shard is here, and has room, and no second copies are made."""
        kind = Admission.CONTINUE if body.continuing else Admission.OPEN
        try:
            committed = self.grants.commit(session, body.columns, body.ranges, body.shared, kind)
        except BaseException:
            self.grants.refused(session, body.ranges)
            raise
        asked = Put(
            body.partition,
            body.generation,
            body.rows,
            committed.columns,
            body.specs,
            body.tags,
            replace=body.replace,
            reuse=body.reuse,
            owners=committed.owners,
            inline=body.inline,
        )
        entry = self.host.entry(body.partition, body.generation)
        if entry is None or entry.copies is not None or self.share.is_full:
            return self._put_carried(session, request, body, asked, committed)
        try:
            done = self._put_into(entry, session.id, asked)
        except BaseException as exc:
            self.grants.keep_where_full(session, committed, exc)
            self.grants.let_be(committed)
            raise
        return self._put_done(session, body, committed, done.gone)

    async def _put_carried(
        self, session: Session, request: Request, body: Put, asked: Put, committed: Committed
    ) -> Body:
        asked.number = next(self.host.lease_numbers)
        done = await self.carry(session, request, asked, committed)
        return self._put_done(session, body, committed, done.gone)

    async def carry(
        self,
        session: Session,
        request: Request,
        body: Put | Finish | Restore,
        committed: Committed,
    ) -> PutDone:
        """To the partition's shard, wherever that is then; again while that has no room."""
        caller = caller_of(self.host, request, session)

        def attempt() -> Awaitable[PutDone]:
            return self.references.hand_over(body, committed.ranges, caller)

        try:
            return await self.share.until_taken(session, attempt)
        except BaseException as exc:
            self.grants.keep_where_full(session, committed, exc)
            raise
        finally:
            self.references.arrived(committed.ranges, committed.counts, caller)

    def _put_done(self, session: Session, body: Put, committed: Committed, gone: int) -> PutDone:
        space = self.host.space
        if body.digests:
            at = column(body.digest_index, U4)
            space.digests.enter(
                body.partition, column(body.digests, DIGEST, len(at)), committed.ranges[at]
            )
        if body.pin:
            space.unpin(session.id, [body.pin])
        ahead = self.grants.ahead(session, body.want_bytes, body.want_on_devices)
        return PutDone(ahead, gone=gone)

    def _put_here(self, caller: Caller, body: Put) -> Body | Awaitable[Body]:
        entry = self.host.shard(body.partition, body.generation)
        if entry.store.was_carried_out(body.number):
            self.references.passed_over(body)
            return PutDone()
        if entry.copies is not None:
            return self._put_with_copies(caller, body)
        return self._put_into(entry, caller.session, body)

    async def _put_with_copies(self, caller: Caller, body: Put) -> Body:
        entry = self.host.shard(body.partition, body.generation)  # a turn later
        async with self.copying.beforehand(entry, body):
            self.host.shard(body.partition, body.generation)  # it may have been dropped meanwhile
            return self._put_into(entry, caller.session, body)

    def _put_into(self, entry: Entry, holder: int, body: Put) -> PutDone:
        mode: Mode = "replace" if body.replace else "new"
        plan = plan_put(entry.store, body.rows, body.columns, body.tags, mode, body.reuse)
        if len(plan.new):
            self.share.check_rows()
        self.share.check_values(body.inline)
        op = Wrote(body.rows, body.columns, body.specs, body.owners, body.tags, mode, body.reuse)
        op.inline, op.holder, op.number = body.inline, holder, body.number
        outcome = entry.store.put(op, plan)
        self.settle(entry)
        return PutDone(gone=outcome.gone)
