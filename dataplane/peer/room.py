"""Who gets room in the arena, and who waits for it.

Reservations wait in one line per admission class, first come first served; they are looked at again
whenever space came back. A wait that nothing can end is recognised and raised at once; every other
ends at its deadline, with the figures of who holds the bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import BackPressure
from dataplane.memory.admission import Admission
from dataplane.peer.host import Host

_DOING = {
    Admission.OPEN: "opening new groups",
    Admission.CONTINUE: "continuing groups",
    Admission.PULL: "pulling from other hosts",
}
STUCK_TICKS = 3

Units = list[npt.NDArray[np.uint64]]


@dataclass(slots=True, eq=False)
class Waiter:
    holder: int
    admission: Admission
    units: Units
    granted: asyncio.Future[tuple[int, npt.NDArray[Any]]]


class Room:
    """Reservations of this peer. `stuck()`: is there nobody left who could free space?"""

    def __init__(self, host: Host, stuck: Callable[[], bool]) -> None:
        self._host = host
        self._stuck = stuck
        self._stuck_ticks = 0
        self._lines: dict[Admission, deque[Waiter]] = {a: deque() for a in Admission}

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    async def reserve(
        self, holder: int, admission: Admission, units: Units, timeout_s: float
    ) -> tuple[int, npt.NDArray[Any]]:
        """The first units that fit, whole, with their extents; at least one.

        ValueTooLarge at once for a unit that never fits; BackPressure when the wait ends in vain.
        """
        space = self._host.space
        line = self._lines[admission]
        if line:
            space.check_units(admission, units)
        else:
            count, extents = space.reserve(holder, admission, units)
            if count:
                return count, extents
        waiter = Waiter(holder, admission, units, asyncio.get_running_loop().create_future())
        line.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.granted
        except BaseException as exc:
            granted = waiter.granted
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                space.give_back(holder, granted.result()[1])  # it came as it was given up
            if isinstance(exc, TimeoutError):
                raise self._back_pressure(waiter, f"no room within {timeout_s:g} s") from exc
            raise
        finally:
            if waiter in line:
                line.remove(waiter)
                self.pump()

    def pump(self) -> None:
        """Space came back, or a waiter left: grant in order, the highest class first."""
        for admission in sorted(self._lines, reverse=True):
            line = self._lines[admission]
            while line:
                waiter = line[0]
                count, extents = self._host.space.reserve(waiter.holder, admission, waiter.units)
                if not count:
                    break
                line.popleft()
                if not waiter.granted.done():
                    waiter.granted.set_result((count, extents))
                else:
                    self._host.space.give_back(waiter.holder, extents)

    def check_stuck(self) -> None:
        """Called by the clock: raise BackPressure in the waiters of a deadlock.

        It must be seen a few times in a row: a claim that is just being met looks the same.
        """
        writers = [w for a in (Admission.OPEN, Admission.CONTINUE) for w in self._lines[a]]
        self._stuck_ticks = self._stuck_ticks + 1 if writers and self._stuck() else 0
        if self._stuck_ticks < STUCK_TICKS:
            return
        for waiter in writers:
            if not waiter.granted.done():
                waiter.granted.set_exception(
                    self._back_pressure(
                        waiter,
                        "nothing here is leased or can be claimed, and every client waits",
                    )
                )

    def _back_pressure(self, waiter: Waiter, why: str) -> BackPressure:
        host, stats = self._host, self._host.space.stats()
        needed = int(waiter.units[0].sum())
        kind = waiter.admission.name.lower()
        room = stats["classes"][kind]["room_bytes"]
        held = {name: len(entry.store) for name, entry in host.entries.items() if len(entry.store)}
        rows = ", ".join(f"{n} of {name!r}" for name, n in held.items()) or "none"
        holders: list[dict[str, Any]] = [
            {
                "holder": host.labels.get(holder, f"client {holder:x}"),
                "granted_bytes": granted,
                "pinned_bytes": pinned,
            }
            for holder, granted, pinned in host.space.holders()
        ]
        views = "; ".join(
            f"{h['holder']} has {h['granted_bytes'] + h['pinned_bytes']} B granted or in view"
            for h in holders[:3]
        )
        return BackPressure(
            f"peer {host.name!r} has no room: {needed} B are needed and {room} B are left for "
            f"{_DOING[waiter.admission]} ({stats['used_bytes']} B used, {stats['free_bytes']} B "
            f"free of {stats['size_bytes']}); {why}. Rows here: {rows}{'; ' if views else ''}"
            f"{views}. Consume or drop rows, claim with min= where a claim waits for more rows "
            "than fit, or give the peer a larger --arena",
            needed_bytes=needed,
            room_bytes=room,
            free_bytes=stats["free_bytes"],
            arena_bytes=stats["size_bytes"],
            rows=held,
            holders=holders,
        )
