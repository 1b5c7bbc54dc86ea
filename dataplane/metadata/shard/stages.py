"""One stage of a store: the states of its rows and groups, kept together.

Rows move singly; a group's state follows from how many of its rows are ready and acked. Nothing
here scans: every change names the rows it concerns.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dataplane.metadata.shard.counts import Counts
from dataplane.metadata.shard.units import ACKED, LEASED, PENDING, READY, SPLIT, Units
from dataplane.metadata.tables.columns import Array, bump, grow, unique
from dataplane.metadata.tables.groups import CLOSED, Groups
from dataplane.metadata.tables.where import Filter
from dataplane.wire.tables import Where

Test = Callable[[Filter, Array], Array]


class Stage:
    """`group_of` is the row table's column of groups (-1: none); it grows in place."""

    def __init__(
        self,
        name: str,
        fields: list[str],
        mask: int,
        groups: Groups,
        group_of: Array,
        test: Test,
    ) -> None:
        self.name = name
        self.fields = fields
        self.mask = mask
        self._all_groups = groups
        self._group_of = group_of
        self._test = test
        self.rows = Units(len(group_of), test)
        self.groups = Units(groups.capacity, self._test_groups)
        self.lost = 0
        """rows that went with a peer before this stage was done with them"""
        self.acked_rows = 0
        """so far, those included that are gone"""
        self.wrote: Array = np.zeros(0, np.uint64)
        """per row a bit for each field that this stage added to it, as in `Fields.present`; empty
        until it adds one"""
        self._ready: Array = np.zeros(groups.capacity, np.int32)
        self._acked: Array = np.zeros(groups.capacity, np.int32)

    @property
    def nbytes(self) -> int:
        columns = (self._ready, self._acked, self.wrote)
        return self.rows.nbytes + self.groups.nbytes + sum(c.nbytes for c in columns)

    def reserve_rows(self, capacity: int) -> None:
        self.rows.reserve(capacity)
        if len(self.wrote):
            grow(self.wrote, capacity)

    def reserve_groups(self, capacity: int) -> None:
        self.groups.reserve(capacity)
        grow(self._ready, capacity)
        grow(self._acked, capacity)

    def units(self, unit: str) -> Units:
        return self.rows if unit == "rows" else self.groups

    def drain_changed(self) -> bool:
        """Whether counts changed since the last call."""
        changed = self.rows.changed or self.groups.changed
        self.rows.changed = self.groups.changed = False
        return changed

    def counts(self, where: Where | None) -> Counts:
        """Exact counts. With a filter, ready units that do not match count for nothing; those that
        are leased, or not ready yet, may match when they are."""
        ready_rows, ready_groups = self.rows.ready(where), self.groups.ready(where)
        return Counts(
            ready_rows=ready_rows,
            ready_groups=ready_groups,
            remaining_rows=self.rows.counts[PENDING] + ready_rows,
            remaining_groups=self.groups.counts[PENDING] + ready_groups,
            outstanding_rows=self.rows.outstanding - self.rows.counts[READY] + ready_rows,
            outstanding_groups=self.groups.outstanding - self.groups.counts[READY] + ready_groups,
            lost_rows=self.lost,
        )

    def complete(self, slots: Array, present: Array) -> None:
        """Fields of these rows were written; `present` are their fields now."""
        if len(slots) == 1:
            if (
                present.item() & self.mask == self.mask
                and self.rows.state.item(slots.item()) == PENDING
            ):
                self.make_ready(slots, front=False)
            return
        mask = np.uint64(self.mask)
        done = (present & mask) == mask
        newly = slots[done & (self.rows.state[slots] == PENDING)]
        if len(newly):
            self.make_ready(newly, front=False)

    def make_ready(self, slots: Array, front: bool) -> None:
        """Rows became ready, or came back. `settle` of their groups follows."""
        self.rows.move(slots, READY, front)
        self._bump(self._ready, slots, 1)

    def take_rows(self, slots: Array) -> None:
        """Lease ready rows singly: their groups are not offered whole any more."""
        self.rows.move(slots, LEASED)
        groups = self._groups(slots)
        if len(groups):
            bump(self._ready, groups, -1)
            groups = unique(groups)
            self.groups.move(groups[self.groups.state[groups] != SPLIT], SPLIT)

    def take_groups(self, groups: Array) -> tuple[Array, Array]:
        """Lease ready groups whole. Returns (rows a group, slots group by group)."""
        self.groups.move(groups, LEASED)
        counts, slots = self._all_groups.members.gather(groups)
        slots = slots.astype(np.int64)
        self.rows.move(slots, LEASED)
        self._ready[groups] = 0
        return counts, slots

    def ack(self, slots: Array) -> None:
        """Leased rows are done. `settle` of their groups follows."""
        self.rows.move(slots, ACKED)
        self.acked_rows += len(slots)
        self._bump(self._acked, slots, 1)

    def acked(self, slots: Array) -> Array:
        """Per row: has the stage acked it."""
        if len(slots) == 1:
            return np.array([self.rows.state.item(slots.item()) == ACKED])
        result: Array = self.rows.state[slots] == ACKED
        return result

    def add(self, slots: Array, mask: int) -> None:
        """The stage writes these fields of rows, where they have none yet."""
        if not len(self.wrote):
            self.wrote = np.zeros(len(self._group_of), np.uint64)
        self.wrote[slots] |= np.uint64(mask)

    def added(self, slots: Array, mask: int) -> Array:
        """Per row: is the value of this field, if there is one, this stage's."""
        if not len(self.wrote):
            return np.zeros(len(slots), np.bool_)
        mine: Array = (self.wrote[slots] & np.uint64(mask)) != 0
        return mine

    def overwritten(self, slots: Array, mask: int) -> None:
        """Another writer replaces the values of these rows."""
        if len(self.wrote):
            self.wrote[slots] &= ~np.uint64(mask)

    def lose(self, slots: Array) -> None:
        """Rows are about to go with a peer."""
        self.lost += len(slots) - int(np.count_nonzero(self.acked(slots)))

    def forget(self, slots: Array) -> None:
        """Rows are no more. `settle` or `forget_groups` of their groups follows."""
        states = self.rows.state[slots]
        were = states.tobytes()
        for state, column in ((READY, self._ready), (ACKED, self._acked)):
            if state in were:
                self._bump(column, slots[states == state], -1)
        self.rows.forget(slots)
        if len(self.wrote):
            self.wrote[slots] = 0

    def forget_groups(self, groups: Array) -> None:
        self.groups.forget(groups)
        self._ready[groups] = 0
        self._acked[groups] = 0

    def settle(self, groups: Array, front: bool = False) -> None:
        """Give groups (all different) the state that follows from their rows."""
        if len(groups) == 1:
            self._settle_one(groups, front)
            return
        live = self._all_groups.members.counts[groups]
        closed = (self._all_groups.phase[groups] == CLOSED) & (live > 0)
        acked = self._acked[groups]
        now = self.groups.state[groups]
        whole = closed & (self._ready[groups] == live)
        split = (now == SPLIT) | (acked > 0)
        # a leased group stays so until its rows are all back, or all acked
        then = np.where(whole, READY, np.where(now == LEASED, LEASED, PENDING))
        then = np.where(closed & (acked == live), ACKED, np.where(split, SPLIT, then))
        for state in (READY, PENDING, ACKED, SPLIT):
            moved = groups[(then == state) & (now != state)]
            self.groups.move(moved, state, front)

    def _settle_one(self, groups: Array, front: bool) -> None:
        """What `settle` does, without numpy's cost per operation: most puts and acks are small."""
        group = groups.item()
        live = self._all_groups.members.counts.item(group)
        closed = live > 0 and self._all_groups.phase.item(group) == CLOSED
        acked = self._acked.item(group)
        now = self.groups.state.item(group)
        if closed and acked == live:
            then = ACKED
        elif now == SPLIT or acked:
            then = SPLIT
        elif closed and self._ready.item(group) == live:
            then = READY
        else:
            then = LEASED if now == LEASED else PENDING
        if then != now:
            self.groups.move(groups, then, front)

    def retest(self, slots: Array) -> None:
        """Tags of these rows changed."""
        self.rows.retest(slots)
        groups = unique(self._groups(slots))
        if len(groups):
            self.groups.retest(groups)

    def reset(self, live: Array) -> Array:
        """Every acked one of these rows becomes ready again. Returns the rows."""
        again: Array = live[self.rows.state[live] == ACKED]
        groups = unique(self._groups(live))
        self._acked[groups] = 0
        done = groups[np.isin(self.groups.state[groups], (SPLIT, ACKED))]
        self.groups.move(done, PENDING)
        if len(again):
            self.make_ready(again, front=False)
        if len(groups):
            self.settle(groups)
        return again

    def _groups(self, slots: Array) -> Array:
        groups: Array = self._group_of[slots]
        if len(groups) == 1:
            return groups if groups.item() >= 0 else groups[:0]
        grouped: Array = groups[groups >= 0]
        return grouped

    def _bump(self, column: Array, slots: Array, by: int) -> None:
        if len(slots) == 1:
            group = self._group_of.item(slots.item())
            if group >= 0:
                column[group] += by
            return
        groups = self._groups(slots)
        if len(groups):
            bump(column, groups, by)

    def _test_groups(self, where: Filter, groups: Array) -> Array:
        """Per group: does the filter hold for all its rows."""
        counts, slots = self._all_groups.members.gather(groups)
        if not len(slots):
            return np.zeros(len(groups), np.bool_)
        holds = self._test(where, slots)
        starts = np.cumsum(counts) - counts
        every: Array = np.logical_and.reduceat(holds, np.minimum(starts, len(slots) - 1))
        every &= counts > 0
        return every
