"""One lane of ready units: the queue from which claims of one form are met, oldest first.

A lane holds entries (id << 32 | sequence number). An entry counts while its unit is ready under
that very number; others are stale, are passed over when met and purged when the buffer is rebuilt,
so that a lane which nobody claims from stays as small as what is ready. A lane with a filter also
knows which units match now, so that its count is exact.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dataplane.metadata.tables.columns import Array, grow

OUTSIDE, INSIDE, HIDDEN = 0, 1, 2
"""Whether a unit has an entry in a filtered lane: no, yes, or yes though it does not match now."""

_SMALLEST = 64
_LOW = np.uint64(0xFFFF_FFFF)
_HIGH = np.uint64(32)


def entries_of(ids: Array, numbers: Array) -> Array:
    return ids.astype(np.uint64) << _HIGH | numbers


def ids_of(entries: Array) -> Array:
    return (entries >> _HIGH).astype(np.int64)


class Lane:
    """A queue of entries. `current(ids, numbers)` says which are still ready under these numbers,
    `matches(ids)` which pass the filter; it is None for the plain lane."""

    def __init__(
        self,
        current: Callable[[Array, Array], Array],
        matches: Callable[[Array], Array] | None = None,
        capacity: int = 0,
    ) -> None:
        self._current = current
        self._matches = matches
        self._buffer: Array = np.zeros(_SMALLEST, np.uint64)
        self._head = self._tail = _SMALLEST // 2
        self._inside: Array = np.zeros(capacity if matches else 0, np.uint8)
        self.passed_over = 0
        """how often its first unit stayed when others were taken that lay nearer"""
        self.count = 0  # exact for a filtered lane; the plain lane's is the number of ready units

    def __len__(self) -> int:
        return self._tail - self._head

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes + self._inside.nbytes

    @property
    def filtered(self) -> bool:
        return self._matches is not None

    def holds(self, ids: Array) -> Array:
        """Per ready unit: does it match."""
        if not self.filtered:
            return np.ones(len(ids), np.bool_)
        result: Array = self._inside[ids] == INSIDE
        return result

    def reserve(self, capacity: int) -> None:
        if self.filtered:
            grow(self._inside, capacity)

    def enter(self, ids: Array, entries: Array, front: bool) -> None:
        """Units became ready, under new numbers."""
        if self._matches is not None:
            match = self._matches(ids)
            self._inside[ids] = match
            entries = entries[match]
            self.count += len(entries)
        if len(entries):
            self._push(entries, front)

    def leave(self, ids: Array) -> None:
        """Units that were ready no longer are. For filtered lanes only."""
        self.count -= int(np.count_nonzero(self._inside[ids] == INSIDE))
        self._inside[ids] = OUTSIDE

    def retest(self, ids: Array, entries: Array) -> None:
        """Tags of ready units changed. For filtered lanes only.

        A unit that has an entry keeps its place; one that matches for the first time comes last.
        """
        assert self._matches is not None
        match = self._matches(ids)
        was = self._inside[ids]
        self.count += int(np.count_nonzero(match)) - int(np.count_nonzero(was == INSIDE))
        now = np.where(match, INSIDE, np.where(was == OUTSIDE, OUTSIDE, HIDDEN)).astype(np.uint8)
        self._inside[ids] = now
        new = match & (was == OUTSIDE)
        if new.any():
            self._push(entries[new], front=False)

    def first(self, count: int) -> tuple[Array, Array]:
        """(ids, positions) of the first `count` units, fewer when there are not so many."""
        if count == 1 and not self.filtered:
            return self._first_one()
        found: list[Array] = []
        have, at = 0, self._head
        while have < count and at < self._tail:
            end = min(self._tail, at + max(count - have, _SMALLEST))
            good = self._valid(self._buffer[at:end]).nonzero()[0] + at
            if not have:
                self._pass_over(int(good[0]) if len(good) else end)
            found.append(good)
            have += len(good)
            at = end
        if not found:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        positions = (found[0] if len(found) == 1 else np.concatenate(found))[:count]
        return ids_of(self._buffer[positions]), positions

    def consume(self, last: int) -> None:
        """The units up to the one at position `last` were taken."""
        self._pass_over(last + 1)

    def _first_one(self) -> tuple[Array, Array]:
        while self._head < self._tail:
            entry = self._buffer[self._head : self._head + 1]
            ids = ids_of(entry)
            if self._current(ids, (entry & _LOW).astype(np.uint32))[0]:
                return ids, np.array([self._head])
            self._head += 1
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    def _valid(self, entries: Array) -> Array:
        ids = ids_of(entries)
        good = self._current(ids, (entries & _LOW).astype(np.uint32))
        if self.filtered:
            good &= self._inside[ids] == INSIDE
        return good

    def _pass_over(self, end: int) -> None:
        if self.filtered and end > self._head:
            # a hidden unit whose entry goes has none any more
            entries = self._buffer[self._head : end]
            ids = ids_of(entries)
            current = self._current(ids, (entries & _LOW).astype(np.uint32))
            gone = ids[current & (self._inside[ids] == HIDDEN)]
            self._inside[gone] = OUTSIDE
        self._head = max(self._head, end)

    def _push(self, entries: Array, front: bool) -> None:
        count = len(entries)
        if self._head == self._tail:
            self._head = self._tail = len(self._buffer) // 2
        if front:
            if self._head < count:
                self._rebuild(count)
            self._head -= count
            self._buffer[self._head : self._head + count] = entries
        else:
            if self._tail + count > len(self._buffer):
                self._rebuild(count)
            self._buffer[self._tail : self._tail + count] = entries
            self._tail += count

    def _rebuild(self, room: int) -> None:
        """A new buffer without stale entries, with room at both ends.

        Its room is as large as what stays, so the cost is O(1) an entry over time.
        """
        live = self._buffer[self._head : self._tail]
        current = self._current(ids_of(live), (live & _LOW).astype(np.uint32))
        live = live[current]
        margin = max(_SMALLEST // 2, room, len(live) // 2)
        self._buffer = np.zeros(len(live) + 2 * margin, np.uint64)
        self._head, self._tail = margin, margin + len(live)
        self._buffer[self._head : self._tail] = live
