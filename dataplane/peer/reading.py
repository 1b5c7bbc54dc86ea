"""From where values lie to where a client can read them.

`resolve` turns VALUE columns into PLACE columns of the local arena and pins what they name; values
of other hosts are pulled first. `Read` and `Fetch` are answered here.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import LeaseExpired, RowsGone
from dataplane.memory.space import Space
from dataplane.peer import rows as rowset
from dataplane.peer.host import Entry, Host
from dataplane.peer.leases import Leases
from dataplane.peer.mesh import Caller, Mesh
from dataplane.peer.partitions import Partitions
from dataplane.peer.pulls import Pulls
from dataplane.peer.routing import Routing
from dataplane.peer.sessions import Session
from dataplane.wire.limits import ABSENT, MAX_ROWS_PER_MESSAGE
from dataplane.wire.messages import Body, Fetch, Fetched, Read, ReadDone, Request
from dataplane.wire.peering import Found
from dataplane.wire.records import PLACE, PLACE_ABSENT, RANGE, VALUE
from dataplane.wire.tables import Column, Table

Resolved = tuple[Table, int]
"""A table of PLACE columns, and the pin that holds them (0: nothing to hold)."""


def ranges_of(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The RANGE records at the head of VALUE records."""
    return values.view(np.uint64).reshape(-1, 3)[:, 0].copy().view(RANGE)


