"""Stretches of the peer's memories that were granted to this client and are not written yet.

The reply to a put grants room for the next one, so that a steady producer needs one round trip.
What stays unused for a second goes back to the peer. Thread-safe; never waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dataplane.memory.placement import fitting
from dataplane.wire.limits import ALIGNMENT_BYTES
from dataplane.wire.records import EXTENT

MAX_LEFTOVERS = 16
KEPT_LEFTOVERS = 4
"""So many of the largest stay where there are more than that: small ends serve no put, and to give
back one with each would be a message for each."""
AHEAD_BYTES = 16 << 20
"""The most that is asked for ahead in the host arena; for larger puts a round trip is no cost.
Twice as much is kept."""
DEVICE_AHEAD = 8
"""Of a device arena that is one part of so many: a GPU writes 1 GiB in less than a round trip."""
LEAST_AHEAD_BYTES = 64 << 10
"""Small rows are granted room for many at once: a grant costs as much as what else a put does."""
PUTS_LOOKED_BACK = 8
IDLE_S = 1.0
"""Grants that nobody used for this long go back."""

Extents = npt.NDArray[np.void]


def no_extents() -> Extents:
    return np.zeros(0, EXTENT)


class Leftovers:
    """The granted, unwritten extents of one session in one memory."""

    def __init__(self, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._ahead_bytes = ahead_bytes
        self._lock = threading.Lock()
        self._extents: list[tuple[int, int]] = []
        self._late: deque[tuple[int, Sequence[int]]] = deque(maxlen=PUTS_LOOKED_BACK)
        """of late puts, what `take` was asked for"""
        self._touched = time.monotonic()

    def ahead(self, nbytes: int, sizes: Sequence[int] = ()) -> int:
        """How much to ask for with a message that brings so many bytes, so that the next one of as
        much finds room: as the largest of late, since groups differ in size. 0 where `take` would
        find that here, or nothing came. sizes: as `take` has them."""
        if not nbytes or nbytes > self._ahead_bytes:
            return 0
        with self._lock:
            self._late.append((nbytes, sizes))
            most = max(reversed(self._late), key=lambda put: put[0])
            return 0 if self._room_for(*most) else max(most[0], LEAST_AHEAD_BYTES)

    def take(self, nbytes: int, sizes: Sequence[int] = ()) -> Extents | None:
        """The smallest extent that holds `nbytes`, now the caller's; None where none does. sizes:
        of ranges that may lie apart, in several of them: those are all, the largest first."""
        with self._lock:
            taken = self._room_for(nbytes, sizes)
            if taken is None:
                return None
            self._extents = [e for e in self._extents if e not in taken]
            self._touched = time.monotonic()
        return np.array(taken, EXTENT)

    def _room_for(self, nbytes: int, sizes: Sequence[int]) -> list[tuple[int, int]] | None:
        enough = [e for e in self._extents if e[1] >= nbytes]
        if enough:
            return [min(enough, key=lambda e: e[1])]
        if not sizes or self.nbytes < nbytes:
            return None
        largest_first = sorted(self._extents, key=lambda e: e[1], reverse=True)
        if fitting(sizes, np.array(largest_first, EXTENT)) == len(sizes):
            return largest_first
        return None

    def keep(self, extents: Extents) -> Extents:
        """Keep extents that no message has named for the next put; returns those that must go back
        now. Each comes with the padding that belongs to its value."""
        if not len(extents):
            return extents
        with self._lock:
            self._touched = time.monotonic()
            more = [
                (at, max(many + -many % ALIGNMENT_BYTES, ALIGNMENT_BYTES))
                for at, many in extents.tolist()
            ]
            if len(more) == 1 and self._stands_alone(*more[0]):
                self._extents += more
                return extents[:0]
            merged = _merge(self._extents + more)
            merged.sort(key=lambda e: e[1], reverse=True)
            most = MAX_LEFTOVERS if len(merged) <= MAX_LEFTOVERS else KEPT_LEFTOVERS
            kept: list[tuple[int, int]] = []
            total = 0
            for extent in merged:
                if len(kept) < most and total + extent[1] <= 2 * self._ahead_bytes:
                    kept.append(extent)
                    total += extent[1]
            self._extents = kept
        held = set(kept)
        return np.array([e for e in merged if e not in held], EXTENT)

    def _stands_alone(self, offset: int, length: int) -> bool:
        """Whether there is room for it, and nothing that it is to be joined with."""
        others = self._extents
        if len(others) == MAX_LEFTOVERS or self.nbytes + length > 2 * self._ahead_bytes:
            return False
        return all([first + many != offset and offset + length != first for first, many in others])

    def take_idle(self, idle_s: float = IDLE_S) -> Extents:
        """All of them, if no put has used any for `idle_s`."""
        with self._lock:
            if time.monotonic() - self._touched < idle_s:
                return no_extents()
            extents, self._extents = self._extents, []
        return np.array(extents, EXTENT)

    @property
    def nbytes(self) -> int:
        return sum(length for _, length in self._extents)

    def __len__(self) -> int:
        return len(self._extents)


def _merge(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(extents):
        if merged and sum(merged[-1]) == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((offset, length))
    return merged
