"""What a stage's home knows of one filter's rows: the latest counts of every peer, and their sums.

Soft state, rebuilt from reports. Counts of a peer are lowered when it grants, so that one unit is
not ordered twice, and are set right by that peer's next report.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dataplane.metadata.counts import Counts

_NONE = Counts()


@dataclass(slots=True)
class _Known:
    counts: Counts = _NONE
    sealed: bool = False
    version: int = 0


class Tally:
    """Counts per peer for one filter. `ordered` are units that were asked for and not yet answered,
    by (peer, unit)."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._ready: Counter[str] = Counter()
        self._remaining: Counter[str] = Counter()
        self._outstanding: Counter[str] = Counter()
        self._sealed = 0
        self._ordered: Counter[tuple[str, str]] = Counter()

    def report(self, peer: str, counts: Counts, sealed: bool) -> None:
        known = self._known.setdefault(peer, _Known())
        self._add(known.counts, -1)
        self._add(counts, 1)
        self._sealed += sealed - known.sealed
        known.counts, known.sealed, known.version = counts, sealed, known.version + 1

    def forget(self, peer: str) -> None:
        known = self._known.pop(peer, None)
        if known is not None:
            self._add(known.counts, -1)
            self._sealed -= known.sealed

    def version(self, peer: str) -> int:
        """Changes with every report of this peer."""
        known = self._known.get(peer)
        return known.version if known else 0

    def is_sealed(self, peer: str) -> bool:
        known = self._known.get(peer)
        return known is not None and known.sealed

    @property
    def sealed_peers(self) -> int:
        """Peers whose counts were taken after they stopped taking new rows."""
        return self._sealed

    def ordered(self, peer: str, unit: str, units: int) -> None:
        self._ordered[peer, unit] += units
        if not self._ordered[peer, unit]:
            del self._ordered[peer, unit]

    def granted(self, peer: str, unit: str, units: int, short: bool) -> None:
        """The peer's counts are older than a grant of it: lower them. A peer that gave less than
        its counts said has nothing ready, until it reports."""
        known = self._known.get(peer)
        if known is None:
            return
        old = known.counts
        ready = 0 if short else max(0, old.ready(unit) - units)
        remaining = max(0, old.remaining(unit) - units)
        new = (
            replace(old, ready_rows=ready, remaining_rows=remaining)
            if unit == "rows"
            else replace(old, ready_groups=ready, remaining_groups=remaining)
        )
        self._add(old, -1)
        self._add(new, 1)
        known.counts = new

    def ready(self, unit: str) -> int:
        """Units that may be ordered, over all peers."""
        if not self._ordered:
            return self._ready[unit]
        taken = sum(
            min(count, self._known[peer].counts.ready(unit))
            for (peer, of), count in self._ordered.items()
            if of == unit and peer in self._known
        )
        return self._ready[unit] - taken

    def remaining(self, unit: str) -> int:
        return self._remaining[unit]

    def outstanding(self, unit: str) -> int:
        return self._outstanding[unit]

    def ready_at(self, peer: str, unit: str) -> int:
        known = self._known.get(peer)
        if known is None:
            return 0
        return max(0, known.counts.ready(unit) - self._ordered[peer, unit])

    def suppliers(self, unit: str, first: str) -> Iterator[tuple[str, int]]:
        """Peers with ready units: `first`, then the fullest, so that few peers are touched."""
        own = self.ready_at(first, unit)
        if own:
            yield first, own
        others = [
            (-ready, peer)
            for peer in self._known
            if peer != first and (ready := self.ready_at(peer, unit))
        ]
        heapq.heapify(others)
        while others:
            ready, peer = heapq.heappop(others)
            yield peer, -ready

    def _add(self, counts: Counts, sign: int) -> None:
        for unit in ("rows", "groups"):
            self._ready[unit] += sign * counts.ready(unit)
            self._remaining[unit] += sign * counts.remaining(unit)
            self._outstanding[unit] += sign * counts.outstanding(unit)
