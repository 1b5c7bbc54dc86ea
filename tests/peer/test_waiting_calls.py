"""Calls that wait at the shard: what is asked twice, given up, overtaken, or asked of a peer that
is no primary any more."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest

from dataplane.errors import (
    ClaimTimeout,
    DeadlineExceeded,
    LeaseExpired,
    PartitionGone,
    ProtocolError,
    RowsLost,
    StageUndefined,
    StaleEpoch,
    StreamEnd,
)
from dataplane.events.ring import Ring
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.shard import inspection, rows_out
from dataplane.metadata.shard.claim_queue import KEEP_AFTER_S
from dataplane.metadata.shard.journal import apply, snapshot
from dataplane.metadata.shard.store import Store
from dataplane.peer.host import CallContext, Caller, Entry, call_context
from dataplane.peer.shards import waiting_calls
from dataplane.peer.shards.retries import SWEEP_S, Retries
from dataplane.peer.shards.waiting_calls import WaitingCalls
from dataplane.wire.messages import (
    Admit,
    Body,
    Claim,
    Claimed,
    Done,
    Finish,
    Losses,
    LossesDone,
    Wait,
    Want,
    Withdraw,
)
from dataplane.wire.tables import Definition, Owner, Shape
from tests.metadata.stores import finish, named, put

HERE, THERE = "tcp://10.0.0.1:7101", "tcp://10.0.0.2:7101"
DEFINITION = Definition({"s": ["tokens"]}, None, None, "acked", 1)
GROUPED = Definition({"s": ["tokens"]}, 2, None, "acked", 1)
CLAIMANT = Caller(THERE, 2, session=Owner(THERE, 2).first_session + 77)
NAME = next(
    f"p{i}" for i in itertools.count() if Roster.from_seeds([HERE, THERE]).home(f"p{i}") == HERE
)


class Shard:
    """A partition's primary, with nothing around it."""

    host: Any
    mesh: Any
    partitions: Any

    def __init__(self, definition: Definition = DEFINITION) -> None:
        self.roster = Roster.from_seeds([HERE, THERE])
        self.entry = Entry(Store(NAME, definition, 1))
        self.host = SimpleNamespace(
            address=HERE,
            owner=Owner(HERE, 1),
            roster=self.roster,
            entries={NAME: self.entry},
            silent=False,
            labels={},
            now=time.monotonic,
            events=Ring(),
            label=lambda holder, label: None,
            who=lambda holder: "it",
            entry=lambda name, generation: self.host.entries.get(name),
            shard=self.shard,
            gone=lambda name, generation: PartitionGone("it was dropped"),
            lost_rows=0,
            serves=lambda name: self.host.roster.home(name) == HERE,
        )
        self.producers = 0
        self.make()

    def make(self) -> None:
        self.mesh = SimpleNamespace(handlers={}, spawn=asyncio.ensure_future)
        self.partitions = SimpleNamespace()
        value_replicas: Any = SimpleNamespace(owner_gone=lambda entry, owner: None)
        self.calls = WaitingCalls(
            self.host,
            self.mesh,
            self.partitions,
            value_replicas,
            self.settle,
            lambda: self.producers,
            Retries(),
        )

    def shard(self, name: str, generation: int) -> Entry:
        if name not in self.host.entries:
            raise self.host.gone(name, generation)
        return self.entry

    def settle(self, entry: Entry) -> None:
        self.calls.changed(entry, entry.store.dirty())

    def put(self, *keys: int, groups: list[Any] | None = None) -> None:
        put(self.entry.store, list(keys), groups, even=[key % 2 == 0 for key in keys])
        self.settle(self.entry)

    def claim(self, number: int, count: int = 1, **more: Any) -> Any:
        want = Want("rows", count, count, more.pop("where", None))
        body = Claim(NAME, 1, "s", want, ["tokens"], number=number, label="it", **more)
        return self.calls.claim(CLAIMANT, body)

    def admit(self, number: int, count: int = 1, **more: Any) -> Any:
        body = Admit(NAME, 1, count, 1, 1, number=number, label="it", **more)
        return self.calls.admit(CLAIMANT, body)

    def withdraw(self, number: int) -> None:
        body = Withdraw(NAME, 1, [number])
        assert isinstance(self.calls.withdraw(CLAIMANT, body), Done)

    @property
    def ready(self) -> int:
        return self.entry.store.counts("s").ready

    def keys(self, answer: Body) -> list[Any]:
        assert isinstance(answer, Claimed) and answer.table.rows.names is not None
        return list(answer.table.rows.names)


