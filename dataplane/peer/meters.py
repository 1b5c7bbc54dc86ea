"""What a peer counts of the calls of its host's clients, where its metrics are shown at all.

Runs in the peer's loop, at the end of each call: a few microseconds, no lock, no I/O. Everything is
bounded: a name that a user chose is a label while there are few of them, and "other" after that.
"""

from __future__ import annotations

import time
from bisect import bisect_left

from dataplane.peer import rows as rowset
from dataplane.wire import messages as m
from dataplane.wire.records import PLACE, VALUE
from dataplane.wire.tables import volume

MAX_LABELS = 64
OTHER = "other"
CALLS: dict[type[m.Body], str] = {
    m.Put: "put",
    m.Reserve: "reserve",
    m.Claim: "claim",
    m.Finish: "finish",
    m.Fetch: "fetch",
    m.Read: "read",
}
BOUNDS_S: tuple[float, ...] = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1)
BOUNDS_S += (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0, 300.0)
"""Upper ends of the histograms' buckets: a local claim takes under a millisecond, one that waits
for rows may take minutes."""


class ByLabel:
    """Sums by a name that a user chose: the first MAX_LABELS names, and the rest together."""

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}

    def add(self, label: str, amount: int) -> None:
        if label not in self.sums and len(self.sums) >= MAX_LABELS:
            label = OTHER
        self.sums[label] = self.sums.get(label, 0) + amount


class Histogram:
    """How long calls took: how many up to each of BOUNDS_S, and longer ones at the end."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


class Meters:
    """`observe` is told of each call that was answered."""

    def __init__(self) -> None:
        self.calls = {name: Histogram() for name in CALLS.values()}
        self.failures = ByLabel()
        """by the class of the error"""
        self.put_rows = 0
        self.put_bytes = 0
        self.claimed_rows = ByLabel()
        self.claimed_bytes = ByLabel()
        """by stage"""

    def observe(self, request: m.Body, answer: m.Body, began: float) -> None:
        """began: when the request came in (monotonic)."""
        name = CALLS.get(type(request))
        if name is None:
            return
        self.calls[name].add(time.monotonic() - began)
        if isinstance(answer, m.Failed):
            if not answer.details.get("values"):  # its client keeps them in the arena now
                self.failures.add(answer.code, 1)
        elif isinstance(request, m.Put):
            self.put_rows += rowset.count(request.rows)
            self.put_bytes += volume(request.columns, VALUE)
        elif isinstance(request, m.Claim) and isinstance(answer, m.Claimed):
            self.claimed_rows.add(request.stage, rowset.count(answer.table.rows))
            self.claimed_bytes.add(request.stage, volume(answer.table.columns, PLACE))
