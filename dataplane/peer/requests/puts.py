"""put: rows enter at the shard of their partition, here or at another peer.

Values are committed as ranges of this host first, then the rows. What a shard refuses is released
again, so that a failure leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from dataplane.errors import ProtocolError
from dataplane.memory.admission import Admission
from dataplane.metadata.shard.puts import PutOutcome, PutPlan, plan_put
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.requests.grants import Committed, Grants
from dataplane.peer.sessions import Session, caller_of
from dataplane.peer.shards.metadata_share import MetadataShare
from dataplane.peer.shards.references import References
from dataplane.peer.shards.replication import Copying
from dataplane.wire.journal import Wrote
from dataplane.wire.messages import Body, Put, PutDone, Request
from dataplane.wire.records import DIGEST, U4, column
from dataplane.wire.tables import Column, Owner


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
        entry = self.host.entry(body.partition, body.generation)
        if entry is None or entry.copies is not None:
            return self._put_routed(session, request, body)
        try:
            plan = _checked(entry, body)
            if self.share.is_full and len(plan.new):
                return self._put_routed(session, request, body)
            committed = self._commit_put(session, body, plan.continues)
        except BaseException:
            self.grants.refused(session, body.ranges)
            raise
        try:
            self.share.check_values(body.inline)
            columns, owners = committed.columns, committed.owners
            outcome = self._store(entry, body, columns, owners, plan, session.id)
        except BaseException as exc:
            self.grants.keep_where_full(session, committed, exc)
            self.grants.let_be(committed)
            raise
        done = self._put_done(session, body, committed, outcome.gone)
        self.settle(entry)
        return done

    async def _put_routed(self, session: Session, request: Request, body: Put) -> Body:
        """To the partition's shard, wherever that is then; again while it has no room."""
        try:
            committed = self._commit_put(session, body, body.continuing)
        except BaseException:
            self.grants.refused(session, body.ranges)
            raise
        caller = caller_of(self.host, request, session)
        sub = Put(
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

        def attempt() -> Awaitable[PutDone]:
            return self.references.hand_over(sub, committed.ranges, caller)

        try:
            done = await self.share.until_taken(session, attempt)
        except BaseException as exc:
            self.grants.keep_where_full(session, committed, exc)
            raise
        finally:
            self.references.arrived(committed.ranges, committed.counts, caller)
        return self._put_done(session, body, committed, done.gone)

    def _commit_put(self, session: Session, body: Put, continues: bool) -> Committed:
        kind = Admission.CONTINUE if continues else Admission.OPEN
        return self.grants.commit(session, body.columns, body.ranges, body.shared, kind)

    def _store(
        self,
        entry: Entry,
        body: Put,
        columns: list[Column],
        owners: list[Owner],
        plan: PutPlan,
        session: int,
    ) -> PutOutcome:
        op = Wrote(body.rows, columns, body.specs, owners, body.tags, _mode(body), body.reuse)
        op.inline, op.holder = body.inline, session
        return entry.store.put(op, plan)

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
        if entry.copies is not None:
            return self._put_with_copies(caller, body)
        return self._put_into(entry, caller, body)

    async def _put_with_copies(self, caller: Caller, body: Put) -> Body:
        entry = self.host.shard(body.partition, body.generation)  # a turn later
        async with self.copying.beforehand(entry, body):
            self.host.shard(body.partition, body.generation)  # it may have been dropped meanwhile
            return self._put_into(entry, caller, body)

    def _put_into(self, entry: Entry, caller: Caller, body: Put) -> Body:
        plan = _checked(entry, body)
        if len(plan.new):
            self.share.check_rows()
        self.share.check_values(body.inline)
        outcome = self._store(entry, body, body.columns, body.owners, plan, caller.session)
        self.settle(entry)
        # What is perhaps a repetition may pass over the rows of its own first time.
        return PutDone(kept=outcome.kept, gone=0 if body.keep else outcome.gone)


def _checked(entry: Entry, body: Put) -> PutPlan:
    return plan_put(entry.store, body.rows, body.columns, body.tags, _mode(body), body.reuse)


def _mode(body: Put) -> Literal["new", "replace", "keep"]:
    if body.replace and body.keep:
        raise ProtocolError("a put either replaces values or keeps them")
    return "replace" if body.replace else "keep" if body.keep else "new"
