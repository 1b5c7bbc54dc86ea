"""What moves between two hosts' arenas through real bulk workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from dataplane.errors import InternalError, LimitExceeded, ProtocolError, Unavailable
from dataplane.transport.bulk_frames import MAX_GET_BYTES

MIB = 1 << 20
StartHost = Callable[..., Awaitable[Any]]  # a Host of conftest


async def test_a_read_larger_than_a_slice_and_than_a_part_arrives_equal(
    start_host: StartHost,
) -> None:
    size = 96 * MIB
    a, b = await start_host("a", size), await start_host("b", size)
    a.fill()
    lengths = np.array([70 * MIB + 3, 1, 11 * MIB, 64, 10 * MIB - 7])
    copies = a.place(np.cumsum(lengths) - lengths, lengths)
    outcome = await b.engine.read(a.remote, copies)
    assert outcome.nbytes == lengths.sum()
    assert np.array_equal(a.bytes[: lengths.sum()], b.bytes[: lengths.sum()])
    assert lengths.sum() // MAX_GET_BYTES <= a.pins


async def test_bytes_beyond_a_range_are_refused(start_host: StartHost) -> None:
    a, b = await start_host("a"), await start_host("b")
    copies = a.place(np.array([0]), np.array([4096]))
    copies["nbytes"] = 4097
    with pytest.raises(ProtocolError, match="of its chunk, which is only"):
        await b.engine.read(a.remote, copies)
    copies["start"], copies["nbytes"] = 2**64 - 1, 2
    with pytest.raises(ProtocolError, match="of its chunk, which is only"):
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


async def test_an_address_where_nobody_listens_is_unavailable(start_host: StartHost) -> None:
    a, b = await start_host("a"), await start_host("b")
    copies = a.place(np.array([0]), np.array([4096]))
    remote = a.remote
    await a.engine.stop()
    with pytest.raises(Unavailable, match="does not answer"):
        await b.engine.read(remote, copies)


async def test_the_figures_add_up(start_host: StartHost) -> None:
    a, b = await start_host("a", 20 * MIB), await start_host("b", 20 * MIB)
    copies = a.place(np.array([0]), np.array([20 * MIB]))
    await b.engine.read(a.remote, copies)
    read, served = b.engine.stats(), a.engine.stats()
    assert (read["bytes_in"], read["jobs_done"], read["jobs_failed"]) == (20 * MIB, 2, 0)
    assert (read["jobs_under_way"], read["bytes_under_way"], read["works"]) == (0, 0, True)
    assert served["pins_served"] == 2
