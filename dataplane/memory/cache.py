"""Copies of other hosts' ranges, cached while there is space. They are neither replicas nor the
original.

Runs in the peer. A copy is a local range of the pull class to which the cache holds one
reference; readers pin it like any other range. Unpinned copies are evicted, least recently used
first. A copy whose owner has freed the range is dropped when the peer learns that. Except for
the sum `evictable_bytes`, operations on some copies cost nothing for the others: a host may have
millions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice, repeat

import numpy as np
import numpy.typing as npt

from dataplane.memory.extents import Mask, Records, each_once, every
from dataplane.memory.ranges import Ranges
from dataplane.wire.records import RANGE, U8

Slots = npt.NDArray[np.intp]

_FIRST_ROWS = 1024
_LOOK = 4096
"""Copies that an eviction looks at together."""


class PulledCopies:
    """Columns by slot: local range, bytes, owner. The remote range's id leads to it, per owner."""

    def __init__(self, ranges: Ranges, release: Callable[[Records], int]) -> None:
        self.cached_bytes = 0
        self._ranges = ranges
        self._release = release
        self._slots: dict[int, dict[int, int]] = {}  # incarnation -> range -> slot
        self._recency = Recency()
        self._local = np.zeros(_FIRST_ROWS, RANGE)  # generation 0: the slot is unused
        self._id = np.zeros(_FIRST_ROWS, np.intp)  # of the local range: to count by, it is quicker
        self._remote = np.zeros(_FIRST_ROWS, RANGE)
        self._owner = np.zeros(_FIRST_ROWS, U8)
        self._nbytes = np.zeros(_FIRST_ROWS, np.int64)  # 0: the slot is unused
        self._spare: list[int] = list(range(_FIRST_ROWS - 1, -1, -1))

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    def __repr__(self) -> str:
        return f"<PulledCopies {len(self)} ranges, {self.cached_bytes} B>"

    def lookup(self, incarnation: int, remote: Records) -> Records:
        """The local RANGE of each remote one, generation 0 if there is no copy.

        Pin what is found before anything else can evict it.
        """
        found = np.zeros(len(remote), RANGE)
        known = self._slots.get(incarnation)
        if known:
            at, slots = self._same(known, remote)
            if len(at):
                found[at] = self._local[slots]
                self._recency.use(each_once(slots))
        return found

    def insert(self, incarnation: int, remote: Records, local: Records) -> None:
        """Add copies. The one reference of each local range becomes the cache's.

        An existing copy stays, and the reference of the new one is released, unless the new one
        has a later generation.
        """
        known = self._slots.setdefault(incarnation, {})
        if len(remote) > 1 and len(each_once(remote["range"])) < len(remote):
            remote, local = self._first_of_each(remote, local)
        at, slots = self._kept(known, remote)
        if len(at):
            older = self._older(slots, remote[at])
            if not every(older):
                stays = at[~older]
                self._release(local[stays])
                remote, local = np.delete(remote, stays), np.delete(local, stays)
            self._clear(slots[older])  # their names lead to the newcomers from here on
        slots = self._take_slots(len(remote))
        known.update(zip(remote["range"].tolist(), slots.tolist(), strict=True))
        nbytes = self._ranges.extents(local)["length"].astype(np.int64)
        self._local[slots] = local
        self._id[slots] = local["range"]
        self._remote[slots] = remote
        self._owner[slots] = incarnation
        self._nbytes[slots] = nbytes
        self._recency.use(slots)
        self.cached_bytes += int(nbytes.sum())

    def evict(self, nbytes: int) -> int:
        """Evict at least `nbytes` of unpinned copies, if there are that many. Return the freed
        bytes. A copy found pinned counts as used now."""
        freed, pinned = 0, []
        while freed < nbytes and len(oldest := self._recency.take(_LOOK)):
            unread = self._unread(oldest)
            given = np.cumsum(np.where(unread, self._nbytes[oldest], 0))
            enough = int(np.searchsorted(given, nbytes - freed)) + 1
            self._recency.put_back(oldest[enough:])
            oldest, unread = oldest[:enough], unread[:enough]
            pinned.append(oldest[~unread])
            freed += self._drop(oldest[unread])
        for slots in pinned:
            self._recency.use(slots)
        return freed

    @property
    def evictable_bytes(self) -> int:
        """The bytes that `evict` could free now."""
        if not self.cached_bytes:
            return 0
        return int(self._nbytes.sum(where=self._unread(slice(None))))

    def drop_owner(self, incarnation: int) -> int:
        """Drop all copies of a peer that is gone. Return the bytes freed at once; pinned copies
        are freed with their pins."""
        known = self._slots.get(incarnation)
        freed = self._drop(np.array(list(known.values()), np.intp)) if known else 0
        self._slots.pop(incarnation, None)
        return freed

    def some_of(self, incarnation: int, most: int) -> Records:
        """The RANGE, at their owner, of up to this many copies of a peer: the next ones at each
        call, so that all are visited."""
        known = self._slots.get(incarnation, {})
        ranges = list(islice(known, most))
        slots = [known.pop(number) for number in ranges]
        known.update(zip(ranges, slots, strict=True))
        return self._remote[np.array(slots, np.intp)]

    def drop(self, incarnation: int, remote: Records) -> int:
        """Drop the copies of these ranges of a peer. Return the bytes freed at once."""
        return self._drop(self._same(self._slots.get(incarnation, {}), remote)[1])

    def drop_dead(self, incarnation: int, alive: Callable[[Records], Mask]) -> int:
        """Drop the copies of ranges that a peer has freed. Return the bytes freed at once."""
        slots = np.flatnonzero((self._local["generation"] != 0) & (self._owner == incarnation))
        return self._drop(slots[~alive(self._remote[slots])]) if len(slots) else 0

    def _first_of_each(self, remote: Records, local: Records) -> tuple[Records, Records]:
        """The others' references are released."""
        _, first = np.unique(remote["range"], return_index=True)
        self._release(np.delete(local, first))
        return remote[first], local[first]

    def _kept(self, known: dict[int, int], remote: Records) -> tuple[Slots, Slots]:
        """Which of these ranges have a copy, of whatever generation, and its slot."""
        slots = map(known.get, remote["range"].tolist(), repeat(-1))
        of = np.fromiter(slots, np.intp, len(remote))
        at = (of >= 0).nonzero()[0]
        return at, of[at]

    def _same(self, known: dict[int, int], remote: Records) -> tuple[Slots, Slots]:
        """As `_kept`, of this generation."""
        at, slots = self._kept(known, remote)
        if not len(at):
            return at, slots
        same = self._remote[slots]["generation"] == remote["generation"][at]
        return at[same], slots[same]

    def _older(self, slots: Slots, remote: Records) -> Mask:
        """Per slot, whether its copy is of an earlier generation: dead at its owner."""
        ahead = remote["generation"] - self._remote[slots]["generation"]
        older: Mask = ahead.view(np.int32) > 0  # generations begin again after 2**32
        return older

    def _drop(self, slots: Slots) -> int:
        of, keys = self._owner[slots], self._remote[slots]["range"]
        while len(of):  # one owner after another, each without a loop in Python
            its = of == of[0]
            deque(map(self._slots[int(of[0])].__delitem__, keys[its].tolist()), maxlen=0)
            of, keys = of[~its], keys[~its]
        return self._clear(slots)

    def _clear(self, slots: Slots) -> int:
        """But for the names that lead to them."""
        if not len(slots):
            return 0
        local = self._local[slots]
        self._local[slots] = 0
        self._id[slots] = 0
        self._recency.forget(slots)
        self.cached_bytes -= int(self._nbytes[slots].sum())
        self._nbytes[slots] = 0
        self._spare.extend(slots.tolist())
        return self._release(local)

    def _unread(self, slots: Slots | slice) -> Mask:
        """Per slot that is in use, whether the cache has the only reference to its copy."""
        # The cache's own references keep these alive: nobody need compare generations.
        alone: Mask = self._ranges.counts_of(self._id[slots]) == 1
        return alone

    def _take_slots(self, count: int) -> Slots:
        have = len(self._local)
        if count > len(self._spare):
            more = max(have, count)
            self._local = np.concatenate((self._local, np.zeros(more, RANGE)))
            self._id = np.concatenate((self._id, np.zeros(more, np.intp)))
            self._remote = np.concatenate((self._remote, np.zeros(more, RANGE)))
            self._owner = np.concatenate((self._owner, np.zeros(more, U8)))
            self._nbytes = np.concatenate((self._nbytes, np.zeros(more, np.int64)))
            self._spare.extend(range(have + more - 1, have - 1, -1))
        slots = np.array(self._spare[len(self._spare) - count :], np.intp)
        del self._spare[len(self._spare) - count :]
        return slots


