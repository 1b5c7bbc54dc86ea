"""A task that is cancelled at any of its awaits leaves no lease, grant, pin or connection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import shutil
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from dataplane import DataplaneError, Plane, aio
from tests.end_to_end.attacks import CancelledAt, no_leaks, used_bytes
from tests.end_to_end.conftest import Cluster, until
from tests.end_to_end.hosts import running

ROWS = 4
BIG = 400_000
"""Bytes of a row: a put of four is large enough to be copied off the event loop."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running("a", "b") as started:
        yield started


@pytest.fixture(autouse=True)
def here(cluster: Cluster, no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPLANE_RUN_DIR", str(cluster.run_dir))


def rows(seed: int) -> np.ndarray:
    return np.full((ROWS, BIG), seed, np.uint8)


async def put(part: aio.Partition) -> None:
    await part.put({"x": rows(1)}, key=[f"p{i}" for i in range(ROWS)], group="g", tags={"n": 1})


async def put_with_dedup(part: aio.Partition) -> None:
    await part.put({"x": rows(0)}, dedup=["x"])


async def claim_add_ack(part: aio.Partition) -> None:
    batch = await part.claim("s", rows=ROWS, timeout=10)
    await batch.add(y=rows(2))
    await batch.ack()


async def acks_of_parts(part: aio.Partition) -> None:
    """What was added to rows that are acked apart has to be parted too."""
    batch = await part.claim("s", rows=ROWS, timeout=10)
    await batch.add(y=[np.full(3000, row, np.uint8) for row in range(ROWS)])
    await batch[0:2].ack()
    await batch.release(values={"so_far": rows(1)})


async def claim_that_waits(part: aio.Partition) -> None:
    with contextlib.suppress(DataplaneError):
        await part.claim("s", rows=5 * ROWS, timeout=0.1)


async def get(part: aio.Partition) -> None:
    found = await part.get()
    await found.numpy("x")


async def stream(part: aio.Partition) -> None:
    async with part.stream("s", rows=2, timeout=10) as batches:
        seen = 0
        async for batch in batches:
            await batch.add(y=rows(3)[:2])
            seen += len(batch)
            if seen == 2 * ROWS:
                await batch.ack()
                break


CALLS = [put, put_with_dedup, claim_add_ack, acks_of_parts, claim_that_waits, get, stream]
Call = Callable[[aio.Partition], Coroutine[Any, Any, None]]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize(
    ("late", "loop"),
    [(False, asyncio.new_event_loop), (True, uvloop.new_event_loop)],
    ids=["before-asyncio", "after-uvloop"],
)
def test_a_cancelled_call_leaves_nothing_behind(
    cluster: Cluster, call: Call, late: bool, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    with (
        cluster.connect("a") as a,
        cluster.connect("b") as b,
        asyncio.Runner(loop_factory=loop) as runner,
    ):
        assert runner.run(cancelled_everywhere(a, b, call, late, crowded=False)) > 1
        with cluster.connect("a") as again:
            part = again.partition(f"q-{call.__name__}", stages={"s": ["x"]})
            part.put({"x": [1]})
            assert part.claim("s", rows=1, timeout=5)["x"][0] == 1
            part.drop()


@pytest.mark.parametrize(
    "call", [put, put_with_dedup, claim_add_ack, acks_of_parts], ids=lambda call: call.__name__
)
def test_nor_does_one_that_opens_a_connection_for_each_of_its_messages(
    cluster: Cluster, call: Call
) -> None:
    """As where as many calls are under way as there are connections: a call that has room may be
    cancelled before the message that names it has one."""
    with cluster.connect("a") as a, cluster.connect("b") as b, asyncio.Runner() as runner:
        assert runner.run(cancelled_everywhere(a, b, call, late=False, crowded=True)) > 1


def test_rows_come_back_though_the_end_of_a_block_is_cancelled_before_it_has_a_connection(
    cluster: Cluster,
) -> None:
    async def leave(part: aio.Partition, leaving: asyncio.Event) -> None:
        async with part.stream("s", rows=1, timeout=20) as batches:
            async for _ in batches:
                waits = [part.wait("t", rows=1, timeout=20) for _ in range(4)]
                others.extend(map(asyncio.ensure_future, waits))
                await asyncio.sleep(0.1)  # until the waits have taken all connections
                leaving.set()
                break

    async def at_every_turn() -> None:
        async with aio.connect("a", run="test") as client:
            part = await client.partition("p", stages={"s": ["x"], "t": ["y"]})
            for turns in range(12):
                await part.put({"x": [turns]}, key=[turns])
                leaving = asyncio.Event()
                task = asyncio.ensure_future(leave(part, leaving))
                await leaving.wait()
                for _ in range(turns):  # turns of the event loop
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task], timeout=20)
                assert task.done()
                del task
                for other in others:
                    other.cancel()
                await asyncio.wait(others)
                others.clear()
            await asyncio.to_thread(no_leaks, a)

    others: list[asyncio.Task[None]] = []
    with cluster.connect("a") as a:
        asyncio.run(at_every_turn())
        a.partition("p").drop()


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_cancelled_restore_leaves_no_partition_and_a_cancelled_checkpoint_no_file(
    cluster: Cluster, late: bool, tmp_path: Path
) -> None:
    async def everywhere(call: str, path: Path, look: Callable[[], None]) -> int:
        async with aio.connect("a", run="test") as client:
            for at in itertools.count(1):
                work = CancelledAt(getattr(client, call)(path), at, late)
                task = asyncio.ensure_future(waiting(work))
                await asyncio.wait([task], timeout=20)
                assert task.done(), f"not done 20 s after it was cancelled at await {at}"
                if not work.reached:
                    break
                assert task.cancelled(), task
                look()
                del task
                gc.collect()  # the frames of the traceback
            return at

    def nothing_but_whole() -> None:
        found = os.listdir(tmp_path)
        assert found in (["saved"], []), found
        if found:  # it was cancelled as it got its name
            shutil.rmtree(tmp_path / "saved")

    def no_partition() -> None:
        assert not a.stats()["partitions"] and not b.stats()["partitions"]

    with cluster.connect("a") as a, cluster.connect("b") as b:
        for name in ("one", "two"):
            part = a.partition(name, stages={"s": ["x"]})
            part.put({"x": rows(1), "n": list(range(ROWS))})
        assert asyncio.run(everywhere("checkpoint", tmp_path / "saved", nothing_but_whole)) > 5
        for name in a.partitions():
            a.partition(name).drop()
        assert asyncio.run(everywhere("restore", tmp_path / "saved", no_partition)) > 5
        assert a.partitions() == ["one", "two"]
        found = a.partition("one").get(fields=["n"])
        assert list(found["n"]) == list(range(ROWS))
        del found
        for name in a.partitions():
            a.partition(name).drop()
        no_leaks(a)
        until(lambda: not used_bytes(a), "every byte came back", 5)


