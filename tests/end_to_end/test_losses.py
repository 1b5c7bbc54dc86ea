"""Rows whose only bytes were on a dead peer are named to whoever makes them again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane import Plane, aio
from tests.end_to_end.conftest import PLANE, Cluster, until

NOTICED_S = 10.0
BYTES = 10_000


@pytest.fixture
def three(cluster: Cluster) -> Iterator[tuple[Cluster, dict[str, Plane]]]:
    """Three hosts with backups in sync. The first keeps the roster."""
    cluster.start("a", "b", "c", arena="64MiB")
    planes = {name: cluster.connect(name) for name in "abc"}
    until(lambda: planes["a"].stats()["roster"]["unprotected"] == 0, "backups are in sync")
    yield cluster, planes
    for plane in planes.values():
        with contextlib.suppress(dataplane.ConnectError):  # of the peer that was killed
            plane.close()


def values(n: int) -> dict[str, Any]:
    return {"x": [np.full(BYTES, i, np.uint8) for i in range(n)]}


def kill(cluster: Cluster, name: str) -> None:
    cluster.peers[name].kill()
    cluster.peers[name].wait()


def test_lost_rows_are_named_at_every_peer_and_can_be_put_again(three: Any) -> None:
    cluster, planes = three
    part = planes["a"].partition("p", stages={"s": ["x"]})
    near, far = planes["b"].partition("p"), planes["c"].partition("p")
    far.put(values(3), key=["k0", "k1", 2])
    minted = far.put(values(1)).keys
    near.put(values(1), key=["stays"])
    kill(cluster, "c")
    with pytest.raises(dataplane.PeerLost, match=r"Rows that were stored only on .*c\.log$"):
        planes["c"].partition("p").put({"x": [1]})
    for subscriber in (part, near):
        assert set(next(subscriber.lost(NOTICED_S))) == {"k0", "k1", 2, *minted}
    assert part.stats()["lost_rows"] == 4
    with pytest.raises(dataplane.RowsGone, match=r"lost with a peer\. part\.lost\(\) lists"):
        near.get(keys=["k0", "stays"])
    near.put(values(2), key=["k0", "k1"])
    part.seal()
    got = []
    with pytest.raises(dataplane.RowsLost):  # two of the four did not come back
        for batch in part.stream("s", rows=1, timeout=NOTICED_S):
            got += batch.keys
    assert sorted(got) == ["k0", "k1", "stays"]


def test_the_whole_group_of_a_lost_row_is_named(three: Any) -> None:
    cluster, planes = three
    part = planes["b"].partition("p", stages={"s": ["x"]}, group_size=2)
    planes["c"].partition("p").put(values(1), key=["far"], group="g")
    part.put(values(1), key=["near"], group="g")
    kill(cluster, "c")
    assert set(next(part.lost(NOTICED_S))) == {"far", "near"}


def test_a_claim_of_what_was_lost_says_which_rows_and_the_subscription_ends(three: Any) -> None:
    cluster, planes = three
    part = planes["b"].partition("p", stages={"s": ["x"]})
    planes["c"].partition("p").put(values(2), key=["k0", "k1"])
    part.put(values(1), key=["stays"])
    part.seal()
    lost = part.lost(NOTICED_S)
    kill(cluster, "c")
    with part.claim("s", rows=1, timeout=NOTICED_S) as batch:
        assert batch.keys == ["stays"]
    with pytest.raises(dataplane.RowsLost) as caught:
        part.claim("s", rows=1, timeout=NOTICED_S)
    assert sorted(caught.value.details["keys"]) == ["k0", "k1"]
    assert [sorted(names) for names in lost] == [["k0", "k1"]]
    assert repr(lost) == "<Lost rows of 'p': ended>"


def test_a_subscription_ends_with_its_partition_and_waits_no_longer_than_asked(
    cluster: Cluster, run_dir: Path
) -> None:
    cluster.start("a", "b")
    with cluster.connect("a") as a, cluster.connect("b") as b:
        part = a.partition("p", stages={"s": ["x"]})
        part.put({"x": [1]}, key=["k"])
        with pytest.raises(dataplane.DeadlineExceeded, match="no row of partition 'p' was lost"):
            next(part.lost(timeout=0.1))
        part.seal()
        with part.claim("s", rows=1, timeout=10):
            pass
        assert list(b.partition("p").lost(timeout=10)) == []
        kept = a.partition("q", free="drop")
        lost = kept.lost(timeout=10)
        kept.drop()
        assert list(lost) == []


async def test_the_same_with_await(cluster: Cluster) -> None:
    cluster.start("a", "b")
    async with aio.connect("b", run=PLANE) as plane:
        part = await plane.partition("p", stages={"s": ["x"]})

        async def heard() -> list[Any]:
            return [names async for names in part.lost()]

        task = asyncio.create_task(heard())
        await part.put({"x": [1]}, key=["k"])
        await part.seal()
        async with await part.claim("s", rows=1, timeout=10):
            assert not task.done()
        assert await asyncio.wait_for(task, 10) == []
