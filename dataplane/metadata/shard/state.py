"""The tables of one store and what keeps them in step: rows, groups, fields, tags, stages, leases.

Every operation of the store changes the tables through the methods here, so that readiness, group
states and counts follow each change at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from dataplane.errors import LimitExceeded, StageUndefined
from dataplane.memory.extents import every
from dataplane.metadata.shard.leases import Lease, Leases
from dataplane.metadata.shard.lost_names import LostNames
from dataplane.metadata.shard.permits import Permits
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.tables.columns import Array, Ids, capacity_for, grow, unique
from dataplane.metadata.tables.fields import Fields
from dataplane.metadata.tables.groups import Groups
from dataplane.metadata.tables.key_index import KeyIndex
from dataplane.metadata.tables.names import format_minted, given_names
from dataplane.metadata.tables.tags import Tags
from dataplane.metadata.tables.tombstones import Tombstones, of_groups
from dataplane.metadata.tables.where import Filter, test
from dataplane.wire.limits import MAX_NAME_BYTES, MAX_STAGES
from dataplane.wire.tables import Definition, Name

UNGROUPED, NO_ROW = -1, -2
_USUAL_GROUP = 4


class State:
    """One partition. `definition`: with stages that were declared later. `group` is UNGROUPED or
    NO_ROW where it is no group's id."""

    def __init__(
        self, partition: str, definition: Definition, lease_numbers: Iterator[int]
    ) -> None:
        self.partition = partition
        self.definition = definition
        self.lease_numbers = lease_numbers
        self.index = KeyIndex()
        self.names: dict[int, Name] = {}
        self.group: Array = np.zeros(0, np.int32)
        self.incarnation: Array = np.zeros(0, np.uint32)
        self.fields = Fields()
        self.tags = Tags()
        self.groups = Groups(definition.group_size or _USUAL_GROUP)
        self.stages: dict[str, Stage] = {}
        self.leases = Leases()
        self.permits = Permits()
        self.tombstones = Tombstones()
        self.sealed = False
        self.short_groups = 0
        """that the seal dropped, because they had fewer rows than groups have"""
        self.closed_groups = 0
        self.losses = LostNames()
        self._capacity = 0
        self._ids = Ids()
        self._reserve_rows()
        for name, fields in definition.stages.items():
            self.check_stage_room(name, fields)
            self.add_stage(name, fields)

    @property
    def nbytes(self) -> int:
        tables = (self.index, self.fields, self.tags, self.groups, self.tombstones, self._ids)
        stages = sum(stage.nbytes for stage in self.stages.values()) + self.permits.nbytes
        return sum(t.nbytes for t in tables) + stages + self.group.nbytes + self.incarnation.nbytes

    @property
    def used_bytes(self) -> int:
        """Of `nbytes` what the rows take that are here; the rest waits for new ones, or is what is
        remembered of others."""
        return (self.nbytes - self.tombstones.nbytes) * len(self.index) // self._capacity

    def name(self, slot: int) -> Name:
        """A row's key as users see it."""
        given = self.names.get(slot)
        return format_minted(self.index.keys[slot].tobytes()) if given is None else given

    def stage(self, name: str) -> Stage:
        try:
            return self.stages[name]
        except KeyError:
            raise StageUndefined(
                f"partition {self.partition!r} has no stage {name!r}; it has "
                f"{sorted(self.stages)}. Declare it in partition(stages=) or by claim(fields=)",
                stage=name,
            ) from None

    def check_stage_room(self, name: str, fields: Sequence[str]) -> None:
        """LimitExceeded unless there may be this stage too."""
        if len(self.stages) >= MAX_STAGES or not 0 < len(name) <= MAX_NAME_BYTES:
            raise LimitExceeded(
                f"a partition has at most {MAX_STAGES} stages, with names of 1 to "
                f"{MAX_NAME_BYTES} characters",
                limit=MAX_STAGES,
            )
        self.fields.check_room(fields)

    def add_stage(self, name: str, fields: list[str]) -> None:
        stages = {**self.definition.stages, name: fields}
        self.definition = msgspec.structs.replace(self.definition, stages=stages)
        stage = Stage(name, fields, self.fields.mask(fields), self.groups, self.group, self._test)
        self.stages[name] = stage
        self.permits.look_again()
        live = self.live()
        stage.rows.add(len(live))
        stage.groups.add(len(self.groups))
        if len(live):
            stage.complete(live, self.fields.present[live])
            groups = self.groups_of(live)
            if len(groups):
                stage.settle(groups)

    def live(self) -> Array:
        """The slots of all rows."""
        slots: Array = (self.group[: self._ids.top] != NO_ROW).nonzero()[0]
        return slots

    def matching(self, where: Filter) -> Array:
        """The slots of all rows for which a filter holds."""
        live = self.live()
        return live[self._test(where, live)]

    def groups_of(self, slots: Array) -> Array:
        """The different groups of these rows, in the order in which they occur."""
        if (only := self._only_group(self.group[slots])) is not None:
            return only
        groups = self.group[slots].astype(np.int64)
        groups = groups[groups >= 0]
        if len(groups) < 2:
            return groups
        different, first = np.unique(groups, return_index=True)
        return different[np.argsort(first)]

    @staticmethod
    def _only_group(groups: Array) -> Array | None:
        """The group of all these rows, where it is one, as most often."""
        if len(groups) and groups.item(0) >= 0 and every(groups == groups.item(0)):
            return np.array([groups.item(0)])
        return None

    def add_groups(self, keys: Array, names: list[Name] | None, expected: int) -> Array:
        """New groups; returns their ids."""
        capacity = self.groups.capacity
        groups = self.groups.add(keys, names, expected)
        for stage in self.stages.values():
            if self.groups.capacity != capacity:
                stage.reserve_groups(self.groups.capacity)
            stage.groups.add(len(groups))
        if self.permits.counts:
            self.permits.opened(groups, self.groups.capacity)
        return groups

    def add_rows(self, keys: Array, names: list[Name] | None, groups: Array | None) -> Array:
        """New rows, each in the group `groups` says (-1: none). Returns their slots."""
        slots = self._ids.take(len(keys))
        if self._ids.top > self._capacity:
            self._reserve_rows()
        self.index.insert(keys, slots)
        if names is not None:
            self.names.update(given_names(slots.tolist(), names))
        self.group[slots] = UNGROUPED if groups is None else groups
        for stage in self.stages.values():
            stage.rows.add(len(slots))
        if groups is not None:
            self._join(slots, groups)
        return slots

    def written(self, slots: Array, groups: Array) -> int:
        """Rows were written, in these groups (all different): returns the groups that closed."""
        present = self.fields.present[slots]
        for stage in self.stages.values():
            stage.complete(slots, present)
        if not len(groups):
            return 0
        full = self.groups.full(groups)
        if len(full):
            self.groups.close(full)
        for stage in self.stages.values():
            stage.settle(groups)
        return self._count_closed(full)

    def close_groups(self, groups: Array) -> int:
        """Groups close at the size they have. Returns how many of them count as made."""
        self.groups.close(groups)
        for stage in self.stages.values():
            stage.settle(groups)
        return self._count_closed(groups)

    def retag(self, slots: Array) -> None:
        """The tags of rows changed."""
        for stage in self.stages.values():
            stage.retest(slots)

    def free_acked(self, slots: Array) -> None:
        """Under free="acked", free those of these rows that every declared stage has acked."""
        if self.definition.free != "acked" or not self.definition.stages:
            return
        for name in self.definition.stages:
            done = self.stages[name].acked(slots)
            if not every(done):
                slots = slots[done]
        self.remove_rows(slots, freed=True)

    def remove_rows(self, slots: Array, dropped: bool = False, freed: bool = False) -> int:
        """Rows (all different) are no more. Dropped ones are remembered, and given names of freed
        ones. Returns their bytes."""
        if not len(slots):
            return 0
        nbytes = self.fields.remove(slots)
        self.tags.clear(slots)
        for stage in self.stages.values():
            stage.forget(slots)
        if dropped:
            self.tombstones.add(self.index.keys[slots])
        elif freed and self.names:
            given = [slot for slot in slots.tolist() if slot in self.names]
            if given:
                self.tombstones.add(self.index.keys[given], freed=True)
        groups = self.group[slots].astype(np.int64)
        self.index.remove(slots)
        if self.names:
            for slot in slots.tolist():
                self.names.pop(slot, None)
        self.group[slots] = NO_ROW
        self.incarnation[slots] += np.uint32(1)
        self._ids.give_back(slots)
        grouped = groups >= 0
        if np.count_nonzero(grouped):
            self._leave(slots[grouped], groups[grouped], dropped, freed)
        return nbytes

    def remove_groups(self, groups: Array, ended: bool = False) -> None:
        """Groups without rows are no more. ended: those of which not every row was dropped are
        finished."""
        if self.permits.counts:
            self.permits.removed(groups, ended & ~self.groups.all_dropped(groups))
        for stage in self.stages.values():
            stage.forget_groups(groups)
        self.groups.remove(groups)

    def come_back(self, lease: Lease, positions: Array) -> int:
        """Rows of a lease are ready again, before all others. Returns how many there still are."""
        slots = self.held(lease, positions)
        if len(slots):
            lease.stage.make_ready(slots, front=True)
            groups = self.groups_of(slots)
            if len(groups):
                lease.stage.settle(groups, front=True)
        return len(slots)

    def held(self, lease: Lease, positions: Array) -> Array:
        """The slots at these positions of a lease, without rows that are gone."""
        slots = lease.slots[positions]
        there = self.incarnation[slots] == lease.incarnations[positions]
        result: Array = slots if every(there) else slots[there]
        return result

    def _test(self, where: Filter, slots: Array) -> Array:
        return test(where, self.tags, slots)

    def _reserve_rows(self) -> None:
        known = self._capacity
        self._capacity = capacity_for(known, max(self._ids.top, 1))
        self.index.reserve(self._capacity)
        self.fields.reserve(self._capacity)
        self.tags.reserve(self._capacity)
        grow(self.group, self._capacity)
        self.group[known:] = NO_ROW
        grow(self.incarnation, self._capacity)
        for stage in self.stages.values():
            stage.reserve_rows(self._capacity)

    def _join(self, slots: Array, groups: Array) -> None:
        if (only := self._only_group(groups)) is not None:
            self.groups.add_members(only, np.array([len(slots)], np.int32), slots)
            return
        grouped = (groups >= 0).nonzero()[0]
        if not len(grouped):
            return
        slots, groups = slots[grouped], groups[grouped]
        order = np.argsort(groups, kind="stable")
        slots, groups = slots[order], groups[order]
        groups, counts = np.unique(groups, return_counts=True)
        self.groups.add_members(groups, counts, slots)

    def _leave(self, slots: Array, groups: Array, dropped: bool, freed: bool) -> None:
        self.groups.remove_members(groups, slots, dropped)
        groups = unique(groups)
        if dropped:
            closed = groups[self.groups.closed(groups)]
            emptied = closed[self.groups.members.counts[closed] == 0]
            self.closed_groups -= int(self.groups.all_dropped(emptied).sum())
        spent = self.groups.spent(groups)
        if len(spent):
            if freed or dropped:
                self._remember_groups(spent)
            self.remove_groups(spent, ended=freed or dropped)
        if len(spent) < len(groups):
            left = np.setdiff1d(groups, spent) if len(spent) else groups
            for stage in self.stages.values():
                stage.settle(left)
                stage.groups.retest(left)

    def _remember_groups(self, groups: Array) -> None:
        """Groups with given names that go after some of their rows were freed."""
        if self.groups.names:
            some = groups[~self.groups.all_dropped(groups)].tolist()
            given = [group for group in some if group in self.groups.names]
            if given:
                self.tombstones.add(of_groups(self.groups.index.keys[given]), freed=True)

    def _count_closed(self, groups: Array) -> int:
        """Groups that have just closed: count those that were not cancelled, forget empty ones."""
        if not len(groups):
            return 0
        made = int(len(groups) - self.groups.all_dropped(groups).sum())
        self.closed_groups += made
        spent = self.groups.spent(groups)
        if len(spent):
            self.remove_groups(spent, ended=True)
        return made
