"""Who gets room in the arena, and who waits for it.

Reservations wait in one line per admission class, first come first served; they are looked at again
whenever space came back. A wait that nothing can end is recognised and raised at once; every other
ends at its deadline, with the figures of who holds the bytes. Claims that pull wait beside them,
each for all that it brings.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import BackPressure, few
from dataplane.memory.admission import Admission
from dataplane.memory.placement import place, remainder
from dataplane.metadata.shard.reasons import Subject
from dataplane.metadata.tables.references import Array, far_owners, pulled
from dataplane.peer.host import Host
from dataplane.peer.notices import Telling, Why
from dataplane.peer.rows import raw_values
from dataplane.wire.records import EXTENT
from dataplane.wire.tables import Table

SHOWN_PARTITIONS = 5

_DOING = {
    Admission.OPEN: "opening new groups",
    Admission.CONTINUE: "continuing groups",
    Admission.PULL: "pulling from other hosts or the spill file",
}

PULLER = 0
"""The holder under which the peer itself reserves room for pulls and pins ranges for others."""
Units = list[npt.NDArray[np.uint64]]


@dataclass(slots=True, eq=False)
class Waiter:
    holder: int
    admission: Admission
    units: Units
    granted: asyncio.Future[tuple[int, Array]]


class Room:
    """In the host arena. Nobody waits for room on a device."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.space = host.space
        self.on_wait: list[Callable[[], None]] = []
        """called when somebody begins to wait"""
        self.beyond: Callable[[], tuple[type[BackPressure], str]] = lambda: (BackPressure, "")
        """what ends a wait in vain, and what is to be said of where else values may go"""
        self.waited = [0] * len(Admission)
        """how many had to wait, by class"""
        self.waited_s = [0.0] * len(Admission)
        self.refused = [0] * len(Admission)
        """waits that ended in BackPressure"""
        self._lines: dict[Admission, deque[Waiter]] = {a: deque() for a in Admission}
        self._promised: dict[int, int] = {}
        """by a number that each claim has chosen"""
        self._claims: dict[int, tuple[int, asyncio.Future[None]]] = {}
        self._by_rank = [self._lines[admission] for admission in sorted(Admission, reverse=True)]

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def producers(self) -> int:
        """Puts and adds that wait for room."""
        return len(self) - len(self._lines[Admission.PULL])

    def waiting(self, admission: Admission) -> int:
        """How many reservations of this class wait now."""
        return len(self._lines[admission])

    def at_once(self, holder: int, admission: Admission, units: Units) -> tuple[int, Array] | None:
        """As `reserve`; None where it would wait."""
        if self._lines[admission]:
            return None
        count, extents = self.space.reserve(holder, admission, units)
        return (count, extents) if count else None

    def for_copies(self, sizes: npt.NDArray[np.uint64]) -> tuple[Array, Array] | None:
        """As `Space.for_copies`; None also where somebody waits for room for pulls."""
        return None if self._lines[Admission.PULL] else self.space.for_copies(sizes)

    async def reserve(
        self, holder: int, admission: Admission, units: Units, timeout_s: float
    ) -> tuple[int, Array]:
        """The first units that fit, whole, with their extents; at least one.

        ValueTooLarge at once for a unit that never fits; BackPressure when the wait ends in vain.
        """
        space = self.space
        line = self._lines[admission]
        granted = self.at_once(holder, admission, units)
        if granted is not None:
            return granted
        if line:
            space.check_units(admission, units)
        waiter = Waiter(holder, admission, units, asyncio.get_running_loop().create_future())
        line.append(waiter)

        def look() -> Why:
            return self._full(waiter, "it waits").message, {}

        began = self._host.now()
        self.waited[admission] += 1
        self._waits()
        try:
            what = f"room for {_DOING[admission]}"
            with Telling(self._host, f"call for {what}", Subject(what), look):
                async with asyncio.timeout(timeout_s):
                    return await waiter.granted
        except BaseException as exc:
            given = waiter.granted
            if given.done() and not given.cancelled() and given.exception() is None:
                space.give_back(holder, given.result()[1])  # it came as it was given up
                self.pump()
            if isinstance(exc, TimeoutError):
                raise self._back_pressure(waiter, f"no room within {timeout_s:g} s") from exc
            raise
        finally:
            self.waited_s[admission] += self._host.now() - began
            if waiter in line:
                line.remove(waiter)
                self.pump()

    async def write(
        self,
        sizes: npt.NDArray[np.uint64],
        extents: Array,
        write: Callable[[Array], Awaitable[npt.NDArray[np.bool_] | None]],
        refs: Array,
        kind: Admission,
    ) -> Array:
        """Bytes into room that the peer itself reserved, here or on a device: their RANGE records.
        Nothing is kept of what failed. write: says which have gone before they came, where that may
        be; those are of generation 0."""
        space = self.space
        try:
            dest = place(sizes, extents)
            gone = await write(dest)
            written = np.zeros(len(sizes), EXTENT)
            written["offset"], written["length"] = dest, sizes
            fresh = space.commit(PULLER, written, refs, kind)
        except BaseException:
            space.give_back(PULLER, extents)
            raise
        rest = remainder(sizes, dest, extents)
        if len(rest):
            space.give_back(PULLER, rest)
        if gone is not None and gone.any():
            self.release(fresh[gone], refs[gone])
            fresh[gone] = 0
        return fresh

    def release(self, ranges: Array, counts: Array | int = 1) -> None:
        """Fewer references; who waits gets what came free."""
        if self.space.release(ranges, counts):
            self.pump()

    def unpin(self, holder: int, pins: list[int]) -> None:
        """Copies that nobody reads any more are room as well, though no byte got free."""
        self.space.unpin(holder, pins)
        self.pump()

    def pump(self) -> None:
        """Space came back, or a waiter left: grant in order, the highest class first."""
        for line in self._by_rank:
            while line:
                waiter = line[0]
                count, extents = self.space.reserve(waiter.holder, waiter.admission, waiter.units)
                if not count:
                    break
                line.popleft()
                if not waiter.granted.done():
                    waiter.granted.set_result((count, extents))
                else:
                    self.space.give_back(waiter.holder, extents)
        self._look_at_claims()

    def _waits(self) -> None:
        for told in self.on_wait:
            told()

    def end_in_vain(self) -> None:
        """Nobody is left who could free space: BackPressure for all producers that wait."""
        writers = [w for a in (Admission.OPEN, Admission.CONTINUE) for w in self._lines[a]]
        for waiter in writers:
            if not waiter.granted.done():
                waiter.granted.set_exception(
                    self._back_pressure(
                        waiter, "nothing here is leased or can be claimed, and every client waits"
                    )
                )

    def _back_pressure(self, waiter: Waiter, why: str) -> BackPressure:
        self.refused[waiter.admission] += 1
        return self._full(waiter, why)

    def _full(self, waiter: Waiter, why: str) -> BackPressure:
        host, stats = self._host, self.space.stats()
        needed = int(waiter.units[0].sum())
        kind = waiter.admission.name.lower()
        room = stats["classes"][kind]["room_bytes"]
        held = {name: len(entry.store) for name, entry in host.entries.items() if len(entry.store)}
        largest = sorted(held, key=lambda name: -held[name])
        rows = few([f"{held[name]} of {name!r}" for name in largest], SHOWN_PARTITIONS) or "none"
        rows += f", and {len(host.lent)} values of rows at other peers" if len(host.lent) else ""
        holders: list[dict[str, Any]] = [
            {"holder": host.who(holder), "granted_bytes": granted, "pinned_bytes": pinned}
            for holder, granted, pinned in self.space.holders()
        ]
        views = "; ".join(
            f"{h['holder']} has {h['granted_bytes'] + h['pinned_bytes']} B granted or in view"
            for h in holders[:3]
        )
        longest, stretch = int(waiter.units[0].max(initial=0)), stats["largest_free_bytes"]
        if needed <= room and longest > stretch:
            why += (
                f"; what is left is in pieces: one value has {longest} B, the longest stretch that "
                f"is free is {stretch} B, between what is in use"
            )
        kind_of, beyond = self.beyond()
        return kind_of(
            f"peer {host.name!r} has no room: {needed} B are needed and {room} B are "
            f"left for {_DOING[waiter.admission]} ({stats['used_bytes']} B used, "
            f"{stats['free_bytes']} B free of {stats['size_bytes']}{beyond}); {why}. Rows here: "
            f"{rows}{'; ' if views else ''}{views}. Consume or drop rows, claim with min= where a "
            "claim waits for more rows than fit, or give the peer a larger --arena or --spill",
            needed_bytes=needed,
            room_bytes=room,
            free_bytes=stats["free_bytes"],
            arena_bytes=stats["size_bytes"],
            spilled_bytes=stats["spilled_bytes"],
            rows=held,
            holders=holders,
        )

    # claims that pull

    @property
    def starved(self) -> int:
        """Claims that wait for room."""
        return len(self._claims)

    def credit_bytes(self) -> int:
        """What claims may still bring here from other hosts."""
        return max(0, self.space.pullable_bytes - sum(self._promised.values()))

    def promise(self, claim: int, nbytes: int) -> bool:
        """Whether so many bytes may come for this claim; then they count until they are given
        `back`, all of them or none: a claim that waits for room holds its rows and no room, so
        that no two wait for each other."""
        if nbytes > self.credit_bytes():
            return False
        self._promised[claim] = nbytes
        return True

    def back(self, claim: int) -> None:
        """The claim's bytes are here, or will not come."""
        if self._promised.pop(claim, 0):
            self._look_at_claims()

    def _look_at_claims(self) -> None:
        """Those who have waited longest get theirs."""
        for claim, (nbytes, turn) in self._claims.items():
            if not turn.done() and self.promise(claim, nbytes):
                turn.set_result(None)

    async def promised(self, claim: int, nbytes: int, timeout_s: float | None) -> bool:
        """Until it is; False when the time is up. To be given `back` either way."""
        turn = asyncio.get_running_loop().create_future()
        self._claims[claim] = nbytes, turn
        self._waits()
        try:
            await asyncio.wait([turn], timeout=timeout_s)
            return turn.done()
        finally:
            del self._claims[claim]

    def why(self, needed_bytes: int) -> Why:
        """What a claim waits for that waits for room, and the figures."""
        stats, may = self.space.stats(), self.credit_bytes()
        pinned = stats["pinned_bytes"]
        return (
            f"the next rows need {needed_bytes} bytes of other hosts here and {may} may be pulled "
            f"now ({pinned} B are in view or being read, {stats['used_bytes']} B used of "
            f"{stats['size_bytes']}): let go of batches and arrays that were read",
            {"needed_bytes": needed_bytes, "credit_bytes": may, "pinned_bytes": pinned},
        )

    def needed(self, table: Table) -> int:
        """What a granted table brings to this host."""
        far = far_owners(self._host.address, table.owners)
        return pulled(far, raw_values(table.columns)) if far else 0
