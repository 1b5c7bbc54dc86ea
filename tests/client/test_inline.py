"""Small values go with the message that commits them, to live in the shard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane import Partition
from dataplane.client.read.column_view import ColumnView
from dataplane.client.session import session
from dataplane.wire.messages import Claim, Failed, Finish, GiveBack, Put, PutDone, Request, Reserve
from tests.chunk_numbers import chunk_numbers
from tests.client.conftest import part, plane
from tests.client.scripted_peer import ScriptedPeer, inline_bytes, inline_fields, shared, written
from tests.same import equals, same

__all__ = ["part", "plane"]

LARGE = np.arange(9000, dtype=np.uint8)


@pytest.fixture
def peer() -> Any:
    scripted = ScriptedPeer()
    yield scripted
    scripted.close()


def refusing(request: Request, body: Any) -> Failed | PutDone:
    """The shard has no space for small values. The peer keeps the written chunks under numbers."""
    if not inline_bytes(body):
        return PutDone()
    count = len(written(body))
    chunks = chunk_numbers([(n, 1) for n in range(count)]).tobytes()
    details = {"values": True, "chunks": chunks} if isinstance(body, Finish) else {"values": True}
    return Failed("ShardFull", "no room for small values", details)


def test_a_put_of_small_values_is_one_message_and_needs_no_room(
    peer: ScriptedPeer, part: Partition
) -> None:
    part.put({"a": [1, 2], "c": ["one", "two"], "e": [np.zeros(0), np.zeros(1)]})
    many = [np.full(3, i, np.int64) for i in range(400)]
    part.put({"a": many})  # laid out in columns
    few, columns = peer.bodies(Put)
    assert list(peer.view(few, "a")) == [1, 2] and inline_fields(few) == {"a", "c", "e"}
    assert equals(peer.view(few, "e"), [np.zeros(0), np.zeros(1)])
    assert equals(peer.view(columns, "a"), many)
    assert not written(few) and not written(columns) and inline_fields(columns) == {"a"}
    assert [len(body.values.chunks) for body in (few, columns)] == [1, 2]
    assert (few.want_bytes, columns.want_bytes) == (0, 0)
    assert not peer.bodies(Reserve)


@pytest.mark.parametrize("rows", [1, 2, 300])
def test_the_smallest_columns_go_inline_up_to_eight_kibibytes_a_block(
    peer: ScriptedPeer, part: Partition, rows: int
) -> None:
    block = min(rows, 256)
    fields = {f"f{k}": np.full((rows, k * 1024 // block), k, np.uint8) for k in range(1, 7)}
    part.put(fields)
    bodies = peer.bodies(Put)
    body = bodies[0]
    expected = 3 if rows > 1 else 2  # 1, 2 and 3 KiB; 4 KiB a row
    assert inline_fields(body) >= {f"f{k + 1}" for k in range(expected)}
    nbytes = inline_bytes(body)
    assert nbytes <= -(-rows // 256) * 8192 and nbytes <= rows * 4096
    last = len(body.rows.keys) // 16 - 1
    for k in range(1, 7):
        assert peer.view(body, f"f{k}")[last].tobytes() == bytes([k]) * (k * 1024 // block)


def test_arrays_inside_of_a_value_go_where_it_goes(peer: ScriptedPeer, part: Partition) -> None:
    small = [{"small": [np.full(10, i, np.uint8)] * 9, "n": i} for i in range(3)]
    large = [[LARGE], [LARGE, 1], []]
    part.put({"x": small, "large": large})
    (body,) = peer.bodies(Put)
    assert inline_fields(body) == {"x"}
    assert equals(peer.view(body, "x"), small) and equals(peer.view(body, "large"), large)


@pytest.mark.parametrize("rows", [1, 100, 400])
def test_what_a_full_shard_refuses_goes_to_the_arena(
    peer: ScriptedPeer, part: Partition, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SHARD_FULL_S", 60.0)
    peer.scripts[Put] = refusing
    values = [np.full(1 + i % 20, i % 250, np.uint8) for i in range(rows)]
    part.put({"a": values, "large": [LARGE] * rows})
    puts = peer.bodies(Put)
    assert len({r.op for r in peer.requests if isinstance(r.body, Put)}) == len(puts)
    taken = [put for put in puts if not inline_bytes(put)]
    assert len(puts) == 2 * len(taken)
    for field, given in (("a", values), ("large", [LARGE] * rows)):
        found = [value for put in taken for value in peer.view(put, field)]
        assert all(map(np.array_equal, found, given)) and len(found) == rows
    part.put({"a": [7]})  # for a while nothing is inline any more
    last = peer.bodies(Put)[-1]
    assert not inline_bytes(last) and list(peer.view(last, "a")) == [7]
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
    assert inline_fields(last) == (set() if full else {"reward", "note"})
    before: list[tuple[int, int]] = []
    if full:  # the peer has the written values as a chunk by now
        before = written(peer.bodies(Finish)[0])
        assert shared(last) == [1 << 32]
    assert equals(peer.view(last, "big", before), [np.full(9000, i) for i in range(3)])
    assert [float(one) for one in peer.view(last, "reward", before)] == [0.5, 1.5, 2.5]
    assert list(peer.view(last, "note", before)) == ["x", "y", "z"]
    assert len(peer.bodies(Finish)) == 1 + full


def test_adds_to_some_rows_take_along_what_those_need(peer: ScriptedPeer, part: Partition) -> None:
    part.put({"a": [1, 2, 3]})
    peer.serve_put(peer.bodies(Put)[0])
    batch = part.claim("s", rows=3)
    batch.add(score=[np.full(50, i, np.uint8) for i in range(3)])
    batch.drop(rows=[0])
    batch.ack()
    ack = peer.bodies(Finish)[-1]
    assert inline_bytes(ack) == 64 + 2 * 50
    assert [one[0] for one in peer.view(ack, "score")] == [1, 2]


class Holding:
    """Answer acks as a peer does, which keeps chunks for the next ack."""

    def __init__(self) -> None:
        self.extents: dict[int, tuple[int, int]] = {}

    def __call__(self, request: Request, body: Finish) -> PutDone:
        names = []
        for extent in written(body):
            assert extent not in self.extents.values(), "an extent is written by one message"
            names.append((len(self.extents), 1))
            self.extents[len(self.extents) | 1 << 32] = extent
        return PutDone(chunks=chunk_numbers(names).tobytes() if body.again else b"")

    def view(self, peer: ScriptedPeer, body: Finish, field: str) -> ColumnView:
        return peer.view(body, field, [self.extents[one] for one in shared(body)])


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("parts", [[[0, 1], [2, 3, 4]], [[4, 1], [0], [3], [2]], [[2], [3, 1, 0]]])
def test_rows_that_share_a_chunk_are_acked_apart(
    peer: ScriptedPeer, part: Partition, parts: list[list[int]], full: bool
) -> None:
    part.put({"a": [1, 2, 3, 4, 5]})
    peer.serve_put(peer.bodies(Put)[0])
    holding = Holding()
    batch = part.claim("s", rows=5)
    batch.add(mid=[np.full(5000, i, np.uint8) for i in range(5)], tiny=[7, 8, 9, 10, 11])
    big = [[np.full(9000 + i, i, np.uint8)] for i in range(5)]
    batch.rows([3, 1]).add(some=[big[3], big[1]])

    def answer(request: Request, body: Finish) -> Failed | PutDone:
        done = holding(request, body)
        if not (full and inline_bytes(body)):
            return done
        kept = [(n, 1) for n in range(len(holding.extents))]
        kept = kept[len(kept) - len(written(body)) :]
        chunks = chunk_numbers(kept).tobytes()
        return Failed("ShardFull", "no room", {"values": True, "chunks": chunks})

    peer.scripts[Finish] = answer
    for rows in parts:
        batch.rows(rows).ack()
    found: dict[str, dict[int, Any]] = {"mid": {}, "tiny": {}, "some": {}}
    for body in peer.bodies(Finish):
        if full and inline_bytes(body):
            continue
        index = np.frombuffer(body.index, "<u4").tolist()
        for field in body.values.fields:
            view = holding.view(peer, body, field)
            found[field] |= {row: view[at] for at, row in enumerate(index)}
    wanted = sorted(row for rows in parts for row in rows)
    assert {i: one.tobytes() for i, one in found["mid"].items()} == {
        i: bytes([i]) * 5000 for i in wanted
    }
    assert found["tiny"] == {i: 7 + i for i in wanted}
    assert sorted(found["some"]) == sorted({3, 1} & {*wanted})
    assert all(same(one, big[i]) for i, one in found["some"].items())
    assert not peer.bodies(Finish)[-1].again or len(wanted) < 5


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
    assert isinstance(dense, np.ndarray) and isinstance(scores, np.ndarray)
    assert scores.flags.c_contiguous and scores.tolist() == [0.5, 1.5, 2.5, 3.5]
    batch.ack()
    del batch
    assert all(np.array_equal(view, one) for view, one in zip(views, given, strict=True))
    assert not views[0].flags.writeable and not dense.flags.owndata
    assert texts == ["x", "", "é", "z"]
