"""A home under messages that come late and in any order between peers: no claim waits in vain."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from dataplane.metadata.counts import Counts, Lane
from dataplane.metadata.homes import StageHome
from dataplane.metadata.instructions import (
    ClaimId,
    Complete,
    Ended,
    Order,
    Return,
    Starved,
    Watch,
)
from dataplane.wire.messages import Want

ROW_BYTES = 10


def rows(count: int, where: list[object] | None) -> Want:
    return Want("rows", count, count, where)


@dataclass
class Supplier:
    """A peer of the simulation below: rows by number, even ones pass the filter."""

    ready: list[int] = field(default_factory=list)
    leased: set[int] = field(default_factory=set)
    sealed: bool = False
    mail: deque[tuple[str, object]] = field(default_factory=deque)


class Cluster:
    """Peers whose messages reach the home late, but each peer's in order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.peers = {name: Supplier() for name in "abc"}
        self.home = StageHome(self.peers)
        self.watched = {b""}
        self.waiting: dict[ClaimId, Want] = {}
        self.got: dict[ClaimId, list[int]] = {}
        self.done: list[ClaimId] = []
        self.ended: set[ClaimId] = set()
        self.orders: deque[Order] = deque()
        self.credit: dict[ClaimId, int] = {}
        self.starved: set[ClaimId] = set()

    def put(self, row: int) -> None:
        name = self.random.choice("abc")
        self.peers[name].ready.append(row)
        self.count(name)

    def count(self, name: str, lanes: set[bytes] | None = None) -> None:
        peer = self.peers[name]
        for where in sorted(lanes or self.watched):
            fit = sum(1 for row in peer.ready if not where or row % 2 == 0)
            counts = Counts(fit, 0, fit, 0, fit + len(peer.leased), 0)
            peer.mail.append(("report", (Lane("rows", where), counts, peer.sealed)))

    def step(self) -> bool:
        """Deliver one thing, in any order that a network allows; whether there was one."""
        self.collect()
        choices = [name for name, peer in self.peers.items() if peer.mail]
        choices += ["order"] * bool(self.orders)
        if not choices:
            return False
        choice = self.random.choice(choices)
        if choice == "order":
            self.obey(self.orders.popleft())
            return True
        kind, payload = self.peers[choice].mail.popleft()
        if kind == "report":
            self.home.report(choice, *payload)  # type: ignore[misc]
        else:
            one, units, needed = payload  # type: ignore[misc]
            nbytes = units * ROW_BYTES
            self.home.supplied(one, choice, units, 0.0, False, nbytes, needed)
        return True

    def obey(self, order: Order) -> None:
        peer, want = self.peers[order.peer], order.want_remaining
        fit = [row for row in peer.ready if want.where is None or row % 2 == 0]
        wanted = fit[: want.count]
        taken = wanted[: order.credit_bytes // ROW_BYTES]
        needed = 0
        if len(taken) < len(wanted):
            needed = ROW_BYTES * min(len(wanted), max(want.minimum, len(taken) + 1))
        if order.exact and len(taken) < want.minimum:
            taken = []
        room = self.credit[order.claim] - ROW_BYTES * len(self.got[order.claim])
        assert ROW_BYTES * len(taken) <= order.credit_bytes
        if order.claim in self.starved:
            taken, needed = [], 0  # it has left
        elif ROW_BYTES * len(taken) > room:
            taken, needed = [], 0
            self.leave(order.claim)  # its peer refuses what it has no room for
        peer.ready = [row for row in peer.ready if row not in taken]
        peer.leased |= set(taken)
        self.got[order.claim] += taken
        # What changed is reported before or after the answer; what did not change is not.
        early = self.random.random() < 0.5
        if taken and early:
            self.count(order.peer)
        peer.mail.append(("supplied", (order.claim, len(taken), needed)))
        if taken and not early:
            self.count(order.peer)

    def collect(self) -> None:
        for one in self.home.instructions():
            if isinstance(one, Order):
                self.orders.append(one)
            elif isinstance(one, Complete):
                self.done.append(one.claim)
                assert one.units == len(self.got[one.claim])
            elif isinstance(one, Return):
                self.give_back(one.claim)
            elif isinstance(one, Starved):
                assert one.needed_bytes > 0
                self.leave(one.claim)
            elif isinstance(one, Ended):
                self.ended.add(one.claim)
            elif isinstance(one, Watch):
                self.watched.add(one.lane.where)
                for name in self.peers if one.peer is None else [one.peer]:
                    self.count(name, {one.lane.where})

    def give_back(self, one: ClaimId) -> None:
        for name, peer in self.peers.items():
            back = sorted(peer.leased & set(self.got[one]))
            peer.leased -= set(back)
            peer.ready[:0] = back
            if back:
                self.count(name)
        self.got[one] = []

    def leave(self, one: ClaimId) -> None:
        """It holds nothing, and does not come back."""
        self.starved.add(one)
        self.home.withdraw(one)
        self.give_back(one)

    def demand(self, number: int) -> None:
        where = self.random.choice([None, ["eq", "even", True]])
        one = ClaimId(self.random.choice("abc"), number)
        self.waiting[one] = rows(self.random.randint(1, 6), where)
        self.got[one] = []
        self.credit[one] = ROW_BYTES * self.random.choice([2, 100, 100, 100])
        self.home.demand(one, self.waiting[one], credit_bytes=self.credit[one])

    def steal(self) -> None:
        """A claim that a peer met alone, without the home."""
        name = self.random.choice("abc")
        peer = self.peers[name]
        if peer.ready:
            peer.ready.pop(0)
            self.count(name)

    def drain(self) -> None:
        while self.step():
            pass


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_order_of_messages_no_claim_waits_for_rows_that_are_ready(seed: int) -> None:
    cluster = Cluster(seed)
    for number in range(80):
        action = cluster.random.random()
        if action < 0.5:
            cluster.put(number)
        elif action < 0.65:
            cluster.demand(number)
        elif action < 0.7:
            cluster.steal()
        for _ in range(cluster.random.randint(0, 4)):
            cluster.step()
    cluster.drain()
    held = {one: len(rows) for one, rows in cluster.got.items()}
    for one in cluster.done:
        assert held[one] == cluster.waiting[one].count  # exact until sealed
    ready = [row for peer in cluster.peers.values() for row in peer.ready]
    for one in cluster.starved:
        assert not held[one] and cluster.credit[one] < ROW_BYTES * cluster.waiting[one].count
    ended = {*cluster.done, *cluster.starved}
    open_claims = [one for one in cluster.waiting if one not in ended]
    for where in (None, ["eq", "even", True]):
        lane = [one for one in open_claims if cluster.waiting[one].where == where]
        fit = sum(1 for row in ready if where is None or row % 2 == 0)
        assert not lane or held[lane[0]] + fit < cluster.waiting[lane[0]].count
        assert not any(held[one] for one in lane[1:])  # only a head may hold partial grants
    assert sum(1 for one in open_claims if held[one]) <= 1
    seal_and_check_the_end(cluster, open_claims)


def seal_and_check_the_end(cluster: Cluster, open_claims: list[ClaimId]) -> None:
    for name, peer in cluster.peers.items():
        peer.sealed = True
        cluster.count(name)
    cluster.home.sealed(True)
    cluster.drain()
    for name, peer in cluster.peers.items():  # every lease is acked
        peer.leased.clear()
        cluster.count(name)
    cluster.drain()
    odd = {row for peer in cluster.peers.values() for row in peer.ready}
    for one in open_claims:
        if one in cluster.starved:
            continue
        done = one in cluster.done
        assert done == bool(cluster.got[one])
        if not done and cluster.waiting[one].where is None:
            assert one in cluster.ended
    rows = [row for got in cluster.got.values() for row in got]
    assert len(rows) == len(set(rows)) and not odd & set(rows)
