"""The names of rows that a partition lost with a peer, numbered as its shard lost them.

Sans-I/O. Kept for producers, who make such rows again. Bounded: the oldest names go first, and
whoever asks for them is told how many those were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from dataplane.wire.limits import MAX_LOST_PER_MESSAGE
from dataplane.wire.tables import Name

MAX_KEPT = 65_536


class LostNames:
    """`total`: how many rows were lost."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self.total = 0
        self._names: deque[Name] = deque(maxlen=max_kept)

    def note(self, names: Sequence[Name]) -> None:
        self.total += len(names)
        self._names.extend(names)

    def after(self, number: int) -> tuple[list[Name], int, int]:
        """What follows the first `number` rows, as much as one message takes.

        Returns (names, the number to ask with next, how many names were forgotten in between)."""
        first = self.total - len(self._names)
        start = min(max(number, first), self.total)
        names = list(islice(self._names, start - first, start - first + MAX_LOST_PER_MESSAGE))
        return names, start + len(names), max(0, start - number)

    def latest(self) -> list[Name]:
        """The names of those lost last, as many as one message takes."""
        return self.after(self.total - MAX_LOST_PER_MESSAGE)[0]

    def __repr__(self) -> str:
        return f"<LostNames {self.total} rows, {len(self._names)} kept>"
