"""One lane of ready units: the queue from which claims of one form are met, oldest first.

A unit is rows of a block, as bits, or a group, as one bit. An entry stands for what became ready at
once; what leaves the lane otherwise than from its front is taken out of its entries, which are
passed over when nothing is left of them. A lane with a filter has entries of what matches now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from dataplane.metadata.tables.bits import first_of

Unit = Any
"""Block or Group"""
Picked = list[tuple[Any, int]]
"""Units in an order."""

_FEW = 64


class _Entry(msgspec.Struct, gc=False, eq=False):
    unit: Unit
    bits: int


class Lane:
    """matches(unit, bits): which of them pass the filter; None for the plain lane."""

    def __init__(self, matches: Callable[[Unit, int], int] | None = None) -> None:
        self._matches = matches
        self._queue: deque[_Entry] = deque()
        self._of: dict[Unit, tuple[_Entry, ...]] = {}
        self._spent = 0
        """entries of which nothing is left"""
        self.count = 0
        self.passed_over = 0
        """how often its first unit stayed when others were taken that lay nearer"""

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[tuple[Unit, int]]:
        return ((one.unit, one.bits) for one in self._queue if one.bits)

    def holds(self, unit: Unit) -> int:
        """What is in the lane of this unit."""
        bits = 0
        for entry in self._of.get(unit, ()):
            bits |= entry.bits
        return bits

    def enter(self, unit: Unit, bits: int, front: bool = False) -> None:
        """It became ready."""
        if self._matches is not None:
            bits = self._matches(unit, bits)
            if not bits:
                return
        entry = _Entry(unit, bits)
        if front:
            self._queue.appendleft(entry)
        else:
            self._queue.append(entry)
        before = self._of.get(unit)
        self._of[unit] = (entry,) if before is None else (*before, entry)
        self.count += bits.bit_count()

    def leave(self, unit: Unit, bits: int) -> None:
        """It is not ready any more, or was not here."""
        entries = self._of.get(unit)
        if entries is None:
            return
        left = []
        for entry in entries:
            gone = entry.bits & bits
            self.count -= gone.bit_count()
            entry.bits ^= gone
            if entry.bits:
                left.append(entry)
            else:
                self._spent += 1
        if not left:
            del self._of[unit]
        elif len(left) < len(entries):
            self._of[unit] = tuple(left)
        while self._queue and not self._queue[0].bits:
            self._queue.popleft()
            self._spent -= 1
        if self._spent > _FEW and 2 * self._spent > len(self._queue):
            self._queue = deque([one for one in self._queue if one.bits])
            self._spent = 0

    def retest(self, unit: Unit, ready: int) -> None:
        """Tags changed of a unit, of which so much is ready. What matches already keeps its place,
        what did not comes last."""
        assert self._matches is not None
        held, match = self.holds(unit), self._matches(unit, ready)
        if held & ~match:
            self.leave(unit, held & ~match)
        if match & ~held:
            self.enter(unit, match & ~held)

    def first(self, count: int) -> Picked:
        """The first `count` units, fewer where there are not so many."""
        found: Picked = []
        for entry in self._queue:
            if not entry.bits:
                continue
            bits = first_of(entry.bits, count)
            found.append((entry.unit, bits))
            count -= bits.bit_count()
            if count <= 0:
                break
        return found
