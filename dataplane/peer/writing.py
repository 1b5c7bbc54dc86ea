"""put: rows enter at the shards of their groups, here or at other peers.

Values are committed as ranges of this host first, then the rows. What a shard refuses is released
again, so that a failure leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dataplane.errors import DataplaneError, PutIncomplete, Unavailable
from dataplane.memory.admission import Admission
from dataplane.metadata.puts import PutPlan
from dataplane.peer import rows as rowset
from dataplane.peer.grants import Committed, Grants
from dataplane.peer.host import Entry, Host
from dataplane.peer.mesh import Caller, Mesh, caller_of
from dataplane.peer.partitions import Partitions
from dataplane.peer.routing import Routing
from dataplane.peer.sessions import Session
from dataplane.wire.messages import Body, Put, PutDone, Request
from dataplane.wire.records import DIGEST, U4, column
from dataplane.wire.tables import Column, Owner, Rows


class Writing:
    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        partitions: Partitions,
        routing: Routing,
        grants: Grants,
        settle: Callable[[Entry], None],
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self.routing = routing
        self.grants = grants
        self.settle = settle
        mesh.handlers[Put] = self._put_here

    def put(self, session: Session, request: Request, body: Put) -> Body | Awaitable[Body]:
        with self.grants.unless_refused(session, body.ranges):
            entry = self.host.entry(body.partition, body.generation)
            if entry is None or not self.routing.is_here(entry, body.rows):
                return self._put_routed(session, request, body)
            plan = entry.store.check_put(body.rows, body.columns, body.tags, replace=body.replace)
            committed = self._commit_put(session, entry, body)
        try:
            self._store(entry, body, committed.columns, committed.owners, plan)
        except BaseException:
            self.host.space.release(committed.ranges, committed.counts)
            raise
        return self._put_done(session, entry, body, committed)

    async def _put_routed(self, session: Session, request: Request, body: Put) -> Body:
        with self.grants.unless_refused(session, body.ranges):
            entry = await self.partitions.entry(body.partition, body.generation)
            parts = await self.routing.place(entry, body.rows)
            for address, index in parts:
                if address == self.host.address:
                    rows = body.rows if len(parts) == 1 else rowset.take_rows(body.rows, index)
                    columns = [rowset.take_column(c, index) for c in body.columns]
                    entry.store.check_put(rows, columns, replace=body.replace)
            committed = self._commit_put(session, entry, body)
        caller = caller_of(self.host, request, session)
        stored: list[str | int] = []
        for position, (address, index) in enumerate(parts):
            whole = len(parts) == 1
            rows = body.rows if whole else rowset.take_rows(body.rows, index)
            columns = (
                committed.columns
                if whole
                else [rowset.take_column(c, index) for c in committed.columns]
            )
            tags = body.tags if whole else {t: [v[i] for i in index] for t, v in body.tags.items()}
            sub = Put(
                body.partition,
                body.generation,
                rows,
                columns,
                body.specs,
                tags,
                replace=body.replace,
                owners=committed.owners,
            )
            try:
                await self.mesh.call(address, sub, caller=caller)
            except BaseException as exc:
                # A shard that did not answer may have taken its rows: their bytes stay.
                first = position + isinstance(exc, Unavailable)
                for _, refused in parts[first:]:
                    self.grants.release_rows(committed.columns, refused)
                if stored and isinstance(exc, DataplaneError):
                    raise PutIncomplete(
                        f"{len(stored)} of {rowset.count(body.rows)} rows of this put are in, then "
                        f"it failed: {exc}. Put the rest again",
                        committed=stored,
                    ) from exc
                raise
            stored += rowset.row_names(rows)
        return self._put_done(session, entry, body, committed)

    def _commit_put(self, session: Session, entry: Entry, body: Put) -> Committed:
        kind = Admission.CONTINUE if self._continues(session, entry, body.rows) else Admission.OPEN
        return self.grants.commit(session.id, body.columns, body.ranges, body.shared, kind)

    def _continues(self, session: Session, entry: Entry, rows: Rows) -> bool:
        """Is this about a group or row that is here already? The first one speaks for all."""
        if rows.group_keys:
            return bool(entry.store.knows_groups(rows.group_keys[:16])[0])
        return bool(entry.store.knows_rows(rows.keys[:16])[0])

    def _store(
        self,
        entry: Entry,
        body: Put,
        columns: list[Column],
        owners: list[Owner],
        plan: PutPlan | None = None,
    ) -> dict[str, int]:
        outcome = entry.store.put(
            body.rows,
            columns,
            body.specs,
            owners,
            body.tags,
            replace=body.replace,
            now=self.host.now(),
            plan=plan,
        )
        return outcome.kept

    def _put_done(self, session: Session, entry: Entry, body: Put, committed: Committed) -> PutDone:
        space = self.host.space
        if body.digests:
            at = column(body.digest_index, U4)
            space.digests.enter(
                body.partition, column(body.digests, DIGEST, len(at)), committed.ranges[at]
            )
        if body.pin:
            space.unpin(session.id, [body.pin])
        self.settle(entry)
        return PutDone(self.grants.ahead(session, body.want_bytes))

    async def _put_here(self, caller: Caller, body: Put) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        kept = self._store(entry, body, body.columns, body.owners)
        if caller.address != self.host.address:
            self.settle(entry)
        return PutDone(kept=kept)
