"""The queue of claims, over a real store, against one that looks at every row and every claim."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dataplane.errors import StreamEnd
from dataplane.metadata.shard.claim_queue import ClaimQueue
from dataplane.wire.messages import Claimed, Finish, Want
from dataplane.wire.tables import Owner
from tests.metadata.stores import Column, keys_of, named, store, values, waiting, wrote

FILTERS: dict[str, list[object] | None] = {
    "all": None,
    "even": ["eq", "even", True],
    "odd": ["eq", "even", False],
}


def length_of(row: int) -> int:
    return 1 + row * 7 % 10


def matches(row: int, lane: str) -> bool:
    return lane == "all" or (row % 2 == 0) == (lane == "even")


@dataclass
class Claim:
    number: int
    lane: str
    count: int
    least: int
    budget: float
    since: int


@dataclass
class Naive:
    """Rows in the order in which they are to go, and claims as they came."""

    ready: list[int] = field(default_factory=list)
    leased: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    lanes: list[str] = field(default_factory=list)
    sealed: bool = False

    def of(self, lane: str) -> list[Claim]:
        return sorted((c for c in self.claims if c.lane == lane), key=lambda c: c.since)

    def serve(self, keep: bool) -> list[tuple[int, Any]]:
        out: list[tuple[int, Any]] = []
        while (outcome := self.next(keep)) is not None:
            out.append(outcome)
        return out

    def next(self, keep: bool) -> tuple[int, Any] | None:
        keepers: list[str] = []
        for head in sorted((self.of(lane)[0] for lane in self.lanes), key=lambda c: c.since):
            outcome = self.advance(head, keepers)
            if outcome is not None:
                return outcome
            if keep:
                keepers.append(head.lane)
        return None

    def advance(self, head: Claim, keepers: list[str]) -> tuple[int, Any] | None:
        rows = [row for row in self.ready if matches(row, head.lane)]
        if self.sealed and not rows and not self.leased:
            self.end(head)
            return head.number, "ended"
        free = [row for row in rows if not any(matches(row, other) for other in keepers)]
        got = self.fitting(head, rows, free, bool(keepers))
        if not got:
            return None
        self.ready = [row for row in self.ready if row not in got]
        self.leased[head.number] = got
        self.end(head)
        return head.number, got

    def fitting(self, head: Claim, rows: list[int], free: list[int], some_kept: bool) -> list[int]:
        if head.budget:
            sums = list(itertools.accumulate(map(self.lengths.__getitem__, free)))
            fit = max(sum(total <= head.budget for total in sums), min(1, len(free)))
            full = fit < len(free) or (bool(fit) and sums[fit - 1] >= head.budget)
            last = self.sealed and not some_kept
            return free[:fit] if full or (last and fit) else []
        least = min(head.least, len(rows)) if self.sealed else head.least
        return free[: head.count] if least and len(free) >= least else []

    def end(self, claim: Claim) -> None:
        self.claims.remove(claim)
        if not self.of(claim.lane):
            self.lanes.remove(claim.lane)


class Queue(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = store(stages={"s": ["tokens"]})
        self.queue = ClaimQueue(self.store, "s")
        self.naive = Naive()
        self.rows = itertools.count()
        self.numbers = itertools.count(1)
        self.numbered: dict[int, int] = {}

    def serve(self, keep: bool = True) -> None:
        """Both do, and agree."""
        told: list[tuple[int, Any]] = []
        for claim, what in self.queue.serve(0.0, keep):
            if isinstance(what, StreamEnd):
                told.append((claim.number, "ended"))
                continue
            assert isinstance(what, Claimed)
            self.numbered[claim.number] = what.lease
            told.append((claim.number, keys_of(self.store, what)))
        assert told == self.naive.serve(keep)

    @rule(count=st.integers(1, 5))
    def put(self, count: int) -> None:
        if self.naive.sealed:
            return
        rows = list(itertools.islice(self.rows, count))
        tags: dict[str, Any] = {
            "even": [row % 2 == 0 for row in rows],
            "length": [length_of(row) for row in rows],
        }
        columns = [Column("tokens", values(count, first=rows[0]))]
        self.store.put(wrote(named(list(rows)), columns, [Owner("a", 7)], tags))
        self.naive.ready += rows
        self.naive.lengths |= {row: length_of(row) for row in rows}
        self.serve()

    @rule(which=st.integers(0, 50), length=st.integers(0, 12))
    def weigh(self, which: int, length: int) -> None:
        if self.naive.ready:
            row = self.naive.ready[which % len(self.naive.ready)]
            self.naive.lengths[row] = length
            self.store.tag(named([row]), {"length": [length]})
            self.serve()

    @rule(which=st.integers(0, 50))
    def drop(self, which: int) -> None:
        if self.naive.ready:
            row = self.naive.ready.pop(which % len(self.naive.ready))
            self.store.drop(named([row]))
            self.serve()

    @rule(
        lane=st.sampled_from(sorted(FILTERS)),
        count=st.integers(1, 6),
        least=st.integers(1, 6),
        budget=st.sampled_from([0, 0, 5, 20]),
        waited=st.integers(0, 3),
        keep=st.booleans(),
    )
    def claim(
        self, lane: str, count: int, least: int, budget: int, waited: int, keep: bool
    ) -> None:
        number = next(self.numbers)
        since = 100 * number - 250 * waited + waited  # all different, and not always in order
        least = min(least, count)
        tag = "length" if budget else None
        want = Want("rows", 0 if budget else count, least, FILTERS[lane], tag, float(budget))
        self.queue.add(waiting(number, want, since=float(since)))
        self.naive.claims.append(Claim(number, lane, count, least, budget, since))
        if lane not in self.naive.lanes:
            self.naive.lanes.append(lane)
        self.serve(keep)

    @rule(which=st.integers(0, 50))
    def repeat(self, which: int) -> None:
        there = list(self.queue)
        if there:
            one = there[which % len(there)]
            again = waiting(one.number, one.want, since=one.since + 1_000)
            self.queue.add(again)
            self.serve()

    @rule(which=st.integers(0, 50))
    def withdraw(self, which: int) -> None:
        if self.naive.claims:
            claim = self.naive.claims[which % len(self.naive.claims)]
            assert self.queue.withdraw(claim.number)
            self.naive.end(claim)
            self.serve()

    @rule(which=st.integers(0, 50), outcome=st.sampled_from(["ack", "release"]))
    def finish(self, which: int, outcome: str) -> None:
        held = sorted(self.naive.leased)
        if held:
            number = held[which % len(held)]
            self.store.finish(Finish(self.numbered[number], outcome))
            rows = self.naive.leased.pop(number)
            self.naive.ready = (rows if outcome == "release" else []) + self.naive.ready
            self.serve()

    @rule()
    def seal(self) -> None:
        self.store.seal()
        self.naive.sealed = True
        self.serve()

    @invariant()
    def the_same_wait(self) -> None:
        assert sorted(one.number for one in self.queue) == sorted(
            one.number for one in self.naive.claims
        )
        assert self.store.counts("s").ready == len(self.naive.ready)


Queue.TestCase.settings = settings(max_examples=200, stateful_step_count=50)
TestQueue = Queue.TestCase
