"""A region as engines register it: address ranges, the arena or each device arena.

Runs in a bulk worker. Device arenas are opened by their handles, and stay mapped as long as the
region exists. Offsets are those of the region, in which device arenas follow each other. No
piece of a transfer may cross from one address range into the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.errors import DeviceMissing, TransportMissing, counted, mixed_releases
from dataplane.gpu.device import Device, Pool
from dataplane.gpu.registry import CUDA, device_of
from dataplane.transport.seam import Offsets, Region
from dataplane.wire.tables import PoolHandle

Numbers = npt.NDArray[np.intp]


class AddressRange(msgspec.Struct, array_like=True, frozen=True):
    """An address range: `nbytes` from `start` in the region are at `address` in its process.
    device: the number of its GPU there; also 0 for host memory."""

    start: int
    address: int
    nbytes: int
    device: int = 0


class AddressRanges:
    """The address ranges of a region, local or remote. Raises ProtocolError if there are none."""

    def __init__(self, ranges: Sequence[AddressRange]) -> None:
        if not ranges:
            raise mixed_releases("the region is empty: expected at least one memory range")
        self.all = tuple(sorted(ranges, key=lambda one: one.start))
        columns = [(one.start, one.address, one.nbytes, one.device) for one in self.all]
        self._starts, self._addresses, self._sizes, self._devices = np.array(columns, np.uint64).T

    def which(self, offsets: Offsets) -> Numbers:
        """Return the index of the last range that starts at or before each of these offsets."""
        found: Numbers = np.searchsorted(self._starts, offsets, side="right") - 1
        return np.maximum(found, 0)

    def descriptors(self, offsets: Offsets, nbytes: Offsets) -> npt.NDArray[np.uint64]:
        """Return a row of address, length and device for each piece. Raises ProtocolError for a
        piece outside the ranges."""
        at = self.which(offsets)
        inside = offsets - self._starts[at]
        sizes = self._sizes[at]
        outside = (offsets < self._starts[at]) | (inside > sizes)
        outside |= nbytes > sizes - np.minimum(inside, sizes)
        if outside.any():
            raise mixed_releases(
                f"this transfer has {counted(int(outside.sum()), 'piece')} outside the region's "
                "memory"
            )
        return np.column_stack([self._addresses[at] + inside, nbytes, self._devices[at]])


class OpenRegion:
    """The region of this worker. Raises TransportMissing if its device arenas cannot be opened
    here.

    by_one: the first device can access the memory of all, so the others are not opened.
    """

    def __init__(self, region: Region, by_one: bool = False) -> None:
        self._by_one = by_one
        self.devices: list[Device] = []
        self._pools: list[Pool] = []
        self.on_gpu = any(placed.handle.kind == CUDA for placed in region.pools)
        """else the region is host memory to every engine"""
        try:
            ranges = [self._opened(placed.start, placed.handle) for placed in region.pools]
        except DeviceMissing as exc:
            raise TransportMissing(
                f"cannot open the device arena: {exc.message}. Choose another --transport"
            ) from exc
        if not region.pools:
            ranges = [AddressRange(0, region.address, region.nbytes)]
        self.ranges = AddressRanges(ranges)

    def _opened(self, start: int, handle: PoolHandle) -> AddressRange:
        if self._by_one and self.devices:
            device = self.devices[0]
            pool = mapped(device, handle)
        else:
            device = device_of(handle)
            pool = device.open(handle)
            self.devices.append(device)
        self._pools.append(pool)
        return AddressRange(start, pool.address, pool.nbytes, device.number)

    def bind(self) -> None:
        """Prepare this thread for an engine that finds the devices' contexts itself."""
        for device in reversed(self.devices):
            device.bind()


def mapped(device: Device, handle: PoolHandle) -> Pool:
    """Map a pool of this device, or of another one whose memory it can access."""
    return device.open(handle) if handle.device == device.identity else device.reach(handle)
