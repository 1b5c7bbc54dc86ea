"""What moves between two hosts' arenas through real bulk workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.errors import InternalError, LimitExceeded, ProtocolError, TicketRefused, Unavailable
from dataplane.transport import COPY, Remote, plane_key
from dataplane.transport.bulk_frames import LEAST_PULL_BYTES, MAX_PULL_BYTES
from dataplane.transport.connections import Connection, Connections
from dataplane.transport.seam import ReadRequest, Region
from dataplane.transport.tcp_reader import RangeReader
from dataplane.wire.tables import Owner

MIB = 1 << 20
StartHost = Callable[..., Awaitable[Any]]  # a Host of conftest


async def test_the_bytes_of_a_range_arrive_equal(start_host: StartHost) -> None:
    a, b = await start_host("a"), await start_host("b")
    a.fill()
    copies = a.place(np.array([4096]), np.array([300_000]))
    copies["dest"] = 128
    outcome = await b.engine.read(a.remote, copies)
    assert outcome.nbytes == 300_000 and not outcome.gone.any()
    assert np.array_equal(b.bytes[128 : 128 + 300_000], a.bytes[4096 : 4096 + 300_000])
    assert not b.bytes[:128].any() and not b.bytes[128 + 300_000 :].any()


async def test_a_read_larger_than_a_slice_and_than_a_part_arrives_equal(
    start_host: StartHost,
) -> None:
    size = 96 * MIB
    a = await start_host("a", size, workers=2)
    b = await start_host("b", size, workers=2)
    a.fill()
    lengths = np.array([70 * MIB + 3, 1, 11 * MIB, 64, 10 * MIB - 7])
    copies = a.place(np.cumsum(lengths) - lengths, lengths)
    outcome = await b.engine.read(a.remote, copies)
    assert outcome.nbytes == lengths.sum()
    assert np.array_equal(a.bytes[: lengths.sum()], b.bytes[: lengths.sum()])
    assert lengths.sum() // MAX_PULL_BYTES <= a.pins


async def test_an_owner_of_an_earlier_release_is_asked_for_as_much_as_it_takes(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 3 * LEAST_PULL_BYTES + 5
    assert 2 * LEAST_PULL_BYTES < size < MAX_PULL_BYTES
    borrow = Connections.borrow

    def older(*asked: Any) -> Connection:
        connection = borrow(*asked)
        connection.greeting = msgspec.structs.replace(
            connection.greeting, max_bytes=LEAST_PULL_BYTES
        )
        return connection

    monkeypatch.setattr(Connections, "borrow", older)
    a = await start_host("a", size)
    a.fill()
    copies, memory = a.place(np.array([0]), np.array([size])), np.zeros(size, np.uint8)
    reader = RangeReader(Region(memory.ctypes.data, size), plane_key("test", (1, 1)))
    request = ReadRequest(1, a.remote, copies, time.monotonic() + 30)
    gone = await asyncio.to_thread(reader.read, request)
    reader.close()
    assert not gone.any() and np.array_equal(memory, a.bytes)
    assert a.pins == 4


async def test_many_thousands_of_small_ranges_arrive_scattered(start_host: StartHost) -> None:
    count = 40_000
    a, b = await start_host("a", 8 * MIB), await start_host("b", 8 * MIB)
    a.fill()
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 100, count)
    slots = rng.permutation(count) * 128
    copies = a.place(np.arange(count) * 128, lengths)
    copies["dest"] = slots
    outcome = await b.engine.read(a.remote, copies)
    assert outcome.nbytes == lengths.sum() and not outcome.gone.any()
    inside = np.arange(128) < lengths[:, None]
    sent = a.bytes[: count * 128].reshape(count, 128)
    got = b.bytes[: count * 128].reshape(count, 128)[slots // 128]
    assert np.array_equal(got[inside], sent[inside])
    assert not got[~inside].any(), "something was written beside a destination"


async def test_a_part_of_a_range_and_zero_bytes_can_be_read(start_host: StartHost) -> None:
    a, b = await start_host("a"), await start_host("b")
    a.fill()
    copies = a.place(np.array([0, 4096, 8192]), np.array([4096, 4096, 4096]))
    copies["start"] = [100, 0, 4096]
    copies["nbytes"] = [50, 0, 0]
    copies["dest"] = [0, 1 << 20, 7]
    outcome = await b.engine.read(a.remote, copies)
    assert outcome.nbytes == 50 and not outcome.gone.any()
    assert np.array_equal(b.bytes[:50], a.bytes[100:150]) and not b.bytes[50:].any()


async def test_a_read_of_nothing_ends_at_once(start_host: StartHost) -> None:
    a, b = await start_host("a"), await start_host("b")
    outcome = await b.engine.read(a.remote, np.zeros(0, COPY))
    assert outcome.nbytes == 0 and len(outcome.gone) == 0 and a.pins == 0


@pytest.mark.parametrize("stale", [True, False], ids=["stale generation", "freed range"])
async def test_gone_ranges_are_marked_and_the_others_arrive(
    start_host: StartHost, stale: bool
) -> None:
    a, b = await start_host("a", 32 * MIB), await start_host("b", 32 * MIB)
    a.fill()
    lengths = np.full(30, MIB)
    copies = a.place(np.arange(30) * MIB, lengths)
    a.generations[[3, 17]] = 2 if stale else 0
    outcome = await b.engine.read(a.remote, copies)
    assert np.flatnonzero(outcome.gone).tolist() == [3, 17]
    assert outcome.nbytes == 28 * MIB
    rows = b.bytes[: 30 * MIB].reshape(30, MIB)
    assert not rows[outcome.gone].any()
    assert np.array_equal(rows[~outcome.gone], a.bytes[: 30 * MIB].reshape(30, MIB)[~outcome.gone])


async def test_bytes_beyond_a_range_are_refused(start_host: StartHost) -> None:
    a, b = await start_host("a"), await start_host("b")
    copies = a.place(np.array([0]), np.array([4096]))
    copies["nbytes"] = 4097
    with pytest.raises(ProtocolError, match="beyond the end of a range"):
        await b.engine.read(a.remote, copies)
    copies["start"], copies["nbytes"] = 2**64 - 1, 2
    with pytest.raises(ProtocolError, match="beyond the end of a range"):
        await b.engine.read(a.remote, copies)


@pytest.mark.parametrize("place", [((1 << 20) - 64, 4096), (1 << 21, 4096), (0, 1 << 21)])
async def test_an_answer_of_the_peer_beyond_its_arena_is_not_read(
    start_host: StartHost, place: tuple[int, int]
) -> None:
    a, b = await start_host("a"), await start_host("b")
    copies = a.place(np.array([0]), np.array([4096]))
    a.extents["offset"][0], a.extents["length"][0] = place
    with pytest.raises(InternalError, match="outside its arena"):
        await b.engine.read(a.remote, copies)


async def test_a_destination_outside_the_arena_is_refused_before_anything_moves(
    start_host: StartHost,
) -> None:
    a, b = await start_host("a"), await start_host("b")
    copies = a.place(np.array([0]), np.array([4096]))
    copies["dest"] = (1 << 20) - 4095
    with pytest.raises(LimitExceeded, match="outside the arena"):
        await b.engine.read(a.remote, copies)
    assert a.pins == 0


async def test_a_peer_of_another_plane_or_of_an_earlier_life_is_refused(
    start_host: StartHost,
) -> None:
    a = await start_host("a")
    b = await start_host("b", key=plane_key("another plane", (1, 1)))
    c = await start_host("c")
    copies = a.place(np.array([0]), np.array([4096]))
    with pytest.raises(TicketRefused, match="does not belong to the plane"):
        await b.engine.read(a.remote, copies)
    earlier = Remote(Owner("a", 6), a.remote.addresses)
    with pytest.raises(TicketRefused, match="in life 7"):
        await c.engine.read(earlier, copies)
    assert a.pins == 0
    assert (await c.engine.read(a.remote, copies)).nbytes == 4096


async def test_an_address_where_nobody_listens_is_unavailable(start_host: StartHost) -> None:
    a, b = await start_host("a"), await start_host("b")
    copies = a.place(np.array([0]), np.array([4096]))
    remote = a.remote
    await a.engine.stop()
    with pytest.raises(Unavailable, match="does not answer"):
        await b.engine.read(remote, copies)


async def test_reads_in_both_directions_at_once(start_host: StartHost) -> None:
    a, b = await start_host("a", 32 * MIB), await start_host("b", 32 * MIB)
    a.fill(1)
    b.fill(2)
    lengths = np.full(16, MIB)
    ab, ba = a.place(np.arange(16) * MIB, lengths), b.place(np.arange(16) * MIB, lengths)
    ab["dest"] += np.uint64(16 * MIB)
    ba["dest"] += np.uint64(16 * MIB)
    reads = [b.engine.read(a.remote, ab[i : i + 1]) for i in range(16)]
    reads += [a.engine.read(b.remote, ba[i : i + 1]) for i in range(16)]
    assert sum(outcome.nbytes for outcome in await asyncio.gather(*reads)) == 32 * MIB
    assert np.array_equal(b.bytes[16 * MIB :], a.bytes[: 16 * MIB])
    assert np.array_equal(a.bytes[16 * MIB :], b.bytes[: 16 * MIB])


async def test_the_figures_add_up(start_host: StartHost) -> None:
    a, b = await start_host("a", 20 * MIB), await start_host("b", 20 * MIB)
    copies = a.place(np.array([0]), np.array([20 * MIB]))
    await b.engine.read(a.remote, copies)
    read, served = b.engine.stats(), a.engine.stats()
    assert (read["bytes_in"], read["jobs_done"], read["jobs_failed"]) == (20 * MIB, 1, 0)
    assert (read["jobs_under_way"], read["bytes_under_way"], read["workers"]) == (0, 0, 1)
    assert served["pins_served"] == 2
