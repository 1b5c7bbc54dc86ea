"""Small values ride in the message that commits them, where the peer takes them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane import Partition
from dataplane.wire.limits import CARRIED
from dataplane.wire.messages import Failed, Finish, GiveBack, Put, PutDone, Request, Reserve
from dataplane.wire.records import EXTENT, VALUE, column
from tests.client.conftest import part, plane
from tests.client.scripted_peer import ScriptedPeer

__all__ = ["part", "plane"]

NO_ROOM = Failed("BackPressure", "there is no room at once")
LARGE = np.arange(9000, dtype=np.uint8)


@pytest.fixture
def peer() -> Any:
    scripted = ScriptedPeer()
    scripted.welcome.carry_bytes = 32_768
    yield scripted
    scripted.close()


def bytes_of(peer: ScriptedPeer, body: Put | Finish, field: str, row: int) -> bytes:
    """A value, from where its message says it lies."""
    value = next(column(c.values, VALUE) for c in body.columns if c.field == field)[row]
    ranges, at, places = column(body.ranges, EXTENT), 0, []
    for offset, length in ranges.tolist():
        rides = offset == CARRIED
        places.append((rides, at if rides else offset))
        at += -(-length // 64) * 64 if rides else 0
    assert at == len(body.carried)
    rides, start = places[value["range"]]
    start, size = start + int(value["delta"]), int(value["nbytes"])
    return body.carried[start : start + size] if rides else os.pread(peer.fd, size, start)


def refusing_what_rides(request: Request, body: Any) -> Failed | PutDone:
    return NO_ROOM if body.carried else PutDone()


def test_a_put_of_small_values_is_one_message_and_needs_no_room(
    peer: ScriptedPeer, part: Partition
) -> None:
    part.put({"a": [1, 2], "b": [LARGE, LARGE[:10]], "c": ["one", "two"]})
    many = [np.full(3, i, np.int64) for i in range(100)]
    part.put({"a": many})  # laid out in columns
    few, columns = peer.bodies(Put)
    assert bytes_of(peer, few, "a", 1) == b"\x02"
    assert bytes_of(peer, few, "b", 0) == LARGE.tobytes()
    assert bytes_of(peer, few, "b", 1) == LARGE[:10].tobytes()
    assert [bytes_of(peer, columns, "a", i) for i in range(100)] == [m.tobytes() for m in many]
    assert (few.want_bytes, columns.want_bytes) == (0, 0)
    assert not peer.bodies(Reserve)


@pytest.mark.parametrize("rows", [1, 100])
def test_what_finds_no_room_at_once_waits_for_it_like_all_others(
    peer: ScriptedPeer, part: Partition, rows: int
) -> None:
    peer.scripts[Put] = refusing_what_rides
    part.put({"a": [np.full(2500 // rows, i) for i in range(rows)]})
    first, second = peer.bodies(Put)
    assert len({r.op for r in peer.requests if isinstance(r.body, Put)}) == 2
    assert len(peer.bodies(Reserve)) == 1 and not second.carried
    for row in range(rows):
        assert bytes_of(peer, second, "a", row) == bytes_of(peer, first, "a", row)


def test_more_than_a_peer_takes_does_not_ride(
    peer: ScriptedPeer, plane: dataplane.Plane, part: Partition
) -> None:
    part.put({"a": [np.zeros(40_000, np.uint8)]})
    assert not any(put.carried for put in peer.bodies(Put))
    assert [reserve.partition for reserve in peer.bodies(Reserve)] == ["x"]


@pytest.mark.parametrize("script", [lambda r, b: PutDone(), refusing_what_rides])
def test_adds_ride_in_the_ack(
    peer: ScriptedPeer, part: Partition, script: Callable[..., Any]
) -> None:
    part.put({"a": [1, 2, 3]})
    peer.serve_put(peer.bodies(Put)[0])
    peer.scripts[Finish] = script
    batch = part.claim("s", rows=3)
    batch.add(reward=np.array([0.5, 1.5, 2.5]))
    batch.add(big=[np.full(9000, i) for i in range(3)], note=["x", "y", "z"])  # 216 kB: not these
    batch.ack()
    last = peer.bodies(Finish)[-1]
    assert bytes_of(peer, last, "reward", 2) == np.float64(2.5).tobytes()
    assert bytes_of(peer, last, "big", 1) == np.full(9000, 1).tobytes()
    assert bool(last.carried) == (len(peer.bodies(Finish)) == 1)


def test_adds_to_some_rows_take_along_what_those_need(peer: ScriptedPeer, part: Partition) -> None:
    part.put({"a": [1, 2, 3]})
    peer.serve_put(peer.bodies(Put)[0])
    batch = part.claim("s", rows=3)
    batch.add(big=[np.full(5000, i, np.uint8) for i in range(3)])
    batch.drop(rows=[0])
    batch.ack()
    ack = peer.bodies(Finish)[-1]
    assert len(ack.carried) == 2 * 5056
    assert bytes_of(peer, ack, "big", 1) == bytes([2]) * 5000


def test_nothing_goes_back_of_adds_that_nobody_acked(
    peer: ScriptedPeer, part: Partition, plane: dataplane.Plane
) -> None:
    part.put({"a": [1]})
    peer.serve_put(peer.bodies(Put)[0])
    batch = part.claim("s", rows=1)
    batch.add(reward=[1.0])
    batch.release()
    plane.close()
    assert not peer.bodies(GiveBack)