async def test_a_claim_is_answered_at_once_or_when_its_rows_come() -> None:
    shard = Shard()
    shard.put(1, 2)
    assert shard.keys(shard.claim(5, 2)) == [1, 2]
    waits = shard.claim(6, 2)
    shard.put(3)
    assert not waits.done() and len(shard.calls) == 1
    shard.put(4)
    assert shard.keys(waits.result()) == [3, 4] and not len(shard.calls)
    assert shard.entry.store.lessees == {CLAIMANT.session}


async def test_who_waits_at_a_stage_without_a_name_is_told_and_keeps_nobody_from_it() -> None:
    """Our clients ask for none, but others may, where also calls of admit wait."""
    shard = Shard(GROUPED)
    shard.admit(3, 2)
    waits = shard.admit(4)
    with pytest.raises(StageUndefined):
        shard.calls.claim(CLAIMANT, Claim(NAME, 1, "", Want("rows", 1, 1), ["tokens"], number=5))
    with pytest.raises(StageUndefined):
        shard.calls.wait(CLAIMANT, Wait(NAME, 1, "", "rows", 1))
    put(shard.entry.store, [1, 2], ["g", "g"])
    shard.settle(shard.entry)
    assert shard.ready == 2 and not waits.done()


async def test_a_claim_that_is_asked_again_gets_the_lease_that_it_has() -> None:
    shard = Shard()
    shard.put(1, 2)
    first = shard.claim(5)
    again = shard.claim(5)
    assert again == first and shard.ready == 1
    shard.put(3)
    waits = shard.claim(6, 5)
    repeated = shard.claim(6, 5, waited_ms=50)
    assert isinstance(waits.exception(), StaleEpoch) and len(shard.calls) == 1
    shard.put(4, 5, 6)
    assert shard.keys(repeated.result()) == [2, 3, 4, 5, 6]


async def test_a_successor_answers_a_claim_with_the_lease_that_it_took_over() -> None:
    """The primary died after it had leased the rows, and before anybody heard of it."""
    before, after = Shard(), Shard()
    before.put(1, 2)
    first = before.claim(5, 2)
    for op in snapshot(before.entry.store):
        apply(after.entry.store, op)
    assert after.claim(5, 2) == first


async def test_what_was_granted_to_a_claim_that_was_given_up_goes_back() -> None:
    shard = Shard()
    shard.put(1)
    shard.claim(5)
    waits = shard.claim(6)
    shard.withdraw(5)
    assert shard.keys(waits.result()) == [1]
    shard.withdraw(6)
    shard.withdraw(6)
    assert shard.ready == 1


async def test_a_claim_that_arrives_after_its_withdrawal_waits_for_nobody() -> None:
    """It was overtaken on another connection."""
    shard = Shard()
    shard.withdraw(5)
    with pytest.raises(LeaseExpired):
        shard.claim(5)
    shard.put(1)
    assert shard.ready == 1 and not len(shard.calls)


async def test_a_copy_of_a_claim_that_was_answered_and_finished_waits_for_nobody() -> None:
    shard = Shard()
    shard.put(1)
    granted = shard.claim(5)
    shard.entry.store.finish(Finish(granted.lease, "ack"))
    with pytest.raises(LeaseExpired):
        shard.claim(5)
    assert not len(shard.calls)


async def test_producers_are_let_in_one_after_the_other_whatever_they_want() -> None:
    shard = Shard(GROUPED)
    assert shard.admit(5, 2).permit == 5  # two slots: a lag of 1, one group a version
    both, one = shard.admit(6, 2), shard.admit(7)
    shard.withdraw(5)
    assert both.result().permit == 6 and not one.done()
    again = shard.admit(7, waited_ms=50)
    assert isinstance(one.exception(), StaleEpoch) and len(shard.calls) == 1
    shard.withdraw(6)
    assert again.result().permit == 7 and not len(shard.calls)
    assert shard.admit(7) == again.result()


