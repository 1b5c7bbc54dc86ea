"""Everything that changes rows: reserve, put, the end of leases, tags, drops.

Bytes are in place in the arena before a message names them. Values are committed as ranges first,
then the rows at their shards, here or at other peers; what a shard refuses is released again, so
that a failure leaves nothing behind. Once a message is answered, well or not, the extents that it
names are the peer's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError, LeaseExpired, ProtocolError, PutIncomplete
from dataplane.memory.admission import Admission
from dataplane.metadata.names import hash_name
from dataplane.peer import rows as rowset
from dataplane.peer.host import Entry, Host
from dataplane.peer.leases import Lease, Leases, Part
from dataplane.peer.mesh import Caller, Mesh
from dataplane.peer.partitions import Partitions
from dataplane.peer.reading import ranges_of
from dataplane.peer.room import Room
from dataplane.peer.routing import Routing
from dataplane.peer.sessions import Session
from dataplane.wire.messages import (
    Body,
    Close,
    Done,
    Drop,
    Dropped,
    Finish,
    GiveBack,
    Put,
    PutDone,
    Request,
    Reserve,
    Reserved,
    Reset,
    Tag,
    Unpin,
)
from dataplane.wire.peering import Release
from dataplane.wire.records import DIGEST, EXTENT, RANGE, U4, U8, VALUE, column
from dataplane.wire.tables import Column, Owner, Rows

MAX_AHEAD_BYTES = 64 << 20
"""The most that a put's reply grants ahead."""


@dataclass(slots=True)
class Committed:
    """Values as ranges of this peer, held once per value that names them."""

    columns: list[Column]
    owners: list[Owner]
    ranges: npt.NDArray[Any]
    counts: npt.NDArray[Any]


