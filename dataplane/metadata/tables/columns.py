"""Growable columns: the storage under every table of the metadata.

A column is a numpy array that grows in place, so nothing may keep a view of one across a call that
adds rows. `Ragged` keeps a list of records per id, as the rows of a group or the leaves of a value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.memory.extents import every

Array = npt.NDArray[Any]

_SMALLEST = 64
_DOUBLES_UP_TO = 1 << 16


def capacity_for(now: int, need: int) -> int:
    """The next size of a table that holds `now` and must hold `need`.

    Doubling while small; by half when large, so that the unused part stays a third at most.
    """
    if need <= now:
        return now
    step = now * 2 if now < _DOUBLES_UP_TO else now + now // 2
    return max(_SMALLEST, step, need)


def grow(column: Array, capacity: int) -> None:
    """Make a column longer in place (realloc, which moves large blocks without copying them)."""
    if len(column) < capacity:
        column.resize((capacity, *column.shape[1:]), refcheck=False)


def bump(column: Array, ids: Array, by: int) -> None:
    """Add `by` to the entries of `ids`, where an id may occur several times."""
    if len(ids) and every(ids == ids[0]):  # as the rows of a group
        column[ids[0]] += by * len(ids)
    else:
        np.add.at(column, ids, column.dtype.type(by))


def spans(starts: Array, counts: Array) -> Array:
    """The positions starts[0], starts[0]+1, … of every span, one after the other."""
    if len(counts) == 1:
        return np.arange(starts[0], starts[0] + counts[0])
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    positions: Array = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return positions


def unique(ids: Array) -> Array:
    """The different ids, sorted. Most columns have one; `np.unique` takes 20 µs to see it."""
    if len(ids) < 2:
        return ids
    return ids[:1] if every(ids == ids[0]) else np.unique(ids)


class Ids:
    """Ids of a table's rows, given-back ones first."""

    def __init__(self) -> None:
        self._free: Array = np.zeros(0, np.int32)
        self._given_back = 0
        self.top = 0

    @property
    def nbytes(self) -> int:
        return self._free.nbytes

    def take(self, count: int) -> Array:
        """`count` ids that are not in use; the table must have room for all below `top`."""
        again = min(count, self._given_back)
        self._given_back -= again
        first, self.top = self.top, self.top + count - again
        if again == count:
            start = self._given_back
            again_first: Array = self._free[start : start + count][::-1]
            return again_first.astype(np.int64)
        new = np.arange(first, self.top)
        if not again:
            return new
        return np.concatenate([self._free[:again][::-1].astype(np.int64), new])

    def give_back(self, ids: Array) -> None:
        count = self._given_back + len(ids)
        if count > len(self._free):
            grow(self._free, capacity_for(len(self._free), count))
        self._free[self._given_back : count] = ids
        self._given_back = count


class Ragged:
    """A list of records per id, in blocks of a pool whose sizes are powers of two.

    Freed blocks are used again for lists of the same class; a list that outgrows its block moves.
    """

    def __init__(self, dtype: np.dtype[Any], capacity: int = 0, usual: int = 1) -> None:
        """usual: how long most lists become; none gets a smaller block."""
        self._least_class = max(usual - 1, 0).bit_length()
        self.pool: Array = np.zeros(0, dtype)
        self._top = 0
        self._start: Array = np.zeros(capacity, np.int64)
        self._class: Array = np.full(capacity, -1, np.int8)
        self.counts: Array = np.zeros(capacity, np.int32)
        self._free: dict[int, list[Array]] = {}

    @property
    def nbytes(self) -> int:
        columns = (self.pool, self._start, self._class, self.counts)
        return sum(column.nbytes for column in columns)

    def reserve(self, capacity: int) -> None:
        """Make room for ids below `capacity`."""
        known = len(self.counts)
        if known < capacity:
            grow(self._start, capacity)
            grow(self.counts, capacity)
            grow(self._class, capacity)
            self._class[known:] = -1

    def gather(self, ids: Array) -> tuple[Array, Array]:
        """(counts, records) of the lists of `ids`, one after the other."""
        counts = self.counts[ids]
        return counts, self.pool[spans(self._start[ids], counts)]

    def set(self, ids: Array, counts: Array, records: Array) -> None:
        """Write the lists of `ids` (all different), whatever they held."""
        self.clear(ids)
        self.append(ids, counts, records)

    def append(self, ids: Array, counts: Array, records: Array) -> None:
        """Add counts[i] records to the list of ids[i] (all different)."""
        if len(records) == 1 and len(ids) == 1:
            id_ = ids.item()
            length, size_class = self.counts.item(id_), self._class.item(id_)
            if size_class >= 0 and length < 1 << size_class:
                self.pool[self._start.item(id_) + length] = records[0]
                self.counts[id_] = length + 1
                return
        old = self.counts[ids]
        new = old + counts
        # _class -1 shifts to a room of 0
        tight = (new > (1 << (self._class[ids].astype(np.int64) + 1)) >> 1).nonzero()[0]
        if len(tight):
            self._move(ids[tight], new[tight])
        self.pool[spans(self._start[ids] + old, counts)] = records
        self.counts[ids] = new

    def clear(self, ids: Array) -> None:
        """Empty the lists of `ids` and give their blocks back."""
        self._give_back(self._start[ids], self._class[ids])
        self.counts[ids] = 0
        self._class[ids] = -1

    def keep(self, ids: Array, mask: Array) -> None:
        """Keep of the lists of `ids` (all different) the records where `mask` holds, in order."""
        counts = self.counts[ids]
        positions = spans(self._start[ids], counts)
        if len(ids) == 1:
            kept = positions[mask]
            start = self._start.item(ids.item())
            self.pool[start : start + len(kept)] = self.pool[kept]
            self.counts[ids] = len(kept)
            return
        owner = np.repeat(np.arange(len(ids)), counts)
        left = np.bincount(owner[mask], minlength=len(ids))
        self.pool[spans(self._start[ids], left)] = self.pool[positions[mask]]
        self.counts[ids] = left

    def _move(self, ids: Array, needs: Array) -> None:
        classes = np.ceil(np.log2(needs)).astype(np.int8)
        np.maximum(classes, self._least_class, out=classes)
        old_start, old_class, counts = self._start[ids], self._class[ids], self.counts[ids]
        starts = np.empty(len(ids), np.int64)
        for size_class in np.unique(classes).tolist():
            which = (classes == size_class).nonzero()[0]
            starts[which] = self._blocks(size_class, len(which))
        held = counts.nonzero()[0]
        if len(held):
            source = spans(old_start[held], counts[held])
            self.pool[spans(starts[held], counts[held])] = self.pool[source]
        self._start[ids] = starts
        self._class[ids] = classes
        self._give_back(old_start, old_class)

    def _blocks(self, size_class: int, count: int) -> Array:
        """`count` free blocks of one class: given-back ones first."""
        parts: list[Array] = []
        free = self._free.get(size_class, [])
        while free and count:
            block = free.pop()
            if len(block) > count:
                free.append(block[count:])
                block = block[:count]
            parts.append(block)
            count -= len(block)
        if count:
            size = 1 << size_class
            first = self._top
            self._top += count * size
            grow(self.pool, capacity_for(len(self.pool), self._top))
            parts.append(np.arange(first, self._top, size))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _give_back(self, starts: Array, classes: Array) -> None:
        for size_class in unique(classes).tolist():
            if size_class >= 0:
                blocks = starts[classes == size_class]
                self._free.setdefault(size_class, []).append(blocks)
