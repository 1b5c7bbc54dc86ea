"""A peer that leaves goes when it is known who lives: what it has of the dead may be the last."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from dataplane.errors import BackPressure, StaleEpoch
from dataplane.memory.admission import Admission
from dataplane.memory.remote_references import RemoteReferences
from dataplane.memory.space import Space
from dataplane.metadata.roster.authority import Authority
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.shard.store import Store
from dataplane.peer.host import Entry
from dataplane.peer.membership import leaving
from dataplane.peer.membership.leaving import FATE_S, Leaving
from dataplane.peer.shards.value_replicas import ValueReplicas
from dataplane.wire.messages import Done
from dataplane.wire.packed import EXTENT, U8
from dataplane.wire.peering import Beat, Duplicate
from dataplane.wire.tables import Definition, Owner
from tests.metadata.stores import Column, Value, named, wrote

HERE, SUCCESSOR, DEAD = (Owner(f"tcp://10.0.0.{i}:7101", i) for i in (1, 2, 3))
TURNS = 50
"""Of the loop, in which whoever does not wait has long gone on."""


class Plane:
    """Of three, as the peer that leaves sees it."""

    host: Any

    def __init__(self) -> None:
        seeds = [owner.peer for owner in (HERE, SUCCESSOR, DEAD)]
        self.authority = Authority(Roster.from_seeds(seeds, keeps=False), 77)
        for owner in (HERE, SUCCESSOR, DEAD):
            self.authority.beat(owner, self.authority.roster.epoch, Beat())
        self.now = 100.0
        self.said, self.keeperless, self.staying = False, False, {SUCCESSOR.peer, DEAD.peer}
        self.told, self.deposed = asyncio.Event(), asyncio.Event()
        self.host = SimpleNamespace(
            space=SimpleNamespace(stats=lambda: {"used_bytes": 0}),
            address=HERE.peer,
            owner=HERE,
            incarnation=HERE.incarnation,
            plane="p",
            name="here",
        )
        self.host.founding, self.host.solo = (1, 1), False
        self.host.entries, self.host.silent = {}, False
        self.host.now = lambda: self.now
        self.host.progress = SimpleNamespace(reached=self._done, required=True)
        self.host.another_roster = self._done
        spawn = asyncio.ensure_future
        self.linked = {SUCCESSOR, DEAD}
        """processes that this peer is connected to"""
        mesh: Any = SimpleNamespace(
            spawn=spawn, is_linked=lambda owner: owner in self.linked, hello=self._done
        )
        door: Any = SimpleNamespace(close=self._done, under_way=0)
        sender = SimpleNamespace(forgive=lambda: None)
        membership: Any = SimpleNamespace(
            peer=SimpleNamespace(log_sender=sender),
            stays=lambda: self.staying,
            keeps_the_roster=False,
            keeper_is_away=lambda: self.keeperless,
            announce_leaving=self._done,
            leave=self._leave,
            deposed=self.deposed,
            beat_now=self.deposed.set,
        )
        nothing: Any = None
        value_replicas = ValueReplicas(self.host, mesh, nothing, nothing)
        self.leaving = Leaving(self.host, mesh, membership, value_replicas, door, nothing, nothing)
        self.turn()

    async def _done(self, *_: object) -> None:
        pass

    def _leave(self) -> None:
        self.said = True
        self.authority.beat(HERE, self.authority.roster.epoch, Beat(synced=True, leaving=True))
        for successor in {SUCCESSOR, DEAD} & {*self.authority.roster.owners}:
            self.authority.beat(successor, self.authority.roster.epoch, Beat(synced=True))
        self.turn()

    def all_beat(self) -> None:
        """Twice: under the roster that follows from the first too."""
        for owner in (SUCCESSOR, DEAD) * 2:
            if owner in self.authority.roster.owners:
                self.authority.beat(owner, self.authority.roster.epoch, Beat(synced=True))
            self.turn()

    def turn(self) -> None:
        """The next roster is in force here, and this peer's backup has all."""
        self.authority.beat(HERE, self.authority.roster.epoch, Beat(synced=True))
        self.host.roster = self.authority.roster


