"""Answers of a shard at another peer whose chunks have no valid owner: the reader's own peer
refuses them, and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dataplane
from dataplane import Plane
from dataplane.metadata.roster.roster import Roster
from tests.cluster import environment, in_sync
from tests.end_to_end.attacks import no_leaks
from tests.end_to_end.conftest import Cluster, until

MAIMED = Path(__file__).parent / "maimed"
SMALL, LARGE = [[1, 2, 3]] * 2, [np.full(20_000, n) for n in range(2)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """b is of another release."""
    folder = tmp_path_factory.mktemp("run")
    running = Cluster(folder)
    with environment(DATAPLANE_RUN_DIR=str(folder)):
        running.seed("a", "b")
        running.launch("a")
        with environment(PYTHONPATH=str(MAIMED)):
            running.launch("b")
        for name in "ab":
            running.await_up(name)
        yield running
        running.stop()


@pytest.fixture
def plane(cluster: Cluster, no_launcher: None) -> Iterator[Plane]:
    with environment(DATAPLANE_RUN_DIR=str(cluster.run_dir)), cluster.connect("a") as connected:
        in_sync(connected)
        yield connected


@pytest.mark.parametrize("values", [SMALL, LARGE], ids=["inline", "in an arena"])
@pytest.mark.parametrize("how", ["nobody's", "another's", "last", "negative"])
def test_a_chunk_without_a_valid_owner_is_refused_by_the_peer_that_receives_it(
    plane: Plane, cluster: Cluster, how: str, values: list[object]
) -> None:
    roster = Roster.from_seeds(cluster.seeds)
    names = (f"{number} {how}" for number in range(10_000))
    name = next(name for name in names if roster.home(name) == cluster.addresses["b"])
    part = plane.partition(name, {"s": ["x"]})
    part.put({"x": values}, key=["k", "l"])
    wrong = "invalid chunk" if how == "negative" else "invalid owner"
    for ask in (
        lambda: part.get(keys=["k"], timeout=10),
        lambda: part.claim("s", rows=1, timeout=10),
    ):
        with pytest.raises(dataplane.ProtocolError, match=wrong) as refused:
            ask()
        assert "same dataplane release everywhere" in refused.value.message
    until(lambda: part.stats()["stages"]["s"]["leased_rows"] == 0, "the rows went back")
    part.drop()
    no_leaks(plane)


def test_the_peer_that_refused_an_answer_goes_on(plane: Plane, cluster: Cluster) -> None:
    part = plane.partition("sound", {"s": ["x"]})
    part.put({"x": LARGE})
    with part.claim("s", rows=2, timeout=10) as batch:
        assert [int(one[0]) for one in batch["x"]] == [0, 1]
    assert "Traceback" not in cluster.log("a")
