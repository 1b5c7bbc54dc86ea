"""A put, a restore or the end of a lease that is asked for again at a successor: the peer of its
shard died before it answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.errors import (
    ChangeExpired,
    LeaseExpired,
    LimitExceeded,
    ShardFull,
    Unavailable,
)
from dataplane.metadata.shard import rows_out
from dataplane.metadata.shard.journal import apply, snapshot
from dataplane.metadata.shard.store import Store
from dataplane.metadata.tables import answers
from dataplane.peer.host import ByLabel, Caller, Entry
from dataplane.peer.requests.changes import Changes
from dataplane.peer.requests.checkpoints import Checkpoints
from dataplane.peer.requests.leases import Finishing, Lease, Leases
from dataplane.peer.requests.puts import Committed, Writing
from dataplane.peer.sessions import Session
from dataplane.peer.shards.partitions import Partitions
from dataplane.peer.shards.references import References
from dataplane.wire.checkpoint import Progress, Restore
from dataplane.wire.journal import Ended, LogRecord, Settle
from dataplane.wire.messages import Body, Drop, Dropped, Finish, Put, PutDone, Request, Want
from dataplane.wire.packed import U8, Array
from dataplane.wire.peering import Settled
from dataplane.wire.tables import Change, Definition, Owner, Rows, Values
from tests.metadata.observed import observed
from tests.metadata.stores import OWNERS, Column, brought, change, finish, named, take, values
from tests.peer.test_router import ELSEWHERE, HERE, Asked

ONCE = Definition(stages={"s": ["x"]}, free="acked")
NONE = Committed(Values(), np.zeros(0, U8))


class Shard:
    """A peer that has a partition, and what it lets go of at others."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.freed: list[tuple[Owner, list[int]]] = []
        entry = Entry(store)
        entry.inherited = set(store.answers)
        host: Any = SimpleNamespace(
            shard=lambda *of: entry,
            check_still=lambda *of: None,
            speak=lambda: None,
            remote_references=None,
            owner=None,
            now=lambda: 0.0,
        )
        mesh: Any = SimpleNamespace(handlers={})
        nothing: Any = None
        references = References(host, mesh, nothing)
        references.let_go = self._let_go  # type: ignore[method-assign]
        share: Any = SimpleNamespace(check=lambda values, has_new_rows: None)
        value_replicas: Any = SimpleNamespace(beforehand=self._beforehand)
        effects: Any = lambda entry: None  # noqa: E731
        writing = Writing(host, nothing, nothing, references, value_replicas, share, effects)
        host.entry = host.shard
        self.references = references
        router: Any = SimpleNamespace(mesh=mesh)
        self._handlers: dict[type[Body], Any] = {
            Put: writing.put_here,
            Finish: Finishing(nothing, nothing, writing).finish_here,
            Restore: Checkpoints(writing, nothing, router, nothing).restore_here,
            Settle: Changes(host, nothing, references, nothing, effects).settle_here,
        }

    def _let_go(self, owner: Owner, chunks: Array, counts: Array) -> bool:
        self.freed.append((owner, chunks.tolist()))
        return False

    def _asked(self, body: Body) -> Any:
        change: Change | None = body.change  # type: ignore[attr-defined]
        owner = change.caller if change is not None else Owner("tcp://c", 1)
        caller = Caller(owner.peer, owner.incarnation, 5)
        return self._handlers[type(body)](caller, msgspec.structs.replace(body))

    @contextlib.asynccontextmanager
    async def _beforehand(self, *of: Any) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        yield

    def change(self, body: Put | Finish | Restore | Settle) -> Any:
        return self._asked(body)


def successor_of(dead: Store, told: list[LogRecord]) -> Shard:
    """Of a peer that told its backup of these, and answered nobody."""
    successor = Store("p", dead.declared, 1)
    for op in told:
        apply(successor, op)
    return Shard(successor)


def died(definition: Definition, body: Put) -> Shard:
    """The successor of a peer that has carried this out."""
    dead, told = Store("p", definition, 1), list[LogRecord]()
    dead.emit = told.append
    assert Shard(dead).change(body) == PutDone()
    return successor_of(dead, told)


def chunks_of(number: int, count: int, field: str = "x", owner: Owner = OWNERS[0]) -> Values:
    """Values of so many rows, in chunks that no change of another number brings."""
    return brought([Column(field, values(count, first=1_000 * number))], [owner])


