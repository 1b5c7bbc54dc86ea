"""A row whose ack returned has what was added to it, however often acks of its batch failed before:
in a full arena, and cancelled at any moment."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

import dataplane
from dataplane import Plane, aio
from tests.end_to_end.attacks import no_leaks, used_bytes
from tests.end_to_end.conftest import Cluster, until
from tests.end_to_end.hosts import running

MIB = 1 << 20
ROUNDS = 20
ROWS = 6
FULL_S = 0.05
"""How long a call waits for room that nobody makes."""
_partitions = (f"p{number}" for number in itertools.count(1))


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[str, Cluster]]:
    with running("a", arena="16MiB") as one, running("b", "c", arena="16MiB") as two:
        yield {"a": one, "c": two}


@pytest.fixture(params=["a", "c"], ids=["one host", "two hosts"])
def plane(
    clusters: dict[str, Cluster], no_launcher: None, request: pytest.FixtureRequest
) -> Iterator[Plane]:
    """Of two hosts, where half of the partitions have their shard at the other one."""
    cluster = clusters[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATAPLANE_RUN_DIR", str(cluster.run_dir))
        with cluster.connect(request.param) as connected:
            yield connected


class Filler:
    """Rows that fill the arena, with as little left as a small put takes, until they go."""

    def __init__(self, plane: Plane) -> None:
        self.part = plane.partition("filler", free="drop")
        self.full = False

    def fill(self) -> None:
        sizes = [MIB, MIB // 8, MIB // 64, 4160]  # none that fits a message
        while sizes:
            try:
                self.part.put({"x": [np.zeros(sizes[0], np.uint8)]}, timeout=FULL_S)
            except (dataplane.BackPressure, dataplane.DeadlineExceeded):
                sizes.pop(0)
        self.full = True

    def empty(self) -> None:
        if self.full:
            keys = self.part.rows().keys
            self.part.drop(keys=keys)
            self.full = False


def value(seed: int, row: int, dice: random.Random) -> np.ndarray:
    return np.full(dice.choice([600, 1500, 3000, 4000]), (7 * seed + row) % 251, np.uint8)


@pytest.mark.timeout(240)
def test_what_was_added_is_there_when_the_ack_has_returned(plane: Plane) -> None:
    for seed in range(ROUNDS):
        asyncio.run(one_round(plane, seed))
    for name in plane.partitions():
        plane.partition(name).drop()
    no_leaks(plane)
    until(lambda: not used_bytes(plane), "every byte came back", 10)


async def one_round(plane: Plane, seed: int) -> None:
    dice = random.Random(seed)
    name = next(_partitions)
    plane.partition(name, stages={"s": ["x"], "t": ["y"]}, free="drop")
    filler = Filler(plane)
    async with aio.connect(plane.peer, run="test") as client:
        part = await client.partition(name)
        await part.put({"x": list(range(ROWS))}, key=list(range(ROWS)))
        batch = await part.claim("s", rows=ROWS, timeout=20)
        mine = {key: value(seed, int(key), dice) for key in batch.keys}
        await batch.add(y=[mine[key] for key in batch.keys])
        left = set(range(ROWS))
        while left:
            await asyncio.to_thread(dice.choice([filler.fill, filler.empty]))
            some = dice.sample(sorted(left), dice.randint(1, len(left)))
            left -= await acked(batch.rows(some), some, dice)
        await asyncio.to_thread(filler.empty)
        found = await part.get(keys=list(range(ROWS)), fields=["y"])
        there = dict(zip(found.keys, found["y"], strict=True))
        assert all(np.array_equal(there[key], mine[key]) for key in mine)
        del batch, found, there


async def acked(part: aio.Batch, rows: list[int], dice: random.Random) -> set[int]:
    """These rows, where their ack has returned: it may find no room, or be cancelled."""
    try:
        if dice.random() < 0.5:
            await part.ack(timeout=0.3)
        else:
            await asyncio.wait_for(part.ack(timeout=5), dice.choice([0.0, 0.0005, 0.002, 0.01]))
    except (dataplane.BackPressure, dataplane.DeadlineExceeded, TimeoutError):
        return set()
    except dataplane.LeaseExpired as exc:  # an ack that was cancelled has taken effect
        assert "acked" in exc.message or "finished" in exc.message, exc
    return set(rows)
