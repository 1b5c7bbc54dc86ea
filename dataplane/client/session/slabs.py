"""Slabs: space in one of the peer's memories that a client has reserved and not written yet.

A write takes the space of its chunks from the front of one slab. If the slabs cannot hold another
write as large, its message reserves more. So a steady producer needs one round trip per write, and
most of its messages reserve nothing. Slabs that are unused for a second go back to the peer.
Thread-safe; never waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from operator import itemgetter

from dataplane.memory.extents import Extent

AHEAD_BYTES = 16 << 20
"""The most that a message reserves ahead in the host arena: next to the copy of a larger write, a
round trip costs little. A client keeps slabs of up to twice as much."""
LEAST_AHEAD_BYTES = 64 << 10
WRITES_AHEAD = 4
"""A message reserves space for this many writes of the size of the largest recent one."""
FAIR_SHARE = 64
"""A message reserves at most one part in this many of the quota for new groups, unless a single
write needs more."""
POOL_AHEAD = 8
"""In a pool, a message reserves up to one part in this many of the whole pool, instead of
AHEAD_BYTES: a GPU writes 1 GiB in less time than a round trip takes."""
WRITES_LOOKED_BACK = 8
MAX_SLABS = 8
KEPT_SLABS = 2
"""If there are more than MAX_SLABS, a client keeps this many of the largest and returns the others
at once: the rest of a used slab serves few writes, and each return is a message."""
IDLE_S = 1.0
"""Slabs that no write has used for this long go back to the peer. A client that writes less often
reserves nothing ahead."""
_length = itemgetter(1)


class Slabs:
    """The slabs of one session in one memory."""

    def __init__(self, quota_bytes: int, most_bytes: int = AHEAD_BYTES) -> None:
        """quota_bytes: the quota for new groups in this memory. most_bytes: the most that a message
        reserves ahead."""
        self._most_bytes, self._kept_bytes = most_bytes, 2 * most_bytes
        self._fair_bytes = min(most_bytes, max(LEAST_AHEAD_BYTES, quota_bytes // FAIR_SHARE))
        self._lock = threading.Lock()
        self._slabs: list[Extent] = []
        self._recent: deque[int] = deque(maxlen=WRITES_LOOKED_BACK)
        """bytes of the last writes"""
        self._written = self._touched = time.monotonic()

    def take(self, nbytes: int) -> int | None:
        """Take this many bytes, a multiple of 64, and return their offset; None if no slab has as
        many."""
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
        """Bytes to reserve with a write of `nbytes`: 0 if the next write fits into the slabs, or is
        not expected soon. Groups differ in size, so the next write may be as large as the largest
        recent one."""
        if not nbytes or nbytes > self._most_bytes:
            return 0
        with self._lock:
            before, self._written = self._written, time.monotonic()
            self._recent.append(nbytes)
            largest = max(self._recent)
            if self._written - before > IDLE_S:
                return 0
            if max(map(_length, self._slabs), default=0) >= largest:
                return 0
        return max(largest, min(WRITES_AHEAD * largest, self._fair_bytes), LEAST_AHEAD_BYTES)

    def keep(self, extents: list[Extent]) -> None:
        """Add space that the peer granted, or that no message has named. The list keeps what must
        go back to the peer now. Python runs signal handlers only after calls and at jumps, so
        an interrupt finds each extent either here or in the list."""
        with self._lock:
            self._touched = time.monotonic()
            slabs, left = _joined([*self._slabs, *extents]), []
            if len(slabs) > MAX_SLABS or sum(map(_length, slabs)) > self._kept_bytes:
                slabs.sort(key=_length, reverse=True)
                kept = total = 0
                while kept < min(len(slabs), KEPT_SLABS):
                    total += slabs[kept][1]
                    if total > self._kept_bytes:
                        break
                    kept += 1
                slabs, left = slabs[:kept], slabs[kept:]
            self._slabs, extents[:] = slabs, left

    def take_idle(self, idle_s: float = IDLE_S) -> list[Extent]:
        """Take all slabs, if no write has used any for `idle_s`."""
        with self._lock:
            if time.monotonic() - self._touched < idle_s:
                return []
            slabs, self._slabs = self._slabs, []
        return slabs

    @property
    def nbytes(self) -> int:
        return sum(map(_length, self._slabs))


def _joined(extents: list[Extent]) -> list[Extent]:
    """Return these extents in the order of their offsets, with neighbours joined."""
    joined: list[Extent] = []
    for offset, length in sorted(extents):
        if joined and sum(joined[-1]) == offset:
            joined[-1] = joined[-1][0], joined[-1][1] + length
        elif length:
            joined.append((offset, length))
    return joined
