"""Checkpoints between real planes: taken while producers run, refused when damaged, all or none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest

import dataplane
import dataplane.aio
from dataplane import (
    BackPressure,
    CheckpointCorrupt,
    CheckpointFailed,
    PartitionConflict,
    Plane,
)
from dataplane.client.checkpoint import records
from dataplane.client.write.chunks import room_of
from tests.end_to_end.conftest import PLANE, Cluster, in_sync, line, until
from tests.end_to_end.hosts import held, running
from tests.same import equals

STAGES = {"reward": ["tokens"], "train": ["tokens", "reward"]}
PRODUCER = """
    import sys, numpy as np, dataplane
    plane = dataplane.connect(sys.argv[1] if len(sys.argv) > 1 else None)
    part = plane.partition("step", {"reward": ["tokens"], "train": ["tokens", "reward"]}, 4)
    for g in range(100_000):
        name = f"{plane.peer}{g}"
        part.put({"tokens": [np.full(2_000, g) for _ in range(4)]}, group=name,
                 key=[f"{name}.{i}" for i in range(4)], tags={"g": g})
        print(g, flush=True)
"""


@pytest.fixture
def one(plane: Plane) -> Plane:
    return plane


def ids(rows: Any) -> set[Any]:
    return set(rows.group_ids)


def put_groups(plane: Plane, many: int, nbytes: int = 8_000, **definition: Any) -> Any:
    part = plane.partition("step", STAGES, **{"group_size": 4, **definition})
    for g in range(many):
        values = [np.full(nbytes, g, np.uint8) for _ in range(4)]
        part.put({"tokens": values}, group=f"g{g}", key=[f"g{g}.{i}" for i in range(4)])
    return part


def left_over(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# what comes back


def test_values_keys_and_tags_of_every_kind_come_back_as_they_were(
    one: Plane, tmp_path: Path
) -> None:
    part = one.partition("mixed", free="drop")
    values = [
        np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
        np.zeros((0, 4), np.float32),
        np.array(1.5),
        {
            "text": "größer",
            "n": 2**70,
            "images": [np.ones((3, 2), np.uint8)] * 2,
            "pair": (1, None),
        },
        b"",
        np.full(300_000, 7, ml_dtypes.float8_e4m3fn),
    ]
    keys: list[str | int] = ["a", 7, "7", -1, "ü", 2**63]
    tags = {"mixed": [1, 1.0, True, None, "x", float("inf")]}
    part.put({"value": values}, key=keys, group=["g", None, 3, "g", None, 3], tags=tags)
    minted = part.put({"other": ["no name"]})
    part.tag(["a"], {"only": None})
    before = part.get(keys=keys, fields=["value"])
    one.checkpoint(tmp_path / "c")
    part.drop()
    assert one.restore(tmp_path / "c") == ["mixed"]
    again = one.partition("mixed")
    after = again.get(keys=keys, fields=["value"])
    assert equals(after["value"], before["value"])
    assert list(after.keys) == keys and after.group_ids == before.group_ids
    assert [type(v) for v in after.tags["mixed"]] == [type(v) for v in tags["mixed"]]
    assert after.tags["mixed"] == tags["mixed"]
    assert again.get(keys=minted.keys)["other"][0] == "no name"
    assert len(again.get(where=dataplane.tag("only") == None)) == 1  # noqa: E711


@pytest.mark.parametrize("group", ["g", None, [f"g{row}" for row in range(8)]])
def test_a_value_that_rows_share_is_written_once_and_shared_again(
    one: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: Any
) -> None:
    """Also where each of the rows, or of their groups, could be on a page of its own."""
    monkeypatch.setattr("dataplane.client._sync.save.SAVE_BYTES", 150_000)
    image = np.arange(100_000, dtype=np.uint8)
    part = one.partition("shared", free="drop")
    part.put({"image": [image] * 8}, group=group, dedup=["image"])
    one.checkpoint(tmp_path / "c")
    assert (tmp_path / "c/0000").stat().st_size < 101_000
    part.drop()
    one.restore(tmp_path / "c")
    arena = one.stats()["arena"]
    assert 100_000 <= arena["used_bytes"] < 110_000
    assert np.array_equal(one.partition("shared").get()["image"][7], image)


def test_a_group_of_more_chunks_than_a_put_may_bring_comes_back(one: Plane, tmp_path: Path) -> None:
    images = np.zeros((4_200, 4_096), np.uint8)
    images[:, :4] = np.arange(len(images), dtype="<u4")[:, None].view(np.uint8)
    part = one.partition("large", free="drop")
    for some in np.split(images, 2):
        part.put({"image": some}, group="g", dedup=["image"])
    one.checkpoint(tmp_path / "c")
    part.drop()
    one.restore(tmp_path / "c")
    assert np.array_equal(np.stack(list(one.partition("large").get()["image"])), images)


def test_stages_go_on_where_they_were(one: Plane, tmp_path: Path) -> None:
    part = put_groups(one, 6, groups=8)
    done = part.claim("reward", groups=2)
    done.add(reward=np.zeros(8, np.float32))
    done.ack()
    leased = part.claim("reward", groups=1)
    part.drop(groups=["g5"])
    one.checkpoint(tmp_path / "c")
    leased.release()
    part.drop()
    one.restore(tmp_path / "c")
    again = one.partition("step")
    rewarded = again.claim("reward", groups=3, timeout=10)
    assert {str(key).split(".")[0] for key in rewarded.keys} == {"g2", "g3", "g4"}
    assert ids(again.claim("train", groups=2, timeout=10)) == {"g0", "g1"}
    put_groups(one, 0, groups=8)  # declared as it was
    for g in range(6, 9):
        again.put({"tokens": [np.zeros(1)] * 4}, group=f"g{g}")
    until(lambda: again.stats()["phase"] == "sealed", "sealed by 8 groups")


def test_groups_that_were_done_with_count_towards_the_seal(one: Plane, tmp_path: Path) -> None:
    part = one.partition("step", {"s": ["x"]}, group_size=1, groups=2, free="acked")
    part.put({"x": [1]}, group="g0")
    part.claim("s", groups=1, timeout=10).ack()
    one.checkpoint(tmp_path / "c")
    part.drop()
    one.restore(tmp_path / "c")
    again = one.partition("step")
    again.put({"x": [2]}, group="g1")
    until(lambda: again.stats()["phase"] == "sealed", "sealed by 2 groups")


def test_a_sealed_partition_is_sealed_again_and_its_stream_ends(one: Plane, tmp_path: Path) -> None:
    part = put_groups(one, 3)
    part.claim("reward", groups=1).ack()
    part.seal()
    one.checkpoint(tmp_path / "c")
    part.drop()
    one.restore(tmp_path / "c")
    rows = sum(len(batch) for batch in one.partition("step").stream("reward", rows=2))
    assert rows == 8


@pytest.mark.parametrize(("before", "after"), [(("a",), ("a", "b")), (("a", "b"), ("a",))])
def test_another_number_of_peers_has_whole_groups_though_producers_ran(
    before: tuple[str, ...], after: tuple[str, ...], tmp_path: Path
) -> None:
    with running(*before) as cluster:
        known = {}
        producers = {name: cluster.worker(PRODUCER, DATAPLANE_PEER=name) for name in before}
        for name, producer in producers.items():
            for _ in range(20):
                known[name] = int(line(producer))
        with cluster.connect("a") as plane:
            plane.checkpoint(tmp_path / "c")
    with running(*after) as cluster, cluster.connect(after[-1]) as plane:
        plane.restore(tmp_path / "c")
        part = plane.partition("step")
        rows = part.get()
        assert set(map(len, rows.groups())) == {4}
        put_before = {f"{n}{g}" for n, last in known.items() for g in range(last + 1)}
        assert put_before <= ids(rows)
        assert all((v == g).all() for v, g in zip(rows["tokens"], rows.tags["g"], strict=True))
        with cluster.connect(after[0]) as other:
            batch = other.partition("step").claim("reward", groups=len(rows) // 4, timeout=30)
            assert ids(batch) == ids(rows)
            assert len(other.partition("step").get(keys=["a0.1", "a3.2"])) == 2


async def test_the_same_with_await(run_dir: Path, tmp_path: Path) -> None:
    cluster = Cluster(run_dir)
    cluster.start("a")
    async with dataplane.aio.connect("a", run=PLANE) as plane:
        part = await plane.partition("p", free="drop")
        await part.put({"x": [np.arange(3)]}, key="k")
        await plane.checkpoint(tmp_path / "c")
        await part.drop()
        assert await plane.restore(tmp_path / "c") == ["p"]
        rows = await (await plane.partition("p")).get(keys="k")
        assert rows["x"][0].tolist() == [0, 1, 2]
    cluster.stop()


async def test_a_checkpoint_that_is_cancelled_leaves_nothing(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, loop, write = Cluster(run_dir), asyncio.get_running_loop(), records.write
    cluster.start("a")
    async with dataplane.aio.connect("a", run=PLANE) as plane:
        part = await plane.partition("p", free="drop")
        await part.put({"x": [np.arange(3)]}, key="k")

        def then_cancel(*args: Any) -> None:
            write(*args)
            loop.call_soon_threadsafe(task.cancel)

        monkeypatch.setattr(records, "write", then_cancel)
        task = asyncio.ensure_future(plane.checkpoint(tmp_path / "c"))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert left_over(tmp_path) == []
        monkeypatch.setattr(records, "write", write)
        await plane.checkpoint(tmp_path / "c")
    cluster.stop()


def test_any_messagepack_reader_finds_the_values(one: Plane, tmp_path: Path) -> None:
    put_groups(one, 3)
    one.checkpoint(tmp_path / "c")
    note = json.loads((tmp_path / "c/manifest.json").read_text())["partitions"][0]
    data = (tmp_path / "c/0000").read_bytes()
    assert (note["name"], note["group_size"], note["file"]["bytes"]) == ("step", 4, len(data))
    start = 4 + int.from_bytes(data[:4], "little")
    tag, name, _, rows, (fields, _, layouts, chunks, pieces), *_ = msgpack.unpackb(data[4:start])
    assert (tag, name, fields) == (76, "step", ["tokens"])
    number, columns, base, given, *_ = pieces[1]
    assert columns == [0] and int.from_bytes(given, "little") == 0b1111
    assert rows[1][base : base + 4] == [f"g1.{i}" for i in range(4)]
    (kind, dtype, _, _), *others = msgpack.unpackb(layouts[chunks[number][4]])[1]
    assert (kind, dtype, others) == ("array", "uint8", [])
    start += sum(-(-chunk[3] // 64) * 64 for chunk in chunks[:number])
    assert np.frombuffer(data, "<u4", 4, start).tolist() == [8_000] * 4
    raw = np.frombuffer(data, np.uint8, 4 * 8_000, start + 64)
    assert (raw == 1).all() and chunks[number][3] == 64 + 4 * 8_000


# what is refused


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Plane, Path]]:
    """A checkpoint, and an empty plane to restore it into."""
    path = tmp_path_factory.mktemp("written")
    with running("a", "b") as cluster, cluster.connect("a") as plane:
        part = put_groups(plane, 3)
        plane.checkpoint(path / "c")
        part.drop()
        yield plane, path / "c"


DAMAGE: dict[str, Callable[[Path], object]] = {
    "altered": flipped,
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("file", ["manifest.json", "0000"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_nothing_is_restored(
    written: tuple[Plane, Path], tmp_path: Path, file: str, damage: str
) -> None:
    plane, original = written
    copy = tmp_path / "copy"
    shutil.copytree(original, copy)
    DAMAGE[damage](copy / file)
    with pytest.raises(CheckpointCorrupt) as refused:
        plane.restore(copy)
    assert refused.value.details["file"] == str(copy / file)
    assert plane.stats()["partitions"] == {}


def test_a_second_restore_is_refused_and_changes_nothing(written: tuple[Plane, Path]) -> None:
    plane, path = written
    plane.restore(path)
    part = plane.partition("step")
    before = part.stats()
    with pytest.raises(PartitionConflict, match=r"run '.*' already has .* into another run$"):
        plane.restore(path)
    after = part.stats()
    for sizes in ("metadata_bytes", "bytes_per_row"):  # another peer may have heard of it meanwhile
        before.pop(sizes), after.pop(sizes)
    assert after == before
    part.drop()
    until(lambda: not held(plane), "everything came back")


def test_a_directory_that_is_there_is_not_written_over(
    written: tuple[Plane, Path], tmp_path: Path
) -> None:
    plane, path = written
    with pytest.raises(CheckpointFailed):
        plane.checkpoint(path)
    with pytest.raises(CheckpointFailed):
        plane.restore(tmp_path / "nothing")
    with pytest.raises(CheckpointFailed):
        plane.checkpoint(tmp_path / "no" / "such" / "parent")
    for call in (plane.checkpoint, plane.restore):
        with pytest.raises(CheckpointFailed):
            call(tmp_path / ("x" * 70_000))
    for no_path in (None, 7, b"bytes", "a\0b", "\ud800"):
        with pytest.raises(dataplane.InvalidCall, match="expected a path"):
            plane.checkpoint(no_path)  # type: ignore[arg-type]
        with pytest.raises(dataplane.InvalidCall, match="expected a path"):
            plane.restore(no_path)  # type: ignore[arg-type]
    (tmp_path / "empty").mkdir()
    plane.checkpoint(tmp_path / "empty")
    assert left_over(tmp_path) == ["empty"]


# what ends half-way

HALF_WAY = """
    import sys, dataplane
    from dataplane.client.checkpoint import records
    write = records.write
    def slow(*args):
        write(*args)
        print("written", flush=True)
        sys.stdin.readline()
    records.write = slow
    plane = dataplane.connect()
    try:
        plane.checkpoint(sys.stdin.readline().strip())
    except dataplane.DataplaneError as exc:
        print(type(exc).__name__, flush=True)
