"""Refused connections: always counted, and logged at most once a second.

A stranger can connect any number of times, and must not be able to fill a disk with log lines.
"""

from __future__ import annotations

import logging
import time

PERIOD_S = 1.0


class Refusals:
    """The refusals of one listener. Several threads use it, so a logged count may be low by one."""

    def __init__(self, log: logging.Logger, door: str) -> None:
        self.total = 0
        self._log = log
        self._door = door
        self._logged = 0
        self._quiet_until = 0.0

    def count(self, why: object) -> None:
        """Count a refusal. Log `why`, and the number of unlogged refusals, at most once a
        second."""
        self.total += 1
        now = time.monotonic()
        if now < self._quiet_until:
            return
        self._quiet_until = now + PERIOD_S
        unlogged = self.total - self._logged - 1
        self._logged = self.total
        more = f" ({unlogged} more refused since the previous line)" if unlogged else ""
        self._log.warning("%s: refused a connection: %s%s", self._door, why, more)
