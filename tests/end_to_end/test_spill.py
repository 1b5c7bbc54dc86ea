"""--spill: a producer goes on when the arena is full, and its values come back from the disk."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dataplane
from dataplane.client.read.column_view import ColumnView
from tests.end_to_end.conftest import PLANE, Cluster, peer_command, until
from tests.end_to_end.telling import MIB, arena, check, rows


def on_disk(folder: Path) -> int:
    """Bytes of the disk that files below take."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.stat().st_blocks * 512 for path in files)


def memory_of(pid: int) -> int:
    """Proportional set size: the arena's pages and all else of a process."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    line = next(line for line in text.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


def test_four_times_the_arena_is_put_with_nobody_reading_and_comes_back_as_it_was(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start("a", arena="16MiB", spill=f"{tmp_path}:64MiB")
    folder = tmp_path / f"dataplane-spill-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    with cluster.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x"]})
        pid = cluster.peers["a"].pid
        before = memory_of(pid)
        for first in range(0, 64, 4):
            part.put(rows(first, 4), timeout=20)
        stats = arena(plane)
        assert stats["used_bytes"] <= 16 * MIB and stats["spilled_bytes"] > 44 * MIB
        assert stats["spilled_bytes"] <= on_disk(tmp_path) < 65 * MIB
        assert memory_of(pid) - before < 32 * MIB  # the arena, and no copy of what is on the disk
        seen: list[int] = []
        for _ in range(16):
            batch = part.claim("s", rows=4, fields=["x", "text", "meta"], timeout=20)
            seen += check(batch)
            batch.ack()
            del batch
        assert sorted(seen) == list(range(64))
        until(lambda: arena(plane)["used_bytes"] == 0, "the arena is empty")
        until(lambda: on_disk(tmp_path) == 0, "the disk is free again")
        assert arena(plane)["spilled_bytes"] == 0
    (file,) = folder.iterdir()
    cluster.stop()
    assert not file.exists()


def test_spilled_rows_are_read_by_key_again_and_again_and_dropping_them_frees_the_disk(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start("a", arena="16MiB", spill=f"{tmp_path}:64MiB")
    with cluster.connect("a") as plane:
        part = plane.partition("p", free="drop")
        keys = [f"k{n}" for n in range(48)]
        for first in range(0, 48, 4):
            part.put(rows(first, 4), key=keys[first : first + 4], timeout=20)
        for _ in range(2):
            for at in range(0, 48, 3):  # old and new ones, more in all than the arena holds
                chosen = [at % 48, (at * 7 + 1) % 48]
                assert check(part.get(keys=[keys[n] for n in chosen])) == chosen
        disk = on_disk(tmp_path)
        part.drop(keys=keys[:24])
        until(lambda: on_disk(tmp_path) < disk - 20 * MIB, "half of the disk is free")
        assert check(part.get(keys=keys[24:28])) == [24, 25, 26, 27]
        part.put(rows(100, 8), timeout=20)
        part.drop()
        until(lambda: on_disk(tmp_path) == 0, "the disk is free")
        until(lambda: arena(plane)["used_bytes"] == 0, "the arena is empty")


def test_a_reader_on_another_host_gets_spilled_values(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start("a", "b", "c", arenas={"b": "16MiB"}, spill=f"{tmp_path}:64MiB")
    with cluster.connect("b") as here, cluster.connect("c") as there:
        part = here.partition("p", stages={"s": ["x"]})
        for first in range(0, 48, 4):
            part.put(rows(first, 4), timeout=20)
        assert arena(here)["spilled_bytes"] > 28 * MIB
        far, seen = there.partition("p"), []
        for _ in range(12):
            batch = far.claim("s", rows=4, fields=["x", "text", "meta"], timeout=20)
            seen += check(batch)
            batch.ack()
            del batch
        assert sorted(seen) == list(range(48))
        until(lambda: arena(here)["spilled_bytes"] == 0, "the disk is free")


def test_a_claim_of_more_than_the_share_of_pulls_makes_local_values_spill(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start("a", "b", "c", arena="16MiB", spill=f"{tmp_path}:64MiB")
    with cluster.connect("b") as there, cluster.connect("c") as here:
        mine = here.partition("mine", free="drop")
        for n in range(20):
            mine.put(rows(n, 1), key=[f"k{n}"], timeout=20)
        part = there.partition("p", stages={"s": ["x"]})
        for n in range(12):
            part.put(rows(n, 1), timeout=20)
        batch = here.partition("p").claim("s", rows=12, timeout=20, fields=["x", "text", "meta"])
        assert sorted(check(batch)) == list(range(12))
        batch.ack()
        del batch
        assert check(mine.get(keys=["k3", "k19"])) == [3, 19]


def test_when_the_spill_is_full_too_a_put_says_so_in_time_and_the_store_goes_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start("a", arena="16MiB", spill=f"{tmp_path}:16MiB")
    with cluster.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x"]}, free="drop")
        done, began = 0, 0.0
        with pytest.raises(dataplane.BackPressure, match="are spilled to .*partition 'p' has") as e:
            for done in range(60):
                began = time.monotonic()
                part.put(rows(done, 1), timeout=2)
        assert time.monotonic() - began < 10
        assert not isinstance(e.value, dataplane.SpillFull)
        assert e.value.details["rows"] == {"p": done} and 20 < done < 32
        assert e.value.details["spilled_bytes"] > 12 * MIB
        batch = part.claim("s", rows=2, fields=["x", "text", "meta"], timeout=20)
        assert len(check(batch)) == 2 and part.stats()["rows"] == done
        batch.drop()
        del batch
        part.put(rows(done, 1), timeout=20)


def test_a_wait_that_nothing_can_end_is_told_at_once_when_nothing_more_can_be_spilled(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start("a", arena="16MiB", spill=f"{tmp_path}:8MiB")
    with cluster.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x", "late"]})
        began = 0.0
        with pytest.raises(dataplane.BackPressure, match="all of them are waiting"):
            for n in range(60):
                began = time.monotonic()
                part.put(rows(n, 1), timeout=60)
        assert time.monotonic() - began < 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    options = ["-t", "tmpfs", "-o", "size=6m,mode=0700", "tmpfs", str(tmp_path)]
    if subprocess.run(["mount", *options], check=False).returncode:
        pytest.skip("this user may not mount")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def fill(part: dataplane.Partition, says: str) -> int:
    """Rows that went in before the disk was full."""
    done = 0
    with pytest.raises(dataplane.SpillFull, match=says):
        for done in range(60):
            part.put(rows(done, 1), timeout=2)
    return done


def read_and_drop(part: dataplane.Partition, count: int) -> list[int]:
    seen: list[int] = []
    while len(seen) < count:
        batch = part.claim("s", rows=1, fields=["x", "text", "meta"], timeout=20)
        seen += check(batch)
        batch.drop()
        del batch
    return sorted(seen)


def test_a_full_disk_is_told_by_its_name_and_the_store_goes_on(
    cluster: Cluster, small_disk: Path
) -> None:
    cluster.start("a", arena="16MiB", spill=f"{small_disk}:64MiB")
    try:
        with cluster.connect("a") as plane:
            part = plane.partition("p", stages={"s": ["x"]}, free="drop")
            done = fill(part, "writing to it failed: No space left on device")
            assert 8 < done < 26
            assert read_and_drop(part, done) == list(range(done))
            for n in range(12):
                part.put(rows(n, 1), timeout=20)
            subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
            for n in range(12, 40):
                part.put(rows(n, 1), timeout=20)
            assert read_and_drop(part, 40) == list(range(40))
    finally:
        cluster.stop()


def test_a_limit_on_the_size_of_files_is_a_full_disk(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start("a", arena="16MiB", spill=f"{tmp_path}:64MiB")
    pid = cluster.peers["a"].pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (6 * MIB, resource.RLIM_INFINITY))
    with cluster.connect("a") as plane:
        part = plane.partition("p", stages={"s": ["x"]}, free="drop")
        done = fill(part, "writing to it failed: File too large")
        assert on_disk(tmp_path) <= 6 * MIB
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        part.put(rows(done, 8), timeout=20)
        assert read_and_drop(part, done + 8) == list(range(done + 8))


def test_what_a_killed_peer_left_the_next_start_removes_and_a_living_ones_stays(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / f"dataplane-spill-{os.getuid()}"
    cluster.start("a", arena="16MiB", spill=f"{tmp_path}:64MiB")
    with cluster.connect("a") as plane:
        part = plane.partition("p", free="drop")
        for n in range(24):
            part.put(rows(n, 1), timeout=20)
    (left,) = folder.iterdir()
    assert on_disk(tmp_path) > 8 * MIB
    cluster.peers["a"].send_signal(signal.SIGKILL)
    cluster.peers["a"].wait()
    assert left.exists()
    cluster.restart("a")
    (ours,) = folder.iterdir()
    assert ours != left and on_disk(tmp_path) == 0
    cluster.start("other", arena="16MiB", spill=f"{tmp_path}:64MiB")
    assert ours in folder.iterdir() and len(list(folder.iterdir())) == 2


def test_producers_and_readers_at_once_lose_nothing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start("a", arena="16MiB", spill=f"{tmp_path}:64MiB")
    with cluster.connect("a") as plane, cluster.connect("a") as second:
        part = plane.partition("p", stages={"s": ["x"]}, groups=96, group_size=1)

        def produce() -> None:
            for n in range(96):
                second.partition("p").put(rows(n, 1), group=[f"g{n}"], timeout=60)

        producer = threading.Thread(target=produce)
        producer.start()
        part.wait("s", groups=40, timeout=60)
        seen: list[int] = []
        kept: ColumnView | None = None
        for batch in part.stream("s", rows=2, fields=["x", "text", "meta"]):
            seen += check(batch)
            kept = batch["x"]  # views outlive their batch while others come and go
        producer.join(60)
        assert sorted(seen) == list(range(96))
        del kept, batch
        until(lambda: arena(plane)["used_bytes"] == 0, "the arena is empty")
        until(lambda: on_disk(tmp_path) == 0, "the disk is free")


def test_an_image_that_was_spilled_is_put_again_and_shared_from_then_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start("a", arena="16MiB", spill=f"{tmp_path}:64MiB")
    with cluster.connect("a") as plane:
        part = plane.partition("p", free="drop")
        image = np.arange(MIB // 8)
        part.put({"image": [image]}, key=["old"], dedup=["image"])
        for n in range(24):
            part.put(rows(n, 1), timeout=20)
        assert arena(plane)["spilled_bytes"] > MIB
        before = arena(plane)["used_bytes"]
        for name in ("new", "newer"):
            part.put({"image": [image]}, key=[name], dedup=["image"], timeout=20)
        assert arena(plane)["used_bytes"] - before < 2 * MIB
        got = part.get(keys=["old", "new", "newer"], fields=["image"])
        assert all(np.array_equal(one, image) for one in got["image"])
        part.drop(keys=["new"])
        assert np.array_equal(part.get(keys=["newer"])["image"][0], image)


def test_an_embedded_peer_spills_where_the_variable_says(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ARENA", "16MiB"), ("SPILL", f"{tmp_path}"), ("LINGER", "1")):
        monkeypatch.setenv(f"DATAPLANE_{name}", value)
    with dataplane.connect() as plane:
        part = plane.partition("p", free="drop")
        for n in range(24):
            part.put(rows(n, 1), key=[f"k{n}"], timeout=20)
        assert arena(plane)["spilled_bytes"] > 8 * MIB
        assert arena(plane)["spill_bytes"] == 64 * MIB
        assert check(part.get(keys=["k0", "k23"])) == [0, 23]
        part.drop()
    until(lambda: not list(tmp_path.rglob("*.spill")), "the file went with the peer")


def test_a_directory_to_spill_to_that_cannot_be_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / f"dataplane-spill-{os.getuid()}"
    open_to_all.mkdir(mode=0o755)
    for setting, says in (
        (f"{tmp_path}/none:1GiB", "create it"),
        (f"{tmp_path}:1KiB", "at least 1MiB"),
        (f"{tmp_path}:much", "is not a valid size"),
        (f"{tmp_path}:1GiB", "must be a directory that belongs to uid"),
    ):
        command = peer_command("a", PLANE, "--arena", "16MiB", "--spill", setting)
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and says in done.stderr
