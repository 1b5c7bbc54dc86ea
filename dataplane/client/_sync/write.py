"""The runs of a put, and the values that a batch adds: room, copy, message. Without I/O.

A put goes parcel by parcel: as many as fit into one message and into what the peer grants. Room
that was granted ahead is used first, so a steady producer needs one round trip. Extents that were
named in a message belong to it, whatever becomes of it.


Generated from dataplane/client/_async/write.py: change that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.client._sync.attaching import attach
from dataplane.client._sync.backend import offload
from dataplane.client._sync.calls import ask, expect, send
from dataplane.client._sync.inlining import landed
from dataplane.client.deadline import Deadline
from dataplane.client.handle import Handle
from dataplane.client.session.outgoing import Call
from dataplane.client.session.session import Session
from dataplane.client.write import parcel as parcels_of
from dataplane.client.write.few import Few, lay_few
from dataplane.client.write.filling import fill, inline_of
from dataplane.client.write.layout import plan
from dataplane.client.write.parallel import populate
from dataplane.client.write.parcel import Parcel
from dataplane.client.write.rows import (
    Identity,
    Index,
    group_names,
    row_names,
    take_tags,
)
from dataplane.client.write.values import Prepared, prepare
from dataplane.client.write.written import Written, beside, written_of
from dataplane.errors import DataplaneError, PutIncomplete, ShardFull, ValueTooLarge, sized
from dataplane.memory.placement import place, remainder
from dataplane.wire.messages import Put, PutDone, Reserve, Reserved
from dataplane.wire.records import EXTENT, KEY, RANGE, U8, column
from dataplane.wire.tables import Scalar, volume

RUN_BYTES = 256 << 20
"""One message brings values of about this many bytes, but no more than a quarter of the quota. Long
copies are worth it: above a length that the C library chooses, they bypass the caches."""
MESSAGE_BYTES = 16 << 20
"""A message of rows is kept to about this size."""

_NO_EXTENTS, _NO_RANGES = np.zeros(0, EXTENT), np.zeros(0, RANGE)

Records = npt.NDArray[Any]
Continuing = Callable[[], bool]
"""Whether room is asked for as `continuing`; only looked up where it is asked for."""


class Elsewhere(Protocol):
    """Fields of a put whose values go to other memory than the host arena, in the same parcels."""

    @property
    def memory(self) -> int:
        """Its number in `Session.leftovers`."""

    @property
    def parcels(self) -> Sequence[Parcel]:
        """Those of the put, with these fields."""

    def upto(self, first: int, last: int) -> int:
        """How many of these parcels may go together, at least one."""

    def write(
        self, handle: Handle, generation: int, which: slice, continues: Continuing, until: Deadline
    ) -> Written:
        """Find room for the values of these parcels, and copy them."""


class Putting(msgspec.Struct, eq=False):
    """One put under way."""

    handle: Handle
    generation: int
    identity: Identity
    tags: dict[str, list[Scalar]]
    replace: bool
    deadline: Deadline
    reuse: bool = False
    gone: int = 0
    """rows that were passed over, because they were there before and have been freed"""
    there: int = 0
    """rows that were passed over, because they are there with all of these fields"""
    committed_rows: list[Index] = []
    elsewhere: Sequence[Elsewhere] = ()

    def put_few(self, few: Few) -> None:
        """All in one message."""
        if not few.nbytes:
            self._send(few.written([]), None)
            return
        written = write_few(self.handle, self.generation, few, self._continues, self.deadline)
        ahead = self.handle.session.leftovers[0].ahead(few.nbytes, few.sizes)
        self._send(written, None, (ahead,))

    def check_units(self, parcels: list[Parcel]) -> None:
        """ValueTooLarge where one of these can never be had, as the peer would say of the first."""
        cap = self.handle.session.share_bytes[int(self._continues())]
        needed = max(parcel.nbytes for parcel in parcels)
        if needed > cap:
            raise ValueTooLarge(
                f"nothing was put: one row, or the rows of one group, need {sized(needed)}, but "
                f"peer {self.handle.session.peer!r} accepts at most {sized(cap)} at once. Put "
                "fewer bytes at a time, or give the peer a larger arena (DATAPLANE_ARENA, --arena)",
                needed_bytes=needed,
                cap_bytes=cap,
            )

    def put_parcels(self, parcels: list[Parcel], cost: int | Records) -> None:
        """Run by run; PutIncomplete where one fails behind others."""
        done = 0
        while done < len(parcels):
            try:
                done += self._run(next_run(self.handle, parcels, done, cost), parcels, done)
            except Exception as exc:
                if not self.committed_rows:
                    raise
                raise self._incomplete(exc) from exc

    def _run(self, run: list[Parcel], parcels: list[Parcel], done: int) -> int:
        """One message; the number of parcels that it committed."""
        for other in self.elsewhere:
            run = run[: other.upto(done, done + len(run))]
        filled = write_run(self.handle, self.generation, run, self._continues, self.deadline)
        session, parts = self.handle.session, list[Written]()
        try:
            parts.append(filled.written())
            count, rows, digests = filled.count, filled.parcel.rows, parts[0].digests
            here = slice(done, done + count)
            ahead = [0 if len(digests) else self._want(0, filled.nbytes, parcels, here)]
            for other in self.elsewhere:
                part = other.write(
                    self.handle, self.generation, here, self._continues, self.deadline
                )
                parts.append(part)
            if self.elsewhere:
                ahead += [0] * (len(session.leftovers) - 1)
            for other in self.elsewhere:
                nbytes = parcels_of.join(other.parcels[here]).nbytes
                ahead[other.memory] = self._want(other.memory, nbytes, other.parcels, here)
            written = beside([part for part in parts if part.columns])
            index = whole(rows, len(self.identity))
        except BaseException:
            for part in parts:
                session.keep(part.ranges)
            session.pinned(filled.pin)
            raise
        self._send(written, index, ahead)
        self.committed_rows.append(rows)
        return count

    def _continues(self) -> bool:
        """Whether this client put, or leased, the same group or row before: the first speaks."""
        familiar = self.identity.familiar_keys()[: KEY.itemsize]
        return self.handle.session.familiar.knows(self.generation, familiar)

    def _send(self, written: Written, index: Index | None, ahead: Sequence[int] = (0,)) -> None:
        """The message of the rows at `index`; once more where the shard has no room for what is
        inline."""
        try:
            self._tell(written, index, ahead)
        except ShardFull as full:
            if not full.details.get("values"):  # it has none for rows
                raise
            self.handle.shard_is_full()
            pin = self.handle.session.pinned(full.details.get("pin", 0))
            written = landed(
                self.handle, self.generation, written, self._continues, self.deadline, full
            )
            self._tell(written, index, ahead)
            del pin  # what it holds has another holder now

    def _tell(self, written: Written, index: Index | None, ahead: Sequence[int]) -> None:
        """The message of the rows at `index`, and what its answer grants. ahead: bytes that are
        asked for, by memory."""
        session, call = self.handle.session, None
        try:
            body = Put(
                self.handle.name,
                self.generation,
                self.identity.wire(index),
                written.columns,
                written.specs,
                take_tags(self.tags, index),
                written.ranges.tobytes(),
                written.shared.tobytes(),
                written.pin,
                self.replace,
                written.digests.tobytes(),
                written.digest_index.tobytes(),
                ahead[0],
                inline=written.inline,
                continuing=self._continues(),
                reuse=self.reuse,
                want_on_devices=list(ahead[1:]),
            )
            self.deadline.check("put")
            call = Call(body, self.deadline)
            reply = expect(send(session, call), PutDone, body)
        except BaseException:
            session.pinned(written.pin)  # nobody keeps it, so it is released
            if call is None or not call.in_flight:
                session.keep(written.ranges)
            raise
        if reply.extents:
            session.keep(column(reply.extents, EXTENT))
        self.gone += reply.gone
        self.there += reply.there
        rows = len(self.identity) if index is None else len(index)
        session.tally.add("put", rows=rows, bytes=volume(body.columns))
        session.tally.add("copy", bytes=written.copied_bytes)

    def _want(self, memory: int, nbytes: int, parcels: Sequence[Parcel], here: slice) -> int:
        """How much to ask for ahead: what comes next in this put, else as much as this time."""
        following = parcels[here.stop : 2 * here.stop - here.start]
        nbytes = sum(p.nbytes for p in following) if following else nbytes
        return self.handle.session.leftovers[memory].ahead(nbytes)

    def _incomplete(self, exc: Exception) -> PutIncomplete:
        rows = np.concatenate(self.committed_rows)
        there = self.identity.wire(rows)
        message = exc.message if isinstance(exc, DataplaneError) else str(exc)
        return PutIncomplete(
            f"the put failed ({type(exc).__name__}: {message}) after {len(rows)} of "
            f"{len(self.identity)} rows were stored in partition {self.handle.name!r}. "
            "Repeat the put with the same keys to store the other rows",
            committed=row_names(there),
            committed_groups=group_names(there),
            rows=rows.tolist(),
        )


def write_columns(
    handle: Handle, columns: Mapping[str, Any], n: int, deadline: Deadline
) -> Written:
    """Copy new fields of n leased rows into the arena; nothing is committed yet."""
    session = handle.session
    generation = attach(handle, deadline)
    fields = handle.definition.fields
    prepared = prepare(columns, n, (), fields, "the batch has", lambda: deadline.check("add"))
    inline = handle.takes_inline()
    few = lay_few(prepared, inline, True)  # all of them go with one ack
    if few is not None:
        return write_few(handle, generation, few, lambda: True, deadline)
    parcels: list[Parcel] = offload(lambda: plan(prepared, None, inline), n << 6)
    ranges: list[Records] = []
    brought: list[bytes] = []
    done = 0
    try:
        while done < len(parcels):
            run = next_run(handle, parcels, done, 0)
            filled = write_run(handle, generation, run, lambda: True, deadline)
            ranges.append(filled.ranges())
            brought.append(filled.inline)
            done += filled.count
        joined = parcels_of.join(parcels)
        return written_of(joined, np.concatenate(ranges), inline=b"".join(brought))
    except BaseException:
        for extents in ranges:
            session.keep(extents)
        raise


# runs


class Filled(msgspec.Struct, eq=False):
    """Neighbouring parcels whose values lie in the arena. `count`: how many parcels they were."""

    count: int
    parcel: Parcel
    offsets: Records
    shared: Records
    pin: int
    nbytes: int
    inline: bytes

    def ranges(self) -> Records:
        """EXTENT records of what was written."""
        extents = np.empty(len(self.offsets), EXTENT)
        extents["offset"], extents["length"] = self.offsets, self.parcel.sizes
        return extents

    def written(self) -> Written:
        return written_of(self.parcel, self.ranges(), self.shared, self.pin, self.inline)


def next_run(
    handle: Handle, parcels: list[Parcel], start: int, cost: int | Records
) -> list[Parcel]:
    """The parcels from `start` that go together, at least one, and no more than may ever be there.

    One that repeats what an earlier one writes waits until that is in and can be asked for.
    """
    if len(parcels) == 1:
        return parcels
    session = handle.session
    most = min(RUN_BYTES, session.share_bytes[0] // 4)
    return parcels[start : parcels[start].run(session.max_rows, most, cost, MESSAGE_BYTES)]


def write_few(
    handle: Handle, generation: int, few: Few, continuing: Continuing, deadline: Deadline
) -> Written:
    """Find room for few values, and copy them."""
    if not few.nbytes:
        return few.written([])
    session = handle.session
    extents = session.leftovers[0].take(few.nbytes, few.sizes)
    if extents is None:
        unit = np.array(few.sizes, U8).tobytes()
        body = Reserve(handle.name, generation, [unit], continuing())
        reserved = ask(session, body, Reserved, deadline, "waiting for space in the arena")
        extents = column(reserved.extents, EXTENT)
    try:
        offsets = few.offsets(extents)
        written = few.written(offsets)  # and what is left: the copy empties the caches
        left = remainder(written.ranges["length"], written.ranges["offset"], extents)
        offload(lambda: few.copy(offsets, extents, session.writes), few.nbytes)
    except BaseException:
        session.keep(extents)
        raise
    session.keep(left)
    return written


def write_run(
    handle: Handle,
    generation: int,
    run: list[Parcel],
    continuing: Continuing,
    deadline: Deadline,
) -> Filled:
    """Find room for the first of these parcels, share what is known, copy the rest."""
    session = handle.session
    joined = parcels_of.join(run)
    digests, nbytes, shared = joined.digests, joined.nbytes, _NO_RANGES
    if not (nbytes or joined.inline_bytes):  # all of it goes elsewhere
        return Filled(len(run), joined, np.zeros(0, U8), shared, 0, 0, b"")
    granted = room_for(handle, generation, run, continuing, deadline)
    extents, pin = column(granted.extents, EXTENT), granted.pin
    try:
        if granted.units < len(run):
            run = run[: granted.units]
            joined = parcels_of.join(run)
        if len(digests):
            shared = offload(lambda: share(session, run, granted, len(digests)), nbytes)
            joined = parcels_of.join(run)
        offsets = place(joined.sizes, extents)
        copied = joined.nbytes + joined.inline_bytes
        inline = offload(lambda: _copy(session, joined, offsets, extents), copied)
    except BaseException:
        session.keep(extents)
        session.pinned(pin)
        raise
    session.keep(remainder(joined.sizes, offsets, extents))
    return Filled(len(run), joined, offsets, shared, pin, nbytes, inline)


def room_for(
    handle: Handle,
    generation: int,
    run: Sequence[Parcel],
    continuing: Continuing,
    deadline: Deadline,
    memory: int = 0,
) -> Reserved:
    """Room for the first of these parcels, at least one: of what was granted ahead, else asked
    for. memory: a device's number, or the host arena, where that too may be given."""
    joined, leftovers = parcels_of.join(run), handle.session.leftovers[memory]
    digests, nbytes = joined.digests, joined.nbytes
    if not nbytes:
        return Reserved(len(run), b"")
    found = None if len(digests) else leftovers.take(nbytes)
    if found is not None:
        return Reserved(len(run), found.tobytes())
    if memory:  # nobody waits there for what is kept here: it goes back before the others' is taken
        handle.session.give_back(leftovers.take_idle(0))
    body = Reserve(handle.name, generation, joined.units(), continuing(), digests.tobytes(), memory)
    where = "on the device" if memory else "in the arena"
    return ask(handle.session, body, Reserved, deadline, f"waiting for space {where}")


def _copy(session: Session, parcel: Parcel, offsets: Records, extents: Records) -> bytes:
    """Into the arena; what goes with the message."""
    if len(offsets):
        end = offsets.item(-1) + max(parcel.sizes.item(-1), 1)
        populate(session.writes, extents.tolist(), end, parcel.nbytes)
    fill(parcel, offsets, session.writes.view)
    return inline_of(parcel)


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
