"""Device arenas at the peer: reservations there for clients, and copies in the host arena for
readers that cannot map a device: other clients, other hosts, checkpoints.

Such a copy is cached like one of a spilled value, as long as there is space.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from dataplane.errors import DeviceMissing, ProtocolError, ValueTooLarge
from dataplane.gpu import registry
from dataplane.gpu.device import Device
from dataplane.gpu.host_memory import HostMemory
from dataplane.launch.values import MAX_DEVICES, DeviceMemory
from dataplane.memory.admission import Admission
from dataplane.memory.space import Space
from dataplane.metadata.tables.references import Array
from dataplane.peer.host import Host
from dataplane.peer.room.admission import Room, Units

DEVICE_SHARES = (0.70, 0.30, 0.0)
"""By admission class: nothing is pulled into a device."""
Read = Callable[[Array, Array], Awaitable[None]]


def memory_of(arena_bytes: int, devices: list[Device]) -> Space:
    """Return the bookkeeping of a peer's memory: an arena of this size and these devices."""
    return HostMemory(arena_bytes) if devices else Space(arena_bytes)


def devices_of(memory: DeviceMemory) -> list[Device]:
    """Return the devices for this memory. Raises DeviceMissing if there is none, or no library
    for it."""
    kind = registry.load(memory.kind)
    numbers = memory.numbers or range(min(kind.count(), MAX_DEVICES))
    if not numbers:
        raise DeviceMissing(
            "--device-arena (or DATAPLANE_DEVICE_ARENA) needs a GPU, and this process sees none: "
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, or leave the option out"
        )
    return [kind.numbered(number) for number in numbers]


class Devices:
    """The devices of one peer, which may have none."""

    def __init__(
        self,
        host: Host,
        devices: list[Device],
        wanted: DeviceMemory | None,
        room: Room,
        from_disk: Read | None,
    ) -> None:
        """wanted: the memory of each device. from_disk: reads from the spill file, if there is
        one. Raises DeviceMissing if a device does not have that much memory."""
        self._host = host
        self._room = room
        for device in devices:
            assert isinstance(host.space, HostMemory) and wanted is not None
            host.space.add_device(device, wanted.nbytes, DEVICE_SHARES)
        self._read_disk = from_disk

    def at_once(
        self, number: int, holder: int, admission: Admission, units: Units
    ) -> tuple[int, Array] | None:
        """As `Room.at_once`, on the device of this number, from 1. None if it is full now, or
        too small."""
        arenas = self._host.space.devices
        if not 0 < number <= len(arenas):
            raise ProtocolError(
                f"invalid device arena {number}: this peer has "
                f"{len(arenas)} device arenas. Install the same dataplane release everywhere"
            )
        try:
            count, extents = arenas[number - 1].space.reserve(holder, admission, units)
        except ValueTooLarge:
            return None
        return (count, extents) if count else None

    async def read(self, ranges: Array, dest: Array) -> None:
        """Copy all bytes of these ranges to these offsets of the host arena. Raises RowsGone or
        DeviceMissing."""
        memory = self._host.space
        if not memory.devices:
            await self._from_disk(ranges, dest)
            return
        memory.hold(ranges)
        try:
            numbers = memory.on_device(ranges)
            for number in np.unique(numbers).tolist():
                some = numbers == number
                if number:
                    await self._fetch(number, ranges[some], dest[some])
                else:
                    await self._from_disk(ranges[some], dest[some])
        finally:
            self._room.release(ranges)

    async def _from_disk(self, ranges: Array, dest: Array) -> None:
        assert self._read_disk is not None
        await self._read_disk(ranges, dest)

    async def _fetch(self, number: int, ranges: Array, dest: Array) -> None:
        extents = self._host.space.ranges.extents(ranges)
        targets = dest + np.uint64(self._host.arena.address)
        fetch = self._host.space.devices[number - 1].fetch
        await self._host.threads.run(fetch, extents["offset"], extents["length"], targets)
