"""Claims of a host's clients: whom they ask, again and again, and what is told of the given-up."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import (
    ClaimTimeout,
    LeaseExpired,
    RowsGone,
    RowsLost,
    StaleEpoch,
    StreamEnd,
    Unavailable,
)
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.shard.reasons import Notices
from dataplane.peer.host import CallContext, Caller, call_context
from dataplane.peer.net import router as router_module
from dataplane.peer.net.router import Router
from dataplane.peer.requests import reads as reads_module
from dataplane.peer.requests.claims import Claims
from dataplane.peer.requests.directory import Directory
from dataplane.peer.requests.leases import Finishing, Lease, Leases
from dataplane.peer.requests.reads import Reading
from dataplane.peer.requests.waits import Waits
from dataplane.peer.sessions import Session
from dataplane.wire.messages import Body, Claim, Claimed, Request, Unpin, Want, Withdraw
from dataplane.wire.tables import Owner, Rows, Shape, Table

HERE, THERE, ELSEWHERE = (f"tcp://10.0.0.{n}:7101" for n in (1, 2, 3))
REQUEST = Request(1, 7, 1, 1, 0, Unpin([]))
GRANTED = Claimed(31, 0, Table(Rows(b"k" * 16, ["a"])))
NOT_YET = ClaimTimeout(
    "not have enough rows yet", ready=0, units=2, put_rows=2, producers=[(7, 2, 1.0)]
)
"""What a shard says at the end of a turn."""


class People:
    """The sessions of this host."""

    def identify(self, session: int) -> tuple[str, float]:
        return "pid 7 on host a", 0.0


class Asker:
    """A peer that asks others: each request is answered when the test says so, and with what."""

    host: Any
    reading: Any

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(router_module, "RETRY_S", 0.0)
        self.asked: list[tuple[str, Claim, asyncio.Future[Body]]] = []
        self.told: list[tuple[str, Withdraw]] = []
        self.released: list[int] = []
        self.hears = asyncio.Event()
        self.hears.set()
        self.passed_s = 0.0
        before = Roster.from_seeds([HERE, THERE, ELSEWHERE])
        self.roster = self.at(before, THERE)
        loop = asyncio.get_running_loop()
        self.host = SimpleNamespace(
            address=HERE,
            incarnation=1,
            owner=Owner(HERE, 1),
            caller=lambda session=0: Caller(HERE, 1, session),
            numbers=itertools.count(1),
            solo=False,
            silent=False,
            roster=self.roster,
            now=lambda: loop.time() + self.passed_s,
            notices=Notices(),
            space=SimpleNamespace(quota_bytes=(0, 0, 1 << 20)),
            serves=lambda name: self.host.roster.home(name) == HERE,
            entry=lambda name, generation: None,
            another_roster=self.another_roster,
        )
        self.session = Session(7, 0, "it")
        others: Any = SimpleNamespace(name=lambda address: "b")
        self.mesh = mesh = SimpleNamespace(
            call=self.call, spawn=asyncio.ensure_future, handlers={}, others=others
        )
        self.leases = leases = Leases()
        finishing: Any = SimpleNamespace(
            leases=leases, release=lambda session, lease: self.released.append(lease)
        )
        room: Any = SimpleNamespace(needed=lambda table: 0, back=lambda number: None)
        router = Router(self.host, mesh)  # type: ignore[arg-type]
        nothing: Any = SimpleNamespace(pulls=None)
        self.reading = Reading(self.host, router, leases, nothing)
        self.reading.resolve = lambda table, session: (table, 0)
        directory = Directory(self.host, mesh, People(), None)  # type: ignore[arg-type]
        waits = Waits(self.host, router, [], directory)
        more: Any = finishing, self.reading, waits, room
        self.claims = Claims(self.host, router, *more)
        writing: Any = SimpleNamespace(host=self.host, mesh=mesh, grants=None)
        self.finishing = Finishing(router, leases, writing)

    @staticmethod
    def at(roster: Roster, home: str) -> Roster:
        """The same members; the partition is served there."""
        primaries = roster.primaries.copy()
        primaries[:] = roster.members.index(home)
        epoch = (roster.epoch[0], roster.epoch[1] + 1)
        return dataclasses.replace(roster, epoch=epoch, primaries=primaries)

    def turn(self, home: str) -> None:
        self.host.roster = self.at(self.host.roster, home)

    async def call(self, address: str, body: Any, **how: Any) -> Any:
        if not isinstance(body, Claim):
            self.told.append((address, body))
            return await self.hears.wait()
        assert how["epoch"] == self.host.roster.epoch
        assert how["caller"].session == 7
        self.asked.append((address, body, asyncio.get_running_loop().create_future()))
        answer = self.asked[-1][2]
        await asyncio.wait([answer], timeout=how["timeout_s"])
        if not answer.done():
            raise Unavailable("it did not answer")
        return answer.result()

    def later(self, seconds: float) -> None:
        self.passed_s += seconds

    async def another_roster(self, than: Roster, until: float) -> bool:
        await asyncio.sleep(0)
        return False

    def claim(self, timeout_ms: int = -1, plan: Shape | None = None) -> asyncio.Future[Body]:
        body = Claim("p", 1, "s", Want("rows", 1, 1), timeout_ms=timeout_ms, plan=plan)
        return asyncio.ensure_future(self.claims.claim(self.session, REQUEST, body))

    async def until_asked(self, times: int) -> asyncio.Future[Body]:
        async with asyncio.timeout(20):
            while len(self.asked) < times:
                await asyncio.sleep(0)
        return self.asked[times - 1][2]


async def test_a_claim_is_asked_again_however_often_nobody_can_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may wait for days. Each time under its number, so that it is granted but once."""
    asker = Asker(monkeypatch)
    claiming = asker.claim()
    for times in range(1, 20):
        asked = await asker.until_asked(times)
        asked.set_exception(Unavailable("away") if times % 2 else StaleEpoch("behind"))
    (await asker.until_asked(20)).set_result(GRANTED)
    assert isinstance(await claiming, Claimed) and not asker.told
    assert len({body.number for _, body, _ in asker.asked}) == 1