def body(rows: Rows, number: int = 7, floor: int = 1, **how: Any) -> Put:
    came = chunks_of(number, len(rows.keys) // 16)
    return Put("p", 1, rows, came, change=change(number, floor), **how)


async def test_it_has_its_number_there_and_another_put_another() -> None:
    shards = Asked(Unavailable("went away"), PutDone())
    shards.moves_to = ELSEWHERE
    shards.host.entry = lambda *of: None
    grants: Any = SimpleNamespace(commit=lambda *of: NONE, ahead=lambda *of: b"")
    nothing: Any = None
    writing = Writing(
        shards.host, grants, shards.outgoing, nothing, nothing, nothing, lambda entry: None
    )
    session: Any = SimpleNamespace(id=5)
    for _ in range(2):
        asked = Put("p", 1, named(["k"]))
        assert await writing.put(session, Request(1, 5, 6, 6, 0, asked), asked) == PutDone()
    assert [body.change.number for _, body, _ in shards.asked] == [1, 1, 2]


async def test_a_client_sets_no_field_that_only_peers_set() -> None:
    """A client that numbered its own change could give another caller a wrong answer."""
    store, told, session = Store("p", ONCE, 1), list[LogRecord](), Session(5, 0, "")
    store.put(body(named(["a"])))
    store.emit = told.append
    held = take(store, "s", Want("rows", 1, 1)).lease or 0
    told.clear()
    entry = Entry(store)
    host: Any = SimpleNamespace(
        entry=lambda *of: entry,
        caller=lambda session: Caller("tcp://a", 7, session),
        space=SimpleNamespace(unpin=lambda *of: None),
        put_by_clients=0,
        acked_by_clients=ByLabel(),
        now=lambda: 0.0,
    )
    grants: Any = SimpleNamespace(commit=lambda *of: NONE, ahead=lambda *of: b"")
    share: Any = SimpleNamespace(check=lambda values, has_new_rows: None)
    nothing: Any = None
    writing = Writing(host, grants, nothing, nothing, nothing, share, lambda entry: None)
    finishing = Finishing(nothing, leases := Leases(), writing)
    leases.open(Lease(held, "p", 1, "s", 1, session))
    request: Any = SimpleNamespace(rid=1)
    put = Put("p", 1, named(["k"]), reuse=True, client_s=2.0, change=change(9), holder=9)
    assert await writing.put(session, request, put) == PutDone()
    ack = Finish(held, "ack", partition="q", generation=2, client_s=2.0, change=change(9))
    assert await finishing.finish(session, request, ack) == PutDone()
    assert told[0] == Put("p", 1, named(["k"]), reuse=True, holder=5, client_s=2.0)
    assert isinstance(told[1], Finish)
    assert (told[1].partition, told[1].generation, told[1].change) == ("p", 1, None)
    assert store.answers.to(change(9)) is None


def test_a_retry_is_told_the_same_rows_that_were_passed_over() -> None:
    """What `ref.kept` counts."""
    dead, told = Store("p", ONCE, 1), list[LogRecord]()
    dead.emit = told.append
    shard = Shard(dead)
    assert shard.change(body(named(["a", "b"]))) == PutDone()
    finish(dead, take(dead, "s", Want("rows", 1, 1)))
    again = body(named(["a", "b", "c"]), number=8)
    told_again = [shard.change(again), shard.change(again), successor_of(dead, told).change(again)]
    assert told_again == [PutDone(gone=1, there=1)] * 3
    assert successor_of(dead, told).change(body(named(["c"]), number=9)) == PutDone(there=1)


def test_it_changes_nothing_there_and_what_it_brought_again_is_let_go() -> None:
    """Not what others have set since; nor do rows come again that were consumed since."""
    first = body(named(["a", "b"]), tags={"status": ["new", "new"]})
    successor = died(ONCE, first)
    successor.store.tag(named(["b"]), {"status": ["mine"]})
    finish(successor.store, take(successor.store, "s", Want("rows", 1, 1)))
    assert successor.change(first) == PutDone()
    assert successor.freed == [(OWNERS[0], [7_001, 7_002])]
    table = rows_out.table(successor.store, rows_out.read(successor.store)[0])
    assert (table.rows.names, table.tags) == (["b"], {"status": ["mine"]})
    assert [chunks.tolist() for _, chunks, _ in successor.store.freed()] == [[7_001]], "consumed"


@pytest.mark.parametrize("how", [{}, {"replace": True}])
def test_a_value_that_it_replaced_and_another_put_since_stays(how: dict[str, bool]) -> None:
    first = body(named(["a"]), **how)
    successor = died(Definition(free="drop"), first)
    later = body(named(["a"]), 8, replace=True)
    later.values = chunks_of(8, 1, owner=Owner("b", 8))
    assert successor.change(later) == PutDone()
    assert successor.change(first) == PutDone()
    assert [owner for owner, _, _ in successor.store.holdings()] == [Owner("b", 8)]


@pytest.mark.parametrize("sealed", [False, True])
def test_it_is_no_failure_where_rows_of_its_group_were_consumed_singly(sealed: bool) -> None:
    """Nobody gave them names by which they would be known: it seemed to add to a full group, or to
    a partition that takes no new rows."""
    rows = named(["a", "b"], ["g", "g"])
    rows.names = None
    first = body(rows)
    successor = died(Definition(stages={"s": ["x"]}, free="acked", group_size=2), first)
    finish(successor.store, take(successor.store, "s", Want("rows", 1, 1)))
    if sealed:
        successor.store.seal()
    assert successor.change(first) == PutDone()
    assert len(successor.store) == 1


def test_it_is_told_once_more_that_all_of_it_was_consumed_before() -> None:
    shard = Shard(Store("p", ONCE, 1))
    shard.change(body(named(["a"])))
    finish(shard.store, take(shard.store, "s", Want("rows", 1, 1)))
    for _ in range(2):
        assert shard.change(body(named(["a"]), 8)) == PutDone(gone=1)


def test_who_was_not_carried_out_is_told_so_there_as_anywhere() -> None:
    """It was taken for a repetition: the value that was there stayed, its own went, and its
    producer heard that all was well."""
    successor = died(Definition(free="drop"), body(named(["a"])))
    assert successor.change(body(named(["a"]), 8)) == PutDone(there=1)


ADDED = {"values": chunks_of(9, 2, "y")}
ENDS: list[dict[str, Any]] = [
    {"outcome": "ack"},
    {"outcome": "ack"} | ADDED,
    {"outcome": "ack", "index": bytes(4)},
    {"outcome": "drop"},
    {"outcome": "release"},
    {"outcome": "release"} | ADDED,
    {"outcome": "keep"} | ADDED,
]


@pytest.mark.parametrize("how", ENDS, ids=lambda how: f"{how['outcome']} {len(how)}")
def test_the_end_of_a_lease_is_answered_there_and_changes_nothing(how: dict[str, Any]) -> None:
    dead, told = Store("p", Definition(stages={"s": ["x"]}, free="drop"), 1), list[LogRecord]()
    dead.emit = told.append
    assert Shard(dead).change(body(named(["a", "b"]))) == PutDone()
    lease = take(dead, "s", Want("rows", 2, 2)).lease
    assert lease is not None
    end = Finish(lease, change=change(9), **how)
    assert Shard(dead).change(end) == PutDone()
    successor = successor_of(dead, told)
    before = observed(successor.store)
    assert successor.change(end) == PutDone()
    assert observed(successor.store) == before
    assert successor.freed == ([(OWNERS[0], [9_001, 9_002])] if "values" in how else [])


def test_a_lease_that_another_change_has_ended_is_no_repetition_there() -> None:
    dead, told = Store("p", Definition(stages={"s": ["x"]}, free="drop"), 1), list[LogRecord]()
    dead.emit = told.append
    assert Shard(dead).change(body(named(["a"]))) == PutDone()
    lease = take(dead, "s", Want("rows", 1, 1)).lease
    assert lease is not None
    assert Shard(dead).change(Finish(lease, "release", change=change(9))) == PutDone()
    with pytest.raises(LeaseExpired):
        successor_of(dead, told).change(Finish(lease, "ack", change=change(10)))


def test_rows_that_were_restored_there_are_not_restored_again() -> None:
    dead, told = Store("p", ONCE, 1), list[LogRecord]()
    dead.emit = told.append
    came = chunks_of(7, 2)
    asked = Restore("p", 1, named(["a", "b"]), came, {}, Progress(), change=change(7))
    assert Shard(dead).change(asked) == PutDone()
    successor = successor_of(dead, told)
    finish(successor.store, take(successor.store, "s", Want("rows", 1, 1)))
    assert successor.change(asked) == PutDone()
    assert len(successor.store) == 1
    assert successor.freed == [(OWNERS[0], [7_001, 7_002])]


async def test_who_asks_again_is_answered_as_the_first_time_also_there_and_at_copies_of_it() -> (
    None
):
    """How much stayed, passed over or dropped is told to people."""
    dead, told = Store("p", Definition(stages={"s": ["x"]}, free="drop"), 1), list[LogRecord]()
    dead.emit = told.append
    shard = Shard(dead)
    shard.change(body(named(["a", "b"])))
    answers = []
    for number in (9, 10):
        lease = take(dead, "s", Want("rows", 2, 2)).lease or 0
        added = chunks_of(number, 2, "y")
        end = Finish(lease, "ack", values=added, change=change(number))
        answers.append(shard.change(end))
        dead.reset("s")
    assert answers == [PutDone(), PutDone(kept={"y": 2})]
    drop = Drop("p", 1, named(["a"]), change=change(12))
    assert dead.carry_out(drop) == Dropped(1, 2 * 8_192)
    successor = successor_of(dead, told)
    copy = successor_of(dead, list(snapshot(successor.store)))
    for one in (shard, successor, copy):
        assert one.change(end) == PutDone(kept={"y": 2})
        assert one.store.answers.to(change(12)) == Dropped(1, 2 * 8_192)


async def test_one_that_comes_twice_while_second_copies_are_made_is_carried_out_once() -> None:
    shard = Shard(Store("p", Definition(stages={"s": ["x"]}, replicas=2), 1))
    asked = body(named(["a"]))
    twice = [shard.change(asked) for _ in range(2)]
    assert await asyncio.gather(*twice) == [PutDone()] * 2
    assert len(shard.store) == 1 and not shard.freed


async def test_one_that_was_given_up_while_second_copies_are_made_is_not_carried_out() -> None:
    shard = Shard(Store("p", Definition(stages={"s": ["x"]}, replicas=2), 1))
    asked = body(named(["a"]))
    coming = asyncio.ensure_future(shard.change(asked))
    await asyncio.sleep(0)
    assert shard.change(Settle("p", 1, change(7))) == Settled(carried_out=False)
    with pytest.raises(ChangeExpired, match="cancelled its change"):
        await coming
    assert not len(shard.store)


def test_an_answer_is_remembered_until_its_caller_says_that_it_has_it() -> None:
    """However many others there are: a retry of what was forgotten by count was refused, and a put
    that was never carried out with it."""
    shard = Shard(Store("p", Definition(free="drop"), 1))
    first, delayed = body(named(["a"]), 1), body(named(["b"]), 2)
    assert shard.change(first) == PutDone()
    for number in range(3, 1_000):
        assert shard.change(body(named([number]), number)) == PutDone()
    assert shard.change(delayed) == PutDone() and shard.change(first) == PutDone()
    assert len(shard.store) == len(shard.store.answers) == 999
    assert shard.change(body(named(["c"]), 1_000, floor=999)) == PutDone()
    assert len(shard.store.answers) == 2
    for late in (first, delayed, body(named(["d"]), 998)):
        with pytest.raises(ChangeExpired):
            shard.change(late)


def test_a_caller_that_has_too_many_changes_above_its_floor_is_refused_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "MAX_CHANGES_ABOVE_FLOOR", 4)
    shard = Shard(Store("p", Definition(free="drop"), 1))
    for number in range(1, 5):
        shard.change(body(named([number]), number))
    with pytest.raises(LimitExceeded, match="4 unconfirmed changes"):
        shard.change(body(named([5]), 5))
    for refused in range(6, 9):
        with pytest.raises(LimitExceeded):
            shard.change(Settle("p", 1, change(refused)))
    other = body(named([6]))
    other.change = change(5, caller=Owner("b", 8))
    assert shard.change(other) == PutDone()
    assert shard.change(body(named([7]), 5, floor=2)) == PutDone()
    assert len(shard.store) == 6 and len(shard.store.answers) == 5


