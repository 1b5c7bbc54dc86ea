"""The memory of a host: its arena, followed by its device arenas in one address space.

Runs in the peer, without I/O. All memories share one table of chunks, so pins and references treat
them alike. Only code that reads or writes bytes asks which memory an address belongs to. A peer
without device arenas has a plain `Space` instead. A client names a value after its copy has
finished, so no reader sees a partial value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.gpu.device import Device, PoolHandle
from dataplane.memory.admission import DEFAULT_SHARES, QuotaShares
from dataplane.memory.chunks import POOL, SPILLED, Freed
from dataplane.memory.extents import Bytes, Extent, Mask, Numbers, Records, page_up
from dataplane.memory.holder import Holder
from dataplane.memory.space import Space, pinned_by
from dataplane.memory.spill import DISK
from dataplane.wire.packed import EXTENT, U8


class HostMemory(Space):
    """A host arena of `size_bytes` with device arenas. It records which devices each client reads
    in place. A client gets copies of values on all other devices."""

    def __init__(self, size_bytes: int, shares: QuotaShares = DEFAULT_SHARES) -> None:
        super().__init__(size_bytes, shares)
        self.devices: list[DeviceArena] = []
        self._readers: dict[int, list[int]] = {}

    def add_device(
        self, device: Device, nbytes: int, shares: QuotaShares = DEFAULT_SHARES
    ) -> DeviceArena:
        """Add an arena of `nbytes`, rounded up to whole pages, on this device. Raise DeviceMissing
        if the device cannot allocate it."""
        base = self.size_bytes + sum(arena.space.size_bytes for arena in self.devices)
        number = len(self.devices) + 1
        arena = DeviceArena(device, Space(page_up(nbytes), shares, self.chunks, base, number))
        self.devices.append(arena)
        return arena

    def reads_in_place(self, holder: int, numbers: Iterable[int]) -> None:
        self._readers[holder] = [SPILLED + POOL * number for number in numbers]

    def first_read(self, holder: int) -> int:
        kinds = self._readers.get(holder)
        return kinds[0] // POOL if kinds else 0

    # which memory

    @property
    def all_here(self) -> bool:
        return False

    def away(self, chunks: Numbers, holder: int = 0) -> Mask:
        kinds = self.chunks.kinds(chunks)
        away: Mask = kinds >= SPILLED
        if holder in self._readers and np.count_nonzero(away):
            for kind in self._readers[holder]:
                away &= kinds | SPILLED != kind
        return away

    def in_place(self, chunks: Numbers, holder: int) -> Mask:
        in_place: Mask = (self.on_device(chunks) > 0) & ~self.away(chunks, holder)
        return in_place

    def on_device(self, chunks: Numbers) -> npt.NDArray[np.uint8]:
        numbers: npt.NDArray[np.uint8] = self.chunks.kinds(chunks) // POOL
        return numbers

    # writing

    def commit(self, holder: int, extents: Sequence[Extent], admission: int) -> Numbers:
        if not extents or max(extents)[0] < self.size_bytes:
            return super().commit(holder, extents, admission)
        columns: Records = np.array(extents, EXTENT)
        chunks = np.zeros(len(extents), U8)
        done: list[Mask] = []
        try:
            for space, at in self._split(columns):
                commit = super().commit if space is None else space.commit
                chunks[at] = commit(holder, columns[at].tolist(), admission)
                done.append(at)
        except BaseException:
            for at in done:
                self.release(chunks[at])
            raise
        return chunks

    def give_back(self, holder: int, extents: Records) -> None:
        for space, at in self._split(extents):
            if space is None:
                super().give_back(holder, extents[at])
            else:
                space.give_back(holder, extents[at])

    def _split(self, extents: Records) -> list[tuple[Space | None, Mask]]:
        """Return the extents by memory. None: the host arena, which also gets extents outside every
        memory."""
        starts = extents["offset"]
        spaces = [arena.space for arena in self.devices]
        masks = [(starts >= s.base) & (starts < s.base + s.size_bytes) for s in spaces]
        host = ~np.logical_or.reduce(masks)
        parts = zip([None, *spaces], [host, *masks], strict=True)
        return [(space, mask) for space, mask in parts if np.count_nonzero(mask)]

    def _freed(self, freed: Freed) -> int:
        by_device: dict[int, Freed] = {}
        for one in freed:
            by_device.setdefault(one[2] // POOL, []).append(one)
        if not any(by_device):
            return super()._freed(freed)
        nbytes = 0
        for number, part in by_device.items():
            if number:
                nbytes += self.devices[number - 1].space._freed(part)
            else:
                nbytes += super()._freed(part)
        return nbytes + self.copies.drop_dead(DISK)

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
        pinned = pinned_by(holders)
        return self._bytes_of(pinned[self.on_device(pinned) == 0])

    def device_figures(self) -> list[dict[str, Any]]:
        pinned = self._pinned()
        numbers = self.on_device(pinned)
        return [
            {**arena.figures(), "pinned_bytes": self._bytes_of(pinned[numbers == number])}
            for number, arena in enumerate(self.devices, 1)
        ]

    def close(self) -> None:
        for arena in self.devices:
            arena.close()


class DeviceArena:
    """An arena on a device. space: its accounting."""

    def __init__(self, device: Device, space: Space) -> None:
        self.device = device
        self.space = space
        self._pool = device.allocate(space.size_bytes)
        self.staged_bytes = 0
        """bytes copied through the host, for clients without the device and for other hosts"""
        self.overflowed_bytes = 0
        """bytes of values written to the host arena because this arena was full"""

    def __repr__(self) -> str:
        return f"<DeviceArena {self.device.identity} {self.space}>"

    @property
    def handle(self) -> PoolHandle:
        """The handle with which clients of this host open the arena."""
        return self._pool.handle

    def fetch(self, starts: Bytes, lengths: Bytes, targets: Bytes) -> None:
        """Copy values to these addresses of host memory, and wait for the copies. Raise
        DeviceMissing if the device fails."""
        first = self._address(0)
        places = zip(targets.tolist(), starts.tolist(), lengths.tolist(), strict=True)
        copies = [(target, first + start, length, 0) for target, start, length in places]
        self.device.carry_out(copies)
        self.staged_bytes += int(lengths.sum())

    def write(self, start: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy host memory to the arena, and wait for the copy."""
        self.device.carry_out([(self._address(start), data.ctypes.data, data.nbytes, 0)])

    def read(self, start: int, into: npt.NDArray[np.uint8]) -> None:
        """Copy bytes of the arena for the peer itself, without counting them as staged."""
        self.device.carry_out([(into.ctypes.data, self._address(start), into.nbytes, 0)])

    def _address(self, start: int) -> int:
        return self._pool.address - self.space.base + start

    def figures(self) -> dict[str, Any]:
        """Return the device's name and statistics in bytes. size is exactly used + granted + free;
        staged counts bytes copied through the host since the start."""
        figures = self.space.figures()
        books = ("size_bytes", "used_bytes", "granted_bytes", "quarantined_bytes", "free_bytes")
        more = ("cached_bytes", "largest_free_bytes", "classes")
        return {
            "device": self.device.identity,
            "kind": self.device.kind,
            **{name: figures[name] for name in (*books, *more)},
            "staged_bytes": self.staged_bytes,
            "overflowed_bytes": self.overflowed_bytes,
        }

    def close(self) -> None:
        """Free the memory, and close the device."""
        self._pool.close()
        self.device.close()
