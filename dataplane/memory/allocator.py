"""Free space of the arena: first fit by address, in columns.

Using the lowest address first keeps few pages in use, and keeps them warm. The allocator hands out
pages and takes back ranges of any multiple of 64 bytes, so free ranges may start and end inside a
page; only their whole pages are handed out again. It knows no owners: freeing free space is a bug
in dataplane.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from dataplane.memory.extents import PAGE_BYTES, Bytes, Extent, coalesce, page_down, page_up
from dataplane.wire.packed import U8

_LOW = np.uint64(PAGE_BYTES - 1)
_FIRST_LOOK = 1024
_FEW = 16
"""Up to this many new extents are inserted one by one into a long column."""


class Allocator:
    """The free ranges of an arena, sorted and coalesced.

    A free is one append. The column is merged at the next allocation, so a hundred thousand
    values that are freed together cost one sort.
    """

    def __init__(self, size_bytes: int, base: int = 0) -> None:
        """base: the first address, a multiple of a page."""
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
        self.high_water = base
        """The end of the highest byte ever handed out."""
        self._starts: Bytes = np.full(1, base, U8)
        self._ends: Bytes = np.full(1, base + size_bytes, U8)
        self._returned: list[Extent] = []

    def __repr__(self) -> str:
        self._settle()
        return f"<Allocator {self.free_bytes}/{self.size_bytes} B free in {len(self._starts)}>"

    @property
    def largest_free(self) -> int:
        """Bytes of the longest range of whole free pages."""
        self._settle()
        if not len(self._starts):
            return 0
        return max(0, int(self._pages().max()))

    @property
    def largest_touched(self) -> int:
        """Bytes of the longest range of whole free pages that were granted before."""
        self._settle()
        known = int(self._starts.searchsorted(U8.type(self.high_water), "left"))
        if not known:
            return 0
        longest = int(self._pages(0, known - 1).max(initial=0))
        start, end = int(self._starts[known - 1]), int(self._ends[known - 1])
        return max(longest, page_down(min(end, self.high_water)) - page_up(start))

    def allocate(self, nbytes: int, prefer: Iterable[Extent] = ()) -> int | None:
        """Return the start of `nbytes` (a multiple of a page), or None if no range is that long.
        prefer: extents to try first, in order."""
        assert nbytes > 0 and nbytes % PAGE_BYTES == 0, nbytes
        if nbytes > self.free_bytes:
            return None
        self._settle()
        for start, length in prefer:
            at = self._inside(start, start + length, nbytes)
            if at is not None:
                return self._take(*at, nbytes)
        first, count = 0, _FIRST_LOOK
        while first < len(self._starts):
            fit = self._pages(first, first + count) >= nbytes
            index = int(fit.argmax())
            if fit[index]:
                index += first
                return self._take(index, page_up(int(self._starts[index])), nbytes)
            first, count = first + count, 4 * count
        return None

    def cut(self, nbytes: int) -> int | None:
        """Allocate exactly `nbytes`, for space that no client is granted. Return the start, or None
        if none of the first ranges is that long."""
        if nbytes > self.free_bytes:
            return None
        self._settle()
        fit = self._ends[:_FIRST_LOOK] - self._starts[:_FIRST_LOOK] >= nbytes
        index = int(fit.argmax()) if len(fit) else 0
        if not len(fit) or not fit[index]:
            return None
        return self._take(index, int(self._starts[index]), nbytes)

    def free(self, extents: Sequence[Extent]) -> None:
        """Free extents, in any order. Raises AssertionError (at the latest at the next
        allocation) if one is free already."""
        self._returned += extents
        self.free_bytes += sum([length for _, length in extents])

    def _pages(self, first: int = 0, last: int | None = None) -> npt.NDArray[np.int64]:
        """Return per free extent the bytes of its whole pages; negative if it contains no page
        boundary."""
        starts = (self._starts[first:last] + _LOW) & ~_LOW
        return ((self._ends[first:last] & ~_LOW) - starts).view(np.int64)

    def _inside(self, start: int, end: int, nbytes: int) -> tuple[int, int] | None:
        """Return a free extent (its index, and the start) that has the bytes within start..end, or
        None."""
        first = max(0, _place(self._starts, start, "right") - 1)
        last = _place(self._starts, end, "left")
        for index in range(first, min(last, first + 4)):
            low, high = max(start, int(self._starts[index])), min(end, int(self._ends[index]))
            low = page_up(low)
            if high - low >= nbytes:
                return index, low
        return None

    def _take(self, index: int, start: int, nbytes: int) -> int:
        """Cut start..start+nbytes out of the free extent at `index`."""
        end = start + nbytes
        before, after = start > int(self._starts[index]), end < int(self._ends[index])
        if before and after:
            self._starts = _with(self._starts, index + 1, end)
            self._ends = _with(self._ends, index, start)
        elif before:
            self._ends[index] = start
        elif after:
            self._starts[index] = end
        else:
            self._starts = _without(self._starts, index)
            self._ends = _without(self._ends, index)
        self.free_bytes -= nbytes
        self.high_water = max(self.high_water, end)
        return start

    def _settle(self) -> None:
        """Merge extents that were freed since the last allocation."""
        if not self._returned:
            return
        if len(self._returned) <= _FEW < len(self._starts) // 64:
            for start, length in self._returned:
                self._insert(start, start + length)
            self._returned.clear()
            return
        returned = np.array(self._returned, U8)
        starts = np.concatenate([self._starts, returned[:, 0]])
        ends = np.concatenate([self._ends, returned[:, 0] + returned[:, 1]])
        self._returned.clear()
        try:
            self._starts, self._ends = coalesce(starts, ends)
        except ValueError as exc:
            raise AssertionError("space was freed twice") from exc

    def _insert(self, start: int, end: int) -> None:
        """Merge one extent into many: at most one copy of the columns, often none."""
        at = _place(self._starts, start, "right")
        before = int(self._ends[at - 1]) if at else -1
        after = int(self._starts[at]) if at < len(self._starts) else end + 1
        if start < before or end > after:
            raise AssertionError("space was freed twice")
        if before == start and end == after:
            self._starts = _without(self._starts, at)
            self._ends = _without(self._ends, at - 1)
        elif before == start:
            self._ends[at - 1] = end
        elif end == after:
            self._starts[at] = start
        else:
            self._starts = _with(self._starts, at, start)
            self._ends = _with(self._ends, at, end)


def _place(column: Bytes, value: int, side: Literal["left", "right"]) -> int:
    """Return where to insert a value. It is searched as U8, because numpy would convert the column
    to floats for a plain int."""
    return int(column.searchsorted(U8.type(value), side))


def _with(column: Bytes, at: int, value: int) -> Bytes:
    """Return the column with a value inserted, at a tenth of the cost of `np.insert`."""
    longer = np.empty(len(column) + 1, U8)
    longer[:at], longer[at], longer[at + 1 :] = column[:at], value, column[at:]
    return longer


def _without(column: Bytes, at: int) -> Bytes:
    return np.concatenate((column[:at], column[at + 1 :]))
