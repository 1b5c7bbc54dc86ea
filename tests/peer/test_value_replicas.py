"""Replicas of another peer's values: how many transfers, and what one attempt leaves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Awaitable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import BackPressure, DeadlineExceeded, StaleEpoch, Unavailable
from dataplane.events.ring import Ring
from dataplane.memory.admission import Admission
from dataplane.memory.remote_references import RemoteReferences
from dataplane.memory.space import PULLER, Space
from dataplane.metadata.roster.authority import Authority
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.shard.reasons import Notices
from dataplane.metadata.shard.replicas import Replicas
from dataplane.peer.host import CallContext, Caller, Entry, call_context
from dataplane.peer.pull.pulls import Pulls
from dataplane.peer.room.admission import Room
from dataplane.peer.shards import log_receiver, value_replicas
from dataplane.peer.shards.log_receiver import LogReceiver
from dataplane.peer.shards.log_sender import ATTEMPT_S
from dataplane.peer.shards.value_replicas import BATCH_BYTES, ValueReplicas
from dataplane.transport.registry import TCP
from dataplane.transport.seam import ReadOutcome, Records, Remote
from dataplane.wire.journal import Begun, LogRecord
from dataplane.wire.messages import Done, Put
from dataplane.wire.packed import U8
from dataplane.wire.peering import Append, Beat, CanFree, Duplicate, PartitionLog, Pull, Pulled
from dataplane.wire.tables import Owner
from tests.chunk_numbers import chunk_numbers, indexes
from tests.metadata import stores

HERE, THERE = Owner("tcp://10.0.0.1:7101", 1), Owner("tcp://10.0.0.2:7101", 2)
ARENA_BYTES, VALUE_BYTES, VALUES = 128 << 20, 64, 1000


class Engine:
    """Stands where the bulk engine does. gone: chunks that their owner has freed. Where `fails`,
    each second transfer is out of time, as all are that have less time than one takes."""

    transport = TCP

    def __init__(self, gone: set[int], fails: bool = False, takes_s: float = 0.0) -> None:
        self.gone = gone
        self.fails = fails
        self.takes_s = takes_s
        self.arena = memoryview(bytearray(ARENA_BYTES))
        self.reads: list[list[int]] = []

    async def read(
        self, remote: Remote, copies: Records, timeout_s: float, *how: Any
    ) -> ReadOutcome:
        self.reads.append(indexes(copies["chunk"]))
        if timeout_s < self.takes_s or self.fails and not len(self.reads) % 2:
            raise DeadlineExceeded("out of time")
        index = np.array(self.reads[-1])
        gone = np.isin(index, list(self.gone))
        for copy, number in zip(copies[~gone], index[~gone].tolist(), strict=True):
            dest, text = int(copy["dest"]), b"%64d" % number
            self.arena[dest : dest + VALUE_BYTES] = text
        return ReadOutcome(gone, int(copies["nbytes"][~gone].sum()))


def says_which_are_gone(gone: bytes | bytearray) -> Any:
    """What a mesh does whose other peer only answers which of its values are there."""

    async def call(address: str, body: Pull | CanFree, **how: Any) -> Pulled:
        if isinstance(body, CanFree):
            raise Unavailable("no answer")
        assert not body.sizes
        return Pulled(b"", bytes(gone))

    return call


class Peer:
    """One that keeps second copies, as far as that goes."""

    host: Any
    mesh: Any

    def __init__(self, engine: Any) -> None:
        self.space = Space(ARENA_BYTES)
        self.turned = asyncio.Event()
        made = Authority(Roster.from_seeds([THERE.peer, HERE.peer]), 77)
        for owner in (THERE, HERE):
            made.beat(owner, made.roster.epoch, Beat())
        self.host = SimpleNamespace(
            space=self.space,
            arena=SimpleNamespace(view=engine.arena),
            now=asyncio.get_running_loop().time,
            owner=HERE,
            address=HERE.peer,
            roster=made.roster,
            numbers=itertools.count(1),
            notices=Notices(),
            events=Ring(),
            entries={},
            name="here",
            remote_references=RemoteReferences(),
            who=str,
            speak=lambda: None,
            another_roster=self._another_roster,
        )
        self.mesh = SimpleNamespace(
            handlers={},
            hello=self._hello,
            spawn=asyncio.ensure_future,
            others=SimpleNamespace(),
        )
        room = Room(self.host, self.mesh)
        pulls = Pulls(self.host, self.mesh, room, None)  # type: ignore[arg-type]
        pulls.use(engine)
        self.value_replicas = ValueReplicas(self.host, self.mesh, pulls, room)

    async def _another_roster(self, *of: Any) -> bool:
        await self.turned.wait()
        return True

    async def _hello(self, address: str) -> Any:
        return SimpleNamespace(incarnation=THERE.incarnation, bulk="", bulk_fingerprint="")


def put_of(key: str, owner: Owner, numbers: Sequence[int], nbytes: int = VALUE_BYTES) -> Put:
    """One row with so many fields, each in a chunk of its own at this owner."""
    columns = [stores.Column(f"field{n}", [stores.Value(number(n), nbytes)]) for n in numbers]
    return stores.wrote(stores.named([key]), columns, [owner])


def number(n: int) -> int:
    """Return the number of the chunk with index n."""
    return 1 << 32 | n


def test_of_an_empty_chunk_a_copy_is_needed_too() -> None:
    copies, one = Replicas(), chunk_numbers([(0, 1)])
    assert not copies.note(THERE, one, np.zeros(1, U8))
    chunks, nbytes = copies.missing(THERE)
    assert (chunks.tolist(), nbytes.tolist()) == (one.tolist(), [1])


async def test_what_was_freed_meanwhile_costs_no_transfer_of_its_own() -> None:
    """A backup that is told of much at once finds half of it gone: it went one by one then, and did
    not get in sync while its primary was busy."""
    engine = Engine(set(range(1, VALUES, 2)))
    peer = Peer(engine)
    copies, chunks = Replicas(), chunk_numbers([(n, 1) for n in range(VALUES)])
    copies.note(THERE, chunks, np.full(VALUES, VALUE_BYTES, U8))
    await peer.value_replicas.copy_here(copies, THERE)
    assert len(engine.reads) == 1
    missing, _ = copies.missing(THERE)
    assert indexes(missing) == list(range(1, VALUES, 2))
    brought, local = copies.take(THERE)
    places = peer.space.chunks.extents(local)["offset"].tolist()
    found = [int(bytes(engine.arena[at : at + VALUE_BYTES])) for at in places]
    assert found == indexes(brought)
    assert peer.space.stats()["used_bytes"] == VALUES // 2 * VALUE_BYTES
    assert peer.space.stats()["granted_bytes"] == 0


async def test_what_was_freed_meanwhile_needs_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a backup's arena was full, it waited for room for values whose rows had been dropped,
    and did not come to the drop, behind them in the stream, which would have made some."""
    monkeypatch.setattr(value_replicas, "PATIENCE_S", 0.05)
    peer, copies = Peer(Engine(set())), Replicas()
    chunks = chunk_numbers([(n, 1) for n in range(VALUES)])
    copies.note(THERE, chunks, np.full(VALUES, VALUE_BYTES, U8))
    left = peer.space.stats()["classes"]["open"]["room_bytes"]
    await peer.value_replicas.room.reserve(PULLER, Admission.OPEN, [np.array([left], U8)], 1.0)
    freed = bytearray(VALUES)

    peer.mesh.call = says_which_are_gone(freed)
    with pytest.raises(BackPressure):
        await peer.value_replicas.copy_here(copies, THERE)
    freed[:] = b"\1" * VALUES
    await peer.value_replicas.copy_here(copies, THERE)