async def _turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def test_who_leaves_stays_until_a_dead_member_is_called_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection broke, and it answers no greeting, or its next process does."""
    monkeypatch.setattr(leaving, "POLL_S", 0.0)
    plane = Plane()
    plane.linked.discard(DEAD)
    plane.told.set()
    leaves = asyncio.create_task(plane.leaving.leave(plane.told))
    await _turns()
    assert not plane.said and not plane.host.silent  # its shards are served meanwhile
    plane.authority.lost(DEAD)
    plane.turn()
    await asyncio.wait_for(leaves, 10)
    assert plane.said


async def test_it_does_not_wait_for_ever_for_one_that_others_may_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaving, "POLL_S", 0.0)
    plane = Plane()
    plane.linked.discard(DEAD)
    plane.told.set()
    leaves = asyncio.create_task(plane.leaving.leave(plane.told))
    await _turns()
    assert not plane.said
    plane.now += FATE_S
    await asyncio.wait_for(leaves, 10)
    assert plane.said


def _without_backups(roster: Roster) -> Roster:
    """What a peer that wants to leave waits for first."""
    return dataclasses.replace(roster, in_sync=np.zeros_like(roster.in_sync))


async def test_it_waits_for_a_keeper_of_the_roster_that_died_and_may_be_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaving, "POLL_S", 0.0)
    plane = Plane()
    backed_up, plane.host.roster = plane.host.roster, _without_backups(plane.host.roster)
    plane.told.set()
    leaves = asyncio.create_task(plane.leaving.leave(plane.told))
    for _ in range(2):
        plane.keeperless = True
        await _turns()
        plane.now += FATE_S - 1
        await _turns()
        assert not leaves.done()
        plane.keeperless = False
        await _turns()
    plane.host.roster = backed_up
    await asyncio.wait_for(leaves, 10)
    assert plane.said


@pytest.mark.parametrize("others_end", [False, True])
async def test_it_waits_for_no_keeper_for_ever_nor_where_all_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, others_end: bool
) -> None:
    monkeypatch.setattr(leaving, "POLL_S", 0.0)
    plane = Plane()
    plane.host.space = SimpleNamespace(stats=lambda: {"used_bytes": 7})
    plane.host.roster = _without_backups(plane.host.roster)
    plane.keeperless = True
    plane.told.set()
    leaves = asyncio.create_task(plane.leaving.leave(plane.told))
    await _turns()
    assert not leaves.done()
    if others_end:
        plane.staying = set()
    else:
        plane.now += FATE_S
    await asyncio.wait_for(leaves, 10)
    assert not plane.said and "7 bytes were not moved" in caplog.text


async def test_where_all_end_it_does_not_wait_for_a_backup_that_has_ended() -> None:
    """Nobody makes a roster any more that names another one."""
    plane = Plane()
    plane.host.space = SimpleNamespace(stats=lambda: {"used_bytes": 7})
    plane.host.progress.reached = lambda until: asyncio.Event().wait()
    plane.told.set()
    leaves = asyncio.create_task(plane.leaving.leave(plane.told))
    await _turns()
    assert plane.host.silent and not leaves.done()
    plane.staying = set()
    await asyncio.wait_for(leaves, 10)


async def test_where_all_live_it_goes_at_once() -> None:
    plane = Plane()
    plane.told.set()
    await asyncio.wait_for(plane.leaving.leave(plane.told), 10)
    assert plane.said


async def test_it_serves_its_shards_until_its_successor_has_a_backup_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of the successor was the peer that leaves; the next one gets its copy first."""
    monkeypatch.setattr(leaving, "POLL_S", 0.0)
    plane = Plane()
    leave = plane.leaving.membership.leave

    def unsynced() -> None:
        leave()
        for successor in (SUCCESSOR, DEAD):
            plane.authority.beat(successor, plane.authority.roster.epoch, Beat(synced=False))
        plane.turn()

    plane.leaving.membership.leave = unsynced  # type: ignore[method-assign]
    plane.told.set()
    leaves = asyncio.create_task(plane.leaving.leave(plane.told))
    await _turns()
    assert plane.said and not plane.host.silent
    for successor in (SUCCESSOR, DEAD):
        plane.authority.beat(successor, plane.authority.roster.epoch, Beat(synced=True))
    plane.turn()
    await asyncio.wait_for(leaves, 10)
    assert plane.host.silent