def test_the_same_number_of_another_life_of_a_peer_is_another_change() -> None:
    """Two lives that began to count at one place silently lost each other's puts."""
    shard = Shard(Store("p", Definition(free="drop"), 1))
    address = OWNERS[0].peer
    for life in range(90):
        one = body(named([life]), 7)
        one.change = change(7, caller=Owner(address, life))
        assert shard.change(one) == PutDone()
    assert len(shard.store) == 90


@pytest.mark.parametrize("end", ["lost", "settled"])
def test_what_a_promoted_shard_remembers_is_what_the_old_one_did(end: str) -> None:
    dead, told = Store("p", Definition(free="drop"), 1), list[LogRecord]()
    dead.emit = told.append
    shard = Shard(dead)
    for number in range(1, 5):
        shard.change(body(named([number]), number, floor=min(number, 2)))
    if end == "lost":
        dead.lost(OWNERS[0])
    else:
        shard.change(Settle("p", 1, change(5)))
    successor = successor_of(dead, told)
    copy = successor_of(dead, list(snapshot(successor.store)))
    for one in (shard, successor, copy):
        assert one.store.answers.callers == (set() if end == "lost" else {OWNERS[0]})
        assert list(one.store.answers.records()) == list(dead.answers.records())
        if end == "settled":
            assert one.change(body(named([2]), 2, floor=2)) == PutDone()
            for expired in (1, 5):
                with pytest.raises(ChangeExpired):
                    one.change(body(named(["new"]), expired))


