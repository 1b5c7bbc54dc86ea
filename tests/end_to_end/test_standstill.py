"""Puts that wait for room which nobody is left to make, where clients sit at several hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

import dataplane
from dataplane import Partition, Plane
from tests.end_to_end.conftest import Cluster, until

MIB = 1 << 20


@dataclass
class Ends:
    """One partition, seen from its producer's host with 16 MiB of arena, and from another host."""

    here: Plane
    near: Partition
    there: Plane
    far: Partition


@pytest.fixture
def ends(cluster: Cluster) -> Iterator[Ends]:
    cluster.start("a", "b", arenas={"a": "16MiB"})
    with cluster.connect("a") as here, cluster.connect("b") as there:
        yield Ends(here, here.partition("p", stages={"train": ["x"]}), there, there.partition("p"))


def fill(part: Partition) -> None:
    """Until there is no room; ends with BackPressure."""
    for i in range(40):
        part.put({"x": [np.full(MIB, i, np.uint8)]}, timeout=60)


def test_a_put_ends_at_once_when_the_only_claim_at_another_host_wants_more_than_fits(
    ends: Ends,
) -> None:
    claim = threading.Thread(
        target=lambda: pytest.raises(
            dataplane.DataplaneError, ends.far.claim, "train", rows=64, timeout=60
        )
    )
    claim.start()
    start = time.monotonic()
    with pytest.raises(dataplane.BackPressure, match="all of them are waiting"):
        fill(ends.near)
    assert time.monotonic() - start < 40  # of the 60 s that each put may wait
    ends.near.drop()
    claim.join(40)
    assert not claim.is_alive()


def test_a_put_waits_for_a_consumer_at_another_host_that_is_at_work(ends: Ends) -> None:
    ends.near.put({"x": [np.zeros(MIB, np.uint8)]})
    batch = ends.far.claim("train", rows=1, timeout=20)
    ended: list[BaseException] = []

    def produce() -> None:
        try:
            fill(ends.near)
        except BaseException as exc:
            ended.append(exc)

    producer = threading.Thread(target=produce)
    producer.start()
    until(lambda: ends.here.stats()["waiting_puts"] > 0, "the producer waits for room")
    batch.ack()
    for _ in range(40):
        ends.far.claim("train", rows=1, timeout=20).ack()
    producer.join(40)
    assert not ended


def test_where_a_backup_has_no_room_for_second_copies_only_who_writes_some_waits(
    cluster: Cluster,
) -> None:
    """What was written was on its way to the backup then, and waited there for room. All that was
    done after it waited behind, in every partition of that primary: acks and drops, which would
    have made some, too."""
    cluster.start("a", "b", arena="16MiB")
    with cluster.connect("b") as here, cluster.connect("a") as there:
        mine = [one for i in range(40) if (one := f"p{i}") and lies_at(here, one)][:2]
        full = here.partition(mine[0], stages={"train": ["x"]})
        twice = here.partition(mine[1], stages={"train": ["x"]}, replicas=2)
        with pytest.raises(dataplane.BackPressure):
            for i in range(40):
                there.partition(full.name).put({"x": [np.full(MIB, i, np.uint8)]}, timeout=2)
        with pytest.raises(dataplane.BackPressure, match="the arena of peer 'a' has"):
            twice.put({"x": [np.zeros(MIB, np.uint8)]}, key="k", timeout=2)
        for plane in (here, there, here, there):
            plane.partition(full.name).claim("train", rows=1, timeout=20).ack(timeout=20)
        twice.put({"x": [np.zeros(MIB, np.uint8)]}, key="k", timeout=20)
        twice.put({"x": [np.zeros(MIB, np.uint8)]}, key="gone", timeout=20)
        used = there.stats()["arena"]["used_bytes"]
        twice.drop(["gone"])
        until(
            lambda: there.stats()["arena"]["used_bytes"] <= used - MIB,
            "the second copy goes with its row",
            10,
        )
        cluster.peers["b"].kill()
        assert not there.partition(twice.name).get(["k"])["x"][0].any()


def lies_at(plane: Plane, name: str) -> bool:
    """Whether this host's peer is the primary of a partition of that name."""
    part = plane.partition(name, free="drop")
    found = name in plane.stats()["partitions"]
    part.drop()
    return found
