"""Write the values of a put, or of fields that are added to leased rows: reserve, copy, send.

A put sends its units in runs. A run is as many units as fit one message and the space that the peer
reserves. The client uses space of its slab first, so a steady producer needs one round trip. Once a
message names space, the space belongs to that message, even if the message fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import msgspec
import numpy as np

from dataplane.client._async.attaching import attach
from dataplane.client._async.backend import offload
from dataplane.client._async.calls import ask, expect, send
from dataplane.client.deadline import Deadline
from dataplane.client.handle import Handle
from dataplane.client.session.outgoing import Call
from dataplane.client.session.session import Session
from dataplane.client.write.chunks import (
    Chunk,
    Piece,
    Unit,
    chunks_of,
    pieces_of,
    plan,
    room_of,
    spaces_of,
)
from dataplane.client.write.columns import prepare
from dataplane.client.write.copying import copy_chunks, is_stored
from dataplane.client.write.message import (
    CHUNK_COST_BYTES,
    MessageValues,
    digests_of,
    values_of,
)
from dataplane.client.write.rows import (
    Identity,
    Index,
    group_names,
    row_names,
    take_tags,
)
from dataplane.errors import DataplaneError, PutIncomplete, ShardFull, ValueTooLarge, sized
from dataplane.memory.placement import placed
from dataplane.metadata.tables.references import ids_of
from dataplane.wire.limits import MAX_CHUNKS_PER_MESSAGE
from dataplane.wire.messages import Put, PutDone, Reserve, Reserved
from dataplane.wire.records import EXTENT, KEY, RANGE, U8, column
from dataplane.wire.tables import Scalar

RUN_BYTES = 256 << 20
"""The values of one message have about this many bytes, and at most a quarter of the quota. Long
copies are faster: above a length that the C library chooses, they bypass the caches."""
MESSAGE_BYTES = 16 << 20
"""The approximate maximum size of one message with rows, in bytes."""
CHUNKS_PER_RUN = MAX_CHUNKS_PER_MESSAGE // 2
"""The limit for all memories together. A single unit may need more."""
_chunks, _digest, _nbytes = attrgetter("chunks"), attrgetter("digest"), attrgetter("nbytes")


class OtherMemory(Protocol):
    """The fields of a put whose values are stored outside the host arena, in one other memory (for
    example a GPU's). Their rows are divided into the same units as those of the other fields."""

    @property
    def memory(self) -> int:
        """The index of this memory in `Session.slabs`."""

    @property
    def units(self) -> Sequence[Unit]:
        """The units of the put, with only these fields."""

    def upto(self, first: int, last: int) -> int:
        """Return how many of the units from `first` to `last` fit in one run (at least 1)."""

    async def write(
        self, handle: Handle, generation: int, which: slice, continuing: bool, until: Deadline
    ) -> list[Piece]:
        """Reserve space for the values of these units, and copy the values into it."""


class Putting(msgspec.Struct, eq=False):
    """One put in progress. order: the rows, sorted by unit; None if they are in that order
    already."""

    handle: Handle
    generation: int
    identity: Identity
    tags: dict[str, list[Scalar]]
    replace: bool
    deadline: Deadline
    began: float
    """when the caller called put()"""
    reuse: bool = False
    order: Index | None = None
    gone: int = 0
    """rows that the peer skipped, because they were put before and have been freed"""
    there: int = 0
    """rows that the peer skipped, because they exist with all of these fields"""
    committed: list[tuple[int, int]] = []
    """first and last row, in the order of the units, of each message that took effect"""
    others: Sequence[OtherMemory] = ()
    continuing: bool = False
    """whether this client put or leased the first group or row of the put before"""

    def __post_init__(self) -> None:
        known = self.identity.continued_keys()[: KEY.itemsize]
        self.continuing = self.handle.session.known_keys.knows(self.generation, known)

    def check_units(self, units: list[Unit]) -> None:
        """Raise ValueTooLarge if a unit can never fit."""
        cap = self.handle.session.share_bytes[int(self.continuing)]
        needed = max(unit.nbytes for unit in units)
        if needed > cap:
            raise ValueTooLarge(
                f"nothing was put: a single row or group needs {sized(needed)}, but "
                f"peer {self.handle.session.peer!r} accepts at most {sized(cap)} at once. Put "
                "fewer bytes at a time, or give the peer a larger arena (DATAPLANE_ARENA, --arena)",
                needed_bytes=needed,
                cap_bytes=cap,
            )

    async def put_units(self, units: list[Unit], row_cost: int) -> None:
        """Send the units, one run at a time. Raise PutIncomplete if a run fails after an earlier
        one took effect."""
        done = 0
        others = [other.units for other in self.others]
        while done < len(units):
            stop = run_end(self.handle, units, done, row_cost, others)
            try:
                done += await self._run(units, done, stop)
            except Exception as exc:
                if not self.committed:
                    raise
                raise self._incomplete(exc) from exc

    async def _run(self, units: list[Unit], done: int, stop: int) -> int:
        """One message; the number of units that it committed."""
        for other in self.others:
            stop = done + other.upto(done, stop)
        handle, generation, until = self.handle, self.generation, self.deadline
        session = handle.session
        chunks, pin = needed(units[done:stop]), 0
        if any(chunks):
            count, pin = await write_chunks(handle, generation, chunks, self.continuing, until)
            stop = done + count
        here = slice(done, stop)
        pieces = pieces_of(units[here])
        first, last = units[done].first, units[stop - 1].last
        try:
            for other in self.others:
                pieces += await other.write(handle, generation, here, self.continuing, until)
            ahead = [self._want(0, units, here)]
            if self.others:
                ahead += [0] * (len(session.slabs) - 1)
            for other in self.others:
                ahead[other.memory] = self._want(other.memory, other.units, here)
            index = None
            if self.order is not None or last - first < len(self.identity):
                index = whole(self._rows(first, last), len(self.identity))
        except BaseException:
            give_back(session, chunks_of(pieces))
            session.pinned(pin)
            raise
        await self._send(pieces, first, pin, index, ahead)
        self.committed.append((first, last))
        return stop - done

    def _rows(self, first: int, last: int) -> Index:
        """Which rows of the put these are."""
        return np.arange(first, last) if self.order is None else self.order[first:last]

    async def _send(
        self,
        pieces: list[Piece],
        first: int,
        pin: int,
        index: Index | None,
        ahead: list[int],
    ) -> None:
        """The message of the rows at `index`; once more where the shard has no space for what is
        inline. first: which row of the units is its first."""
        brought = values_of(self.handle.session.owner, pieces, first)
        try:
            await self._tell(brought, pin, index, ahead)
        except ShardFull as full:
            if not full.details.get("values"):  # it has none for rows
                raise
            self.handle.shard_is_full()
            held, pin = named_again(self.handle.session, brought, full, pin)
            await land(self.handle, self.generation, pieces, self.continuing, self.deadline)
            brought = values_of(self.handle.session.owner, pieces, first)
            await self._tell(brought, pin, index, ahead)
            del held  # the values have another holder now

    async def _tell(
        self, brought: MessageValues, pin: int, index: Index | None, ahead: list[int]
    ) -> None:
        """The message of the rows at `index`, and what its answer grants. ahead: bytes that are
        asked for, by memory."""
        session, call = self.handle.session, None
        try:
            body = Put(
                self.handle.name,
                self.generation,
                self.identity.wire(index),
                brought.values,
                take_tags(self.tags, index),
                pin,
                self.replace,
                ahead[0],
                continuing=self.continuing,
                reuse=self.reuse,
                want_in_pools=ahead[1:],
                client_s=time.monotonic() - self.began,
            )
            self.deadline.check("put")
            call = Call(body, self.deadline)
            reply = expect(await send(session, call), PutDone, body)
        except BaseException:
            session.pinned(pin)  # nobody keeps it, so it is released
            if call is None or not call.in_flight:
                give_back(session, brought.chunks)
            raise
        if reply.extents:
            session.keep(column(reply.extents, EXTENT).tolist())
        brought.committed()
        for chunk in brought.shared:  # the pin was for this message
            chunk.range = None
        self.gone += reply.gone
        self.there += reply.there
        rows = len(self.identity) if index is None else len(index)
        session.tally.put(rows, brought.nbytes, brought.copied_bytes)

    def _want(self, memory: int, units: Sequence[Unit], here: slice) -> int:
        """How much to ask for ahead: what comes next in this put, else as much as this time."""
        following = units[here.stop : 2 * here.stop - here.start] or units[here]
        nbytes = sum(map(_nbytes, following))
        if not nbytes or any(map(_digest, chain.from_iterable(map(_chunks, following)))):
            return 0
        return self.handle.session.slabs[memory].ahead(nbytes)

    def _incomplete(self, exc: Exception) -> PutIncomplete:
        rows = np.concatenate([self._rows(*rows) for rows in self.committed])
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


async def write_columns(
    handle: Handle,
    columns: Mapping[str, Any],
    n: int,
    deadline: Deadline,
    order: list[int] | None = None,
    groups: list[int] | None = None,
    check: Callable[[list[Piece]], None] = lambda pieces: None,
) -> list[Piece]:
    """Copy new fields of n leased rows into the arena, without sending a message. order: the order
    of the rows in the pieces. groups: the group of each row, or NO_GROUP. check: raises an error
    for pieces that do not fit one ack, before anything is written."""
    session = handle.session
    generation = await attach(handle, deadline)
    fields = handle.definition.fields
    prepared = prepare(columns, n, (), fields, "the batch has", lambda: deadline.check("add"))
    if order is not None:
        prepared = [column.take(order) for column in prepared]
    inline = handle.takes_inline()
    units: list[Unit] = (await offload(lambda: plan(prepared, groups, inline), n << 6))[0]
    pieces, done = pieces_of(units), 0
    check(pieces)
    try:
        while done < len(units):
            run = needed(units[done : run_end(handle, units, done, 0)])
            if any(run):
                count, _ = await write_chunks(handle, generation, run, True, deadline)
            else:
                count = len(run)
            done += count
    except BaseException:
        give_back(session, chunks_of(pieces))
        raise
    for piece in pieces:
        for one in piece.chunk.columns:
            one.source = []  # let go of the caller's memory
    return pieces


# runs


def run_end(
    handle: Handle,
    units: list[Unit],
    start: int,
    row_cost: int,
    others: Sequence[Sequence[Unit]] = (),
) -> int:
    """Return the end of the run that starts at unit `start`: at least one unit, and no more than
    the peer can reserve at once. others: units of the same rows in other memories."""
    if len(units) == 1:
        return 1
    session = handle.session
    most = min(RUN_BYTES, session.share_bytes[0] // 4)
    nbytes = cost = chunks = 0
    for stop in range(start, len(units)):
        unit = units[stop]
        nbytes += unit.nbytes
        chunks += len(unit.pieces) + (1 if unit.inline else 0)
        chunks += sum([len(other[stop].pieces) for other in others])
        cost += row_cost * (unit.last - unit.first) + unit.inline_bytes
        rows = unit.last - units[start].first
        if stop > start and (
            nbytes > most
            or cost + CHUNK_COST_BYTES * chunks > MESSAGE_BYTES
            or rows > session.max_rows
            or chunks > CHUNKS_PER_RUN
        ):
            return stop
    return len(units)


def needed(units: Sequence[Unit]) -> list[list[Chunk]]:
    """Return the chunks of each unit that have no space yet, each once."""
    found: list[list[Chunk]] = []
    seen: set[Chunk] = set()
    for unit in units:
        chunks = unit.chunks
        if unit.repeats:
            chunks = [chunk for chunk in (*chunks, *unit.repeats) if chunk not in seen]
        found.append(chunks)
        seen.update(chunks)
    return found


async def write_chunks(
    handle: Handle,
    generation: int,
    units: list[list[Chunk]],
    continuing: bool,
    deadline: Deadline,
) -> tuple[int, int]:
    """Reserve space for the chunks of the first of these units, and copy those that the peer does
    not have yet. Return the number of these units, and the pin of the shared chunks."""
    session = handle.session
    count, chunks, pin = await room_for(handle, generation, units, continuing, deadline)
    if not chunks:
        return count, pin
    try:
        await offload(lambda: copy_chunks(chunks, session.writes), room_of(chunks))
    except BaseException:
        give_back(session, chunks)
        for chunk in chain.from_iterable(units[:count]):
            chunk.range = None
        session.pinned(pin)
        raise
    return count, pin


async def room_for(
    handle: Handle,
    generation: int,
    units: Sequence[Sequence[Chunk]],
    continuing: bool,
    deadline: Deadline,
    memory: int = 0,
) -> tuple[int, list[Chunk], int]:
    """Find space for the chunks of the first of these units (at least one) in a slab, or reserve
    it. Chunks that the peer already has are shared instead. Return the number of these units, the
    chunks that have space now, and the pin of the shared ones. memory: the number of a device,
    whose values may also go to the host arena.
    """
    session = handle.session
    slabs = session.slabs[memory]
    chunks = list(chain.from_iterable(units))
    named = list(filter(_digest, chunks))
    if not named:
        offset = slabs.take(room_of(chunks))
        if offset is not None:
            for chunk in chunks:
                chunk.offset = offset
                offset += chunk.space
            return len(units), chunks, 0
        session.give_back(slabs.take_idle(0))  # perhaps somebody waits for it, or this call will
    asked = [np.array([chunk.nbytes for chunk in unit], U8).tobytes() for unit in units]
    body = Reserve(handle.name, generation, asked, continuing, digests_of(named), memory)
    where = "on the device" if memory else "in the arena"
    reserved = await ask(session, body, Reserved, deadline, f"waiting for space {where}")
    chunks = list(chain.from_iterable(units[: reserved.units]))
    left = space = column(reserved.extents, EXTENT).tolist()
    try:
        if named:
            nbytes = sum([chunk.nbytes for chunk in named])
            await offload(lambda: share(session, named, chunks, reserved), nbytes)
        own = [chunk for chunk in chunks if chunk.range is None]
        offsets, left = placed([chunk.nbytes for chunk in own], space)
        for chunk, offset in zip(own, offsets, strict=True):
            chunk.offset = offset
    except BaseException:
        for chunk in chunks:
            chunk.range = None
        session.pinned(reserved.pin)
        raise
    finally:
        session.keep(left)
    return reserved.units, own, reserved.pin


def share(
    session: Session, candidates: list[Chunk], granted: Sequence[Chunk], reserved: Reserved
) -> None:
    """Use chunks that the peer already has instead of writing them, after comparing the bytes.
    candidates: the chunks that the client asked the peer about. granted: those to write now."""
    known = column(reserved.known, RANGE, len(candidates))
    places = column(reserved.places, EXTENT, len(candidates))
    arena, here = session.reads.base_array(session.reads.pin(0)), {*granted}
    names, living = ids_of(known).tolist(), known["generation"].tolist()
    for chunk, name, lives, extent in zip(candidates, names, living, places.tolist(), strict=True):
        if lives and chunk in here and extent[1] == chunk.space:
            stored = arena[extent[0] : extent[0] + chunk.nbytes]
            if is_stored(chunk, stored):
                chunk.range = name


async def land(
    handle: Handle,
    generation: int,
    pieces: Sequence[Piece],
    continuing: bool,
    deadline: Deadline,
) -> None:
    """Move inline values to chunks in the arena, because the shard has no space for them."""
    inline = [chunk for chunk in chunks_of(pieces) if chunk.is_inline]
    if not inline:
        return
    await write_chunks(handle, generation, [inline], continuing, deadline)
    for chunk in inline:
        chunk.land()


def named_again(
    session: Session, brought: MessageValues, full: ShardFull, pin: int
) -> tuple[object, int]:
    """Refer to the chunks of a message by their ranges, after the shard refused it because it had
    no space. The peer keeps them. Return the object that holds them, and the next message's pin."""
    held = session.pinned(full.details.get("pin", 0))
    if "ranges" in full.details:
        brought.committed(column(full.details["ranges"], RANGE))
        pin = 0
    return held, pin


def give_back(session: Session, chunks: Sequence[Chunk]) -> None:
    """Return the space of chunks that no message has named to the slab."""
    unsent = [chunk for chunk in chunks if chunk.offset >= 0]
    if unsent:
        session.keep(spaces_of(unsent))
        for chunk in unsent:
            chunk.offset = -1


# messages


def whole(rows: Index, n: int) -> Index | None:
    """Return None if these are all n rows in order."""
    return None if len(rows) == n and (n == 1 or np.array_equal(rows, np.arange(n))) else rows


def row_cost(identity: Identity) -> int:
    """Return about how many bytes each row adds to a message, without its values."""
    cost = 64
    if identity.names is not None:
        cost += sum(len(n) for n in identity.names if isinstance(n, str)) // len(identity.names)
    return cost
