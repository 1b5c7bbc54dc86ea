"""From where values lie to where a client can read them.

`resolve` turns VALUE columns into PLACE columns of the local arena and pins what they name; values
of other hosts are pulled first. `Read` and `Fetch` are answered here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.errors import LeaseExpired, RowsGone, RowsLost, Unavailable
from dataplane.memory.extents import every, some
from dataplane.memory.space import Space
from dataplane.metadata.shard import inspection, rows_out
from dataplane.metadata.tables.references import Array, ids_of, ranges_of
from dataplane.peer import rows as rowset
from dataplane.peer.host import Caller, Host, call_context
from dataplane.peer.net.router import Router
from dataplane.peer.pull.device_pulls import DevicePulls
from dataplane.peer.requests.leases import Leases
from dataplane.peer.room.admission import PULLER
from dataplane.peer.sessions import Session
from dataplane.wire.limits import ABSENT, MAX_FRAME_BYTES
from dataplane.wire.messages import Body, Fetch, Fetched, Read, ReadDone, Request
from dataplane.wire.records import (
    ONE_PLACE,
    ONE_VALUE,
    PLACE,
    PLACE_ABSENT,
    PLACE_INLINE,
    RANGE,
    VALUE,
)
from dataplane.wire.tables import INLINE, Owner, Table

PAGE_BYTES = MAX_FRAME_BYTES // 2
"""A page of rows has no more, with what comes with it: names and tags need room in its message."""

ATTEMPTS = 3
"""How often values are named that went meanwhile before who asked for them is told."""
LEARN_S = 1.0
"""A new roster, by which shards learn that bytes are lost, is awaited for so long."""

Resolved = tuple[Table, int]
"""A table of PLACE columns, and the pin that holds them (0: nothing to hold)."""


@dataclass(eq=False, repr=False)
class Reading:
    host: Host
    router: Router
    leases: Leases
    device_pulls: DevicePulls

    def __post_init__(self) -> None:
        self.pulls = self.device_pulls.pulls

    # resolving

    def resolve(
        self, table: Table, holder: int, *, in_place: bool = True
    ) -> Resolved | Awaitable[Resolved]:
        """At once where all bytes are here, else after pulling them. in_place: on devices too,
        where the holder reads those."""
        raw, space, me = rowset.raw_values(table.columns), self.host.space, self.host.owner
        own = all([owner in (me, INLINE) for owner in table.owners])
        reader = holder if in_place else PULLER
        if own and len(raw) <= rowset.FEW_BYTES:
            found = self._places_of_few(table, raw, holder, reader)
            if found is not None:
                return found
        flat = np.frombuffer(raw, VALUE)
        here = rowset.in_ranges(flat, table.owners)
        if not some(here):
            return self._places(table, flat, here, holder)
        if own and not space.any_away(ranges_of(ids_of(flat[here])), reader):
            return self._places(table, flat, here, holder)
        return self._pull(table, flat, here, holder, reader)

    async def resolved(self, table: Table, holder: int, *, in_place: bool = True) -> Resolved:
        """As `resolve`."""
        found = self.resolve(table, holder, in_place=in_place)
        return found if isinstance(found, tuple) else await found

    def _places_of_few(self, table: Table, raw: bytes, holder: int, reader: int) -> Resolved | None:
        """As `_places`, one by one; None where any is away from the reader."""
        inline = table.owners.index(INLINE) if INLINE in table.owners else ABSENT
        places: list[tuple[int, int, int, int]] = []
        ranges, pin = [], 0
        for number, generation, nbytes, spec, delta, owner in ONE_VALUE.iter_unpack(raw):
            if owner == ABSENT:
                places.append((0, nbytes, spec, PLACE_ABSENT))
            elif owner == inline:
                places.append((number, nbytes, spec, PLACE_INLINE))
            else:
                ranges.append((number, generation))
                places.append((delta, nbytes, spec, 0))
        if ranges:
            named = np.array(ranges, RANGE)
            if self.host.space.any_away(named, reader):
                return None
            pin, starts = self.host.space.pin_places(holder, named)
            start = iter(starts.tolist())
            places = [one if one[3] else (next(start) + one[0], *one[1:]) for one in places]
        made = b"".join([ONE_PLACE.pack(*one) for one in places])
        columns = rowset.with_records(table.columns, made)
        return Table(table.rows, columns, table.specs, [], table.tags, table.inline), pin

    def _places(
        self, table: Table, flat: Array, here: Array, holder: int, pinned: list[int] | None = None
    ) -> Resolved:
        """pinned: the pin that all of them have already. It is taken out."""
        # A PLACE has bytes and spec where a VALUE has them, and of what lies in the message the
        # offset where that has its range, of generation 0.
        made, whole, pin = bytearray(flat), every(here), 0
        places = np.frombuffer(made, PLACE)
        if not whole:
            places["flags"] = PLACE_INLINE
            places["flags"][flat["owner"] == ABSENT] = PLACE_ABSENT
        if some(here):
            space: Space = self.host.space
            values = flat if whole else flat[here]
            ranges = ranges_of(ids_of(values))
            if pinned:
                starts = space.ranges.offsets(ranges)
                pin = pinned.pop()
            else:
                pin, starts = space.pin_places(holder, ranges)
            at = slice(None) if whole else here
            places["offset"][at] = starts + values["delta"]
            places["flags"][at] = 0
        columns = rowset.with_records(table.columns, made)
        return Table(table.rows, columns, table.specs, [], table.tags, table.inline), pin

    async def _pull(
        self, table: Table, flat: Array, here: Array, holder: int, reader: int
    ) -> Resolved:
        """Local copies take the place of ranges that are remote or away; they are pinned as they
        arrive."""
        flat = flat.copy()
        interim: list[int] = []
        asked = []
        for code, owner in enumerate(table.owners):
            at = (flat["owner"] == code).nonzero()[0]
            if len(at) and owner != INLINE:
                asked.append(self._of_one(owner, flat, at, holder, reader, interim))
        try:
            if len(asked) == 1:
                await asked[0]
            else:  # nobody's pins are forgotten where one of them fails
                for failed in await asyncio.gather(*asked, return_exceptions=True):
                    if failed is not None:
                        raise failed
            if len(asked) == len(interim) == 1:  # they are pinned already, and by nothing else
                return self._places(table, flat, here, holder, interim)
            return self._places(table, flat, here, holder)
        finally:
            if interim:
                self.pulls.room.unpin(holder, interim)

    async def _of_one(
        self,
        owner: Owner,
        flat: Array,
        at: npt.NDArray[np.intp],
        holder: int,
        reader: int,
        pins: list[int],
    ) -> None:
        """A local RANGE for each of these values of an owner, in its place."""
        wanted = flat[at]
        keys = ids_of(wanted)
        order = keys.argsort(kind="stable")
        keys = keys[order]
        first = np.empty(len(keys), np.bool_)  # of the values in one range
        first[0] = True
        np.not_equal(keys[1:], keys[:-1], out=first[1:])
        starts = first.nonzero()[0]
        ranges = keys[starts].view(RANGE)
        if owner == self.host.owner:
            local, more = await self.pulls.at_hand(ranges, holder, reader)
        else:
            reach = (wanted["nbytes"] + wanted["delta"])[order]
            needed = np.maximum.reduceat(reach, starts)
            to_device = reader != PULLER and self.device_pulls.device_of(reader)
            bring = self.device_pulls.bring if to_device else self.pulls.bring
            local, more = await bring(owner, ranges, needed, holder)
        pins += more
        local, at = local[first.cumsum() - 1], at[order]
        flat["range"][at], flat["generation"][at] = local["range"], local["generation"]

    # reads

    async def read(self, session: Session, request: Request, body: Read) -> Body:
        """Rows without a lease, wherever they are; one page of them where there are many."""
        done: ReadDone = await self._found(body, session, "read")
        return done

    async def _found(self, body: Any, session: Session, call: str) -> Any:
        """What the shard answers, with places here in its table, and pinned. A place is a hint: it
        is asked again where values went before they were here."""
        failed = 0
        while True:
            found: ReadDone | Fetched = await self.router.ask(body)
            try:
                found.table, found.pin = await self.resolved(found.table, session.id)
                return found
            except (RowsGone, RowsLost) as exc:
                failed += 1
                await self.went(exc, failed, body.partition, call)

    async def went(self, exc: RowsGone | RowsLost, failed: int, partition: str, call: str) -> None:
        """Values that a shard named went before they were here, so often by now. Where it goes on,
        those of a lost peer are other ones, or none, as soon as the shard hears of that: a moment
        is left for it, no longer than the call lives."""
        if failed == ATTEMPTS and isinstance(exc, RowsGone):
            raise exc
        if failed == ATTEMPTS:
            raise Unavailable(
                f"a peer that held values of partition {partition!r} was lost, and the shard has "
                f"not noticed it yet ({exc}): {call} again",
                partition=partition,
            ) from exc
        if isinstance(exc, RowsLost):
            until = min(self.host.now() + LEARN_S, call_context.get().until)
            await self.host.another_roster(self.host.roster, until)

    def read_here(self, caller: Caller, body: Read) -> Body:
        entry = self.host.shard(body.partition, body.generation)
        store = entry.store
        rows, more = rows_out.read(
            store, rows=body.rows, where=body.where, limit=body.limit, after=body.after
        )
        unknown = {} if body.after else inspection.unknown_tags(store, body.where)
        if body.overview:
            cursor = rows_out.place_of(rows) if more and body.rows is None else b""
            overview = rows_out.overview(store, rows)
            return ReadDone(rows_out.table(store, rows, ()), 0, cursor, unknown, *overview)
        table = rows_out.table(store, rows, body.fields)
        while body.rows is None and len(rows) > 1 and (size := _volume(table)) > PAGE_BYTES:
            rows, more = rows.first(max(1, len(rows) * PAGE_BYTES // size)), True
            table = rows_out.table(store, rows, body.fields)
        on = more and body.rows is None
        return ReadDone(table, 0, rows_out.place_of(rows) if on else b"", unknown)

    # more fields of leased rows

    async def fetch(self, session: Session, request: Request, body: Fetch) -> Body:
        lease = self.leases.of(session, body.lease, self.host.now())
        call_context.set(msgspec.structs.replace(call_context.get(), stage=lease.stage))
        asked = Fetch(lease.number, body.fields, lease.partition, lease.generation, body.index)
        try:
            found: Fetched = await self._found(asked, session, "fetch")
            return found
        except LeaseExpired:
            self.leases.close(lease)
            raise

    def fetch_here(self, caller: Caller, body: Fetch) -> Body:
        entry = self.host.entry(body.partition, body.generation)
        if entry is None:
            raise LeaseExpired("the partition of this lease no longer exists")
        if body.index is None:
            return Fetched(0, rows_out.table(entry.store, body.lease, body.fields))
        rows, index = rows_out.leased_at(entry.store, body.lease, body.index)
        return Fetched(0, rows_out.table(entry.store, rows, body.fields), index)


def _volume(table: Table) -> int:
    """Bytes that a message has of it, but for names and tags."""
    parts = (len(c.values) + len(c.leaf_counts) + len(c.leaves) for c in table.columns)
    return len(table.rows.keys) + len(table.inline) + sum(parts)
