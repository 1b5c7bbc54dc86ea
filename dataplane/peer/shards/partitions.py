"""Partitions: how clients declare, attach to, seal and drop them, their stages, and which of their
rows were lost with a peer.

All of that is state of a partition's shard, and the shard decides it (`Entry`). Other peers
store none of it and need no notification: every message names a generation, and the shard
rejects an old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    PartitionConflict,
    PartitionUndefined,
    StaleEpoch,
    Unavailable,
    counted,
    duration,
)
from dataplane.latest import Latest
from dataplane.metadata.roster.roster import Flags
from dataplane.metadata.shard.store import Store, check_definition
from dataplane.peer.host import Caller, Entry, Host, waits_s
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.net.router import Router
from dataplane.peer.sessions import Session
from dataplane.peer.shards.log_sender import LogSender
from dataplane.peer.tasks import within
from dataplane.wire.messages import (
    Body,
    Define,
    Defined,
    Dropped,
    Losses,
    LossesDone,
    Request,
)
from dataplane.wire.peering import Identified, Identify
from dataplane.wire.tables import Change, Definition, Owner

log = logging.getLogger(__name__)

ANSWER_S = 3.0
"""Timeout for a shard's reply, within the call's deadline."""
LOOK_S = 1.0
"""The pause between checks that the client that restores a partition is still connected."""
MAX_ENDED = 4_096
"""Drops of partitions whose reply is remembered, for retries within the time of a call."""
MAX_NAMES = 10_000
"""The most names of partitions that are remembered because clients here attached to them."""


@dataclass(eq=False, repr=False)
class Partitions:
    host: Host
    mesh: Mesh
    router: Router
    log_sender: LogSender
    run_effects: Callable[[Entry], None]

    def __post_init__(self) -> None:
        self.on_drop: Callable[[Entry], None] = lambda entry: None
        """called when a partition whose shard is here was dropped"""
        self.declared = Latest[str, None](MAX_NAMES)
        """partitions that clients here declared or attached to, the latest last; for messages"""
        self._ended = Latest[tuple[Owner, int], Dropped](MAX_ENDED)
        """by caller and number of the change"""
        self._changed = asyncio.Event()
        """set, and replaced, when this peer serves other partitions or shards than before"""
        self._newest = 0
        """the newest generation of any partition that this peer knows"""

    # requests of clients of this host

    async def define(
        self,
        partition: str,
        definition: Definition | None,
        wait_s: float = 0,
        restorer: Caller | None = None,
    ) -> Defined:
        """Declare or attach to a partition, at its shard. restorer: the client that restores it.

        Raise PartitionUndefined if no process declares it within `wait_s`, or PartitionConflict.
        """
        in_vain_s = wait_s - min(0.1, wait_s / 4)  # so that the shard's reply arrives in time
        restores = restorer is not None
        body = Define(partition, definition, int(in_vain_s * 1000), restores=restores)
        reply: Defined = await self.router.ask(body, restorer, timeout_s=wait_s + ANSWER_S)
        self.heard(partition, reply.generation)
        self.declared[partition] = None
        return reply

    def heard(self, partition: str, generation: int) -> None:
        """Note a generation of another peer. Generations made here are newer, whatever the clock
        says."""
        self.host.note_generation(partition, generation)
        self._newest = max(self._newest, generation)

    # at the shard

    async def define_here(self, caller: Caller, body: Define) -> Body:
        if body.generation:
            store = self.host.shard(body.partition, body.generation).store
            return Defined(store.generation, store.definition, store.phase)
        if body.definition is None and body.wait_ms:
            until = self.host.now() + waits_s(body.wait_ms)
            while body.partition not in self.host.entries and self.host.now() < until:
                self._check_home(body.partition)
                with contextlib.suppress(TimeoutError):
                    await within(until - self.host.now(), self._changed.wait())
        restorer = caller.session if body.restores else 0
        if restorer:
            await self._drop_abandoned_restore(restorer, body.partition)
        entry = self.host.entries.get(body.partition)
        if entry is None and body.definition is not None:
            entry = self._open(body.partition, body.definition, restorer)
        elif entry is None:
            raise PartitionUndefined(
                f"partition {body.partition!r} is not declared: declare it in one process with "
                f"plane.partition({body.partition!r}, stages={{...}})",
                partition=body.partition,
            )
        if body.definition is not None:
            entry.store.check_same(body.definition)
        return Defined(entry.generation, entry.store.definition, entry.store.phase)

    def _check_home(self, partition: str) -> None:
        if not self.host.serves(partition):
            raise StaleEpoch(
                f"the shard of partition {partition!r} has moved to another peer: repeat the call"
            )

    def _open(self, partition: str, definition: Definition, restorer: int) -> Entry:
        """Open a new partition. Raise StaleEpoch if its shard is moving to another peer."""
        check_definition(partition, definition)
        spare = self.host.spare
        if spare is not None and spare[self.host.roster.bucket(partition)]:
            raise StaleEpoch(
                f"the shard of partition {partition!r} is moving to another peer: repeat the call"
            )
        # from the wall clock, because generations of an earlier plane must not repeat
        self._newest = max(self._newest + 1, time.time_ns())
        store = Store(partition, definition, self._newest, self.host.numbers)
        store.restorer = restorer
        entry = self.serve(store)
        self.log_sender.watch(entry)
        return entry

    def drop(self, partition: str, generation: int, change: Change | None = None) -> Dropped:
        """Drop a partition. The same name can be declared again, as a new partition.

        A retry gets the reply of the first attempt. Dropping a partition that no longer exists
        is a no-op.
        """
        known = self._ended.get((change.caller, change.number)) if change is not None else None
        if known is not None:
            return known
        entry = self.host.entries.get(partition)
        if entry is None and self.host.serves(partition):
            return Dropped(0, 0)
        entry = self.host.shard(partition, generation)
        rows, nbytes = entry.store.clear(change)
        log.info("partition %r: dropped, %d rows and %d bytes freed", partition, rows, nbytes)
        del self.host.entries[partition]
        self.declared.pop(partition, None)
        self.on_drop(entry)  # first: waiting calls fail because of the drop
        self.run_effects(entry)
        self.host.meter_stages(entry, self.host.now())
        self.host.space.digests.drop(partition)
        return self.ended(change, Dropped(rows, nbytes))

    def ended(self, change: Change | None, dropped: Dropped) -> Dropped:
        """Remember a change that dropped a partition, here or at the primary, so that a retry
        gets the same reply."""
        if change is not None:
            self._ended[change.caller, change.number] = dropped
        return dropped

    # restores: until `Restored`, a partition belongs to the session that restores it

    async def _drop_abandoned_restore(self, restorer: int, partition: str) -> None:
        """Drop a partition whose restoring client has ended. Raise PartitionConflict for any other
        partition, unless this client restores it: then its request is a retry."""
        while (entry := self.host.entries.get(partition)) is not None:
            if entry.store.restorer == restorer:
                return
            who, is_over = await self._restorer(entry.store)
            if not is_over:
                state = (
                    f"is being restored by {who}: wait"
                    if who
                    else "already exists, and a restore never overwrites: drop it"
                )
                raise PartitionConflict(
                    f"partition {partition!r} {state}, or restore into another run",
                    partition=partition,
                )
            self.host.speak()
            self._check_home(partition)
            self._end_restore(entry, who)
        self._check_home(partition)

    async def _restorer(self, store: Store) -> tuple[str, bool]:
        """Return the name of the client that restores a partition, and whether it has ended. Only
        its peer knows. ("", False): no client restores it."""
        owners = (self.host.owner, *self.host.roster.owners)
        owner = next((one for one in owners if one.has_session(store.restorer)), None)
        if owner is None or not store.restorer:
            return ("a client of a lost peer", True) if store.restorer else ("", False)
        body = Identify([store.restorer])
        try:
            told: Identified = await self.mesh.call(
                owner.peer, body, timeout_s=ANSWER_S, to=owner.incarnation
            )
        except DataplaneError:
            return f"a client of peer {self.mesh.others.name(owner.peer)!r}", False
        who, gone_ms = told.clients[0] if told.clients else ("a client", -1)
        return who, gone_ms >= 0

    def _end_restore(self, entry: Entry, who: str) -> None:
        if self.host.entries.get(entry.name) is entry and entry.store.restorer:
            rows = counted(self.drop(entry.name, entry.generation).rows, "row")
            said = (
                "partition %r: dropped, because %s ended before its restore was complete, %s freed"
            )
            log.warning(said, entry.name, who, rows)

    async def end_restores(self) -> None:
        """Drop partitions whose restore will never be complete, because its client has ended. Takes
        at least LOOK_S."""
        for entry in [one for one in self.host.entries.values() if one.store.restorer]:
            who, is_over = await self._restorer(entry.store)
            if is_over and not self.host.silent and self.host.serving.is_sure():
                self._end_restore(entry, who)
        await asyncio.sleep(LOOK_S)

    # lost rows: the shard stores their names (`tables.remembered`), and callers of `losses` wait
    # there, one turn at a time (`WaitingCalls.losses`)

    async def losses(self, session: Session, request: Request, body: Losses) -> LossesDone:
        """Wait for lost rows after the number that a client of this host has, and return them.
        Raise DeadlineExceeded at the deadline."""
        try:
            done: LossesDone = await self.router.wait(body)
            return done
        except (DeadlineExceeded, StaleEpoch, Unavailable) as exc:
            raise DeadlineExceeded(
                f"timed out after {duration(body.timeout_ms / 1000)} of waiting for losses: no "
                f"row of partition {body.partition!r} was lost. Repeat the call to keep waiting",
                limit_s=body.timeout_ms / 1000,
            ) from exc

    # a new roster

    def serve(self, store: Store) -> Entry:
        """Serve a partition's shard from now on."""
        self.heard(store.partition, store.generation)
        store.note = self.host.events.add
        entry = self.host.entries[store.partition] = Entry(store)
        self._tell()
        return entry

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def turned(self) -> None:
        """Apply a new roster: stop serving partitions that moved to another peer, together with
        their rows."""
        for name in [name for name in self.host.entries if not self.host.serves(name)]:
            self.host.meter_stages(self.host.entries.pop(name), self.host.now())
        self._tell()

    def spare(self) -> Flags:
        """Whether each shard is this peer's and has no partition."""
        roster = self.host.roster
        spare: Flags = roster.primaries == roster.members.index(self.host.address)
        for name in self.host.entries:
            spare[roster.bucket(name)] = False
        return spare
