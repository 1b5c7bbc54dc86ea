"""Rates: the average over the last half minute, and the total. The caller passes the time."""

from __future__ import annotations

from collections import deque

WINDOW_S = 30
"""A batch may take seconds, so a shorter average would jump between nothing and a whole batch."""


class Recent:
    """Amounts of the last `WINDOW_S` seconds. now: the time on one monotonic clock."""

    def __init__(self, now: float) -> None:
        self._began = now
        self.total = 0
        self._amounts: deque[list[int]] = deque()
        """[second, amount], the oldest first"""
        self._newest = [-1, 0]

    def add(self, now: float, amount: int) -> None:
        self.total += amount
        second = int(now)
        if second != self._newest[0]:
            self._forget(second)
            self._newest = [second, 0]
            self._amounts.append(self._newest)
        self._newest[1] += amount

    def per_s(self, now: float) -> float:
        """The average per second over the window, or since the start if that is shorter."""
        first = self._forget(int(now))
        seconds = max(1.0, now - max(first, self._began))
        return sum(amount for _, amount in self._amounts) / seconds

    def _forget(self, second: int) -> int:
        """Drop what is older than the window. Return the first second of the window."""
        first = second - WINDOW_S + 1
        while self._amounts and self._amounts[0][0] < first:
            self._amounts.popleft()
        return first