async def test_what_a_shard_had_no_room_for_is_asked_under_another_number() -> None:
    """It may wait for long, and holds no floor meanwhile."""
    shards = Asked(ShardFull("no room"), PutDone())
    shards.host.entry = lambda *of: None
    numbers = []

    async def wait_to_retry(*of: Any) -> None:
        numbers.append(asked.change)

    share: Any = SimpleNamespace(wait_to_retry=wait_to_retry, waited=lambda *of: None)
    nothing: Any = None
    writing = Writing(
        shards.host, nothing, shards.outgoing, nothing, nothing, share, lambda entry: None
    )
    session: Any = SimpleNamespace(id=5)
    asked = body(named(["k"]))
    assert await writing.store(session, asked, NONE, nothing) == PutDone()
    me = Owner(HERE, 1)
    assert [*numbers, asked.change] == [Change(me, 1, 1), Change(me, 2, 2)]


def partitions_of(*stores: Store) -> Partitions:
    """The partitions of a peer that serves all of them."""
    entries = {store.partition: Entry(store) for store in stores}
    space = SimpleNamespace(digests=SimpleNamespace(drop=lambda partition: None))
    host: Any = SimpleNamespace(
        entries=entries, serves=lambda partition: True, space=space, now=lambda: 0.0,
        meter_stages=lambda entry, now: None,
    )  # fmt: skip
    host.shard = lambda partition, generation: entries[partition]
    mesh: Any = SimpleNamespace(handlers={})
    nothing: Any = None
    return Partitions(host, mesh, nothing, nothing, lambda entry: None)


