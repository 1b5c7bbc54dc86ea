"""Rates: the average over the last half minute of totals that only grow. The caller passes the
time."""

from __future__ import annotations

from collections import deque

WINDOW_S = 30
"""A batch may take seconds, so a shorter average would jump between nothing and a whole batch."""


class Rate:
    """The rate of a total, from samples of it.

    now: the time on one monotonic clock. total: what it was then.
    """

    def __init__(self, now: float, total: int = 0) -> None:
        self._began = now
        self._total = total
        self._amounts: deque[list[int]] = deque()
        """(second, amount) pairs, the oldest first"""

    def sample(self, now: float, total: int) -> None:
        """Note the total. The increase since the previous sample counts as added now."""
        if total == self._total:
            return
        second, amount = int(now), total - self._total
        self._total = total
        if self._amounts and self._amounts[-1][0] == second:
            self._amounts[-1][1] += amount
        else:
            self._forget(second)
            self._amounts.append([second, amount])

    def per_s(self, now: float) -> float:
        """The average per second over the window, or since the start if that is shorter."""
        first = self._forget(int(now))
        seconds = max(1.0, now - max(first, self._began))
        return sum(amount for _, amount in self._amounts) / seconds

    def _forget(self, second: int) -> int:
        """Drop amounts older than the window. Return the first second of the window."""
        first = second - WINDOW_S + 1
        while self._amounts and self._amounts[0][0] < first:
            self._amounts.popleft()
        return first
