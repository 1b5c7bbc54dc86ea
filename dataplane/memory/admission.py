"""Admission classes: how much of the arena each kind of writer may use.

Opening new groups ranks above continuing ones, and that above pulls, in the order in which they
may be refused: work in flight must be able to finish, or a full arena never empties. Each class
has a guaranteed quota. A class may borrow unused quota of lower classes, never of higher ones.
Pulled copies are evicted for all. The classes decide how much a writer gets, and the allocator
decides where.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from dataplane.errors import ValueTooLarge, sized
from dataplane.memory.allocator import Allocator
from dataplane.memory.cache import PulledCopies
from dataplane.memory.extents import Bytes, Span, padded, page_down, page_up
from dataplane.wire.packed import U8


class Admission(IntEnum):
    """The classes of reservations. A class ranks above another one if it is admitted when the
    other is not."""

    OPEN = 0
    CONTINUE = 1
    PULL = 2


ShareOfEach = tuple[float, float, float]
"""Of an arena, guaranteed to each class."""
DEFAULT_SHARES: ShareOfEach = (0.60, 0.25, 0.15)

_PURPOSE = ("new groups", "existing groups", "pulls from other hosts and the spill file")


MAX_EXTENTS = 1024
"""A fragmented arena grants fewer units at once rather than endless extents."""

LONG_BYTES = 1 << 20
"""What is longer is rather spread over stretches of this length that were used before than put into
pages that nobody has touched: those are ten times as slow to write, cost each reader a fault, and
are memory that the host has not given yet."""
_AHEAD_PART_BYTES = 64 << 10
"""What is granted ahead may be taken apart into this."""


class Shares:
    """Bytes in use per class (granted and live), compared with the class's quota."""

    def __init__(self, size_bytes: int, shares: ShareOfEach = DEFAULT_SHARES) -> None:
        self.size_bytes = size_bytes
        self.guaranteed = tuple(page_down(int(size_bytes * share)) for share in shares)
        self.caps = tuple(
            size_bytes - sum(self.guaranteed[admission + 1 :]) for admission in Admission
        )
        """The most that one class may ever use: all but what higher ones are guaranteed."""
        self.used = [0, 0, 0]

    def __repr__(self) -> str:
        return f"<Shares used={self.used} caps={list(self.caps)}>"

    def room(self, admission: int) -> int:
        """The free bytes, less the guarantees that higher classes have not used yet."""
        return max(0, self.balance(admission))

    def balance(self, admission: int) -> int:
        """`room`, below 0 if higher classes' guarantees are lent out."""
        reserved = sum(
            max(0, self.guaranteed[higher] - self.used[higher])
            for higher in range(admission + 1, len(self.used))
        )
        return self.size_bytes - sum(self.used) - reserved

    def charge(self, admission: int, nbytes: int) -> None:
        self.used[admission] += nbytes

    def discharge(self, admission: int, nbytes: int) -> None:
        self.used[admission] -= nbytes
        assert self.used[admission] >= 0, (admission, nbytes)

    def check_unit(self, admission: int, nbytes: int) -> None:
        """Raise ValueTooLarge if one row or one group's part can never get its space."""
        needed, cap = page_up(nbytes), self.caps[admission]
        if needed > cap:
            raise ValueTooLarge(
                f"a single row or group in this call needs {sized(needed)} at once, "
                f"but {_PURPOSE[admission]} may use at most {sized(cap)} of this host's "
                f"{sized(self.size_bytes)} arena: split the group across several put() calls, use "
                "smaller rows, or give the peer a larger arena (--arena, DATAPLANE_ARENA)",
                needed_bytes=needed,
                cap_bytes=cap,
                arena_bytes=self.size_bytes,
                admission=Admission(admission).name.lower(),
            )