async def test_a_write_that_finds_no_room_for_them_ends_before_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message that waited until then held its caller's floor, and acks waited behind it."""
    monkeypatch.setattr(value_replicas, "PATIENCE_S", 0.05)
    peer = Peer(Engine(set()))
    left = peer.space.stats()["classes"]["open"]["room_bytes"]
    await peer.value_replicas.room.reserve(PULLER, Admission.OPEN, [np.array([left], U8)], 1.0)

    peer.mesh.call = says_which_are_gone(bytes(1))
    entry: Any = SimpleNamespace(replicas=Replicas(), name="p", generation=1)
    body = put_of("k", THERE, [0])
    call_context.set(CallContext(peer.host.now() + 60.0))
    began = peer.host.now()
    with pytest.raises(BackPressure):
        async with peer.value_replicas.beforehand(entry, body):
            raise AssertionError("there is no room")
    assert peer.host.now() - began < 20.0


async def test_those_of_rows_that_a_dead_peer_had_come_later_and_whoever_has_room_first() -> None:
    """A successor answered nobody before it had made all of them anew: where there was no room
    nobody could make any."""
    peer, copies = Peer(Engine(set())), Replicas()
    chunks = chunk_numbers([(n, 1) for n in range(VALUES)])
    left = peer.space.stats()["classes"]["open"]["room_bytes"]
    count, taken = await peer.value_replicas.room.reserve(
        PULLER, Admission.OPEN, [np.array([left], U8)], 1.0
    )
    spawned: list[asyncio.Task[None]] = []
    peer.mesh.spawn = lambda work: spawned.append(asyncio.ensure_future(work))

    peer.mesh.call = says_which_are_gone(bytes(VALUES))
    half = chunks[: VALUES // 2], chunks[VALUES // 2 :]
    for some in half:
        assert not copies.note(THERE, some, np.full(len(some), VALUE_BYTES, U8))
        peer.value_replicas.copy_here_later(copies, "step-1", THERE, lambda: True)
    assert len(spawned) == 1, "one task makes all copies of an owner's"
    await asyncio.sleep(0.01)
    assert len(copies.missing(THERE)[0]) == VALUES
    peer.space.give_back(PULLER, taken)
    peer.value_replicas.room.pump()
    await spawned[0]
    assert not len(copies.missing(THERE)[0])
    assert copies.note(THERE, chunks, np.full(VALUES, VALUE_BYTES, U8))


async def test_a_backup_makes_them_before_rows_name_them_and_lets_go_of_what_none_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_receiver, "AHEAD_S", 0.0)
    peer = Peer(engine := Engine(set()))
    append, replicas = backup(peer)
    caller = Caller(THERE.peer, THERE.incarnation)
    shard, ops = stores.store(replicas=2), list[LogRecord]()
    shard.emit = ops.append
    await append(caller, Append(5, 0, [PartitionLog("step-1", 1, [Begun(shard.definition)])]))
    chunks = chunk_numbers([(0, 1), (1, 1)])
    sizes = np.full(2, VALUE_BYTES, U8).tobytes()
    body = Duplicate("step-1", 1, chunks.tobytes(), sizes)
    assert await replicas.duplicate(caller, body) == Done()
    assert engine.reads == [[0, 1]]
    alone = Duplicate("step-1", 1, chunks[:1].tobytes(), sizes[:8])
    for _ in range(2):
        assert await replicas.duplicate(caller, alone) == Done()
    shard.put(put_of("k0", THERE, [0]))
    await append(caller, Append(5, 1, [PartitionLog("step-1", 1, ops)]))
    assert engine.reads == [[0, 1]], "it was there"
    assert [len(one.ahead) for one in replicas._origins.values()] == [1]
    await asyncio.sleep(0.01)
    assert peer.space.stats()["used_bytes"] == VALUE_BYTES


