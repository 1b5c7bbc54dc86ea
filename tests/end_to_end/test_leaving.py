"""SIGTERM to a peer of several: what it has is elsewhere before it ends."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane import Plane
from dataplane.peer.membership.leaving import FATE_S
from tests.end_to_end.conftest import in_sync, until
from tests.end_to_end.test_attacks_peers import Addressed, failing, hosts
from tests.end_to_end.test_succession import check, planes, put, rows

__all__ = ["hosts", "planes"]
LEFT_S = 30.0
"""A bound for tests on a busy machine; the peer itself gives up after 60 s."""


def told_to_end(hosts: Addressed, name: str) -> None:
    """SIGTERM, until it has ended in good order."""
    hosts.peers[name].terminate()
    assert hosts.peers[name].wait(LEFT_S) == 0, hosts.log(name)


@pytest.fixture
def four(hosts: Addressed) -> Iterator[dict[str, Plane]]:
    hosts.start_all(*"abcd")
    found = {name: hosts.connect(name) for name in "abcd"}
    in_sync(found["b"])
    yield found
    for plane in found.values():
        plane.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_rows_and_bytes_of_a_peer_that_leaves_are_at_others(
    hosts: Addressed, four: dict[str, Plane], replicas: int
) -> None:
    part = four["b"].partition("p", stages={"s": ["x"], "t": ["y"]}, replicas=replicas)
    put(part, "b")
    there = four["c"].partition("p")
    put(there, "c")
    # Rows of one host with values at another: small ones, arrays in objects, a shared one.
    mixed = [f"c{number}" for number in range(10)]
    leaf = np.arange(4000)
    part.put({"y": [{"n": 7, "leaf": leaf}] * 10, "z": list(range(10))}, key=mixed, dedup=["y"])
    held = there.claim("s", rows=7, timeout=5)
    told_to_end(hosts, "b")
    assert "drain incomplete" not in hosts.log("b")
    assert len(four["d"].stats()["roster"]["members"]) == 3
    check(held)
    held.release()
    left = four["d"].partition("p")
    batch = left.claim("s", rows=20, timeout=10)
    assert sorted(batch.keys) == sorted(rows("b")["key"] + mixed)
    check(batch)
    objects = left.claim("t", rows=10, timeout=10)
    assert all(o["n"] == 7 and (o["leaf"] == leaf).all() for o in objects["y"])
    assert sorted(left.get(keys=mixed, fields=["z"])["z"]) == list(range(10))
    for one in (batch, objects):
        one.ack()
    in_sync(four["d"])
    left.seal()
    with pytest.raises(dataplane.StreamEnd):
        left.claim("s", rows=1, timeout=10)


def test_a_peer_that_leaves_waits_for_the_keeper_of_the_roster(
    hosts: Addressed, four: dict[str, Plane]
) -> None:
    """It died just then, and comes back."""
    put(four["b"].partition("p", stages={"s": ["x"]}), "b")
    hosts.kill("a")
    hosts.peers["b"].terminate()
    until(lambda: "roster keeper: unreachable" in hosts.log("b"), "the keeper is missed")
    hosts.start_one("a")
    assert hosts.peers["b"].wait(LEFT_S) == 0
    assert "drain incomplete" not in hosts.log("b")
    batch = four["d"].partition("p").claim("s", rows=10, timeout=10)
    check(batch)
    batch.ack()


def test_where_all_are_told_to_end_nobody_waits_for_the_keeper(
    hosts: Addressed, four: dict[str, Plane]
) -> None:
    for name in "bcd":
        put(four[name].partition("p", stages={"s": ["x"]}), name)
    began = time.monotonic()
    for name in "abcd":
        hosts.peers[name].terminate()
    for name in "abcd":
        assert hosts.peers[name].wait(LEFT_S) == 0
    assert time.monotonic() - began < FATE_S


def test_work_goes_on_while_a_peer_leaves(hosts: Addressed, four: dict[str, Plane]) -> None:
    part = four["c"].partition("p", stages={"s": ["x"]})
    names = [f"{who}{number}" for who in "cd" for number in range(40)]
    names += [f"b{number}" for number in range(10)]
    put(four["b"].partition("p"), "b")
    claimed: list[str | int] = []
    leaving = threading.Event()

    def produce(who: str) -> None:
        mine = four[who].partition("p")
        for number in range(40):
            value = np.full(5000, number, np.int32)
            mine.put({"x": [value]}, key=[f"{who}{number}"], timeout=30)
            if number == 5:
                leaving.set()

    def consume() -> None:
        for batch in four["d"].partition("p").stream("s", rows=3):
            check(batch)
            claimed.extend(batch.keys)

    consumer = threading.Thread(target=consume)
    producers = [threading.Thread(target=produce, args=(who,)) for who in "cd"]
    for thread in (consumer, *producers):
        thread.start()
    assert leaving.wait(20)
    told_to_end(hosts, "b")
    for thread in producers:
        thread.join(60)
    part.seal()
    consumer.join(60)
    assert not any(thread.is_alive() for thread in (consumer, *producers))
    assert sorted(claimed) == sorted(names)


def test_clients_of_a_peer_that_leaves_are_told_so(
    hosts: Addressed, planes: dict[str, Plane]
) -> None:
    part = planes["b"].partition("p", stages={"s": ["x"]})
    put(part, "b")
    held = part.claim("s", rows=10, timeout=5)
    failures: list[Any] = []
    waiting = threading.Thread(
        target=lambda: failures.append(failing(lambda: part.claim("s", rows=1), LEFT_S))
    )
    waiting.start()
    until(lambda: planes["b"].stats()["waiting_claims"] == 1, "the claim waits")
    told_to_end(hosts, "b")
    waiting.join(LEFT_S)
    assert isinstance(failures[0], dataplane.PeerLeaves)
    # Who asked nothing just then hears of it by its next call.
    assert isinstance(failing(held.ack), dataplane.PeerLeaves)
    # What its clients had leased is there for others; what they read stays readable.
    check(held)
    check(planes["c"].partition("p").claim("s", rows=10, timeout=10))


def test_all_but_the_first_may_leave_one_after_the_other(
    hosts: Addressed, planes: dict[str, Plane]
) -> None:
    part = planes["a"].partition("p", stages={"s": ["x"]})
    for name in "bc":
        put(planes[name].partition("p"), name)
    for name in "bc":
        told_to_end(hosts, name)
    batch = part.claim("s", rows=20, timeout=10)
    check(batch)
    batch.ack()
    # Nobody is left for the first, which ends without waiting for anybody.
    hosts.peers["a"].terminate()
    assert hosts.peers["a"].wait(5) == 0


def test_what_clients_of_the_rosters_keeper_had_leased_comes_back_when_it_is_told_to_end(
    hosts: Addressed, planes: dict[str, Plane]
) -> None:
    """Nobody calls the keeper lost, so nobody else would give their rows back."""
    part = planes["a"].partition("p", stages={"s": ["x"]})
    there = planes["c"].partition("p")
    put(there, "c")
    held = part.claim("s", rows=10, timeout=5)
    with ThreadPoolExecutor(1) as other:
        claim = other.submit(failing, lambda: part.claim("s", rows=1), LEFT_S)
        until(lambda: planes["a"].stats()["waiting_claims"] == 1, "a claim waits")
        told_to_end(hosts, "a")
        assert isinstance(claim.result(), dataplane.PeerLeaves)
    check(held)
    check(there.claim("s", rows=10, timeout=10))


def test_who_is_told_twice_ends_at_once(hosts: Addressed, planes: dict[str, Plane]) -> None:
    put(planes["b"].partition("p", stages={"s": ["x"]}), "b")
    hosts.peers["c"].send_signal(signal.SIGSTOP)  # so that leaving takes its time
    try:
        hosts.peers["b"].terminate()
        assert isinstance(failing(lambda: planes["b"].stats()), dataplane.PeerLost)
        assert hosts.peers["b"].poll() is None
        hosts.peers["b"].terminate()
        assert hosts.peers["b"].wait(5) == 0
    finally:
        hosts.peers["c"].send_signal(signal.SIGCONT)
