"""A peer that is no seed joins a plane that runs, hosts rows, and may die like any other."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import pytest

from dataplane import (
    ClaimTimeout,
    DeadlineExceeded,
    PartitionUndefined,
    PeerLost,
    Plane,
    StaleEpoch,
    Unavailable,
)
from tests.end_to_end.conftest import free_addresses, in_sync, until
from tests.end_to_end.test_attacks_peers import Addressed, hosts
from tests.end_to_end.test_succession import check, planes, put, rows

__all__ = ["hosts", "planes"]


def join(hosts: Addressed, name: str) -> Plane:
    (hosts.addresses[name],) = free_addresses(1)
    hosts.start_one(name, "--join")
    return hosts.connect(name)


def test_a_peer_joins_and_its_rows_outlive_it(hosts: Addressed, planes: dict[str, Plane]) -> None:
    part = planes["b"].partition("p", stages={"s": ["x"]}, replicas=2)
    put(part, "b")
    planes["d"] = join(hosts, "d")
    d = planes["d"]
    until(lambda: d.stats()["peers"]["d"]["shards"] > 100, "it has those in which nothing lives", 2)
    mine = planes["d"].partition("p")
    put(mine, "d")
    # Clients of other hosts reach its rows, and its own claim those of others.
    names = rows("d")["key"]
    values: Any = planes["c"].partition("p").get(keys=names)["x"]
    assert [int(np.asarray(value)[0]) for value in values] == list(range(10))
    batch = mine.claim("s", rows=20, timeout=20)
    check(batch)
    batch.release()
    in_sync(planes["b"])
    hosts.kill("d")
    left = planes["c"].partition("p").claim("s", rows=20, timeout=20)
    assert sorted(left.keys) == sorted(names + rows("b")["key"])
    check(left)


def test_a_peer_that_joined_may_leave_again(hosts: Addressed, planes: dict[str, Plane]) -> None:
    planes["d"] = join(hosts, "d")
    put(planes["d"].partition("p", stages={"s": ["x"]}), "d")
    hosts.peers["d"].terminate()
    assert hosts.peers["d"].wait(30) == 0, hosts.log("d")
    assert len(planes["b"].stats()["roster"]["members"]) == 3
    check(planes["b"].partition("p").claim("s", rows=10, timeout=20))


def test_where_all_seeds_died_the_plane_begins_anew_for_who_joined_too(
    hosts: Addressed, planes: dict[str, Plane]
) -> None:
    planes["d"] = join(hosts, "d")
    put(planes["b"].partition("p", stages={"s": ["x"]}), "b")
    before = planes["d"].partition("p")
    for name in "abc":
        hosts.kill(name)
    for name in "abc":
        hosts.launch(name)
    with pytest.raises(PeerLost):
        while True:
            with contextlib.suppress(ClaimTimeout, DeadlineExceeded, StaleEpoch, Unavailable):
                before.claim("s", rows=20, timeout=0.2)
            time.sleep(0.05)  # some fail at once
    planes["d"] = hosts.connect("d")
    with pytest.raises(PartitionUndefined):
        planes["d"].partition("p").stats(timeout=20)
    put(planes["d"].partition("p", stages={"s": ["x"]}), "d")
    check(planes["d"].partition("p").claim("s", rows=10, timeout=20))