class Reading:
    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        partitions: Partitions,
        routing: Routing,
        leases: Leases,
        pulls: Pulls,
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self.routing = routing
        self.leases = leases
        self.pulls = pulls
        mesh.handlers |= {Read: self._read_here, Fetch: self._fetch_here}

    # resolving

    def resolve(self, table: Table, holder: int) -> Resolved | Awaitable[Resolved]:
        """At once where all bytes are here, else after pulling them."""
        flat = np.frombuffer(
            b"".join(b for c in table.columns for b in (c.values, c.leaves)), VALUE
        )
        if not len(flat):
            return _with_places(table, np.zeros(0, PLACE)), 0
        if table.owners == [self.host.owner] or not table.owners:
            return self._places(table, flat, flat["owner"] != ABSENT, holder)
        return self._pull(table, flat, holder)

    def _places(
        self, table: Table, flat: npt.NDArray[Any], here: npt.NDArray[Any], holder: int
    ) -> Resolved:
        space: Space = self.host.space
        places = np.zeros(len(flat), PLACE)
        places["nbytes"] = flat["nbytes"]
        places["spec"] = flat["spec"]
        if here.all():
            pin, starts = space.pin_places(holder, ranges_of(flat))
            places["offset"] = starts + flat["delta"]
        else:
            pin, starts = space.pin_places(holder, ranges_of(flat[here]))
            places["offset"][here] = starts + flat["delta"][here]
            places["flags"][~here] = PLACE_ABSENT
        return _with_places(table, places), pin

    async def _pull(self, table: Table, flat: npt.NDArray[Any], holder: int) -> Resolved:
        """Local copies take the place of remote ranges; they are pinned as they arrive."""
        flat = flat.copy()
        here = flat["owner"] != ABSENT
        interim: list[int] = []
        try:
            for code, owner in enumerate(table.owners):
                if owner == self.host.owner:
                    continue
                at = np.flatnonzero(flat["owner"] == code)
                if not len(at):
                    continue
                wanted = flat[at]
                keys = ranges_of(wanted).view(np.uint64)
                unique, inverse = np.unique(keys, return_inverse=True)
                needed = np.zeros(len(unique), np.uint64)
                np.maximum.at(needed, inverse, wanted["nbytes"] + wanted["delta"])
                local, pins = await self.pulls.bring(owner, unique.view(RANGE), needed, holder)
                interim += pins
                flat["range"][at] = local["range"][inverse]
                flat["generation"][at] = local["generation"][inverse]
            return self._places(table, flat, here, holder)
        finally:
            self.host.space.unpin(holder, interim)

    # reads

    async def read(self, session: Session, request: Request, body: Read) -> Body:
        """Rows without a lease, wherever they are; one page of them where there are many."""
        entry = await self.partitions.entry(body.partition, body.generation)
        if body.rows is not None:
            table, cursor = await self._read_keys(entry, body), b""
        else:
            table, cursor = await self._read_page(body)
        resolved = self.resolve(table, session.id)
        table, pin = resolved if isinstance(resolved, tuple) else await resolved
        return ReadDone(table, pin, cursor)

    async def _read_keys(self, entry: Entry, body: Read) -> Table:
        assert body.rows is not None
        parts = await self.routing.find(entry, body.rows)
        tables: list[Table] = []
        order: list[npt.NDArray[Any]] = []
        for address, index in parts:
            asked = Read(
                body.partition,
                body.generation,
                rowset.take_rows(body.rows, index) if len(parts) > 1 else body.rows,
                None,
                body.fields,
            )
            found: Found = await self.mesh.call(address, asked)
            tables.append(found.table)
            order.append(index)
        table = rowset.join(tables) if tables else Table(rowset.take_rows(body.rows, np.arange(0)))
        if len(parts) > 1:
            table = rowset.reorder(table, np.argsort(np.concatenate(order), kind="stable"))
        return table

    async def _read_page(self, body: Read) -> tuple[Table, bytes]:
        """A page of all rows, peer after peer. The cursor is a u2 (which peer) and a key."""
        members = self.host.roster.members
        at, after = int.from_bytes(body.after[:2], "little"), body.after[2:]
        limit = min(body.limit or MAX_ROWS_PER_MESSAGE, MAX_ROWS_PER_MESSAGE)
        tables: list[Table] = []
        while at < len(members) and limit > 0:
            asked = Read(
                body.partition, body.generation, None, body.where, body.fields, limit, after
            )
            found: Found = await self.mesh.call(members[at], asked)
            tables.append(found.table)
            limit -= rowset.count(found.table.rows)
            after = found.table.rows.keys[-16:] if found.more else b""
            at += not found.more
        cursor = b"" if at >= len(members) else at.to_bytes(2, "little") + after
        return rowset.join(tables), cursor

    async def _read_here(self, caller: Caller, body: Read) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        store = entry.store
        slots, more = store.read(
            rows=body.rows, where=body.where, limit=body.limit, after=body.after
        )
        return Found(store.table(slots, body.fields), more)

    # more fields of leased rows

    async def fetch(self, session: Session, request: Request, body: Fetch) -> Body:
        lease = self.leases.of(session, body.lease)
        tables = []
        for part in lease.parts:
            found: Found = await self.mesh.call(
                part.address, Fetch(part.lease, body.fields, lease.partition, lease.generation)
            )
            tables.append(found.table)
        resolved = self.resolve(rowset.join(tables), session.id)
        table, pin = resolved if isinstance(resolved, tuple) else await resolved
        return Fetched(pin, table)

    async def _fetch_here(self, caller: Caller, body: Fetch) -> Body:
        entry = self.host.entry(body.partition, body.generation)
        if entry is None:
            raise LeaseExpired("the partition of this lease is gone")
        return Found(entry.store.table(body.lease, body.fields))


def _with_places(table: Table, places: npt.NDArray[Any]) -> Table:
    """The table with its VALUE columns replaced, in the order in which they were flattened."""
    raw, at = places.tobytes(), 0
    columns = []
    for c in table.columns:
        parts = []
        for source in (c.values, c.leaves):
            end = at + len(source) // VALUE.itemsize * PLACE.itemsize
            parts.append(raw[at:end])
            at = end
        columns.append(Column(c.field, parts[0], c.leaf_counts, parts[1]))
    return Table(table.rows, columns, table.specs, [], table.tags)


def gone(names: list[Any]) -> RowsGone:
    shown = ", ".join(map(str, names[:5])) + (" …" if len(names) > 5 else "")
    return RowsGone(f"{len(names)} rows were freed, or never put: {shown}", keys=names[:1000])