"""


def told(worker: Any, text: str) -> None:
    worker.stdin.write(text + "\n")
    worker.stdin.flush()


def test_a_client_killed_half_way_leaves_nothing_of_that_name(
    alone: Cluster, one: Plane, tmp_path: Path
) -> None:
    put_groups(one, 3)
    worker = alone.worker(HALF_WAY)
    told(worker, str(tmp_path / "c"))
    assert line(worker) == "written"
    worker.kill()
    worker.wait()
    assert not (tmp_path / "c").exists()
    with pytest.raises(CheckpointFailed):
        one.restore(tmp_path / "c")
    until(lambda: one.stats()["arena"]["pinned_bytes"] == 0, "its pins came back")
    one.checkpoint(tmp_path / "c")


@pytest.mark.parametrize("nbytes", [8_000, 1 << 20], ids=["at the end", "half-way"])
def test_a_full_disk_is_said_and_nothing_is_left(
    nbytes: int, alone: Cluster, one: Plane, tmp_path: Path
) -> None:
    part = put_groups(one, 3, nbytes=nbytes)
    limited = HALF_WAY.replace(
        "    plane = dataplane.connect()",
        "    import resource, signal\n"
        "    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "    plane = dataplane.connect()",
    )
    worker = alone.worker(limited)
    told(worker, str(tmp_path / "c"))
    if nbytes < 50_000:  # all that is written fits the buffer of the file
        assert line(worker) == "written"
        told(worker, "")
    assert line(worker) == "CheckpointFailed"
    assert left_over(tmp_path) == []
    assert len(part.get()) == 12


def test_where_a_peer_is_killed_half_way_the_checkpoint_goes_on_with_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running("a", "b") as cluster, cluster.connect("a") as plane:
        put_groups(plane, 8, nbytes=100_000)
        with cluster.connect("b") as other:
            other.partition("step").put({"tokens": [np.zeros(100_000)] * 4}, group="far")
        in_sync(plane)  # else a partition whose primary is b is lost with it
        write = records.write

        def then_kill(*args: Any) -> None:
            write(*args)
            if cluster.peers["b"].poll() is None:
                cluster.peers["b"].kill()
                cluster.peers["b"].wait()

        monkeypatch.setattr("dataplane.client._sync.save.SAVE_BYTES", 1 << 18)
        monkeypatch.setattr(records, "write", then_kill)
        plane.checkpoint(tmp_path / "c", timeout=60)
        assert left_over(tmp_path) == ["c"]
        part = plane.partition("step")
        kept = [*part.rows().keys]
        part.drop()
        plane.restore(tmp_path / "c")
        again = plane.partition("step")
        assert [*again.rows().keys] == kept and len(kept) == 32
        assert again.stats()["closed_groups"] == 8  # a lost group may be put again


def test_a_partition_dropped_meanwhile_is_left_out(
    one: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = put_groups(one, 3, nbytes=1 << 20)
    one.partition("a", free="drop").put({"x": [1]}, key="k")
    for name in ("y", "z"):
        one.partition(name, free="drop").put({"x": [1]}, key="k")
    write = records.write

    def then_drop(file: Any, name: str, saved: Any, *args: Any) -> None:
        write(file, name, saved, *args)
        if saved.table.values.fields == ["tokens"]:
            part.drop()
            one.partition("y").drop()

    monkeypatch.setattr("dataplane.client._sync.save.SAVE_BYTES", 1 << 20)
    monkeypatch.setattr(records, "write", then_drop)
    one.checkpoint(tmp_path / "c")
    assert left_over(tmp_path / "c") == ["0000", "0001", "manifest.json"]
    for name in ("a", "z"):
        one.partition(name).drop()
    assert one.restore(tmp_path / "c") == ["a", "z"]


def test_rows_freed_meanwhile_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running("a", "b") as cluster, cluster.connect("a") as plane:
        with cluster.connect("b") as other:
            part = put_groups(other, 8, nbytes=100_000)
            monkeypatch.setattr("dataplane.client._sync.save.SAVE_BYTES", 1 << 18)
            write = records.write

            def then_drop(*args: Any) -> None:
                write(*args)
                part.drop(groups=["g6", "g7"])

            monkeypatch.setattr(records, "write", then_drop)
            plane.checkpoint(tmp_path / "c")
            part.drop()
        plane.restore(tmp_path / "c")
        assert ids(plane.partition("step").get()) == {f"g{g}" for g in range(6)}


def test_a_host_with_a_small_arena_restores_what_a_large_one_saved(
    cluster: Cluster, tmp_path: Path
) -> None:
    with running(alone="big") as other, other.connect("big") as plane:
        put_groups(plane, 9, nbytes=1 << 20)
        plane.checkpoint(tmp_path / "c")
    cluster.start("small", arena="16MiB", spill=f"{tmp_path}:64MiB")
    with cluster.connect("small") as plane:
        plane.restore(tmp_path / "c", timeout=60)
        part = plane.partition("step")
        for g in range(9):
            assert (part.get(keys=[f"g{g}.3"])["tokens"][0] == g).all()


def test_a_page_has_no_more_chunks_than_a_restore_reserves_at_once(
    one: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk is saved whole, though one row of it is left."""
    monkeypatch.setattr("dataplane.client._sync.save.SAVE_BYTES", 1 << 20)
    part = one.partition("p", free="drop")
    part.put({"x": np.zeros((256, 8_000), np.uint8)}, key=range(256))
    part.drop([row for row in range(256) if row % 32])
    one.checkpoint(tmp_path / "c")
    with contextlib.closing(records.RecordReader(tmp_path / "c/0000")) as reader:
        sizes = [room_of(chunks) for _, chunks, _ in reader.records()]
    assert sum(sizes) > 2_000_000 and max(sizes) <= 1 << 20
    part.drop()


def test_a_restore_that_finds_no_room_takes_back_what_it_put(tmp_path: Path) -> None:
    with running(alone="big") as cluster, cluster.connect("big") as plane:
        put_groups(plane, 8, nbytes=1 << 20)
        plane.checkpoint(tmp_path / "c")
    with running(alone="small", arena="16MiB") as cluster, cluster.connect("small") as plane:
        with pytest.raises(BackPressure, match="has 8 rows with 8.0 MiB"):
            plane.restore(tmp_path / "c", timeout=3)
        assert plane.stats()["partitions"] == {}
        until(lambda: not held(plane), "everything came back")
