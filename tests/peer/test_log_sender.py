"""The stream to the backup: how it begins, and what is sent again."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Iterator
from types import SimpleNamespace
from typing import Any, Literal, cast

import msgspec
import numpy as np
import pytest

from dataplane.errors import (
    BackPressure,
    DataplaneError,
    InternalError,
    ProtocolError,
    StaleEpoch,
    Unavailable,
)
from dataplane.events.ring import Ring
from dataplane.metadata.roster.roster import NO_BACKUP, Roster
from dataplane.metadata.shard import journal
from dataplane.metadata.shard.journal import apply
from dataplane.metadata.shard.store import Store
from dataplane.peer.host import Entry, Progress
from dataplane.peer.shards import log_sender
from dataplane.peer.shards.log_sender import ATTEMPT_S, MOST_RETRY_S, LogSender
from dataplane.wire.journal import Begun, Ended, LogRecord, decode, encode, encoded
from dataplane.wire.messages import Seal
from dataplane.wire.peering import Append, Rostered
from dataplane.wire.tables import Definition, Owner
from tests.metadata.observed import observed
from tests.metadata.stores import OWNERS, named, put

HERE, THERE = "tcp://10.0.0.1:7101", "tcp://10.0.0.2:7101"
BEGUN = encoded(encode(Begun(Definition({"s": ["tokens"]}))))


class Backup:
    """Answers as it is told to, and keeps what it got."""

    def __init__(self) -> None:
        self.got: list[Append] = []
        self.refusals: list[DataplaneError] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.told: list[tuple[Owner, Any]] = []
        self.hears = asyncio.Event()
        self.fails: list[Exception] = []

    def ops_of(self, partition: str) -> Iterator[LogRecord]:
        """All that it was told of a partition since the last stream began."""
        begun = max(n for n, body in enumerate(self.got) if body.first == 0)
        for body in self.got[begun:]:
            for one in body.partitions:
                if one.partition == partition:
                    yield from (decode(bytes(op)) for op in cast(list[msgspec.Raw], one.records))

    async def tell(self, owner: Owner, body: Any) -> None:
        self.told.append((owner, body))
        if self.fails:
            raise self.fails.pop()
        await self.hears.wait()

    def ask(self, address: str, body: Append, **_: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.call(address, body))

    async def call(self, address: str, body: Append, **_: Any) -> None:
        self.got.append(body)
        await asyncio.sleep(0)
        if self.refusals:
            raise self.refusals.pop()

    def spawn(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.ensure_future(work))
        return self.tasks[-1]


class Primary:
    def __init__(self, backup: Backup) -> None:
        seeds = Roster.from_seeds([HERE, THERE])
        self.roster = dataclasses.replace(seeds, incarnations=(1, 2))
        host: Any = SimpleNamespace(
            events=Ring(),
            address=HERE,
            roster=self.roster,
            entries={},
            progress=Progress(),
            now=lambda: 0.0,
            another_roster=lambda *_: asyncio.sleep(0),
        )
        self.host = host
        self.log_sender = LogSender(host, backup, None)  # type: ignore[arg-type]
        self.backup = backup

    async def begin(self) -> None:
        self.log_sender.turned(self.roster)
        while not self.log_sender.synced:
            await asyncio.sleep(0)

    async def until_confirmed(self) -> None:
        """The backup has all that was done."""
        while self.host.progress.confirmed < self.host.progress.done:
            await asyncio.sleep(0.01)

    def declare(self, replicas: Literal[1, 2] = 1) -> Entry:
        definition = Definition({"s": ["tokens"]}, replicas=replicas)
        entry = Entry(Store("p", definition, 1))
        self.host.entries["p"] = entry
        self.log_sender.watch(entry)
        return entry

    async def end(self) -> None:
        for task in self.backup.tasks:
            task.cancel()
        await asyncio.gather(*self.backup.tasks, return_exceptions=True)


@pytest.mark.parametrize("refusal", [StaleEpoch("another roster"), Unavailable("away")])
async def test_a_backup_that_cannot_take_a_message_yet_is_sent_the_same_again(
    refusal: DataplaneError,
) -> None:
    backup = Backup()
    primary = Primary(backup)
    await primary.begin()
    backup.refusals = [refusal]
    primary.declare()
    while len(backup.got) < 3:
        await asyncio.sleep(0)
    _, refused, again = backup.got
    assert refused == again and len(refused.partitions) == 1
    await primary.end()


async def test_a_record_that_the_backup_confirmed_after_a_failure_is_not_sent_again() -> None:
    backup = Backup()
    primary = Primary(backup)
    await primary.begin()
    there = primary.roster.owners[1]

    async def another_roster(*_: Any) -> None:
        primary.log_sender.heard(there, backup.got[-1].stream, 1)

    primary.host.another_roster = another_roster
    backup.refusals = [Unavailable("the reply was lost")] * 2
    primary.declare()
    await primary.until_confirmed()
    for _ in range(10):
        await asyncio.sleep(0)
    assert [len(one.partitions) for one in backup.got] == [0, 1, 1]
    put(primary.host.entries["p"].store, [1])  # the stream goes on
    await primary.until_confirmed()
    assert [one.first for one in backup.got] == [0, 0, 0, 1]
    await primary.end()


@pytest.mark.parametrize(
    ("replicas", "owner", "longer_s"),
    [(1, OWNERS[0], 0.0), (2, Owner("b", 1), 0.0), (2, OWNERS[0], ATTEMPT_S)],
)
async def test_a_record_is_late_after_some_time_also_if_the_backup_copies_values_for_it(
    replicas: Literal[1, 2], owner: Owner, longer_s: float
) -> None:
    """The records of partitions with replicas=2 were never late."""
    backup = Backup()
    primary = Primary(backup)
    now = 0.0
    primary.host.now, primary.host.owner = lambda: now, owner
    primary.log_sender.value_replicas = cast(Any, SimpleNamespace(note=lambda *_: None))
    await primary.begin()
    entry = primary.declare(replicas)
    await primary.until_confirmed()
    sender, replies = primary.log_sender, asyncio.Event()

    async def call(address: str, body: Append, **_: Any) -> None:
        await replies.wait()

    backup.call = call  # type: ignore[method-assign]
    put(entry.store, [1])  # a value of OWNERS[0]
    put(entry.store, [2])
    while not sender._under_way:
        await asyncio.sleep(0.01)
    now = 2.0 + longer_s
    assert not sender.is_late(2.0)
    now += 0.1  # the bytes of the record take less
    assert sender.is_late(2.0)
    replies.set()
    await primary.until_confirmed()
    assert not sender.is_late(2.0)
    await primary.end()


@pytest.mark.parametrize("failure", [InternalError("KeyError: 7"), ProtocolError("does not fit")])
async def test_a_backup_that_cannot_have_a_copy_gets_another_later_and_later_and_people_hear_of_it(
    failure: DataplaneError, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails at the first message, whatever is sent to it."""
    backup, waited = Backup(), list[float]()
    primary = Primary(backup)
    entry = Entry(Store("p", Definition({"s": ["tokens"]}), 1))
    primary.host.entries["p"] = entry
    backup.refusals = [failure] * 9

    async def another_roster(than: Roster, until: float) -> None:
        waited.append(until)

    primary.host.another_roster = another_roster
    await primary.begin()
    assert waited == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[MOST_RETRY_S] * 3]
    assert [one.first for one in backup.got] == [0] * 10
    assert len({one.stream for one in backup.got}) == 10  # nothing is taken to be there
    told = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(told) == 8 and failure.message in told[0].getMessage()
    backup.refusals = [failure] * 2
    waited.clear()
    put(entry.store, [1])
    primary.log_sender._send_soon()
    primary.log_sender._is_asked = True
    while not waited:
        await asyncio.sleep(0)
    assert waited == [0.5]  # it was in sync meanwhile
    await primary.end()