async def test_a_producer_keeps_its_place_between_its_turns_and_leaves_it_when_it_gives_up() -> (
    None
):
    shard = Shard(GROUPED)
    shard.admit(5, 2)
    call_context.set(CallContext(time.monotonic()))
    turn = shard.admit(6, 2)
    with pytest.raises(
        ClaimTimeout, match=r"this call wants 2 of 2 slots; taken: .*2 by permits of"
    ):
        await turn
    call_context.set(CallContext())
    younger = shard.admit(7)
    shard.entry.store.take_back([5])
    shard.settle(shard.entry)
    assert not younger.done()
    assert shard.admit(6, 2).permit == 6  # it was let in while it was about to ask again
    shard.withdraw(6)
    assert younger.result().permit == 7
    with pytest.raises(LeaseExpired, match="withdrew this admit call"):
        shard.admit(6, 2)
    with pytest.raises(ClaimTimeout):
        await shard.admit(8, 2, timeout_ms=0)
    assert not len(shard.calls)


async def test_a_call_whose_serving_fails_is_served_soon_and_those_before_it_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shard, told = Shard(), list[int]()
    first, second = shard.claim(5), shard.claim(6)

    def table_of(*of: Any) -> Any:
        told.append(len(told))
        if len(told) == 2:
            raise RuntimeError("a bug")
        return real(*of)

    real = rows_out.table_of
    monkeypatch.setattr(rows_out, "table_of", table_of)
    shard.put(1, 2)
    assert shard.keys(first.result()) == [1] and not second.done()
    assert shard.ready == 1, "the row that the second claim was granted is back"
    async with asyncio.timeout(2 * SWEEP_S):
        assert shard.keys(await second) == [2]
    (line,) = caplog.records
    assert (
        "serving waiting claims of stage 's' failed" in line.message and line.exc_info is not None
    )


async def test_a_call_of_admit_that_fails_holds_up_nobody_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard = Shard(GROUPED)
    admit, is_broken = Store.admit, True

    def fails_for_one(self: Store, number: int, *more: Any) -> bool:
        if number == 5 and is_broken:
            raise RuntimeError("a bug")
        return admit(self, number, *more)

    monkeypatch.setattr(Store, "admit", fails_for_one)
    broken = shard.admit(5)
    assert shard.admit(6).permit == 6, "it does not wait for the one before"
    is_broken = False
    async with asyncio.timeout(2 * SWEEP_S):
        assert (await broken).permit == 5


async def test_a_rank_that_cannot_join_a_plan_holds_up_no_other_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard = Shard()
    join, is_broken = Store.join, True

    def fails_for_one(self: Store, stage: str, shape: Shape, rank: int, *more: Any) -> Any:
        if rank == 0 and is_broken:
            raise RuntimeError("a bug")
        return join(self, stage, shape, rank, *more)

    monkeypatch.setattr(Store, "join", fails_for_one)
    broken, other = (shard.claim(5 + rank, plan=Shape(2), rank=rank) for rank in range(2))
    shard.put(1)
    shard.entry.store.seal()
    shard.settle(shard.entry)
    assert isinstance(other.result(), Claimed)
    is_broken = False
    async with asyncio.timeout(2 * SWEEP_S):
        assert isinstance(await broken, Claimed)


async def test_claims_that_are_over_are_known_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_calls, "MAX_PAST", 2)
    shard = Shard()
    for number in (1, 2, 3):
        shard.withdraw(number)
    assert list(shard.calls._past) == [2, 3]


async def test_rows_dropped_before_a_repeated_claim_was_answered_are_others() -> None:
    shard = Shard()
    shard.put(1, 2, 3, 4)
    shard.claim(5, 2)
    shard.entry.store.drop(rows=named([1]))
    assert shard.keys(shard.claim(5, 2)) == [2, 3]


