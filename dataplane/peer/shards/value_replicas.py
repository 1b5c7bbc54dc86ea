"""replicas=2: the bytes of every value are stored on two peers.

The replica is on the peer that serves the row's shard. If the value was written there, the
replica is on that peer's backup. Both peers have the bytes before a row references the value.
Otherwise, if the writer died in between, rows would lose values that were never confirmed, and
with them all their other values. If there is no space, only the writer waits, because other
calls free space. Nothing waits after a peer with replicas of existing rows dies: new replicas
are created as space allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np

from dataplane.errors import BackPressure, DataplaneError, RowsLost, StaleEpoch, Unavailable
from dataplane.memory.admission import Admission
from dataplane.memory.extents import padded
from dataplane.memory.space import PULLER
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.shard.replicas import Named, Replicas, named_by
from dataplane.peer.host import Entry, Host, call_context, call_end
from dataplane.peer.net.mesh import RETRY_S, Mesh
from dataplane.peer.pull.pulls import Pulls
from dataplane.peer.room.admission import Room
from dataplane.peer.tasks import first_of
from dataplane.wire.checkpoint import Restore
from dataplane.wire.journal import LogRecord
from dataplane.wire.messages import Finish, Put
from dataplane.wire.packed import U4, U8, Array
from dataplane.wire.peering import Duplicate
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
"""The most bytes copied at once, and at most an eighth of the arena. They have to arrive while a
primary waits for its backup (`log_sender.ATTEMPT_S`), even on a link with a few MB/s left."""
MAX_CHUNKS = 4096
"""The most chunks copied at once, here or at a backup."""
PATIENCE_S = 4.0
"""How long a change waits for space for replicas before it fails. Its caller repeats it as another
change: a longer wait would hold the caller's floor, and so the acks that free space."""
AHEAD_S = 30.0
"""How long a backup keeps replicas that no row references yet: their record is in flight."""


