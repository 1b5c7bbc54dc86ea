"""What one `add` brought for many rows is in few chunks. Acks of some of the rows name these again,
and each chunk is freed once, when the last row that uses it goes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dataplane import InvalidCall, Plane, aio
from tests.end_to_end.conftest import Cluster, until
from tests.end_to_end.test_attacks_peers import Addressed, hosts
from tests.end_to_end.test_succession import GO_ON_S, planes

__all__ = ["hosts", "planes"]
STAGES = {"s": ["x"], "t": ["y"]}
ROWS = 12


def scored(batch: Any) -> list[Any]:
    """Small, and too large to go with a message."""
    return [np.full(100 + 1000 * (key % 2), key, np.int32) for key in batch.keys]


def check(batch: Any) -> None:
    for key, value in zip(batch.keys, batch["y"], strict=True):
        assert np.array_equal(value, np.full(100 + 1000 * (key % 2), key, np.int32)), key


def used(plane: Plane) -> int:
    arena = plane.stats()["arena"]
    return int(arena["used_bytes"] - arena["cached_bytes"] + arena["granted_bytes"])


@pytest.mark.parametrize("dead", ["", "b", "c"])
def test_rows_are_acked_a_few_at_a_time_and_the_rest_by_another_worker(
    hosts: Addressed, planes: dict[str, Plane], dead: str
) -> None:
    """Also where the host of the rows dies then, or that of what was added."""
    part = planes["b"].partition("p", STAGES, free="acked", replicas=2)
    part.put({"x": [np.full(3000, n) for n in range(ROWS)]}, key=range(ROWS), group=["g"] * ROWS)
    worker = planes["c"].partition("p")
    batch = worker.claim("s", rows=ROWS, timeout=GO_ON_S)
    batch.add(y=scored(batch))
    batch.rows([1]).ack()
    batch[4:7].ack()
    batch[8:].ack()
    batch.release()
    rest = part.claim("s", rows=ROWS, min=1, timeout=GO_ON_S)
    assert len(rest) == 4
    rest.add(y=scored(rest))
    rest[::2].ack()
    rest.ack()
    if dead:
        hosts.kill(dead)
    left = planes["c" if dead == "b" else "b"].partition("p")
    done = left.claim("t", rows=ROWS, timeout=GO_ON_S)
    assert sorted(done.keys) == list(range(ROWS))
    check(done)
    done.rows([3]).ack()
    check(left.get(keys=[key for key in range(ROWS) if key != done.keys[3]]))
    done.ack()
    del batch, rest, done
    alive = [plane for name, plane in planes.items() if name != dead]
    until(lambda: not any(map(used, alive)), "everything was freed", 10)


def test_what_was_added_stays_where_the_rows_are_delivered_again(
    hosts: Addressed, planes: dict[str, Plane]
) -> None:
    """The second worker's values are not used, and its chunks are free at once."""
    part = planes["b"].partition("p", STAGES)
    part.put({"x": [np.full(3000, n) for n in range(ROWS)]}, key=range(ROWS))
    worker = planes["c"].partition("p")
    batch = worker.claim("s", rows=ROWS, timeout=GO_ON_S)
    batch.add(y=scored(batch))
    batch.ack()
    before = used(planes["b"])
    part.reset("s")
    again = part.claim("s", rows=ROWS, timeout=GO_ON_S)
    again.add(y=[np.zeros(5000) for _ in range(ROWS)])
    again[:5].ack()
    again.ack()
    check(part.get(keys=range(ROWS)))
    until(lambda: used(planes["b"]) <= before, "what was added in vain is free")


def test_an_ack_does_not_name_what_another_ack_in_flight_brings(alone: Cluster) -> None:
    """Nobody knows yet what the peer calls that, and its place may be another value's by then."""

    async def main() -> None:
        async with aio.connect("a", run="test") as plane:
            part = await plane.partition("p", STAGES)
            await part.put({"x": range(ROWS)}, key=range(ROWS))
            batch = await part.claim("s", rows=ROWS, timeout=20)
            await batch.add(y=scored(batch))
            first = asyncio.create_task(batch[:5].ack())
            await asyncio.sleep(0)
            with pytest.raises(InvalidCall, match="another call that acks rows of this batch"):
                await batch[5:].ack()
            await first
            assert batch.state == "leased"
            await batch[5:].ack()
            check(await part.claim("t", rows=ROWS, timeout=20))
            await part.drop()

    asyncio.run(main())