async def test_a_claim_that_does_not_wait_is_told_so() -> None:
    shard = Shard()
    with pytest.raises(ClaimTimeout):
        await shard.claim(5, timeout_ms=0)
    shard.put(1)
    assert shard.ready == 1
    assert shard.keys(shard.claim(6, timeout_ms=0)) == [1]


async def test_who_waits_at_a_peer_that_lost_the_shard_asks_elsewhere() -> None:
    shard = Shard()
    waits = shard.claim(5)
    asks = asyncio.ensure_future(shard.calls.wait(CLAIMANT, Wait(NAME, 1, "s", "rows", 3)))
    await asyncio.sleep(0)
    shard.calls.turned()
    assert not waits.done()  # another roster, the same primary
    shard.host.roster = dataclasses.replace(
        shard.roster, primaries=shard.roster.backups, backups=shard.roster.primaries
    )
    shard.calls.turned()
    assert isinstance(waits.exception(), StaleEpoch)
    with pytest.raises(StaleEpoch):
        await asks


async def test_who_waits_for_a_shard_that_moved_waits_no_longer_than_its_call_lives() -> None:
    shard = Shard()
    call_context.set(CallContext(time.monotonic() + 0.05))
    asked_before_it_moved = Wait(NAME, 1, "s", "rows", 3, timeout_ms=3_600_000)
    with pytest.raises(ClaimTimeout):
        await asyncio.wait_for(shard.calls.wait(CLAIMANT, asked_before_it_moved), 20)


async def test_a_peer_that_hands_its_shards_over_grants_nothing() -> None:
    shard = Shard()
    waits = shard.claim(5)
    shard.host.silent = True
    shard.put(1)
    assert not waits.done() and shard.ready == 1


async def test_a_rank_that_acked_its_part_of_a_plan_takes_that_back_no_more() -> None:
    """By no word of another peer's, or of a client that is none of ours: its rows were trained on,
    and the plan would wait for it again."""
    shard, shape = Shard(), Shape(2, 1)
    shard.put(1, 2)
    shard.entry.store.seal()
    first = shard.claim(5, plan=shape, rank=0)
    shard.claim(6, plan=shape, rank=1)
    store = shard.entry.store
    store.finish(Finish(first.lease, "ack"))
    with pytest.raises(LeaseExpired):
        store.finish(Finish(first.lease, "leave"))
    shard.withdraw(5)
    member = store.leases.member(first.lease)
    assert member is not None and member.acked
    shard.withdraw(6)
    second = shard.claim(7, plan=shape, rank=1)
    store.finish(Finish(second.lease, "ack"))
    assert not store.leases.holders and store.counts("s").outstanding == 0


async def test_claims_and_leases_of_a_lost_peer_end() -> None:
    shard = Shard()
    shard.put(1, 2)
    shard.claim(5)
    waits = shard.claim(6, 9)
    shard.calls.gone(Owner(THERE, 2))
    assert waits.done() and not len(shard.calls) and shard.ready == 2


async def test_a_wait_for_groups_ends_where_those_that_are_left_are_taken_row_by_row() -> None:
    shard = Shard()
    put(shard.entry.store, [1, 2], ["g", "g"])
    shard.claim(5)
    waits = shard.calls.wait(CLAIMANT, Wait(NAME, 1, "s", "groups", 1))
    assert not waits.done()
    shard.entry.store.seal()
    shard.settle(shard.entry)
    assert isinstance(waits.exception(), StreamEnd)


async def test_the_end_of_a_stage_is_told_with_what_was_lost() -> None:
    shard = Shard()
    waits, far = shard.claim(5), shard.claim(6)
    shard.entry.store.seal()
    shard.settle(shard.entry)
    assert isinstance(waits.exception(), StreamEnd) and isinstance(far.exception(), StreamEnd)
    shard.entry.store.stage("s").lost = 2
    shard.entry.store.losses.note(["a", "b"])
    with pytest.raises(RowsLost, match=r"2 rows .*'a'.* were lost"):
        shard.claim(7)


async def test_a_dropped_partition_ends_all_that_wait() -> None:
    shard = Shard()
    waits = shard.claim(5)
    shard.partitions.on_drop(shard.entry)
    assert isinstance(waits.exception(), PartitionGone)


