"""A loader: the next batch is there while this one trains, and every row is trained once."""

from __future__ import annotations

import asyncio
import gc
import pickle  # noqa: S403
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import dataplane
from dataplane import aio
from tests.end_to_end.conftest import Cluster, until


def filled(
    plane: dataplane.Plane, n: int, name: str = "p", **definition: Any
) -> dataplane.Partition:
    part = plane.partition(name, {"train": ["x"]}, **definition)
    part.put({"x": [[i] * (1 + i % 3) for i in range(n)]}, key=list(range(n)))
    part.seal()
    return part


def test_every_row_is_trained_once_and_the_next_batch_is_ready(alone: Cluster) -> None:
    with dataplane.connect("a", run="test") as plane:
        part = filled(plane, 10)
        seen: list[int] = []
        loader = part.loader("train", rows=4, collate=lambda batch: batch.tensordict())
        for data in loader:
            assert loader.batch is not None and loader.batch.state == "leased"
            seen += [int(key) for key in loader.batch.keys]
            assert data["x"].is_nested and data.batch_size == (len(loader.batch),)
            if len(seen) == 4:  # the next is leased while this one trains
                until(lambda: plane.stats()["leases"] == 2, "the next is leased")
        assert sorted(seen) == list(range(10)) and loader.batch is None
        assert part.stats()["rows"] == 0
        assert not [t for t in threading.enumerate() if t.name == "dataplane-loader"]


def test_what_ends_a_loop_releases_what_it_has(alone: Cluster) -> None:
    with dataplane.connect("a", run="test") as plane:
        part = filled(plane, 6)
        with part.loader("train", rows=2, prefetch=2) as first:  # without it: within moments
            for _ in first:
                break
        with part.loader("train", rows=6) as loader:
            assert len(next(iter(loader))) == 6
        with pytest.raises(ZeroDivisionError), part.loader("train", rows=3) as loader:
            for _ in loader:
                raise ZeroDivisionError
        loader = part.loader("train", rows=2, batches=1)
        assert [len(batch) for batch in loader] == [2]
        assert part.stats()["rows"] == 4
        with part.claim("train", rows=4) as batch:
            assert len(batch) == 4


def test_a_claim_that_waits_is_taken_back(alone: Cluster) -> None:
    with dataplane.connect("a", run="test") as plane:
        part = plane.partition("p", {"train": ["x"]})
        part.put({"x": [1, 2, 3]})
        loader = part.loader("train", rows=2)
        loop = iter(loader)
        next(loop)
        until(lambda: plane.stats()["waiting_claims"] == 1, "the next is claimed")
        loader.close()
        until(lambda: plane.stats()["waiting_claims"] == 0, "the claim is taken back")
        part.claim("train", rows=3).ack()
        assert list(loop) == []


def test_what_fails_in_the_thread_is_raised_in_the_loop(alone: Cluster) -> None:
    with dataplane.connect("a", run="test") as plane:
        part = filled(plane, 2)
        with pytest.raises(dataplane.NotFetched), part.loader("train", rows=3, min=1) as loader:
            for _ in loader:
                raise dataplane.NotFetched("from the body")

        def wrong(batch: dataplane.Batch) -> Any:
            raise KeyError("collate")

        with pytest.raises(KeyError, match="collate"):
            for _ in part.loader("train", rows=2, collate=wrong):
                pass
        gc.collect()
        part.claim("train", rows=2, timeout=10).ack()
        with pytest.raises(dataplane.InvalidCall, match="exactly one of rows"):
            part.loader("train")


def test_a_loader_goes_on_exactly_behind_a_checkpoint(alone: Cluster, tmp_path: Path) -> None:
    before: list[list[Any]] = []
    with dataplane.connect("a", run="test") as plane:
        part = filled(plane, 12, free="drop")
        loader = part.loader("train", rows=2)
        for batch in loader:
            before.append(batch.keys)
            if len(before) == 3:
                until(lambda: plane.stats()["leases"] == 2, "the next is leased")
                state = loader.state_dict()
                plane.checkpoint(tmp_path / "saved")
                break
        assert pickle.loads(pickle.dumps(state)) == state  # noqa: S301
        part.drop()
        plane.restore(tmp_path / "saved")
        again = plane.partition("p").loader("train", rows=2)
        again.load_state_dict(state)
        after = [batch.keys for batch in again]
        assert after == [[6, 7], [8, 9], [10, 11]] and before == [[0, 1], [2, 3], [4, 5]]
        assert again.state_dict()["batches"] == 6
        with pytest.raises(dataplane.InvalidCall, match="this state is for"):
            again.load_state_dict({**state, "stage": "other"})


class Workers(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, call: str) -> None:
        self.call = call

    def __iter__(self) -> Any:
        with dataplane.connect("a", run="test") as plane:
            yield from getattr(plane.partition("p"), self.call)("train", rows=1)


class AwaitingWorkers(Workers):
    def __iter__(self) -> Any:
        async def batches(plane: aio.Plane) -> None:
            part = await plane.partition("p")
            async for _ in getattr(part, self.call)("train", rows=1):
                pass

        awaited(batches)
        yield "all of it"


