"""Room for clients to write into, and what they wrote becoming ranges.

Space is reserved before bytes are written. A message that names what was written commits it: once
the message is answered, well or not, those extents are the peer's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError, ProtocolError
from dataplane.memory.admission import Admission
from dataplane.peer import rows as rowset
from dataplane.peer.host import Host
from dataplane.peer.mesh import Caller, Mesh
from dataplane.peer.partitions import Partitions
from dataplane.peer.reading import ranges_of
from dataplane.peer.room import Room
from dataplane.peer.sessions import Session
from dataplane.wire.messages import Body, Done, GiveBack, Request, Reserve, Reserved, Unpin
from dataplane.wire.peering import Release
from dataplane.wire.records import DIGEST, EXTENT, RANGE, U4, U8, VALUE, column
from dataplane.wire.tables import Column, Owner

MAX_AHEAD_BYTES = 64 << 20
"""The most that a reply grants ahead."""


@dataclass(slots=True)
class Committed:
    """Values as ranges of this peer, held once per value that names them."""

    columns: list[Column]
    owners: list[Owner]
    ranges: npt.NDArray[Any]
    counts: npt.NDArray[Any]


class Grants:
    def __init__(self, host: Host, mesh: Mesh, partitions: Partitions, room: Room) -> None:
        self.host = host
        self.partitions = partitions
        self.room = room
        mesh.handlers[Release] = self._release_here

    # asked for by clients

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

    def commit(
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

    # for the messages that name what was written

    @contextlib.contextmanager
    def unless_refused(self, session: Session, written: bytes) -> Iterator[None]:
        """What a refused message wrote comes back: once answered, its extents are the peer's."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(ProtocolError):
                self.host.space.give_back(session.id, column(written, EXTENT))
                self.room.pump()
            raise

    def ahead(self, session: Session, want_bytes: int) -> bytes:
        """The next extents, unless somebody waits for room."""
        if not want_bytes or len(self.room):
            return b""
        nbytes = min(want_bytes, MAX_AHEAD_BYTES)
        return self.host.space.grant(session.id, Admission.OPEN, nbytes).tobytes()

    # references that end

    def release_rows(self, columns: list[Column], index: npt.NDArray[Any]) -> None:
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


def _cut(columns: list[Column], flat: npt.NDArray[Any]) -> list[Column]:
    """Columns again, from their records in one row."""
    raw, at = flat.tobytes(), 0
    cut = []
    for c in columns:
        middle, end = at + len(c.values), at + len(c.values) + len(c.leaves)
        cut.append(Column(c.field, raw[at:middle], c.leaf_counts, raw[middle:end]))
        at = end
    return cut
