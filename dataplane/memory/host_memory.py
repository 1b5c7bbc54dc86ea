"""The memory of a host: its arena and, behind that in one space of addresses, its device arenas.

Runs in the peer, without I/O. One table of ranges serves all, so that pins, references, refs and
the directory know no second kind; only who writes and who reads bytes asks which memory an address
is of. A peer without device arenas has a plain `Space` instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.memory.admission import DEFAULT_SHARES
from dataplane.memory.device import Device
from dataplane.memory.device_arena import DeviceArena
from dataplane.memory.extents import Mask, Records
from dataplane.memory.holder import Holder
from dataplane.memory.ranges import DEVICE, SPILLED, Counts, Freed
from dataplane.memory.space import Space
from dataplane.memory.spilled import DISK
from dataplane.wire.records import RANGE, U4, U8, joined


class HostMemory(Space):
    """A host arena of `size_bytes` with device arenas. Of clients it is known which devices they
    read in place: of all other values on a device only copies can be read."""

    def __init__(
        self, size_bytes: int, shares: tuple[float, float, float] = DEFAULT_SHARES
    ) -> None:
        super().__init__(size_bytes, shares)
        self.devices: list[DeviceArena] = []
        self._readers: dict[int, list[int]] = {}

    def add_device(
        self,
        device: Device,
        nbytes: int,
        shares: tuple[float, float, float] = DEFAULT_SHARES,
    ) -> DeviceArena:
        """One more arena, on this device. DeviceMissing where it has no such memory."""
        base = self.size_bytes + sum(arena.space.size_bytes for arena in self.devices)
        number = len(self.devices) + 1
        arena = DeviceArena(device, nbytes, self.ranges, base, number, shares)
        self.devices.append(arena)
        return arena

    def reads_in_place(self, holder: int, numbers: Iterable[int]) -> None:
        """This client has opened these pools (1 is the first)."""
        self._readers[holder] = [SPILLED + DEVICE * number for number in numbers]

    def first_read(self, holder: int) -> int:
        """The pool that this client works with, of those that it reads in place; 0: none."""
        kinds = self._readers.get(holder)
        return kinds[0] // DEVICE if kinds else 0

    # which memory

    @property
    def all_here(self) -> bool:
        return False

    def away(self, ranges: Records, holder: int = 0) -> Mask:
        kinds = self.ranges.kinds(ranges)
        away: Mask = kinds >= SPILLED
        if holder in self._readers and np.count_nonzero(away):
            away &= ~np.isin(kinds | SPILLED, self._readers[holder])
        return away

    def in_place(self, ranges: Records, holder: int) -> Mask:
        in_place: Mask = (self.on_device(ranges) > 0) & ~self.away(ranges, holder)
        return in_place

    def on_device(self, ranges: Records) -> npt.NDArray[np.uint8]:
        """Per RANGE, which device arena it lies in (u1, 1 is the first); 0: in none."""
        numbers: npt.NDArray[np.uint8] = self.ranges.kinds(ranges) // DEVICE
        return numbers

    # writing

    def commit(self, holder: int, extents: Records, refs: Counts, admission: int) -> Records:
        if not len(extents) or int(extents["offset"].max()) < self.size_bytes:
            return super().commit(holder, extents, refs, admission)
        counts = np.broadcast_to(np.asarray(refs, U4), len(extents))
        ranges = np.zeros(len(extents), RANGE)
        done: list[Mask] = []
        try:
            for space, at in self._split(extents):
                commit = super().commit if space is None else space.commit
                ranges[at] = commit(holder, extents[at], counts[at], admission)
                done.append(at)
        except BaseException:
            for at in done:
                self.release(ranges[at], counts[at])
            raise
        return ranges

    def give_back(self, holder: int, extents: Records) -> None:
        for space, at in self._split(extents):
            if space is None:
                super().give_back(holder, extents[at])
            else:
                space.give_back(holder, extents[at])

    def give_back_all(self, holder: int) -> int:
        given = super().give_back_all(holder)
        return given + sum(arena.space.give_back_all(holder) for arena in self.devices)

    def _split(self, extents: Records) -> list[tuple[Space | None, Mask]]:
        """The extents by memory, None: the host arena, which also answers for those that are in no
        memory at all."""
        starts = extents["offset"]
        masks = [arena.space.holds_addresses(starts) for arena in self.devices]
        host = ~np.logical_or.reduce(masks)
        parts: list[tuple[Space | None, Mask]] = [
            (arena.space, mask) for arena, mask in zip(self.devices, masks, strict=True)
        ]
        return [(space, mask) for space, mask in [(None, host), *parts] if np.count_nonzero(mask)]

    def _freed(self, freed: Freed) -> int:
        numbers = freed.admissions // DEVICE
        if not np.count_nonzero(numbers):
            return super()._freed(freed)
        nbytes = 0
        for number in np.unique(numbers).tolist():
            part = Freed(*(one[numbers == number] for one in freed))
            if number:
                nbytes += self.devices[number - 1].space.take_back(part)
            else:
                nbytes += super()._freed(part)
        return nbytes + self.copies.drop_dead(DISK, self.ranges.alive)

    # holders

    def holds(self, holder: int) -> bool:
        return super().holds(holder) or any(arena.space.holds(holder) for arena in self.devices)

    def disown(self, holder: int) -> None:
        super().disown(holder)
        for arena in self.devices:
            arena.space.disown(holder)

    def forget(self, holder: int) -> int:
        self._readers.pop(holder, None)
        freed = super().forget(holder)
        return freed + sum(arena.space.forget(holder) for arena in self.devices)

    def _pinned_bytes(self, holders: Iterable[Holder]) -> int:
        distinct = _distinct(holders)
        return self._bytes_of(distinct[self.on_device(distinct) == 0])

    def _bytes_of(self, ranges: Records) -> int:
        return int(self.ranges.extents(ranges)["length"].sum())

    def device_figures(self) -> list[dict[str, Any]]:
        """`DeviceArena.figures` of each, with the values that live there and what of it is in
        view."""
        pinned = _distinct(self._holders.values())
        numbers = self.on_device(pinned)
        return [
            {**arena.figures(), "pinned_bytes": self._bytes_of(pinned[numbers == number])}
            for number, arena in enumerate(self.devices, 1)
        ]

    def close(self) -> None:
        """Frees the pools."""
        for arena in self.devices:
            arena.close()


def _distinct(holders: Iterable[Holder]) -> Records:
    """The ranges that any of these pinned."""
    columns = [pin for holder in holders for pin in holder.pins.values()]
    if not columns:
        return np.zeros(0, RANGE)
    distinct: Records = np.unique(joined(columns, U8)).view(RANGE)
    return distinct