class Room:
    """Allocates ranges of free space for a class, and frees them.

    Allocated bytes are charged to their class until they are freed. Nothing waits: a request
    that does not fit gets fewer units.
    """

    def __init__(
        self, allocator: Allocator, shares: Shares, copies: PulledCopies, long_bytes: int
    ) -> None:
        """long_bytes: see LONG_BYTES."""
        self._allocator = allocator
        self._shares = shares
        self._copies = copies
        self.long_bytes = long_bytes

    def take_units(
        self,
        admission: int,
        units: Sequence[npt.NDArray[np.uint64]],
        prefer: Sequence[Span] = (),
    ) -> tuple[int, list[Span]]:
        """Allocate spans for the first units, each whole. Return how many units fit, and the spans.

        One span holds as many units as possible. A unit that no span holds is spread over
        several, range by range. Raises ValueTooLarge if a unit can never fit.
        """
        if not units:
            return 0, []
        ends, marks = self.lengths(admission, units)
        totals = ends[marks]
        self._evict_into(admission, page_up(int(totals[-1])))
        spans: list[Span] = []
        done = 0
        while done < len(units) and len(spans) < MAX_EXTENTS:
            unit = ends[marks[done] : marks[done + 1] + 1]
            upto, some = done, list[Span]()
            if self._is_spread(int(unit[-1] - unit[0])):
                some = self._spread(admission, unit, prefer)
            if not some:
                upto, some = self._fill(admission, totals, done, prefer)
            if upto == done:
                some = some or self._spread(admission, unit, prefer)
                upto += bool(some)
            if upto == done and (done or not self._evict_between(admission, int(totals[1]))):
                break
            spans += some
            done = upto
        return done, spans

    def take_ahead(self, admission: int, nbytes: int, prefer: Sequence[Span] = ()) -> list[Span]:
        """Allocate space in advance, only while half of the class's quota stays free."""
        nbytes = page_up(nbytes)
        if nbytes <= 0 or self._shares.room(admission) - nbytes < self._shares.caps[admission] // 2:
            return []
        if not self._is_spread(nbytes):
            return self._take(admission, nbytes, prefer)
        parts = np.arange(0, nbytes + _AHEAD_PART_BYTES, _AHEAD_PART_BYTES)
        return self._spread(admission, np.minimum(parts, nbytes).astype(U8), prefer)

    def cut(self, admission: int, nbytes: int) -> int | None:
        """Allocate this many bytes that no client is granted. Return the start, or None if they
        are not available as one range now."""
        self._evict_into(admission, nbytes)
        if nbytes > self._shares.room(admission) or self._is_spread(nbytes):
            return None
        start = self._allocator.cut(nbytes)
        if start is not None:
            self._shares.charge(admission, nbytes)
        return start

    def give_back(self, spans: Sequence[Span], by_class: Sequence[int]) -> None:
        """Free ranges that were charged to the classes with these bytes."""
        self._allocator.free(spans)
        for admission, nbytes in enumerate(by_class):
            self._shares.discharge(admission, nbytes)

    def lengths(
        self, admission: int, units: Sequence[npt.NDArray[np.uint64]]
    ) -> tuple[Bytes, npt.NDArray[np.intp]]:
        """The running bytes of all ranges, from 0, and where each unit starts and ends. Raises
        ValueTooLarge if a unit can never fit."""
        sizes = np.concatenate(units).astype(U8, copy=False)
        if len(sizes):
            # before adding up: sums of what a client claims must not wrap
            self._shares.check_unit(admission, int(sizes.max()))
        ends = np.concatenate((np.zeros(1, U8), np.cumsum(padded(sizes), dtype=U8)))
        marks = np.zeros(len(units) + 1, np.intp)
        np.cumsum(np.fromiter(map(len, units), np.intp, len(units)), out=marks[1:])
        self._shares.check_unit(admission, int(np.diff(ends[marks]).max()))
        return ends, marks

    def _take(self, admission: int, nbytes: int, prefer: Sequence[Span]) -> list[Span]:
        start = self._allocator.allocate(nbytes, prefer)
        if start is None:
            return []
        self._shares.charge(admission, nbytes)
        return [(start, start + nbytes)]

    def _fill(
        self, admission: int, ends: Bytes, done: int, prefer: Sequence[Span]
    ) -> tuple[int, list[Span]]:
        """Allocate one span for as many of the next parts as it can hold. Return how far that is.

        ends: running bytes, part k lying between ends[k] and ends[k + 1].
        """
        room = page_down(self._shares.room(admission))
        nbytes = page_up(int(ends[-1] - ends[done]))
        upto = self._touched_upto(ends, done, room) if nbytes > self.long_bytes else done
        if upto == done:
            if 0 < nbytes <= room:
                some = self._take(admission, nbytes, prefer)
                if some:
                    return len(ends) - 1, some
            upto = _upto(ends, done, min(self._allocator.largest_free, room))
        nbytes = page_up(int(ends[upto] - ends[done]))
        if not nbytes:
            return upto, []  # nothing fits, or parts without bytes do
        some = self._take(admission, nbytes, prefer)
        assert some, (nbytes, room)
        return upto, some

    def _is_spread(self, nbytes: int) -> bool:
        """Whether so much has no stretch of pages that were used before, and is worth several."""
        return nbytes > self.long_bytes and nbytes > self._allocator.largest_touched

    def _touched_upto(self, ends: Bytes, done: int, room: int) -> int:
        """How far the parts from `done` get in the longest stretch of pages that were used before,
        where that is long enough to be worth a span of its own."""
        reach = min(self._allocator.largest_touched, room)
        return _upto(ends, done, reach) if reach >= self.long_bytes else done

    def _spread(self, admission: int, ends: Bytes, prefer: Sequence[Span]) -> list[Span]:
        """Allocate several spans for the ranges of one unit, or none."""
        spans: list[Span] = []
        if int(ends[-1] - ends[0]) > self._shares.room(admission):
            return spans
        done = 0
        while done < len(ends) - 1:
            upto, some = self._fill(admission, ends, done, prefer)
            spans += some
            if upto == done or len(spans) > MAX_EXTENTS:
                self._undo(admission, spans)
                return []
            done = upto
        return spans

    def _undo(self, admission: int, spans: list[Span]) -> None:
        self._allocator.free(spans)
        self._shares.discharge(admission, sum([end - start for start, end in spans]))

    def _evict_into(self, admission: int, nbytes: int) -> None:
        """Evict pulled copies as far as that lets this class in."""
        short = nbytes - self._shares.balance(admission)
        if admission != Admission.PULL:
            # copies inside the guarantee of pulls are no room for others, kept or not
            pulls = self._shares.used[Admission.PULL] - self._shares.guaranteed[Admission.PULL]
            short = min(short, pulls)
        if short > 0:
            self._copies.evict(short)

    def _evict_between(self, admission: int, nbytes: int) -> int:
        """Copies lie in the way of a unit that has room but no stretch: the bytes evicted."""
        if self._shares.room(admission) < page_up(nbytes):
            return 0
        return self._copies.evict(nbytes)


def _upto(ends: Bytes, done: int, reach: int) -> int:
    """How far the parts from `done` get within so many bytes."""
    return int(np.searchsorted(ends, ends[done] + U8.type(reach), "right")) - 1