async def test_who_waits_for_losses_hears_of_them_at_once_and_of_the_end() -> None:
    shard = Shard()

    def losses(after: int = 0, timeout_ms: int = -1) -> Any:
        return shard.calls.losses(CLAIMANT, Losses(NAME, 1, after, timeout_ms))

    waits = losses()
    shard.put(1, 2)
    assert not waits.done()
    shard.entry.store.losses.note(["a", "b"])
    shard.calls.changed(shard.entry, set())
    assert waits.result() == LossesDone(2, ["a", "b"])
    assert losses(1).result() == LossesDone(2, ["b"])
    with pytest.raises(DeadlineExceeded, match="no row of partition"):
        await asyncio.wait_for(losses(2, 10), 20)
    waits = losses(2)
    with pytest.raises(ProtocolError, match="invalid position -1"):
        losses(-1)
    shard.entry.store.seal()
    shard.settle(shard.entry)
    assert not waits.done()
    finish(shard.entry.store, shard.claim(5, 2))
    shard.settle(shard.entry)
    assert waits.result() == LossesDone(2, ended=True)


async def test_who_waits_for_losses_asks_elsewhere_where_the_shard_went_and_ends_with_it() -> None:
    shard = Shard()
    waits = shard.calls.losses(CLAIMANT, Losses(NAME, 1, 0, -1))
    shard.host.roster = dataclasses.replace(
        shard.roster, primaries=shard.roster.backups, backups=shard.roster.primaries
    )
    shard.calls.turned()
    assert isinstance(waits.exception(), StaleEpoch)
    waits = shard.calls.losses(CLAIMANT, Losses(NAME, 1, 4, -1))
    shard.partitions.on_drop(shard.entry)
    assert waits.result() == LossesDone(4, ended=True)


async def test_a_claim_or_wait_by_no_filter_is_refused_and_others_wait_on() -> None:
    shard = Shard()
    waits = shard.claim(5)
    with pytest.raises(ProtocolError):
        shard.claim(6, where=["no such", "filter"])
    with pytest.raises(ProtocolError):
        body = Wait(NAME, 1, "s", "rows", 1, where=["no such", "filter"])
        shard.calls.wait(CLAIMANT, body)
    shard.put(1)
    assert shard.keys(waits.result()) == [1]


def before_others(definition: Definition = DEFINITION) -> tuple[Shard, Any]:
    """A claim of even rows that has been short for long, and a younger one for any."""
    shard = Shard(definition)
    shard.claim(1, 3, where=["eq", "even", True], waited_ms=2_000)
    return shard, shard.claim(99)


