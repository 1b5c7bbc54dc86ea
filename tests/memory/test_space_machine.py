"""Random traffic against a plain model: live chunks never overlap and no byte is ever lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dataplane.errors import ProtocolError
from dataplane.memory.admission import Admission
from dataplane.memory.extents import Records
from dataplane.memory.space import Space
from dataplane.wire.packed import EXTENT, U8
from tests.chunk_numbers import chunk_numbers
from tests.placing import place

PAGE = 4096
HOLDERS = st.integers(1, 3)
CLASSES = st.sampled_from(list(Admission))
Name = int


class SpaceMachine(RuleBasedStateMachine):
    """`refs` is the model: per living chunk, the references that it should have."""

    def __init__(self) -> None:
        super().__init__()
        self.space = Space(64 * PAGE)
        self.refs: dict[Name, int] = {}
        self.released: list[Name] = []
        self.pins: dict[int, tuple[int, list[Name]]] = {}
        self.pulled = 0

    @initialize(pages=st.integers(1, 64))
    def what_counts_as_long(self, pages: int) -> None:
        self.space.long_bytes = pages * PAGE

    def column(self, names: list[Name]) -> np.ndarray:
        return np.array(names, U8)

    def drop(self, names: list[Name]) -> None:
        for name in names:
            self.refs[name] -= 1
            if not self.refs[name]:
                del self.refs[name]
                self.released.append(name)

    def write(self, holder: int, admission: int, units: list[list[int]]) -> list[Name]:
        count, extents = self.space.reserve(
            holder, admission, [np.array(unit, U8) for unit in units]
        )
        sizes = [size for unit in units[:count] for size in unit]
        column: Records = np.empty(len(sizes), EXTENT)
        column["offset"], column["length"] = place(sizes, extents), sizes
        chunks = self.space.commit(holder, column.tolist(), admission)
        names: list[Name] = chunks.tolist()
        assert not set(names) & set(self.refs)
        self.refs |= dict.fromkeys(names, 1)
        return names

    @rule(
        holder=HOLDERS,
        admission=CLASSES,
        units=st.lists(st.lists(st.integers(0, 3 * PAGE), max_size=4), min_size=1, max_size=5),
    )
    def put(self, holder: int, admission: int, units: list[list[int]]) -> None:
        before = set(self.cached())
        self.write(holder, admission, units)
        self.forget_evicted(before)

    @rule(sizes=st.lists(st.integers(1, 2 * PAGE), min_size=1, max_size=6))
    def pull(self, sizes: list[int]) -> None:
        before = set(self.cached())
        local = self.write(9, Admission.PULL, [[size] for size in sizes])
        self.space.forget(9)
        self.forget_evicted(before)
        remote = [(self.pulled + n, 1) for n in range(len(local))]
        self.pulled += len(local)
        self.space.copies.insert(77, chunk_numbers(remote), self.column(local))

    @rule(holder=HOLDERS, admission=CLASSES, pages=st.integers(0, 8))
    def grant_ahead(self, holder: int, admission: int, pages: int) -> None:
        self.space.grant(holder, admission, pages * PAGE)

    @rule(holder=HOLDERS, start=st.integers(0, 100), length=st.integers(1, 100))
    def give_some_back(self, holder: int, start: int, length: int) -> None:
        extents = np.array([(start * 64, length * 64)], EXTENT)
        before = self.space.stats()
        try:
            self.space.give_back(holder, extents)
        except ProtocolError:
            assert self.space.stats() == before

    @rule(holder=HOLDERS)
    def give_all_back(self, holder: int) -> None:
        if holder in self.space._holders:
            grants = self.space._holders[holder].grants
            self.space.give_back(holder, np.array(grants, EXTENT))

    @rule(holder=HOLDERS, data=st.data())
    def pin(self, holder: int, data: st.DataObject) -> None:
        if self.refs:
            names = data.draw(st.lists(st.sampled_from(sorted(self.refs)), min_size=1, max_size=5))
            number = self.space.pin(holder, self.column(names))
            self.pins[number] = (holder, names)
            for name in names:
                self.refs[name] += 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pins:
            number = data.draw(st.sampled_from(sorted(self.pins)))
            holder, names = self.pins.pop(number)
            self.space.unpin(holder, [number, number])
            self.space.unpin(holder, [number])
            self.drop(names)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        free = sorted(set(self.refs) - set(self.cached()) - self.pinned_names())
        if free:
            names = data.draw(st.lists(st.sampled_from(free), min_size=1, unique=True))
            self.space.release(self.column(names))
            self.drop(names)

    @rule()
    def release_again(self) -> None:
        assert not self.released or self.space.release(self.column(self.released)) == 0

    @rule(nbytes=st.integers(1, 5 * PAGE))
    def evict(self, nbytes: int) -> None:
        before = set(self.cached())
        self.space.copies.evict(nbytes)
        self.forget_evicted(before)

    @rule(holder=HOLDERS)
    def lose(self, holder: int) -> None:
        self.space.disown(holder)
        self.space.forget(holder)
        for number, (owner, names) in list(self.pins.items()):
            if owner == holder:
                del self.pins[number]
                self.drop(names)

    def cached(self) -> list[Name]:
        remote = chunk_numbers([(n, 1) for n in range(self.pulled)])
        local = self.space.copies.lookup(77, remote)
        names: list[Name] = local[local > 0].tolist()
        return names

    def pinned_names(self) -> set[Name]:
        return {name for _, names in self.pins.values() for name in names}

    def forget_evicted(self, before: set[Name]) -> None:
        self.drop(sorted(before - set(self.cached())))

    @invariant()
    def every_byte_is_free_granted_or_live(self) -> None:
        stats = self.space.stats()
        assert stats["free_bytes"] + stats["granted_bytes"] + stats["used_bytes"] == 64 * PAGE
        for figures in stats["classes"].values():
            assert figures["used_bytes"] >= 0
            assert figures["granted_bytes"] >= 0
            assert figures["room_bytes"] >= 0
        assert stats["cached_bytes"] <= stats["used_bytes"]

    @invariant()
    def what_should_live_lives_apart_and_the_rest_is_dead(self) -> None:
        names = self.column(sorted(self.refs))
        assert self.space.chunks.live == len(names)
        assert self.space.chunks.refs(names).tolist() == [self.refs[n] for n in sorted(self.refs)]
        taken = [(start, start + length) for start, length in self.space.chunks.places(names)]
        for holder in self.space._holders.values():
            taken += [(start, start + length) for start, length in holder.grants]
        assert all(one[1] <= other[0] for one, other in pairwise(sorted(taken)))
        assert not self.space.alive(self.column(self.released)).any()

    def teardown(self) -> None:
        for holder in (1, 2, 3):
            self.space.forget(holder)
        self.pins.clear()
        self.space.copies.drop_owner(77)
        names = self.column(sorted(self.refs))
        alive = names[self.space.alive(names)]
        self.space.release(alive, self.space.chunks.refs(alive))
        assert self.space.stats()["largest_free_bytes"] == 64 * PAGE


TestSpace = SpaceMachine.TestCase
TestSpace.settings = settings(max_examples=60, stateful_step_count=30)
