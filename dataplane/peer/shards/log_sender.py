"""The primary's side of the log: sends the log records of this peer's shards to its backup, in
order.

A command queues its record (`_queue_record`). The queue is sent at the end of the loop's turn once
a reply waits for it (`Progress.reached` calls `_send_soon`), and otherwise after QUIET_S. The
backup keeps no log: it replays each record into its copy of the store at once.

A new backup first gets a snapshot of every store, and then each record. The peer sends a snapshot
in pieces: it notes the state of a store, encodes some rows at a time, and serves other calls in
between. Records that are written meanwhile queue behind the snapshot (`_later`), so the stream has
one order and contains each record once.

While the roster lists the backup as in sync, no reply and no message leaves this peer before the
backup has every record up to then. A caller that has seen a change therefore finds it again
after this peer dies. If the backup leaves the in-sync set, nothing leaves this peer before the
backup knows that, unless the backup confirms nothing (`confirming`): a new roster keeper may only
know the roster in which the backup was in sync, and promote it. When another primary leaves, its
shards move here, so this peer also passes its copies of them on. This peer's backup then has
them already.

A reply to the backup itself does not wait. It carries the records that the backup lacks. The
backup states its position in each request. If another caller waits for that position, this peer
asks the backup.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import secrets
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

from dataplane.errors import (
    DataplaneError,
    InternalError,
    ProtocolError,
    StaleEpoch,
    Unavailable,
    duration,
)
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.shard.journal import snapshot
from dataplane.metadata.shard.replicas import named_by
from dataplane.metadata.shard.store import Store
from dataplane.peer.host import Entry, Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.shards.value_replicas import ValueReplicas
from dataplane.wire.events import EventRecord, Kind
from dataplane.wire.journal import Begun, Ended, LogRecord, encode, encoded
from dataplane.wire.messages import Body
from dataplane.wire.peering import Append, PartitionLog, Rostered
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

MESSAGE_BYTES = 4 << 20
MESSAGE_RECORDS = 10_000
CARRIED_BYTES = 256 << 10
"""A reply carries at most this many bytes of records. Larger ones go in a message of their own:
the backup confirms carried records later than `QUIET_S`, so large ones would be sent twice."""
QUIET_S = 0.05
"""Records that no reply waits for are sent after this long. So are records that a reply carried, if
the backup has not confirmed them by then."""
MAX_PENDING_BYTES = 512 << 20
"""If records of more bytes than this wait for a backup, it is too slow, and a new stream begins. A
snapshot adds at most `SNAPSHOT_BYTES` and one record to them."""
SNAPSHOT_BYTES = 2 * MESSAGE_BYTES
"""A snapshot continues while at most this many bytes wait to be confirmed."""
PIECE_S = 0.02
"""After this long, a snapshot or a replay lets other calls run."""
ATTEMPT_S, MOST_ATTEMPT_S = 10.0, 80.0
"""How long the backup may take to reply, besides the time for the bytes. Each attempt that times
out doubles it. A slow link delivers a message late, and another copy of it later still."""
LEAST_BYTES_S = 1 << 20
"""The slowest accepted link, in bytes per second. A message of n bytes may take n / LEAST_BYTES_S
seconds longer. After that the backup leaves the in-sync set, and replies stop waiting for it."""
REST_S, MOST_REST_S = 10.0, 30.0
"""A backup that is late again stays out of the in-sync set for at least REST_S. Each further
removal doubles that time, up to MOST_REST_S. All calls stop for some seconds before each removal,
and a backup behind a slow link is late again and again."""
FORGET_S = 900.0
"""After this long without a removal, the next one counts as the first. After a first removal, the
backup rejoins as soon as it has every record."""
RETRY_S, MOST_RETRY_S = 0.5, 30.0
"""The first and the longest pause before a message or a stream is sent to a backup again. Pauses
between streams double."""


@dataclass(slots=True, eq=False)
class _Snapshot:
    """A queued snapshot of a store. It contains the store as it is when its turn comes."""

    entry: Entry
    has_ended: bool = False
    """the store was dropped before its turn"""


def _begun(store: Store) -> Begun:
    return Begun(store.declared, store.restorer)


def _ended() -> Generator[LogRecord, None, None]:
    """Yield the records of a store that was dropped before its snapshot began."""
    yield Ended()


class LogSender:
    def __init__(self, host: Host, mesh: Mesh, value_replicas: ValueReplicas) -> None:
        self.host = host
        self.mesh = mesh
        self.value_replicas = value_replicas
        self.progress = host.progress
        self.backup: Owner | None = None
        self.synced = False
        """the backup has had every record of the present stream, at least once"""
        self._whole = 0
        """how many records of `progress` the backup must have, to be listed as in sync"""
        self._in_vain = 0
        """how many streams failed since this backup was last in sync"""
        self._stream = 0
        self._queue: deque[tuple[Entry, bytes, int, bool]] = deque()
        """records that the backup has not confirmed; how many records of `progress` each counts
        for, and whether the backup may have to copy values for it. `_first` is the number of the
        first one in the stream."""
        self._first = 0
        self._queued_bytes = 0
        self._later: deque[_Snapshot | tuple[Entry, bytes, bool]] = deque()
        """what follows the queue: snapshots, and records behind them"""
        self._later_bytes = 0
        self._to_snapshot: dict[int, _Snapshot] = {}
        """snapshots in `_later`, by the id of their store"""
        self._snapshotting: asyncio.Task[object] | None = None
        self._has_begun = False
        """the stream has begun, so the backup gets the queue"""
        self._has_room = asyncio.Event()
        self._under_way, self._sends = True, False
        """a message to the backup is in flight, or the stream has not begun; a message will be sent
        at the end of this turn of the loop"""
        self._sent_at = self._takes_s = 0.0
        """when the message in flight was built, and how long its bytes may take, in seconds"""
        self._copies_values = False
        """the backup may have to copy values before it confirms the message in flight"""
        self._carried, self._carrier = 0, b""
        """the number after the last record that a reply carried, and that reply's connection"""
        self._with_values = 0
        """the number after the last record of a partition with replicas=2. The backup confirms
        such records only in the reply to their message, so no other reply carries them."""
        self._is_asked = self._looks = False
        """a message is due although no reply waits for it; `_look` is scheduled"""
        self._task: asyncio.Task[object] | None = None
        self._parting: asyncio.Task[object] | None = None
        """tells the backup that it is no longer in sync"""
        self._keeps_stream = False
        """all rosters since then name this backup, so it has kept its copies. It follows the
        rest of the stream, because a new stream could take long on a slow link."""
        self._is_overdue = False
        """the backup has confirmed nothing for a while"""
        self._removed_at, self._rest_s = -math.inf, 0.0
        """when this backup was last removed for being late, and for at least how long"""
        self._awaited: tuple[str, float] | None = None
        """the backup that replies wait for, and since when"""
        self.passed_on: dict[tuple[str, int], Entry] = {}
        """copies of partitions that this peer will serve soon"""
        self.on_whole: Callable[[], None] = lambda: None
        """called when the backup has every record that it needs to be listed as in sync"""
        self.progress.on_awaited = self._send_soon

    # records of the stores

    def watch(self, entry: Entry) -> None:
        """Send the records of a new partition from now on."""
        self._start_emitting(entry)
        self._queue_record(entry, _begun(entry.store))

    def _start_emitting(self, entry: Entry) -> None:
        if self.backup is not None or entry.replicas is not None:
            entry.store.emit = functools.partial(self._emit, entry)

    def _queue_snapshot(self, entry: Entry) -> None:
        """Queue a snapshot of a store."""
        if self.backup is None:
            return
        snapshot = self._to_snapshot[id(entry.store)] = _Snapshot(entry)
        self.progress.done += 1
        self._later.append(snapshot)
        self._snapshot_later()

    def take_over(self, entry: Entry) -> None:
        """Serve a partition that another peer served before."""
        passed = self.passed_on.pop(entry.key, None)
        if passed is not None and passed.store is not entry.store:  # two leaving peers had it
            self._queue_record(passed, Ended())
            passed = None
        if passed is None:
            self._queue_snapshot(entry)
        self._start_emitting(entry)

    def pass_on(self, store: Store) -> None:
        """Send a store that this peer will serve soon to the backup."""
        entry = Entry(store)
        self.passed_on[entry.key] = entry
        self._queue_snapshot(entry)

    def happened(self, store: Store, record: LogRecord) -> None:
        """Queue a record that was replayed into a copy here, if that copy is passed on. Another
        copy of the partition, from another peer that leaves, is not."""
        entry = self.passed_on.get((store.partition, store.generation))
        if entry is not None and entry.store is store:
            self._queue_record(entry, record)
            if isinstance(record, Ended):
                del self.passed_on[entry.key]

    def _emit(self, entry: Entry, record: LogRecord) -> None:
        if entry.replicas is not None:
            self.value_replicas.note(entry, record)
        self._queue_record(entry, record)

    def _queue_record(self, entry: Entry, record: LogRecord) -> None:
        if self.backup is None:
            return
        snapshot = self._to_snapshot.get(id(entry.store))
        if snapshot is not None:  # the snapshot will contain it
            snapshot.has_ended |= isinstance(record, Ended)
            return
        self.progress.done += 1
        copies = self._needs_values(entry, record)
        if self._later or self._snapshotting is not None:
            encoded_record = encode(record)
            self._later.append((entry, encoded_record, copies))
            self._later_bytes += len(encoded_record)
        else:
            self._enqueue(entry, encode(record), copies=copies)
        if (waiting := self._queued_bytes + self._later_bytes) > MAX_PENDING_BYTES:
            backup = "" if self.backup is None else self.backup.peer
            said = "backup %s: too slow (%d bytes queued), resyncing in %g s"
            log.error(said, backup, waiting, RETRY_S)
            self._stop()
            asyncio.get_running_loop().call_later(RETRY_S, self._begin)

    def _needs_values(self, entry: Entry, record: LogRecord) -> bool:
        """Whether the backup may have to copy values of this peer before it replays the
        record. It usually has copied them already (`Duplicate`)."""
        if entry.replicas is None:
            return False
        return any(owner == self.host.owner for owner, *_ in named_by(record))

    def _enqueue(self, entry: Entry, record: bytes, counts: int = 1, copies: bool = False) -> None:
        self._queue.append((entry, record, counts, copies))
        self._queued_bytes += len(record)
        if entry.replicas is not None:
            self._with_values = self._end
        if not self._looks:
            self._look_later()

    # snapshots

    def _snapshot_later(self) -> None:
        if self._has_begun and self._later and self._snapshotting is None:
            self._snapshotting = self.mesh.spawn(self._snapshot())

    async def _snapshot(self) -> None:
        """Queue what is in `_later`, as fast as the backup confirms it."""
        while self._later:
            one = self._later.popleft()
            if isinstance(one, _Snapshot):
                del self._to_snapshot[id(one.entry.store)]
                await self._snapshot_one(one)
            else:
                entry, record, copies = one
                self._later_bytes -= len(record)
                self._enqueue(entry, record, copies=copies)
        self._snapshotting = None
        self._go_on()

    async def _snapshot_one(self, one: _Snapshot) -> None:
        """Queue the records of a snapshot. The last one counts for all of them in `progress`."""
        entry = one.entry
        last = encode(_begun(entry.store))
        began = self.host.now()
        with closing(_ended() if one.has_ended else snapshot(entry.store)) as records:
            for record in records:
                self._enqueue(entry, last, 0)
                last = encode(record)
                if self._queued_bytes > SNAPSHOT_BYTES:
                    self._go_on()
                    self._has_room.clear()
                    await self._has_room.wait()
                    began = self.host.now()
                elif self.host.now() - began > PIECE_S:
                    await asyncio.sleep(0)
                    began = self.host.now()
        self._enqueue(entry, last)

    def _go_on(self) -> None:
        """Send what is queued, even if no reply waits for it."""
        self._is_asked = True
        self._send_soon()

    # the stream

    def turned(self, new: Roster) -> None:
        """Apply a new roster, which may name another backup or list the backup as in sync."""
        address, in_sync = new.backup_of(self.host.address)
        owner, before = new.owner_at(address), self.backup
        parted, self._parting = self._parting, None
        if parted is not None:
            parted.cancel()
        required = self.progress.required
        stays = owner == before and parted is None and (self.synced or in_sync or not required)
        stays |= owner == before and self._is_overdue  # it continues as a follower
        is_told = before is not None and required and new.has(before) and not self._is_overdue
        if before is not None and is_told and not stays:
            self._keeps_stream = owner == before and (parted is None or self._keeps_stream)
            self._parting = self.mesh.spawn(self._part(before))
        elif not stays:
            self._change_to(owner)
        self._whole = self.progress.done
        self._require()
        if new.leaving:  # a peer leaves when its backup and its successor's are in sync
            self.forgive()

    async def _part(self, before: Owner) -> None:
        """Tell a former backup that it is not in sync, until it confirms or the roster changes."""
        told = False
        while not told:
            try:
                await self.mesh.tell(before, Rostered(self.host.roster.table))
                told = True
            except Exception:  # any failure: no reply may leave before the backup knows
                log.exception(
                    "backup %s: could not notify the backup that it was removed from the in-sync "
                    "set, retrying",
                    before.peer,
                )
                await self.host.another_roster(self.host.roster, self.host.now() + ATTEMPT_S)
        self._parted()

    def follows(self, peer: Owner, epoch: tuple[int, int]) -> None:
        """Note that a peer uses this roster. The former backup then knows that it is no longer
        in sync."""
        if self._parting is not None and peer == self.backup and epoch == self.host.roster.epoch:
            self._parting.cancel()
            self._parted()

    def _parted(self) -> None:
        self._parting = None
        roster = self.host.roster
        owner = roster.owner_at(roster.backup_of(self.host.address)[0])
        if self._keeps_stream and not self._is_overdue:
            self._require()
            self._go_on()
        else:
            self._change_to(owner)

    def unconfirmed(self) -> None:
        """Remove a backup that has confirmed nothing for a while from the in-sync set, so that
        calls continue without it. It rejoins the set once it has every record."""
        self._is_overdue = True
        if self._parting is not None:
            self._parting.cancel()
            self._parted()
        else:
            self.demote()

    def is_late(self, patience_s: float) -> bool:
        """Whether a backup in sync has not confirmed the message in flight after `patience_s` and
        the time that its bytes may take. The backup may take ATTEMPT_S longer if it may have to
        copy values for the message."""
        if not self.synced or not self._under_way:
            return False
        limit_s = patience_s + self._takes_s + (ATTEMPT_S if self._copies_values else 0.0)
        return self.host.now() - self._sent_at > limit_s

    def demote(self, late: bool = False) -> None:
        """Have the roster remove the backup from the in-sync set. Unless the backup is overdue,
        nothing leaves this peer before the backup knows. If the next roster may list the backup,
        this is a no-op until that roster arrives, and the caller calls it again. late: the backup
        is behind a slow link, so it may have to stay out for a while. A backup that was stopped or
        cut off need not."""
        is_listed = self._is_listed()
        if not self.synced or self.backup is None or (self.has_all and not is_listed):
            return
        now, rest_s = self.host.now(), 0.0
        if late:
            if now - self._removed_at <= FORGET_S:
                rest_s = min(max(REST_S, 2 * self._rest_s), MOST_REST_S)
            self._removed_at, self._rest_s = now, rest_s
        log.warning(
            "backup %s: removing this backup from the in-sync set%s, because it stopped "
            "confirming records",
            self.backup.peer,
            f" for at least {duration(rest_s)}" if rest_s else "",
        )
        asyncio.get_running_loop().call_later(rest_s + QUIET_S, self._settle)
        self.synced = False
        if not self._under_way:
            self._under_way = True
            self._task = self.mesh.spawn(self._send_until_confirmed(self.backup, *self._next()))
        if is_listed:
            self.on_whole()
        else:  # the keeper does not know yet that the backup has every record
            self._require()

    def confirmed(self) -> None:
        """Note that the backup has just confirmed a request."""
        self._is_overdue = False

    def _change_to(self, owner: Owner | None) -> None:
        if owner != self.backup:
            self._removed_at = -math.inf
        self.backup, self._in_vain, self._is_overdue = owner, 0, False
        self._stop()
        self._begin()

    @property
    def has_all(self) -> bool | None:
        """Whether the roster may list this backup as in sync. None if it is listed already and
        the missing records are in flight."""
        if self._parting is not None:
            return False
        return None if self.synced and self.progress.confirmed < self._whole else self.synced

    def _require(self) -> None:
        """Let replies wait for a backup that is, or may be, listed as in sync: the roster keeper
        lists it before this peer learns of that."""
        has_it = self.synced or self._is_listed() or self._parting is not None
        self.progress.required = self.backup is not None and has_it
        self._note_backup()
        self.progress.wake()

    def _is_listed(self) -> bool:
        """Whether the roster lists the backup as in sync, so that it may be promoted."""
        roster = self.host.roster
        return bool(roster.in_sync[roster.shards_of(self.host.address)].any())

    def _note_backup(self) -> None:
        """Record the end of the time in which replies waited for one backup."""
        backup = self.backup.peer if self.backup is not None and self.progress.required else ""
        if self._awaited is not None and self._awaited[0] != backup:
            before, since = self._awaited
            self.host.events.add(EventRecord(Kind.BACKUP, by=before), since)
            self._awaited = None
        if backup and self._awaited is None:
            self._awaited = backup, self.host.now()

    def going_on(self) -> list[EventRecord]:
        """Return which backup replies wait for, and for how long so far."""
        if self._awaited is None:
            return []
        now, (backup, since) = self.host.now(), self._awaited
        return [EventRecord(Kind.BACKUP, now, by=backup, seconds=max(0.0, now - since))]

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = None
        self._clear()
        self.synced = False
        self._require()

    def _clear(self) -> None:
        """Forget the stream. The snapshots of the next one contain what was queued."""
        if self._snapshotting is not None:
            self._snapshotting.cancel()
        self._snapshotting, self._has_begun = None, False
        self._queue.clear()
        self._later.clear()
        self._to_snapshot.clear()
        self._queued_bytes = self._later_bytes = self._first = 0
        self._carried = self._with_values = 0
        self._whole = self.progress.done
        self._stream, self._carrier = secrets.randbits(53), b""
        self._under_way, self._sends, self._is_asked = True, False, False

    def _begin(self) -> None:
        """Begin a new stream: a snapshot of every store, then each new record."""
        if self._task is not None:
            return
        self._clear()
        if self.backup is None:
            self.progress.move(self.progress.done)
            for entry in self.host.entries.values():
                if entry.replicas is None:
                    entry.store.emit = None
            return
        for entry in self.host.entries.values():
            self._start_emitting(entry)
        for entry in (*self.host.entries.values(), *self.passed_on.values()):
            self._queue_snapshot(entry)
        self._task = self.mesh.spawn(self._send_stream(self.backup))

    async def _send_stream(self, backup: Owner) -> None:
        while self.progress.required:
            # A backup drops its copies when a new stream begins. It must not while it may still be
            # promoted. Until then, no reply leaves that depends on records that it lacks.
            await self.host.another_roster(self.host.roster, self.host.now() + RETRY_S)
        waiting = sum([counts for _, _, counts, _ in self._queue]) + len(self._later)
        self.progress.confirmed = self.progress.done - waiting
        self._has_begun = True
        self._snapshot_later()
        await asyncio.sleep(0)  # the first pieces are queued
        # Even if nothing is queued: the backup may still have copies from an earlier stream.
        await self._send_until_confirmed(backup, *self._next())

    def _send_soon(self) -> None:
        """Send at the end of the loop's turn, so that one message has all records of the turn."""
        if not self._sends and not self._under_way and self._parting is None:
            self._sends = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._sends, backup = False, self.backup
        if backup is None or self._under_way or not self._is_due:
            return
        self._under_way = True
        body, end = self._next()
        attempt_s = ATTEMPT_S + self._takes_s
        answer = self.mesh.ask(backup.peer, body, timeout_s=attempt_s, to=backup.incarnation)
        answer.add_done_callback(functools.partial(self._answered, backup, body, end))

    def _answered(
        self, backup: Owner, body: Append, end: int, answer: asyncio.Future[Body]
    ) -> None:
        failed = answer.cancelled() or answer.exception() is not None
        if body.stream != self._stream:
            return
        if failed:
            self._task = self.mesh.spawn(self._send_until_confirmed(backup, body, end))
        else:
            self._taken(end)

    async def _send_until_confirmed(self, backup: Owner, body: Append, end: int) -> None:
        """Send the message until the backup confirms it, in the reply or in another message. Retry
        as long as the roster names this backup."""
        attempt_s = ATTEMPT_S
        while not body.first < end <= self._first:  # only its reply confirms an empty message
            roster, began, limit_s = self.host.roster, self.host.now(), attempt_s + self._takes_s
            try:
                await self.mesh.call(backup.peer, body, to=backup.incarnation, timeout_s=limit_s)
                break
            except DataplaneError as exc:
                if self.host.now() - began >= limit_s:
                    attempt_s = min(2.0 * attempt_s, MOST_ATTEMPT_S)
                refused = isinstance(exc, ProtocolError | InternalError)
                if refused and not isinstance(exc, StaleEpoch):
                    await self._restart_stream(backup, roster, exc)
                    return
                waits = isinstance(exc, StaleEpoch | Unavailable)  # or has no space for values
                level = logging.INFO if waits else logging.WARNING
                log.log(level, "backup %s: retrying: %s", backup.peer, exc)
                await self.host.another_roster(roster, self.host.now() + RETRY_S)
        self._taken(end)

    async def _restart_stream(self, backup: Owner, roster: Roster, why: DataplaneError) -> None:
        """Begin a new stream after a pause, because the backup's copy is broken. If a bug breaks
        each copy, the pauses grow, and the log says so each time."""
        pause_s = min(RETRY_S * 2.0 ** min(self._in_vain, 10), MOST_RETRY_S)
        level = logging.ERROR if self._in_vain else logging.WARNING
        log.log(level, "backup %s: resyncing in %g s: %s", backup.peer, pause_s, why)
        self._in_vain += 1
        self.synced = False
        # A roster that lists it as in sync may be in flight, so no reply leaves until then.
        await self.host.another_roster(roster, self.host.now() + pause_s)
        self._task = None
        self._stop()
        self._begin()

    def _taken(self, end: int) -> None:
        self._under_way = False
        self._confirmed(end)
        self._settle()

    def _settle(self) -> None:
        """Send what is due. If the backup has everything and need not stay out, it is in sync."""
        if self._under_way:
            return
        if self._is_due:
            self._send()
        elif not (self.synced or self._later or self._snapshotting is not None or self._rests()):
            # Replies up to now did not wait for the backup.
            self.synced, self._whole, self._in_vain = True, self.progress.done, 0
            self._require()
            if not self._queue:
                self.on_whole()

    def forgive(self) -> None:
        """Let the backup rejoin the in-sync set as soon as it has everything."""
        self._removed_at = -math.inf
        self._settle()

    def _rests(self) -> bool:
        """Whether the backup stays out of the in-sync set, even if it has everything."""
        return self.host.now() < self._removed_at + self._rest_s

    @property
    def _end(self) -> int:
        """The number that the next record has in the stream."""
        return self._first + len(self._queue)

    @property
    def _is_due(self) -> bool:
        return bool(self._queue) and (self._is_asked or self.progress.is_awaited)

    def _next(self) -> tuple[Append, int]:
        """Include records that replies carried, because this message may overtake those replies."""
        body, end, nbytes = self._message(self._first, MESSAGE_BYTES, least=1)
        self._sent_at, self._takes_s = self.host.now(), nbytes / LEAST_BYTES_S
        records = islice(self._queue, end - self._first)
        self._copies_values = any(copies for _, _, _, copies in records)
        self._is_asked = end < self._end
        return body, end

    def _message(self, first: int, most_bytes: int, least: int = 0) -> tuple[Append, int, int]:
        """Return the records from `first` on that fit into one message, the number after the
        last one, and their bytes. The message has at least `least` records of any size."""
        parts: list[PartitionLog] = []
        nbytes = count = 0
        last: Entry | None = None
        for entry, record, *_ in islice(self._queue, first - self._first, None):
            if (count >= least and nbytes + len(record) > most_bytes) or count >= MESSAGE_RECORDS:
                break
            nbytes += len(record)
            count += 1
            if entry is not last:
                last = entry
                parts.append(PartitionLog(entry.name, entry.generation, []))
            parts[-1].records.append(encoded(record))
        return Append(self._stream, first, parts), first + count, nbytes

    def _confirmed(self, end: int) -> None:
        """Note that the backup has every record before this number."""
        if end <= self._first:
            return
        before = confirmed = self.progress.confirmed
        for _ in range(end - self._first):
            _, record, counts, _ = self._queue.popleft()
            self._queued_bytes -= len(record)
            confirmed += counts
        self._first = end
        if self._queued_bytes <= SNAPSHOT_BYTES:
            self._has_room.set()
        self.progress.move(confirmed)
        if self.synced and before < self._whole <= confirmed:
            self.on_whole()

    # records that replies carry

    def carry(self, to: Owner, connection: bytes) -> Append | None:
        """Return the records to send along with a reply to the backup on this connection. They
        are all that the backup lacks, so the reply need not wait. Return None if the reply must
        wait.

        Messages of one connection arrive in order, so records that were sent on it are not
        sent again.
        """
        if to != self.backup or not self.synced or self._under_way or self._parting is not None:
            return None
        if self._first < self._with_values or self._later or self._snapshotting is not None:
            return None
        first = self._first
        if connection == self._carrier:
            first = max(first, self._carried)
        body, end, _ = self._message(first, CARRIED_BYTES)
        if end < self._end:
            return None
        self._carried, self._carrier = end, connection
        return body

    def heard(self, by: Owner, stream: int, end: int) -> None:
        """Note the position in a stream that a peer has reported."""
        if by == self.backup and stream == self._stream and end <= self._end:
            self._confirmed(end)

    # records that no reply waits for

    def _look_later(self) -> None:
        self._looks = True
        asyncio.get_running_loop().call_later(QUIET_S, self._look, self._stream, self._end)

    def _look(self, stream: int, end: int) -> None:
        self._looks = False
        if stream == self._stream and self._first < end:
            self._is_asked = True
            self._send_soon()
        elif self._queue:
            self._look_later()