async def test_it_serves_its_shards_until_it_is_nobodys_backup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who it backs up may have died unnoticed, and would be its to hand over."""
    monkeypatch.setattr(leaving, "POLL_S", 0.0)
    plane = Plane()
    plane.all_beat()
    dies = next(m for m in (SUCCESSOR, DEAD) if plane.host.roster.backup_of(m.peer)[0] == HERE.peer)
    lives = {SUCCESSOR: DEAD, DEAD: SUCCESSOR}[dies]

    def unheard() -> None:
        for owner in (HERE, lives, HERE, lives):
            is_here = owner == HERE
            plane.authority.beat(owner, plane.authority.roster.epoch, Beat(True, is_here))
        plane.turn()

    plane.leaving.membership.leave = unheard  # type: ignore[method-assign]
    plane.told.set()
    leaves = asyncio.create_task(plane.leaving.leave(plane.told))
    await _turns()
    assert HERE.peer in plane.host.roster.leaving and not plane.host.silent
    plane.authority.lost(dies)
    plane.all_beat()
    await asyncio.wait_for(leaves, 10)
    assert plane.host.silent and not plane.authority.roster.lost.any()


async def test_it_gives_its_successor_shards_before_the_successor_gets_the_rest_and_so_a_backup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It began alone. Two peers just joined without shards: its successor would have no backup."""
    monkeypatch.setattr(leaving, "POLL_S", 0.0)
    plane = Plane()
    plane.authority = made = Authority(Roster.from_seeds([HERE.peer], keeps=False), 78)
    for owner in (HERE, SUCCESSOR, DEAD):
        made.beat(owner, (1, 1), Beat())
    plane.turn()
    plane.told.set()
    leaves = asyncio.create_task(plane.leaving.leave(plane.told))
    await _turns()
    successor, in_sync = made.roster.backup_of(HERE.peer)
    assert successor is not None and in_sync and not len(made.roster.shards_of(successor))
    assert plane.said and not plane.host.silent
    empty = np.ones(made.roster.shards, np.bool_)
    empty[:8] = False
    made.beat(HERE, made.roster.epoch, Beat(synced=True, spare=np.packbits(empty).tobytes()))
    plane.turn()
    await _turns()
    assert len(made.roster.shards_of(successor)) and not plane.host.silent
    for owner in (SUCCESSOR, DEAD):
        made.beat(owner, made.roster.epoch, Beat(synced=True))
    plane.turn()
    await asyncio.wait_for(leaves, 10)
    assert plane.host.silent


@pytest.mark.parametrize("has_room", [True, False])
async def test_second_copies_become_the_values_when_a_backup_has_its_own_or_no_room(
    has_room: bool,
) -> None:
    plane = Plane()
    entry = Entry(Store("p", Definition(group_size=1, replicas=2), 1))
    done: list[str] = []

    async def copy_here(*_: object) -> None:
        done.append("brought here")

    async def copy_held_to_backup(*_: object) -> None:
        if not has_room:
            raise BackPressure("there is no room")
        done.append("brought to the backup")

    value_replicas: Any = SimpleNamespace(
        copy_here=copy_here, copy_held_to_backup=copy_held_to_backup
    )
    value_replicas.succeed = lambda *_: done.append("read here")
    plane.host.space = Space(1 << 20)
    plane.host.roster = dataclasses.replace(plane.host.roster, leaving=frozenset([DEAD.peer]))
    plane.leaving.value_replicas = value_replicas
    await plane.leaving._move(entry, DEAD)
    assert done == ["brought here", *["brought to the backup"] * has_room, "read here"]