class ValueReplicas:
    def __init__(self, host: Host, mesh: Mesh, pulls: Pulls, room: Room) -> None:
        self.host = host
        self.mesh = mesh
        self.pulls = pulls
        self.room = room
        self._coming: dict[tuple[int, Owner], bool] = {}
        """copies in progress that nothing waits for, and whether more values are missing since each
        began"""

    # at the peer whose shard has the rows

    def note(self, entry: Entry, record: LogRecord) -> None:
        """Note references to values that another peer wrote. If the record came from a peer
        that died, replicas are still to be created."""
        for named in named_by(record):
            self._note(entry, *named)

    def note_all(self, entry: Entry) -> None:
        """Note all references of a partition's rows, as `note` does."""
        for owner, *_ in entry.store.holdings():
            self._note(entry, owner, *entry.store.named(owner))

    def _note(self, entry: Entry, owner: Owner, chunks: Array, nbytes: Array) -> None:
        assert entry.replicas is not None
        if owner != self.host.owner and not entry.replicas.note(owner, chunks, nbytes):
            here = functools.partial(self._serves, entry)
            self.copy_here_later(entry.replicas, entry.name, owner, here)

    def _serves(self, entry: Entry) -> bool:
        return self.host.entries.get(entry.name) is entry

    @contextlib.asynccontextmanager
    async def beforehand(self, entry: Entry, body: Put | Finish | Restore) -> AsyncIterator[None]:
        """Create replicas of a message's values while the shard applies the message. Raises
        BackPressure or RowsLost, and StaleEpoch if the roster changes first or this peer is
        leaving, because its successor may already have the shards."""
        copies, roster = entry.replicas, self.host.roster
        named = named_by(body) if copies is not None else []
        if copies is None or not named:
            yield
            return
        others = [one for one in named if one[0] != self.host.owner]
        with self.held(copies, others):
            for owner, chunks, _ in others:
                await self.copy_here(copies, owner, chunks)
            for owner, chunks, nbytes in named:
                if owner == self.host.owner:
                    await self.copy_to_backup(entry, chunks, nbytes)
            if self.host.roster is not roster:
                raise StaleEpoch(
                    "the roster changed while peers were creating replicas for this "
                    "call: repeat the call"
                )
            self.host.speak()
            yield

    async def copy_held_to_backup(self, entry: Entry, copies: Replicas, owner: Owner) -> None:
        """Have the backup copy this peer's copies of an owner's values before rows reference only
        these copies. If the backup is replaced during that, use the new one."""
        told = None
        while (backup := self.host.roster.backup_of(self.host.address)[0]) != told:
            told = backup
            await self.copy_to_backup(entry, *copies.held(owner))

    async def copy_to_backup(self, entry: Entry, chunks: Array, nbytes: Array) -> None:
        """Have the backup copy these values before it receives rows that reference them.
        Otherwise all other records of this peer would wait behind the copies."""
        for at in range(0, len(chunks), MAX_CHUNKS):
            part = slice(at, at + MAX_CHUNKS)
            await self.have_copied(entry, chunks[part].tobytes(), nbytes[part].tobytes())

    async def have_copied(self, entry: Entry, chunks: bytes = b"", sizes: bytes = b"") -> None:
        """Have the backup copy these values. If this peer is leaving, the backup has its own
        backup copy the values of both peers."""
        body = Duplicate(entry.name, entry.generation, chunks, sizes)
        while self.host.progress.required:
            roster = self.host.roster
            address, _ = roster.backup_of(self.host.address)
            if address is None:
                return
            try:
                if await self._has_made(roster, address, body):
                    return
            except (StaleEpoch, Unavailable):
                if self.host.now() >= call_context.get().until:
                    raise
                await self.host.another_roster(roster, self.host.now() + RETRY_S)

    async def _has_made(self, roster: Roster, address: str, body: Duplicate) -> bool:
        """Wait until the backup has made copies, or the roster changes: a backup that confirms
        nothing leaves the in-sync set, and calls stop waiting for it. Return whether it has the
        copies."""
        made = asyncio.ensure_future(self.mesh.call(address, body))
        turned = self.host.another_roster(roster, call_end(self.host.now()))
        if made not in await first_of(made, turned):
            return False
        made.result()
        return True

    def freed(self, entry: Entry, owner: Owner, chunks: Array, counts: Array) -> None:
        """Release replicas when references of this partition's rows end."""
        if entry.replicas is not None:
            self.room.release(entry.replicas.freed(owner, chunks, counts))

    def owner_gone(self, entry: Entry, owner: Owner) -> None:
        """Make the rows reference the copies here instead of those of the lost owner."""
        if entry.replicas is not None:
            self.succeed(entry, entry.replicas, owner)

    # at both peers

    @contextlib.contextmanager
    def held(self, copies: Replicas, named: list[Named]) -> Iterator[None]:
        """Count references of a record as needed, before a row has them and whether or not
        one will."""
        for one in named:
            copies.note(*one)
        try:
            yield
        finally:
            for owner, chunks, _ in named:
                self.room.release(copies.freed(owner, chunks, np.ones(len(chunks), U4)))

    def copy_here_later(
        self, copies: Replicas, name: str, owner: Owner, needed: Callable[[], bool]
    ) -> None:
        """Copy the missing values of an owner, while they are needed and the owner lives."""
        key = id(copies), owner
        if key not in self._coming:
            self.mesh.spawn(self._copy_here_in_the_end(key, copies, name, needed))
        self._coming[key] = True

    async def _copy_here_in_the_end(
        self, key: tuple[int, Owner], copies: Replicas, name: str, needed: Callable[[], bool]
    ) -> None:
        owner = key[1]
        try:
            while self._coming[key] and self.host.roster.has(owner) and needed():
                self._coming[key] = False
                try:
                    await self.copy_here(copies, owner)
                except RowsLost:
                    return  # the next roster will remove the owner
                except DataplaneError as exc:
                    log.warning("partition %r: could not create replicas (%s), retrying", name, exc)
                    self._coming[key] = True
                    await self.host.another_roster(self.host.roster, self.host.now() + PATIENCE_S)
        finally:
            del self._coming[key]

    def succeed(self, entry: Entry, copies: Replicas, owner: Owner) -> None:
        """Make rows reference the copies here, because their owner is gone. Other values are
        lost here: another peer has their replica."""
        chunks, local = copies.take(owner)
        if len(chunks):
            self.replace(entry, owner, chunks, local)

    def replace(self, entry: Entry, owner: Owner, chunks: Array, local: Array) -> None:
        """Make the rows reference these copies, which have one reference each so far, instead of
        the owner's chunks."""
        moved = entry.store.relocate(owner, chunks, self.host.owner, local)
        self.host.space.hold(local, np.asarray(moved, U4))
        self.room.release(local)
        log.info(
            "partition %r: now using the local replicas of %d chunks",
            entry.name,
            int(moved.sum()),
        )

    async def copy_here(self, copies: Replicas, owner: Owner, among: Array | None = None) -> None:
        """Copy the missing values of an owner, all of them or those in `among`. Skip values that
        the owner has freed. Raise BackPressure if the arena is full."""
        chunks, nbytes = copies.missing(owner, among)
        while len(chunks):
            try:
                count, here, local = await self.fetch(owner, chunks, nbytes)
            except BackPressure:
                # Freed values need no space, and may be what the arena lacks space for.
                dead = await self.pulls.dead(owner, chunks)
                if not dead.any():
                    raise
                chunks, nbytes = chunks[~dead], nbytes[~dead]
                continue
            self.room.release(copies.brought(owner, chunks[:count][here], local))
            chunks, nbytes = chunks[count:], nbytes[count:]

    async def fetch(self, owner: Owner, chunks: Array, nbytes: Array) -> tuple[int, Array, Array]:
        """Copy the first of these chunks, as many as one batch may have and the arena has space
        for.

        Return how many were tried, a mask of those that still exist, and their copies with
        one reference each. Raise BackPressure if no space is freed in time.
        """
        limit = min(BATCH_BYTES, self.host.space.size_bytes // 8)
        most = max(1, int(np.searchsorted(np.cumsum(nbytes[:MAX_CHUNKS]), limit, "right")))
        chunks, nbytes = chunks[:most], nbytes[:most]
        units = [padded(nbytes[i : i + 1].astype(U8)) for i in range(len(nbytes))]
        left_s = max(0.0, call_context.get().until - self.host.now())
        patience_s = min(PATIENCE_S, left_s / 2)  # the caller gets the error in time
        count, extents = await self.room.reserve(PULLER, Admission.OPEN, units, patience_s)
        local = await self.pulls.take_over(owner, chunks[:count], nbytes[:count], extents)
        here = local != 0
        return count, here, local[here]
