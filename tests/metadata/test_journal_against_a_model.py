"""A store and the copies that are made of it: by its operations, and by dumps, at any moment."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import chain, islice

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from dataplane.metadata.shard.journal import snapshot
from dataplane.metadata.shard.store import Store
from dataplane.wire.journal import LogRecord, encode
from dataplane.wire.tables import Definition
from tests.metadata.observed import accounts, carried_over, observed
from tests.metadata.store_model import OWNERS, STAGES, is_inline
from tests.metadata.test_store_against_a_model import StoreMachine


class JournalMachine(StoreMachine):
    """The store of the model, and a replica that has only heard its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)
        self.ops: list[LogRecord] = []
        self.store: Store = self.empty()
        self.store.emit = self.ops.append
        self.replica = self.empty()
        self.learner: Store | None = None
        self.pieces: Iterator[LogRecord] = iter(())
        self.told: list[bytes] = []
        """what the learner is to be told"""
        self.since: list[LogRecord] = []
        """what happened after the learner's dump began"""

    def definition(self) -> Definition:
        return Definition(stages=STAGES, free=self.free, group_size=self.group_size)

    def empty(self) -> Store:
        return Store("p", self.definition(), 1, self.numbers)

    @precondition(lambda self: self.learner is None)
    @rule(many=st.integers(1, 5))
    def a_replica_is_made_anew_from_a_dump(self, many: int) -> None:
        self.ship()
        self.replica = self.empty()
        carried_over(self.replica, list(snapshot(self.store, many)), self.now)

    @precondition(lambda self: self.learner is None)
    @rule(many=st.integers(1, 5))
    def a_backup_is_promoted(self, many: int) -> None:
        """It serves its copy as it is; the next backup gets a dump of that."""
        self.ship()
        self.store, self.replica = self.replica, self.empty()
        self.store.emit = self.ops.append
        carried_over(self.replica, list(snapshot(self.store, many)), self.now)

    @rule(many=st.integers(1, 5))
    def a_learner_begins(self, many: int) -> None:
        """Whatever changes between its pieces, they are what they were all at once."""
        self.ship()
        self.learner, self.since = self.empty(), []
        self.told = [encode(op) for op in snapshot(self.store, many)]
        pieces = snapshot(self.store, many)
        self.pieces = chain([next(pieces)], pieces)

    @precondition(lambda self: self.learner is not None)
    @rule(count=st.integers(1, 5))
    def some_pieces_arrive_at_the_learner(self, count: int) -> None:
        self.hear(list(islice(self.pieces, count)))

    @precondition(lambda self: self.learner is not None)
    @rule()
    def the_learner_has_all_pieces_and_follows(self) -> None:
        assert self.learner is not None
        self.ship()
        self.hear(list(self.pieces))
        assert not self.told
        carried_over(self.learner, self.since, self.now)
        assert observed(self.learner) == observed(self.store)
        assert accounts(self.learner) == []
        self.learner = None

    def hear(self, pieces: list[LogRecord]) -> None:
        assert self.learner is not None
        assert [encode(op) for op in pieces] == self.told[: len(pieces)]
        del self.told[: len(pieces)]
        carried_over(self.learner, pieces, self.now)

    def ship(self) -> None:
        carried_over(self.replica, self.ops, self.now)
        self.since += self.ops
        self.ops.clear()

    @invariant()
    def the_replica_is_equal(self) -> None:
        self.ship()
        assert observed(self.store) == observed(self.replica)
        assert accounts(self.replica) == []

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        held = {
            (owner, number & 0xFFFF_FFFF): count
            for owner, numbers, counts in self.store.holdings()
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
        }
        assert held == {(OWNERS[r % 2], r): 1 for r in self.references if not is_inline(r)}


class KeepingMachine(JournalMachine):
    free = "drop"
    group_size = None


COMMON = settings(
    max_examples=40,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],
)
TestFreeingWhatIsAcked = JournalMachine.TestCase
TestFreeingWhatIsAcked.settings = COMMON
TestKeepingUntilDropped = KeepingMachine.TestCase
TestKeepingUntilDropped.settings = COMMON
