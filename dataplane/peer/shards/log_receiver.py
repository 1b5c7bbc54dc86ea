"""The backup's side of the log: replays the log records of other peers' stores into copies.

When the roster assigns the shards of another peer to this one, this peer serves the copies as
its own. It tells the owners of values what those shards reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from dataplane.errors import ProtocolError, StaleEpoch, counted
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.shard.journal import apply
from dataplane.metadata.shard.replicas import Named, Replicas, named_by
from dataplane.metadata.shard.store import Store
from dataplane.peer.host import CallContext, Caller, Host, call_context
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.shards.log_sender import PIECE_S, LogSender
from dataplane.peer.shards.partitions import Partitions
from dataplane.peer.shards.references import References
from dataplane.peer.shards.value_replicas import AHEAD_S, BATCH_BYTES
from dataplane.wire.journal import Begun, Ended, LogRecord, Relocated
from dataplane.wire.messages import Body, Done, Dropped
from dataplane.wire.packed import U4, U8, Array, column
from dataplane.wire.peering import Append, Confirm, Duplicate, Inherited, PartitionLog
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

Key = tuple[str, int]


@dataclass(slots=True)
class _Copy:
    """A copy of a partition. values: replicas of what the primary wrote, with replicas=2."""

    store: Store
    values: Replicas | None = None


@dataclass(slots=True)
class _Origin:
    """All that a primary has sent in one stream."""

    stream: int
    next: int = 0
    copies: dict[Key, _Copy] = field(default_factory=dict)
    valued: int = 0
    """number of copies with replicas of values here"""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ahead: dict[tuple[Key, bytes], contextlib.ExitStack] = field(default_factory=dict)
    """replicas of values that no row references yet, by partition and chunks"""


@dataclass(eq=False, repr=False)
class LogReceiver:
    host: Host
    mesh: Mesh
    partitions: Partitions
    log_sender: LogSender
    references: References

    def __post_init__(self) -> None:
        self.value_replicas = self.log_sender.value_replicas
        self._origins: dict[Owner, _Origin] = {}
        self._confirmed: dict[Owner, float] = {}
        """by primary, when this peer last confirmed that it is the backup"""
        self._named: set[Owner] = set()
        """peers whose values or changes are known to the shards that were just taken over"""

    def __len__(self) -> int:
        """The rows in all copies for other peers."""
        return sum(len(c.store) for o in self._origins.values() for c in o.copies.values())

    def has(self, address: str) -> tuple[int, int] | None:
        """Return the stream of a peer's records and how many of them are here. None if that is
        unknown.

        It is unknown if the records need replicas whose bytes are not all here, or if this
        peer must pass the records on to its own backup.
        """
        for owner, origin in self._origins.items():
            if owner.peer == address and not origin.valued and not self._passes_on(address):
                return origin.stream, origin.next
        return None

    def confirm(self, caller: Caller, body: Confirm) -> Body:
        """Confirm that this peer is the backup of the sender, as far as it knows. Raise
        StaleEpoch if it is not."""
        roster = self.host.roster
        if not roster.has(caller.owner) or roster.backup_of(caller.address)[0] != self.host.address:
            raise StaleEpoch(
                f"the peer at {self.host.address} is not the backup of the peer at "
                f"{caller.address} in roster version {roster.epoch}: retry with the latest roster"
            )
        self._confirmed[caller.owner] = self.host.now()
        return Done()

    # replaying

    def append(self, caller: Caller, body: Append) -> Body | Awaitable[Body]:
        """Replay records into the copies of the sender's stores. Raise StaleEpoch if this peer is
        not the sender's backup, and ProtocolError if records are missing, so that the sender must
        send a new snapshot."""
        if self.host.roster.backup_of(caller.address)[0] != self.host.address:
            raise StaleEpoch(
                f"the peer at {self.host.address} is not the backup of the peer at "
                f"{caller.address} in roster version {self.host.roster.epoch}: retry with the "
                "latest roster"
            )
        origin = self._origins.get(caller.owner)
        if origin is None or origin.stream != body.stream:
            if body.first == 0:
                self._forget(caller.owner)
                origin = self._origins[caller.owner] = _Origin(body.stream)
            else:
                origin = None
        if origin is None:
            raise ProtocolError(
                f"gap in the replication log from the peer at {caller.address}: expected "
                f"record 0 of a new stream, got record {body.first}. The primary must send "
                "a new snapshot"
            )
        # Earlier records may still be in flight, or be replayed in another turn.
        waits = origin.lock.locked() or body.first > origin.next
        if waits or _brings_values(origin, body):
            return self._append_in_turns(caller, origin, body)
        if self._replay(caller.owner, origin, _new(origin, body).partitions):
            return self._append_in_turns(caller, origin, body)
        return Done()

    async def _append_in_turns(self, caller: Caller, origin: _Origin, body: Append) -> Body:
        """Replay the message in pieces. If the sender stops waiting, its next attempt begins
        after the records that were replayed. Copying the values of one record may take longer than
        an attempt and would start over each time, so this continues without the sender."""
        call_context.set(CallContext())
        async with origin.lock:
            for part in _new(origin, body).partitions:
                copy = origin.copies.get((part.partition, part.generation))
                if copy is None or copy.values is None:  # no reply depends on a new copy
                    await self._replay_in_turns(caller.owner, origin, part)
                    continue
                for piece, named in _pieces(part, caller.owner):
                    async with self._beforehand(caller.owner, origin, copy.values, named):
                        await self._replay_in_turns(caller.owner, origin, piece)
            if not self.host.roster.backup_of(caller.address)[1]:
                for copy in list(origin.copies.values()):  # a backup must have them all
                    if copy.values is not None:
                        await self.value_replicas.copy_here(copy.values, caller.owner)
        return Done()

    async def duplicate(self, caller: Caller, body: Duplicate) -> Body:
        """Replicate values that rows will reference soon. Raise BackPressure if the arena is
        full."""
        chunks = column(body.chunks, U8)
        nbytes = column(body.sizes, U8, len(chunks))
        key, origin = (body.partition, body.generation), self._origins.get(caller.owner)
        copy = origin.copies.get(key) if origin is not None else None
        if origin is None or copy is None or copy.values is None:
            return Done()  # the copy of this partition has yet to begin
        held = contextlib.ExitStack()
        held.enter_context(self.value_replicas.held(copy.values, [(caller.owner, chunks, nbytes)]))
        try:
            await self.value_replicas.copy_here(copy.values, caller.owner, chunks)
        except BaseException:
            held.close()
            raise
        before = origin.ahead.get((key, body.chunks))
        origin.ahead[key, body.chunks] = held
        if before is not None:  # a retry
            before.close()
        loop = asyncio.get_running_loop()
        loop.call_later(AHEAD_S, _named, origin, (key, body.chunks), held)
        if self._passes_on(caller.address):
            await self._copy_to_own_backup(caller.owner, copy.store, copy.values)
        return Done()

    async def _copy_to_own_backup(self, owner: Owner, store: Store, values: Replicas) -> None:
        """Copy values that a leaving peer and this peer store to this peer's backup. Rows may
        reference this peer alone only after that, because this peer may be lost at any time."""
        await self.value_replicas.copy_here(values, owner)
        await self.host.progress.reached(call_context.get().until)
        entry = self.log_sender.passed_on.get((store.partition, store.generation))
        if entry is None:  # the partition was dropped
            return
        await self.value_replicas.copy_held_to_backup(entry, values, owner)
        await self.value_replicas.copy_to_backup(entry, *store.named(self.host.owner))

    @contextlib.asynccontextmanager
    async def _beforehand(
        self, owner: Owner, origin: _Origin, values: Replicas, named: list[Named]
    ) -> AsyncIterator[None]:
        """Make replicas of what the primary wrote, before its records are replayed here."""
        with self.value_replicas.held(values, named):
            if named:
                await self.value_replicas.copy_here(
                    values, owner, np.concatenate([one[1] for one in named])
                )
            self._check_backs_up(owner, origin)
            yield

    def _backs_up(self, owner: Owner, origin: _Origin) -> bool:
        return self._origins.get(owner) is origin

    def _check_backs_up(self, owner: Owner, origin: _Origin) -> None:
        """Raise StaleEpoch if a peer has taken over the owner's shards."""
        if not self._backs_up(owner, origin):
            raise StaleEpoch(
                f"the peer at {self.host.address} is no longer the backup of the peer at "
                f"{owner.peer}: repeat the call"
            )

    async def _replay_in_turns(self, owner: Owner, origin: _Origin, part: PartitionLog) -> None:
        rest = [part]
        while rest:
            await asyncio.sleep(0)
            self._check_backs_up(owner, origin)
            rest = self._replay(owner, origin, rest)

    def _replay(
        self, owner: Owner, origin: _Origin, parts: list[PartitionLog]
    ) -> list[PartitionLog]:
        """Replay records for at most `PIECE_S`. Return the remaining ones."""
        until = self.host.now() + PIECE_S
        rest: list[PartitionLog] = []
        try:
            for part in parts:
                left = part.records if rest else self._replay_part(owner, origin, part, until)
                if left:
                    rest.append(PartitionLog(part.partition, part.generation, left))
        except Exception:  # a record may have been half applied
            self._forget(owner)
            raise
        self._pass_on(owner, origin)
        return rest

    def _passes_on(self, address: str) -> bool:
        """Return whether that peer is leaving, so that its shards will be this peer's."""
        leaving = self.host.roster.leaving
        return address in leaving and self.host.address not in leaving

    def _pass_on(self, owner: Owner, origin: _Origin) -> None:
        """Pass copies of the partitions that the owner serves on to this peer's backup. Leave out
        copies that were passed on to the owner, because another peer may have newer records of
        those."""
        home = self.host.roster.home
        for key, copy in origin.copies.items() if self._passes_on(owner.peer) else ():
            if key not in self.log_sender.passed_on and home(key[0]) == owner.peer:
                self.log_sender.pass_on(copy.store)

    def _replay_part(
        self, owner: Owner, origin: _Origin, part: PartitionLog, until: float
    ) -> list[LogRecord]:
        """Replay records until a time (monotonic). Return the remaining ones."""
        name, generation = key = part.partition, part.generation
        copy = origin.copies.get(key)
        for done, record in enumerate(part.records, 1):
            if isinstance(record, Begun):
                self.partitions.heard(name, generation)
                store = Store(name, record.definition, generation, self.host.numbers)
                store.restorer = record.restorer
                values = Replicas() if record.definition.replicas == 2 else None
                copy = origin.copies[key] = _Copy(store, values)
                origin.valued += values is not None
            elif copy is None:
                raise ProtocolError(
                    f"unexpected record for partition {name!r} (generation "
                    f"{generation}): expected the partition's declaration first. The primary must "
                    "send a new snapshot"
                )
            else:
                apply(copy.store, record, self.host.now())
                self.log_sender.happened(copy.store, record)
                self._follow(owner, origin, copy, record)
                if isinstance(record, Ended):
                    self.partitions.ended(record.change, Dropped(record.rows, record.bytes))
                    del origin.copies[key]
                    origin.valued -= copy.values is not None
            origin.next += 1
            if self.host.now() > until:
                return part.records[done:]
        return []

    def _follow(self, owner: Owner, origin: _Origin, copy: _Copy, record: LogRecord) -> None:
        """Keep replicas of values that the primary wrote, for as long as rows reference them.
        Do the same for values that it took over from a lost owner or passes on. Nothing waits for
        these."""
        freed = copy.store.freed()
        if copy.values is None:
            return
        named = [one[1:] for one in named_by(record) if one[0] == owner]
        if isinstance(record, Relocated) and record.to_owner == owner:
            named.append(_those(copy.store, owner, column(record.to_chunks, U8)))
        there = [copy.values.note(owner, *one) for one in named]
        for chunks, _ in named:
            _named(origin, ((copy.store.partition, copy.store.generation), chunks.tobytes()))
        if not all(there) and self.host.roster.backup_of(owner.peer)[1]:
            here = functools.partial(self._backs_up, owner, origin)
            self.value_replicas.copy_here_later(copy.values, copy.store.partition, owner, here)
        for gone in freed:
            self.value_replicas.room.release(copy.values.freed(*gone))

    def _forget(self, owner: Owner) -> None:
        origin = self._origins.pop(owner, None)
        for copy in origin.copies.values() if origin is not None else ():
            self._drop(copy)

    def _drop(self, copy: _Copy) -> None:
        self.log_sender.happened(copy.store, Ended())
        self._release(copy)

    def _release(self, copy: _Copy) -> None:
        """Release replicas that are not needed, or not complete."""
        if copy.values is not None:
            self.value_replicas.room.release(copy.values.clear())

    # taking over

    def turned(self, old: Roster, new: Roster) -> None:
        """Apply a new roster: take over shards that are now this peer's, and delete copies of
        peers that it no longer backs up."""
        if self.host.owner in new.owners and self.host.owner not in old.owners:
            self._announce_empty_shards(new)
        # Only the roster's takeovers count. Serving a copy that was never in sync, or that this
        # peer kept from an earlier time as the backup, would undo what its owner answered since.
        last = {t.owner: t for t in new.takeovers}
        whole = {t.owner for t in last.values() if t.successor == self.host.owner and t.in_sync}
        for owner in old.owners:
            if owner == self.host.owner or new.has(owner) and len(new.shards_of(owner.peer)):
                continue
            if owner not in whole:
                self._forget(owner)
            if self._had_later_owner(owner, old):
                continue
            if new.successor_of(old, owner) == self.host.owner:
                origin = self._origins.pop(owner, None)
                if origin is None and owner in whole:  # the copy broke before the keeper knew
                    self.host.lose(old.shards_of(owner.peer).tolist())
                ended = owner in last and last[owner].ended
                if owner in self._confirmed and not ended:
                    self.host.serving.succeed(self._confirmed[owner])
                self._take_over(owner, origin or _Origin(0), old)
            else:
                self._forget(owner)
        for owner, origin in list(self._origins.items()):
            if not new.has(owner) or new.backup_of(owner.peer)[0] != self.host.address:
                self._forget(owner)
            else:
                self._pass_on(owner, origin)
        self._confirmed = {one: at for one, at in self._confirmed.items() if new.has(one)}

    def _had_later_owner(self, owner: Owner, old: Roster) -> bool:
        """Return whether another peer had the shards of `owner` in between and was lost after it.
        Then only that peer's copy counts. Reporting that `owner` had nothing would free values
        that the later peer's rows referenced."""
        between = [
            successor
            for _, successor in self.host.successors.after(owner)
            if successor != self.host.owner
        ]
        return any(one in old.owners for one in between)

    def _announce_empty_shards(self, first: Roster) -> None:
        """Tell all peers if this process got empty shards of lost peers when it joined."""
        here = (Owner(self.host.address, 0), self.host.owner)
        if not any(one.successor in here for one in first.takeovers):
            return
        body = Inherited(Owner(self.host.address, 0), b"", b"", first.epoch[1])
        for other in first.owners:
            self.mesh.spawn(self.mesh.tell(other, body))

    def lost_before(self) -> list[Owner]:
        """Return peers that the taken-over shards still know, although an earlier roster removed
        them.

        The previous primary died before it could process their loss. Rows reference values of
        these peers, or their changes are remembered.
        """
        named, self._named = self._named, set()
        return sorted((o for o in named if not self.host.roster.has(o)), key=attrgetter("peer"))

    def _take_over(self, owner: Owner, origin: _Origin, old: Roster) -> None:
        """Serve the copies of `owner`'s partitions. Drop copies of shards that start empty, which
        are incomplete, and of partitions that `owner` did not serve itself: their primary, which
        may be this peer, has newer records."""
        held: dict[Owner, list[tuple[Array, Array]]] = {}
        new, here = self.host.roster, self.host.address
        empty = new.lost_since(old)
        served = {one.successor for one in new.takeovers if one.number > old.epoch[1]}
        for copy in origin.copies.values():
            name = copy.store.partition
            has_it = old.home(name) == here and owner not in served
            if has_it or new.bucket(name) in empty or not self.host.serves(name):
                self._drop(copy)
                continue
            for values, chunks, counts in copy.store.holdings():
                held.setdefault(values, []).append((chunks, counts))
            entry = self.partitions.serve(copy.store)
            entry.inherited = set(copy.store.answers)
            self._named |= copy.store.answers.callers
            self.log_sender.take_over(entry)
            if copy.values is not None:
                self.value_replicas.succeed(entry, copy.values, owner)
                self._release(copy)
                self.value_replicas.note_all(entry)
            members = self.host.roster.owners
            for holder in entry.store.lessees:
                if not any(one.has_session(holder) for one in members):
                    entry.store.release_holder(holder)  # no peer is left to report its end
            log.warning(
                "partition %r: took over %s from lost peer %s",
                entry.name,
                counted(len(copy.store), "row"),
                owner.peer,
            )
        self._named |= held.keys()
        for other in self.host.roster.owners:
            chunks, counts = _joined(held.get(other, []))
            body = Inherited(owner, chunks.tobytes(), counts.astype(U4).tobytes())
            self.references.took_over(other, body)


