"""Loops that produce rows end with the partition, and a row can be waited for by its key."""

from __future__ import annotations

import asyncio
import os
import re
import threading

import pytest

import dataplane
from dataplane import Plane, aio
from tests.end_to_end.conftest import PLANE, until


def test_producers_end_without_an_error_when_enough_groups_have_closed(plane: Plane) -> None:
    part = plane.partition("p", {"train": ["x"]}, group_size=2, groups=4)
    together, sizes = threading.Barrier(3, timeout=30), list[int]()

    def produce(worker: int) -> None:
        for prompt in part.producing(range(100 * worker, 100 * worker + 2)):
            together.wait()  # all of them have a prompt in hand: of six groups two are surplus
            sizes.append(len(part.put({"x": [1, 2]}, group=prompt)))

    workers = [threading.Thread(target=produce, args=(worker,)) for worker in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert sorted(sizes) == [0, 0, 2, 2, 2, 2]
    assert part.stats()["closed_groups"] == 4
    assert list(part.producing(range(9))) == []
    with pytest.raises(dataplane.PartitionSealed):  # who is in no such loop is told
        part.put({"x": [1, 2]}, group="late")


def test_a_producer_that_waits_to_be_admitted_ends_with_the_seal(plane: Plane) -> None:
    part = plane.partition("p", {"train": ["x"]}, group_size=1)
    begun, came = list[int](), list[tuple[int, int]]()

    def produce() -> None:
        for prompt in part.producing(range(100)):
            begun.append(prompt)
            with part.admit(1, max_lag=0, per_version=2) as permits:
                came.append((permits.n, len(part.put({"x": [1]}, group=prompt))))

    worker = threading.Thread(target=produce)
    worker.start()
    until(lambda: len(begun) == 3, "the third is to be admitted")
    part.seal()
    worker.join(30)
    assert came == [(1, 1), (1, 1), (0, 0)]


def test_a_producer_ends_where_its_partition_is_dropped_or_its_items_are_used_up(
    plane: Plane,
) -> None:
    part = plane.partition("p", {"train": ["x"]})
    came = []
    for prompt in part.producing(range(9)):
        part.put({"x": [prompt]})
        came.append(prompt)
        if prompt == 3:
            part.drop()
    assert came == [0, 1, 2, 3]
    again = plane.partition("p", {"train": ["x"]})
    assert list(again.producing("ab")) == ["a", "b"]
    for _ in again.producing("ab"):
        break  # what is put behind the loop is in no loop
    again.seal()
    with pytest.raises(dataplane.PartitionSealed):
        again.put({"x": [1]})
    with pytest.raises(dataplane.InvalidCall, match=r"producing\(3\): expected an iterable"):
        again.producing(3)  # type: ignore[arg-type]


def test_a_put_in_the_loop_may_use_another_handle_of_the_partition(plane: Plane) -> None:
    plane.partition("p", {"train": ["x"]})
    refs = []
    for prompt in plane.partition("p").producing(range(9)):
        if prompt == 2:
            plane.partition("p").seal()
        refs.append(len(plane.partition("p").put({"x": [prompt]})))
    assert refs == [1, 1, 0]


def test_a_task_produces_as_a_thread_does(plane: Plane) -> None:
    plane.partition("p", {"train": ["x"]}, group_size=1, groups=3)

    async def main() -> int:
        async with aio.connect("a", run=PLANE) as other:
            part = await other.partition("p")
            puts = 0
            async for prompt in part.producing(range(9)):
                await part.put({"x": [prompt]}, group=prompt)
                puts += 1
            await part.wait("train", groups=3, timeout=20)
            with pytest.raises(dataplane.StreamEnd, match="is sealed and has no row 'none'"):
                await part.wait(key="none")
            return puts

    assert asyncio.run(main()) == 3


def test_a_row_is_waited_for_by_its_key(plane: Plane) -> None:
    part = plane.partition("weights", free="drop")
    waits = threading.Thread(target=part.wait, kwargs={"key": "version-7", "timeout": 30})
    waits.start()
    with pytest.raises(dataplane.ClaimTimeout, match="no rows have been put into the partition"):
        part.wait(key="version-7", timeout=0.2)
    assert waits.is_alive()
    part.put({"path": ["/checkpoints/7"]}, key="version-7")
    waits.join(30)
    assert not waits.is_alive()
    part.wait(key="version-7", timeout=0)  # it is there
    with pytest.raises(dataplane.ClaimTimeout) as caught:
        part.wait(key="verison-7", timeout=0.2)
    assert re.fullmatch(
        "wait for row 'verison-7' of partition 'weights' timed out after 0.2 s: no row has the "
        "key 'verison-7', but one has 'version-7': is one of the keys misspelt[?]; 1 row has "
        rf"been put so far, the last .+ ago, by pid {os.getpid()} on host a, `.+` \(connected\)",
        caught.value.message,
    )
    part.put({"path": ["/checkpoints/8"]}, key=8)
    with pytest.raises(dataplane.ClaimTimeout, match="no row has the key '8', but one has 8: "):
        part.wait(key="8", timeout=0.2)
    part.drop(["version-7"])
    with pytest.raises(dataplane.RowsDropped):
        part.wait(key="version-7")
    with pytest.raises(dataplane.InvalidCall, match="can be combined only with timeout="):
        part.wait("train", key="version-7")
