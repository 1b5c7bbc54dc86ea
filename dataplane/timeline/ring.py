"""The records that a peer keeps of what happened: the last MAX_RECORDS, in the order in which they
came. Always on, so a record must cost about a microsecond.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import islice

from dataplane.wire.events import Kind, Reason, Record

MAX_RECORDS = 16_384
"""At some 250 bytes each."""
LEAST_WAIT_S = 1e-3
"""A shorter wait makes no record."""


class Ring:
    def __init__(
        self, size: int = MAX_RECORDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._records: deque[Record] = deque(maxlen=size)
        self.last = 0
        """the number of the newest record; the first one is 1"""
        self.waits: dict[tuple[Kind, Reason], list[float]] = {}
        """how many waits have ended and how many seconds they took, by what waited and why"""

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record, since: float | None = None) -> None:
        """Keep a record. since: when what it is about began (monotonic)."""
        record.at = at = self._clock()
        if since is not None and at > since:
            record.seconds = at - since
        self._records.append(record)
        self.last += 1

    def keeps_wait(self, since: float) -> bool:
        """Whether a wait that began then and ends now has lasted long enough for a record."""
        return self._clock() - since >= LEAST_WAIT_S

    def waited(self, record: Record, since: float) -> None:
        """A wait has ended that began then. Too short ones make no record."""
        if not self.keeps_wait(since):
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
        kept = self.kept
        skip = max(0, number + 1 - kept)
        if since > -math.inf:
            skip = max(skip, bisect_right(self._records, since, key=lambda one: one.at))
        return kept + skip, list(islice(self._records, skip, skip + max(0, limit)))
