"""Small values go with the message that commits them, to live in the shard."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane import Partition
from dataplane.wire.messages import Claim, Failed, Finish, GiveBack, Put, PutDone, Request, Reserve
from dataplane.wire.records import EXTENT, VALUE, column
from tests.client.conftest import part, plane
from tests.client.scripted_peer import ScriptedPeer

__all__ = ["part", "plane"]

FULL = Failed("ShardFull", "no room for small values", {"values": True})
LARGE = np.arange(9000, dtype=np.uint8)


@pytest.fixture
def peer() -> Any:
    scripted = ScriptedPeer()
    yield scripted
    scripted.close()


def records(body: Put | Finish, field: str) -> Any:
    return next(column(c.values, VALUE) for c in body.columns if c.field == field)


def bytes_of(peer: ScriptedPeer, body: Put | Finish, field: str, row: int) -> bytes:
    """A value, from where its message says it lies."""
    value = records(body, field)[row]
    start, size = int(value["delta"]), int(value["nbytes"])
    if value["owner"] == 1:
        return body.inline[value["range"] :][:size]
    offset, length = column(body.ranges, EXTENT)[value["range"]].tolist()
    assert start + size <= length
    return os.pread(peer.fd, size, offset + start)


def is_inline(body: Put | Finish, field: str) -> list[bool]:
    return (records(body, field)["owner"] == 1).tolist()


def refusing(request: Request, body: Any) -> Failed | PutDone:
    return FULL if body.inline else PutDone()


def test_a_put_of_small_values_is_one_message_and_needs_no_room(
    peer: ScriptedPeer, part: Partition
) -> None:
    part.put({"a": [1, 2], "c": ["one", "two"], "e": [np.zeros(0), np.zeros(1)]})
    many = [np.full(3, i, np.int64) for i in range(400)]
    part.put({"a": many})  # laid out in columns
    few, columns = peer.bodies(Put)
    assert bytes_of(peer, few, "a", 1) == b"\x02"
    assert bytes_of(peer, few, "e", 0) == b"" and is_inline(few, "e") == [True, True]
    assert [bytes_of(peer, columns, "a", i) for i in range(400)] == [m.tobytes() for m in many]
    assert not few.ranges and not columns.ranges and all(is_inline(columns, "a"))
    assert (few.want_bytes, columns.want_bytes) == (0, 0)
    assert not peer.bodies(Reserve)


@pytest.mark.parametrize("rows", [2, 300])
def test_values_of_more_than_a_kibibyte_go_to_the_arena(
    peer: ScriptedPeer, part: Partition, rows: int
) -> None:
    values = [np.full(1024 + i % 2, i % 251, np.uint8) for i in range(rows)]
    part.put({"x": values, "large": [LARGE[: 2000 + i] for i in range(rows)]})
    (body,) = peer.bodies(Put)
    assert is_inline(body, "x") == [i % 2 == 0 for i in range(rows)]
    assert not any(is_inline(body, "large"))
    for row, value in enumerate(values):
        assert bytes_of(peer, body, "x", row) == value.tobytes()
        assert bytes_of(peer, body, "large", row) == LARGE[: 2000 + row].tobytes()


@pytest.mark.parametrize("rows", [3, 300])
def test_a_row_brings_four_kibibytes_of_them_at_most(
    peer: ScriptedPeer, part: Partition, rows: int
) -> None:
    fields = {f"f{i}": [np.full(1000, i, np.uint8)] * rows for i in range(6)}
    fields["images"] = [{"small": [np.zeros(10, np.uint8)] * 9, "n": i} for i in range(rows)]
    part.put(fields)
    body = peer.bodies(Put)[0]
    rows = len(body.rows.keys) // 16
    inline = [all(is_inline(body, f"f{i}")) for i in range(6)]
    assert inline == [True] * 4 + [False] * 2
    leaves = column(next(c for c in body.columns if c.field == "images").leaves, VALUE)
    assert not (leaves["owner"] == 1).any()  # all of a row, or none
    assert len(body.inline) <= rows * 4096
    assert bytes_of(peer, body, "f3", rows - 1) == bytes([3]) * 1000
    assert bytes_of(peer, body, "f5", rows - 1) == bytes([5]) * 1000


@pytest.mark.parametrize("rows", [1, 100, 400])
def test_what_a_full_shard_refuses_goes_to_the_arena(
    peer: ScriptedPeer, part: Partition, rows: int
) -> None:
    peer.scripts[Put] = refusing
    values = [np.full(1 + i, i % 250, np.uint8) for i in range(rows)]
    part.put({"a": values, "large": [LARGE] * rows})
    puts = peer.bodies(Put)
    assert len({r.op for r in peer.requests if isinstance(r.body, Put)}) == len(puts)
    taken = [put for put in puts if not put.inline]
    assert len(puts) == 2 * len(taken)
    found = [
        (bytes_of(peer, put, "a", row), bytes_of(peer, put, "large", row))
        for put in taken
        for row in range(len(put.rows.keys) // 16)
    ]
    assert found == [(value.tobytes(), LARGE.tobytes()) for value in values]
    part.put({"a": [7]})  # for a while nothing is inline any more
    last = peer.bodies(Put)[-1]
    assert not last.inline and bytes_of(peer, last, "a", 0) == b"\x07"
    assert len(peer.bodies(Put)) == len(puts) + 1


@pytest.mark.parametrize("values", [{"large": [LARGE]}, {"a": [7]}, {"a": [7], "large": [LARGE]}])
def test_a_shard_without_room_for_rows_is_an_error_at_once(
    peer: ScriptedPeer, part: Partition, values: dict[str, Any]
) -> None:
    """It was waited for already. The large values are the peer's by then, and freed."""
    peer.scripts[Put] = lambda request, body: Failed("ShardFull", "host b", {"used_bytes": 5})
    with pytest.raises(dataplane.BackPressure, match="host b"):
        part.put(values)
    assert len(peer.bodies(Put)) == 1


