"""What a peer with device arenas does for them, as the rest of the peer calls it. A peer without
any has `Devices` itself, and one with some has the subclass in `dataplane.gpu.peer`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dataplane.errors import ProtocolError
from dataplane.memory.admission import Admission
from dataplane.metadata.tables.references import Array
from dataplane.peer.room.admission import Units

Read = Callable[[Array, Array], Awaitable[None]]


class Devices:
    """The memories of a peer beside its host arena: none."""

    def __init__(self, from_disk: Read | None) -> None:
        """from_disk: reads from the spill file, if there is one."""
        self._read_disk = from_disk

    def at_once(
        self, number: int, holder: int, admission: Admission, units: Units
    ) -> tuple[int, Array] | None:
        """As `Room.at_once`, on the device of this number, from 1. None if it is full now, or
        too small."""
        raise ProtocolError(
            f"invalid device arena {number}: this peer has no device arena of this number. "
            "Install the same dataplane release everywhere"
        )

    async def read(self, ranges: Array, dest: Array) -> None:
        """Copy all bytes of these ranges, which are not in the host arena, to these offsets of it.
        Raises RowsGone or DeviceMissing."""
        assert self._read_disk is not None
        await self._read_disk(ranges, dest)
