"""A peer's side of GPU memory, which it loads by name if it has device arenas.

| idea | file |
|---|---|
| reservations in device arenas, and copies of values in the host arena | arenas |
| pulls from devices of other peers to devices here | pulls |
"""

from __future__ import annotations

from dataplane.gpu.host_memory import HostMemory
from dataplane.gpu.peer.arenas import DeviceArenas, devices_of
from dataplane.gpu.peer.pulls import DevicePulls
from dataplane.launch.values import DeviceMemory
from dataplane.peer.host import Host
from dataplane.peer.pull.pulls import Pulls
from dataplane.peer.room.admission import Room
from dataplane.peer.room.devices import Read


class PeerDevices:
    """The devices of one peer, and what it does for them."""

    def __init__(self, wanted: DeviceMemory) -> None:
        """wanted: the memory of each device. Raises DeviceMissing if there is no device, or no
        library for it."""
        self._nbytes = wanted.nbytes
        self._devices = devices_of(wanted)

    def memory(self, arena_bytes: int) -> HostMemory:
        """Return the bookkeeping of a host arena of this size, and of the device arenas."""
        self._memory = HostMemory(arena_bytes)
        return self._memory

    def arenas(self, host: Host, room: Room, from_disk: Read | None) -> DeviceArenas:
        """Return the arenas, allocated. Raises DeviceMissing if a device has too little memory."""
        return DeviceArenas(self._memory, self._devices, self._nbytes, host, room, from_disk)

    def pulls(self, pulls: Pulls) -> DevicePulls:
        """Return the pulls to the arenas."""
        return DevicePulls(pulls)
