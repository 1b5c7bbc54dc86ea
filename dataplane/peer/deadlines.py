"""Answers that are waited for until a time at most, by the thousand a second, with one timer.

A timer for each would be made and cancelled with hardly one ever ringing. This one rings when the
first answer would be late, finds that it came, and is set anew for the first of those that are out.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

EARLY_S = 0.001
"""A loop counts in milliseconds, and may ring that much before."""


class Deadlines:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._awaited: dict[asyncio.Future[Any], tuple[float, Callable[[], Exception]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._rings = math.inf

    def __len__(self) -> int:
        return len(self._awaited)

    def add(self, answer: asyncio.Future[Any], until: float, late: Callable[[], Exception]) -> None:
        """Unless it is `done` by then (monotonic), it fails with what `late` makes."""
        if until == math.inf:
            return
        self._awaited[answer] = (until, late)
        if until < self._rings:
            self._set(until)

    def done(self, answer: asyncio.Future[Any]) -> None:
        """Nobody waits for it any more."""
        self._awaited.pop(answer, None)

    def _set(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left_s = max(0.0, when - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(left_s, self._ring)
        self._rings = when

    def _ring(self) -> None:
        self._timer, self._rings = None, math.inf
        now = time.monotonic() + EARLY_S
        for answer, (until, late) in list(self._awaited.items()):
            if until <= now:
                del self._awaited[answer]
                if not answer.done():
                    answer.set_exception(late())
        if self._awaited:
            self._set(min(until for until, _ in self._awaited.values()))