async def test_with_second_copies_its_successors_backup_has_them_before_it_falls_silent() -> None:
    """Also where that one knows the next roster already; and where there is no room for them it
    goes all the same."""
    plane = Plane()
    both_or_one: list[tuple[str, Literal[1, 2]]] = [("p", 2), ("q", 1), ("r", 2)]
    plane.host.entries = {
        name: Entry(Store(name, Definition(group_size=1, replicas=replicas), 1))
        for name, replicas in both_or_one
    }
    told: list[tuple[str, str, bool]] = []
    says: list[Exception] = [StaleEpoch("it has the next roster"), BackPressure("no room")]

    async def call(address: str, body: Duplicate) -> Done:
        told.append((address, body.partition, plane.host.silent))
        if says:
            raise says.pop(0)
        return Done()

    plane.leaving.mesh.call = call  # type: ignore[method-assign,assignment]
    plane.told.set()
    await asyncio.wait_for(plane.leaving.leave(plane.told), 10)
    successor, _ = plane.host.roster.backup_of(HERE.peer)
    assert told == [(successor, name, False) for name in "ppr"] and plane.host.silent


async def test_where_its_successor_gets_another_backup_that_has_them_before_it_falls_silent() -> (
    None
):
    """As where the backup of its successor leaves as well, or died."""
    plane = Plane()
    plane.host.entries = {"p": Entry(Store("p", Definition(group_size=1, replicas=2), 1))}
    told: list[tuple[str | None, bool]] = []

    async def call(address: str, body: Duplicate) -> Done:
        backup, _ = plane.host.roster.backup_of(address)
        told.append((backup, plane.host.silent))
        if len(told) == 1:
            plane.authority.lost(next(one for one in (SUCCESSOR, DEAD) if one.peer == backup))
            plane.all_beat()
        return Done()

    plane.leaving.mesh.call = call  # type: ignore[method-assign,assignment]
    plane.told.set()
    await asyncio.wait_for(plane.leaving.leave(plane.told), 10)
    (first, _), (second, _) = told
    assert first != second and not any(silent for _, silent in told) and plane.host.silent


