"""The roster in a real etcd: any peer may die, the one that runs the authority too."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dataplane import Plane
from tests.end_to_end.conftest import in_sync, until
from tests.end_to_end.test_attacks_peers import Addressed
from tests.end_to_end.test_succession import check, put, rows
from tests.etcd import Etcd, etcd

pytestmark = pytest.mark.needs("etcd")

GO_ON_S = 15.0
"""Generous: five seconds are what it takes on a machine that is not busy with other tests."""


def terms(hosts: Addressed) -> int:
    return sum(hosts.log(name).count("is now the roster keeper") for name in hosts.peers)


@pytest.fixture
def server() -> Iterator[Etcd]:
    with etcd() as running:
        yield running


@pytest.fixture
def hosts(run_dir: Path, server: Etcd) -> Iterator[Addressed]:
    running = Addressed(run_dir, arena="64MiB", options=("--roster", server.roster))
    yield running
    running.stop()


@pytest.fixture
def planes(hosts: Addressed) -> Iterator[dict[str, Plane]]:
    hosts.start_all(*"abc")
    found = {name: hosts.connect(name) for name in "abc"}
    until(lambda: len(found["a"].stats()["peers"]) == 3, "all are members")
    in_sync(found["a"])
    yield found
    for plane in found.values():
        plane.close()


def test_the_authoritys_host_may_die_under_load(hosts: Addressed, planes: dict[str, Plane]) -> None:
    assert all(len(planes[n].stats()["partitions"]) == 0 for n in "abc")
    assert all(plane.stats()["shards"] for plane in planes.values())
    dead = hosts.keeper()
    one, other = sorted(set("abc") - {dead})
    part = planes[one].partition("p", stages={"s": ["x"]}, replicas=2)
    for name in "abc":
        put(planes[name].partition("p"), name)
    begun = threading.Event()

    def produce() -> None:
        mine = planes[other].partition("p")
        for number in range(10, 60):
            mine.put({"x": [np.full(5000, number, np.int32)]}, key=[f"{other}{number}"])
            if number == 20:
                begun.set()

    producer = threading.Thread(target=produce)
    producer.start()
    assert begun.wait(20)
    hosts.kill(dead)
    died = time.monotonic()
    first = part.claim("s", rows=30, timeout=GO_ON_S)
    assert time.monotonic() - died < GO_ON_S
    check(first)
    producer.join(60)
    assert not producer.is_alive()
    rest = part.claim("s", rows=50, timeout=GO_ON_S)
    check(rest)
    wanted = [key for name in "abc" for key in rows(name)["key"]]
    wanted += [f"{other}{number}" for number in range(10, 60)]
    assert sorted([*first.keys, *rest.keys]) == sorted(wanted)
    assert hosts.keeper() in (one, other)
    assert len(planes[one].stats()["roster"]["members"]) == 2


def test_while_etcd_is_away_all_goes_on_and_afterwards_peers_are_replaced(
    hosts: Addressed, planes: dict[str, Plane], server: Etcd
) -> None:
    part = planes["a"].partition("p", stages={"s": ["x"]}, replicas=2)
    put(planes["b"].partition("p"), "b")
    server.stop()
    before = hosts.keeper()
    until(lambda: "no longer the roster keeper" in hosts.log(before), "the keeper gave up", 20)
    put(planes["c"].partition("p"), "c")
    batch = part.claim("s", rows=20, timeout=GO_ON_S)
    check(batch)
    batch.release()
    before_it = terms(hosts)
    server.start()
    until(lambda: terms(hosts) > before_it, "somebody keeps the roster again")
    hosts.kill("c")
    left = planes["b"].partition("p").claim("s", rows=20, timeout=2 * GO_ON_S)
    check(left)


def test_the_authority_itself_may_leave(hosts: Addressed, planes: dict[str, Plane]) -> None:
    leaver = hosts.keeper()
    put(planes[leaver].partition("p", stages={"s": ["x"]}), "p")
    hosts.peers[leaver].terminate()
    assert hosts.peers[leaver].wait(70) == 0, hosts.log(leaver)
    (one, other) = sorted(set("abc") - {leaver})
    check(planes[one].partition("p").claim("s", rows=10, timeout=GO_ON_S))
    until(lambda: hosts.keeper() in (one, other), "another keeps the roster")
