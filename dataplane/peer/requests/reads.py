"""Reads: resolve the chunks that a shard names to positions where a client can read them.

`resolve` gives every chunk of a table its position in the arenas of this host and pins it. Chunks
of other hosts are pulled first. `Read` and `Fetch` are answered here. This module never looks into
a chunk.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from dataplane.errors import (
    LeaseExpired,
    RowsGone,
    RowsLost,
    Unavailable,
    counted,
    mixed_releases,
)
from dataplane.memory.space import PULLER
from dataplane.metadata.shard import inspection, rows_out
from dataplane.metadata.tables.incoming import check_owners
from dataplane.metadata.tables.outgoing import message_bytes
from dataplane.peer.host import Caller, Host, call_context, call_end
from dataplane.peer.net.router import LEAST_S, Router
from dataplane.peer.requests.leases import Leases
from dataplane.peer.room.pools import Pools
from dataplane.peer.sessions import Session
from dataplane.wire.checkpoint import SaveDone
from dataplane.wire.limits import MAX_FRAME_BYTES
from dataplane.wire.messages import Body, Fetch, Fetched, Read, ReadDone, Request
from dataplane.wire.packed import EXTENT, U8, Array
from dataplane.wire.tables import INLINE, Owner, Table, Values

PAGE_BYTES = MAX_FRAME_BYTES // 2
"""The most bytes of a page of rows, so that its names and tags fit into the message, too."""

PAUSES_S = 0.01, 1.0
"""The first and the longest pause before a shard that named freed values is asked again. Pauses
double. A new roster ends a pause."""

_NONE_IN_ARENAS: tuple[list[Owner], ...] = ([], [INLINE])
Resolved = tuple[Table, int]
"""A table with places, and the pin that holds its chunks (0: none to hold)."""


@dataclass(eq=False, repr=False)
class Reading:
    host: Host
    router: Router
    leases: Leases
    pools: Pools

    def __post_init__(self) -> None:
        self.pulls = self.pools.pulls

    # resolving

    def resolve(
        self, table: Table, holder: int, *, in_place: bool = True
    ) -> Resolved | Awaitable[Resolved]:
        """Resolve a table, at once if all chunks are here, else after pulling them. in_place:
        chunks may stay in pools that the holder maps. Raises ProtocolError for a chunk without a
        valid owner: another peer may have sent the table."""
        values = table.values
        check_owners(values)
        named = None if values.owners in _NONE_IN_ARENAS else _Named(values)
        if named is None or not named.chunks:
            return _with_places(table, bytes(EXTENT.itemsize * len(values.chunks))), 0
        reader = holder if in_place else PULLER
        if named.owners == {self.host.owner} and not self.host.space.any_away(
            named.numbers, reader
        ):
            return self._placed(table, named, named.numbers, holder)
        return self._pull(table, named, holder, reader)

    async def resolved(self, table: Table, holder: int, *, in_place: bool = True) -> Resolved:
        """As `resolve`, but always wait."""
        found = self.resolve(table, holder, in_place=in_place)
        return found if isinstance(found, tuple) else await found

    def _placed(self, table: Table, named: _Named, local: Array, holder: int) -> Resolved:
        """Return the table with the places of its chunks. local: a pinned chunk of this host for
        each chunk that is in an arena."""
        space = self.host.space
        assert not space.any_away(local, holder)
        inline = named.inline
        places: list[int] = []
        pin, found = space.keep(holder, local)
        spots = iter(found)
        for one in table.values.chunks:
            if inline[one.owner]:
                places += 0, 0
                continue
            nbytes, (offset, room) = one.nbytes, next(spots)
            if room < nbytes:
                space.unpin(holder, [pin])
                raise mixed_releases(
                    f"the shard and the owner of a chunk disagree on its size: expected {nbytes} "
                    f"bytes, but the chunk has {room}"
                )
            places += offset, nbytes
        return _with_places(table, array("Q", places).tobytes()), pin

    async def _pull(self, table: Table, named: _Named, holder: int, reader: int) -> Resolved:
        """Replace chunks that are remote or away by local copies. The copies are pinned as they
        arrive."""
        local, owners = named.numbers.copy(), table.values.owners
        pins: list[int] = []
        nbytes = np.array([one.nbytes for one in named.chunks], U8)

        async def of_one(owner: Owner) -> None:
            its = [n for n, one in enumerate(named.chunks) if owners[one.owner] == owner]
            numbers = named.numbers[its]
            if owner == self.host.owner:
                local[its], more = await self.pulls.ensure_mappable(numbers, holder, reader)
            else:
                bring = self.pools.bring if reader == holder else self.pulls.bring
                local[its], more = await bring(owner, numbers, nbytes[its], holder)
            pins.extend(more)

        try:  # wait for every pull, so that every pin is released
            asked = [of_one(owner) for owner in named.owners]
            for failed in await asyncio.gather(*asked, return_exceptions=True):
                if failed is not None:
                    raise failed
            return self._placed(table, named, local, holder)
        finally:
            self.pulls.room.unpin(holder, pins)

    # reads

    async def read(self, session: Session, request: Request, body: Read) -> Body:
        """Read rows without a lease, wherever they are; one page of them if there are many."""
        done: ReadDone = await self.found(body, session, "read")
        return done

    async def found(
        self,
        body: Any,
        session: Session,
        call: str,
        *,
        in_place: bool = True,
        freed_s: float = math.inf,
    ) -> Any:
        """Return the shard's reply, with the places of its values in local memory, where they are
        pinned. If values are gone before they arrive, ask the shard again, until the deadline: it
        then names other values of these rows, or leaves the rows out.

        freed_s: how long to ask again if values were freed, and not lost.
        """
        failed, until = 0, call_end(began := self.host.now())
        while True:
            found: ReadDone | Fetched | SaveDone = await self.router.ask(body)
            resolved = self.resolved(found.table, session.id, in_place=in_place)
            try:
                found.table, found.pin = await resolved
                return found
            except (RowsGone, RowsLost) as exc:
                failed += 1
                lost = isinstance(exc, RowsLost)
                if not await self.pause(failed, until if lost else min(until, began + freed_s)):
                    peer = exc.details.get("peer", self.host.address)
                    why = "was lost" if lost else "freed them"
                    raise (Unavailable if lost else RowsGone)(
                        f"the {call} of rows of partition {body.partition!r} timed out: {_at(peer)}"
                        f", which had values of them, {why}, but the partition's shard still names "
                        f"them after {counted(failed, 'attempt')}: {call} the rows again",
                        partition=body.partition,
                        peer=peer,
                    ) from exc

    async def pause(self, failed: int, until: float) -> bool:
        """Give a shard time to learn that values are gone, after `failed` attempts. Return whether
        there is time for another attempt until `until` (monotonic)."""
        first_s, most_s = PAUSES_S
        again = self.host.now() + min(most_s, first_s * 2 ** min(failed - 1, 10))
        await self.host.another_roster(self.host.roster, min(again, until))
        return until - self.host.now() >= LEAST_S

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
            found: Fetched = await self.found(asked, session, "fetch")
            return found
        except LeaseExpired:
            self.leases.close(lease)
            raise

    def fetch_here(self, caller: Caller, body: Fetch) -> Body:
        entry = self.host.entry(body.partition, body.generation)
        if entry is None:
            raise LeaseExpired(
                f"partition {body.partition!r} no longer exists, so its leases have ended: claim "
                "from another partition"
            )
        if body.index is None:
            return Fetched(0, rows_out.table(entry.store, body.lease, body.fields))
        rows, index = rows_out.leased_at(entry.store, body.lease, body.index)
        return Fetched(0, rows_out.table(entry.store, rows, body.fields), index)


class _Named:
    """The chunks of a message that are in arenas, with their owners and numbers. inline: the owners
    in the message that stand for inline chunks."""

    def __init__(self, values: Values) -> None:
        self.inline = inline = [owner == INLINE for owner in values.owners]
        self.chunks = [one for one in values.chunks if not inline[one.owner]]
        numbers = dict.fromkeys([one.owner for one in self.chunks])
        self.owners = dict.fromkeys([values.owners[number] for number in numbers]).keys()
        self.numbers = np.array([one.number for one in self.chunks], U8)


def _at(peer: str) -> str:
    return f"the peer at {peer}" if peer else "this host's peer"


def _with_places(table: Table, places: bytes) -> Table:
    return Table(table.rows, table.values, table.tags, places)


def _volume(table: Table) -> int:
    """Return the bytes of a table in a message, without names and tags."""
    return len(table.rows.keys) + message_bytes(table.values)