@pytest.mark.parametrize("full", [False, True])
def test_adds_go_with_the_ack(peer: ScriptedPeer, part: Partition, full: bool) -> None:
    part.put({"a": [1, 2, 3]})
    peer.serve_put(peer.bodies(Put)[0])
    if full:
        peer.scripts[Finish] = refusing
    batch = part.claim("s", rows=3)
    batch.add(reward=np.array([0.5, 1.5, 2.5]))
    batch.add(big=[np.full(9000, i) for i in range(3)], note=["x", "y", "z"])
    batch.ack()
    last = peer.bodies(Finish)[-1]
    assert bytes_of(peer, last, "reward", 2) == np.float64(2.5).tobytes()
    assert bytes_of(peer, last, "big", 1) == np.full(9000, 1).tobytes()
    assert is_inline(last, "note") == [not full] * 3
    assert len(peer.bodies(Finish)) == 1 + full


def test_adds_to_some_rows_take_along_what_those_need(peer: ScriptedPeer, part: Partition) -> None:
    part.put({"a": [1, 2, 3]})
    peer.serve_put(peer.bodies(Put)[0])
    batch = part.claim("s", rows=3)
    batch.add(score=[np.full(50, i, np.uint8) for i in range(3)])
    batch.drop(rows=[0])
    batch.ack()
    ack = peer.bodies(Finish)[-1]
    assert len(ack.inline) == 2 * 56
    assert bytes_of(peer, ack, "score", 1) == bytes([2]) * 50


def test_rows_that_share_a_block_are_acked_apart(peer: ScriptedPeer, part: Partition) -> None:
    part.put({"a": [1, 2, 3]})
    peer.serve_put(peer.bodies(Put)[0])
    batch = part.claim("s", rows=3)
    batch.add(mid=[np.full(2000, i, np.uint8) for i in range(3)], tiny=[7, 8, 9])
    batch[:2].ack()
    batch[2:].ack()
    first, second = (body for body in peer.bodies(Finish) if body.columns)
    found = {}
    for body in (first, second):
        index = np.frombuffer(body.index, "<u4").tolist()
        for at, row in enumerate(index):
            found[row] = (bytes_of(peer, body, "mid", at), bytes_of(peer, body, "tiny", at))
    assert found == {i: (bytes([i]) * 2000, bytes([7 + i])) for i in range(3)}
    ranges = [offset for body in (first, second) for offset, _ in column(body.ranges, EXTENT)]
    assert len(set(ranges)) == len(ranges)


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


def test_views_of_them_are_read_only_and_outlive_the_batch(
    peer: ScriptedPeer, part: Partition
) -> None:
    given = [np.arange(5.0) + i for i in range(4)]
    part.put({"a": given, "t": ["x", "", "é", "z"], "score": [0.5, 1.5, 2.5, 3.5]})
    peer.serve_put(peer.bodies(Put)[0])
    batch = part.claim("s", rows=4, fields=["a", "t", "score"])
    assert len(peer.bodies(Claim)) == 1
    views = list(batch["a"])
    dense, texts = batch.numpy("a", view=True), list(batch["t"])
    scores = batch.numpy("score", view=True)
    assert scores.flags.c_contiguous and scores.tolist() == [0.5, 1.5, 2.5, 3.5]
    batch.ack()
    del batch
    assert all(np.array_equal(view, one) for view, one in zip(views, given, strict=True))
    assert not views[0].flags.writeable and not dense.flags.owndata
    assert texts == ["x", "", "é", "z"]
