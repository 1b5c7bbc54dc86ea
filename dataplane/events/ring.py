"""The last MAX_RECORDS records of a peer, in the order in which they were added.

Recording is always on, so adding a record must cost about a microsecond. To make one takes two.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import islice

from dataplane.wire.events import EventRecord, Kind, Reason

MAX_RECORDS = 16_384
"""About 250 bytes each."""
LEAST_WAIT_S = 1e-3
"""Shorter waits are not recorded."""


class Ring:
    def __init__(
        self, size: int = MAX_RECORDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._records: deque[EventRecord] = deque(maxlen=size)
        self.last = 0
        """the number of the newest record; the first one is 1"""
        self.waits: dict[tuple[Kind, Reason], list[float]] = {}
        """how many waits have ended, and their sum in seconds, by kind and reason"""

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: EventRecord, since: float | None = None) -> None:
        """Keep a record. `since`: when the recorded activity began (monotonic)."""
        record.at = at = self._clock()
        if since is not None and at > since:
            record.seconds = at - since
        self._records.append(record)
        self.last += 1

    def keeps_wait(self, since: float) -> bool:
        """Return whether a wait that began at `since` and ends now is long enough for a record."""
        return self._clock() - since >= LEAST_WAIT_S

    def waited(self, record: EventRecord, since: float) -> None:
        """Record a wait that began at `since` and ends now. Too short waits are not recorded."""
        if not self.keeps_wait(since):
            return
        self.add(record, since)
        sums = self.waits.setdefault((record.kind, record.reason), [0, 0.0])
        sums[0] += 1
        sums[1] += record.seconds

    @property
    def kept(self) -> int:
        """The number of the oldest record, or of the next one if there is none."""
        return self.last - len(self._records) + 1

    def after(self, number: int, since: float, limit: int) -> tuple[int, list[EventRecord]]:
        """Return (number of the first record, records): at most `limit` records with a number
        above `number` that happened after `since`, the oldest first."""
        kept = self.kept
        skip = max(0, number + 1 - kept)
        if since > -math.inf:
            skip = max(skip, bisect_right(self._records, since, key=lambda one: one.at))
        return kept + skip, list(islice(self._records, skip, skip + max(0, limit)))
