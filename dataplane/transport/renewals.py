"""When a read asks again because its ticket ran out at the owner.

A ticket lives on the owner's clock, from its arrival; the read's own deadline is on the reader's.
Where the owner says that a ticket is over and the read has time left, a fresh one follows, a few
times.
"""

from __future__ import annotations

import threading
import time

MAX_RENEWALS = 2
"""Of one read: an owner that lets every ticket expire is too slow for it."""


class Renewals:
    """Of one read, that ends at `deadline` (monotonic)."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._left = MAX_RENEWALS
        self._lock = threading.Lock()  # a large read asks on several connections at once

    def take(self) -> bool:
        """Whether a fresh ticket may follow one that expired."""
        with self._lock:
            if not self._left or time.monotonic() >= self._deadline:
                return False
            self._left -= 1
            return True
