"""replicas=2: the bytes of every value lie at two peers.

The second copy is at the peer whose shard has the row, or, where the value was written there, at
its backup. Neither answers before it has it, nor carries out what was asked: were the writer lost
on the way, rows would lose values that nobody was promised, and go with all their others.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

import numpy as np

from dataplane.errors import BackPressure, DataplaneError, RowsLost, StaleEpoch
from dataplane.memory.admission import Admission
from dataplane.memory.extents import padded
from dataplane.metadata.shard.second_copies import Copies, Named, named_by
from dataplane.metadata.tables.references import Array
from dataplane.peer.host import Entry, Host, call_deadline
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.pull.pulls import Pulls
from dataplane.peer.room.admission import PULLER, Room
from dataplane.wire.journal import Op
from dataplane.wire.messages import Finish, Put
from dataplane.wire.records import U4, U8
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
"""What is brought at once, and no more than an eighth of the arena. It has to arrive while a
primary waits for its backup (`appends.ATTEMPT_S`), also on a link with a few MB/s left."""
PATIENCE_S = 4.0
"""How long room for copies is awaited before the asker is told."""


class Copying:
    def __init__(self, host: Host, mesh: Mesh, pulls: Pulls, room: Room) -> None:
        self.host = host
        self.mesh = mesh
        self.pulls = pulls
        self.room = room

    # at the peer whose shard has the rows

    def note(self, entry: Entry, op: Op) -> None:
        """Values that another peer wrote are brought here before the call is answered."""
        assert entry.copies is not None
        for owner, *named in named_by(op):
            if owner != self.host.owner:
                entry.copies.note(owner, *named)
                self.host.progress.hold(self.mesh.spawn(self._bring_until_here(entry, owner)))

    async def _bring_until_here(self, entry: Entry, owner: Owner) -> None:
        assert entry.copies is not None
        while self.host.roster.has(owner) and self.host.entries.get(entry.name) is entry:
            try:
                await self.bring(entry.copies, owner)
                return
            except RowsLost:
                return  # the roster will say so, and the rows
            except DataplaneError as exc:
                log.warning("second copies of %r wait: %s", entry.name, exc)
                await self.host.another_roster(self.host.roster, self.host.now() + PATIENCE_S)

    @contextlib.asynccontextmanager
    async def beforehand(self, entry: Entry, body: Put | Finish) -> AsyncIterator[None]:
        """Second copies of what another peer wrote are here while its message is carried out.
        BackPressure, RowsLost; StaleEpoch where the roster changed meanwhile."""
        named = [one for one in named_by(body) if one[0] != self.host.owner]
        copies, roster = entry.copies, self.host.roster
        if copies is None or not named:
            yield
            return
        async with self.held(copies, named):
            for owner, *_ in named:
                await self._bring_in_time(copies, owner)
            if self.host.roster is not roster:
                raise StaleEpoch("the roster changed while second copies were made: call again")
            yield

    async def _bring_in_time(self, copies: Copies, owner: Owner) -> None:
        while True:
            try:
                await self.bring(copies, owner)
                return
            except BackPressure:
                if self.host.now() + PATIENCE_S > call_deadline.get():
                    raise

    def freed(self, entry: Entry, owner: Owner, ranges: Array, counts: Array) -> None:
        """References of this entry's rows ended."""
        if entry.copies is not None:
            self.release(entry.copies.freed(owner, ranges, counts))

    def owner_gone(self, entry: Entry, owner: Owner) -> None:
        """The rows name the copies here from now on."""
        if entry.copies is not None:
            self.succeed(entry, entry.copies, owner)

    # at either

    @contextlib.asynccontextmanager
    async def held(self, copies: Copies, named: list[Named]) -> AsyncIterator[None]:
        """What is named counts as needed meanwhile, before any row names it and whether or not one
        will."""
        for owner, ranges, counts, reach in named:
            copies.note(owner, ranges, counts, reach)
        try:
            yield
        finally:
            for owner, ranges, counts, _ in named:
                self.release(copies.freed(owner, ranges, counts))

    def succeed(self, entry: Entry, copies: Copies, owner: Owner) -> None:
        """Values of an owner that is no more are those that lie here, as far as they reach. Others
        are lost: of these another peer had the copy."""
        ranges, nbytes, local = copies.take(owner)
        if len(ranges):
            self.replace(entry, owner, ranges, local, nbytes)

    def replace(
        self, entry: Entry, owner: Owner, ranges: Array, local: Array, nbytes: Array | None = None
    ) -> None:
        """The rows name these copies, held once each so far, in place of the owner's ranges; of so
        many bytes of each, all where None."""
        moved = entry.store.relocate(owner, ranges, self.host.owner, local, nbytes)
        self.host.space.hold(local, np.asarray(moved, U4))
        self.release(local)
        log.info("%d values of %r are read here now", int(moved.sum()), entry.name)

    async def bring(self, copies: Copies, owner: Owner) -> None:
        """Copy what is missing of an owner's; what it has freed meanwhile is passed over.
        BackPressure where there is no room for it."""
        limit = min(BATCH_BYTES, self.host.space.size_bytes // 8)
        ranges, nbytes = copies.missing(owner)
        while len(ranges):
            upto = max(1, int(np.searchsorted(np.cumsum(nbytes), limit, "right")))
            try:
                count, here, local = await self.fetch(owner, ranges[:upto], nbytes[:upto])
            except BackPressure:
                # What is freed needs no room, and that it is may be what waits for this.
                dead = await self.pulls.dead(owner, ranges)
                if not dead.any():
                    raise
                ranges, nbytes = ranges[~dead], nbytes[~dead]
                continue
            self.release(copies.brought(owner, ranges[:count][here], nbytes[:count][here], local))
            ranges, nbytes = ranges[count:], nbytes[count:]

    async def fetch(self, owner: Owner, ranges: Array, nbytes: Array) -> tuple[int, Array, Array]:
        """(how many of these ranges, from the first on, there was room for; which of those have not
        been freed meanwhile; copies of these, held once each). BackPressure when there is no room
        in time."""
        units = [padded(nbytes[i : i + 1].astype(U8)) for i in range(len(nbytes))]
        count, extents = await self.room.reserve(PULLER, Admission.OPEN, units, PATIENCE_S)
        ones = np.ones(count, U4)
        local = await self.pulls.take_over(owner, ranges[:count], nbytes[:count], extents, ones)
        here = local["generation"] != 0
        return count, here, local[here]

    def release(self, local: Array) -> None:
        """Copies that nobody needs any more."""
        if len(local) and self.host.space.release(local):
            self.room.pump()