async def test_a_claim_whose_shard_moves_asks_there_and_keeps_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asker = Asker(monkeypatch)
    claiming = asker.claim()
    asked = await asker.until_asked(1)
    asker.turn(ELSEWHERE)
    asked.set_exception(StaleEpoch("the partition is now served by another peer"))
    (await asker.until_asked(2)).set_result(GRANTED)
    await claiming
    (first, one, _), (then, other, _) = asker.asked
    assert (first, then) == (THERE, ELSEWHERE) and one.number == other.number
    assert one.fields is None and one.most_bytes == 1 << 20


async def test_a_claim_that_is_given_up_is_withdrawn_where_its_shard_is_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asker = Asker(monkeypatch)
    claiming = asker.claim()
    await asker.until_asked(1)
    asker.host.roster = asker.at(asker.host.roster, ELSEWHERE)
    claiming.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await claiming
    await asyncio.sleep(0)
    assert asker.told == [(ELSEWHERE, Withdraw("p", 1, [asker.asked[0][1].number]))]
    assert asker.session.waiting == asker.claims.waiting == 0


async def test_a_plan_is_not_asked_for_again_before_the_shard_knows_that_it_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the shard its process takes part in it until then, which it may only once."""
    asker = Asker(monkeypatch)
    asker.hears.clear()
    with pytest.raises(ClaimTimeout):
        await asker.claim(20, Shape(1))
    again, other = asker.claim(plan=Shape(1)), asker.claim()
    await asker.until_asked(2)
    assert asker.asked[1][1].plan is None
    asker.hears.set()
    (await asker.until_asked(3)).set_result(GRANTED)
    asker.asked[1][2].set_result(GRANTED)
    assert all(isinstance(one, Claimed) for one in await asyncio.gather(again, other))


@pytest.mark.parametrize("heard", [True, False])
async def test_a_plan_is_not_asked_for_again_before_the_shard_knows_that_it_was_left(
    monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    """Also where its answer was not confirmed by the backup in time, and never left this peer."""
    asker = Asker(monkeypatch)
    asker.hears.clear()
    asker.leases.open(Lease(5, "p", 1, "s", 0, asker.session, plan=True))
    asker.finishing.release(asker.session, 5, heard)
    again, other = asker.claim(plan=Shape(1)), asker.claim()
    await asker.until_asked(1)
    assert asker.asked[0][1].plan is None
    asker.hears.set()
    (await asker.until_asked(2)).set_result(GRANTED)
    asker.asked[0][2].set_result(GRANTED)
    assert all(isinstance(one, Claimed) for one in await asyncio.gather(again, other))


async def test_an_answer_that_comes_as_its_claim_is_given_up_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asker = Asker(monkeypatch)
    claiming = asker.claim()
    answer = await asker.until_asked(1)
    answer.set_result(GRANTED)
    claiming.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await claiming
    await asyncio.sleep(0)
    assert len(asker.told) == 1


async def test_a_claim_that_is_out_of_time_says_why_and_is_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asker = Asker(monkeypatch)
    claiming = asker.claim(timeout_ms=60_000)
    answer, body = await asker.until_asked(1), asker.asked[0][1]
    assert body.timeout_ms == 1000 * router_module.TURN_S
    asker.later(60.0)
    answer.set_exception(NOT_YET)
    (await asker.until_asked(2)).set_exception(NOT_YET)
    with pytest.raises(
        ClaimTimeout, match="timed out after 60 s: 0 of 2 rows ready, 1 wanted"
    ) as told:
        await claiming
    await asyncio.sleep(0)
    assert told.value.details["ready"] == 0 and len(asker.told) == 1
    assert "2 rows have been put so far, the last 1 s ago, by pid 7 on host a (connected)" in str(
        told.value
    )
    assert asker.asked[1][1].waited_ms >= 60_000


async def test_a_claim_whose_time_is_up_before_its_first_turn_is_awaited_is_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was begun as one that waits, so the shard keeps its place."""
    asker = Asker(monkeypatch)
    asker.turn(HERE)
    asker.host.entry = lambda name, generation: "there"
    begun: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(asker.mesh, "here", lambda caller, body: begun, raising=False)
    claiming = asker.claim(timeout_ms=1)
    asker.later(0.002)
    begun.set_exception(NOT_YET)
    with pytest.raises(
        ClaimTimeout, match="timed out after [0-9.]+ m?s: 0 of 2 rows ready, 1 wanted"
    ):
        await claiming
    await asyncio.sleep(0)
    assert len(asker.told) == 1


