"""Whoever asks a shard: again elsewhere, again where the link was remade, and until when."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dataplane.errors import (
    ClaimTimeout,
    DataplaneError,
    LeaseExpired,
    PartitionConflict,
    StaleEpoch,
    Unavailable,
)
from dataplane.memory.remote_references import RemoteReferences
from dataplane.metadata.roster.roster import Roster, Successors
from dataplane.peer.host import CallContext, Caller, call_context
from dataplane.peer.net.router import LEAST_S, MOST_WITHDRAWN, RETRY_S, TURN_S, Router
from dataplane.peer.requests.changes import Changes
from dataplane.peer.requests.outgoing_changes import OutgoingChanges
from dataplane.wire.journal import Settle
from dataplane.wire.messages import Admit, Body, Done, Drop, Request, Seal, Tag, Wait
from dataplane.wire.peering import Settled
from dataplane.wire.tables import Change, Owner, Rows

HERE, THERE, ELSEWHERE = (f"tcp://10.0.0.{n}:7101" for n in (1, 2, 3))


class Asked:
    """A router, its time, and the shards that it asks: each takes `takes_s`, and says the next."""

    host: Any
    mesh: Any

    def __init__(self, *says: Body | DataplaneError, takes_s: float = 0.0) -> None:
        self.says = list(says)
        self.takes_s = takes_s
        self.time = 100.0
        self.asked: list[tuple[str, Any, dict[str, Any]]] = []
        self.moves_to = ""
        """another roster comes as soon as one is waited for"""
        self.early_s = 0.0
        """a timer ends so long before its time, as those of an event loop may"""
        first = Roster.from_seeds([HERE, THERE, ELSEWHERE])
        self.host = SimpleNamespace(
            address=HERE,
            incarnation=1,
            caller=lambda session=0: Caller(HERE, 1, session),
            space=SimpleNamespace(hold=lambda chunks: None, release=lambda *chunks: None),
            put_by_clients=0,
            remote_references=RemoteReferences(),
            successors=Successors(),
            owner=Owner(HERE, 1),
            roster=at(first, THERE),
            now=lambda: self.time,
            another_roster=self.another_roster,
        )
        self.mesh = SimpleNamespace(
            call=self.call,
            tell=self.tell,
            linked=lambda address: SimpleNamespace(incarnation=0),
            spawn=asyncio.ensure_future,
            handlers={},
        )
        self.router = Router(self.host, self.mesh)
        self.outgoing = OutgoingChanges(self.host, self.mesh, self.router)
        self.settled: list[Change] = []
        """changes that a shard was asked about after their calls were over"""

    async def call(self, address: str, body: Any, **how: Any) -> Body:
        assert how["epoch"] == self.host.roster.epoch
        self.asked.append((address, body, how))
        self.time += self.takes_s
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if isinstance(said, DataplaneError):
            raise said
        return said

    async def tell(self, owner: Owner, body: Settle) -> Body:
        self.settled.append(body.change)
        return Settled(carried_out=False)

    async def another_roster(self, than: Roster, until: float) -> bool:
        assert than is self.host.roster
        await asyncio.sleep(0)
        if self.moves_to:
            self.host.roster, self.moves_to = at(than, self.moves_to), ""
        else:
            self.time = max(self.time, until - self.early_s)
        return self.host.roster is not than

    @property
    def homes(self) -> list[str]:
        return [address for address, _, _ in self.asked]


def at(roster: Roster, home: str) -> Roster:
    primaries = roster.primaries.copy()
    primaries[:] = roster.members.index(home)
    epoch = (roster.epoch[0], roster.epoch[1] + 1)
    return dataclasses.replace(roster, epoch=epoch, primaries=primaries)


@pytest.mark.parametrize(
    "change", [Tag("p", 1, Rows(bytes(16)), {"status": ["mine"]}), Drop("p", 1, groups=["g"])]
)
async def test_a_change_that_is_asked_for_again_elsewhere_has_its_number(
    change: Tag | Drop,
) -> None:
    """By which a shard whose peer died before it answered knows that it was carried out."""
    shards = Asked(Unavailable("went away"), Done())
    shards.moves_to = ELSEWHERE
    nothing: Any = None
    changes = Changes(shards.host, shards.outgoing, nothing, nothing, lambda entry: None)
    session: Any = SimpleNamespace(id=5, label="")
    for _ in range(2):
        asked = msgspec.structs.replace(change)
        await changes.change(session, Request(1, 5, 6, 6, 0, asked), asked)
        await asyncio.sleep(0)
    numbered = [body.change for _, body, _ in shards.asked]
    me = Owner(HERE, 1)
    assert numbered == [Change(me, 1, 1), Change(me, 1, 1), Change(me, 2, 2)]
    assert [one.number for one in shards.settled] == [1], "the peer that did not answer is asked"


@pytest.mark.parametrize("why", [StaleEpoch("behind"), Unavailable("away")])
async def test_a_shard_that_moved_is_asked_where_it_is(why: DataplaneError) -> None:
    shards = Asked(why, Done())
    shards.moves_to = ELSEWHERE
    assert await shards.router.ask(Seal("p", 1)) == Done()
    assert shards.homes == [THERE, ELSEWHERE] and shards.time == 100.0


async def test_a_shard_whose_peer_is_back_under_the_same_roster_is_asked_again() -> None:
    shards = Asked(Unavailable("away"), Unavailable("away"), Done())
    assert await shards.router.ask(Seal("p", 1)) == Done()
    assert shards.homes == [THERE] * 3 and shards.time == pytest.approx(100 + 2 * RETRY_S)


async def test_asking_ends_with_its_call_and_with_what_was_said_last() -> None:
    shards = Asked(Unavailable("away"), takes_s=2.0)
    ends = call_context.set(CallContext(107.0))
    try:
        with pytest.raises(Unavailable, match="away"):
            await shards.router.ask(Seal("p", 1), timeout_s=60)
    finally:
        call_context.reset(ends)
    assert 107.0 <= shards.time < 110.0
    left = [how["timeout_s"] for _, _, how in shards.asked]
    assert left[0] == 7.0 and min(left) > 0 and left == sorted(left, reverse=True)


@pytest.mark.parametrize("call", ["a read", "a change"])
async def test_a_call_with_a_late_deadline_is_asked_for_until_then(call: str) -> None:
    """It ended after 30 s, whatever `timeout=` its caller had given."""
    shards = Asked(*[Unavailable("away")] * 40, Done(), takes_s=2.0)
    ends = call_context.set(CallContext(shards.time + 170.0))
    try:
        if call == "a read":
            assert await shards.router.ask(Seal("p", 1)) == Done()
        else:
            body = Drop("p", 1, groups=["g"])
            assert await shards.outgoing.send(body, Caller(HERE, 1)) == Done()
    finally:
        call_context.reset(ends)
    assert shards.time > 180.0


async def test_nobody_is_asked_for_the_microseconds_that_a_timer_left() -> None:
    shards = Asked(Unavailable("away"))
    shards.early_s = 1e-5
    with pytest.raises(Unavailable):
        await shards.router.ask(Seal("p", 1), timeout_s=1.0)
    assert min([how["timeout_s"] for _, _, how in shards.asked]) >= LEAST_S


async def test_what_a_shard_refuses_is_no_reason_to_ask_again() -> None:
    shards = Asked(PartitionConflict("other stages"), Done())
    with pytest.raises(PartitionConflict):
        await shards.router.ask(Seal("p", 1))
    assert shards.homes == [THERE]


async def test_who_waits_asks_in_turns_at_its_age_also_while_nobody_can_be_reached() -> None:
    heard: list[str] = []
    turn = ClaimTimeout("two before you"), Unavailable("away"), ClaimTimeout("one before you")
    shards = Asked(*turn, takes_s=4.0)
    admit = Admit("p", 1, 1, 1, 1, timeout_ms=20_000, own=True)
    with pytest.raises(ClaimTimeout, match="one before"):
        await shards.router.wait(admit, hear=lambda said: heard.append(said.message))
    bodies = [body for _, body, _ in shards.asked]
    assert [body.timeout_ms for body in bodies[:3]] == [500, TURN_S * 1000, TURN_S * 1000]
    assert bodies[-1].timeout_ms < TURN_S * 1000 and heard[:3] == [said.message for said in turn]
    assert [body.waited_ms for body in bodies[:3]] == [0, 4000, 8000 + int(RETRY_S * 1000)]
    assert shards.time >= 118.0


async def test_who_waits_for_ever_is_met_in_the_end() -> None:
    shards = Asked(*[ClaimTimeout("not yet"), StaleEpoch("moves")] * 50, Done(), takes_s=5.0)
    assert await shards.router.wait(Wait("p", 1, "s", "rows", 3, timeout_ms=-1)) == Done()
    assert len(shards.asked) == 101


async def test_a_shard_is_told_until_it_has_answered() -> None:
    shards = Asked(*[Unavailable("away")] * 500, Done())
    await shards.router.tell(Seal("p", 1))
    assert len(shards.asked) == 501


async def test_calls_that_are_given_up_while_their_shard_is_away_are_told_of_together() -> None:
    """Each was a task of its own, which asked five times a second."""
    shards = Asked(*[Unavailable("away")] * 5, Done())
    router = shards.router
    given_up = [router.withdraw("p", 1, 1)]
    while len(shards.asked) < 2:
        await asyncio.sleep(0)
    numbers = [*range(2, MOST_WITHDRAWN + 3)]
    given_up += [router.withdraw("p", 1, number) for number in numbers]
    await asyncio.wait_for(asyncio.gather(*given_up), 10)
    told = [body.numbers for _, body, _ in shards.asked]
    assert told == [[1]] * 6 + [numbers[:MOST_WITHDRAWN], numbers[MOST_WITHDRAWN:]]
    assert not router._withdrawn


async def test_what_is_gone_needs_no_telling() -> None:
    shards = Asked(LeaseExpired("over"))
    await shards.router.tell(Seal("p", 1))
    assert shards.homes == [THERE]


async def test_telling_ends_with_its_peer() -> None:
    shards = Asked(Unavailable("away"))
    telling = shards.router.tell(Seal("p", 1))
    while len(shards.asked) < 5:
        await asyncio.sleep(0)
    telling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await telling
    assert telling.cancelled()
