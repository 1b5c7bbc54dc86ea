"""Copies of other hosts' ranges, kept while there is room: never a replica, never the truth.

Runs in the peer. A copy is a local range of the pull class that the cache holds one reference to;
readers pin it like any other range. Unpinned copies are evicted, least recently used first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import repeat

import numpy as np
import numpy.typing as npt

from dataplane.memory.extents import Mask, Records, every
from dataplane.memory.ranges import Ranges
from dataplane.wire.records import RANGE, U8

_FIRST_ROWS = 256


class PulledCopies:
    """Columns by slot: local range, bytes, last use, owner. Keys lead to slots per owner."""

    def __init__(self, ranges: Ranges, release: Callable[[Records], int]) -> None:
        self.cached_bytes = 0
        self._ranges = ranges
        self._release = release
        self._slots: dict[int, dict[int, int]] = {}  # incarnation -> (generation, range) -> slot
        self._clock = 0
        self._local = np.zeros(_FIRST_ROWS, RANGE)  # generation 0: the slot is unused
        self._id = np.zeros(_FIRST_ROWS, np.intp)  # of the local range: to count by, it is quicker
        self._remote = np.zeros(_FIRST_ROWS, U8)
        self._owner = np.zeros(_FIRST_ROWS, U8)
        self._nbytes = np.zeros(_FIRST_ROWS, np.int64)
        self._used_at = np.zeros(_FIRST_ROWS, np.int64)
        self._spare: list[int] = list(range(_FIRST_ROWS - 1, -1, -1))

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    def __repr__(self) -> str:
        return f"<PulledCopies {len(self)} ranges, {self.cached_bytes} B>"

    def lookup(self, incarnation: int, remote: Records) -> Records:
        """The local RANGE of each remote one, generation 0 where there is no copy.

        Pin what is found before anything else can evict it.
        """
        found = np.zeros(len(remote), RANGE)
        known = self._slots.get(incarnation)
        if known:
            slots = _slots_of(known, remote)
            hit = slots >= 0
            found[hit] = self._local[slots[hit]]
            self._used_at[slots[hit]] = self._tick()
        return found

    def insert(self, incarnation: int, remote: Records, local: Records) -> None:
        """Keep these copies; the one reference that each local range has becomes the cache's.

        A copy that is here already stays, and the newcomer's reference is released.
        """
        known = self._slots.setdefault(incarnation, {})
        keys = _keys(remote)
        slots = self._take_slots(len(keys))
        kept = map(known.setdefault, keys.tolist(), slots.tolist())
        fresh = np.fromiter(kept, np.intp, len(keys)) == slots
        if not every(fresh):
            self._spare.extend(slots[~fresh].tolist())
            self._release(local[~fresh])
            keys, local, slots = keys[fresh], local[fresh], slots[fresh]
        if not len(keys):
            return
        nbytes = self._ranges.extents(local)["length"].astype(np.int64)
        self._local[slots] = local
        self._id[slots] = local["range"]
        self._remote[slots] = keys
        self._owner[slots] = incarnation
        self._nbytes[slots] = nbytes
        self._used_at[slots] = self._tick()
        self.cached_bytes += int(nbytes.sum())

    def evict(self, nbytes: int) -> int:
        """Let go of at least `nbytes` of copies that nobody pins, as far as there are: the bytes
        that became free."""
        kept = np.flatnonzero(self._unread())
        kept = kept[np.argsort(self._used_at[kept], kind="stable")]
        enough = int(np.searchsorted(np.cumsum(self._nbytes[kept]), nbytes)) + 1
        return self._drop(kept[:enough])

    @property
    def evictable_bytes(self) -> int:
        """What `evict` could free now."""
        if not self.cached_bytes:
            return 0
        return int(self._nbytes @ self._unread())

    def drop_owner(self, incarnation: int) -> int:
        """Let go of all copies of a peer that is gone. The bytes that became free at once; pinned
        copies go with their pins."""
        known = self._slots.get(incarnation)
        freed = self._drop(np.array(list(known.values()), np.intp)) if known else 0
        self._slots.pop(incarnation, None)
        return freed

    def drop_dead(self, incarnation: int, alive: Callable[[Records], Mask]) -> int:
        """Let go of the copies of ranges of a peer that are not alive any more there. The bytes
        that became free at once."""
        slots = np.flatnonzero((self._local["generation"] != 0) & (self._owner == incarnation))
        remote = self._remote[slots].view(RANGE)
        return self._drop(slots[~alive(remote)]) if len(slots) else 0

    def _drop(self, slots: npt.NDArray[np.intp]) -> int:
        if not len(slots):
            return 0
        of, keys = self._owner[slots], self._remote[slots]
        while len(of):  # one owner after another, each without a loop in Python
            its = of == of[0]
            deque(map(self._slots[int(of[0])].__delitem__, keys[its].tolist()), maxlen=0)
            of, keys = of[~its], keys[~its]
        local = self._local[slots]
        self._local[slots] = 0
        self._id[slots] = 0
        self.cached_bytes -= int(self._nbytes[slots].sum())
        self._spare.extend(slots.tolist())
        return self._release(local)

    def _unread(self) -> Mask:
        """Per slot, whether it has a copy to which the cache has the only reference."""
        # The cache's own references keep these alive: nobody need compare generations.
        alone = self._ranges.counts_of(self._id) == 1
        mask: Mask = alone & (self._local["generation"] != 0)
        return mask

    def _take_slots(self, count: int) -> npt.NDArray[np.intp]:
        have = len(self._local)
        if count > len(self._spare):
            more = max(have, count)
            self._local = np.concatenate((self._local, np.zeros(more, RANGE)))
            self._id = np.concatenate((self._id, np.zeros(more, np.intp)))
            self._remote = np.concatenate((self._remote, np.zeros(more, U8)))
            self._owner = np.concatenate((self._owner, np.zeros(more, U8)))
            self._nbytes = np.concatenate((self._nbytes, np.zeros(more, np.int64)))
            self._used_at = np.concatenate((self._used_at, np.zeros(more, np.int64)))
            self._spare.extend(range(have + more - 1, have - 1, -1))
        slots = np.array(self._spare[len(self._spare) - count :], np.intp)
        del self._spare[len(self._spare) - count :]
        return slots

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _keys(ranges: Records) -> npt.NDArray[np.uint64]:
    """Range and generation as one number."""
    keys: npt.NDArray[np.uint64] = np.ascontiguousarray(ranges).view(U8)
    return keys


def _slots_of(known: dict[int, int], remote: Records) -> npt.NDArray[np.intp]:
    return np.fromiter(map(known.get, _keys(remote).tolist(), repeat(-1)), np.intp, len(remote))
