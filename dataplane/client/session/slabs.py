"""Slabs: space of one of the peer's memories that was granted to a client and is not written yet.

A write takes what its chunks need from the front of one slab. Its message asks for more where the
slabs would not hold the next one, so a steady producer needs one round trip, and most of its
messages ask for nothing. What is unused for a second goes back to the peer. Thread-safe; never
waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from operator import itemgetter

from dataplane.memory.extents import Extent

AHEAD_BYTES = 16 << 20
"""The most that is asked for ahead in the host arena; for larger writes a round trip is no cost.
Twice as much is kept."""
LEAST_AHEAD_BYTES = 64 << 10
WRITES_AHEAD = 4
"""So many writes as large as the largest of late are asked for at once."""
FAIR_SHARE = 64
"""A client asks for no more than this part of what new groups may have, except for one write."""
POOL_AHEAD = 8
"""Of a pool that is one part of so many: a GPU writes 1 GiB in less than a round trip."""
WRITES_LOOKED_BACK = 8
MAX_SLABS = 8
KEPT_SLABS = 2
"""So many of the largest stay where there are more than that: the ends of slabs serve few writes,
and to give back one with each would be a message for each."""
IDLE_S = 1.0
"""Slabs that nobody used for this long go back. Who writes less often asks for nothing ahead."""
_length = itemgetter(1)


class Slabs:
    """The slabs of one session in one memory."""

    def __init__(self, share_bytes: int, most_bytes: int = AHEAD_BYTES) -> None:
        """share_bytes: of the memory, what new groups may have."""
        self._most_bytes, self._kept_bytes = most_bytes, 2 * most_bytes
        self._fair_bytes = min(most_bytes, max(LEAST_AHEAD_BYTES, share_bytes // FAIR_SHARE))
        self._lock = threading.Lock()
        self._slabs: list[Extent] = []
        self._late: deque[int] = deque(maxlen=WRITES_LOOKED_BACK)
        """bytes of late writes"""
        self._written = self._touched = time.monotonic()

    def take(self, nbytes: int) -> int | None:
        """Where so many bytes are now the caller's; None where no slab holds them. nbytes: a
        multiple of 64."""
        with self._lock:
            for number, length in enumerate(map(_length, self._slabs)):
                if length >= nbytes:
                    offset = self._slabs[number][0]
                    self._touched = time.monotonic()
                    if length > nbytes:
                        self._slabs[number] = offset + nbytes, length - nbytes
                    else:
                        del self._slabs[number]
                    return offset
        return None

    def ahead(self, nbytes: int) -> int:
        """How much to ask for with a message that brings so many bytes: 0 where the next one finds
        room here, or is not to be expected soon. Groups differ in size, so the next one may be as
        large as the largest of late."""
        if not nbytes or nbytes > self._most_bytes:
            return 0
        with self._lock:
            before, self._written = self._written, time.monotonic()
            self._late.append(nbytes)
            largest = max(self._late)
            if self._written - before > IDLE_S:
                return 0
            if max(map(_length, self._slabs), default=0) >= largest:
                return 0
        return max(largest, min(WRITES_AHEAD * largest, self._fair_bytes), LEAST_AHEAD_BYTES)

    def keep(self, stretches: Iterable[Extent]) -> list[Extent]:
        """Keep what was granted, or what no message has named. Returns what must go back now."""
        with self._lock:
            self._touched = time.monotonic()
            slabs = _joined([*self._slabs, *stretches])
            if len(slabs) > MAX_SLABS or sum(map(_length, slabs)) > self._kept_bytes:
                slabs.sort(key=_length, reverse=True)
                kept = total = 0
                while kept < min(len(slabs), KEPT_SLABS):
                    total += slabs[kept][1]
                    if total > self._kept_bytes:
                        break
                    kept += 1
                self._slabs = slabs[:kept]
                return slabs[kept:]
            self._slabs = slabs
        return []

    def take_idle(self, idle_s: float = IDLE_S) -> list[Extent]:
        """All of it, if no write has used any for `idle_s`."""
        with self._lock:
            if time.monotonic() - self._touched < idle_s:
                return []
            slabs, self._slabs = self._slabs, []
        return slabs

    @property
    def nbytes(self) -> int:
        return sum(map(_length, self._slabs))


def _joined(stretches: list[Extent]) -> list[Extent]:
    """Neighbours made one, in order of their offsets."""
    joined: list[Extent] = []
    for offset, length in sorted(stretches):
        if joined and sum(joined[-1]) == offset:
            joined[-1] = joined[-1][0], joined[-1][1] + length
        elif length:
            joined.append((offset, length))
    return joined