@pytest.mark.parametrize("workers", [Workers, AwaitingWorkers])
def test_in_a_dataloaders_workers_loaders_and_streams_say_why_not(
    alone: Cluster, workers: type[Workers]
) -> None:
    with dataplane.connect("a", run="test") as plane:
        part = filled(plane, 2)
        for call in ("loader", "stream"):
            with pytest.raises(
                dataplane.InvalidCall, match=("batches cannot be claimed in a DataLoader worker")
            ):
                list(DataLoader(workers(call), num_workers=1, batch_size=None))
            gc.collect()  # an iterator that failed waits for its workers as it is collected
        with pytest.raises(
            dataplane.InvalidCall, match="batches cannot be claimed in a DataLoader worker"
        ):
            pickle.dumps(part.loader("train", rows=1))
        part.claim("train", rows=2).ack()
    assert torch.utils.data.get_worker_info() is None


# with await


def awaited(main: Any) -> None:
    async def connected() -> None:
        async with dataplane.aio.connect("a", run="test") as plane:
            await main(plane)

    asyncio.run(connected())


async def filled_by(plane: aio.Plane, n: int, **definition: Any) -> aio.Partition:
    part = await plane.partition("p", {"train": ["x"]}, **definition)
    await part.put({"x": [[i] * (1 + i % 3) for i in range(n)]}, key=list(range(n)))
    await part.seal()
    return part


async def soon(true: Callable[[], Awaitable[bool]], what: str) -> None:
    async with asyncio.timeout(20):
        while not await true():
            await asyncio.sleep(0.01)


def test_with_await_the_next_batch_is_ready_too_and_collate_may_be_awaited(
    alone: Cluster,
) -> None:

    async def main(plane: aio.Plane) -> None:
        async def leases(n: int) -> bool:
            return bool((await plane.stats())["leases"] == n)

        part = await filled_by(plane, 10)
        seen: list[int] = []
        loader = part.loader("train", rows=4, collate=lambda batch: batch.tensordict())
        async for data in loader:
            assert loader.batch is not None and loader.batch.state == "leased"
            seen += [int(key) for key in loader.batch.keys]
            assert data["x"].is_nested and data.batch_size == (len(loader.batch),)
            if len(seen) == 4:
                await soon(lambda: leases(2), "the next is leased while this one trains")
        assert sorted(seen) == list(range(10)) and loader.batch is None
        assert (await part.stats())["rows"] == 0

    awaited(main)


def test_with_await_what_ends_a_loop_releases_what_it_has(alone: Cluster) -> None:

    async def main(plane: aio.Plane) -> None:
        part = await filled_by(plane, 6)
        for prefetch in (1, 2):
            async with part.loader("train", rows=2, prefetch=prefetch) as loader:
                async for _ in loader:
                    break
        async with part.loader("train", rows=6) as loader:
            assert len(await anext(aiter(loader))) == 6
        with pytest.raises(ZeroDivisionError):
            async with part.loader("train", rows=3) as loader:
                async for _ in loader:
                    raise ZeroDivisionError

        async def wrong(batch: aio.Batch) -> Any:
            raise KeyError("collate")

        with pytest.raises(KeyError, match="collate"):
            async with part.loader("train", rows=2, collate=wrong) as loader:
                async for _ in loader:
                    pass
        loader = part.loader("train", rows=2, batches=1)
        assert [len(batch) async for batch in loader] == [2]
        async with await part.claim("train", rows=4) as batch:
            assert len(batch) == 4

    awaited(main)


def test_with_await_a_claim_that_waits_is_taken_back(alone: Cluster) -> None:

    async def main(plane: aio.Plane) -> None:
        async def waiting(n: int) -> bool:
            return bool((await plane.stats())["waiting_claims"] == n)

        part = await plane.partition("p", {"train": ["x"]})
        await part.put({"x": [1, 2, 3]})
        loader = part.loader("train", rows=2)
        loop = aiter(loader)
        await anext(loop)
        await soon(lambda: waiting(1), "the next is claimed")
        asked = asyncio.ensure_future(anext(loop))  # which acks what is in hand
        await soon(lambda: acked(part), "the first is acked")
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await part.put({"x": [4]})
        assert len(await anext(loop)) == 2  # a cancelled task may ask again
        await loader.aclose()
        await soon(lambda: waiting(0), "nothing is claimed any more")
        await (await part.claim("train", rows=2)).ack()
        assert [batch async for batch in loop] == []

    async def acked(part: aio.Partition) -> bool:
        return bool((await part.stats())["rows"] == 1)

    awaited(main)


def test_with_await_a_loader_goes_on_exactly_behind_a_checkpoint(
    alone: Cluster, tmp_path: Path
) -> None:

    async def main(plane: aio.Plane) -> None:
        part = await filled_by(plane, 12, free="drop")
        before: list[list[Any]] = []
        async with part.loader("train", rows=2) as loader:
            async for batch in loader:
                before.append(batch.keys)
                if len(before) == 3:
                    state = loader.state_dict()
                    await plane.checkpoint(tmp_path / "saved")
                    break
        await part.drop()
        await plane.restore(tmp_path / "saved")
        again = (await plane.partition("p")).loader("train", rows=2)
        again.load_state_dict(state)
        after = [batch.keys async for batch in again]
        assert after == [[6, 7], [8, 9], [10, 11]] and before == [[0, 1], [2, 3], [4, 5]]
        with pytest.raises(
            dataplane.InvalidCall, match="batches cannot be claimed in a DataLoader worker"
        ):
            pickle.dumps(again)

    awaited(main)