class Recency:
    """Slots in the order of their last use. Slots that were never used or were forgotten are not in
    it.

    A use appends an entry, and an outdated entry is skipped later, so neither a use nor taking
    the oldest scans the others.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._used_at = np.zeros(_FIRST_ROWS, np.int64)  # by slot; 0: not in line
        self._line = np.zeros(_FIRST_ROWS, np.intp)
        self._ticks = np.zeros(_FIRST_ROWS, np.int64)
        self._head = self._tail = 0

    def use(self, slots: Slots) -> None:
        """Mark these distinct slots as used now."""
        count = len(slots)
        if not count:
            return
        self._make_room(int(slots.max()) + 1, count)
        self._clock += 1
        self._used_at[slots] = self._clock
        end = self._tail + count
        self._line[self._tail : end] = slots
        self._ticks[self._tail : end] = self._clock
        self._tail = end

    def forget(self, slots: Slots) -> None:
        """Remove slots from the order."""
        self._used_at[slots] = 0

    def take(self, most: int) -> Slots:
        """Remove and return up to this many least recently used slots. Some may be left if fewer
        are returned, unless none is."""
        while self._head < self._tail:
            end = min(self._head + most, self._tail)
            entries = self._line[self._head : end]
            slots: Slots = entries[self._used_at[entries] == self._ticks[self._head : end]]
            self._head = end
            if len(slots):
                return slots
        return np.zeros(0, np.intp)

    def put_back(self, slots: Slots) -> None:
        """Put back the last of the slots just taken. They stay the oldest, in their order."""
        start = self._head - len(slots)
        self._line[start : self._head] = slots
        self._ticks[start : self._head] = self._used_at[slots]
        self._head = start

    def _make_room(self, slots: int, more: int) -> None:
        if slots > len(self._used_at):
            longer = max(slots, 2 * len(self._used_at)) - len(self._used_at)
            self._used_at = np.concatenate((self._used_at, np.zeros(longer, np.int64)))
        if self._tail + more > len(self._line):
            self._move_up(more)

    def _move_up(self, more: int) -> None:
        """Leaves out what was overtaken. The line is at most half full then, so that this costs
        each use a constant share."""
        line, ticks = self._line[self._head : self._tail], self._ticks[self._head : self._tail]
        last = self._used_at[line] == ticks
        line, ticks = line[last], ticks[last]
        rows = max(2 * (len(line) + more), _FIRST_ROWS)
        self._line, self._ticks = np.zeros(rows, np.intp), np.zeros(rows, np.int64)
        self._line[: len(line)], self._ticks[: len(line)] = line, ticks
        self._head, self._tail = 0, len(line)
