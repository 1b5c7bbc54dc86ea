"""put: rows enter at the shards of their groups, here or at other peers.

Values are committed as ranges of this host first, then the rows. What a shard refuses is released
again, so that a failure leaves nothing behind.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

import numpy as np

from dataplane.errors import DataplaneError, PutIncomplete, Unavailable
from dataplane.memory.admission import Admission
from dataplane.metadata.puts import PutPlan
from dataplane.metadata.roster import Roster
from dataplane.peer import rows as rowset
from dataplane.peer.carrying import Carrying
from dataplane.peer.copying import Copying
from dataplane.peer.grants import Committed, Grants
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.mesh import Mesh
from dataplane.peer.partitions import Partitions
from dataplane.peer.routing import Index, Routed, Routing
from dataplane.peer.sessions import Session, caller_of
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
        copying: Copying,
        carrying: Carrying,
        settle: Callable[[Entry], None],
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self.routing = routing
        self.grants = grants
        self.copying = copying
        self.carrying = carrying
        self.settle = settle
        mesh.handlers[Put] = self._put_here

    def put(self, session: Session, request: Request, body: Put) -> Body | Awaitable[Body]:
        if body.carried:
            self.carrying.land(session, body)
        with self.grants.unless_refused(session, body.ranges):
            entry = self.host.entry(body.partition, body.generation)
            if entry is None or not self.routing.is_here(entry, body.rows):
                return self._put_routed(session, request, body)
            plan = entry.store.check_put(body.rows, body.columns, body.tags, replace=body.replace)
            committed = self._commit_put(session, body, plan.continues)
        try:
            self._store(entry, body, committed.columns, committed.owners, plan)
        except BaseException:
            self.host.space.release(committed.ranges, committed.counts)
            raise
        return self._put_done(session, entry, body, committed)

    async def _put_routed(self, session: Session, request: Request, body: Put) -> Body:
        with self.grants.unless_refused(session, body.ranges):
            entry = await self.partitions.entry(body.partition, body.generation)
            look = functools.partial(self.routing.place, entry, self.routing.shard())
            place = _Placed(self.host, look)
            await self.routing.visit(body.rows, place, functools.partial(self._check, entry, body))
            continues = self._continues(entry, body.rows)
            committed = self._commit_put(session, body, continues)
        caller = caller_of(self.host, request, session)
        stored: list[Index] = []
        tried = np.zeros(rowset.count(body.rows), np.bool_)

        async def act(address: str, index: Index, epoch: tuple[int, int]) -> None:
            sub = _part_of(body, committed, index)
            # A peer that was lost may have taken them, and whoever took it over has them then.
            sub.keep = bool(tried[index].any()) and not body.replace
            try:
                await self.grants.hand_over(address, sub, caller, epoch)
            except Unavailable:
                tried[index] = True
                raise
            stored.append(index)

        with self.grants.under_way(committed, caller):
            try:
                await self.routing.visit(body.rows, place, act)
            except DataplaneError as exc:
                if not stored:
                    raise
                done = np.concatenate(stored)
                raise PutIncomplete(
                    f"{len(done)} of {rowset.count(body.rows)} rows of this put are in, then "
                    f"it failed: {exc}. Put the rest again",
                    committed=rowset.row_names(rowset.take_rows(body.rows, done)),
                ) from exc
        return self._put_done(session, entry, body, committed)

    async def _check(
        self, entry: Entry, body: Put, address: str, index: Index, epoch: tuple[int, int]
    ) -> None:
        """What this peer would refuse it refuses before anything is written anywhere."""
        if address == self.host.address:
            rows = rowset.take_rows(body.rows, index)
            columns = [rowset.take_column(c, index) for c in body.columns]
            entry.store.check_put(rows, columns, replace=body.replace)

    def _commit_put(self, session: Session, body: Put, continues: bool) -> Committed:
        kind = Admission.CONTINUE if continues else Admission.OPEN
        return self.grants.commit(session, body.columns, body.ranges, body.shared, kind)

    def _continues(self, entry: Entry, rows: Rows) -> bool:
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
            keep=body.keep,
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
        async with self.copying.beforehand(entry, body):
            kept = self._store(entry, body, body.columns, body.owners)
        if caller.address != self.host.address:
            self.settle(entry)
        return PutDone(kept=kept)


class _Placed:
    """Where a put's rows go: looked up once for the check and for the put, under one roster."""

    def __init__(self, host: Host, look: Callable[[Rows], Awaitable[Routed]]) -> None:
        self._host = host
        self._look = look
        self._known: tuple[Rows, Roster, Routed] | None = None

    async def __call__(self, rows: Rows) -> Routed:
        roster = self._host.roster
        if self._known is None or self._known[0] is not rows or self._known[1] is not roster:
            self._known = rows, roster, await self._look(rows)
        return self._known[2]


def _part_of(body: Put, committed: Committed, index: Index) -> Put:
    """Some rows of a put, with their values where they lie."""
    whole = len(index) == rowset.count(body.rows)
    columns = committed.columns
    tags = body.tags
    if not whole:
        columns = [rowset.take_column(c, index) for c in columns]
        tags = {t: v if len(v) == 1 else [v[i] for i in index] for t, v in tags.items()}
    return Put(
        body.partition,
        body.generation,
        body.rows if whole else rowset.take_rows(body.rows, index),
        columns,
        body.specs,
        tags,
        replace=body.replace,
        owners=committed.owners,
    )
