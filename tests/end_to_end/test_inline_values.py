"""Small values that live in the shard: room, failures, and messages that lie."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane.client._sync.calls import Call, send
from dataplane.client.arguments import Deadline
from dataplane.metadata.roster.roster import Roster
from dataplane.wire import layouts
from dataplane.wire.messages import Body, Put
from dataplane.wire.tables import INLINE, Chunk, Owner, Piece, Rows, Values
from tests.end_to_end.conftest import Cluster, until
from tests.same import dense

MIB = 1 << 20


def arena(plane: dataplane.Plane) -> dict[str, Any]:
    found: dict[str, Any] = plane.stats()["arena"]
    return found


def metadata(plane: dataplane.Plane) -> dict[str, Any]:
    found: dict[str, Any] = plane.stats()["metadata"]
    return found


def test_they_come_out_as_they_went_in_and_leave_nothing_behind(plane: dataplane.Plane) -> None:
    part = plane.partition("p", {"s": ["x"], "t": ["x", "y"]}, free="acked")
    large = np.arange(2000.0)
    for i in range(50):
        part.put({"x": [i], "large": [large + i], "text": [f"row {i}"], "none": [np.zeros((0, 3))]})
    for i in range(50):
        batch = part.claim("s", rows=1, fields=["x", "large", "text", "none"], timeout=20)
        assert (batch["x"][0], batch["text"][0]) == (i, f"row {i}")
        np.testing.assert_array_equal(batch["large"][0], large + i)
        assert batch["none"][0].shape == (0, 3)
        batch.add(y=[i / 2])
        batch.ack()
        batch = part.claim("t", rows=1, timeout=20)
        assert batch["y"][0] == i / 2
        batch.ack()
    del batch
    empty = {"used_bytes": 0, "granted_bytes": 0, "chunks": 0}
    until(lambda: empty.items() <= arena(plane).items(), "all bytes are free again")
    until(lambda: not metadata(plane)["values_bytes"], "no small value is left")


def test_a_column_of_small_and_large_values_is_read_as_any_other(plane: dataplane.Plane) -> None:
    part = plane.partition("p", {"s": ["x"]})
    given = [np.arange(n, dtype=np.int32) for n in (3, 3000, 0, 250, 257, 1)]
    part.put({"x": given, "o": [{"a": one, "n": i} for i, one in enumerate(given)]})
    batch = part.claim("s", rows=6, fields=["x", "o"], timeout=20)
    for found in (batch["x"], batch.numpy("x"), [one["a"] for one in batch["o"]]):
        assert all(np.array_equal(a, b) for a, b in zip(found, given, strict=True))
    assert [one["n"] for one in batch["o"]] == list(range(6))
    assert batch.arrow(["x"])["x"].to_pylist() == [one.tolist() for one in given]
    some = batch["x"].take([0, 1])
    assert [len(one) for one in some] == [3, 3000]
    part.put({"y": [np.zeros(n) for n in (2, 300)]}, key=["a", "b"])
    got = part.get(keys=["b", "a"])
    assert [len(one) for one in got["y"]] == [300, 2]


def test_none_of_them_is_in_an_arena_and_a_read_asks_nobody_for_one(cluster: Cluster) -> None:
    cluster.start("keeper", "a", "b", "c")
    planes = {name: cluster.connect(name) for name in cluster.peers}
    part = planes["a"].partition("p", {"s": ["x"]}, free="drop")
    part.put(
        {"x": np.arange(64.0).reshape(8, 8), "t": [f"row {i}" for i in range(8)]}, key=range(8)
    )
    for name in "abc":
        rows = planes[name].partition("p").get(keys=[5, 2])
        assert rows["x"][0].tolist() == list(range(40, 48)) and list(rows["t"]) == [
            "row 5",
            "row 2",
        ]
    with planes["c"].partition("p").claim("s", rows=8, timeout=20) as batch:
        assert dense(batch.numpy("x")).tolist() == np.arange(64.0).reshape(8, 8).tolist()
        batch.add(score=np.arange(8.0))
    assert part.get(keys=[7])["score"][0] == 7
    for plane in planes.values():
        assert not arena(plane)["chunks"] and not plane.stats()["pulled_bytes"]
    assert part.stats()["inline_bytes"] == part.stats()["bytes"] > 0
    for plane in planes.values():
        plane.close()


def test_they_outlive_the_host_that_wrote_them(cluster: Cluster) -> None:
    cluster.start("keeper", "a", "b", "c", "d")
    planes = {name: cluster.connect(name) for name in cluster.peers}
    members = {plane.stats()["address"]: name for name, plane in planes.items()}
    roster = Roster.from_seeds(list(members))
    primary = roster.home("p")
    backup = str(roster.backup_of(primary)[0])
    seed = next(iter(members))
    writer, reader = (n for a, n in members.items() if a not in (primary, backup, seed))

    def protected() -> bool:
        return all(not plane.stats()["roster"]["unprotected"] for plane in planes.values())

    until(protected, "every backup is in sync")
    part = planes[writer].partition("p", {"s": ["x"]})
    part.put({"x": [1, 2, 3]}, key=[1, 2, 3])
    part.put({"x": [np.zeros(5000)]}, key=[4])
    planes.pop(writer).close()
    cluster.peers[writer].kill()
    far = planes[reader].partition("p")
    until(lambda: len(far.rows()) == 3, "the row whose bytes were at the lost host is lost")
    until(protected, "every backup is in sync again")
    planes.pop(members[primary]).close()
    cluster.peers[members[primary]].kill()  # and the backup has them too
    batch = far.claim("s", rows=3, timeout=40)
    assert sorted(batch["x"]) == [1, 2, 3]
    batch.ack()
    for plane in planes.values():
        plane.close()


def fill(part: dataplane.Partition, timeout: float) -> None:
    """Put rows until the shard has no room for their metadata. Given keys take a hundred times the
    room of generated ones, so tens of thousands of rows are enough."""
    for number in range(200):
        names = [f"{number}/{row}" for row in range(1_000)]
        part.put({"y": np.zeros(1_000, np.uint8)}, key=names, timeout=timeout)


def test_where_the_shard_is_full_they_stay_at_the_writer_and_then_rows_wait(
    cluster: Cluster,
) -> None:
    cluster.start("a", arena="64MiB")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]}, free="acked")
        part.put({"f": [0]}, key=["one"])
        size = metadata(plane)["size_bytes"]
        each = [np.full(1000, i, np.uint8) for i in range(8)]
        for _ in range(size // 4 // 8_000 + 1):  # a quarter of it is for them
            part.put({"x": each})
        told = metadata(plane)
        assert told["values_bytes"] <= size // 4 and told["refused_values"] > 0
        assert arena(plane)["used_bytes"] > 0
        with pytest.raises(dataplane.BackPressure, match=f"peer {plane.stats()['peer']!r}"):
            fill(part, timeout=5)
        part.put({"x": [np.full(1000, 7, np.uint8)]}, key=["one"])  # no new row
        batch = part.claim("s", rows=400, timeout=20)
        assert {len(one) for one in batch["x"]} == {1000}
        batch.add(score=np.zeros(400))
        batch.ack()  # a finish is always taken
        part.drop(keys=part.rows().keys)
        until(lambda: metadata(plane)["used_bytes"] < size, "there is room again")
        part.put({"x": [np.full(1000, 7, np.uint8)]}, timeout=20)


def test_new_rows_that_wait_for_room_which_nobody_is_left_to_make_are_told(
    cluster: Cluster,
) -> None:
    hosts = ["keeper", "a", "b"]
    cluster.start(*hosts, arena="64MiB")
    planes = {name: cluster.connect(name) for name in hosts}
    members = {plane.stats()["address"]: name for name, plane in planes.items()}
    home = members[Roster.from_seeds(list(members)).home("p")]
    writer = next(name for name in "ab" if name != home)
    part = planes[writer].partition("p", {"s": ["x"]}, free="acked")
    with pytest.raises(dataplane.BackPressure, match="all of them are waiting"):
        fill(part, timeout=600)
    assert metadata(planes[home])["used_bytes"] > metadata(planes[home])["size_bytes"]
    with cluster.connect(home) as other, ThreadPoolExecutor() as threads:
        rows = other.partition("p", {"s": ["x"]}, free="acked")  # somebody is there who could
        put = threads.submit(part.put, {"y": [1]}, timeout=600)
        until(lambda: planes[writer].stats()["waiting_puts"] > 0, "the put waits")
        rows.drop(keys=rows.rows().keys)
        assert len(put.result()) == 1
    for plane in planes.values():
        plane.close()


def test_what_a_shard_refuses_takes_no_room(plane: dataplane.Plane) -> None:
    part = plane.partition("p", {"s": ["x"]})
    part.put({"x": [1], "z": [np.zeros(3000)]}, key=["k"])
    before = metadata(plane)["values_bytes"], arena(plane)["used_bytes"]
    for _ in range(20):
        with pytest.raises(dataplane.FieldExists):
            part.put({"x": [2], "w": [np.zeros(3000)]}, key=["k"])
    assert (metadata(plane)["values_bytes"], arena(plane)["used_bytes"]) == before


# messages that lie


LAYOUT = layouts.encode((layouts.ColumnSpec("array", "int64"),))
SOUND = Chunk(0, 0, 1, 8, 0, bytes(8))
ALONE = Piece(0, (0,), 0, b"\1")


def put_of(generation: int, chunk: Chunk = SOUND, piece: Piece = ALONE) -> Put:
    key = b"\0\0" + b"k" * 14
    owners = [INLINE, Owner("tcp://elsewhere", 7)][: max(chunk.owner, 0) + 1]
    values = Values(["x"], owners, [LAYOUT], [chunk], [piece])
    return Put("p", generation, Rows(key), values)


def tell(plane: dataplane.Plane, body: Body) -> None:
    send(plane._session, Call(body, Deadline(20.0)))


@pytest.mark.parametrize(
    "lie",
    [
        {"chunk": Chunk(0, 0, 1, 8, 0)},
        {"chunk": Chunk(0, 0, 1, 8, 0, bytes(7))},
        {"chunk": Chunk(0, 0, 1, 8, 0, bytes(16))},
        {"chunk": Chunk(0, 0, 1, (1 << 64) - 1, 0, bytes(8))},
        {"chunk": Chunk(0, 0, 1, -8, 0, bytes(8))},
        {"chunk": Chunk(0, 1, 1, 8, 0, bytes(8))},
        {"chunk": Chunk(0, 0, -1, 8, 0, bytes(8))},
        {"chunk": Chunk(0, 0, 0, 8, 0, bytes(8))},
        {"chunk": Chunk(0, 0, 1, 8, 1, bytes(8))},
        {"chunk": Chunk(1, 1, 1, 8, 0)},
        {"chunk": Chunk(2, 0, 1, 8, 0, bytes(8))},
        {"chunk": Chunk(-1, 0, 1, 8, 0, bytes(8))},
        {"piece": Piece(1, (0,), 0, b"\1")},
        {"piece": Piece(0, (1,), 0, b"\1")},
        {"piece": Piece(0, (0,), 1, b"\1")},
        {"piece": Piece(0, (0,), 0, b"\2")},
        {"piece": Piece(0, (0,), 0, b"\1", 1)},
        {"piece": Piece(0, (0,), 0, b"\1", 0, bytes(8))},
        {"piece": Piece(0, (0,), 0, b"\1", 0, b"\1\0\0\0")},
    ],
    ids=str,
)
def test_chunks_that_are_not_as_they_are_told_are_refused(
    plane: dataplane.Plane, lie: dict[str, Any]
) -> None:
    part = plane.partition("p", {"s": ["x"]})
    generation: int = part.stats()["generation"]
    with pytest.raises(dataplane.ProtocolError):
        tell(plane, put_of(generation, **lie))
    part.put({"x": [5]})
    assert part.claim("s", rows=1, timeout=20)["x"][0] == 5


@pytest.mark.parametrize(
    ("fields", "inline"),
    [((0,), bytes(7)), ((0,), bytes(64)), ((0, -1), bytes(8))],
    ids=["too short", "too long", "columns"],
)
def test_a_reader_is_told_of_a_chunk_that_is_not_as_its_layout_says(
    plane: dataplane.Plane, fields: tuple[int, ...], inline: bytes
) -> None:
    """Peers do not look into chunks."""
    part = plane.partition("p", {"s": ["x"]})
    generation: int = part.stats()["generation"]
    tell(
        plane,
        put_of(generation, Chunk(0, 0, 1, len(inline), 0, inline), Piece(0, fields, 0, b"\1")),
    )
    with pytest.raises(dataplane.DataplaneError, match="corrupt|chunk"):
        part.claim("s", rows=1, timeout=20)["x"][0]


def test_more_of_them_than_a_message_carries_are_refused_given_back_and_read_page_by_page(
    cluster: Cluster,
) -> None:
    """A message of that size between peers would end their link, again and again."""
    cluster.start("a", "b", arena="2G")
    rows = 20_000
    fields = {name: np.zeros((rows, 120)) + at for at, name in enumerate("abcd")}
    with cluster.connect("a") as one, cluster.connect("b") as other:
        part, there = one.partition("p", stages={"s": list(fields)}), other.partition("p")
        pairs = [row // 2 for row in range(rows)]  # of which each may bring 8 KiB
        keys = part.put(fields, key=range(rows), group=pairs).keys
        for mine in (part, there):
            with pytest.raises(dataplane.FrameTooLarge, match="claim fewer rows"):
                mine.claim("s", rows=rows, timeout=20)
            with mine.claim("s", rows=rows // 2, timeout=20) as batch:
                assert len(batch) == rows // 2
                batch.release()
            everything = mine.get()
            assert len(everything) == rows
            assert dense(everything.numpy("d")).sum() == 3 * rows * 120
            assert mine.get(keys=keys).keys == keys == list(range(rows))


@pytest.mark.parametrize("hosts", [["a"], ["keeper", "a", "b"]], ids=["here", "elsewhere"])
def test_a_message_that_a_full_shard_refuses_brings_its_large_values_all_the_same(
    cluster: Cluster, hosts: list[str]
) -> None:
    """They were committed, and gone with the refusal: what came again named bytes that were
    granted to nobody, and a put or an ack was a ProtocolError."""
    cluster.start(*hosts, arena="64MiB")
    planes = {name: cluster.connect(name) for name in hosts}
    members = {plane.stats()["address"]: name for name, plane in planes.items()}
    writer = "a"
    if len(hosts) > 1:
        shard = members[Roster.from_seeds(list(members)).home("p")]
        writer = next(name for name in "ab" if name != shard)

    def refused() -> int:
        return sum(int(metadata(plane)["refused_values"]) for plane in planes.values())

    small = [np.full(400, 7, np.uint8)] * 20
    large = [np.arange(2000) + i for i in range(20)]
    part = planes[writer].partition("p", {"s": ["x"]}, free="drop")
    while not refused():
        part.put({"x": small[:10]})
    for told in (2, 3):  # by clients that do not know that it is full; the second one shares values
        with cluster.connect(writer) as other:
            mine = other.partition("p")
            mine.put(
                {"x": small, "large": large},
                key=[f"{told} {i}" for i in range(20)],
                dedup=["large"],
            )
            assert refused() == told
    with cluster.connect(writer) as other:
        with other.partition("p").claim("s", rows=20, timeout=20) as batch:
            batch.add(score=small, more=large)
            keys = list(batch.keys)
        assert refused() == 4
    stored: list[tuple[str, list[str | int]]] = [("more", keys)]
    stored += [("large", [f"{n} {i}" for i in range(20)]) for n in (2, 3)]
    for field, among in stored:
        found = part.get(keys=among, fields=[field, "x"])
        for i, row in enumerate(large):
            np.testing.assert_array_equal(found[field][i], row)
            assert found["x"][i].tolist() == [7] * 400
    for plane in planes.values():
        plane.close()
