"""When the time of an operation is over: one deadline from the caller's timeout= to the socket.

Runs in the client, without I/O.
"""

from __future__ import annotations

import math
import time

from dataplane.client import arguments
from dataplane.errors import DeadlineExceeded


class Deadline:
    """timeout_s: as the caller passed it; None: no limit. until: the same on the monotonic clock,
    `math.inf` for no limit."""

    __slots__ = ("timeout_s", "until")

    def __init__(self, timeout_s: float | None) -> None:
        """InvalidCall unless it is a number of seconds or None. A negative one has passed."""
        self.timeout_s = arguments.seconds(timeout_s, "timeout")
        limit_s = math.inf if self.timeout_s is None else max(0.0, self.timeout_s)
        self.until = time.monotonic() + limit_s

    def check(self, doing: str) -> None:
        """DeadlineExceeded when it has passed."""
        if self.until <= time.monotonic():
            raise DeadlineExceeded(
                f"{doing} did not finish within {self.timeout_s} s: pass a longer timeout=",
                limit_s=self.timeout_s,
            )

    def left(self, doing: str) -> float | None:
        """Seconds left, None for no limit. DeadlineExceeded when none are."""
        self.check(doing)
        return None if self.timeout_s is None else self.until - time.monotonic()
