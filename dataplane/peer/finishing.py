"""The end of leases: ack, release, drop, with what was added, as one operation per peer.

A lease may have parts at several peers; a part that has ended there keeps nothing of what was
added, the others count. A session that ends releases all it held.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError, LeaseExpired, StaleEpoch, Unavailable
from dataplane.memory.admission import Admission
from dataplane.metadata.references import by_owner
from dataplane.peer import rows as rowset
from dataplane.peer.carrying import Carrying
from dataplane.peer.copying import Copying
from dataplane.peer.grants import Committed, Grants
from dataplane.peer.host import Caller, Entry, Host, call_deadline
from dataplane.peer.leases import Lease, Leases, Part
from dataplane.peer.mesh import CALL_S, Mesh
from dataplane.peer.sessions import Session, caller_of
from dataplane.wire.limits import ABSENT
from dataplane.wire.messages import Body, Done, Finish, PutDone, Request
from dataplane.wire.records import RANGE, U4, column
from dataplane.wire.tables import Column


class Finishing:
    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        leases: Leases,
        grants: Grants,
        copying: Copying,
        carrying: Carrying,
        settle: Callable[[Entry], None],
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.leases = leases
        self.grants = grants
        self.copying = copying
        self.carrying = carrying
        self.settle = settle
        self.abandoned_leases = 0
        """that clients held when they ended"""
        mesh.handlers[Finish] = self._finish_here

    def finish(self, session: Session, request: Request, body: Finish) -> Body | Awaitable[Body]:
        committed = Committed([], [], np.zeros(0, RANGE), np.zeros(0, U4))
        lease = None
        if body.carried:
            lease = self.leases.of(session, body.lease, self.host.now())
            self.carrying.land(session, body)
        with self.grants.unless_refused(session, body.ranges):
            lease = lease or self.leases.of(session, body.lease, self.host.now())
            if not request.rid and body.outcome == "release" and body.index is None:
                self.release(session, body.lease)  # nobody would say it again
                return Done()
            if body.columns:
                committed = self.grants.commit(
                    session, body.columns, body.ranges, body.shared, Admission.CONTINUE
                )
        if body.pin:
            self.host.space.unpin(session.id, [body.pin])
        if len(lease.parts) == 1 and self.host.heir(lease.parts[0].owner) == self.host.owner:
            return self._finish_local(session, lease, body, committed)
        return self._finish_routed(session, request, lease, body, committed)

    def _finish_local(
        self, session: Session, lease: Lease, body: Finish, committed: Committed
    ) -> Body:
        part = lease.parts[0]
        sub = self._sub_finish(lease, part, body, body.index, committed.columns, body.tags)
        sub.owners = committed.owners
        try:
            done = self._finish_at(sub)
        except BaseException as exc:
            self.host.space.release(committed.ranges, committed.counts)
            if isinstance(exc, LeaseExpired):
                self.leases.close(lease)
            raise
        self._left(lease, body, 0, column(body.index or b"", U4))
        done.extents = self.grants.ahead(session, body.want_bytes)
        return done

    async def _finish_routed(
        self, session: Session, request: Request, lease: Lease, body: Finish, committed: Committed
    ) -> Body:
        """One operation per peer; a part whose lease has ended keeps nothing, the others count."""
        caller = caller_of(self.host, request, session)
        index = column(body.index, U4) if body.index is not None else np.arange(lease.rows)
        kept: dict[str, int] = {}
        failure: DataplaneError | None = None
        base = 0
        with self.grants.under_way(committed, caller):
            for number, part in enumerate(lease.parts):
                at = np.flatnonzero((index >= base) & (index < base + part.rows))
                first, base = base, base + part.rows
                if number in lease.ended or not len(at):
                    continue
                mine = None if body.index is None else (index[at] - first).astype(U4).tobytes()
                columns = [rowset.take_column(c, at) for c in committed.columns]
                tags = {t: v if len(v) == 1 else [v[i] for i in at] for t, v in body.tags.items()}
                sub = self._sub_finish(lease, part, body, mine, columns, tags)
                sub.owners = committed.owners
                try:
                    done = await self._hand_over(part, sub, caller)
                    for name, count in done.kept.items():
                        kept[name] = kept.get(name, 0) + count
                except DataplaneError as exc:
                    failure = exc
                    if not isinstance(exc, LeaseExpired):
                        continue
                self._left(lease, body, number, index[at])
        if failure is not None:
            raise failure
        return PutDone(self.grants.ahead(session, body.want_bytes), kept)

    async def _hand_over(self, part: Part, body: Finish, caller: Caller) -> PutDone:
        """To whoever has the rows of this part; again where another peer took them over."""
        end = min(self.host.now() + CALL_S, call_deadline.get())
        while True:
            roster = self.host.roster
            address = self.host.serving(part.owner)
            if address is None:
                raise LeaseExpired(
                    f"the peer at {part.owner.peer} that leased {part.rows} of these rows is lost, "
                    "and they with it: see part.stats(), and put them again"
                )
            try:
                return await self.grants.hand_over(address, body, caller, roster.epoch)
            except (StaleEpoch, Unavailable) as exc:
                body.again |= isinstance(exc, Unavailable)
                if not await self.host.another_roster(roster, end):
                    raise

    def _left(self, lease: Lease, body: Finish, number: int, rows: npt.NDArray[Any]) -> None:
        """Rows of a part are finished. The lease ends with its last row, and not before: what a
        peer did not answer for is repeated, or released when the session ends."""
        if body.outcome == "keep":
            return
        if body.index is not None:
            before = sum(part.rows for part in lease.parts[:number])
            lease.finished.update(rows.tolist())
            if not lease.finished.issuperset(range(before, before + lease.parts[number].rows)):
                return
        lease.ended.add(number)
        if len(lease.ended) == len(lease.parts):
            self.leases.close(lease)

    @staticmethod
    def _sub_finish(
        lease: Lease,
        part: Part,
        body: Finish,
        index: bytes | None,
        columns: list[Column],
        tags: dict[str, list[bool | int | float | str | None]],
    ) -> Finish:
        return Finish(
            part.lease,
            body.outcome,
            index,
            columns,
            body.specs,
            tags,
            partition=lease.partition,
            generation=lease.generation,
        )

    def _finish_at(self, body: Finish) -> PutDone:
        """At the shard: adds and ack are one operation."""
        entry = self.host.entry(body.partition, body.generation)
        if entry is None:
            raise LeaseExpired(f"partition {body.partition!r} is gone, and its leases with it")
        released = body.outcome == "release" and entry.store.state.leases.get(body.lease) is None
        if body.again and (released or entry.store.has_finished(body.lease, body.index)):
            flat = rowset.flat_values(body.columns)
            for named in by_owner(flat[flat["owner"] != ABSENT], body.owners):
                self.grants.let_go(*named)  # the first time they were taken
            return PutDone()
        outcome = entry.store.finish(
            body.lease,
            body.outcome,
            body.index,
            body.columns,
            body.specs,
            body.owners,
            body.tags,
            now=self.host.now(),
        )
        self.settle(entry)
        return PutDone(kept=outcome.kept)

    def _finish_here(self, caller: Caller, body: Finish) -> Body | Awaitable[Body]:
        entry = self.host.entry(body.partition, body.generation)
        if entry is None or entry.copies is None or not body.columns:
            return self._finish_at(body)
        return self._finish_with_copies(entry, body)

    async def _finish_with_copies(self, entry: Entry, body: Finish) -> Body:
        async with self.copying.beforehand(entry, body):
            return self._finish_at(body)

    def release_all(self, session: Session) -> None:
        """The session ended: its rows go back to their stages, as they were claimed."""
        self.abandoned_leases += len(session.leases)
        for lease in list(session.leases):
            self.release(session, lease)

    def release(self, session: Session, lease_id: int) -> None:
        """A lease that nobody holds any more; unknown ones have ended already."""
        lease = self.leases.leave(session, lease_id)
        if lease is not None:
            self._give_back(lease)

    def expire(self, now: float) -> int:
        """Leases over a hard limit that this peer keeps. Returns how many there were."""
        passed = self.leases.overdue(now)
        for lease in passed:
            self.leases.close(lease)
            self._give_back(lease)
        return len(passed)

    def _give_back(self, lease: Lease) -> None:
        for part in lease.parts:
            body = Finish(
                part.lease, "release", partition=lease.partition, generation=lease.generation
            )
            self.mesh.spawn(self._release_part(part, body))

    async def _release_part(self, part: Part, body: Finish) -> None:
        with contextlib.suppress(LeaseExpired):  # it had ended already
            await self.mesh.insist(functools.partial(self.host.serving, part.owner), body)
