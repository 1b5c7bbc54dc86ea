"""place="spread": when producers of this host wait for room, values move to another host's arena.

Rows stay at their shards; only where their bytes lie changes. The full host asks the peers whose
shards keep rows with values there, mostly itself; those offer the values to a third, which pulls
them as their owner if its own producers leave it room, and then tell the rows. What is leased
stays, so nobody who claimed it finds its place empty. Where nobody has room the put waits, as ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dataplane.errors import DataplaneError
from dataplane.memory.admission import Admission
from dataplane.memory.lent import Lent
from dataplane.metadata.columns import Array
from dataplane.metadata.references import ids_of
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.mesh import Mesh
from dataplane.peer.partitions import Partitions
from dataplane.peer.pulls import PULLER, Pulls
from dataplane.peer.room import Room
from dataplane.wire.messages import Body
from dataplane.wire.peering import Adopt, Adopted, Release, Relieve, Relieved
from dataplane.wire.records import RANGE, U4, U8, column
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

MAX_MOVED_BYTES = 64 << 20
"""What is moved at once, and no more than an eighth of the full arena."""
MAX_MOVED_RANGES = 4096
MAX_ASKED = 8
"""How many peers are asked for room, one after another, before the next pause."""
PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class _Values:
    """Ranges of one owner, how many values name each, and their bytes."""

    ranges: Array
    counts: Array
    lengths: Array


class Spreading:
    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        partitions: Partitions,
        pulls: Pulls,
        room: Room,
        lent: Lent,
        settle: Callable[[Entry], None],
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self.pulls = pulls
        self.room = room
        self.lent = lent
        self.settle = settle
        self.moved_bytes = 0
        self.adopted_bytes = 0
        self._work: asyncio.Task[None] | None = None
        self._next = 0
        room.on_wait.append(self.make_room)
        mesh.handlers |= {Relieve: self._relieve, Adopt: self._adopt}

    # at the host that is full

    def make_room(self) -> None:
        """Somebody waits for room."""
        if not self.room.producers:
            return
        spread = any(e.definition.place == "spread" for e in self.host.entries.values())
        if spread and not self.host.solo and (self._work is None or self._work.done()):
            self._work = self.mesh.spawn(self._while_producers_wait())

    async def _while_producers_wait(self) -> None:
        while self.room.producers:
            if not await self._ask_shards():
                await asyncio.sleep(PAUSE_S)

    async def _ask_shards(self) -> bool:
        """Whether any values went; asked are those who keep rows with values here."""
        nbytes = min(MAX_MOVED_BYTES, self.host.space.size_bytes // 8)
        keepers = [self.host.address, *(keeper.peer for keeper in self.lent.holders())]
        for address in dict.fromkeys(keepers):
            try:
                body = Relieve(self.host.owner, nbytes)
                reply: Relieved = await self.mesh.call(address, body)
            except DataplaneError as exc:
                log.warning("%s moved no values away from here: %s", address, exc)
                continue
            if reply.ranges:
                return True
        return False

    # where the rows are

    async def _relieve(self, caller: Caller, body: Relieve) -> Body:
        for entry in list(self.host.entries.values()):
            if entry.definition.place == "spread":
                found = self._movable(entry, body.owner, body.nbytes)
                moved = await self._offer(entry, body.owner, found) if len(found.ranges) else 0
                if moved:
                    return Relieved(moved)
        return Relieved(0)

    def _movable(self, entry: Entry, owner: Owner, limit_bytes: int) -> _Values:
        """Ranges that unleased rows of this store name; of those here, what nobody else holds."""
        ranges, counts, lengths = _idle(entry, owner)
        if owner == self.host.owner:
            alone = self.host.space.ranges.refs(ranges) == counts
            alone &= ~self.host.space.away(ranges)  # they are in nobody's way
            ranges, counts, lengths = ranges[alone], counts[alone], lengths[alone]
        upto = int(np.searchsorted(np.cumsum(lengths), limit_bytes, "right"))
        upto = min(max(1, upto), MAX_MOVED_RANGES)
        return _Values(ranges[:upto], counts[:upto], lengths[:upto])

    async def _offer(self, entry: Entry, owner: Owner, found: _Values) -> int:
        """How many a peer took; the one that did is asked first the next time."""
        away = {owner.peer, *self.host.roster.leaving}
        others = [o for o in self.host.roster.owners if o.peer not in away]
        for _ in range(min(MAX_ASKED, len(others))):
            other = others[self._next % len(others)]
            if not self.mesh.others.is_away(other.peer):
                try:
                    moved = await self._move(entry, owner, other, found)
                except DataplaneError as exc:
                    log.warning("%s took no values of %r: %s", other.peer, entry.name, exc)
                    moved = 0
                if moved:
                    return moved
            self._next += 1
        return 0

    async def _move(self, entry: Entry, owner: Owner, other: Owner, found: _Values) -> int:
        """Move the first of these, as many as there is room for there: how many."""
        body = Adopt(
            entry.name,
            entry.generation,
            owner,
            found.ranges.tobytes(),
            found.lengths.tobytes(),
            found.counts.tobytes(),
        )
        reply = await self.mesh.tell(other, body)
        if not isinstance(reply, Adopted):
            return 0
        fresh = column(reply.ranges, RANGE)
        upto = len(fresh)
        still = self._still_idle(entry, owner, found)[:upto]
        entry.store.relocate(owner, found.ranges[:upto][still], reply.owner, fresh[still])
        self._give_up(reply.owner, fresh[~still], found.counts[:upto][~still])
        self.settle(entry)
        self.moved_bytes += int(found.lengths[:upto][still].sum())
        log.info("%d of %d ranges of %r moved to %s", still.sum(), upto, entry.name, other.peer)
        return int(still.sum())

    def _still_idle(self, entry: Entry, owner: Owner, found: _Values) -> Array:
        """Which of these are named as they were: rows may have gone meanwhile, or been leased."""
        idle, counts, _ = _idle(entry, owner)
        named = dict(zip(idle.tolist(), counts.tolist(), strict=True))
        pairs = zip(found.ranges.tolist(), found.counts.tolist(), strict=True)
        return np.array([named.get(one) == count for one, count in pairs], np.bool_)

    def _give_up(self, owner: Owner, ranges: Array, counts: Array) -> None:
        if len(ranges) and owner == self.host.owner:
            self.host.space.release(ranges, counts)
        elif len(ranges):
            body = Release(ranges.tobytes(), counts.astype(U4).tobytes())
            self.mesh.spawn(self.mesh.tell(owner, body))

    # at the host with room

    async def _adopt(self, caller: Caller, body: Adopt) -> Body:
        """Pull the first of these ranges that there is room for, if no producer here waits."""
        await self.partitions.entry(body.partition, body.generation)
        space = self.host.space
        remote, lengths = column(body.ranges, RANGE), column(body.lengths, U8)
        counts = column(body.counts, U4, len(remote))
        fitting = np.append(lengths > space.share_bytes[Admission.OPEN], True).argmax()
        units = [lengths[i : i + 1] for i in range(int(fitting))]
        none = Adopted(self.host.owner, b"")
        if self.room.producers or not units:
            return none
        taken, extents = space.reserve(PULLER, Admission.OPEN, units)
        if not taken:
            return none
        try:
            fresh = await self.pulls.take_over(
                body.owner, remote[:taken], lengths[:taken], extents, counts[:taken]
            )
        except DataplaneError as exc:
            log.warning("values of %r could not be taken over: %s", body.partition, exc)
            return none
        if caller.address != self.host.address:
            to = Owner(caller.address, caller.incarnation)
            self.lent.lend(to, np.repeat(fresh, counts[:taken]))
        self.adopted_bytes += int(lengths[:taken].sum())
        return Adopted(self.host.owner, fresh.tobytes())


def _idle(entry: Entry, owner: Owner) -> tuple[Array, Array, Array]:
    """Ranges of an owner that only unleased rows name, how many of their values, and how far: a
    range moves with all that name it, and what is leased stays."""
    ranges, counts, lengths = entry.store.idle(owner)
    named, of_all, _ = entry.store.named(owner)
    alone = of_all[np.searchsorted(ids_of(named), ids_of(ranges))] == counts
    return ranges[alone], counts[alone], lengths[alone]
