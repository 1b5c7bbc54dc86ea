"""How many bytes the claims of this host may still bring here from other hosts.

What a claim was granted counts until its bytes are here, all of it or none: a claim that waits for
room holds its rows and no room, so that no two wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from dataplane.metadata.shard.pull_credit import pulled_per_row, rounding
from dataplane.peer.host import Host
from dataplane.peer.room.admission import Room
from dataplane.peer.rows import flat_values
from dataplane.wire.limits import ABSENT
from dataplane.wire.tables import INLINE, Table


class Credit:
    """Bytes promised to claims, by a number that the caller chose for each."""

    def __init__(self, host: Host, room: Room) -> None:
        self._host = host
        self._promised: dict[int, int] = {}
        self._waiting: dict[int, tuple[int, asyncio.Future[None]]] = {}
        self.on_wait: list[Callable[[], None]] = []
        """called when a claim begins to wait"""
        room.on_room.append(self.look)

    def __repr__(self) -> str:
        return f"<Credit {self._promised} promised, {len(self._waiting)} wait>"

    def __len__(self) -> int:
        """Claims that wait for room."""
        return len(self._waiting)

    def room(self) -> int:
        """How many bytes may be granted now."""
        return max(0, self._host.space.pullable_bytes - sum(self._promised.values()))

    def promise(self, number: int, nbytes: int) -> bool:
        """Whether so many bytes may come for this claim; then they count."""
        if nbytes > self.room():
            return False
        self._promised[number] = nbytes
        return True

    def back(self, number: int) -> None:
        """The claim's bytes are here, or will not come."""
        if self._promised.pop(number, 0):
            self.look()

    def look(self) -> None:
        """Room came back: those who have waited longest get theirs."""
        for number, (nbytes, turn) in self._waiting.items():
            if not turn.done() and self.promise(number, nbytes):
                turn.set_result(None)

    async def wait(self, number: int, nbytes: int, timeout_s: float | None) -> bool:
        """Until it is promised; False when the time is up. To be given `back` either way."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[number] = nbytes, turn
        for told in self.on_wait:
            told()
        try:
            await asyncio.wait([turn], timeout=timeout_s)
            return turn.done()
        finally:
            del self._waiting[number]

    def why(self, needed_bytes: int) -> tuple[str, dict[str, Any]]:
        """What a claim waits for that waits for room, and the figures."""
        stats = self._host.space.stats()
        may, pinned = self.room(), stats["pinned_bytes"]
        return (
            f"the next rows need {needed_bytes} bytes of other hosts here and {may} may be pulled "
            f"now ({pinned} B are in view or being read, {stats['used_bytes']} B used of "
            f"{stats['size_bytes']}): let go of batches and arrays that were read",
            {"needed_bytes": needed_bytes, "credit_bytes": may, "pinned_bytes": pinned},
        )

    def of(self, table: Table) -> int:
        """What a granted table brings to this host."""
        near = (self._host.address, INLINE.peer)
        here = {code for code, owner in enumerate(table.owners) if owner.peer in near}
        if len(here) == len(table.owners):
            return 0
        flat = flat_values(table.columns)
        far = flat[~np.isin(flat["owner"], [*here, ABSENT])]
        rows = np.zeros(len(far), np.intp)
        nbytes = int(pulled_per_row(rows, far, 1)[0])
        return nbytes + rounding(far) if nbytes else 0
