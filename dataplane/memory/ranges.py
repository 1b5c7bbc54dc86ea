"""The table of ranges: which stretches hold live values, and how many references each has.

Runs in the peer. A range is named by (id, generation); ids are used again with the next
generation, so a name that outlived its range is recognised. Counts are derived from the columns
that shards, pins and the cache hold; a release for a name that is no longer alive does nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.errors import RowsGone
from dataplane.memory.extents import Bytes, Mask, Records, every
from dataplane.wire.records import EXTENT, RANGE, U4, U8

Counts = npt.NDArray[np.integer] | int
Ids = npt.NDArray[np.intp]

_FIRST_ROWS = 1024


class Freed(NamedTuple):
    """Ranges that died: where they lay, and the class that was charged for them."""

    offsets: Bytes
    lengths: Bytes
    admissions: npt.NDArray[np.uint8]


class Ranges:
    """Columns by range id."""

    def __init__(self) -> None:
        self.live = 0
        """Ranges that have references."""
        self._top = 0  # ids below were used at least once
        self._spare: list[Ids] = []  # ids to use again, as they came back
        self._offset = np.zeros(_FIRST_ROWS, U8)
        self._length = np.zeros(_FIRST_ROWS, U8)
        self._generation = np.ones(_FIRST_ROWS, U4)
        self._refs = np.zeros(_FIRST_ROWS, np.int64)
        self._admission = np.zeros(_FIRST_ROWS, np.uint8)

    def __repr__(self) -> str:
        return f"<Ranges {self.live} live of {self._top} ids>"

    def add(self, offsets: Bytes, lengths: Bytes, refs: Counts, admission: int) -> Records:
        """New ranges with at least one reference each; their RANGE records."""
        count = len(offsets)
        ids = self._take_ids(count)
        self._offset[ids] = offsets
        self._length[ids] = lengths
        self._refs[ids] = refs
        self._admission[ids] = admission
        self.live += count
        ranges = np.empty(count, RANGE)
        ranges["range"] = ids
        ranges["generation"] = self._generation[ids]
        return ranges

    def alive(self, ranges: Records) -> Mask:
        """Per record, whether that generation of that range still has references."""
        if len(ranges) == 1:
            return np.array([self._is_alive(*ranges.item())])
        ids = ranges["range"]
        known = ids < self._top
        ids = np.where(known, ids, 0)
        same: Mask = known & (self._generation[ids] == ranges["generation"]) & (self._refs[ids] > 0)
        return same

    def hold(self, ranges: Records, counts: Counts = 1) -> None:
        """More references; a range may be named several times. RowsGone changes nothing."""
        ids = self._living(ranges)
        if len(ids) == 1:
            self._refs[ids] += counts
        else:
            np.add.at(self._refs, ids, np.asarray(counts, np.int64))

    def release(self, ranges: Records, counts: Counts = 1) -> Freed:
        """Fewer references; what has none left is freed. Names of dead ranges are ignored."""
        alive = self.alive(ranges)
        ids: Ids = ranges["range"].astype(np.intp)
        if not every(alive):
            ids = ids[alive]
            counts = counts if isinstance(counts, int) else counts[alive]
        if len(ids) == 1:
            self._refs[ids] -= np.asarray(counts, np.int64)
        else:
            np.subtract.at(self._refs, ids, np.asarray(counts, np.int64))
        dead = ids[self._refs[ids] <= 0]
        if len(dead) > 1:
            dead = np.unique(dead)
        freed = Freed(self._offset[dead], self._length[dead], self._admission[dead])
        if len(dead):
            self._bury(dead)
        return freed

    def extents(self, ranges: Records) -> Records:
        """Where these ranges lie: EXTENT records, padding included. RowsGone if any is dead."""
        ids = self._living(ranges)
        column = np.empty(len(ids), EXTENT)
        column["offset"] = self._offset[ids]
        column["length"] = self._length[ids]
        return column

    def offsets(self, ranges: Records, hold: bool = False) -> Bytes:
        """Where these ranges start; hold: with one more reference each time one is named.
        RowsGone, and nothing changes, if any is dead."""
        ids = self._living(ranges)
        if hold:
            np.add.at(self._refs, ids, 1)
        return self._offset[ids]

    def refs(self, ranges: Records) -> npt.NDArray[np.int64]:
        """References of each. RowsGone if any is dead."""
        return self._refs[self._living(ranges)]

    def _is_alive(self, number: int, generation: int) -> bool:
        """For a single range: numpy's fixed cost would be most of it."""
        return (
            number < self._top
            and self._generation.item(number) == generation
            and self._refs.item(number) > 0
        )

    def _living(self, ranges: Records) -> Ids:
        alive = self.alive(ranges)
        if not every(alive):
            gone = int(len(alive) - np.count_nonzero(alive))
            raise RowsGone(
                f"the bytes of {gone} of {len(alive)} values were freed meanwhile; "
                "read or claim the rows again",
                gone=gone,
                asked=len(alive),
            )
        ids: Ids = ranges["range"].astype(np.intp)
        return ids

    def _bury(self, ids: Ids) -> None:
        self.live -= len(ids)
        self._refs[ids] = 0
        generations = self._generation[ids] + np.uint32(1)
        generations[generations == 0] = 1  # 0 says "no range" on the wire
        self._generation[ids] = generations
        self._spare.append(ids)

    def _take_ids(self, count: int) -> Ids:
        """Ids that came back, newest column first, then new ones."""
        parts: list[Ids] = []
        missing = count
        while missing and self._spare:
            column = self._spare.pop()
            if len(column) > missing:
                self._spare.append(column[missing:])
                column = column[:missing]
            parts.append(column)
            missing -= len(column)
        if missing:
            self._grow(self._top + missing)
            parts.append(np.arange(self._top, self._top + missing, dtype=np.intp))
            self._top += missing
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.intp)

    def _grow(self, rows: int) -> None:
        have = len(self._refs)
        if rows <= have:
            return
        more = max(rows, 2 * have) - have
        self._offset = np.concatenate((self._offset, np.zeros(more, U8)))
        self._length = np.concatenate((self._length, np.zeros(more, U8)))
        self._generation = np.concatenate((self._generation, np.ones(more, U4)))
        self._refs = np.concatenate((self._refs, np.zeros(more, np.int64)))
        self._admission = np.concatenate((self._admission, np.zeros(more, np.uint8)))
