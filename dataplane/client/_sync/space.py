"""Space for the values of a write: reserve it, copy into it, and return the unused part.

The client uses space of its slab first, so a steady producer needs one round trip. Once a message
names space, the space belongs to that message, even if the message fails.


Generated from dataplane/client/_async/space.py: change that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from dataplane.client._sync.backend import offload
from dataplane.client._sync.calls import ask, attach
from dataplane.client.arguments import Deadline
from dataplane.client.session.session import Handle, Session
from dataplane.client.write.chunks import (
    CHUNK_COST_BYTES,
    NewChunk,
    NewPiece,
    Unit,
    chunks_of,
    committed,
    digests_of,
    pieces_of,
    plan,
    room_of,
    spaces_of,
    unnamed,
)
from dataplane.client.write.columns import by_name, prepare
from dataplane.client.write.copying import copy_chunks, is_stored
from dataplane.errors import ShardFull
from dataplane.memory.extents import Extent, placed
from dataplane.wire.limits import MAX_CHUNKS_PER_MESSAGE
from dataplane.wire.messages import Reserve, Reserved
from dataplane.wire.packed import EXTENT, U8, column

RUN_BYTES = 256 << 20
"""The values of one message have about this many bytes, and at most a quarter of the quota. Long
copies are faster: above a length that the C library chooses, they bypass the caches."""
MESSAGE_BYTES = 4 << 20
"""The approximate maximum size of one message with rows, in bytes. A shard sends the rows of a
message to its backup as one record, and the messages behind it wait for that record."""
CHUNKS_PER_RUN = MAX_CHUNKS_PER_MESSAGE // 2
"""The limit for all memories together. A single unit may need more."""
_digest = attrgetter("digest")


def write_columns(
    handle: Handle,
    columns: Mapping[str, Any],
    n: int,
    deadline: Deadline,
    order: list[int] | None = None,
    groups: list[int] | None = None,
    check: Callable[[list[NewPiece]], None] = lambda pieces: None,
) -> list[NewPiece]:
    """Copy new fields of n leased rows into the arena, without sending a message. order: the order
    of the rows in the pieces. groups: the group of each row, or NO_GROUP. check: raises an error
    for pieces that do not fit one ack, before anything is written."""
    session = handle.session
    generation = attach(handle, deadline)
    fields = handle.definition.fields
    check_time = partial(deadline.check, "add")
    prepared = prepare(by_name(columns), n, (), fields, "the batch has", check_time)
    if order is not None:
        prepared = [column.take(order) for column in prepared]
    inline = handle.takes_inline()
    units: list[Unit] = (offload(lambda: plan(prepared, groups, inline), n << 6))[0]
    pieces, done = pieces_of(units), 0
    check(pieces)
    try:
        while done < len(units):
            end = run_end(handle, units, done, 0)
            run = [chunks_of(unit.pieces) for unit in units[done:end]]
            count = len(run)
            if any(run):
                count, _ = write_chunks(handle, generation, run, True, deadline)
            done += count
    except BaseException:
        give_back(session, chunks_of(pieces))
        raise
    for piece in pieces:
        for one in piece.chunk.columns:
            one.source = []  # drop references to the caller's memory
    return pieces


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
    most = min(RUN_BYTES, session.quota_bytes[0] // 4)
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


def write_chunks(
    handle: Handle,
    generation: int,
    units: Sequence[Sequence[NewChunk]],
    continuing: bool,
    deadline: Deadline,
) -> tuple[int, int]:
    """Reserve space for the chunks of the first of these units, and copy those that the peer does
    not have yet. Return the number of these units, and the pin of the shared chunks."""
    session, pin = handle.session, 0
    try:
        count, chunks, pin = room_for(handle, generation, units, continuing, deadline)
        if chunks:
            offload(lambda: copy_chunks(chunks, session.writes), room_of(chunks))
    except BaseException:
        give_back(session, [*chain.from_iterable(units)])
        for chunk in chain.from_iterable(units):
            chunk.number = None
        session.pinned(pin)
        raise
    return count, pin


def room_for(
    handle: Handle,
    generation: int,
    units: Sequence[Sequence[NewChunk]],
    continuing: bool,
    deadline: Deadline,
    memory: int = 0,
) -> tuple[int, list[NewChunk], int]:
    """Find space for the chunks of the first of these units (at least one) in a slab, or reserve
    it. Chunks that the peer already has are shared instead. Return the number of these units, the
    chunks that have space now, and the pin of the shared ones. units: the chunks of each unit;
    units may share chunks. memory: the number of a device, whose values may also go to the host
    arena.
    """
    session = handle.session
    slabs = session.slabs[memory]
    chunks = list(dict.fromkeys(chain.from_iterable(units)))
    named = list(filter(_digest, chunks))
    if not named:
        nbytes = room_of(chunks)
        start = slabs.take(nbytes)
        if start is not None:
            offset = start
            try:
                for chunk in chunks:
                    chunk.offset = offset
                    offset += chunk.space
            except BaseException:  # an interrupt
                for chunk in chunks:
                    chunk.offset = -1
                session.keep([(start, nbytes)])
                raise
            return len(units), chunks, 0
        session.give_back(slabs.take_idle(0))  # this call or another may need this space
    asked: list[bytes] = []
    seen: set[NewChunk] = set()
    for unit in units:
        first = [chunk for chunk in unit if chunk not in seen]
        asked.append(np.array([chunk.nbytes for chunk in first], U8).tobytes())
        seen.update(first)
    body = Reserve(handle.name, generation, asked, continuing, digests_of(named), memory)
    where = "on the device" if memory else "in the arena"
    session.tend()  # start the housekeeper now: an interrupt after the reply would lose the space
    reserved = ask(session, body, Reserved, deadline, f"waiting for space {where}")
    left: list[Extent] | None = None
    try:
        chunks = list(dict.fromkeys(chain.from_iterable(units[: reserved.units])))
        if named:
            nbytes = sum([chunk.nbytes for chunk in named])
            offload(lambda: share(session, named, chunks, reserved), nbytes)
        own = [chunk for chunk in chunks if chunk.number is None]
        space = column(reserved.extents, EXTENT).tolist()
        offsets, rest = placed([chunk.nbytes for chunk in own], space)
        for chunk, offset in zip(own, offsets, strict=True):
            chunk.offset = offset
        left = rest  # the caller returns the space of the chunks if it is interrupted
        session.keep(left)
    except BaseException:
        if left is None:
            left = column(reserved.extents, EXTENT).tolist()
            for chunk in chain.from_iterable(units):
                chunk.offset = -1
        session.keep(left)
        for chunk in chain.from_iterable(units):
            chunk.number = None
        session.pinned(reserved.pin)
        raise
    return reserved.units, own, reserved.pin


def share(
    session: Session, candidates: list[NewChunk], granted: Sequence[NewChunk], reserved: Reserved
) -> None:
    """Use chunks that the peer already has instead of writing them, after comparing the bytes.
    candidates: the chunks that the client asked the peer about. granted: those to write now."""
    known = column(reserved.known, U8, len(candidates))
    places = column(reserved.places, EXTENT, len(candidates))
    arena, here = np.asarray(session.reads.pin(0)), {*granted}
    for chunk, name, extent in zip(candidates, known.tolist(), places.tolist(), strict=True):
        if name and chunk in here and extent[1] == chunk.space:
            stored = arena[extent[0] : extent[0] + chunk.nbytes]
            if is_stored(chunk, stored):
                chunk.number = name


def land(
    handle: Handle,
    generation: int,
    pieces: Sequence[NewPiece],
    continuing: bool,
    deadline: Deadline,
) -> None:
    """Move inline values to chunks in the arena, because the shard has no space for them."""
    inline = [chunk for chunk in chunks_of(pieces) if chunk.is_inline]
    if not inline:
        return
    write_chunks(handle, generation, [inline], continuing, deadline)
    for chunk in inline:
        chunk.land()


def named_again(
    session: Session, pieces: Sequence[NewPiece], full: ShardFull, pin: int
) -> tuple[object, int]:
    """Refer to the chunks of a message by their ranges, after the shard refused it because it had
    no space. The peer keeps them. pieces: of the message. Return the object that holds the chunks,
    and the next message's pin."""
    held = session.pinned(full.details.get("pin", 0))
    if "chunks" in full.details:
        committed(unnamed(pieces), column(full.details["chunks"], U8))
        pin = 0
    return held, pin


def give_back(session: Session, chunks: Sequence[NewChunk]) -> None:
    """Return the space of chunks that no message has named to the slab."""
    unsent = [chunk for chunk in dict.fromkeys(chunks) if chunk.offset >= 0]
    spaces = spaces_of(unsent)
    for chunk in unsent:
        chunk.offset = -1
    session.keep(spaces)
