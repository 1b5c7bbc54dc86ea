"""Slots in the order in which they were last used, in columns.

Runs in the peer, under the cache of pulled copies. A use is one more entry at the end of a line,
and an entry that a later use has overtaken is passed over, so that neither a use nor taking the
oldest looks at all the others.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.intp]

_FIRST_ROWS = 1024


class Recency:
    """Numbers of slots, from 0; what is not in line was never used or was forgotten."""

    def __init__(self) -> None:
        self._clock = 0
        self._used_at = np.zeros(_FIRST_ROWS, np.int64)  # by slot; 0: not in line
        self._line = np.zeros(_FIRST_ROWS, np.intp)
        self._ticks = np.zeros(_FIRST_ROWS, np.int64)
        self._head = self._tail = 0

    def use(self, slots: Slots) -> None:
        """These different slots were used now, all at once."""
        count = len(slots)
        if not count:
            return
        self._make_room(int(slots.max()) + 1, count)
        self._clock += 1
        self._used_at[slots] = self._clock
        end = self._tail + count
        self._line[self._tail : end] = slots
        self._ticks[self._tail : end] = self._clock
        self._tail = end

    def forget(self, slots: Slots) -> None:
        """They are in line no longer."""
        self._used_at[slots] = 0

    def take(self, most: int) -> Slots:
        """Up to so many of those used longest ago, out of the line; some may be left where fewer
        come, unless none does."""
        while self._head < self._tail:
            end = min(self._head + most, self._tail)
            entries = self._line[self._head : end]
            slots: Slots = entries[self._used_at[entries] == self._ticks[self._head : end]]
            self._head = end
            if len(slots):
                return slots
        return np.zeros(0, np.intp)

    def put_back(self, slots: Slots) -> None:
        """The last of those that were taken just now stay the oldest, in their order."""
        start = self._head - len(slots)
        self._line[start : self._head] = slots
        self._ticks[start : self._head] = self._used_at[slots]
        self._head = start

    def _make_room(self, slots: int, more: int) -> None:
        if slots > len(self._used_at):
            longer = max(slots, 2 * len(self._used_at)) - len(self._used_at)
            self._used_at = np.concatenate((self._used_at, np.zeros(longer, np.int64)))
        if self._tail + more > len(self._line):
            self._move_up(more)

    def _move_up(self, more: int) -> None:
        """Leaves out what was overtaken. The line is at most half full then, so that this costs
        each use a constant share."""
        line, ticks = self._line[self._head : self._tail], self._ticks[self._head : self._tail]
        last = self._used_at[line] == ticks
        line, ticks = line[last], ticks[last]
        rows = max(2 * (len(line) + more), _FIRST_ROWS)
        self._line, self._ticks = np.zeros(rows, np.intp), np.zeros(rows, np.int64)
        self._line[: len(line)], self._ticks[: len(line)] = line, ticks
        self._head, self._tail = 0, len(line)