async def test_a_claim_whose_shard_does_not_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asker = Asker(monkeypatch)
    with pytest.raises(ClaimTimeout, match="peer b at tcp.* does not answer") as told:
        await asker.claim(timeout_ms=20)
    await asyncio.sleep(0)
    assert told.value.details["only_own"] is False and len(asker.told) == 1


async def test_rows_that_come_after_the_end_of_their_call_go_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This peer was stopped meanwhile, and its client has closed the connection, of which this peer
    may not have read yet."""
    asker = Asker(monkeypatch)
    call_context.set(CallContext(asker.host.now() + 0.7))
    claiming = asker.claim(timeout_ms=300)
    answer = await asker.until_asked(1)
    asker.later(16.0)
    answer.set_result(GRANTED)
    with pytest.raises(ClaimTimeout, match="the local peer was suspended or busy"):
        await claiming
    await asyncio.sleep(0)
    assert len(asker.told) == 1 and not len(asker.leases)


async def test_a_claim_that_does_not_wait_is_asked_once_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asker = Asker(monkeypatch)
    claiming = asker.claim(timeout_ms=0)
    (await asker.until_asked(1)).set_exception(NOT_YET)
    with pytest.raises(ClaimTimeout, match="0 of 2 rows ready"):
        await claiming
    assert asker.asked[0][1].timeout_ms == 0 and not asker.told


async def test_a_claim_that_does_not_wait_has_no_longer_than_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waited at the door until its peer was sure that it may serve, for all of its time."""
    asker = Asker(monkeypatch)
    monkeypatch.setattr(router_module, "AT_ONCE_S", 600.0)
    call_context.set(CallContext(asker.host.now() + 0.02))
    with pytest.raises(ClaimTimeout, match="does not answer"):
        await asyncio.wait_for(asker.claim(timeout_ms=0), 60)
    await asyncio.sleep(0)
    assert len(asker.told) == 1


async def test_the_end_of_a_stage_needs_no_withdrawal(monkeypatch: pytest.MonkeyPatch) -> None:
    asker = Asker(monkeypatch)
    claiming = asker.claim()
    (await asker.until_asked(1)).set_exception(StreamEnd("all had"))
    with pytest.raises(StreamEnd):
        await claiming
    assert not asker.told


async def test_a_claim_whose_lease_ended_before_it_heard_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asker = Asker(monkeypatch)
    claiming = asker.claim()
    (await asker.until_asked(1)).set_exception(LeaseExpired("over"))
    (await asker.until_asked(2)).set_result(GRANTED)
    await claiming
    assert asker.asked[0][1].number != asker.asked[1][1].number


async def test_a_claim_whose_rows_are_dropped_on_their_way_claims_others_until_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often, and whether they were dropped or lost: it ended after three times."""
    monkeypatch.setattr(reads_module, "PAUSES_S", (0.0, 0.0))
    asker = Asker(monkeypatch)
    whys = itertools.cycle([RowsGone("they were dropped"), RowsLost("its peer is lost")])

    def gone(table: Table, session: int) -> Any:
        raise next(whys)

    there, asker.reading.resolve = asker.reading.resolve, gone
    claiming, limited = asker.claim(), asker.claim(timeout_ms=60_000)
    for times in range(1, 11):
        (await asker.until_asked(times)).set_result(GRANTED)
    asker.later(60.0)
    for times in (11, 12):
        (await asker.until_asked(times)).set_result(GRANTED)
    with pytest.raises(ClaimTimeout, match="dropped or lost before their values arrived"):
        await limited
    last = await asker.until_asked(13)
    asker.reading.resolve = there
    last.set_result(GRANTED)
    assert isinstance(await claiming, Claimed)
    assert len({body.number for _, body, _ in asker.asked}) == 13
