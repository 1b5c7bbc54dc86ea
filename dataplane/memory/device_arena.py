"""A device arena: a pool of a GPU that the peer owns, with the books of the host arena.

Runs in the peer. Pages are never looked at here: allocation, classes, frees are `Space`'s, names,
references and pins of ranges are in the one table of the host. Addresses begin at `base`, behind
the host arena's and those of the devices before, so that no record needs to say which memory it is
of. A client tells of what it wrote when its copy is done, so a value that is there is whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import ProtocolError
from dataplane.memory.admission import DEFAULT_SHARES
from dataplane.memory.device import Device, PoolHandle
from dataplane.memory.extents import Bytes, Mask, Records, page_up
from dataplane.memory.ranges import DEVICE, Counts, Freed, Ranges
from dataplane.memory.room import Piece
from dataplane.memory.space import Space

_MORE = ("cached_bytes", "largest_free_bytes", "classes")
POLL_S = 0.0002
"""How often a thread that waits for a copy looks."""


class PoolSpace(Space):
    """The space of one pool. `number`: 1 for the host's first device."""

    def __init__(
        self,
        size_bytes: int,
        shares: tuple[float, float, float],
        ranges: Ranges,
        base: int,
        number: int,
    ) -> None:
        super().__init__(size_bytes, shares, ranges)
        self.base = base
        self._kind = number * DEVICE

    def holds_addresses(self, starts: Bytes) -> Mask:
        """Which of these addresses are this pool's."""
        inside: Mask = (starts >= self.base) & (starts < self.base + self.size_bytes)
        return inside

    def release(self, ranges: Records, counts: Counts = 1) -> int:
        """Of ranges that are all in this pool: copies that its cache lets go of."""
        return self.take_back(self.ranges.release(ranges, counts))

    def take_back(self, freed: Freed) -> int:
        """Stretches that ranges of this pool left are free; their bytes."""
        starts = freed.offsets - np.uint64(self.base)
        return self._freed(freed._replace(offsets=starts, admissions=freed.admissions % DEVICE))

    # addresses outside, offsets in the pool inside

    def _pieces(self, extents: Records) -> tuple[Bytes, Bytes]:
        if not self.holds_addresses(extents["offset"]).all():
            raise ProtocolError("extents of several memories where those of one device belong")
        inside = extents.copy()
        inside["offset"] -= np.uint64(self.base)
        return super()._pieces(inside)

    def _grant(self, holder: int, admission: int, pieces: list[Piece]) -> Records:
        extents = super()._grant(holder, admission, pieces)
        extents["offset"] += np.uint64(self.base)
        return extents

    def _add(self, starts: Bytes, lengths: Bytes, refs: Counts, admission: int) -> Records:
        return super()._add(starts + np.uint64(self.base), lengths, refs, admission + self._kind)


class DeviceArena:
    """`nbytes` of a device, rounded up to whole pages."""

    def __init__(
        self,
        device: Device,
        nbytes: int,
        ranges: Ranges,
        base: int,
        number: int = 1,
        shares: tuple[float, float, float] = DEFAULT_SHARES,
    ) -> None:
        self.device = device
        self.space = PoolSpace(page_up(nbytes), shares, ranges, base, number)
        self._pool = device.allocate(self.space.size_bytes)
        self.staged_bytes = 0
        self.overflowed_bytes = 0
        """of values for which there was no room here, and which went to the host arena"""
        """read by way of the host, by clients without the device and by other hosts"""

    def __repr__(self) -> str:
        return f"<DeviceArena {self.device.identity} {self.space}>"

    @property
    def handle(self) -> PoolHandle:
        """For the clients of this host."""
        return self._pool.handle

    def fetch(self, starts: Bytes, lengths: Bytes, targets: Bytes) -> None:
        """Copy values to these addresses of host memory. For a thread: it returns when they are
        there. DeviceMissing where the device fails."""
        first = self._address(0)
        places = zip(targets.tolist(), starts.tolist(), lengths.tolist(), strict=True)
        self._copied((target, first + start, length) for target, start, length in places)
        self.staged_bytes += int(lengths.sum())

    def write(self, start: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy host memory there, as `fetch` copies from there."""
        self._copied([(self._address(start), data.ctypes.data, data.nbytes)])

    def read(self, start: int, into: npt.NDArray[np.uint8]) -> None:
        """As `fetch`, for the peer itself: it does not count."""
        self._copied([(into.ctypes.data, self._address(start), into.nbytes)])

    def _address(self, start: int) -> int:
        return self._pool.address - self.space.base + start

    def _copied(self, copies: Iterable[tuple[int, int, int]]) -> None:
        event = self.device.event()
        try:
            for copy in copies:
                self.device.copy(*copy)
            event.record()
            while not event.done():
                time.sleep(POLL_S)
        finally:
            event.close()

    def figures(self) -> dict[str, Any]:
        """The device's name, and in bytes: size = used + granted + free, exactly; staged: read by
        way of the host since the start."""
        figures = self.space.figures()
        kept = ("size_bytes", "used_bytes", "granted_bytes", "quarantined_bytes", "free_bytes")
        return {
            "device": self.device.identity,
            "kind": self.device.kind,
            **{name: figures[name] for name in (*kept, *_MORE)},
            "staged_bytes": self.staged_bytes,
            "overflowed_bytes": self.overflowed_bytes,
        }

    def close(self) -> None:
        """Frees the pool."""
        self._pool.close()
        self.device.close()
