"""A home whose orders and answers come late: no claim waits in vain."""

from __future__ import annotations

import random

import pytest

from dataplane.metadata.counts import Counts
from dataplane.metadata.homes import StageHome
from dataplane.metadata.instructions import ClaimId, Complete, Ended, Order, Starved
from dataplane.wire.messages import Want

ROW_BYTES = 10
FILTERS: tuple[list[object] | None, ...] = (None, ["eq", "even", True])


def fits(row: int, where: list[object] | None) -> bool:
    return where is None or row % 2 == 0


class Shard:
    """Rows by number, even ones pass the filter; orders are carried out, and answered, late."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.home = StageHome(self.counts)
        self.ready: list[int] = []
        self.leased: set[int] = set()
        self.sealed = False
        self.waiting: dict[ClaimId, Want] = {}
        self.got: dict[ClaimId, list[int]] = {}
        self.done: list[ClaimId] = []
        self.ended: set[ClaimId] = set()
        self.orders: list[Order] = []
        self.answers: list[tuple[ClaimId, int, int]] = []
        self.credit: dict[ClaimId, int] = {}
        self.starved: set[ClaimId] = set()

    def counts(self, where: list[object] | None) -> Counts:
        fit = sum(1 for row in self.ready if fits(row, where))
        return Counts(fit, 0, fit, 0, fit + len(self.leased), 0)

    def changed(self) -> None:
        self.home.changed(self.sealed)

    def put(self, row: int) -> None:
        self.ready.append(row)
        self.changed()

    def step(self) -> bool:
        """One thing, in any order; whether there was one."""
        self.collect()
        choices = [queue for queue in (self.orders, self.answers) if queue]
        if not choices:
            return False
        queue = self.random.choice(choices)
        one = queue.pop(self.random.randrange(len(queue)))
        if isinstance(one, Order):
            self.obey(one)
        else:
            claim, units, needed = one
            self.home.supplied(claim, units, 0.0, False, units * ROW_BYTES, needed)
            self.changed()
        return True

    def obey(self, order: Order) -> None:
        want = order.want_remaining
        wanted = [row for row in self.ready if fits(row, want.where)][: want.count]
        taken = wanted[: order.credit_bytes // ROW_BYTES]
        needed = 0
        if len(taken) < len(wanted):
            needed = ROW_BYTES * min(len(wanted), max(want.minimum, len(taken) + 1))
        assert order.exact
        if len(taken) < want.minimum:
            taken = []
        if order.claim in self.starved:
            taken, needed = [], 0  # it has left
        self.ready = [row for row in self.ready if row not in taken]
        self.leased |= set(taken)
        self.got[order.claim] += taken
        if self.random.random() < 0.5:
            self.changed()
        self.answers.append((order.claim, len(taken), needed))

    def collect(self) -> None:
        for one in self.home.instructions():
            if isinstance(one, Order):
                self.orders.append(one)
            elif isinstance(one, Complete):
                self.done.append(one.claim)
                assert one.told and self.got[one.claim]
            elif isinstance(one, Starved):
                assert one.needed_bytes > 0 and not self.got[one.claim]
                self.starved.add(one.claim)
            elif isinstance(one, Ended):
                self.ended.add(one.claim)

    def demand(self, number: int) -> None:
        where = self.random.choice(FILTERS)
        count = self.random.randint(1, 6)
        one = ClaimId(self.random.choice("abc"), number)
        self.waiting[one] = Want("rows", count, count, where)
        self.got[one] = []
        self.credit[one] = ROW_BYTES * self.random.choice([2, 100, 100, 100])
        self.home.demand(one, self.waiting[one], self.credit[one])

    def steal(self) -> None:
        """A claim that was met without the home."""
        if self.ready:
            self.ready.pop(0)
            self.changed()

    def drain(self) -> None:
        while self.step():
            pass


@pytest.mark.parametrize("seed", range(60))
def test_whatever_comes_late_no_claim_waits_for_rows_that_are_ready(seed: int) -> None:
    shard = Shard(seed)
    for number in range(80):
        action = shard.random.random()
        if action < 0.5:
            shard.put(number)
        elif action < 0.65:
            shard.demand(number)
        elif action < 0.7:
            shard.steal()
        for _ in range(shard.random.randint(0, 4)):
            shard.step()
    shard.drain()
    for one in shard.done:
        assert len(shard.got[one]) == shard.waiting[one].count  # exact until sealed
    for one in shard.starved:
        assert shard.credit[one] < ROW_BYTES * shard.waiting[one].count
    ended = {*shard.done, *shard.starved}
    open_claims = [one for one in shard.waiting if one not in ended]
    assert not any(shard.got[one] for one in open_claims)  # who waits holds nothing
    for where in FILTERS:
        lane = [one for one in open_claims if shard.waiting[one].where == where]
        fit = sum(1 for row in shard.ready if fits(row, where))
        assert not lane or fit < shard.waiting[lane[0]].count
    seal_and_check_the_end(shard, open_claims)


def seal_and_check_the_end(shard: Shard, open_claims: list[ClaimId]) -> None:
    shard.sealed = True
    shard.changed()
    shard.drain()
    shard.leased.clear()  # every lease is acked
    shard.changed()
    shard.drain()
    for one in open_claims:
        if one in shard.starved:
            continue
        done = one in shard.done
        assert done == bool(shard.got[one])
        if not done and shard.waiting[one].where is None:
            assert one in shard.ended
    rows = [row for got in shard.got.values() for row in got]
    assert len(rows) == len(set(rows)) and not set(shard.ready) & set(rows)