async def test_a_backup_in_sync_makes_copies_of_what_came_with_a_partition_in_the_end() -> None:
    """Which began just now, or is passed on because it will be the primary's."""
    peer = Peer(engine := Engine(set()))
    append, _ = backup(peer)
    spawned: list[asyncio.Task[None]] = []
    peer.mesh.spawn = lambda work: spawned.append(asyncio.ensure_future(work))
    roster = peer.host.roster
    peer.host.roster = dataclasses.replace(roster, in_sync=np.ones_like(roster.in_sync))
    shard, ops = stores.store(replicas=2), list[LogRecord]()
    shard.emit = ops.append
    shard.put(put_of("k0", THERE, [0]))
    caller = Caller(THERE.peer, THERE.incarnation)
    await append(caller, Append(5, 0, [PartitionLog("step-1", 1, [Begun(shard.definition), *ops])]))
    assert not engine.reads
    await asyncio.gather(*spawned)
    assert engine.reads == [[0]]


async def test_values_of_a_leaving_peer_and_its_successor_are_copied_to_the_successors_backup() -> (
    None
):
    """The successor would be the only one that has it, as soon as it has the shards."""
    peer = Peer(engine := Engine(set()))
    append, replicas = backup(peer)
    shard, ops = stores.store(replicas=2), list[LogRecord]()
    shard.emit = ops.append
    shard.put(put_of("k0", THERE, [7]))
    shard.put(put_of("k1", HERE, [8]))
    caller = Caller(THERE.peer, THERE.incarnation)
    await append(caller, Append(5, 0, [PartitionLog("step-1", 1, [Begun(shard.definition), *ops])]))

    told: list[Any] = []

    async def call(address: str, body: Duplicate) -> Done:
        told.append((address, indexes(np.frombuffer(body.chunks, U8))))
        return Done()

    async def reached(until: float) -> None:
        assert not told, "the backup has the rows first"

    peer.mesh.call = call
    peer.host.progress = SimpleNamespace(required=True, reached=reached)
    peer.host.roster = dataclasses.replace(peer.host.roster, leaving=frozenset([THERE.peer]))
    replicas.log_sender.passed_on = {("step-1", 1): Entry(shard)}
    body = Duplicate("step-1", 1, b"", b"")
    assert await replicas.duplicate(caller, body) == Done()
    assert engine.reads == [[7]]
    backup_, _ = peer.host.roster.backup_of(HERE.peer)
    [[copy]] = [chunks for _, chunks in told[:1]]
    assert told == [(backup_, [copy]), (backup_, [8])]
    assert peer.space.alive(chunk_numbers([(copy, 1)])).all()


