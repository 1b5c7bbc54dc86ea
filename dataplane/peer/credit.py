"""How many bytes the claims of this host may still bring here from other hosts.

What a claim was granted counts from the grant until its bytes are here; a grant that does not fit
is refused. A claim that waits for room holds none, so that no two wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from dataplane.errors import ValueTooLarge
from dataplane.memory.admission import Admission
from dataplane.metadata.credit import pulled_per_row, rounding
from dataplane.peer.host import Host
from dataplane.peer.rows import flat_values
from dataplane.wire.limits import ABSENT
from dataplane.wire.tables import Table


class Credit:
    """Bytes promised to claims, by a number that the caller chose for each."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._promised: dict[int, int] = {}
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self.on_wait: Callable[[], None] = lambda: None
        """called when a claim begins to wait"""

    def __repr__(self) -> str:
        return f"<Credit {self._promised} promised, {len(self._waiting)} wait>"

    def __len__(self) -> int:
        """Claims that wait for room."""
        return len(self._waiting)

    def room(self) -> int:
        """How many bytes may be granted now."""
        return max(0, self._host.space.pullable_bytes - sum(self._promised.values()))

    def promised(self, number: int) -> int:
        return self._promised.get(number, 0)

    def promise(self, number: int, nbytes: int) -> bool:
        """Whether so many more bytes may come for this claim; then they count."""
        if not nbytes:
            return True
        if nbytes > self.room():
            return False
        self._promised[number] = self.promised(number) + nbytes
        return True

    def back(self, number: int) -> None:
        """The claim's bytes are here, or will not come."""
        if self._promised.pop(number, 0):
            self.look()

    def look(self) -> None:
        """Room came back: whose turn is it?"""
        if not self._waiting:
            return
        may = self.room()
        for needed_bytes, turn in self._waiting:
            if needed_bytes <= may and not turn.done():
                turn.set_result(None)

    async def wait(self, needed_bytes: int, timeout_s: float | None) -> bool:
        """Until so much may be granted; False when the time is up."""
        if needed_bytes <= self.room():
            return True
        turn = asyncio.get_running_loop().create_future()
        waiter = (needed_bytes, turn)
        self._waiting.append(waiter)
        self.on_wait()
        try:
            await asyncio.wait([turn], timeout=timeout_s)
            return turn.done()
        finally:
            self._waiting.remove(waiter)

    def check(self, needed_bytes: int, what: str) -> None:
        """ValueTooLarge where so much can never be here at once."""
        cap = self._host.space.share_bytes[Admission.PULL]
        if needed_bytes > cap:
            raise ValueTooLarge(
                f"{what} needs {needed_bytes} bytes of other hosts here at once, and pulls may use "
                f"{cap} of this host's arena of {self._host.space.size_bytes}: claim fewer rows at "
                "a time (or with min=), or make the arena larger (--arena, DATAPLANE_ARENA)",
                needed_bytes=needed_bytes,
                cap_bytes=cap,
                arena_bytes=self._host.space.size_bytes,
                admission="pull",
            )

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
        here = {code for code, owner in enumerate(table.owners) if owner.peer == self._host.address}
        if len(here) == len(table.owners):
            return 0
        flat = flat_values(table.columns)
        far = flat[~np.isin(flat["owner"], [*here, ABSENT])]
        rows = np.zeros(len(far), np.intp)
        nbytes = int(pulled_per_row(rows, far, 1)[0])
        return nbytes + rounding(far) if nbytes else 0
