"""place="spread": a producer on a full host goes on, its values lie where there is room."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

import dataplane
from tests.end_to_end.conftest import Cluster, until
from tests.end_to_end.telling import MIB, arena, check, rows


@pytest.fixture
def small_and_large(cluster: Cluster) -> Iterator[tuple[dataplane.Plane, dataplane.Plane]]:
    cluster.start("a", "b", arena="256MiB", arenas={"a": "16MiB"})
    with cluster.connect("a") as here, cluster.connect("b") as there:
        yield here, there


def test_three_times_the_arena_is_put_while_another_host_has_room(
    small_and_large: tuple[dataplane.Plane, dataplane.Plane],
) -> None:
    here, there = small_and_large
    part = here.partition("p", stages={"s": ["x"]}, place="spread")
    for first in range(0, 48, 4):
        part.put(rows(first, 4), timeout=20)
    stats, large = here.stats(), there.stats()
    assert stats["arena"]["used_bytes"] <= 16 * MIB
    assert stats["moved_bytes"] == large["adopted_bytes"] > 32 * MIB
    lies = part.stats()["bytes_at"]
    assert lies[stats["address"]] + lies[large["address"]] == part.stats()["bytes"]
    assert lies[large["address"]] > 32 * MIB
    far = there.partition("p")
    seen: list[int] = []
    for part_here in (far, part):
        for _ in range(6):
            batch = part_here.claim("s", rows=4, fields=["x", "text", "meta"], timeout=20)
            seen += check(batch)
            batch.ack()
            del batch
    assert sorted(seen) == list(range(48))
    for plane in (here, there):
        until(
            lambda plane=plane: arena(plane)["used_bytes"] == arena(plane)["cached_bytes"], "free"
        )


def test_rows_that_moved_are_read_by_key_and_dropped(
    small_and_large: tuple[dataplane.Plane, dataplane.Plane],
) -> None:
    here, there = small_and_large
    part = here.partition("p", place="spread", free="drop")
    keys = [f"k{n}" for n in range(40)]
    for first in range(0, 40, 4):
        part.put(rows(first, 4), key=keys[first : first + 4], timeout=20)
    assert there.stats()["adopted_bytes"] > 20 * MIB
    for plane in (here, there):
        got = plane.partition("p").get(keys=keys[::-8])
        assert check(got) == [39, 31, 23, 15, 7]
        del got
    part.drop(keys=keys[1:])
    assert check(part.get(keys=keys[:1])) == [0]
    part.drop()
    for plane in (here, there):
        until(
            lambda plane=plane: arena(plane)["used_bytes"] == arena(plane)["cached_bytes"], "free"
        )


def test_what_is_in_view_or_leased_stays_and_nobody_finds_it_gone(
    small_and_large: tuple[dataplane.Plane, dataplane.Plane],
) -> None:
    here, there = small_and_large
    part = here.partition("p", stages={"s": ["x"]}, place="spread")
    far = there.partition("p")
    part.put(rows(0, 3))
    mine = part.claim("s", rows=1, fields=["x", "text", "meta"], timeout=20)
    theirs = far.claim("s", rows=1, fields=["text"], timeout=20)
    for first in range(3, 39, 4):
        part.put(rows(first, 4), timeout=20)
    assert check(mine) == [0]
    assert (theirs["x"][0] == 1).all()  # read from where it was put, after all the others moved
    mine.ack()
    theirs.ack()


def test_when_the_host_that_they_moved_to_dies_those_rows_are_lost_by_name_and_no_others(
    cluster: Cluster,
) -> None:
    cluster.start("a", "b", "c", arena="8MiB", arenas={"b": "16MiB", "c": "256MiB"})
    planes = {name: cluster.connect(name) for name in "abc"}
    until(lambda: planes["a"].stats()["roster"]["unprotected"] == 0, "backups are in sync")
    part = planes["b"].partition("p", stages={"s": ["x"]}, place="spread")
    keys = [f"k{n}" for n in range(40)]
    for first in range(0, 40, 4):
        part.put(rows(first, 4), key=keys[first : first + 4], timeout=20)
    there = part.stats()["bytes_at"][planes["c"].stats()["address"]]
    lost = planes["a"].partition("p").lost(30)
    cluster.peers["c"].kill()
    cluster.peers["c"].wait()
    named = set(next(lost))
    assert len(named) >= there // MIB > 10
    part.seal()
    seen: list[int] = []
    with pytest.raises(dataplane.RowsLost):
        for batch in part.stream("s", rows=1, fields=["x", "text", "meta"], timeout=30):
            seen += check(batch)
            del batch
    assert sorted([*named, *(f"k{n}" for n in seen)]) == sorted(keys)
    for name in "ab":
        plane = planes[name]
        until(
            lambda plane=plane: arena(plane)["used_bytes"] == arena(plane)["cached_bytes"], "free"
        )
    for plane in planes.values():
        with contextlib.suppress(dataplane.ConnectError):  # of the peer that was killed
            plane.close()


@pytest.mark.parametrize("producer", "ab")
def test_when_no_host_has_room_a_put_waits_and_then_says_so(
    cluster: Cluster, producer: str
) -> None:
    # the first of three keeps the roster and no rows: those of its producers are elsewhere
    cluster.start("a", "b", "c", arena="16MiB")
    planes = {name: cluster.connect(name) for name in "abc"}
    part = planes[producer].partition("p", stages={"s": ["x"]}, place="spread")
    done = 0
    with pytest.raises(dataplane.BackPressure):
        for done in range(80):
            part.put(rows(done, 1), timeout=3)
    assert 20 < done < 48  # more than one arena, less than three
    assert all(arena(plane)["used_bytes"] <= 16 * MIB for plane in planes.values())
    assert sum(plane.stats()["adopted_bytes"] for plane in planes.values()) > 12 * MIB
    waiter = threading.Thread(target=lambda: part.put(rows(done, 1), timeout=30))
    waiter.start()
    until(lambda: planes[producer].stats()["waiting_puts"] == 1, "it waits for room")
    seen: list[int] = []
    far = planes["c"].partition("p")
    while len(seen) < done + 1:
        batch = far.claim("s", rows=1, fields=["x", "text", "meta"], timeout=20)
        seen += check(batch)
        batch.ack()
        del batch
    waiter.join(30)
    assert sorted(seen) == list(range(done + 1))
    for plane in planes.values():
        plane.close()