async def test_what_a_backup_has_no_room_for_is_told_to_people(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backup = Backup()
    primary = Primary(backup)
    backup.refusals = [BackPressure("no room for second copies")]
    await primary.begin()
    assert ["no room for second copies" in r.getMessage() for r in caplog.records] == [True]
    assert caplog.records[0].levelno == logging.WARNING
    await primary.end()


async def test_a_copy_that_takes_more_than_may_wait_for_a_backup_is_sent_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It began behind what was too much: with the next partition, and was called in sync without
    those before, or within one, and never was."""
    backup, keys = Backup(), list(range(100))
    primary = Primary(backup)
    for name in "pqr":
        store = Store(name, Definition({"s": ["tokens"]}), 1)
        put(store, keys if name == "p" else [1])
        primary.host.entries[name] = Entry(store)
    monkeypatch.setattr(log_sender, "MAX_PENDING_BYTES", 1000)
    await primary.begin()
    sent = [one for message in backup.got for one in message.partitions]
    assert [one.partition for one in sent] == ["p", "q", "r"]
    assert all(one.records[0] == BEGUN and len(one.records) == len(sent[0].records) for one in sent)
    assert not caplog.records and len({message.stream for message in backup.got}) == 1
    for key in range(200, 212):  # what was there counts until the backup has it
        put(store, [key])
    assert len(caplog.records) == 1
    await primary.end()


async def test_a_backup_that_falls_behind_too_far_gets_everything_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_sender, "MAX_PENDING_BYTES", 1000)
    monkeypatch.setattr(log_sender, "RETRY_S", 0.0)
    backup = Backup()
    primary = Primary(backup)
    await primary.begin()
    entry = primary.declare()
    for key in range(12):
        put(entry.store, [key])
    assert [one.levelno for one in caplog.records] == [logging.ERROR]
    assert not primary.log_sender.synced
    while not primary.log_sender.synced:
        await asyncio.sleep(0)
    last = backup.got[-1].stream
    anew = [one for message in backup.got if message.stream == last for one in message.partitions]
    assert anew[0].records[0] == BEGUN
    await primary.end()


async def test_a_backup_hears_of_a_stream_that_begins_with_nothing() -> None:
    backup = Backup()
    primary = Primary(backup)
    await primary.begin()
    assert [(one.first, one.partitions) for one in backup.got] == [(0, [])]
    await primary.end()


async def test_an_answer_to_the_backup_brings_what_that_does_not_have_and_does_not_wait() -> None:
    backup = Backup()
    primary = Primary(backup)
    await primary.begin()
    primary.host.progress.required = True
    sender, asks = primary.log_sender, primary.roster.owners[1]
    entry = primary.declare()
    first = sender.carry(asks, b"1")
    put(entry.store, ["a"])
    second = sender.carry(asks, b"1")
    again = sender.carry(asks, b"2")
    assert first and second and again
    assert (first.first, second.first, again.first) == (0, 1, 0)
    assert [len(one.records) for one in (*first.partitions, *second.partitions)] == [1, 1]
    assert sender.carry(primary.roster.owners[0], b"3") is None
    sender.heard(asks, second.stream, 2)
    assert primary.host.progress.is_settled and len(backup.got) == 1
    await primary.end()


async def test_a_large_operation_goes_in_a_message_of_its_own_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It went with the answer, and after 50 ms without a confirmation in a message as well."""
    backup = Backup()
    primary = Primary(backup)
    await primary.begin()
    primary.host.progress.required = True
    entry = primary.declare()
    put(entry.store, ["a"])
    await primary.host.progress.reached(time.monotonic() + 30)
    put(entry.store, ["b"])
    monkeypatch.setattr(log_sender, "CARRIED_BYTES", 10)
    monkeypatch.setattr(log_sender, "MESSAGE_BYTES", 10)
    assert primary.log_sender.carry(primary.roster.owners[1], b"1") is None
    await primary.host.progress.reached(time.monotonic() + 30)
    assert [len(one.records) for body in backup.got[1:] for one in body.partitions] == [2, 1]
    await primary.end()


async def test_who_else_waits_for_the_backup_relies_on_no_answer_that_may_be_on_its_way() -> None:
    backup = Backup()
    primary = Primary(backup)
    await primary.begin()
    primary.host.progress.required = True
    entry = primary.declare()
    put(entry.store, ["a"])
    carried = primary.log_sender.carry(primary.roster.owners[1], b"1")
    await primary.host.progress.reached(time.monotonic() + 30)
    assert carried and backup.got[1:] == [carried]
    await primary.end()


async def test_a_peer_says_in_sync_only_when_what_it_took_over_is_at_its_backup_too() -> None:
    backup = Backup()
    primary = Primary(backup)
    await primary.begin()
    assert primary.log_sender.has_all
    backup.refusals = [Unavailable("away")] * 3
    taken = Entry(Store("q", Definition({"s": ["tokens"]}), 1))
    put(taken.store, ["a"])
    primary.host.entries["q"] = taken
    primary.log_sender.take_over(taken)
    primary.log_sender.turned(primary.roster)
    while len(backup.got) < 4:
        assert primary.log_sender.has_all is None, (
            "it would be called in sync, and risen to primary"
        )
        await asyncio.sleep(0)
    while not primary.log_sender.has_all:
        await asyncio.sleep(0)
    assert len(backup.got) == 5 and primary.host.progress.is_settled
    await primary.end()


async def test_what_a_peer_has_copies_of_goes_to_its_backup_once_while_their_primary_leaves() -> (
    None
):
    backup = Backup()
    primary = Primary(backup)
    await primary.begin()
    copy = Entry(Store("q", Definition({"s": ["tokens"]}), 1))
    put(copy.store, ["a"])
    primary.log_sender.pass_on(copy.store)
    primary.log_sender.turned(primary.roster)
    assert primary.log_sender.has_all is None
    while not backup.got[-1].partitions:  # the dump is on its way
        await asyncio.sleep(0)
    primary.log_sender.happened(copy.store, Seal("q", 1, True))
    another = Store("q", Definition({"s": ["tokens"]}), 1)
    primary.log_sender.happened(another, Seal("q", 1, True))  # which was not passed on
    await primary.until_confirmed()
    assert primary.log_sender.has_all
    shipped = [one for body in backup.got for one in body.partitions]
    assert {one.partition for one in shipped} == {"q"} and shipped[0].records[0] == BEGUN
    assert shipped[-1].records[-1] == encoded(encode(Seal("q", 1, True)))
    primary.host.entries["q"] = copy
    primary.log_sender.take_over(copy)
    assert primary.log_sender.has_all and not primary.log_sender.passed_on
    put(copy.store, ["b"])
    assert primary.log_sender._end == sum(len(one.records) for one in shipped) + 1
    await primary.end()


async def test_of_two_copies_the_backup_ends_with_the_one_that_is_served() -> None:
    """Two peers leave at once, and both had them."""
    backup = Backup()
    primary = Primary(backup)
    await primary.begin()
    one, other = (Entry(Store("q", Definition({"s": ["tokens"]}), 1)) for _ in "ab")
    put(one.store, ["a"])
    primary.log_sender.pass_on(one.store)
    put(other.store, ["a", "b"])
    primary.host.entries["q"] = other
    primary.log_sender.take_over(other)
    primary.log_sender.turned(primary.roster)
    while not primary.log_sender.has_all:
        await asyncio.sleep(0)
    shipped = [one for body in backup.got[1:] for one in body.partitions]
    assert [one.records[0] == BEGUN for one in shipped] == [True, True]
    assert shipped[0].records[-1] == encoded(encode(Ended()))
    await primary.end()


@pytest.mark.parametrize("ended", [False, True])
async def test_a_new_backup_gets_what_is_passed_on_as_well(ended: bool) -> None:
    """What ends before its dump is told as ended: it may be on its way to the backup."""
    backup = Backup()
    primary = Primary(backup)
    copy = Entry(Store("q", Definition({"s": ["tokens"]}), 1))
    primary.log_sender.pass_on(copy.store)
    if ended:
        primary.log_sender.happened(copy.store, Ended())
    await primary.begin()
    assert [one.partition for one in backup.got[0].partitions] == ["q"] * (not ended)
    await primary.end()


async def test_a_snapshot_goes_in_pieces_and_what_happens_meanwhile_follows_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_sender, "MESSAGE_BYTES", 400)
    monkeypatch.setattr(log_sender, "SNAPSHOT_BYTES", 800)
    monkeypatch.setattr(journal, "PIECE_ROWS", 4)
    backup = Backup()
    primary = Primary(backup)
    entry, other = primary.declare(), Entry(Store("q", Definition({"s": ["tokens"]}), 1))
    primary.host.entries["q"] = other
    entry.store.restorer = other.store.restorer = 77
    primary.log_sender.watch(other)
    for n in range(50):
        put(entry.store, [f"before {n} {row}" for row in range(10)])
    primary.log_sender.turned(primary.roster)
    changes, most, turns = 0, 0, 0
    while not primary.log_sender.synced:
        turns += 1
        most = max(most, primary.log_sender._queued_bytes)
        if turns % 10 == 0 and changes < 20:
            put(entry.store, [f"meanwhile {changes}"])
            put(other.store, [f"elsewhere {changes}"])
            dropped = [f"before {n} {changes % 10}" for n in (7, 35)]
            entry.store.drop(named(dropped[changes // 10 :]))
            entry.store.restored()
            changes += 1
        assert primary.log_sender.carry(primary.roster.owners[1], b"1") is None
        await asyncio.sleep(0)
    assert changes == 20 and len(backup.got) > 20 and most < 8_000
    await primary.until_confirmed()
    for one in (entry.store, other.store):
        copy = Store(one.partition, one.declared, 1)
        begun, *ops = backup.ops_of(one.partition)
        assert begun == Begun(one.declared, 77)
        copy.restorer = 77
        for op in ops:
            apply(copy, op)
        assert copy.restorer == one.restorer == (0 if one is entry.store else 77)
        assert observed(copy) == observed(one)
    assert len(entry.store) == 500 and len(other.store) == 20
    await primary.end()


async def test_a_partition_that_ends_before_its_snapshot_is_told_as_ended() -> None:
    backup = Backup()
    primary = Primary(backup)
    entry = primary.declare()
    put(entry.store, ["a"])
    primary.log_sender.turned(primary.roster)
    entry.store.clear()
    primary.log_sender.happened(entry.store, Ended())
    entry.store.emit(Ended())  # type: ignore[misc]
    await primary.begin()
    assert list(backup.ops_of("p")) == [Begun(entry.store.declared), Ended()]
    await primary.end()


async def test_whose_backup_may_be_called_in_sync_answers_nothing_that_it_does_not_have() -> None:
    """The authority calls it so before the primary hears of that."""
    backup = Backup()
    primary = Primary(backup)
    primary.log_sender.turned(primary.roster)
    while not backup.got:
        await asyncio.sleep(0)
    early = primary.declare()  # its callers did not wait: the stream had not been taken yet
    while primary.log_sender.has_all is False:
        assert not primary.host.progress.required
        await asyncio.sleep(0)
    assert primary.log_sender.has_all is None
    while not primary.log_sender.has_all:
        await asyncio.sleep(0)
    assert primary.host.progress.is_settled
    put(early.store, ["a"])
    assert not primary.host.progress.is_settled
    await primary.end()


async def test_nor_while_the_roster_may_be_on_its_way_that_calls_it_in_sync() -> None:
    """Its primary said so, and then the copy broke."""
    backup = Backup()
    primary = Primary(backup)
    await primary.begin()
    comes = asyncio.Event()

    async def another_roster(*_: object) -> None:
        await comes.wait()
        await asyncio.sleep(0)

    primary.host.another_roster = another_roster
    backup.refusals = [ProtocolError("broken")] * 2
    primary.declare()
    told = primary.host.progress.reached(time.monotonic() + 30)
    while primary.log_sender.has_all:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not told.done()
    in_sync = dataclasses.replace(primary.roster, in_sync=np.ones_like(primary.roster.in_sync))
    primary.host.roster = in_sync
    primary.log_sender.turned(in_sync)
    comes.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not told.done() and primary.log_sender.has_all is False
    await primary.end()


async def test_nobody_hears_of_what_is_at_no_backup_while_one_that_begins_anew_may_be_promoted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another roster comes meanwhile, because somebody joins."""
    monkeypatch.setattr(log_sender, "RETRY_S", 0.0)
    backup = Backup()
    primary = Primary(backup)
    await primary.begin()
    in_sync = dataclasses.replace(primary.roster, in_sync=np.ones_like(primary.roster.in_sync))
    primary.host.roster = in_sync
    primary.log_sender.turned(in_sync)
    backup.refusals = [ProtocolError("broken")] * 2
    primary.declare()
    told = primary.host.progress.reached(time.monotonic() + 30)
    while primary.log_sender.synced or len(backup.tasks) < 3:
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
        primary.log_sender.turned(dataclasses.replace(in_sync))
    assert len(backup.got) == 3 and not told.done()
    primary.host.roster = primary.roster
    primary.log_sender.turned(primary.roster)
    await asyncio.sleep(0)
    assert backup.told and not told.done()  # until it knows that it is called so no more
    backup.hears.set()
    await told
    assert told.done()  # who dies now loses the partition, and that is told
    while not primary.log_sender.synced:
        await asyncio.sleep(0)
    assert primary.host.progress.is_settled
    await primary.end()


class Parting:
    """A primary whose backup was in sync until just now, and is none by the next roster."""

    def __init__(self) -> None:
        self.backup = Backup()
        self.primary = Primary(self.backup)
        self.before = self.turned_to(in_sync=np.ones_like(self.primary.roster.in_sync))

    def turned_to(self, **changes: Any) -> Roster:
        return dataclasses.replace(self.primary.roster, **changes)

    async def turn(self, **changes: Any) -> asyncio.Future[None]:
        """What is done when the change that comes next may be told."""
        await self.primary.begin()
        self.follow(self.before)
        self.primary.declare()
        assert not self.primary.host.progress.is_settled
        while not self.primary.host.progress.is_settled:
            self.primary.host.progress.reached(time.monotonic() + 30)
            await asyncio.sleep(0)
        nobody = np.full_like(self.primary.roster.backups, NO_BACKUP)
        self.follow(self.turned_to(backups=nobody, **changes))
        put(self.primary.host.entries["p"].store, ["a"])
        told: asyncio.Future[None] = self.primary.host.progress.reached(time.monotonic() + 30)
        for _ in range(10):
            await asyncio.sleep(0)
        return told

    def follow(self, roster: Roster) -> None:
        self.primary.host.roster = roster
        self.primary.log_sender.turned(roster)


async def test_nothing_leaves_before_a_backup_that_was_in_sync_knows_that_it_is_none() -> None:
    """Had it and a new keeper known of none but the roster before, it had taken over what it has,
    and what was told since was undone."""
    parting = Parting()
    sender, there = parting.primary.log_sender, parting.primary.roster.owners[1]
    told = await parting.turn()
    assert parting.backup.told == [(there, Rostered(parting.primary.host.roster.table))]
    assert not told.done() and sender.has_all is False and sender.carry(there, b"1") is None
    parting.backup.hears.set()
    await told
    await parting.primary.end()


async def test_who_was_the_backup_and_is_no_member_need_not_know() -> None:
    parting = Parting()
    told = await parting.turn(incarnations=(1, 3))
    assert told.done() and not parting.backup.told
    await parting.primary.end()


async def test_who_is_the_backup_again_before_it_knew_hears_that_it_is_not_in_sync() -> None:
    """And gets everything anew."""
    parting = Parting()
    told = await parting.turn()
    streams = {one.stream for one in parting.backup.got}
    parting.follow(parting.turned_to())
    await asyncio.sleep(0)
    assert len(parting.backup.told) == 2 and not told.done()
    parting.backup.hears.set()
    await told
    while not parting.primary.log_sender.has_all:
        await asyncio.sleep(0)
    assert len(streams) == 1 and parting.backup.got[-1].stream not in streams
    await parting.primary.end()


@pytest.mark.parametrize("confirms", [False, True])
async def test_a_late_backup_gets_the_rest_of_the_stream_when_it_knows_that_it_is_not_in_sync(
    confirms: bool,
) -> None:
    """It got everything again. confirms: it has the late record before it knows."""
    parting = Parting()
    backup, primary = parting.backup, parting.primary
    sender, progress = primary.log_sender, primary.host.progress
    await primary.begin()
    parting.follow(parting.before)
    entry = primary.declare()
    sender._go_on()
    while not progress.is_settled:
        await asyncio.sleep(0)
    replies, call = asyncio.Event(), backup.call

    async def slowly(address: str, body: Append, **how: Any) -> None:
        await replies.wait()
        await call(address, body, **how)

    backup.call = slowly  # type: ignore[method-assign]
    put(entry.store, ["a"])
    reply = progress.reached(time.monotonic() + 30)
    await asyncio.sleep(0)
    sender.demote()
    parting.follow(parting.turned_to())
    put(entry.store, ["b"])
    if confirms:
        replies.set()
        await reply
    later = progress.reached(time.monotonic() + 30) if not confirms else None
    for _ in range(10):
        await asyncio.sleep(0)
    assert sender.has_all is False and reply.done() == confirms
    backup.hears.set()
    await reply
    if later is not None:
        await later
    replies.set()
    await primary.until_confirmed()
    while not sender.has_all:
        await asyncio.sleep(0)
    assert len({one.stream for one in backup.got}) == 1
    assert sum(len(one.records) for body in backup.got for one in body.partitions) == 3
    await primary.end()


async def test_it_is_told_again_where_that_failed_whatever_it_was() -> None:
    parting = Parting()
    parting.backup.fails = [ValueError("a bug"), InternalError("theirs")]
    told = await parting.turn()
    parting.backup.hears.set()
    await told
    assert len(parting.backup.told) == 3
    await parting.primary.end()