class Writing:
    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        partitions: Partitions,
        routing: Routing,
        leases: Leases,
        room: Room,
        settle: Callable[[Entry], None],
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self.routing = routing
        self.leases = leases
        self.room = room
        self.settle = settle
        mesh.handlers |= {
            Put: self._put_here,
            Finish: self._finish_here,
            Tag: self._tag_here,
            Drop: self._drop_here,
            Close: self._close_here,
            Reset: self._reset_here,
            Release: self._release_here,
        }

    # memory

    async def reserve(self, session: Session, request: Request, body: Reserve) -> Body:
        """Room for a put's next units; known digests come back pinned, for comparison."""
        await self.partitions.entry(body.partition, body.generation)
        units = [column(unit, U8) for unit in body.units]
        space = self.host.space
        known, pin = np.zeros(0, RANGE), 0
        places = np.zeros(0, EXTENT)
        if body.digests:
            known = space.digests.lookup(body.partition, column(body.digests, DIGEST))
            found = known["generation"] != 0
            pin = space.pin(session.id, known[found])
            places = np.zeros(len(known), EXTENT)
            places[found] = space.ranges.extents(known[found])
        admission = Admission.CONTINUE if body.continuing else Admission.OPEN
        session.waiting += 1
        try:
            count, extents = await self.room.reserve(
                session.id, admission, units, request.deadline_ms / 1000
            )
        except BaseException:
            space.unpin(session.id, [pin])
            raise
        finally:
            session.waiting -= 1
        return Reserved(count, extents.tobytes(), known.tobytes(), places.tobytes(), pin)

    def give_back(self, session: Session, request: Request, body: GiveBack) -> Body:
        self.host.space.give_back(session.id, column(body.extents, EXTENT))
        self.room.pump()
        return Done()

    def unpin(self, session: Session, request: Request, body: Unpin) -> Body:
        if self.host.space.unpin(session.id, body.pins):
            self.room.pump()
        return Done()

    def _commit(
        self, holder: int, columns: list[Column], written: bytes, shared: bytes, kind: Admission
    ) -> Committed:
        """Ranges for what a client wrote, and holds on what it shares; all or nothing."""
        space = self.host.space
        extents, known = column(written, EXTENT), column(shared, RANGE)
        flat = np.frombuffer(
            b"".join(b for c in columns for b in (c.values, c.leaves)), VALUE
        ).copy()
        index = flat["range"].astype(np.intp)
        total = len(extents) + len(known)
        if len(flat) and int(index.max()) >= total:
            raise ProtocolError(f"a value names range {int(index.max())} of {total}")
        counts = np.bincount(index, minlength=total).astype(U4)
        lengths = extents["length"]
        if len(known):
            lengths = np.concatenate((lengths, space.ranges.extents(known)["length"]))
        room = lengths[index]
        if np.any((flat["delta"] > room) | (flat["nbytes"] > room - flat["delta"])):
            raise ProtocolError("a value reaches beyond the end of its range")
        space.hold(known, counts[len(extents) :])
        try:
            fresh = space.commit(holder, extents, counts[: len(extents)], kind)
        except DataplaneError:
            space.release(known, counts[len(extents) :])
            raise
        ranges = np.concatenate((fresh, known)) if len(known) else fresh
        flat["range"], flat["generation"] = ranges["range"][index], ranges["generation"][index]
        flat["owner"] = 0
        return Committed(_cut(columns, flat), [self.host.owner], ranges, counts)

    # put

    @contextlib.contextmanager
    def _unless_refused(self, session: Session, written: bytes) -> Iterator[None]:
        """What a refused message wrote comes back: once answered, its extents are the peer's."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(ProtocolError):
                self.host.space.give_back(session.id, column(written, EXTENT))
                self.room.pump()
            raise

    def put(self, session: Session, request: Request, body: Put) -> Body | Awaitable[Body]:
        with self._unless_refused(session, body.ranges):
            entry = self.host.entry(body.partition, body.generation)
            if entry is None or not self.host.solo:
                return self._put_routed(session, request, body)
            entry.store.check_put(body.rows, body.columns, body.tags, replace=body.replace)
            committed = self._commit_put(session, entry, body)
        try:
            self._store(entry, body.rows, committed.columns, committed.owners, body)
        except BaseException:
            self.host.space.release(committed.ranges, committed.counts)
            raise
        return self._put_done(session, entry, body, committed)

    async def _put_routed(self, session: Session, request: Request, body: Put) -> Body:
        with self._unless_refused(session, body.ranges):
            entry = await self.partitions.entry(body.partition, body.generation)
            parts = await self.routing.place(entry, body.rows)
            for address, index in parts:
                if address == self.host.address:
                    rows = body.rows if len(parts) == 1 else rowset.take_rows(body.rows, index)
                    columns = [rowset.take_column(c, index) for c in body.columns]
                    entry.store.check_put(rows, columns, replace=body.replace)
            committed = self._commit_put(session, entry, body)
        caller = self._caller(request, session)
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
                rest = [p[1] for p in parts[position:]]
                self._release_rows(committed.columns, np.concatenate(rest))
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
        return self._commit(session.id, body.columns, body.ranges, body.shared, kind)

    def _continues(self, session: Session, entry: Entry, rows: Rows) -> bool:
        """Is this about a group or row that is here already? The first one speaks for all."""
        if rows.group_keys:
            return entry.store.has_group(rows.group_keys[:16])
        return entry.store.has_row(rows.keys[:16])

    def _store(
        self, entry: Entry, rows: Rows, columns: list[Column], owners: list[Owner], body: Put
    ) -> dict[str, int]:
        outcome = entry.store.put(
            rows,
            columns,
            body.specs,
            owners,
            body.tags,
            replace=body.replace,
            now=self.host.now(),
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
        return PutDone(self._ahead(session, body.want_bytes))

    def _ahead(self, session: Session, want_bytes: int) -> bytes:
        """The next extents, unless somebody waits for room."""
        if not want_bytes or len(self.room):
            return b""
        nbytes = min(want_bytes, MAX_AHEAD_BYTES)
        return self.host.space.grant(session.id, Admission.OPEN, nbytes).tobytes()

    async def _put_here(self, caller: Caller, body: Put) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        kept = self._store(entry, body.rows, body.columns, body.owners, body)
        if caller.address != self.host.address:
            self.settle(entry)
        return PutDone(kept=kept)

    # the end of leases

    def finish(self, session: Session, request: Request, body: Finish) -> Body | Awaitable[Body]:
        committed = Committed([], [], np.zeros(0, RANGE), np.zeros(0, U4))
        with self._unless_refused(session, body.ranges):
            lease = self.leases.of(session, body.lease)
            if body.columns:
                committed = self._commit(
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
                self.leases.close(session, lease.id)
            raise
        self._left(session, lease, body)
        done.extents = self._ahead(session, body.want_bytes)
        return done

    async def _finish_routed(
        self, session: Session, request: Request, lease: Lease, body: Finish, committed: Committed
    ) -> Body:
        """One operation per peer; a part whose lease has ended keeps nothing, the others count."""
        caller = self._caller(request, session)
        index = column(body.index, U4) if body.index is not None else np.arange(lease.rows)
        kept: dict[str, int] = {}
        failure: DataplaneError | None = None
        base = 0
        for part in lease.parts:
            at = np.flatnonzero((index >= base) & (index < base + part.rows))
            base += part.rows
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
                self._release_rows(committed.columns, at)
                failure = exc
        self._left(session, lease, body)
        if failure is not None:
            raise failure
        return PutDone(self._ahead(session, body.want_bytes), kept)

    def _left(self, session: Session, lease: Lease, body: Finish) -> None:
        if body.outcome == "keep":
            return
        if body.index is not None:
            lease.finished.update(column(body.index, U4).tolist())
        if body.index is None or len(lease.finished) >= lease.rows:
            self.leases.close(session, lease.id)

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
        lease = self.leases.close(session, lease_id)
        if lease is None:
            return
        for part in lease.parts:
            body = Finish(
                part.lease, "release", partition=lease.partition, generation=lease.generation
            )
            self.mesh.spawn(self._release_part(part.address, body))

    async def _release_part(self, address: str, body: Finish) -> None:
        with contextlib.suppress(LeaseExpired):  # it had ended already
            await self.mesh.call(address, body)

    # tags, drops, groups

    async def tag(self, session: Session, request: Request, body: Tag) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        parts = await self.routing.find(entry, body.rows)
        for address, index in parts:
            sub = body
            if len(parts) > 1:
                tags = {
                    t: v if len(v) == 1 else [v[i] for i in index] for t, v in body.tags.items()
                }
                rows = rowset.take_rows(body.rows, index)
                sub = Tag(body.partition, body.generation, rows, tags, body.expect)
            await self.mesh.call(address, sub, caller=self._caller(request, session))
        return Done()

    async def _tag_here(self, caller: Caller, body: Tag) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        entry.store.tag(body.rows, body.tags, body.expect)
        self.settle(entry)
        return Done()

    async def drop(self, session: Session, request: Request, body: Drop) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        caller = self._caller(request, session)
        if body.rows is None and body.groups is None and body.where is None:
            await self.partitions.drop(entry)
            return Dropped(0, 0)
        subs: list[tuple[str, Drop]] = []
        if body.where is not None:
            subs = [(member, body) for member in self.host.roster.members]
        elif body.groups is not None:
            found = await self.routing.find_groups(entry, body.groups)
            subs = [
                (address, Drop(body.partition, body.generation, groups=groups))
                for address, groups in found.items()
            ]
        elif body.rows is not None:
            for address, index in await self.routing.find(entry, body.rows):
                rows = rowset.take_rows(body.rows, index)
                subs.append((address, Drop(body.partition, body.generation, rows)))
        total = Dropped(0, 0)
        for address, sub in subs:
            dropped: Dropped = await self.mesh.call(address, sub, caller=caller)
            total.rows += dropped.rows
            total.bytes += dropped.bytes
        return total

    async def _drop_here(self, caller: Caller, body: Drop) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        groups = None if body.groups is None else [hash_name(g) for g in body.groups]
        rows, nbytes = entry.store.drop(rows=body.rows, groups=groups, where=body.where)
        self.settle(entry)
        return Dropped(rows, nbytes)

    async def close(self, session: Session, request: Request, body: Close) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        found = await self.routing.find_groups(entry, [body.group])
        for address in found:
            await self.mesh.call(address, body, caller=self._caller(request, session))
        return Done()

    async def _close_here(self, caller: Caller, body: Close) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        entry.store.close(hash_name(body.group), body.n, body.group)
        self.settle(entry)
        return Done()

    async def reset(self, session: Session, request: Request, body: Reset) -> Body:
        await self.mesh.call_all(body, caller=self._caller(request, session))
        return Done()

    async def _reset_here(self, caller: Caller, body: Reset) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        entry.store.reset(body.stage)
        self.settle(entry)
        return Done()

    # references that end

    def _release_rows(self, columns: list[Column], index: npt.NDArray[Any]) -> None:
        """Let go of the values of some rows of a put that no shard took."""
        for c in columns:
            part = rowset.take_column(c, index)
            for raw in (part.values, part.leaves):
                if raw:
                    self.host.space.release(ranges_of(np.frombuffer(raw, VALUE)))

    def _release_here(self, caller: Caller, body: Release) -> Body:
        ranges = column(body.ranges, RANGE)
        if self.host.space.release(ranges, column(body.counts, U4, len(ranges))):
            self.room.pump()
        return Done()

    def _caller(self, request: Request, session: Session) -> Caller:
        return Caller(
            self.host.address, self.host.incarnation, session.id, request.op, request.floor
        )


def _cut(columns: list[Column], flat: npt.NDArray[Any]) -> list[Column]:
    """Columns again, from their records in one row."""
    raw, at = flat.tobytes(), 0
    cut = []
    for c in columns:
        middle, end = at + len(c.values), at + len(c.values) + len(c.leaves)
        cut.append(Column(c.field, raw[at:middle], c.leaf_counts, raw[middle:end]))
        at = end
    return cut
