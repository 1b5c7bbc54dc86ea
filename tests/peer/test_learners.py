"""A copy that was never in sync is not taken over: its shards begin empty."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import ProtocolError, StaleEpoch
from dataplane.metadata.roster.authority import Authority
from dataplane.metadata.roster.roster import Roster, Successors
from dataplane.metadata.shard.store import Store
from dataplane.peer.host import Caller, Entry
from dataplane.peer.shards.log_receiver import LogReceiver
from dataplane.peer.shards.log_sender import PIECE_S
from dataplane.wire.journal import Begun, Declared, Ended, LogRecord
from dataplane.wire.messages import Body, Done
from dataplane.wire.peering import Append, Beat, Inherited, PartitionLog
from dataplane.wire.tables import Definition, Owner

PRIMARY, BACKUP = Owner("tcp://10.0.0.1:7101", 1), Owner("tcp://10.0.0.2:7101", 2)


def rosters(in_sync: bool, misses_that: bool) -> list[Roster]:
    """That the backup adopts, until the primary is lost."""
    made = Authority(Roster.from_seeds([PRIMARY.peer, BACKUP.peer]), 77)
    for owner in (PRIMARY, BACKUP):
        made.beat(owner, made.roster.epoch, Beat())
    seen = [made.roster]
    if in_sync:
        made.beat(PRIMARY, made.roster.epoch, Beat(synced=True))
        seen += [] if misses_that else [made.roster]
    made.lost(PRIMARY)
    return [*seen, made.roster]


def unanswered(answer: Body | Awaitable[Body]) -> asyncio.Future[Body]:
    """An append that takes a while."""
    assert not isinstance(answer, Body)
    return asyncio.ensure_future(answer)


class Backup:
    """`taken`: partitions of the primary that it serves; `told`: what its members hear of it."""

    host: Any

    def __init__(self, roster: Roster) -> None:
        self.taken: list[str] = []
        self.told: list[Inherited] = []
        self.lost: set[int] = set()
        self.host = SimpleNamespace(
            owner=BACKUP,
            address=BACKUP.peer,
            roster=roster,
            numbers=itertools.count(1),
            now=lambda: 0.0,
            successors=Successors(),
            lose=lambda shards: self.lost.update(shards),
            serves=lambda name: self.host.roster.home(name) == BACKUP.peer,
        )
        mesh: Any = SimpleNamespace(handlers={})
        partitions: Any = SimpleNamespace(
            serve=self._serve, heard=lambda *generation: None, ended=lambda *of: None
        )
        sender: Any = SimpleNamespace(
            take_over=lambda entry: None, happened=lambda store, op: None, value_replicas=None
        )
        grants: Any = SimpleNamespace(inherited=None, took_over=self._took_over)
        self.log_receiver = LogReceiver(self.host, mesh, partitions, sender, grants)
        self.append = self.log_receiver.append

    def _took_over(self, to: Owner, body: Inherited) -> None:
        self.told.append(body)

    def _serve(self, store: Store) -> Entry:
        self.taken.append(store.partition)
        self.stages = list(store.definition.stages)
        return Entry(store)

    def turn(self, new: Roster) -> None:
        old, self.host.roster = self.host.roster, new
        self.host.successors.follow(old, new)
        self.log_receiver.turned(old, new)


def test_what_came_twice_is_carried_out_once() -> None:
    """Operations go along with answers and, where somebody waits for them, in messages as well."""
    backup = Backup(rosters(in_sync=True, misses_that=False)[0])
    caller, definition = Caller(PRIMARY.peer, PRIMARY.incarnation), Definition({"s": ["x"]})
    stage: list[LogRecord] = [Declared(name, ["x"]) for name in ("t", "u", "v")]
    backup.append(caller, Append(5, 0, [PartitionLog("p", 1, [Begun(definition), *stage[:1]])]))
    assert backup.log_receiver.has(PRIMARY.peer) == (5, 2)
    backup.append(caller, Append(5, 0, [PartitionLog("p", 1, [Begun(definition), *stage[:2]])]))
    backup.append(caller, Append(5, 2, [PartitionLog("p", 1, stage[1:])]))
    backup.append(caller, Append(5, 1, [PartitionLog("p", 1, stage[:1])]))
    assert backup.log_receiver.has(PRIMARY.peer) == (5, 4)
    backup.turn(rosters(in_sync=True, misses_that=False)[-1])
    assert backup.stages == ["s", "t", "u", "v"]


async def test_a_long_message_is_replayed_in_turns_and_later_ones_behind_it() -> None:
    backup = Backup(rosters(in_sync=True, misses_that=False)[0])
    clock = itertools.count()
    backup.host.now = lambda: (
        2 * PIECE_S * next(clock)
    )  # an operation takes longer than a piece may
    caller = Caller(PRIMARY.peer, PRIMARY.incarnation)
    ops: list[LogRecord] = [
        Begun(Definition({"s": ["x"]})),
        *[Declared(name, ["x"]) for name in "abcdefgh"],
    ]
    messages = [Append(5, at, [PartitionLog("p", 1, ops[at : at + 3])]) for at in (0, 3, 6)]
    answers = [unanswered(backup.append(caller, one)) for one in messages]
    seen = []
    while not all(one.done() for one in answers):
        seen.append(backup.log_receiver.has(PRIMARY.peer))
        await asyncio.sleep(0)
    assert [one.result() for one in answers] == [Done()] * 3
    assert {(5, n) for n in range(1, 9)} <= set(seen), "others had a turn after each operation"
    backup.turn(rosters(in_sync=True, misses_that=False)[-1])
    assert backup.stages == ["s", *"abcdefgh"]


async def test_a_message_that_is_half_replayed_ends_when_its_shards_are_taken_over() -> None:
    first, *later = rosters(in_sync=True, misses_that=False)
    backup = Backup(first)
    clock = itertools.count()
    backup.host.now = lambda: 2 * PIECE_S * next(clock)
    ops: list[LogRecord] = [
        Begun(Definition({"s": ["x"]})),
        *[Declared(name, ["x"]) for name in "abc"],
    ]
    told = Append(5, 0, [PartitionLog("p", 1, ops)])
    answer = unanswered(backup.append(Caller(PRIMARY.peer, PRIMARY.incarnation), told))
    while backup.log_receiver.has(PRIMARY.peer) != (5, 2):
        await asyncio.sleep(0)
    for roster in later:
        backup.turn(roster)
    with pytest.raises(StaleEpoch):
        await answer
    assert backup.stages == ["s", "a"]


@pytest.mark.parametrize(
    ("in_sync", "misses_that", "taken"),
    [(True, False, ["p"]), (True, True, ["p"]), (False, False, [])],
)
def test_only_a_copy_that_was_in_sync_is_taken_over(
    in_sync: bool, misses_that: bool, taken: list[str]
) -> None:
    """By what the rosters say, also where the backup missed the one that called it in sync."""
    first, *later = rosters(in_sync, misses_that)
    backup = Backup(first)
    shipped = Append(7, 0, [PartitionLog("p", 1, [Begun(Definition())])])
    assert backup.append(Caller(PRIMARY.peer, PRIMARY.incarnation), shipped) == Done()
    for roster in later:
        backup.turn(roster)
    assert backup.taken == taken
    # Its shards are served there one way or the other: owners of values hear what it names.
    assert {body.origin for body in backup.told} == {PRIMARY}


def test_a_takeover_of_an_earlier_time_says_nothing_of_a_later_copy() -> None:
    """Two that leave hand their shards to and fro; then one dies before the other has its copy."""
    made = Authority(Roster.from_seeds([PRIMARY.peer, BACKUP.peer]), 77)
    backup = Backup(made.roster)

    def beat(owner: Owner, synced: bool = False, leaving: bool = False) -> None:
        made.beat(owner, made.roster.epoch, Beat(synced=synced, leaving=leaving))
        backup.turn(made.roster)

    for owner in (PRIMARY, BACKUP):
        beat(owner)
    for owner in (PRIMARY, BACKUP):
        beat(owner, synced=True)
    for owner, leaves in ((PRIMARY, True), (BACKUP, False), (PRIMARY, True), *[(BACKUP, True)] * 3):
        beat(owner, synced=True, leaving=leaves)
    assert len(made.roster.shards_of(PRIMARY.peer)) == made.roster.shards
    assert [one.owner for one in made.roster.takeovers] == [PRIMARY, BACKUP]
    shipped = Append(7, 0, [PartitionLog("p", 1, [Begun(Definition())])])
    assert backup.append(Caller(PRIMARY.peer, PRIMARY.incarnation), shipped) == Done()
    made.lost(PRIMARY)
    backup.turn(made.roster)
    assert not made.roster.takeovers[-1].in_sync
    assert not backup.taken


def test_a_copy_has_the_stages_that_were_declared_later_and_ends_with_its_partition() -> None:
    first, *later = rosters(in_sync=True, misses_that=False)
    backup = Backup(first)
    caller = Caller(PRIMARY.peer, PRIMARY.incarnation)
    late = Declared("late", ["x"])
    ended = Ended()
    shipped = [
        PartitionLog("p", 1, [Begun(Definition()), late]),
        PartitionLog("q", 2, [Begun(Definition()), ended]),
    ]
    assert backup.append(caller, Append(7, 0, shipped)) == Done()
    for roster in later:
        backup.turn(roster)
    assert (backup.taken, backup.stages) == (["p"], ["late"])


def test_what_a_successor_only_passed_on_is_not_served_when_it_dies() -> None:
    """The peer that leaves has its shards still."""
    first, *between, last = rosters(in_sync=True, misses_that=False)
    backup = Backup(first)
    shipped = [PartitionLog(name, 1, [Begun(Definition())]) for name in "pq"]
    assert backup.append(Caller(PRIMARY.peer, PRIMARY.incarnation), Append(7, 0, shipped)) == Done()
    leaves = last.members + ("tcp://10.0.0.3:7101",)
    primaries = last.primaries.copy()
    primaries[last.bucket("p")] = leaves.index("tcp://10.0.0.3:7101")
    last = dataclasses.replace(
        last, members=leaves, incarnations=(*last.incarnations, 3), primaries=primaries
    )
    for roster in (*between, last):
        backup.turn(roster)
    assert backup.taken == ["q"]


def test_what_was_passed_on_to_who_has_the_shard_by_now_is_not_served_there() -> None:
    """The peer that left gave its shards here, not to its earlier successor, which left as well."""
    first, *later = rosters(in_sync=True, misses_that=False)

    def here(roster: Roster) -> Roster:
        primaries = roster.primaries.copy()
        primaries[roster.bucket("p")] = roster.members.index(BACKUP.peer)
        return dataclasses.replace(roster, primaries=primaries)

    backup = Backup(here(first))
    shipped = [PartitionLog(name, 1, [Begun(Definition())]) for name in "pq"]
    assert backup.append(Caller(PRIMARY.peer, PRIMARY.incarnation), Append(7, 0, shipped)) == Done()
    for roster in later:
        backup.turn(here(roster))
    assert backup.taken == ["q"]


def test_a_backup_passes_on_what_it_has_of_a_peer_that_leaves() -> None:
    first, *_ = rosters(in_sync=True, misses_that=False)
    backup = Backup(first)
    passed: list[str] = []
    sender: Any = backup.log_receiver.log_sender
    sender.passed_on = {}
    sender.pass_on = lambda store: passed.append(store.partition)
    sender.happened = lambda store, op: passed.append(type(op).__name__)
    caller = Caller(PRIMARY.peer, PRIMARY.incarnation)
    another = next(name for name in map(str, range(99)) if first.home(name) == BACKUP.peer)
    shipped = [PartitionLog(name, 1, [Begun(Definition())]) for name in (another, "p")]
    backup.append(caller, Append(7, 0, shipped))
    assert not passed and backup.log_receiver.has(PRIMARY.peer)
    backup.turn(dataclasses.replace(first, leaving=frozenset({PRIMARY.peer})))
    assert passed == ["p"] and not backup.log_receiver.has(PRIMARY.peer)
    sender.passed_on["p", 1] = None
    backup.append(caller, Append(7, 2, [PartitionLog("p", 1, [Declared("t", ["x"])])]))
    assert passed == ["p", "Declared"]
    backup.append(caller, Append(8, 0, []))  # its stream begins anew
    assert passed == ["p", "Declared", "Ended", "Ended"]


def test_a_backup_that_had_forgotten_a_broken_copy_says_that_it_was_lost() -> None:
    first, *later = rosters(in_sync=True, misses_that=False)
    backup = Backup(first)
    caller = Caller(PRIMARY.peer, PRIMARY.incarnation)
    backup.append(caller, Append(7, 0, [PartitionLog("p", 1, [Begun(Definition())])]))
    with pytest.raises(ProtocolError):
        backup.append(caller, Append(7, 1, [PartitionLog("q", 1, [Ended()])]))
    for roster in later:
        backup.turn(roster)
    assert not backup.taken and backup.lost == set(first.shards_of(PRIMARY.peer).tolist())


def test_a_copy_that_a_bug_left_changed_by_half_is_thrown_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The primary sends again what it got no answer to: not onto what there is of the first."""
    first, *later = rosters(in_sync=True, misses_that=False)
    backup = Backup(first)
    caller = Caller(PRIMARY.peer, PRIMARY.incarnation)
    shipped = Append(7, 1, [PartitionLog("p", 1, [Declared("t", ["x"])])])
    backup.append(caller, Append(7, 0, [PartitionLog("p", 1, [Begun(Definition())])]))

    def declares_and_fails(store: Store, name: str, fields: list[str]) -> None:
        declare(store, name, fields)
        raise KeyError(name)

    declare = Store.declare_stage
    with monkeypatch.context() as patched:
        patched.setattr(Store, "declare_stage", declares_and_fails)
        with pytest.raises(KeyError):
            backup.append(caller, shipped)
    with pytest.raises(ProtocolError, match="gap in the replication log"):
        backup.append(caller, shipped)
    for roster in later:
        backup.turn(roster)
    assert not backup.taken


def test_the_beginning_of_a_copy_is_not_served() -> None:
    """Shards that the primary had taken over just before: both copies of them were lost."""
    first, *later = rosters(in_sync=True, misses_that=False)
    assert first.bucket("p") != first.bucket("q")
    backup = Backup(first)
    shipped = [PartitionLog(name, 1, [Begun(Definition())]) for name in "pq"]
    assert backup.append(Caller(PRIMARY.peer, PRIMARY.incarnation), Append(7, 0, shipped)) == Done()
    *between, last = later
    lost = last.lost.copy()
    lost[last.bucket("p")] += 1
    for roster in (*between, dataclasses.replace(last, lost=lost)):
        backup.turn(roster)
    assert backup.taken == ["q"]