async def test_what_waited_for_them_changes_nothing_at_a_peer_that_is_about_to_hand_over() -> None:
    """A put whose copies took longer than a peer that leaves waits was entered when the successor
    had the shards, and answered when that peer heard so and had no backup any more."""
    peer = Peer(engine := Engine(set()))
    entry = Entry(stores.store(replicas=2))
    body = put_of("k", THERE, [0])
    async with peer.value_replicas.beforehand(entry, body):
        assert engine.reads == [[0]]

    def speak() -> None:
        raise StaleEpoch("it leaves")

    peer.host.speak = speak
    with pytest.raises(StaleEpoch):
        async with peer.value_replicas.beforehand(entry, body):
            raise AssertionError("it is entered")
    assert not len(entry.replicas or ())


async def test_copies_become_the_values_when_who_is_the_backup_by_then_has_its_own() -> None:
    """The one before left: it had them, and was the backup no more when it said so."""
    peer = Peer(Engine(set()))
    peer.host.progress = SimpleNamespace(required=True)
    seeds = [HERE.peer, THERE.peer, "tcp://10.0.0.3:7101"]
    peer.host.roster = roster = Roster.from_seeds(seeds, keeps=False)
    leaves, _ = roster.backup_of(HERE.peer)
    [follows] = {*seeds} - {HERE.peer, leaves}
    copies, chunks = Replicas(), chunk_numbers([(0, 1)])
    copies.note(THERE, chunks, np.full(1, VALUE_BYTES, U8))
    await peer.value_replicas.copy_here(copies, THERE)
    local, _ = copies.held(THERE)
    told: list[tuple[str, bytes]] = []

    async def call(address: str, body: Duplicate) -> Done:
        told.append((address, body.chunks))
        backups = np.full_like(roster.backups, seeds.index(follows))
        peer.host.roster = dataclasses.replace(roster, backups=backups)
        return Done()

    peer.mesh.call = call
    entry = Entry(stores.store(replicas=2))
    await peer.value_replicas.copy_held_to_backup(entry, copies, THERE)
    assert told == [(leaves, local.tobytes()), (follows, local.tobytes())]


