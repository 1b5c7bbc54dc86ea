"""What a door refuses, counted always and logged at most once a second.

A stranger decides how often he is refused, and must not decide how much is written to a disk.
"""

from __future__ import annotations

import logging
import time

PERIOD_S = 1.0


class Refusals:
    """Of one door; used by several threads, so a count may be late by one."""

    def __init__(self, log: logging.Logger, door: str) -> None:
        self.total = 0
        self._log = log
        self._door = door
        self._told = 0
        self._quiet_until = 0.0

    def count(self, why: object) -> None:
        """One more. `why` is logged when the last line is a second old, with the number since."""
        self.total += 1
        now = time.monotonic()
        if now < self._quiet_until:
            return
        self._quiet_until = now + PERIOD_S
        unsaid = self.total - self._told - 1
        self._told = self.total
        more = f" ({unsaid} more refused since the previous line)" if unsaid else ""
        self._log.warning("%s: refused a connection: %s%s", self._door, why, more)
