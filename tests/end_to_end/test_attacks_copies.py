"""Shared and pulled copies under attack: freed while they are shared, read while they go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import dataplane
from dataplane import Plane
from tests.end_to_end.attacks import all_free, no_leaks
from tests.end_to_end.conftest import Cluster, line
from tests.end_to_end.hosts import running

MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running("a", "b", arena="64MiB") as started:
        yield started


@pytest.fixture
def planes(
    cluster: Cluster, no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Plane, Plane]]:
    monkeypatch.setenv("DATAPLANE_RUN_DIR", str(cluster.run_dir))
    a, b = (cluster.connect(name) for name in "ab")
    yield a, b
    cluster.end_workers()
    for name in a.partitions():
        a.partition(name).drop()
    no_leaks(a, b)
    for plane in (a, b):
        all_free(plane)
        plane.close()


def test_a_value_that_is_freed_while_it_is_shared_stays_whole(planes: tuple[Plane, Plane]) -> None:
    a, b = planes
    part = a.partition("dedup", stages={"s": ["x"]})
    far = b.partition("dedup")
    images = [np.full(100_000, i, np.uint8) for i in range(3)]
    failures: list[BaseException] = []
    puts = 300

    def put(at: int) -> None:
        try:
            for i in range(puts):
                n = (i + at) % 3
                part.put({"x": [images[n]] * 2, "n": [n] * 2}, dedup=["x"])
        except BaseException as exc:
            failures.append(exc)

    def consume(of: dataplane.Partition) -> None:
        try:
            for batch in of.stream("s", rows=2, min=1, fields=["x", "n"], timeout=20):
                for x, n in zip(batch["x"], batch["n"], strict=True):
                    assert (x == n).all() and len(x) == 100_000
        except BaseException as exc:
            failures.append(exc)

    producers = [threading.Thread(target=put, args=(i,)) for i in range(2)]
    consumers = [threading.Thread(target=consume, args=(p,)) for p in (part, part, far)]
    for thread in producers + consumers:
        thread.start()
    for thread in producers:
        thread.join(30)
    part.seal()
    for thread in consumers:
        thread.join(30)
        assert not thread.is_alive()
    assert not failures, failures


READER = """
    import dataplane, sys
    part = dataplane.connect().partition("{name}")
    print("ready", flush=True)
    sys.stdin.readline()
    rows = part.get(keys={keys})
    print(int(rows["x"][0][0]), flush=True)
    sys.stdin.readline()
"""


def pulled(plane: Plane) -> int:
    return int(plane.stats()["pulled_bytes"])


def test_one_transfer_serves_every_reader_of_a_host(
    planes: tuple[Plane, Plane], cluster: Cluster
) -> None:
    a, b = planes
    part = a.partition("once", free="drop")
    part.put({"x": [np.full(16 * MIB, 7, np.uint8)]}, key=["k"])
    before = pulled(b)
    readers = [
        cluster.worker(READER.format(name="once", keys=["k"]), DATAPLANE_PEER="b") for _ in range(5)
    ]
    assert {line(r) for r in readers} == {"ready"}
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("\n")
        reader.stdin.flush()
    readers[0].kill()  # perhaps the one for which the pull was begun
    assert [line(r) for r in readers[1:]] == ["7"] * 4
    assert 0 <= pulled(b) - before - 16 * MIB < 4096  # one chunk
    for reader in readers[1:]:
        reader.communicate("\n")


def test_views_keep_their_copies_while_others_are_pulled(planes: tuple[Plane, Plane]) -> None:
    a, b = planes
    part = a.partition("evict", free="drop")
    far = b.partition("evict")
    keys = [f"k{i}" for i in range(9)]
    for i, key in enumerate(keys):
        part.put({"x": [np.full(4 * MIB, i, np.uint8)]}, key=[key])
    held = far.get(keys=keys[:2])["x"]
    for turn in range(3):
        for i, key in enumerate(keys):
            assert (far.get(keys=[key])["x"][0] == i).all(), turn
    assert (held[0] == 0).all() and (held[1] == 1).all()
    # What is cached gives way to what is put.
    for i in range(15):
        far.put({"x": [np.full(2 * MIB, i, np.uint8)]}, key=[f"b{i}"], timeout=5)
    assert (held[0] == 0).all() and (held[1] == 1).all()
    assert (far.get(keys=["k8"])["x"][0] == 8).all()
    far.drop(keys=[f"b{i}" for i in range(15)])


def test_a_read_that_finds_no_room_says_so_in_time(planes: tuple[Plane, Plane]) -> None:
    a, b = planes
    part = a.partition("large", free="drop")
    far = b.partition("large")
    keys = [f"k{i}" for i in range(9)]
    for i, key in enumerate(keys):
        part.put({"x": [np.full(4 * MIB, i, np.uint8)]}, key=[key])
        far.put({"x": [np.full(4 * MIB, i, np.uint8)]}, key=["far" + key])
    held = far.get(keys=keys[:3])["x"]
    began = time.monotonic()
    with pytest.raises(
        dataplane.BackPressure, match="a pull from other hosts .* no space was freed"
    ):
        far.get(keys=keys, timeout=2)
    assert time.monotonic() - began < 6
    assert (held[2] == 2).all()
    del held
    assert (far.get(keys=keys[:5], timeout=5)["x"][4] == 4).all()