def backup(peer: Peer) -> tuple[Any, LogReceiver]:
    """What takes messages of its primary there."""
    partitions: Any = SimpleNamespace(heard=lambda *generation: None)
    sender: Any = SimpleNamespace(
        value_replicas=peer.value_replicas, happened=lambda store, op: None
    )
    references: Any = SimpleNamespace(inherited=None)
    replicas = LogReceiver(peer.host, peer.mesh, partitions, sender, references)
    return replicas.append, replicas


async def test_what_one_attempt_brought_the_next_does_not_bring_again() -> None:
    """A message to the backup may name more than a link brings while its sender waits."""
    engine = Engine(set(), fails=True)
    peer = Peer(engine)
    append, replicas = backup(peer)
    caller = Caller(THERE.peer, THERE.incarnation)

    shard, ops = stores.store(replicas=2), list[LogRecord]()
    shard.emit = ops.append
    for n in range(12):
        shard.put(put_of(f"k{n}", THERE, [n], BATCH_BYTES // 4))
    begun = append(caller, Append(5, 0, [PartitionLog("step-1", 1, [Begun(shard.definition)])]))
    assert await begun == Done()
    told = Append(5, 1, [PartitionLog("step-1", 1, ops)])
    answer: Awaitable[Any] | None = None
    for _ in range(3):
        answer = append(caller, told)
        with contextlib.suppress(DeadlineExceeded):
            assert await answer == Done()
            break
    assert engine.reads == [[*range(4)], *2 * [[*range(4, 8)]], *2 * [[*range(8, 12)]]]
    assert len(replicas) == 12
    assert peer.space.stats()["used_bytes"] == 3 * BATCH_BYTES


async def test_the_values_of_one_operation_may_take_longer_than_its_sender_waits() -> None:
    """Its next attempt would have brought them from the beginning, for ever."""
    peer = Peer(engine := Engine(set(), takes_s=ATTEMPT_S + 5))
    append, replicas = backup(peer)
    caller = Caller(THERE.peer, THERE.incarnation)
    shard, ops = stores.store(replicas=2), list[LogRecord]()
    shard.emit = ops.append
    shard.put(put_of("k0", THERE, range(3), BATCH_BYTES))
    await append(caller, Append(5, 0, [PartitionLog("step-1", 1, [Begun(shard.definition)])]))
    call_context.set(CallContext(peer.host.now() + ATTEMPT_S))
    told = Append(5, 1, [PartitionLog("step-1", 1, ops)])
    first = asyncio.ensure_future(append(caller, told))
    again = asyncio.ensure_future(append(caller, told))
    assert await first == await again == Done()
    assert engine.reads == [[0], [1], [2]] and len(replicas) == 1


@pytest.mark.parametrize("stays_in_sync", [False, True])
async def test_a_new_roster_ends_the_wait_for_a_backup_that_stands_still(
    stays_in_sync: bool,
) -> None:
    """With replicas=2 a put waited for a stopped backup until its own deadline, although the backup
    had left the in-sync set after 2 s. A backup that is still in sync is asked again."""
    peer, asked = Peer(Engine(set())), list[str]()
    progress = peer.host.progress = SimpleNamespace(required=True)

    async def call(address: str, body: Duplicate) -> Done:
        asked.append(address)
        if len(asked) == 1:
            await asyncio.Event().wait()
        return Done()

    peer.mesh.call = call
    making = asyncio.ensure_future(peer.value_replicas.have_copied(Entry(stores.store(replicas=2))))
    await asyncio.wait([making], timeout=0.05)
    assert asked == [THERE.peer] and not making.done()
    progress.required = stays_in_sync
    peer.turned.set()
    await asyncio.wait_for(making, 10)
    assert asked == [THERE.peer] * (1 + stays_in_sync)