async def test_where_its_successor_dies_it_serves_again_until_another_one_and_its_backup_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had fallen silent, and its shards were about to move."""
    monkeypatch.setattr(leaving, "POLL_S", 0.0)
    plane = Plane()
    plane.host.entries = {"p": Entry(Store("p", Definition(group_size=1, replicas=2), 1))}
    told: list[str] = []

    async def call(address: str, body: Duplicate) -> Done:
        assert not plane.host.silent
        told.append(address)
        return Done()

    plane.leaving.mesh.call = call  # type: ignore[method-assign,assignment]
    plane.leaving.membership.beat_now = lambda: None  # type: ignore[method-assign]
    plane.told.set()
    leaves = asyncio.create_task(plane.leaving.leave(plane.told))
    await _turns()
    old = plane.host.roster
    successor, _ = old.backup_of(HERE.peer)
    assert plane.host.silent and told == [successor]
    plane.authority.lost(next(one for one in (SUCCESSOR, DEAD) if one.peer == successor))
    plane.host.roster = plane.authority.roster
    plane.leaving.turned(old, plane.host.roster)
    await _turns()
    assert not plane.host.silent  # while the next one gets its copy
    plane.all_beat()
    await _turns()
    assert plane.host.silent and told == [successor, plane.host.roster.backup_of(HERE.peer)[0]]
    assert len({*told}) == 2
    plane.deposed.set()
    await asyncio.wait_for(leaves, 10)


async def test_what_rows_held_that_went_while_it_was_silent_is_let_go_once() -> None:
    """They go with a member that is lost before the shards are handed over. Other rows have values
    in one of their chunks, and another chunk goes with them."""
    space = Space(1 << 20)
    start = space.grant(1, Admission.OPEN, 8192)["offset"][0]
    extents = np.array([(start, 4096), (start + 4096, 4096)], EXTENT)
    chunks = space.commit(1, extents.tolist(), Admission.OPEN)
    both, alone = (Value(number, 4096) for number in chunks.tolist())
    columns = [
        Column("x", [both, both]),
        Column("y", [Value(9, 9000, 1), None]),
        Column("z", [alone, None]),
    ]
    store = Store("p", Definition(group_size=1), 1)
    store.put(wrote(named(["a", "b"], ["g", "h"]), columns, [HERE, DEAD]))

    plane = Plane()
    plane.host.entries, plane.host.space, plane.host.remote_references = (
        {"p": Entry(store)},
        space,
        RemoteReferences(),
    )
    plane.told.set()
    await asyncio.wait_for(plane.leaving.leave(plane.told), 10)
    assert plane.host.silent
    plane.authority.lost(DEAD)
    plane.turn()
    store.lost(DEAD)
    for owner, freed, counts in store.freed():
        if owner == HERE:
            space.release(freed, counts)
    assert len(store) == 1
    assert space.alive(chunks).tolist() == [True, False]

    old = plane.host.roster
    plane.authority.beat(HERE, old.epoch, Beat(synced=True, leaving=True))
    plane.turn()
    assert not len(plane.host.roster.shards_of(HERE.peer))
    plane.leaving.turned(old, plane.host.roster)
    _, held, counts = next(one for one in store.holdings() if one[0] == HERE)
    space.release(*plane.host.remote_references.inherited([HERE], SUCCESSOR, held, counts))
    assert space.alive(chunks)[0]  # the successor's row reads it there
    space.release(held, plane.host.remote_references.release(SUCCESSOR, held, counts))
    assert not space.alive(chunks).any()


async def test_who_leaves_as_well_takes_nothing_in_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its shards may have moved while values of another that leaves were on their way to it: what
    it let go of there then, the rows of its successor name."""
    monkeypatch.setattr(leaving, "POLL_S", 0.0)
    plane = Plane()
    chunks, nbytes = np.zeros(1, U8), np.full(1, 64)
    moved: list[str] = []
    on_its_way, arrives = asyncio.Event(), asyncio.Event()

    async def fetch(*_: object) -> tuple[int, Any, Any]:
        on_its_way.set()
        await arrives.wait()
        return 1, np.ones(1, np.bool_), chunks

    async def another_roster(*_: object) -> None:
        await asyncio.sleep(0)

    store = SimpleNamespace(named=lambda owner: (chunks, nbytes))
    plane.host.entries = {"p": SimpleNamespace(name="p", replicas=None, store=store)}
    plane.host.space = SimpleNamespace(size_bytes=1 << 20)
    plane.host.another_roster = another_roster
    room = SimpleNamespace(release=lambda local: moved.append("let go"))
    value_replicas: Any = SimpleNamespace(fetch=fetch, room=room)
    value_replicas.replace = lambda *_: moved.append("named")
    plane.leaving.value_replicas = value_replicas
    tasks: list[asyncio.Task[None]] = []
    mesh: Any = plane.leaving.mesh
    mesh.spawn = lambda work: tasks.append(asyncio.create_task(work))

    old = plane.host.roster
    plane.authority.beat(DEAD, old.epoch, Beat(synced=True, leaving=True))
    plane.host.roster = plane.authority.roster
    plane.leaving.turned(old, plane.host.roster)
    await on_its_way.wait()
    plane.authority.beat(HERE, plane.authority.roster.epoch, Beat(leaving=True))
    plane.turn()
    arrives.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert moved == ["let go"]
