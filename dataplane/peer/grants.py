"""Room for clients to write into, and what they wrote becoming ranges.

Space is reserved before bytes are written. A message that names what was written commits it: once
the message is answered, well or not, those extents are the peer's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError, ProtocolError, ShardFull
from dataplane.memory.admission import Admission
from dataplane.peer import rows as rowset
from dataplane.peer.devices import Devices
from dataplane.peer.doubts import Doubts
from dataplane.peer.host import Caller, Host
from dataplane.peer.mesh import Mesh
from dataplane.peer.partitions import Partitions
from dataplane.peer.room import Room
from dataplane.peer.sessions import Session
from dataplane.wire.checkpoint import Restore
from dataplane.wire.limits import ABSENT
from dataplane.wire.messages import (
    Body,
    Done,
    Finish,
    GiveBack,
    Put,
    PutDone,
    Request,
    Reserve,
    Reserved,
    Unpin,
)
from dataplane.wire.peering import Release
from dataplane.wire.records import DIGEST, EXTENT, RANGE, U4, U8, column, joined
from dataplane.wire.rosters import Inherited
from dataplane.wire.tables import INLINE, Column, Owner

log = logging.getLogger(__name__)

MAX_AHEAD_BYTES = 64 << 20
"""The most that a reply grants ahead."""
MOST_FREED = 1 << 20
"""Ranges that one message says to be free."""
AGAIN_S = 2.0
"""After so long an owner that refused to let go of values is told again."""
_NO_RANGES, _NO_COUNTS = np.zeros(0, RANGE), np.zeros(0, U4)


@dataclass(slots=True)
class Committed:
    """Values as ranges of this peer, held once per value that names them."""

    columns: list[Column]
    owners: list[Owner]
    ranges: npt.NDArray[Any]
    counts: npt.NDArray[Any]


class Grants:
    def __init__(
        self, host: Host, mesh: Mesh, partitions: Partitions, room: Room, devices: Devices
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self.room = room
        self.lent = host.lent
        self.doubts = Doubts(host, mesh, self.lent)
        self.devices = devices
        self._freed: dict[Owner, list[tuple[bytes, bytes]]] = {}
        """references to values of others that ended here and were not told yet: RANGE, u4 counts"""
        self._telling: dict[Owner, set[asyncio.Task[Any]]] = {}
        """owners that have yet to answer what this peer took over of theirs"""
        self._releases = itertools.count(1)
        mesh.handlers[Release] = self._release_here

    # asked for by clients

    def reserve(self, session: Session, request: Request, body: Reserve) -> Body | Awaitable[Body]:
        """Room for a put's next units. At once where there is some and nobody waits for it."""
        if body.device:
            return self._reserve_on_device(session, request, body)
        known = self.host.known(body.partition, body.generation)
        if not body.digests and known is not None:
            units = [column(unit, U8) for unit in body.units]
            granted = self.room.at_once(session.id, _admission(body), units)
            if granted is not None:
                return Reserved(granted[0], granted[1].tobytes())
        return self._reserve_in_turn(session, request, body)

    async def _reserve_in_turn(self, session: Session, request: Request, body: Reserve) -> Body:
        """Known digests come back pinned, for comparison."""
        await self.partitions.known(body.partition, body.generation)
        units = [column(unit, U8) for unit in body.units]
        space = self.host.space
        known, pin = np.zeros(0, RANGE), 0
        places = np.zeros(0, EXTENT)
        if body.digests:
            known = space.digests.lookup(body.partition, column(body.digests, DIGEST))
            known[space.spilled(known)] = 0  # as quickly written anew as read back and compared
            found = known["generation"] != 0
            pin = space.pin(session.id, known[found])
            places = np.zeros(len(known), EXTENT)
            places[found] = space.ranges.extents(known[found])
        session.waiting += 1
        try:
            count, extents = await self.room.reserve(
                session.id, _admission(body), units, request.deadline_ms / 1000
            )
        except BaseException:
            space.unpin(session.id, [pin])
            raise
        finally:
            session.waiting -= 1
        return Reserved(count, extents.tobytes(), known.tobytes(), places.tobytes(), pin)

    async def _reserve_on_device(self, session: Session, request: Request, body: Reserve) -> Body:
        if body.digests:
            raise ProtocolError("nothing is compared on a device")
        await self.partitions.known(body.partition, body.generation)
        units = [column(unit, U8) for unit in body.units]
        session.waiting += 1
        try:
            count, extents = await self.devices.reserve(
                body.device,
                session.id,
                _admission(body),
                units,
                request.deadline_ms / 1000,
            )
        finally:
            session.waiting -= 1
        return Reserved(count, extents.tobytes())

    def give_back(self, session: Session, request: Request, body: GiveBack) -> Body:
        self.host.space.give_back(session.id, column(body.extents, EXTENT))
        self.room.pump()
        return Done()

    def unpin(self, session: Session, request: Request, body: Unpin) -> Body:
        self.host.space.unpin(session.id, body.pins)
        self.room.pump()  # copies that nobody reads any more are room, though no byte got free
        return Done()

    def commit(
        self,
        session: Session,
        columns: list[Column],
        written: bytes,
        shared: bytes,
        kind: Admission,
    ) -> Committed:
        """Ranges for what a client wrote, and holds on what it shares; all or nothing. What is to
        live in the shard stays as it came."""
        space = self.host.space
        flat = rowset.flat_values(columns).copy()
        owners, inline = [self.host.owner], flat["owner"] != 0
        if inline.any():
            if (flat["owner"][inline] != 1).any():
                raise ProtocolError("a value is in a range of this message, or in the message")
            owners.append(INLINE)
            if not written and not shared and inline.all():
                return Committed(columns, owners, _NO_RANGES, _NO_COUNTS)
        whole, flat = flat, flat[~inline]
        extents, known = column(written, EXTENT), column(shared, RANGE)
        index = flat["range"].astype(np.intp)
        total = len(extents) + len(known)
        if np.count_nonzero(index >= total):
            raise ProtocolError(f"a value names range {int(index.max())} of {total}")
        counts = np.bincount(index, minlength=total).astype(U4)
        lengths = extents["length"]
        if len(known):
            lengths = np.concatenate((lengths, space.ranges.extents(known)["length"]))
        room = lengths[index]
        if np.count_nonzero((flat["delta"] > room) | (flat["nbytes"] > room - flat["delta"])):
            raise ProtocolError("a value reaches beyond the end of its range")
        space.hold(known, counts[len(extents) :])
        try:
            fresh = space.commit(session.id, extents, counts[: len(extents)], kind)
        except DataplaneError:
            space.release(known, counts[len(extents) :])
            raise
        ranges = joined((fresh, known), RANGE) if len(known) else fresh
        flat["range"], flat["generation"] = ranges["range"][index], ranges["generation"][index]
        whole[~inline] = flat
        return Committed(rowset.with_values(columns, whole), owners, ranges, counts)

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

    def let_be(self, committed: Committed) -> None:
        """The message that named these values is over: what no shard took is free."""
        if self.host.space.release(committed.ranges, committed.counts):
            self.room.pump()

    def ahead(self, session: Session, want_bytes: int) -> bytes:
        """The next extents, unless somebody waits for room."""
        if not want_bytes or len(self.room):
            return b""
        nbytes = min(want_bytes, MAX_AHEAD_BYTES)
        return self.host.space.grant(session.id, Admission.OPEN, nbytes).tobytes()

    @contextlib.contextmanager
    def kept_where_full(self, session: Session, committed: Committed) -> Iterator[None]:
        """Where a shard has no room for a message's small values, its others stay for the one
        that comes without such: a refusal takes back what was written."""
        try:
            yield
        except ShardFull as exc:
            if exc.details.get("values"):
                ranges = committed.ranges
                pin = self.host.space.keep(session.id, ranges)
                exc.details |= {"ranges": ranges.tobytes(), "pin": pin}
            raise

    # references that shards hold

    @contextlib.contextmanager
    def under_way(self, committed: Committed, caller: Caller) -> Iterator[None]:
        """Values stay while they are carried to their shards, which take references of their own;
        what none took is free in the end."""
        try:
            yield
        finally:
            self.doubts.settle(caller)
            self.let_be(committed)

    async def hand_over(
        self, address: str, body: Put | Finish | Restore, caller: Caller, epoch: tuple[int, int]
    ) -> PutDone:
        """Carry values of this peer on to the shard that keeps their rows. What it refuses is let
        go; what it may have taken, should it not answer, is in doubt."""
        ranges = _named(body)
        if not len(ranges) or address == self.host.address:
            self.host.space.hold(ranges)
            try:
                done: PutDone = await self.mesh.call(address, body, caller=caller, epoch=epoch)
            except BaseException:
                self.host.space.release(ranges)
                raise
            return done
        to = Owner(address, (await self.mesh.hello(address)).incarnation)
        return await self.doubts.lend(to, body, ranges, caller, epoch)

    def let_go(self, owner: Owner, ranges: npt.NDArray[Any], counts: npt.NDArray[Any]) -> bool:
        """Values that a shard here no longer holds; their bytes may be another peer's. Whether any
        came free here."""
        if owner == self.host.owner:
            return bool(self.host.space.release(ranges, counts))
        freed = ranges.tobytes(), np.asarray(counts, "<u4").tobytes()
        if owner in self._freed:
            self._freed[owner].append(freed)
        else:
            self._freed[owner] = [freed]
            self.mesh.spawn(self._release_there(owner))
        return False

    async def _release_there(self, owner: Owner) -> None:
        """What comes free while one message is on its way goes with the next."""
        while self._freed[owner]:
            try:
                await self._release_once(owner)
            except DataplaneError as exc:  # it let go of nothing
                log.warning("%s is told again of values that nobody names: %s", owner.peer, exc)
                await self.host.another_roster(self.host.roster, self.host.now() + AGAIN_S)
        del self._freed[owner]

    async def _release_once(self, owner: Owner) -> None:
        """Not before the owner has answered what was taken over. Until then these references are
        the lost peer's there, nothing is released, and what was taken over names them still: they
        would be lent for ever. Messages that wait for the backup, or are repeated, keep no order.
        """
        progress = self.host.progress
        while (telling := self._telling.get(owner)) or not progress.is_settled:
            # More may be taken over, and let go of, in each of these waits.
            await (asyncio.wait(telling) if telling else progress.settled(math.inf))
        ranges, counts = (b"".join(columns) for columns in zip(*self._freed[owner], strict=True))
        most = MOST_FREED * RANGE.itemsize, MOST_FREED * U4.itemsize
        rest = ranges[most[0] :], counts[most[1] :]
        self._freed[owner] = [rest] if rest[0] else []
        body = Release(ranges[: most[0]], counts[: most[1]])
        # An owner is told of one at a time, so that it need remember the answer to no other.
        me, number = self.host.owner, next(self._releases)
        caller = Caller(me.peer, me.incarnation, me.incarnation, number, number)
        try:
            await self.mesh.tell(owner, body, caller)
        except DataplaneError:
            self._freed[owner].insert(0, (body.ranges, body.counts))
            raise

    def _release_here(self, caller: Caller, body: Release) -> Body:
        """A shard lets go. No more than it has: it may have been taken for lost meanwhile."""
        ranges = column(body.ranges, RANGE)
        counts = column(body.counts, U4, len(ranges))
        by = Owner(caller.address, caller.incarnation)
        if self.host.space.release(ranges, self.lent.returned(by, ranges, counts)):
            self.room.pump()
        return Done()

    def took_over(self, owner: Owner, body: Inherited) -> None:
        """Tell an owner of values what a lost peer's shards hold there, which are this peer's now.
        What is let go of that from here on is told after it."""
        task = self.mesh.spawn(self.mesh.tell(owner, body))
        self._telling.setdefault(owner, set()).add(task)
        task.add_done_callback(lambda _: self._told(owner, task))

    def _told(self, owner: Owner, task: asyncio.Task[Any]) -> None:
        self._telling[owner].discard(task)
        if not self._telling[owner]:
            del self._telling[owner]

    def gone(self, owner: Owner) -> None:
        """A process is no member any more. Where it had no shards nobody speaks for it: what it was
        being handed, under a roster that gave its address some, it cannot have taken."""
        if self.host.heirs.heir(owner) == owner and self.host.space.release(*self.lent.lost(owner)):
            self.room.pump()

    def inherited(self, caller: Caller, body: Inherited) -> Body:
        """A peer took over a lost one's shards and says what those hold here, or that it was given
        them empty; the rest is free."""
        ranges = column(body.ranges, RANGE)
        counts = column(body.counts, U4, len(ranges))
        heir = None if caller.owner == self.host.owner else caller.owner
        origins = [o for o in self.lent.peers if self._is_about(body, caller.owner, o)]
        if self.host.space.release(*self.lent.inherited(origins, heir, ranges, counts)):
            self.room.pump()
        return Done()

    def _is_about(self, body: Inherited, sender: Owner, owner: Owner) -> bool:
        """Did `origin` have what this one had, or take over from it before it was lost as well? Or
        was the sender given that by a roster which is no later than its first one?"""
        if owner == body.origin:
            return True
        for given_at, heir in self.host.heirs.after(owner):
            if heir == (sender if body.began else body.origin):
                return not body.began or given_at <= body.began
        return False


def _named(body: Put | Finish | Restore) -> npt.NDArray[Any]:
    """The RANGE of every value and leaf, as often as one names it; of those that lie at peers."""
    flat = rowset.flat_values(body.columns)
    there = flat["owner"] != ABSENT
    if INLINE in body.owners:
        there &= flat["owner"] != body.owners.index(INLINE)
    return rowset.ranges_of(flat[there])


def _admission(body: Reserve) -> Admission:
    return Admission.CONTINUE if body.continuing else Admission.OPEN
