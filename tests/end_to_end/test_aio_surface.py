"""`dataplane.aio`: the same surface with await, under asyncio and uvloop, in loops and threads."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
import uvloop

import dataplane
from dataplane import aio, tag
from tests.end_to_end.conftest import Cluster, until
from tests.end_to_end.hosts import held, running
from tests.leaks import FAILED
from tests.same import dense

BIG = 2000
Loop = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running("a", "b") as started:
        yield started


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Loop:
    made: Loop = request.param
    return made


def run(loop: Loop, main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main)


@pytest.fixture(autouse=True)
def nothing_stays_behind(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    no_launcher: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    monkeypatch.setenv("DATAPLANE_RUN_DIR", str(cluster.run_dir))
    yield
    gc.collect()  # what tracebacks of others held
    with cluster.connect("a") as a, cluster.connect("b") as b:
        for name in a.partitions():
            a.partition(name).drop()
        if request.node.stash.get(FAILED, False):
            return  # its own traceback holds batches, also while it is tried again
        until(lambda: not held(a) and not held(b), f"nothing is held: {held(a)}, {held(b)}", 5)


def test_the_whole_surface_with_await(cluster: Cluster, loop: Loop) -> None:
    run(loop, whole_surface())


async def whole_surface() -> None:
    async with aio.connect("a", run="test") as here, aio.connect("b", run="test") as there:
        stages = {"s": ["x"], "t": ["x", "y"]}
        part = await here.partition("p", stages, group_size=2, free="drop")
        far = await there.partition("p")
        ref = await part.put(
            {"x": np.arange(4 * BIG).reshape(4, BIG), "z": list("abcd")},
            key=list("abcd"),
            group=["g", "g", "h", "h"],
            tags={"n": [1, 2, 3, 4]},
        )
        await far.wait("s", groups=2, timeout=20)
        with pytest.raises(dataplane.ClaimTimeout, match="lacks? `y`"):
            await far.claim("t", rows=1, timeout=0.2)
        async with await far.claim("s", groups=1, where=tag("n") > 2, timeout=20) as batch:
            assert sorted(batch.keys) == ["c", "d"] and batch.fields == ["x"]
            with pytest.raises(dataplane.NotFetched, match="await"):
                batch["z"]
            await batch.fetch("z")
            assert sorted(batch["z"]) == ["c", "d"]
            (group,) = batch.groups()
            assert group.id == "h" and dense(group.numpy("x")).shape == (2, BIG)
            await batch.add(y=[1.0, 2.0])
        assert batch.state == "acked"
        batch = await part.claim("s", budget={"n": 3}, unit="rows", timeout=20)
        await batch.release(tags={"n": 0})
        batch = await part.claim("s", rows=2, fields=[], timeout=20, min=1)
        await batch.drop(rows=[0])
        await batch.ack()
        await part.tag(["c"], {"n": 9}, expect={"n": 3})
        with pytest.raises(dataplane.TagConflict):
            await far.tag(["c"], {"n": 9}, expect={"n": 3})
        left = await far.rows()
        assert len(left) == 3 and ref.keys == list("abcd")
        assert list((await far.get(keys=["d", "c"]))["z"]) == ["d", "c"]
        assert (await far.get(where=tag("n") == 9)).keys == ["c"]
        stats = await far.stats()
        assert stats["rows"] == 3 and stats["bytes_per_row"] == stats["metadata_bytes"] / 3
        assert (await here.stats())["peer"] == "a"
        await far.seal()
        await part.reset("s")
        seen = []
        async with far.stream("s", rows=2) as stream:
            async for batch in stream:
                seen += batch.keys
                tensor = await batch.torch("x")
                tensor.zero_()
                assert dense(await batch.numpy("x")).shape[1] == BIG
                assert (await batch.arrow(["x"])).num_rows == len(batch)
        assert sorted(seen) == sorted(left.keys)
        typed = await here.partition("typed", {"s": ["x"]}, fields={"x": "int64[*]"})
        with pytest.raises(dataplane.InvalidValue, match=r"x\[0\] is float64\[1\]"):
            await typed.put({"x": [[0.5]]})
        assert (await part.drop(keys=["c"])).rows == 1
        await part.drop()
        with pytest.raises(dataplane.PartitionGone):
            await far.put({"x": [1]}, group="g")


def test_a_group_is_closed_by_name(cluster: Cluster, loop: Loop) -> None:
    async def main() -> None:
        async with aio.connect("a", run="test") as plane:
            part = await plane.partition("p", {"s": ["x"]})
            await part.put({"x": [1]}, group="g")
            await part.close("g", 1)
            batch = await part.claim("s", groups=1, timeout=20)
            assert batch.group_ids == ["g"]

    run(loop, main())


def test_many_tasks_share_one_client_and_each_row_goes_to_one(cluster: Cluster, loop: Loop) -> None:
    async def consume(part: aio.Partition, rows: int) -> list[int]:
        got: list[int] = []
        async for batch in part.stream("s", rows=rows):
            got += [int(x[0]) for x in batch["x"]]
            del batch
        return got

    async def main() -> None:
        async with aio.connect("a", run="test") as here, aio.connect("b", run="test") as there:
            part = await here.partition("p", {"s": ["x"]})
            far = await there.partition("p")
            consumers = [asyncio.create_task(consume((part, far)[i % 2], 3)) for i in range(8)]
            x = np.repeat(np.arange(200), BIG).reshape(200, BIG)
            await asyncio.gather(
                *((part, far)[i % 2].put({"x": x[i : i + 10]}) for i in range(0, 200, 10))
            )
            await far.seal()
            got = await asyncio.gather(*consumers)
            assert sorted(row for one in got for row in one) == list(range(200))

    run(loop, main())


def test_the_loop_goes_on_while_a_claim_waits_and_a_copy_runs(cluster: Cluster, loop: Loop) -> None:
    async def main() -> None:
        async with aio.connect("a", run="test") as plane:
            part = await plane.partition("p", {"s": ["x"]}, free="drop")
            waiting = asyncio.create_task(part.claim("s", rows=1))
            await part.put({"x": np.zeros((1, 4 << 20), np.uint8)})
            batch = await waiting
            ticks, started = 0, time.monotonic()
            copying = asyncio.create_task(part.put({"x": np.zeros((64, 1 << 20), np.uint8)}))
            while not copying.done():
                await asyncio.sleep(0)
                ticks += 1
            await copying
            assert ticks > 10, f"{ticks} turns of the loop in {time.monotonic() - started:.3f} s"
            assert len(batch) == 1

    run(loop, main())


def test_one_client_serves_several_loops_and_threads(cluster: Cluster) -> None:
    plane = run(asyncio.new_event_loop, connected())
    failures: list[BaseException] = []
    got: list[list[int]] = []

    def work(loop: Loop, number: int) -> None:
        async def main() -> list[int]:
            part = await plane.partition("p", {"s": ["x"]})
            mine = []
            for i in range(20):
                await part.put({"x": [np.full(BIG, number * 100 + i)]})
                batch = await part.claim("s", rows=1, timeout=20)
                mine.append(int(batch["x"][0][0]))
                await batch.ack()
            return mine

        try:
            got.append(run(loop, main()))
        except BaseException as exc:
            failures.append(exc)

    loops = [asyncio.new_event_loop, uvloop.new_event_loop] * 2
    threads = [threading.Thread(target=work, args=(made, i)) for i, made in enumerate(loops)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert sorted(row for one in got for row in one) == [
        n * 100 + i for n in range(4) for i in range(20)
    ]
    run(uvloop.new_event_loop, plane.close())


async def connected() -> aio.Plane:
    return await aio.connect("a", run="test")


def test_a_sync_client_serves_several_threads(cluster: Cluster) -> None:
    got: list[list[int]] = []
    with cluster.connect("b") as plane:
        part = plane.partition("p", {"s": ["x"]})

        def consume() -> None:
            got.append([int(x[0]) for batch in part.stream("s", rows=1) for x in batch["x"]])

        threads = [threading.Thread(target=consume) for _ in range(4)]
        for thread in threads:
            thread.start()
        for i in range(60):
            part.put({"x": [np.full(BIG, i)]})
        part.seal()
        for thread in threads:
            thread.join(60)
    assert sorted(row for one in got for row in one) == list(range(60))


def test_a_plane_that_was_not_awaited_says_so(cluster: Cluster) -> None:
    with pytest.raises(
        dataplane.InvalidCall, match="'partition' was used before the plane was connected.*await"
    ):
        dataplane.aio.connect("a").partition("p")  # type: ignore[attr-defined]
    assert not hasattr(dataplane.aio.connect("a"), "partition")
