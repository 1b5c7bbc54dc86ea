"""Calls of clients whose time is up: they are answered all the same, whatever their handlers do.

At the local door, one for each connection. Never ends what a handler does: that goes on, and what
its late answer would hand out comes back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from dataplane.errors import ClaimTimeout, DataplaneError, DeadlineExceeded
from dataplane.wire.messages import Admit, Claim, Losses, Request, Wait

AFTER_S = 0.4
"""A call that waited for rows until its end may still take so long to bring their values, or to
find out why there are none."""
LATE_S = 0.1
"""A call has so long after that to say by itself why it did not end. The client waits longer, so
that it is told rather than left."""

TURNS = 20
"""... and so many turns of the event loop: where this process got no processor for longer, all that
was due meanwhile is due at once, and the call shall not be late only because of that."""


_WAITS_FOR_ROWS = (Claim, Wait, Losses, Admit)
"""What says itself how long it waits."""


def limit_s(request: Request) -> float:
    """How long a call may take, from its arrival on."""
    if isinstance(request.body, _WAITS_FOR_ROWS):
        waits_ms = request.body.timeout_ms
        return waits_ms / 1000 + AFTER_S if waits_ms >= 0 else math.inf
    return request.deadline_ms / 1000 if request.deadline_ms else math.inf


class Overdue:
    """answer: called with the id of a call that is late, and what its client is told."""

    def __init__(self, peer: str, answer: Callable[[int, DataplaneError], object]) -> None:
        self._peer = peer
        self._answer = answer
        self._timers: dict[int, asyncio.Handle] = {}
        self._late: set[int] = set()

    def began(self, request: Request) -> None:
        left_s = limit_s(request)
        if left_s < math.inf:
            loop = asyncio.get_running_loop()
            self._timers[request.rid] = loop.call_later(left_s + LATE_S, self._wait, request, TURNS)

    def ended(self, request: Request) -> bool:
        """Whether its client was told already that it is late."""
        timer = self._timers.pop(request.rid, None)
        if timer is not None:
            timer.cancel()
        late = request.rid in self._late
        self._late.discard(request.rid)
        return late

    def _wait(self, request: Request, turns: int) -> None:
        if turns:
            loop = asyncio.get_running_loop()
            self._timers[request.rid] = loop.call_soon(self._wait, request, turns - 1)
        else:
            self._is_late(request)

    def _is_late(self, request: Request) -> None:
        del self._timers[request.rid]
        self._late.add(request.rid)
        kind = ClaimTimeout if isinstance(request.body, Claim | Wait | Admit) else DeadlineExceeded
        failure = kind(
            f"{type(request.body).__name__} did not end within {limit_s(request):g} s at peer "
            f"{self._peer!r}, where it may still take effect: give a longer timeout=, or repeat it",
            peer=self._peer,
            limit_s=limit_s(request),
        )
        self._answer(request.rid, failure)