def _named(
    origin: _Origin, ahead: tuple[Key, bytes], held: contextlib.ExitStack | None = None
) -> None:
    """Release these replicas: rows reference them, or no record that does has arrived in time."""
    found = origin.ahead.get(ahead)
    if found is not None and held in (None, found):
        del origin.ahead[ahead]
        found.close()


def _those(store: Store, owner: Owner, chunks: Array) -> tuple[Array, Array]:
    """Return the chunks that rows use: their numbers and sizes, u8 each."""
    used, nbytes = store.named(owner)
    among = np.isin(used, chunks)
    return used[among], nbytes[among]


def _joined(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    if not parts:
        return np.zeros(0, U8), np.zeros(0, U4)
    chunks, counts = zip(*parts, strict=True)
    return np.concatenate(chunks), np.concatenate(counts)


def _new(origin: _Origin, body: Append) -> Append:
    """Return the message without the records that were replayed already. Raise ProtocolError if
    records before it are missing."""
    if body.first > origin.next:
        raise ProtocolError(
            f"gap in the replication log: expected record {origin.next}, got record "
            f"{body.first}. The primary must send a new snapshot"
        )
    passed, rest = origin.next - body.first, []
    for one in body.partitions:
        if passed < len(one.records):
            rest.append(PartitionLog(one.partition, one.generation, one.records[passed:]))
        passed = max(0, passed - len(one.records))
    return Append(body.stream, origin.next, rest)


def _pieces(one: PartitionLog, owner: Owner) -> Iterator[tuple[PartitionLog, list[Named]]]:
    """Yield the records of a partition that has a copy here: in order, in parts that write few
    bytes of the owner, each with the chunks that it names."""
    records: list[LogRecord] = []
    named: list[Named] = []
    written = 0
    for record in one.records:
        mine = [found for found in named_by(record) if found[0] == owner]
        more = sum(int(nbytes.sum()) for *_, nbytes in mine)
        if records and written + more > BATCH_BYTES:
            yield PartitionLog(one.partition, one.generation, records), named
            records, named, written = [], [], 0
        records.append(record)
        named += mine
        written += more
    yield PartitionLog(one.partition, one.generation, records), named


def _brings_values(origin: _Origin, body: Append) -> bool:
    """Return whether the message may need replicas of values."""
    first = [one.records[0] for one in body.partitions if one.records]
    begun = [record.definition for record in first if isinstance(record, Begun)]
    return origin.valued > 0 or any(one.replicas == 2 for one in begun)
