"""Deadlines: one deadline per operation, from the caller's timeout= to the socket.

Runs in the client, without I/O.
"""

from __future__ import annotations

import math
import time

from dataplane.client import arguments
from dataplane.errors import DeadlineExceeded


class Deadline:
    """The deadline of one operation. timeout_s: as the caller passed it; None: no limit. until: the
    time on the monotonic clock; `math.inf`: no limit."""

    __slots__ = ("timeout_s", "until")

    def __init__(self, timeout_s: float | None) -> None:
        """Raise InvalidCall unless `timeout_s` is a number or None. A negative one is over
        already."""
        self.timeout_s = limit_s = arguments.seconds(timeout_s, "timeout")
        if limit_s is None:
            self.until = math.inf
        else:
            self.until = time.monotonic() + (limit_s if limit_s > 0 else 0.0)

    def check(self, doing: str) -> None:
        """Raise DeadlineExceeded if the deadline has passed. doing: names the operation."""
        if self.until <= time.monotonic():
            raise DeadlineExceeded(
                f"{doing} did not finish within {self.timeout_s} s: pass a longer timeout=",
                limit_s=self.timeout_s,
            )

    def left(self, doing: str) -> float | None:
        """Return the seconds left, or None for no limit. Raise DeadlineExceeded if none are
        left."""
        self.check(doing)
        return None if self.timeout_s is None else self.until - time.monotonic()
