"""Whether this peer may answer for its shards: it must be sure that nobody else does."""

from __future__ import annotations

import asyncio
import math

from dataplane.errors import Unavailable
from dataplane.peer.host import Host

LEASE_S = 1.0
"""A peer without a backup in sync serves so long after the authority's last word. Less than it
takes the authority to call somebody lost who it cannot reach."""
POLL_S = 0.1


class Serving:
    def __init__(self, host: Host) -> None:
        self.host = host
        self.heard: float | None = None
        """when it was asked what the authority answered last (monotonic); None: nothing yet"""
        self.authority = ""
        """where that is, for messages"""
        self.waiting = 0
        """who waits until this peer is sure, and has not gone on yet: nobody overtakes them"""
        self._line = asyncio.Lock()

    def is_sure(self) -> bool:
        if self.heard is None:
            return True
        if self.host.address not in self.host.roster.members:
            return False  # it joins, and others have the roster with it already
        backup, in_sync = self.host.roster.backup_of(self.host.address)
        return (backup is not None and in_sync) or self.host.now() - self.heard < LEASE_S

    async def until_sure(self, until: float) -> None:
        """Who waits goes on in the order in which they came. Unavailable when the authority is away
        for so long."""
        if self.is_sure() and not self.waiting:
            return
        left_s = until - self.host.now()
        self.waiting += 1
        try:
            async with asyncio.timeout(left_s if math.isfinite(left_s) else None), self._line:
                while not self.is_sure():
                    await asyncio.sleep(POLL_S)
        except TimeoutError as exc:
            raise Unavailable(
                f"this peer has no backup in sync and the authority{self.authority} does not "
                "answer: start it again, or check the network between the two",
            ) from exc
        finally:
            self.waiting -= 1