def test_a_retry_of_a_partitions_drop_hears_what_the_drop_took_also_from_a_successor() -> None:
    store, told = Store("p", ONCE, 1), list[LogRecord]()
    store.put(body(named(["k", "l"])))
    store.emit = told.append
    primary, successor = partitions_of(store), partitions_of()
    took = primary.drop("p", 1, change(8))
    assert took == Dropped(2, 2 * 8_192)
    (ended,) = told
    assert isinstance(ended, Ended)
    successor.ended(ended.change, Dropped(ended.rows, ended.bytes))
    for peer in (primary, successor):
        assert peer.drop("p", 1, change(8)) == took
        assert peer.drop("p", 1, change(9)) == Dropped(0, 0)


def test_a_drop_of_a_partition_that_was_settled_before_it_arrives_drops_nothing() -> None:
    """The drop waits on a call stream that is paused. Its caller gives up, and `Settle` overtakes
    it on the control stream: a partition that was used since was dropped all the same."""
    store = Store("p", ONCE, 1)
    store.put(body(named(["k", "l"])))
    shard, partitions = Shard(store), partitions_of(store)
    host: Any = partitions.host
    host.entry = lambda partition, generation: host.entries.get(partition)
    nothing: Any = None
    changes = Changes(host, nothing, shard.references, partitions, lambda entry: None)
    late = Drop("p", 1, change=change(8))
    caller = Caller(OWNERS[0].peer, OWNERS[0].incarnation, 5)
    assert shard.change(Settle("p", 1, change(8))) == Settled(carried_out=False)
    with pytest.raises(ChangeExpired, match="cancelled its change"):
        changes.change_here(caller, late)
    assert len(store) == 2
    again = Drop("p", 1, change=change(9))
    for _ in range(2):
        assert changes.change_here(caller, again) == Dropped(2, 2 * 8_192)
