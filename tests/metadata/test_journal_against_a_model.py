"""A store and the copies that are made of it: by its operations, and by dumps, at any moment."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from dataplane.metadata import names
from dataplane.metadata.journal import JournaledStore, dump
from dataplane.metadata.store import Store
from dataplane.wire.journal import Op
from dataplane.wire.messages import Want
from dataplane.wire.tables import Definition, Name
from tests.metadata import stores
from tests.metadata.observed import carried_over, merged, observed
from tests.metadata.store_model import OWNERS, STAGES
from tests.metadata.test_store_against_a_model import StoreMachine


class JournalMachine(StoreMachine):
    """The store of the model, and a replica that has only heard its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)
        self.ops: list[Op] = []
        self.store: JournaledStore = self.journaled(self.ops)
        self.replica = self.empty()
        self.from_the_start = True

    def definition(self) -> Definition:
        return Definition(stages=STAGES, free=self.free, group_size=self.group_size)

    def empty(self) -> Store:
        return Store("p", self.definition(), 1)

    def journaled(self, ops: list[Op]) -> JournaledStore:
        return JournaledStore("p", self.definition(), 1, self.numbers, ops.append)

    @rule(many=st.integers(1, 5))
    def a_replica_is_made_anew_from_a_dump(self, many: int) -> None:
        self.ship()
        self.replica = self.empty()
        carried_over(self.replica, list(dump(self.store, many)), self.now)
        self.from_the_start = False

    @rule(many=st.integers(1, 5))
    def a_backup_is_promoted(self, many: int) -> None:
        self.ship()
        self.ops = []
        self.store = self.journaled(self.ops)
        carried_over(self.store, list(dump(self.replica, many)), self.now)
        self.replica = self.empty()
        for lease in self.leases.values():
            lease.deadline = None if lease.deadline is None else self.now + 3.0

    @rule(many=st.integers(1, 5))
    def a_backup_with_rows_of_its_own_takes_over(self, many: int) -> None:
        self.ship()
        ops: list[Op] = []
        other, copy = self.journaled(ops), self.empty()
        fill(other)
        if self.sealing:
            other.seal_begin()
            other.seal_end()
        before = observed(other)
        carried_over(other, list(dump(self.replica, many)), self.now)
        assert observed(other) == merged(before, observed(self.replica))
        carried_over(copy, ops, self.now)
        assert observed(copy) == observed(other)

    def ship(self) -> None:
        carried_over(self.replica, self.ops, self.now)
        self.ops.clear()

    @invariant()
    def the_replica_is_equal(self) -> None:
        self.ship()
        ours, theirs = observed(self.store), observed(self.replica)
        if not self.from_the_start:  # what happened to several at once may change places
            for one in (ours, theirs):
                self.forget_order_of_equals(one)
                one["tombstones"].sort()
        assert ours == theirs

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        held = {
            (owner, range_): count
            for owner, ranges, counts in self.store.holdings()
            for (range_, _), count in zip(ranges.tolist(), counts.tolist(), strict=True)
        }
        assert held == {(OWNERS[r % 2], r): 1 for r in self.references}

    def forget_order_of_equals(self, seen: dict[str, Any]) -> None:
        for stage, known in seen["stages"].items():
            for unit in ("rows", "groups"):
                since = self.ready(stage, unit, filtered=False)
                order = [since[int.from_bytes(key[8:], "big")] for key in known[f"ready_{unit}"]]
                assert order == sorted(order)
                known[f"ready_{unit}"].sort()


def fill(store: Store) -> None:
    """Rows in all states: pending, ready, leased, split, acked, dropped, and those of a group."""
    fields = ("a", "b")
    alone: list[Name | None] | None = None if store.definition.group_size is None else ["i", "j"]
    stores.put(store, ["one", "two"], alone, fields=fields, v=[3])
    stores.put(store, ["three", 4], ["g", 5], fields=("a",), v=[1, 2.5])
    stores.put(store, [f"r{i}" for i in range(3)], ["h"] * 3, fields=fields)
    if store.definition.group_size is None:
        store.close(names.hash_name("h"), 3, "h")
    store.take("s1", Want("rows", 1, 1), 5, 0.0, 1_500)
    taken = store.take("s2", Want("groups", 1, 1), 6, 0.0)
    stores.finish(store, taken, index=b"\x01\0\0\0")
    store.drop(rows=stores.named(["r2", "never"]))


class KeepingMachine(JournalMachine):
    free = "drop"
    group_size = None


COMMON = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestFreeingWhatIsAcked = JournalMachine.TestCase
TestFreeingWhatIsAcked.settings = COMMON
TestKeepingUntilDropped = KeepingMachine.TestCase
TestKeepingUntilDropped.settings = COMMON
