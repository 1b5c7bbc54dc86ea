"""No claim is granted more bytes of other hosts than its own host can have, and each waits for room
under its lease."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

import dataplane
from dataplane import Partition
from tests.end_to_end.conftest import Cluster, lent, running, until

MIB = 1 << 20


@dataclass
class Ends:
    """The same partition at its producer's host, and at its consumer's with 16 MiB of arena."""

    near: Partition
    far: Partition
    there: dataplane.Plane

    def put(self, rows: int, first: int = 0, mib: int = 1) -> None:
        for i in range(first, first + rows):
            self.near.put({"x": [np.full(mib * MIB - 4096, i, np.uint8)]})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running("a", "b", arenas={"b": "16MiB"}) as started:
        yield started


@pytest.fixture
def ends(cluster: Cluster, no_launcher: None, request: pytest.FixtureRequest) -> Iterator[Ends]:
    with (
        lent(cluster, request.node),
        cluster.connect("a") as here,
        cluster.connect("b") as there,
    ):
        near = here.partition("p", stages={"train": ["x"]})
        yield Ends(near, there.partition("p"), there)


def firsts(batch: dataplane.Batch) -> list[int]:
    return [int(x[0]) for x in batch["x"]]


def test_rows_that_can_never_be_here_at_once_are_refused_with_the_figures(ends: Ends) -> None:
    ends.put(1, mib=20)
    with pytest.raises(dataplane.ValueTooLarge, match=r"claim fewer rows .*--arena") as told:
        ends.far.claim("train", rows=1, timeout=20)
    figures = told.value.details
    assert figures["needed_bytes"] > figures["cap_bytes"] == 16 * MIB
    assert firsts(ends.near.claim("train", rows=1, timeout=20)) == [0]  # nobody holds it


def test_a_claim_waits_for_views_and_says_so(ends: Ends) -> None:
    ends.put(12)
    held = ends.far.claim("train", rows=12, timeout=20)
    views = list(held["x"])
    held.ack()
    ends.put(12, first=12)
    with pytest.raises(
        dataplane.ClaimTimeout, match="in views or being read.*delete batches and arrays"
    ) as told:
        ends.far.claim("train", rows=12, timeout=0.5)
    assert told.value.details["needed_bytes"] > told.value.details["credit_bytes"]
    assert [int(view[-1]) for view in views] == list(range(12))
    got: list[dataplane.Batch] = []
    waiter = threading.Thread(target=lambda: got.append(ends.far.claim("train", rows=12)))
    waiter.start()
    until(lambda: ends.there.stats()["starved_claims"] == 1, "it waits for room")
    del views, held
    waiter.join(20)
    assert firsts(got[0]) == list(range(12, 24))


def test_rows_of_a_claim_that_waited_for_room_in_vain_go_back(ends: Ends) -> None:
    ends.put(12)
    held = ends.far.claim("train", rows=12, timeout=20)
    views = list(held["x"])
    held.ack()
    ends.put(12, first=12)
    with pytest.raises(dataplane.ClaimTimeout, match="in views or being read"):
        ends.far.claim("train", rows=12, timeout=0.5)
    assert firsts(ends.near.claim("train", rows=12, timeout=20)) == list(range(12, 24))
    assert len(views) == 12


def test_a_minimum_is_met_with_what_there_is_room_for(ends: Ends) -> None:
    ends.put(20)
    batch = ends.far.claim("train", rows=20, min=1, timeout=20)
    assert 12 <= len(batch) < 20
    assert firsts(batch) == list(range(len(batch)))


def test_an_image_that_rows_share_needs_room_once(ends: Ends) -> None:
    image = np.arange(10 * MIB, dtype=np.uint8)
    ends.near.put({"x": [image] * 8}, dedup=["x"])
    batch = ends.far.claim("train", rows=8, timeout=20)
    assert all(np.array_equal(x, image) for x in batch["x"])
