"""When a connection of the local door is read, and why not at the moment.

A larger frame is read when all that are on their way have room. One that stops on its way gives its
room to others: its sender may be frozen, and what it holds must not end for that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from dataplane.transport.limiter import ResourceLimiter

FRAME_S = 30.0
"""How long a larger frame keeps the room that it was given while it arrives."""


class Inflow:
    """Of one connection."""

    def __init__(self, intake: ResourceLimiter) -> None:
        self.transport: asyncio.Transport | None = None
        self._intake = intake
        self._arriving: asyncio.Event | None = None
        """set when the larger frame that is coming in is whole"""
        self._held: set[str] = set()

    @property
    def is_arriving(self) -> bool:
        """Whether a larger frame is on its way."""
        return self._arriving is not None

    def let_in(self, nbytes: int) -> Coroutine[Any, Any, None]:
        """A larger frame begins: to be run until it is whole."""
        self._arriving = asyncio.Event()
        return self._let_in(nbytes, self._arriving)

    async def _let_in(self, nbytes: int, whole: asyncio.Event) -> None:
        self.hold("no room")
        await self._intake.acquire(nbytes)
        try:
            self.go_on("no room")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(whole.wait(), FRAME_S)
        finally:
            self._intake.release(nbytes)

    def arrived(self) -> None:
        """A frame is whole, or none comes any more."""
        if self._arriving is not None:
            self._arriving.set()
            self._arriving = None

    def hold(self, why: str) -> None:
        if not self._held and self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()
        self._held.add(why)

    def go_on(self, why: str) -> None:
        if why not in self._held:
            return
        self._held.discard(why)
        if not self._held and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()
