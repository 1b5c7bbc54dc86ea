"""Device arenas at the peer: reservations there for clients, and copies in the host arena for
readers that cannot map a device: other clients, other hosts, checkpoints.

Such a copy is cached like one of a spilled value, as long as there is space.
"""

from __future__ import annotations

import numpy as np

from dataplane.errors import DeviceMissing, ValueTooLarge
from dataplane.gpu import registry
from dataplane.gpu.device import Device
from dataplane.gpu.host_memory import HostMemory
from dataplane.launch.values import MAX_DEVICES, DeviceMemory
from dataplane.memory.admission import Admission
from dataplane.metadata.tables.references import Array
from dataplane.peer.host import Host
from dataplane.peer.room.admission import Room, Units
from dataplane.peer.room.devices import Devices, Read

DEVICE_SHARES = (0.70, 0.30, 0.0)
"""By admission class: nothing is pulled into a device."""


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


class DeviceArenas(Devices):
    """The device arenas of one peer."""

    def __init__(
        self,
        memory: HostMemory,
        devices: list[Device],
        nbytes: int,
        host: Host,
        room: Room,
        from_disk: Read | None,
    ) -> None:
        """nbytes: of each arena. Raises DeviceMissing if a device has too little memory."""
        super().__init__(from_disk)
        self._memory, self._host, self._room = memory, host, room
        for device in devices:
            memory.add_device(device, nbytes, DEVICE_SHARES)

    def at_once(
        self, number: int, holder: int, admission: Admission, units: Units
    ) -> tuple[int, Array] | None:
        """See `Devices.at_once`."""
        arenas = self._memory.devices
        if not 0 < number <= len(arenas):
            return super().at_once(number, holder, admission, units)
        try:
            count, extents = arenas[number - 1].space.reserve(holder, admission, units)
        except ValueTooLarge:
            return None
        return (count, extents) if count else None

    async def read(self, ranges: Array, dest: Array) -> None:
        """See `Devices.read`."""
        memory = self._memory
        memory.hold(ranges)
        try:
            numbers = memory.on_device(ranges)
            for number in np.unique(numbers).tolist():
                some = numbers == number
                if number:
                    await self._fetch(number, ranges[some], dest[some])
                else:
                    await super().read(ranges[some], dest[some])
        finally:
            self._room.release(ranges)

    async def _fetch(self, number: int, ranges: Array, dest: Array) -> None:
        extents = self._memory.ranges.extents(ranges)
        targets = dest + np.uint64(self._host.arena.address)
        fetch = self._memory.devices[number - 1].fetch
        await self._host.threads.run(fetch, extents["offset"], extents["length"], targets)
