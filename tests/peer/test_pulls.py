"""Small values of other hosts: when they are asked for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import RowsGone, RowsLost, Unavailable
from dataplane.events.ring import Ring
from dataplane.memory.admission import Admission
from dataplane.memory.space import Space
from dataplane.metadata.shard.reasons import Notices
from dataplane.peer.host import CallContext, call_context
from dataplane.peer.pull.pulls import AT_ONCE, Pulls
from dataplane.peer.requests.reads import Reading
from dataplane.peer.room.admission import Room
from dataplane.wire.messages import Fetch, Fetched, Read, ReadDone
from dataplane.wire.packed import EXTENT, U8
from dataplane.wire.peering import Pull, Pulled
from dataplane.wire.tables import Owner, Rows, Table
from tests.chunk_numbers import chunk_numbers

THERE = Owner("tcp://10.0.0.2:7101", 2)


def _pulls(space: Space, arena: memoryview, members: set[Owner], call: Any) -> Any:
    """Of a peer that has room, and whose mesh answers as `call` does."""

    async def reserve(*what: Any) -> tuple[int, Any]:
        return space.reserve(*what[:3])

    host: Any = SimpleNamespace(
        space=space,
        arena=SimpleNamespace(view=arena),
        roster=SimpleNamespace(has=lambda owner: owner in members),
        now=asyncio.get_running_loop().time,
        events=Ring(),
    )
    mesh: Any = SimpleNamespace(
        handlers={}, call=call, others=SimpleNamespace(), spawn=lambda work: work.close()
    )
    room: Any = Room(host, mesh)
    room.reserve, room.for_copies = reserve, lambda sizes: None
    return Pulls(host, mesh, room, None)  # type: ignore[arg-type]


def _asking(ask: Any, another_roster: Any, member: bool) -> Any:
    """Of a peer in whose first roster every owner is a member, or none."""
    pulls: Any = object.__new__(Pulls)
    pulls._ask = ask
    pulls.host = SimpleNamespace(
        roster=SimpleNamespace(has=lambda owner: member),
        another_roster=another_roster,
        now=asyncio.get_running_loop().time,
        events=Ring(),
    )
    return pulls


@pytest.mark.parametrize("lost", [False, True], ids=["", "and kept of no lost peer"])
async def test_values_are_asked_for_when_there_is_room_for_them(lost: bool) -> None:
    """Or else the answers of all calls that wait for room would lie in this peer's own memory."""
    asked: list[Pull] = []
    members = {THERE}
    room_came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    space = Space(1 << 16)
    arena = memoryview(bytearray(1 << 16))

    async def call(address: str, body: Pull, **how: Any) -> Pulled:
        asked.append(body)
        if lost:
            members.clear()
        return Pulled(b"x" * 64)

    async def reserve(*what: Any) -> tuple[int, Any]:
        await room_came
        return space.reserve(*what[:3])

    pulls = _pulls(space, arena, members, call)
    pulls.room.reserve = reserve
    remote = chunk_numbers([(0, 1)])
    coming = asyncio.ensure_future(pulls.bring(THERE, remote, np.array([64], np.uint64), 0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not asked
    room_came.set_result(None)
    local, pins = await coming
    assert len(asked) == 1
    (place,) = space.chunks.extents(local)
    assert isinstance(place, np.void) and place.dtype == EXTENT
    assert bytes(arena[int(place["offset"]) :][:64]) == b"x" * 64
    assert len(space.copies) == (0 if lost else 1)
    assert space.unpin(0, pins) == (64 if lost else 0)


async def test_an_owner_is_asked_for_so_many_small_values_at_once() -> None:
    """Or else a life sign to it would stand behind all that a thousand calls asked for."""
    most = under_way = 0

    async def call(address: str, body: Pull, **how: Any) -> Pulled:
        nonlocal most, under_way
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return Pulled(b"x" * 64)

    pulls = _pulls(Space(1 << 24), memoryview(bytearray(1 << 24)), {THERE}, call)
    many = [
        pulls.bring(THERE, chunk_numbers([(n, 1)]), np.array([64], np.uint64), 0)
        for n in range(3 * AT_ONCE)
    ]
    brought = await asyncio.gather(*many)
    assert len(brought) == 3 * AT_ONCE and most == AT_ONCE


async def test_copies_that_were_held_for_a_pull_that_failed_are_room_for_who_waits() -> None:
    """They waited until somebody else let go of something."""
    space, large = Space(1 << 18), 1 << 17
    failing, fails = asyncio.Event(), asyncio.Event()

    async def call(address: str, body: Pull, **how: Any) -> Pulled:
        if len(body.chunks) == U8.itemsize and not space.copies.evictable_bytes and pins:
            failing.set()
            await fails.wait()
            return Pulled(b"", b"\1")
        return Pulled(b"x" * large)

    pulls = _pulls(space, memoryview(bytearray(1 << 18)), {THERE}, call)
    pulls.host.notices = Notices()
    remote, needed = chunk_numbers([(0, 1), (1, 1)]), np.array([large, 64], np.uint64)
    pins: list[int] = []
    _, pins = await pulls.bring(THERE, remote[:1], needed[:1], 0)
    space.unpin(0, pins)
    brings = asyncio.create_task(pulls.bring(THERE, remote, needed, 0))
    await asyncio.wait_for(failing.wait(), 10)
    sizes = [np.array([large + (1 << 15)], np.uint64)]
    waits = asyncio.create_task(Room.reserve(pulls.room, 3, Admission.PULL, sizes, 60))
    await asyncio.sleep(0)
    assert pulls.room.waiting(Admission.PULL) == 1
    fails.set()
    with pytest.raises(RowsGone):
        await brings
    assert (await asyncio.wait_for(waits, 10))[0] == 1


@pytest.mark.parametrize("joins", [False, True], ids=["it is gone", "the next roster has it"])
async def test_values_of_who_is_no_member_are_not_waited_for(joins: bool) -> None:
    """A shard that had not heard of a death yet named them: the link that was made to ask for them
    was awaited until the end of the call."""

    async def another_roster(than: Any, until: float) -> bool:
        pulls.host.roster = SimpleNamespace(has=lambda owner: joins)
        return joins

    async def ask(*what: Any) -> str:
        assert joins
        return "copies"

    pulls = _asking(ask, another_roster, member=False)
    transfer = pulls._transfer(THERE, chunk_numbers([(0, 1)]), np.array([64], np.uint64))
    if joins:
        assert await transfer == "copies"
    else:
        with pytest.raises(RowsLost):
            await transfer


async def test_who_waits_for_a_roster_that_has_the_owner_waits_no_longer_than_its_call() -> None:
    """Rosters came one after the other, as a peer began again, and each was another wait."""
    asked_until = list[float]()

    async def another_roster(than: Any, until: float) -> bool:
        asked_until.append(until)
        return until > float(pulls.host.now())

    pulls = _asking(None, another_roster, member=False)
    end = pulls.host.now() + 0.05
    call_context.set(CallContext(end))
    with pytest.raises(RowsLost):
        await asyncio.wait_for(pulls._transfer(THERE, np.zeros(1, U8), np.ones(1, U8)), 10)
    assert asked_until and max(asked_until) <= end


@pytest.mark.parametrize("lost", [False, True], ids=["it is back", "it is lost"])
async def test_an_owner_that_was_cut_off_is_asked_again_without_another_roster(lost: bool) -> None:
    """Its values were waited for until the end of the call, where it was not called lost."""
    asked = 0

    async def another_roster(than: Any, until: float) -> bool:
        pulls.host.roster = SimpleNamespace(has=lambda owner: not lost)
        return lost

    async def ask(*what: Any) -> str:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise Unavailable("it went away")
        return "copies"

    pulls = _asking(ask, another_roster, member=True)
    pulls.mesh = SimpleNamespace(is_linked=lambda owner: False)
    transfer = pulls._transfer(THERE, chunk_numbers([(0, 1)]), np.array([64], np.uint64))
    if lost:
        with pytest.raises(RowsLost):
            await transfer
    else:
        assert await transfer == "copies"
    assert asked == (1 if lost else 3)


@pytest.mark.parametrize("call", ["fetch", "read"])
@pytest.mark.parametrize("losses", [2, 5])
async def test_a_call_meets_the_loss_of_one_peer_after_another(losses: int, call: str) -> None:
    """The second copies were at a peer that was lost in the same call: it said that the rows are
    lost, whatever their shard knew of them by then."""
    asked = 0

    async def ask(body: Fetch | Read) -> Fetched | ReadDone:
        table = Table(Rows(b""))
        return Fetched(0, table) if call == "fetch" else ReadDone(table, 0)

    async def resolved(table: Table, holder: int, **how: Any) -> tuple[Table, int]:
        nonlocal asked
        asked += 1
        if asked <= losses:
            raise RowsLost("the peer is lost")
        return table, 5

    async def another_roster(than: Any, until: float) -> bool:
        return True

    reading: Any = object.__new__(Reading)
    now = asyncio.get_running_loop().time
    reading.host = SimpleNamespace(now=now, roster=None, another_roster=another_roster)
    lease = SimpleNamespace(number=7, stage="train", partition="p", generation=1)
    reading.leases = SimpleNamespace(of=lambda *which: lease)
    reading.router, reading.resolved = SimpleNamespace(ask=ask), resolved
    body = Fetch(7, ["x"]) if call == "fetch" else Read("p", 1, Rows(b""))
    calling = getattr(reading, call)(SimpleNamespace(id=1), None, body)
    assert (await calling).pin == 5
    assert asked == losses + 1