def test_a_restore_that_is_cancelled_twice_leaves_no_partition_either(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The second time while it drops what it restored, as under `asyncio.timeout` in a task that
    is cancelled itself."""
    names = [f"p{number}" for number in range(6)]

    async def partitions(a: aio.Plane, b: aio.Plane) -> int:
        """At both peers, which list only their own; `partitions()` leaves out those that are being
        restored."""
        return sum([len((await peer.stats())["partitions"]) for peer in (a, b)])

    async def twice(a: aio.Plane, b: aio.Plane, client: aio.Plane, turns: int) -> bool:
        task = asyncio.ensure_future(client.restore(tmp_path / "saved"))
        while not task.done() and await partitions(a, b) < 3:
            pass
        task.cancel()
        for _ in range(turns):  # of the loop, in which the restore begins to drop
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=20)
        assert task.done()
        if not task.cancelled():
            task.result()
            return False
        assert not await partitions(a, b)
        return True

    async def again_and_again() -> None:
        async with (
            aio.connect("a", run="test") as a,
            aio.connect("b", run="test") as b,
            aio.connect("a", run="test") as client,
        ):
            undone = 0
            for turns in range(1, 21):
                undone += await twice(a, b, client, turns)
                for name in await a.partitions():
                    await (await a.partition(name)).drop()
            assert undone

    with cluster.connect("a") as a:
        for name in names:
            a.partition(name, stages={"s": ["x"]}).put({"x": rows(1), "n": list(range(ROWS))})
        a.checkpoint(tmp_path / "saved")
        for name in names:
            a.partition(name).drop()
        asyncio.run(again_and_again())
        no_leaks(a)


async def cancelled_everywhere(a: Plane, b: Plane, call: Call, late: bool, *, crowded: bool) -> int:
    """Cancels the call at its first await, its second, …; how many it had. crowded: whenever it
    awaits something, other calls take the connections that are idle."""
    a.stats(), b.stats()
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    client = await aio.connect("a", run="test")
    at = 1
    while await cancelled(a, b, client, call, at, late, crowded):
        at += 1
    # The client lives on: what it gave up must come back without its end.
    no_leaks(a, b)
    for name in a.partitions():
        a.partition(name).drop()
    until(lambda: not used_bytes(a) and not used_bytes(b), "every byte came back", 5)
    await client.close()
    del client

    def closed() -> bool:
        gc.collect()  # the client's housekeeper lets go of it last, in a thread of its own
        return len(os.listdir("/proc/self/fd")) <= descriptors

    until(closed, "its connections closed", 5)
    return at


async def cancelled(
    a: Plane, b: Plane, client: aio.Plane, call: Call, at: int, late: bool, crowded: bool
) -> bool:
    """Whether the call had so many awaits."""
    name = f"{call.__name__}-{late}-{at}"
    a.partition(name, stages={"s": ["x"], "t": ["y"]})
    for plane in (a, b):
        plane.partition(name).put({"x": rows(0)})
    part = await client.partition(name)
    others: list[asyncio.Task[None]] = []

    def take_connections() -> None:
        others.append(asyncio.ensure_future(part.wait("t", rows=1, timeout=20)))

    work = CancelledAt(call(part), at, late, take_connections if crowded else lambda: None)
    task = asyncio.ensure_future(waiting(work))
    await asyncio.wait([task], timeout=20)
    assert task.done(), f"not done 20 s after it was cancelled at await {at}"
    if work.reached:
        assert task.cancelled(), task
    else:
        task.result()
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    del task
    gc.collect()  # the frames of the traceback
    return work.reached


async def waiting(work: CancelledAt) -> None:
    await work
