"""The records that a peer keeps of what happened: the last MAX_RECORDS, in the order in which they
came. Always on, so a record must cost about a microsecond.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable
from itertools import chain, islice

from dataplane.wire.events import Kind, Reason, Record

MAX_RECORDS = 16_384
"""At some 250 bytes each."""
LEAST_WAIT_S = 1e-3
"""A shorter wait makes no record."""


class Ring:
    def __init__(
        self, size: int = MAX_RECORDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._size = size
        self._clock = clock
        self._records: list[Record] = []
        self.last = 0
        """the number of the newest record; the first one is 1"""
        self.waits: dict[tuple[Kind, Reason], list[float]] = {}
        """how many waits have ended and how many seconds they took, by what waited and why"""

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record, since: float | None = None) -> None:
        """Keep a record. since: when what it is about began (monotonic)."""
        record.at = at = self._clock()
        if since is not None:
            record.seconds = max(0.0, at - since)
        if len(self._records) < self._size:
            self._records.append(record)
        else:
            self._records[self.last % self._size] = record
        self.last += 1

    def waited(self, record: Record, since: float) -> None:
        """A wait has ended that began then. Too short ones make no record."""
        if self._clock() - since < LEAST_WAIT_S:
            return
        self.add(record, since)
        sums = self.waits.setdefault((record.kind, record.reason), [0, 0.0])
        sums[0] += 1
        sums[1] += record.seconds

    @property
    def kept(self) -> int:
        """The number of the oldest record that is there, or will be."""
        return self.last - len(self._records) + 1

    def after(self, number: int, since: float, limit: int) -> tuple[int, list[Record]]:
        """(number of the first, records): at most `limit` of those above `number` that happened
        after `since`, the oldest first."""
        size, kept = len(self._records), self.kept
        skip = max(0, number + 1 - kept)
        start = (self.last % self._size) if size == self._size else 0
        if since > -math.inf:
            skip = max(skip, bisect_right(range(size), since, key=lambda i: self._at(start + i)))
        ordered = chain(islice(self._records, start, None), islice(self._records, start))
        return kept + skip, list(islice(ordered, skip, skip + max(0, limit)))

    def _at(self, place: int) -> float:
        return self._records[place % len(self._records)].at
