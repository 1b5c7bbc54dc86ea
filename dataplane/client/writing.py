"""put, and the values that a batch adds: room, copy, message. Operations without I/O.

A put goes parcel by parcel: as many as fit into one message and into what the peer grants. Room
that was granted ahead is used first, so a steady producer needs one round trip. Extents that were
named in a message belong to it, whatever becomes of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.client import parcel as parcels_of
from dataplane.client.core import Deadline, Handle, Offload, Operation, ask
from dataplane.client.filling import fill
from dataplane.client.layout import plan
from dataplane.client.parcel import Parcel
from dataplane.client.ref import Ref
from dataplane.client.rows import (
    Identity,
    Index,
    Names,
    TagValues,
    group_names,
    identify,
    name_list,
    row_names,
    tag_columns,
    take_tags,
)
from dataplane.client.session import Session
from dataplane.client.values import Prepared, prepare
from dataplane.client.written import Cells, Written
from dataplane.errors import DataplaneError, PutIncomplete
from dataplane.memory.placement import place, remainder
from dataplane.wire.messages import Put, PutDone, Reserve, Reserved
from dataplane.wire.records import EXTENT, KEY, RANGE, U4, column
from dataplane.wire.tables import Name, Scalar

RUN_BYTES = 256 << 20
"""Values of about so many bytes go with one message, but no more than a quarter of the share. Long
copies are worth it: from some length on (the C library's choice) they bypass the caches."""
AHEAD_BYTES = 16 << 20
"""The most that is asked for ahead; for larger runs a round trip is no cost."""
MESSAGE_BYTES = 16 << 20
"""A message of rows is kept to about this size."""

_POPULATE_BYTES = 64 << 10
_FEW_SPECS = 64
_NO_EXTENTS, _NO_RANGES = np.zeros(0, EXTENT), np.zeros(0, RANGE)

Records = npt.NDArray[Any]


def put(
    handle: Handle,
    columns: Mapping[str, Any],
    key: Names | None,
    group: Names | Sequence[Name | None] | None,
    tags: TagValues | None,
    dedup: Collection[str],
    replace: bool,
    timeout: float | None,
) -> Operation[Ref]:
    """Write rows, run by run; PutIncomplete where some runs are in and one failed."""
    session, deadline = handle.session, Deadline(timeout)
    names = None if key is None else name_list(key, "key")
    prepared = prepare(columns, None if names is None else len(names), dedup)
    n = prepared.n
    identity = identify(session, n, names, group)
    tagged = {tag: v * n if len(v) == 1 else v for tag, v in tag_columns(tags, n).items()}
    parcels: list[Parcel] = yield Offload(
        lambda: plan(prepared, identity.group_index), (n << 6) + (AHEAD_BYTES if dedup else 0)
    )
    generation = yield from handle.attach(deadline)
    work = _Put(handle, generation, identity, tagged, replace, deadline)
    cost = row_cost(prepared, identity)
    done = 0
    while done < len(parcels):
        try:
            done += yield from work.run(next_run(session, parcels, done, cost), parcels, done)
        except Exception as exc:
            if not work.committed:
                raise
            raise work.incomplete(exc) from exc
    session.familiar.note(identity.familiar_keys())
    return Ref(
        session.plane,
        session.peer,
        handle.name,
        generation,
        identity.keys.tobytes(),
        None if identity.names is None else tuple(identity.names),
        tuple(identity.group_names or ()),
        tuple(prepared_column.field for prepared_column in prepared.columns),
    )


@dataclass(slots=True)
class _Put:
    """One put under way."""

    handle: Handle
    generation: int
    identity: Identity
    tags: dict[str, list[Scalar]]
    replace: bool
    deadline: Deadline
    committed: int = 0
    committed_rows: list[Index] | None = None

    def run(self, run: list[Parcel], parcels: list[Parcel], done: int) -> Operation[int]:
        """One message; the number of parcels that it committed."""
        session = self.handle.session
        familiar = self.identity.familiar_keys()[: KEY.itemsize]
        filled = yield from write_run(
            self.handle,
            self.generation,
            run,
            lambda: session.familiar.knows(familiar),
            self.deadline,
        )
        written = filled.written()
        index = whole(filled.parcel.rows, len(self.identity))
        body = Put(
            self.handle.name,
            self.generation,
            self.identity.wire(index),
            written.columns(),
            written.specs,
            take_tags(self.tags, index),
            written.ranges.tobytes(),
            written.shared.tobytes(),
            written.pin,
            self.replace,
            written.digests.tobytes(),
            written.digest_index.tobytes(),
            0 if len(written.digests) else self._want(filled, parcels, done),
        )
        try:
            reply = yield from ask(body, PutDone, self.deadline)
        except BaseException:
            session.pinned(written.pin)  # nobody keeps it, so it is released
            raise
        session.keep(column(reply.extents, EXTENT))
        self.committed += len(filled.parcel)
        self.committed_rows = [*(self.committed_rows or []), filled.parcel.rows]
        return filled.count

    def _want(self, filled: Filled, parcels: list[Parcel], done: int) -> int:
        """How much to ask for ahead: what comes next in this put, else as much as this time."""
        following = parcels[done + filled.count : done + 2 * filled.count]
        nbytes = sum(p.nbytes for p in following) if following else filled.nbytes
        if nbytes > AHEAD_BYTES or self.handle.session.leftovers.holds(nbytes):
            return 0
        return nbytes

    def incomplete(self, exc: Exception) -> PutIncomplete:
        rows = np.concatenate(self.committed_rows or [np.zeros(0, np.intp)])
        there = self.identity.wire(rows)
        message = exc.message if isinstance(exc, DataplaneError) else str(exc)
        return PutIncomplete(
            f"{len(rows)} of {len(self.identity)} rows are in partition {self.handle.name!r}, then "
            f"the put failed ({type(exc).__name__}: {message}). Put the others again",
            committed=row_names(there),
            committed_groups=group_names(there),
            rows=rows.tolist(),
        )


def write_columns(
    handle: Handle, columns: Mapping[str, Any], n: int, deadline: Deadline
) -> Operation[Written]:
    """Copy new fields of n leased rows into the arena; nothing is committed yet."""
    session = handle.session
    prepared = prepare(columns, n, ())
    parcels: list[Parcel] = yield Offload(lambda: plan(prepared, None), n << 6)
    generation = yield from handle.attach(deadline)
    ranges: list[Records] = []
    done = 0
    try:
        while done < len(parcels):
            run = next_run(session, parcels, done, 0)
            filled = yield from write_run(handle, generation, run, lambda: True, deadline)
            ranges.append(filled.ranges())
            done += filled.count
    except BaseException:
        for extents in ranges:
            session.keep(extents)
        raise
    return written_of(parcels_of.join(parcels), np.concatenate(ranges))


# runs


@dataclass(slots=True)
class Filled:
    """Neighbouring parcels whose values lie in the arena. `count`: how many parcels they were."""

    count: int
    parcel: Parcel
    offsets: Records
    shared: Records
    pin: int
    nbytes: int

    def ranges(self) -> Records:
        """EXTENT records of what was written."""
        extents = np.empty(len(self.offsets), EXTENT)
        extents["offset"], extents["length"] = self.offsets, self.parcel.sizes
        return extents

    def written(self) -> Written:
        return written_of(self.parcel, self.ranges(), self.shared, self.pin)


def next_run(
    session: Session, parcels: list[Parcel], start: int, cost: int | Records
) -> list[Parcel]:
    """The parcels from `start` that go together, at least one.

    One that repeats what an earlier one writes waits until that is in and can be asked for.
    """
    if len(parcels) == 1:
        return parcels
    most = min(RUN_BYTES, session.share_bytes[0] // 4)
    return parcels[start : parcels[start].run(session.max_rows, most, cost, MESSAGE_BYTES)]


def write_run(
    handle: Handle, generation: int, run: list[Parcel], continuing: Any, deadline: Deadline
) -> Operation[Filled]:
    """Find room for the first of these parcels, share what is known, copy the rest."""
    session = handle.session
    joined = parcels_of.join(run)
    digests, nbytes = joined.digests, joined.nbytes
    extents, shared, pin = _NO_EXTENTS, _NO_RANGES, 0
    found = None if len(digests) or not nbytes else session.leftovers.take(nbytes)
    if found is not None:
        extents = found
    elif nbytes:
        body = Reserve(handle.name, generation, joined.units(), continuing(), digests.tobytes())
        reserved = yield from ask(body, Reserved, deadline, "waiting for room in the arena")
        extents, pin = column(reserved.extents, EXTENT), reserved.pin
        if reserved.units < len(run):
            run = run[: reserved.units]
            joined = parcels_of.join(run)
    try:
        if len(digests):
            shared = yield Offload(lambda: share(session, run, reserved, len(digests)), nbytes)
            joined = parcels_of.join(run)
        offsets = place(joined.sizes, extents)
        fresh = extents if found is None else extents[:0]
        yield Offload(lambda: _copy(session, joined, offsets, fresh), joined.nbytes)
    except BaseException:
        session.keep(extents)
        session.pinned(pin)
        raise
    session.keep(remainder(joined.sizes, offsets, extents))
    return Filled(len(run), joined, offsets, shared, pin, nbytes)


def _copy(session: Session, parcel: Parcel, offsets: Records, fresh: Records) -> None:
    for offset, length in fresh.tolist():
        if length >= _POPULATE_BYTES:
            session.writes.populate(offset, length)
    fill(parcel, offsets, session.writes.view)


def share(session: Session, run: list[Parcel], reserved: Reserved, asked: int) -> Records:
    """Make the parcels share what the peer has already, after comparing the bytes."""
    known = column(reserved.known, RANGE, asked)
    places = column(reserved.places, EXTENT, asked)
    arena = session.reads.base_array(session.reads.pin(0))
    shared, start = [], 0
    for parcel in run:
        count = len(parcel.digests)
        here = slice(start, start + count)
        start += count
        same = known["generation"][here] != 0
        for index in np.flatnonzero(same).tolist():
            offset, length = places[here][index].tolist()
            same[index] = np.array_equal(arena[offset : offset + length], parcel.bytes_of(index))
        shared.append(known[here][same])
        parcel.share(same)
    return np.concatenate(shared)


# messages


def written_of(
    parcel: Parcel, ranges: Records, shared: Records | None = None, pin: int = 0
) -> Written:
    """A parcel in the arena as the parts of a message, with no more specs than it uses."""
    cells = [Cells(*c) for c in parcel.cells]
    specs = parcel.specs
    if len(specs) > _FEW_SPECS:
        used = np.unique(np.concatenate([r["spec"] for c in cells for r in (c.values, c.leaves)]))
        renumber = np.zeros(len(specs), U4)
        renumber[used] = np.arange(len(used), dtype=U4)
        cells = [c.respecified(renumber) for c in cells]
        specs = [specs[i] for i in used.tolist()]
    shared = _NO_RANGES if shared is None else shared
    return Written(cells, specs, ranges, shared, pin, parcel.digests, parcel.digest_ranges)


def whole(rows: Index, n: int) -> Index | None:
    """None where these are all n rows in their order."""
    return None if len(rows) == n and (n == 1 or np.array_equal(rows, np.arange(n))) else rows


def row_cost(prepared: Prepared, identity: Identity) -> int | Records:
    """About how many bytes each row adds to a message: one number, or one a row."""
    cost = 64 + 28 * len(prepared.columns)
    if identity.names is not None:
        cost += sum(len(n) for n in identity.names if isinstance(n, str)) // len(identity.names)
    leaves = [c.leaf_counts for c in prepared.columns if c.leaf_counts is not None]
    if not leaves:
        return cost
    per_row: Records = cost + 24 * np.sum(leaves, axis=0)
    return per_row
