"""The queue of claims, over a real store, against a model that looks at every row and every claim
and has only the rule: nobody takes units that an older claim wants, or that share rows with those,
once that claim has been short for over a second."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

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
Unit = tuple[int, ...]
"""The rows of a group, or one row."""


@dataclass
class Group:
    """Of two rows. split: some were taken singly."""

    name: str
    second: int
    rows: list[int] = field(default_factory=list)
    split: bool = False
    arrived: int = 0


@dataclass
class Claim:
    number: int
    unit: str
    filter: str
    count: int
    least: int
    budget: float
    since: float

    def matches(self, unit: Unit) -> bool:
        even = self.filter == "even"
        return self.filter == "all" or all((row % 2 == 0) == even for row in unit)


@dataclass
class Model:
    """Rows and groups in the order in which they are to go, and claims as they came."""

    now: float = 0.0
    rows: list[int] = field(default_factory=list)
    whole: list[Group] = field(default_factory=list)
    groups: dict[int, Group] = field(default_factory=dict)
    """of each row that has one"""
    arrived: dict[int, int] = field(default_factory=dict)
    """the order in which rows came"""
    returned: set[int | str] = field(default_factory=set)
    """the ready rows, and the names of groups, that were leased before"""
    leased: dict[int, list[Unit]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    sealed: bool = False

    def serve(self, keep: bool) -> list[tuple[int, Any]]:
        told: list[tuple[int, Any]] = []
        while True:
            before = len(told)
            for claim in sorted(self.claims, key=lambda one: (one.since, one.number)):
                outcome = self.outcome(claim, keep)
                if outcome is not None:
                    self.claims.remove(claim)
                    told.append((claim.number, outcome))
            if len(told) == before:
                return told

    def outcome(self, claim: Claim, keep: bool) -> Any:
        ready = [unit for unit in self.ready(claim.unit) if claim.matches(unit)]
        if self.sealed and not ready and not self.may_come_back(claim.unit):
            return "ended"
        others = [one for one in self.claims if self.is_before(one, claim)] if keep else []
        free = [unit for unit in ready if not any(self.wants(one, unit) for one in others)]
        if claim.budget:
            taken = self.of_budget(claim, free, self.sealed and not others)
        else:
            least = min(claim.least, len(ready)) if self.sealed else claim.least
            taken = free[: claim.count] if 0 < least <= len(free) else []
        if not taken:
            return None
        self.lease(claim, taken)
        return [row for unit in taken for row in unit]

    def is_before(self, other: Claim, claim: Claim) -> bool:
        older = (other.since, other.number) < (claim.since, claim.number)
        return older and self.now - other.since > 1

    def ready(self, unit: str) -> list[Unit]:
        if unit == "rows":
            return [(row,) for row in self.rows]
        return [tuple(group.rows) for group in self.whole]

    def wants(self, older: Claim, unit: Unit) -> bool:
        """Whether this claim may get one of the rows, by itself or with its group."""
        for row in unit:
            if older.unit == "rows" and older.matches((row,)):
                return True
            group = self.groups.get(row) if older.unit == "groups" else None
            if group is not None and not group.split and older.matches(tuple(group.rows)):
                return True
        return False

    def may_come_back(self, unit: str) -> bool:
        """Whether another unit is not ready, and may be."""
        if unit == "rows":
            return any(self.leased.values())
        groups = [group for group in self.groups.values() if group not in self.whole]
        return any(not group.split and group.rows for group in groups)

    def of_budget(self, claim: Claim, free: list[Unit], last: bool) -> list[Unit]:
        weights = [sum(self.lengths[row] for row in unit) for unit in free]
        sums = list(itertools.accumulate(weights))
        fit = max(sum(total <= claim.budget for total in sums), min(1, len(free)))
        full = fit < len(free) or (bool(fit) and sums[fit - 1] >= claim.budget)
        return free[:fit] if full or last else []

    def lease(self, claim: Claim, taken: list[Unit]) -> None:
        rows = {row for unit in taken for row in unit}
        self.returned -= rows | {group.name for group in map(self.groups.get, rows) if group}
        self.rows = [row for row in self.rows if row not in rows]
        self.whole = [group for group in self.whole if rows.isdisjoint(group.rows)]
        self.leased[claim.number] = taken
        if claim.unit == "rows":
            for row in rows & self.groups.keys():
                self.groups[row].split = True

    def finish(self, number: int, release: bool) -> None:
        units = self.leased.pop(number)
        rows = [row for unit in units for row in unit]
        if release:
            back = [self.groups[unit[0]] for unit in units if unit[0] in self.groups]
            whole = [group for group in back if not group.split]
            self.returned |= {*rows, *[group.name for group in whole]}
            self.rows = sorted(rows + self.rows, key=self.age)
            self.whole = sorted(whole + self.whole, key=self.age)
        else:
            self.forget(rows)

    def age(self, one: int | Group) -> float:
        """Those that come back go first, in order of arrival; the order of the others stays."""
        if isinstance(one, Group):
            return one.arrived if one.name in self.returned else math.inf
        return self.arrived[one] if one in self.returned else math.inf

    def forget(self, rows: list[int]) -> None:
        for row in rows:
            if (group := self.groups.pop(row, None)) is not None:
                group.rows.remove(row)

    def put(self, rows: list[int], group: Group | None) -> None:
        self.rows += rows
        self.arrived |= {row: len(self.arrived) + at for at, row in enumerate(rows)}
        if group is not None:
            group.arrived = group.arrived or 1 + self.arrived[rows[0]]
            group.rows += rows
            self.groups |= dict.fromkeys(rows, group)

    def close(self, group: Group) -> None:
        if not group.split and group.rows:
            self.whole.append(group)


class Walk:
    """Does at random what a shard may be asked, to both."""

    def __init__(self, seed: int) -> None:
        self.store = store(stages={"s": ["tokens"]})
        self.queue = ClaimQueue(self.store, "s")
        self.model = Model()
        self.random = random.Random(seed)
        self.numbers = itertools.count(1)
        self.leases: dict[int, int] = {}
        self.open: list[Group] = []
        self.keep = True

    def step(self) -> None:
        few = len(self.model.rows) < 8
        steps = {
            self.put: 4 * few,
            self.put_group: 4 * few,
            self.complete_group: 4 * bool(self.open),
            self.pass_time: 3,
            self.claim: 8 if len(self.model.claims) < 8 else 1,
            self.repeat: bool(self.model.claims),
            self.withdraw: bool(self.model.claims),
            self.finish: 3 * bool(self.model.leased),
            self.weigh: bool(self.model.rows),
            self.drop: bool(self.model.rows),
        }
        (step,) = self.random.choices(list(steps), [int(weight) for weight in steps.values()])
        step()
        self.keep = self.random.random() < 0.95  # unless a producer waits
        self.serve()

    def serve(self) -> None:
        """Both do, and agree."""
        told: list[tuple[int, Any]] = []
        for claim, what in self.queue.serve(self.model.now, self.keep):
            if isinstance(what, StreamEnd):
                told.append((claim.number, "ended"))
                continue
            assert isinstance(what, Claimed)
            self.leases[claim.number] = what.lease
            told.append((claim.number, keys_of(self.store, what)))
        assert told == self.model.serve(self.keep)
        waiting = sorted(one.number for one in self.model.claims)
        assert sorted(one.number for one in self.queue) == waiting
        assert self.store.counts("s").ready == len(self.model.rows)
        assert self.store.counts("s", "groups").ready == len(self.model.whole)

    def pass_time(self) -> None:
        self.model.now += self.random.choice([0.25, 0.5, 2.0])

    def put(self) -> None:
        if not self.model.sealed:
            self._put([next(self.numbers) for _ in range(self.random.randint(1, 3))])

    def put_group(self) -> None:
        if self.model.sealed:
            return
        first, twins = next(self.numbers), self.random.random() < 0.7
        second = next(one for one in self.numbers if (one - first) % 2 == (not twins))
        self.open.append(Group(f"group-{first}", second))
        self._put([first], self.open[-1])
        if self.random.random() < 0.5:
            self.complete_group(-1)

    def complete_group(self, which: int = 0) -> None:
        if not self.model.sealed:
            group = self.open.pop(which)
            self._put([group.second], group)
            self.store.close(group.name, 2)
            self.model.close(group)

    def _put(self, rows: list[int], group: Group | None = None) -> None:
        lengths = [1 + row * 7 % 10 for row in rows]
        tags: dict[str, Any] = {"even": [row % 2 == 0 for row in rows], "length": lengths}
        columns = [Column("tokens", values(len(rows), first=rows[0]))]
        groups = None if group is None else [group.name] * len(rows)
        keys = named(list(rows), groups)
        self.store.put(wrote(keys, columns, [Owner("a", 7)], tags))
        self.model.lengths |= dict(zip(rows, lengths, strict=True))
        self.model.put(rows, group)

    def weigh(self) -> None:
        row, length = self.random.choice(self.model.rows), self.random.randint(0, 12)
        self.model.lengths[row] = length
        self.store.tag(named([row]), {"length": [length]})

    def drop(self) -> None:
        """Drop a row without a group, or a whole group."""
        row = self.random.choice(self.model.rows)
        group = self.model.groups.get(row)
        if group is None:
            self.store.drop(named([row]))
            self.model.rows.remove(row)
        elif group in self.model.whole:
            self.store.drop(groups=[group.name])
            self.model.rows = [one for one in self.model.rows if one not in group.rows]
            self.model.whole.remove(group)
            self.model.forget(list(group.rows))

    def claim(self) -> None:
        """Some have waited at another peer before."""
        choose, number = self.random.choice, next(self.numbers)
        unit: Any = choose(["rows", "groups"])
        where = choose(["all", "even", "odd"])
        count, budget = self.random.randint(1, 6), choose([0, 0, 0, 5, 30])
        least = self.random.randint(1, count)
        since = self.model.now - choose([0.0, 0.0, 0.5, 3.0])
        tag = "length" if budget else None
        want = Want(unit, 0 if budget else count, least, FILTERS[where], tag, float(budget))
        self.queue.add(waiting(number, want, since=since))
        self.model.claims.append(Claim(number, unit, where, count, least, budget, since))

    def repeat(self) -> None:
        one = self.random.choice(list(self.queue))
        self.queue.add(waiting(one.number, one.want, since=self.model.now))

    def withdraw(self) -> None:
        claim = self.random.choice(self.model.claims)
        self.model.claims.remove(claim)
        assert self.queue.withdraw(claim.number)

    def finish(self) -> None:
        number = self.random.choice(sorted(self.model.leased))
        outcome: Any = self.random.choice(["ack", "release"])
        self.store.finish(Finish(self.leases[number], outcome))
        self.model.finish(number, outcome == "release")

    def seal(self) -> None:
        self.store.seal()
        self.model.sealed = True
        for group in self.open:
            self.model.close(group)
        self.open = []
        self.serve()


@pytest.mark.parametrize("seed", range(40))
def test_claims_are_met_as_the_rule_says(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(200):
        walk.step()
    walk.seal()
    for _ in range(60):
        walk.step()