async def test_who_begins_to_wait_for_a_key_makes_nobody_look_again_at_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waits ask again every 5 s: a thousand of them took a tenth of a core, four thousand all."""
    looked = list[Any]()
    really = inspection.key_status

    def key_status(store: Store, name: Any) -> Any:
        looked.append(name)
        return really(store, name)

    monkeypatch.setattr(inspection, "key_status", key_status)
    shard = Shard()
    call_context.set(CallContext(time.monotonic() + 60.0))
    waits = [
        shard.calls.wait(CLAIMANT, Wait(NAME, 1, "", "rows", timeout_ms=60_000, key=key))
        for key in range(20)
    ]
    assert looked == list(range(20))
    shard.put(7)
    assert [key for key, one in enumerate(waits) if one.done()] == [7]
    shard.partitions.on_drop(shard.entry)
    await asyncio.gather(*waits, return_exceptions=True)


async def test_what_a_claim_keeps_goes_to_others_while_producers_wait_for_room() -> None:
    shard, waits = before_others()
    shard.put(100)
    assert not waits.done()
    shard.calls.producers_wait()
    assert shard.keys(waits.result()) == [100]


async def test_what_a_claim_keeps_goes_to_others_while_a_producer_waits_for_fewer() -> None:
    shard, waits = before_others()
    shard.put(100)
    assert not waits.done()
    body = Wait(NAME, 1, "s", "rows", below=1)
    asks = asyncio.ensure_future(shard.calls.wait(CLAIMANT, body))
    await asyncio.sleep(0)
    assert shard.keys(waits.result()) == [100]
    asks.cancel()
    await asyncio.gather(asks, return_exceptions=True)


async def test_what_a_claim_keeps_goes_to_others_while_a_producer_asks_again_and_again() -> None:
    shard, waits = before_others(Definition({"s": ["tokens"]}, 1, None, "acked", 1))
    shard.put(100, groups=[1])
    assert shard.admit(5).permit == 5
    assert not waits.done()
    with pytest.raises(ClaimTimeout):
        await shard.admit(6, timeout_ms=0)
    assert shard.keys(waits.result()) == [100]


async def test_what_rows_lack_is_found_in_pieces_while_other_calls_are_served() -> None:
    """With 60,000 blocks it took 146 ms, in which the peer served nobody."""
    shard = Shard(Definition({"s": ["tokens"], "train": ["tokens", "reward"]}, None, None))
    for key in range(13):
        shard.put(2 * key, 2 * key + 1)
    looks = list[inspection.Look]()

    class Look(inspection.Look):
        def __init__(self, *of: Any) -> None:
            looks.append(self)
            super().__init__(*of)

        def go_on(self) -> bool:
            asyncio.get_running_loop().call_soon(served.append, None)
            return super().go_on()

    served = list[None]()
    want = Want("rows", 1, 1)
    body = Claim(NAME, 1, "train", want, ["tokens"], number=6, label="it", timeout_ms=0)
    with mock.patch.object(inspection, "PIECE", 4), mock.patch.object(inspection, "Look", Look):
        calls = [
            shard.calls.claim(CLAIMANT, msgspec.structs.replace(body, number=number))
            for number in (6, 7)
        ]
        waits = [one for one in calls if isinstance(one, asyncio.Future)]
        said = await asyncio.gather(*waits, return_exceptions=True)
    assert [one.details["missing"] for one in said if isinstance(one, ClaimTimeout)] == [
        {"reward": 26},
        {"reward": 26},
    ]
    assert len(looks) == 1 and len(served) == 4  # other work came in between
    assert not len(shard.calls)


async def test_a_turn_also_ends_where_looking_for_the_reason_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard = Shard()
    failing = mock.Mock(side_effect=KeyError("a bug"))
    monkeypatch.setattr(inspection, "missing", failing)
    turns = [shard.claim(5, 2, timeout_ms=0), shard.claim(6, 2, timeout_ms=10)]
    for turn in turns:
        with pytest.raises(KeyError):
            await asyncio.wait_for(asyncio.shield(turn), 10)
    shard.put(1, 2)
    assert shard.keys(shard.claim(6, 2)) == [1, 2]  # it had kept its place, which 5 has not


async def test_a_call_that_does_not_wait_leaves_nobody_behind_it_waiting() -> None:
    shard = Shard(GROUPED)
    shard.admit(1)
    large, small = shard.admit(2, 2, timeout_ms=0), shard.admit(3)  # of 2 slots, 1 is left
    assert not small.done()
    with pytest.raises(ClaimTimeout):
        await large
    assert small.result().permit == 3


async def test_a_claim_that_does_not_wait_keeps_nothing_once_it_is_over() -> None:
    """The look for the reason may take over a second, after which rows are kept for the claim."""
    shard = Shard()
    shard.put(1)
    large = shard.claim(5, 2, timeout_ms=0)
    shard.host.now = lambda: time.monotonic() + 2 * KEEP_AFTER_S
    small = shard.claim(6)
    assert not small.done()
    with pytest.raises(ClaimTimeout):
        await large
    assert shard.keys(small.result()) == [1]


async def test_a_turn_that_ends_says_why_and_leaves_the_claim_its_place() -> None:
    shard = Shard()
    shard.claim(6, 3)
    turns = [shard.claim(7, 2, timeout_ms=10), shard.claim(8, 2, timeout_ms=10)]
    said = await asyncio.gather(*turns, return_exceptions=True)
    assert [one.details["before"] for one in said if isinstance(one, ClaimTimeout)] == [1, 2]
    shard.withdraw(6)
    shard.put(1, 2)
    assert shard.keys(shard.claim(7, 2)) == [1, 2]
    assert not shard.claim(8, 2).done()
