"""The primary's side of a backup: what this peer's shards do goes to one other peer, in order.

A new backup first gets a dump of every store, then each operation. While the roster calls it in
sync, no answer and no message leaves this peer before the backup has all that was done up to then:
whoever hears of a change finds it again after this peer's death.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections import deque
from dataclasses import dataclass

from dataplane.errors import DataplaneError, ProtocolError, StaleEpoch
from dataplane.metadata.dump import dump
from dataplane.metadata.roster import Roster
from dataplane.peer.copying import Copying
from dataplane.peer.host import Entry, Host
from dataplane.peer.mesh import Mesh
from dataplane.wire.journal import Op, encode_ops
from dataplane.wire.rosters import Append, Shipment
from dataplane.wire.tables import Definition, Owner

log = logging.getLogger(__name__)

MESSAGE_BYTES = 4 << 20
MESSAGE_OPS = 10_000
MAX_PENDING_BYTES = 512 << 20
"""More than this does not wait for a backup: it is too slow, and begins anew."""
MOST_LESSEES = 10_000
"""Sessions that are remembered before those that hold nothing are looked for."""
ATTEMPT_S = 10.0
RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class _Pending:
    partition: str
    generation: int
    op: bytes
    definition: Definition | None


class Shipping:
    def __init__(self, host: Host, mesh: Mesh, copying: Copying) -> None:
        self.host = host
        self.mesh = mesh
        self.copying = copying
        self.progress = host.progress
        self.backup: Owner | None = None
        self.synced = False
        """the backup of the present stream has had everything, at least once"""
        self._queue: deque[_Pending] = deque()
        self._queued_bytes = 0
        self._more = asyncio.Event()
        self._lessees: dict[int, Owner] = {}
        """which peer the sessions are of that have leases here; the backup has to know it"""
        self._lessees_limit = MOST_LESSEES
        self._holders: dict[int, Owner] = {}
        """of them, those that the backup is yet to be told"""
        self._task: asyncio.Task[object] | None = None

    # what the stores do

    def watch(self, entry: Entry) -> None:
        """A partition is new here: from now on its operations are shipped."""
        if self.backup is not None or entry.copies is not None:
            entry.store.emit = functools.partial(self._emit, entry)
        if self.backup is not None:
            self._push(_Pending(entry.name, entry.generation, b"", entry.store.declared))

    def take_over(self, entry: Entry) -> None:
        """A partition that another peer served is this one's, with all its rows."""
        self.watch(entry)
        if entry.store.emit is not None:
            for op in dump(entry.store):
                entry.store.emit(op)

    def lease_to(self, holder: int, peer: Owner) -> None:
        """A session, of that peer, holds leases here."""
        if len(self._lessees) >= self._lessees_limit:
            self._forget_lessees()
        self._lessees[holder] = peer
        if self.backup is not None:
            self._holders[holder] = peer

    def lessees_gone(self, gone: Owner) -> list[int]:
        """The sessions of a peer that is no more; they are forgotten."""
        holders = [holder for holder, peer in self._lessees.items() if peer.peer == gone.peer]
        for holder in holders:
            del self._lessees[holder]
        return holders

    def _forget_lessees(self) -> None:
        """Those that hold nothing any more."""
        entries = self.host.entries.values()
        hold = {lease.holder for entry in entries for lease in entry.store.state.leases}
        self._lessees = {h: peer for h, peer in self._lessees.items() if h in hold}
        self._lessees_limit = max(MOST_LESSEES, 2 * len(self._lessees))

    def _emit(self, entry: Entry, op: Op) -> None:
        if entry.copies is not None:
            self.copying.note(entry, op)
        self._ship_op(entry, op)

    def _ship_op(self, entry: Entry, op: Op) -> None:
        if self.backup is not None:
            self._push(_Pending(entry.name, entry.generation, encode_ops([op]), None))

    def _push(self, pending: _Pending) -> None:
        self.progress.done += 1
        self._queue.append(pending)
        self._queued_bytes += len(pending.op)
        if self._queued_bytes > MAX_PENDING_BYTES:
            log.error("the backup is too slow: %d bytes wait for it", self._queued_bytes)
            self._stop()
            asyncio.get_running_loop().call_later(RETRY_S, self._begin)
            return
        self._more.set()

    # the stream

    def turned(self, new: Roster) -> None:
        """A new roster may name another backup, or call it in sync."""
        address, _ = new.backup_of(self.host.address)
        owner = next((o for o in new.owners if o.peer == address), None)
        if owner != self.backup:
            self.backup = owner
            self._stop()
            self._begin()
        mine = new.shards_of(self.host.address)
        in_sync = self.backup is not None and bool(new.in_sync[mine].any())
        self.progress.required = in_sync
        self.progress.wake()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = None
        self._queue.clear()
        self._queued_bytes = 0
        self.synced = False

    def _begin(self) -> None:
        """A new stream: everything there is, then everything that happens."""
        if self._task is not None:
            return
        self._queue.clear()  # what happened since the last stream ended is in the dump
        self._queued_bytes = 0
        if self.backup is None:
            self.progress.move(self.progress.done)
            for entry in self.host.entries.values():
                if entry.copies is None:
                    entry.store.emit = None
            return
        self._forget_lessees()
        self._holders = dict(self._lessees)
        for entry in self.host.entries.values():
            self.watch(entry)
            for op in dump(entry.store):
                self._ship_op(entry, op)
        self._task = self.mesh.spawn(self._ship(self.backup, secrets.randbits(53)))

    async def _ship(self, backup: Owner, stream: int) -> None:
        first = 0
        self.progress.confirmed = self.progress.done - len(self._queue)
        while self.progress.required:
            # A backup that begins anew drops what it has: not while it may still be promoted.
            await self.host.another_roster(self.host.roster, self.host.now() + RETRY_S)
        begun = False
        while True:
            while begun and not self._queue:
                self.synced = True
                self._more.clear()
                await self._more.wait()
                await asyncio.sleep(0)  # what follows at once, as a lease does a put, goes along
            # Also of nothing: the backup may have kept what there was in a stream before this one.
            begun = True
            body, count = self._message(stream, first)
            try:
                await self._append(backup, body)
            except ProtocolError as exc:
                log.warning("the backup %s begins anew: %s", backup.peer, exc)
                self._task = None
                self._stop()
                asyncio.get_running_loop().call_later(RETRY_S, self._begin)
                return
            first += count
            self.progress.move(self.progress.confirmed + count)

    def _message(self, stream: int, first: int) -> tuple[Append, int]:
        """As many operations as one message takes; they leave the queue."""
        shipments: list[Shipment] = []
        nbytes = count = 0
        while self._queue and nbytes < MESSAGE_BYTES and count < MESSAGE_OPS:
            one = self._queue.popleft()
            self._queued_bytes -= len(one.op)
            nbytes += len(one.op)
            count += 1
            last = shipments[-1] if shipments else None
            same = last and (last.partition, last.generation) == (one.partition, one.generation)
            if one.definition is not None:
                shipments.append(Shipment(one.partition, one.generation, [], one.definition))
            elif last is not None and same:
                last.ops.append(one.op)
            else:
                shipments.append(Shipment(one.partition, one.generation, [one.op]))
        holders = [(h, peer.peer, peer.incarnation) for h, peer in self._holders.items()]
        self._holders = {}
        return Append(stream, first, shipments, holders), count

    async def _append(self, backup: Owner, body: Append) -> None:
        """Until the backup has it; it waits as long as the roster names this backup."""
        while True:
            roster = self.host.roster
            try:
                await self.mesh.call(backup.peer, body, to=backup.incarnation, timeout_s=ATTEMPT_S)
                return
            except DataplaneError as exc:  # it cannot be reached, or has no room for second copies
                if isinstance(exc, ProtocolError) and not isinstance(exc, StaleEpoch):
                    raise
                log.info("the backup %s is asked again: %s", backup.peer, exc)
                await self.host.another_roster(roster, self.host.now() + RETRY_S)
