"""The groups of a store: how many rows each expects, has seen and still has, and which.

A group is open until as many rows were put as it expects (dropped and freed ones count), then
closed for good. Its record goes with its last row once it is closed.
"""

from __future__ import annotations

import numpy as np

from dataplane.metadata.tables.columns import Array, Ids, Ragged, bump, capacity_for, grow, unique
from dataplane.metadata.tables.key_index import KeyIndex
from dataplane.metadata.tables.names import format_minted, given_names
from dataplane.wire.tables import Name

FREE, OPEN, CLOSED = range(3)
UNKNOWN_SIZE = -1
UNLIMITED = 1 << 40
MAX_GROUP_ROWS = (1 << 31) - 1
"""What a group may be told to have: the columns count in 32 bits."""
_LARGE = 64


class Groups:
    """Columns by group id. `members.counts` is the number of living rows."""

    def __init__(self, usual_size: int) -> None:
        self.index = KeyIndex()
        self.names: dict[int, Name] = {}
        self.phase: Array = np.zeros(0, np.uint8)
        self.expected: Array = np.zeros(0, np.int32)
        self.seen: Array = np.zeros(0, np.int32)
        self.dropped: Array = np.zeros(0, np.int32)
        # a larger group grows to its size, so that its first row does not take the room of all
        self.members = Ragged(np.dtype(np.int32), usual=min(usual_size, _LARGE))
        self.capacity = 0
        self._ids = Ids()

    def __len__(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        columns = (self.phase, self.expected, self.seen, self.dropped)
        parts = self.index.nbytes + self.members.nbytes + self._ids.nbytes
        return parts + sum(column.nbytes for column in columns)

    def name(self, group: int) -> Name:
        """The group's id as users see it."""
        given = self.names.get(group)
        return format_minted(self.index.keys[group].tobytes()) if given is None else given

    def add(self, keys: Array, names: list[Name] | None, expected: int) -> Array:
        """New open groups; every key is different and unknown. Returns their ids."""
        groups = self._ids.take(len(keys))
        if self._ids.top > self.capacity:
            self.capacity = capacity_for(self.capacity, self._ids.top)
            self.index.reserve(self.capacity)
            self.members.reserve(self.capacity)
            for column in (self.phase, self.expected, self.seen, self.dropped):
                grow(column, self.capacity)
        self.index.insert(keys, groups)
        if names is not None:
            self.names.update(given_names(groups.tolist(), names))
        self.phase[groups] = OPEN
        self.expected[groups] = expected
        self.seen[groups] = 0
        self.dropped[groups] = 0
        return groups

    def add_members(self, groups: Array, counts: Array, slots: Array) -> None:
        """New rows: counts[i] of them in groups[i] (all different), `slots` group by group."""
        self.members.append(groups, counts, slots)
        self.seen[groups] += counts

    def remove_members(self, groups: Array, slots: Array, dropped: bool) -> None:
        """Rows go, each `slots[i]` from `groups[i]`."""
        if dropped:
            bump(self.dropped, groups, 1)
        different = unique(groups)
        if self.members.counts[different].sum() == len(slots):
            self.members.clear(different)  # all their rows go, as most often
            return
        _, members = self.members.gather(different)
        if len(slots) == 1:
            self.members.keep(different, members != slots.item())
        else:
            self.members.keep(different, ~np.isin(members, slots))

    def full(self, groups: Array) -> Array:
        """Those of these groups that are open and have seen all the rows they expect."""
        if len(groups) == 1:
            group = groups.item()
            is_open = self.phase.item(group) == OPEN
            full = is_open and self.seen.item(group) == self.expected.item(group)
            return groups if full else groups[:0]
        mask = (self.phase[groups] == OPEN) & (self.seen[groups] == self.expected[groups])
        result: Array = groups[mask]
        return result

    def live(self) -> Array:
        """All groups."""
        groups: Array = (self.phase != FREE).nonzero()[0]
        return groups

    def open(self) -> Array:
        """All open groups."""
        groups: Array = (self.phase == OPEN).nonzero()[0]
        return groups

    def closed(self, groups: Array) -> Array:
        """Per group: is it closed."""
        result: Array = self.phase[groups] == CLOSED
        return result

    def close(self, groups: Array) -> None:
        self.phase[groups] = CLOSED
        self.expected[groups] = self.seen[groups]

    def room(self, groups: Array, unknown: int) -> Array:
        """How many more rows each group takes; -1 in `groups` is a new one that takes `unknown`."""
        if len(groups) == 1:
            group = groups.item()
            return np.array([unknown if group < 0 else self._room_of(group)])
        room = np.full(len(groups), unknown, np.int64)
        known = (groups >= 0).nonzero()[0]
        ids = groups[known]
        left = self.expected[ids].astype(np.int64) - self.seen[ids]
        left = np.where(self.expected[ids] == UNKNOWN_SIZE, UNLIMITED, left)
        room[known] = np.where(self.closed(ids), 0, left)
        return room

    def _room_of(self, group: int) -> int:
        if self.phase.item(group) == CLOSED:
            return 0
        expected = self.expected.item(group)
        return UNLIMITED if expected == UNKNOWN_SIZE else expected - self.seen.item(group)

    def spent(self, groups: Array) -> Array:
        """Those of these groups whose record can go: closed, and without rows."""
        mask = (self.phase[groups] == CLOSED) & (self.members.counts[groups] == 0)
        result: Array = groups[mask]
        return result

    def all_dropped(self, groups: Array) -> Array:
        """Per group: every row it ever had was dropped. Such groups do not count as made."""
        result: Array = self.dropped[groups] == self.seen[groups]
        return result

    def remove(self, groups: Array) -> None:
        """The groups are no more."""
        self.index.remove(groups)
        self.members.clear(groups)
        self.phase[groups] = FREE
        if self.names:
            for group in groups.tolist():
                self.names.pop(group, None)
        self._ids.give_back(groups)
