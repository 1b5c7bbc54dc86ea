"""Who waits for room gets it in the order of asking."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dataplane.errors import BackPressure, LeaseExpired, ProtocolError
from dataplane.events.ring import Ring
from dataplane.memory.admission import Admission
from dataplane.memory.remote_references import RemoteReferences
from dataplane.memory.space import Space
from dataplane.metadata.shard import inspection
from dataplane.metadata.shard.reasons import Notices
from dataplane.metadata.shard.store import Store
from dataplane.peer.host import Entry
from dataplane.peer.requests.leases import Finishing
from dataplane.peer.requests.puts import Grants, Writing
from dataplane.peer.room.admission import Room
from dataplane.wire.messages import Finish, Put
from dataplane.wire.packed import U8
from dataplane.wire.tables import Chunk, Definition, Owner, Piece, Rows, Values
from tests.metadata.stores import OWNERS, put

PAGE = 4096
NOBODY: Any = SimpleNamespace(spawn=asyncio.ensure_future)
"""The mesh of a peer that knows no other."""


def pages(count: int) -> list[Any]:
    return [np.array([count * PAGE], U8)]


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_small_reservation_does_not_overtake_a_large_one() -> None:
    space = Space(16 * PAGE)
    host: Any = SimpleNamespace(
        space=space, now=lambda: 0.0, notices=Notices(), events=Ring(), entries={},
        remote_references=RemoteReferences(),
        who=str,
    )  # fmt: skip
    room = Room(host, NOBODY)
    held = [space.reserve(1, Admission.PULL, pages(4))[1] for _ in range(4)]
    order = []

    async def ask(who: int, count: int) -> None:
        await room.reserve(who, Admission.PULL, pages(count), 20)
        order.append(who)

    asked = [asyncio.create_task(ask(who, n)) for who, n in ((2, 8), (3, 4), (4, 4))]
    await settled()
    for extents, served in zip(held, ([], [2], [2, 3], [2, 3, 4]), strict=True):
        space.give_back(1, extents)
        if len(served) < 3:
            assert room.at_once(5, Admission.PULL, pages(1)) is None
        room.pump()
        await settled()
        assert order == served
    await asyncio.gather(*asked)


async def test_what_rows_lack_is_counted_in_pieces() -> None:
    """With 60,000 blocks it took 80 ms, in which the peer served nobody."""
    blocks = 13
    store = Store("step-1", Definition({"reward": ["tokens"], "train": ["tokens", "reward"]}), 1)
    for number in range(blocks):
        put(store, [2 * number, 2 * number + 1])
    host: Any = SimpleNamespace(
        space=Space(PAGE), now=lambda: 0.0, entries={"step-1": Entry(store)}, who=str,
    )  # fmt: skip
    with mock.patch.object(inspection, "PIECE", 4):
        looking = asyncio.ensure_future(Room(host, NOBODY).kept(OWNERS[0]))
        turns = 0
        while not looking.done():
            await asyncio.sleep(0)
            turns += 1
    (shown,), more = looking.result()
    assert (shown.rows, shown.lacks, more) == (26, [("train", "reward", 26)], 0)
    assert turns > blocks // 4


async def test_space_of_a_refused_put_goes_to_a_call_that_waits() -> None:
    space, me = Space(16 * PAGE), Owner("tcp://a", 7)
    host: Any = SimpleNamespace(
        space=space, now=lambda: 0.0, notices=Notices(), events=Ring(), entries={},
        remote_references=RemoteReferences(),
        who=str, owner=me,
    )  # fmt: skip
    room = Room(host, NOBODY)
    nothing: Any = None
    writing = Writing(host, Grants(host, room, nothing), *[nothing] * 5)
    (written,) = space.reserve(1, Admission.PULL, pages(16))[1]
    asked = asyncio.create_task(room.reserve(2, Admission.PULL, pages(16), 20))
    await settled()
    chunk = Chunk(0, 0, 1, 16 * PAGE, 0, b"", written["offset"].item())
    wrong = Chunk(9, 0, 1, 64, 0)
    sent = Values(["x"], [me], [b""], [chunk, wrong], [Piece(0, (0,), 0, b"\1")])
    session: Any = SimpleNamespace(id=1)
    with pytest.raises(ProtocolError, match="invalid owner index 9"):
        await writing.put(session, nothing, Put("p", 1, Rows(b""), sent))
    await settled()
    assert asked.done() and (await asked)[0] == 1


async def test_who_waits_for_a_stretch_is_told_that_what_is_free_is_in_pieces() -> None:
    space = Space(16 * PAGE)
    entries = {}
    for n in range(1, 6):
        entries[f"step-{n}"] = Entry(Store(f"step-{n}", Definition(), 1))
        put(entries[f"step-{n}"].store, list(range(n)))
    host: Any = SimpleNamespace(
        name="a", space=space, now=lambda: 0.0, notices=Notices(), entries=entries,
        remote_references=RemoteReferences(),
        events=Ring(), owner=OWNERS[0], roster=SimpleNamespace(owners=[]),
        who=lambda holder: "pid 7",
    )  # fmt: skip
    room = Room(host, NOBODY)
    held = [space.reserve(1 + n // 8, Admission.PULL, pages(1))[1] for n in range(16)]
    for n in range(0, 16, 2):
        space.give_back(1 + n // 8, held[n])
    with pytest.raises(BackPressure, match="fragmented: one value needs 16.0 KiB") as caught:
        await room.reserve(2, Admission.PULL, pages(4), 0.01)
    kept = [
        f"'step-{n}' has {n} rows with {8 * n}.0 KiB on this host, which stay" for n in (5, 4, 3)
    ]
    assert all(one in caught.value.message for one in kept)
    said = (  # pid 7 has two sessions
        "2 more partitions have values on this host; pid 7 holds 32.0 KiB in reservations and "
        "views. "
    )
    assert said in caught.value.message


async def test_room_that_came_as_it_was_given_up_goes_to_the_next() -> None:
    space = Space(16 * PAGE)
    host: Any = SimpleNamespace(
        space=space, now=lambda: 0.0, notices=Notices(), events=Ring(), entries={},
        remote_references=RemoteReferences(),
        who=str,
    )  # fmt: skip
    room = Room(host, NOBODY)
    held = space.reserve(1, Admission.PULL, pages(16))[1]
    asked = [
        asyncio.create_task(room.reserve(who, Admission.PULL, pages(16), 20)) for who in (2, 3)
    ]
    await settled()
    space.give_back(1, held)
    room.pump()
    asked[0].cancel()
    await asyncio.wait_for(asked[1], 10)


async def test_bytes_that_claims_may_pull_come_back_once_and_go_to_who_waits() -> None:
    space = Space(16 * PAGE)
    host: Any = SimpleNamespace(
        space=space, now=lambda: 0.0, notices=Notices(), events=Ring(), entries={},
        remote_references=RemoteReferences(),
        who=str,
    )  # fmt: skip
    room = Room(host, NOBODY)
    all_bytes = room.credit_bytes()
    assert room.promise(1, PAGE) and room.promise(2, 3 * PAGE)
    assert room.credit_bytes() == all_bytes - 4 * PAGE
    assert not room.promise(3, all_bytes - 3 * PAGE)
    waiting = asyncio.create_task(room.promised(3, 9, all_bytes - PAGE, 20))
    await settled()
    room.back(1)
    room.back(1)
    assert room.credit_bytes() == all_bytes - 3 * PAGE and not waiting.done()
    room.back(2)
    assert await waiting and room.credit_bytes() == PAGE
    room.back(3)
    assert room.credit_bytes() == all_bytes


async def test_room_of_what_was_added_in_vain_goes_to_who_waits_for_it() -> None:
    space = Space(16 * PAGE)
    host: Any = SimpleNamespace(
        space=space, now=lambda: 0.0, notices=Notices(), events=Ring(), who=str,
        owner=Owner("tcp://10.0.0.1:7101", 1),
        remote_references=RemoteReferences(), entry=lambda *partition: None,
        caller=lambda session: None,
    )  # fmt: skip
    room, nothing = Room(host, NOBODY), SimpleNamespace()
    grants = Grants(host, room, nothing)  # type: ignore[arg-type]

    async def send(*change: Any) -> Any:
        raise LeaseExpired("its partition no longer exists")

    leases: Any = SimpleNamespace(
        of=lambda *lease: SimpleNamespace(number=1, partition="p", generation=1),
        close=lambda lease: None,
    )
    outgoing: Any = SimpleNamespace(send=send)
    others: Any = [nothing] * 4
    writing = Writing(host, grants, outgoing, *others)
    finishing = Finishing(None, leases, writing)  # type: ignore[arg-type]
    written = space.reserve(2, Admission.OPEN, pages(9))[1]
    chunks = [Chunk(0, 0, 1, 9 * PAGE, 0, b"", written["offset"].item())]
    pieces = [Piece(0, (0,), 0, b"\1")]
    values = Values(["x"], [host.owner], [b"layout"], chunks, pieces)
    waits = asyncio.create_task(room.reserve(3, Admission.OPEN, pages(9), 20))
    await settled()
    assert not waits.done()
    added = Finish(1, "ack", values=values)
    with pytest.raises(LeaseExpired):
        await finishing.finish(SimpleNamespace(id=2), SimpleNamespace(rid=1), added)  # type: ignore[arg-type]
    await asyncio.wait_for(waits, 10)
