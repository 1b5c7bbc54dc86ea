"""Hosts that die, and what goes on: promotions, second copies, leases that move, a keeper's end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane import Partition, Plane
from dataplane.metadata.roster.roster import Roster
from tests.end_to_end.conftest import in_sync, until
from tests.end_to_end.test_attacks_peers import Addressed, failing, hosts, incarnation

__all__ = ["hosts"]
GO_ON_S = 10.0
"""Generous: three seconds are promised on a machine that is not busy with other tests."""


@pytest.fixture
def planes(hosts: Addressed) -> Iterator[dict[str, Plane]]:
    """Three peers, backed up, and a client of each: `a` keeps the roster, the others host rows."""
    hosts.start_all(*"abc")
    found = {name: hosts.connect(name) for name in "abc"}
    in_sync(found["b"])
    yield found
    for plane in found.values():
        plane.close()


def rows(name: str, count: int = 10) -> dict[str, Any]:
    values = [np.full(5000, number, np.int32) for number in range(count)]
    return {"columns": {"x": values}, "key": [f"{name}{number}" for number in range(count)]}


def put(part: Partition, name: str) -> None:
    made = rows(name)
    part.put(made["columns"], key=made["key"])


def check(batch: Any) -> None:
    """Every value is the one that was put under its key."""
    for key, value in zip(batch.keys, batch["x"], strict=True):
        assert (np.asarray(value) == int(key[1:])).all() and len(value) == 5000, key


def test_a_put_that_meets_a_death_is_refused_at_the_successor_as_anywhere(
    hosts: Addressed, planes: dict[str, Plane]
) -> None:
    """Its first attempt broke off, and might have been carried out: it returned, though the value
    that was there stayed, and its own was nowhere."""
    part = planes["a"].partition(hosts.homed("b"), stages={"s": ["x"]})
    planes["c"].partition(part.name).put({"x": [1]}, key=["k"], tags={"by": ["c"]})
    hosts.kill("b")
    assert isinstance(failing(lambda: part.put({"x": [2]}, key=["k"])), dataplane.FieldExists)
    part.put({"x": [3]}, key=["new"])
    assert list(part.get(keys=["k", "new"])["x"]) == [1, 3]


@pytest.mark.parametrize("dead", ["b", "c"])
def test_with_two_replicas_no_acknowledged_row_is_lost(
    hosts: Addressed, planes: dict[str, Plane], dead: str
) -> None:
    part = planes["b"].partition("p", stages={"s": ["x", "y"]}, replicas=2)
    other = planes["c"].partition("p")
    put(part, "b")
    put(other, "c")
    # Fields that another host adds lie there, and at the row's shard.
    keys = [f"{name}{number}" for name in "bc" for number in range(10)]
    other.put({"y": [np.full(2000, number) for number in range(20)]}, key=keys)
    hosts.kill(dead)
    died = time.monotonic()
    left = planes["c" if dead == "b" else "b"].partition("p")
    batch = left.claim("s", rows=20, timeout=GO_ON_S)
    assert time.monotonic() - died < GO_ON_S
    assert sorted(batch.keys) == sorted(keys)
    check(batch)
    for key, value in zip(batch.keys, batch["y"], strict=True):
        assert np.all(np.asarray(value) == keys.index(str(key)))
    batch.ack()
    left.seal()
    with pytest.raises(dataplane.StreamEnd):
        left.claim("s", rows=1, timeout=GO_ON_S)


def test_with_one_replica_what_was_lost_is_not_passed_over(
    hosts: Addressed, planes: dict[str, Plane]
) -> None:
    part = planes["b"].partition("p", stages={"s": ["x"]})
    other = planes["c"].partition("p")
    put(part, "b")
    put(other, "c")
    hosts.kill("b")
    batch = other.claim("s", rows=10, timeout=GO_ON_S)
    assert sorted(batch.keys) == [f"c{number}" for number in range(10)]
    check(batch)
    batch.ack()
    other.seal()
    assert isinstance(failing(lambda: other.claim("s", rows=1)), dataplane.RowsLost)


def test_a_lease_outlives_the_peer_that_granted_it(
    hosts: Addressed, planes: dict[str, Plane]
) -> None:
    part = planes["b"].partition("p", stages={"s": ["x"], "t": ["score"]}, replicas=2)
    put(part, "b")
    other = planes["c"].partition("p")
    held = other.claim("s", rows=6, timeout=5)
    hosts.kill("b")
    # Nobody else gets them meanwhile, and what was added under the lease is there afterwards.
    rest = other.claim("s", rows=4, timeout=GO_ON_S)
    assert not set(held.keys) & set(rest.keys)
    held.add(score=list(range(6)))
    held.ack()
    rest.release()
    again = other.claim("s", rows=4, timeout=5)
    assert sorted(again.keys) == sorted(rest.keys)
    scored = other.claim("t", rows=6, timeout=5)
    assert sorted(scored.keys) == sorted(held.keys)


def test_what_a_dead_consumers_host_had_leased_comes_back(
    hosts: Addressed, planes: dict[str, Plane]
) -> None:
    part = planes["b"].partition("p", stages={"s": ["x"]}, replicas=2)
    put(part, "b")
    other = planes["c"].partition("p")
    held = part.claim("s", rows=6, timeout=5)  # by a client of the host that dies
    hosts.kill("b")
    batch = other.claim("s", rows=10, timeout=GO_ON_S)
    assert set(held.keys) <= set(batch.keys)
    check(batch)


def test_names_and_homes_move_with_the_roster(hosts: Addressed, planes: dict[str, Plane]) -> None:
    made = [planes["c"].partition(f"p{n}", stages={"s": ["x"]}, replicas=2) for n in range(8)]
    for number, part in enumerate(made):
        planes["b" if number % 2 else "c"].partition(part.name).put({"x": [number]}, key=["k"])
        part.drop(keys=["cancelled"])
    hosts.kill("b")
    for number, part in enumerate(made):
        assert part.get(keys=["k"], timeout=GO_ON_S)["x"][0] == number
        with pytest.raises(dataplane.FieldExists):
            part.put({"x": [7]}, key=["k"])
        with pytest.raises(dataplane.RowsDropped):
            part.put({"x": [7]}, key=["cancelled"])
        with pytest.raises(dataplane.PartitionConflict):
            planes["c"].partition(part.name, stages={"other": ["x"]})
        part.seal()
        assert part.claim("s", rows=1, timeout=5).keys == ["k"]


def test_without_the_keeper_all_goes_on_and_its_new_start_decides_again(
    hosts: Addressed, planes: dict[str, Plane]
) -> None:
    part = planes["b"].partition("p", stages={"s": ["x"]}, replicas=2)
    put(part, "b")
    other = planes["c"].partition("p")
    put(other, "c")
    hosts.kill("a")
    fresh = planes["c"].partition("q", stages={"s": ["x"]})
    fresh.put({"x": [1]}, key=["k"])
    assert planes["b"].partition("q").claim("s", rows=1, timeout=5).keys == ["k"]
    hosts.kill("b")
    assert isinstance(failing(lambda: other.get(keys=["b3"], timeout=3)), dataplane.Unavailable)
    hosts.start_one("a")

    def is_back() -> bool:
        try:
            check(found := other.get(keys=["b3", "c4"], timeout=3))
        except dataplane.Unavailable:
            return False
        return found.keys == ["b3", "c4"]

    until(is_back, "the keeper's new start names a successor", 30)
    assert len(other.claim("s", rows=20, timeout=GO_ON_S).keys) == 20


def test_a_dead_host_returns_empty_and_is_a_backup_again(
    hosts: Addressed, planes: dict[str, Plane]
) -> None:
    other = planes["c"].partition("p", stages={"s": ["x"]}, replicas=2)
    put(other, "c")
    hosts.kill("b")
    until(lambda: len(planes["c"].stats()["peers"]) == 2, "b is no member", GO_ON_S)
    hosts.start_one("b")
    until(lambda: "b" in planes["c"].stats()["peers"], "b is back", GO_ON_S)
    with hosts.connect("b") as again:
        again.partition("p").put({"x": [np.full(5000, 11, np.int32)]}, key=["b11"])
        in_sync(again)
        hosts.kill("c")
        batch = again.partition("p").claim("s", rows=11, timeout=GO_ON_S)
        assert len(batch.keys) == 11
        check(batch)
        del batch


def test_leases_of_the_dead_come_back_also_from_before_the_backup_came(
    hosts: Addressed, planes: dict[str, Plane]
) -> None:
    roster = Roster.from_seeds(hosts.seeds)
    at_b = (name for name in map(str, range(99)) if roster.home(name) == hosts.addresses["b"])
    part = planes["b"].partition(next(at_b), stages={"s": ["x"]}, replicas=2)
    put(part, "b")
    held = part.claim("s", rows=4, timeout=20)
    before = incarnation(planes["b"], "c")
    hosts.kill("c")
    planes.pop("c").close()
    hosts.start_one("c")
    planes["c"] = hosts.connect("c")
    until(lambda: incarnation(planes["b"], "c") not in (None, before), "c is another one")
    in_sync(planes["b"])
    hosts.kill("b")
    left = planes["c"].partition(part.name)
    batch = left.claim("s", rows=10, timeout=3 * GO_ON_S)
    assert set(held.keys) < set(batch.keys)
    check(batch)


def test_a_partition_of_which_both_copies_are_lost_is_gone_and_says_so(hosts: Addressed) -> None:
    """Its shard's primary and backup die at once. Who waits is told, its bytes are free, and the
    name can be declared anew: what is old stays out."""
    hosts.start_all(*"abcd")
    planes = {name: hosts.connect(name) for name in "abcd"}
    in_sync(planes["b"])
    names = {address: name for name, address in hosts.addresses.items()}
    both = {"b", names[planes["b"].stats()["roster"]["backup"]]}
    (left,) = set("bcd") - both
    plane = planes[left]
    part = plane.partition(hosts.homed("b"), stages={"s": ["x"]})
    put(part, "r")
    generation = part.stats()["generation"]
    held = plane.stats()["arena"]["used_bytes"]
    assert held >= 10 * 20_000
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lambda: part.claim("s", rows=11))
        until(lambda: plane.stats()["waiting_claims"] == 1, "the claim waits")
        for name in both:
            hosts.peers[name].kill()
        told = waits.exception(GO_ON_S)
    assert isinstance(told, dataplane.PartitionGone) and told.details["reason"] == "lost"
    for late in (lambda: part.get(keys=["r0"]), lambda: part.put({"x": [1]}, key=["r0"])):
        gone = failing(late)
        assert isinstance(gone, dataplane.PartitionGone) and "was lost" in str(gone)
    until(lambda: plane.stats()["arena"]["used_bytes"] == 0, "its bytes are free", GO_ON_S)
    again = plane.partition(part.name, stages={"s": ["x"]})
    assert again.stats()["generation"] > generation
    put(again, "r")
    assert len(again.claim("s", rows=10, timeout=GO_ON_S)) == 10
    again.drop()
    gone = failing(lambda: again.get(keys=["r0"]))
    assert isinstance(gone, dataplane.PartitionGone) and gone.details["reason"] == "dropped"
    for one in planes.values():
        one.close()
