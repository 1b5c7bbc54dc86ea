"""The end of leases: ack, release, drop, with what was added, as one operation per peer.

A lease may have parts at several peers; a part that has ended there keeps nothing of what was
added, the others count. A session that ends releases all it held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError, LeaseExpired, Unavailable
from dataplane.memory.admission import Admission
from dataplane.peer import rows as rowset
from dataplane.peer.grants import Committed, Grants
from dataplane.peer.host import Entry, Host
from dataplane.peer.leases import Lease, Leases, Part
from dataplane.peer.mesh import Caller, Mesh, caller_of
from dataplane.peer.sessions import Session
from dataplane.wire.messages import Body, Finish, PutDone, Request
from dataplane.wire.records import RANGE, U4, column
from dataplane.wire.tables import Column


class Finishing:
    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        leases: Leases,
        grants: Grants,
        settle: Callable[[Entry], None],
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.leases = leases
        self.grants = grants
        self.settle = settle
        mesh.handlers[Finish] = self._finish_here

    def finish(self, session: Session, request: Request, body: Finish) -> Body | Awaitable[Body]:
        committed = Committed([], [], np.zeros(0, RANGE), np.zeros(0, U4))
        with self.grants.unless_refused(session, body.ranges):
            lease = self.leases.of(session, body.lease)
            if body.columns:
                committed = self.grants.commit(
                    session.id, body.columns, body.ranges, body.shared, Admission.CONTINUE
                )
        if body.pin:
            self.host.space.unpin(session.id, [body.pin])
        if len(lease.parts) == 1 and lease.parts[0].address == self.host.address:
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
        for number, part in enumerate(lease.parts):
            at = np.flatnonzero((index >= base) & (index < base + part.rows))
            base += part.rows
            if number in lease.ended:  # by a call that failed at another part
                self.grants.release_rows(committed.columns, at)
                continue
            if not len(at):
                continue
            mine = None if body.index is None else (index[at] - (base - part.rows)).astype(U4)
            columns = [rowset.take_column(c, at) for c in committed.columns]
            tags = {t: v if len(v) == 1 else [v[i] for i in at] for t, v in body.tags.items()}
            raw = None if mine is None else mine.tobytes()
            sub = self._sub_finish(lease, part, body, raw, columns, tags)
            sub.owners = committed.owners
            try:
                done: PutDone = await self.mesh.call(part.address, sub, caller=caller)
                for name, count in done.kept.items():
                    kept[name] = kept.get(name, 0) + count
            except DataplaneError as exc:
                failure = exc
                if not isinstance(exc, Unavailable):  # else the shard may hold them after all
                    self.grants.release_rows(committed.columns, at)
                if not isinstance(exc, LeaseExpired):
                    continue
            self._left(lease, body, number, index[at])
        if failure is not None:
            raise failure
        return PutDone(self.grants.ahead(session, body.want_bytes), kept)

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

    def _finish_here(self, caller: Caller, body: Finish) -> Body:
        return self._finish_at(body)

    def release_all(self, session: Session) -> None:
        """The session ended: its rows go back to their stages, as they were claimed."""
        for lease in list(session.leases):
            self.release(session, lease)

    def release(self, session: Session, lease_id: int) -> None:
        """A lease that nobody holds any more; unknown ones have ended already."""
        lease = self.leases.leave(session, lease_id)
        if lease is None:
            return
        for part in lease.parts:
            body = Finish(
                part.lease, "release", partition=lease.partition, generation=lease.generation
            )
            self.mesh.spawn(self._release_part(part.address, body))

    async def _release_part(self, address: str, body: Finish) -> None:
        with contextlib.suppress(LeaseExpired):  # it had ended already
            await self.mesh.insist(address, body)
