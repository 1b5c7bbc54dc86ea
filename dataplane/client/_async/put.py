"""put: check the arguments, plan the messages, send them, and return a `Ref` of the rows.

A put checks all of its arguments before it sends the first message. A later error would leave rows
that a second put without keys would store twice. It sends its units in runs: as many units as fit
one message and the space that the peer reserves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dataplane.client._async import other_memory
from dataplane.client._async.backend import offload
from dataplane.client._async.calls import Call, attach, comes_too_late, send
from dataplane.client._async.space import (
    give_back,
    land,
    named_again,
    run_end,
    write_chunks,
)
from dataplane.client.arguments import Deadline, flag, texts
from dataplane.client.ref import Ref
from dataplane.client.session.connection import expect
from dataplane.client.session.session import Handle
from dataplane.client.session.slabs import AHEAD_BYTES
from dataplane.client.write import schema
from dataplane.client.write.chunks import (
    UNIT_BYTES,
    NewChunk,
    NewPiece,
    Unit,
    chunks_of,
    order_of,
    pieces_of,
    plan,
    values_of,
)
from dataplane.client.write.columns import ValueColumn, by_name, prepare
from dataplane.client.write.rows import (
    Index,
    Names,
    TagValues,
    check_groups,
    check_names,
    continued_keys,
    group_names,
    identify,
    name_list,
    row_names,
    tag_columns,
    take_rows,
    take_tags,
)
from dataplane.errors import (
    DataplaneError,
    FieldExists,
    PutIncomplete,
    RowsGone,
    ShardFull,
    ValueTooLarge,
    counted,
    sized,
)
from dataplane.wire.messages import Put, PutDone
from dataplane.wire.packed import KEY
from dataplane.wire.tables import Name, Rows, Scalar

if TYPE_CHECKING:
    from dataplane.gpu.client.puts import OnDevice

log = logging.getLogger(__name__)

SHOWN_NAMES = 8
"""An error lists at most this many keys and group ids."""
_nbytes = attrgetter("nbytes")


async def put(
    handle: Handle,
    columns: Mapping[str, Any],
    key: Names | None,
    group: Names | Sequence[Name | None] | None,
    tags: TagValues | None,
    dedup: Collection[str],
    replace: bool,
    reuse: bool,
    timeout: float | None,
) -> Ref:
    """Put rows, and return a Ref of them. In a loop over `producing`, a put that arrives after the
    partition was sealed or dropped stores nothing and returns a Ref without rows."""
    try:
        return await _put(handle, columns, key, group, tags, dedup, replace, reuse, timeout)
    except DataplaneError as exc:
        if not await comes_too_late(handle, exc):
            raise
        log.info(
            "partition %r: put() in a producing() loop arrived too late and stored nothing: %s",
            handle.name,
            exc.message,
        )
    session = handle.session
    return Ref(session.plane, session.peer, handle.name, handle.generation, b"", None, (), ())


async def _put(
    handle: Handle,
    columns: Mapping[str, Any],
    key: Names | None,
    group: Names | Sequence[Name | None] | None,
    tags: TagValues | None,
    dedup: Collection[str],
    replace: bool,
    reuse: bool,
    timeout: float | None,
) -> Ref:
    """Write rows, run by run. Raise PutIncomplete if a run fails after an earlier one was
    stored."""
    session, deadline, began = handle.session, Deadline(timeout), time.monotonic()
    columns = by_name(columns)
    dedup = texts(dedup, "dedup")
    replace, reuse = flag(replace, "replace"), flag(reuse, "reuse")
    names = None if key is None else name_list(key, "key")
    n = None if names is None else len(names)
    # Invalid columns are an error before the put waits for its partition. The first put knows
    # the schema only after that: it prepares the columns again, because the schema also decides how
    # flat lists and empty rows are stored.
    prepared, others = _prepare(handle, columns, n, dedup, deadline)
    if handle.defined is None:
        await attach(handle, deadline)
        if handle.definition.fields:
            prepared, others = _prepare(handle, columns, n, dedup, deadline)
    n = (prepared or others[0].columns)[0].count
    rows, groups = identify(session, n, names, group)
    tagged = tag_columns(tags, n)
    if tagged:
        tagged = {tag: v * n if len(v) == 1 else v for tag, v in tagged.items()}
    order = order_of(groups)
    units: list[list[Unit]] = await offload(
        partial(
            plan,
            prepared,
            groups,
            handle.takes_inline(),
            min(UNIT_BYTES, session.quota_bytes[0] // 4),
            rows.group_names or (),
            [one.columns for one in others],
            order,
        ),
        (n << 6) + (AHEAD_BYTES if dedup else 0),
    )
    generation = await attach(handle, deadline)
    check_groups(rows, groups, handle.definition.group_size)
    known = continued_keys(rows)
    continuing = session.known_keys.knows(generation, known[: KEY.itemsize])
    work = Putting(
        handle, generation, n, rows, tagged, replace, deadline, began, began, reuse, continuing
    )
    if order is not None:
        work.order = np.array(order, np.intp)
    if len(units[0]) > 1:
        check_names(rows)
        work.check_units(units[0])
    work.others = others
    for other, some in zip(others, units[1:], strict=True):
        other.units = some
    await work.put_units(units[0], row_cost(rows))
    session.known_keys.note(generation, known)
    if session.spans is not None:
        session.spans.put(handle.name, began, n, tagged)
    kept = work.gone + work.there
    if kept:
        _check_passed_over(work, next(iter(columns), ""))
    return Ref(
        session.plane,
        session.peer,
        handle.name,
        generation,
        rows.keys,
        None if rows.names is None else tuple(rows.names),
        tuple(rows.group_names or ()),
        tuple(columns),
        kept,
    )


def _check_passed_over(work: Putting, field: str) -> None:
    """Raise FieldExists or RowsGone if the put stored none of its rows. field: one of its
    fields."""
    partition, n = work.handle.name, work.count
    if work.gone + work.there < n:
        if work.there:
            log.warning(
                "partition %r: %d of the %d rows of a put already had values for its fields and "
                "keep these values (see ref.kept); the other rows were stored",
                partition,
                work.there,
                n,
            )
        return
    keys = row_names(work.rows)[:SHOWN_NAMES]
    rows, have, were = (f"all {n} rows", "have", "were") if n > 1 else ("the row", "has", "was")
    if work.there:
        freed = f" ({work.gone} of them freed since)" if work.gone else ""
        example = f"row {keys[0]!r}, …" if n > 1 else f"row {keys[0]!r}"
        raise FieldExists(
            f"nothing was put: {rows} of this put ({example}) already {have} values for these "
            f"fields in partition {partition!r}{freed}. If this put repeats an earlier "
            "one, go on to the next put. To write new values, pass replace=True",
            field=field,
            keys=keys,
        )
    groups = (work.rows.group_names or [])[:SHOWN_NAMES]
    which = f"group {groups[0]!r}" if groups else f"key {keys[0]!r}"
    which += ", …" if len(groups or keys) > 1 else ""
    raise RowsGone(
        f"nothing was put into partition {partition!r}: {rows} of this put ({which}) {were} "
        "stored before, and acked by every stage. A restarted producer should continue with "
        "its next rows. To put new rows with these keys or group ids, pass reuse=True",
        keys=keys,
        groups=groups,
    )


def _prepare(
    handle: Handle,
    columns: dict[str, Any],
    n: int | None,
    dedup: Collection[str],
    deadline: Deadline,
) -> tuple[list[ValueColumn], list[OnDevice]]:
    """Return the fields that go to the host arena, and those that go to other memory. All match the
    schema, if it is known."""
    session, fields = handle.session, handle.definition.fields
    check_time = partial(deadline.check, "put")
    if session.pools is None:
        return prepare(columns, n, dedup, fields, check_time=check_time), []
    others, rest = session.pools.take(columns, n, dedup)
    for one in others:
        schema.check(one.columns, fields)
        n = one.columns[0].count
    host = prepare(rest, n, dedup, fields, check_time=check_time) if rest or not others else []
    return host, others


class Putting(msgspec.Struct, eq=False):
    """One put in progress. order: the rows, sorted by unit; None if they are in that order
    already."""

    handle: Handle
    generation: int
    count: int
    rows: Rows
    tags: dict[str, list[Scalar]]
    replace: bool
    deadline: Deadline
    began: float
    """when the caller called put()"""
    counted: float
    """the time up to which the tally has counted this put"""
    reuse: bool = False
    continuing: bool = False
    """whether this client has already put or leased the first group or row of this put"""
    order: Index | None = None
    gone: int = 0
    """rows that the peer skipped, because they were put before and have been freed"""
    there: int = 0
    """rows that the peer skipped, because they exist with all of these fields"""
    committed: list[tuple[int, int]] = []
    """the first row of each message that took effect, and the row after its last, in the order of
    the units"""
    others: Sequence[OnDevice] = ()

    def check_units(self, units: list[Unit]) -> None:
        """Raise ValueTooLarge if a unit can never fit."""
        cap = self.handle.session.quota_bytes[int(self.continuing)]
        needed = max(unit.nbytes for unit in units)
        if needed > cap:
            raise ValueTooLarge(
                f"nothing was put: a single row or group needs {sized(needed)}, but "
                f"peer {self.handle.session.peer!r} accepts at most {sized(cap)} at once. Put "
                "smaller rows, split a group over several puts, or give the peer a larger arena "
                "(DATAPLANE_ARENA, --arena)",
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
        """Send one message. Return how many units it committed."""
        for other in self.others:
            stop = done + other.upto(done, stop)
        handle, generation, until = self.handle, self.generation, self.deadline
        session = handle.session
        run, pin = [chunks_of(unit.pieces) for unit in units[done:stop]], 0
        pieces: list[NewPiece] = []
        try:
            if any(run):
                count, pin = await write_chunks(handle, generation, run, self.continuing, until)
                stop = done + count
            here = slice(done, stop)
            pieces = pieces_of(units[here])
            for other in self.others:
                pieces += await other_memory.write(
                    other, handle, generation, here, self.continuing, until
                )
            chunks, body = chunks_of(pieces), self._message(units, here, pieces, pin)
        except BaseException:
            give_back(session, [*chain.from_iterable(run), *chunks_of(pieces)])
            session.pinned(pin)
            raise
        first, last = units[done].first, units[stop - 1].last
        try:
            reply = await self._send(body, chunks)
        except ShardFull as full:
            if not full.details.get("values"):  # the shard has no space for rows
                raise
            handle.shard_is_full()
            held, body.pin = named_again(session, pieces, full, pin)
            await land(handle, generation, pieces, self.continuing, until)
            body.values = values_of(session.owner, pieces, first)
            reply = await self._send(body, chunks)
            del held  # other pieces hold the values now
        nbytes = copied_bytes = 0
        for chunk in chunks:
            nbytes += chunk.nbytes
            if chunk.number is None:
                copied_bytes += chunk.nbytes
            # the peer owns its space now, and the pin was for this message
            chunk.offset, chunk.number = -1, None
        self.gone += reply.gone
        self.there += reply.there
        now = time.monotonic()
        session.tally.put(last - first, nbytes, copied_bytes, now - self.counted)
        self.counted = now
        self.committed.append((first, last))
        return stop - done

    def _message(
        self, units: Sequence[Unit], here: slice, pieces: Sequence[NewPiece], pin: int
    ) -> Put:
        """Return the message of the units `here`, which have these pieces."""
        session = self.handle.session
        ahead = [self._want(0, units, here)]
        if self.others:
            ahead += [0] * (len(session.slabs) - 1)
        for other in self.others:
            ahead[other.memory] = self._want(other.memory, other.units, here)
        first, last = units[here.start].first, units[here.stop - 1].last
        index = None
        if self.order is not None or last - first < self.count:
            index = self._rows(first, last)
        return Put(
            self.handle.name,
            self.generation,
            take_rows(self.rows, index),
            values_of(session.owner, pieces, first),
            take_tags(self.tags, index),
            pin,
            self.replace,
            ahead[0],
            continuing=self.continuing,
            reuse=self.reuse,
            want_in_pools=ahead[1:],
            client_s=time.monotonic() - self.began,
        )

    async def _send(self, body: Put, chunks: Sequence[NewChunk]) -> PutDone:
        """Send a message. If it fails before it leaves this process, return the space of its chunks
        to the slab."""
        session, call = self.handle.session, Call(body, self.deadline)
        try:
            self.deadline.check("put")
            return expect(await send(session, call), PutDone, body)
        except BaseException:
            session.pinned(body.pin)  # without a view, so the pin is released
            if not call.in_flight:
                give_back(session, chunks)
            raise

    def _rows(self, first: int, last: int) -> Index:
        """Return which rows of the put these units have."""
        return np.arange(first, last) if self.order is None else self.order[first:last]

    def _want(self, memory: int, units: Sequence[Unit], here: slice) -> int:
        """Return how many bytes to reserve ahead: what this put writes next, or else as much as it
        writes now."""
        following = units[here.stop : 2 * here.stop - here.start] or units[here]
        nbytes = sum(map(_nbytes, following))
        if not nbytes or any([one.chunk.digest for unit in following for one in unit.pieces]):
            return 0
        return self.handle.session.slabs[memory].ahead(nbytes)

    def _incomplete(self, exc: Exception) -> PutIncomplete:
        rows = np.concatenate([self._rows(*rows) for rows in self.committed])
        there = take_rows(self.rows, rows)
        message = exc.message if isinstance(exc, DataplaneError) else str(exc)
        return PutIncomplete(
            f"the put failed ({type(exc).__name__}: {message}) after storing "
            f"{len(rows)} of {counted(self.count, 'row')} in partition "
            f"{self.handle.name!r}. Repeat the put with the same keys to store the other rows",
            committed=row_names(there),
            committed_groups=group_names(there),
            rows=rows.tolist(),
        )


def row_cost(rows: Rows) -> int:
    """Return about how many bytes each row adds to a message, without its values."""
    cost = 64
    if rows.names is not None:
        cost += sum(len(n) for n in rows.names if isinstance(n, str)) // len(rows.names)
    return cost
