"""The pools of a peer: memories besides its host arena, which clients of this host may map.

Pools are numbered from 1. A peer without pools has `Pools` itself. `dataplane.gpu.peer` has the
subclass for a peer with device arenas.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import TransportMissing, mixed_releases
from dataplane.memory.admission import Admission
from dataplane.memory.space import Space
from dataplane.peer.host import Host
from dataplane.peer.room.admission import Room, Units
from dataplane.transport.engine import BulkEngine
from dataplane.transport.registry import POOLS_ONLY
from dataplane.wire.packed import Array
from dataplane.wire.tables import Owner

if TYPE_CHECKING:
    from dataplane.peer.pull.paths import Path
    from dataplane.peer.pull.pulls import Pulls

Read = Callable[[Array, Array], Awaitable[None]]


class Pools:
    """The pools of one peer: none."""

    def memory(self, arena_bytes: int) -> Space:
        """Return the bookkeeping of a host arena of this size, and of the pools."""
        return Space(arena_bytes)

    def open(self, host: Host, room: Room, from_disk: Read | None) -> None:
        """Allocate the pools. from_disk: reads from the spill file, if there is one."""
        self._read_disk = from_disk

    def use(self, pulls: Pulls) -> None:
        """Set what copies values of other peers to the host arena."""
        self.pulls = pulls

    def free(self) -> None:
        """Free the pools."""

    # space

    @property
    def spaces(self) -> Sequence[Space]:
        """The space of each pool."""
        return []

    def at_once(
        self, number: int, holder: int, admission: Admission, units: Units
    ) -> tuple[int, Array] | None:
        """As `Room.at_once`, in the pool of this number. None if it is full now, or too small."""
        raise mixed_releases(f"this peer has no device arena {number}")

    def overflowed(self, number: int, nbytes: int) -> None:
        """Note that values for this pool are in the host arena, because the pool was full."""

    def ahead(self, holder: int, wanted: Sequence[int]) -> bytes:
        """Return the holder's next reservation, with this many bytes of each pool."""
        return b""

    def figures(self) -> list[dict[str, Any]]:
        """The statistics of each pool, and the transports to the pools of other peers."""
        return []

    # bytes

    async def read(self, chunks: Array, dest: Array) -> None:
        """Copy all bytes of these chunks, which are not in the host arena, to these offsets of it.
        Raises RowsGone or DeviceMissing."""
        assert self._read_disk is not None
        await self._read_disk(chunks, dest)

    async def write_at(self, number: int, dest: int, data: npt.NDArray[np.uint8]) -> None:
        """Write bytes at an address of this pool."""
        raise NotImplementedError

    async def read_at(self, number: int, start: int, into: npt.NDArray[np.uint8]) -> None:
        """Read bytes from an address of this pool."""
        raise NotImplementedError

    # values of other peers

    @property
    def address(self) -> str:
        """The address where other peers request values in the pools here, or ""."""
        return ""

    def transports(self) -> dict[str, Any]:
        """The settings, the transports that the worker runs, why others do not run, and the
        transport per peer."""
        return {"requested": str(self.pulls.transport), "runs": [], "missing": {}, "peers": {}}

    def check(self) -> None:
        """Raise TransportMissing if the settings require a transport for memory that this peer
        does not have."""
        choice = self.pulls.transport
        if choice.required in POOLS_ONLY:
            raise TransportMissing(
                f"--transport {choice} moves only device memory, but this peer has "
                "no device arena: add one with --device-arena, or choose another "
                "--transport",
                transport=choice.required,
            )

    async def start(self, made: Callable[..., BulkEngine], between_hosts: str) -> None:
        """Start the worker for the pools. between_hosts: the engine for host memory. Raises
        TransportMissing."""

    async def stop(self) -> None:
        """Stop the worker."""

    async def bring(
        self, owner: Owner, remote: Array, nbytes: Array, holder: int
    ) -> tuple[Array, list[int]]:
        """As `Pulls.bring`, to memory where this holder reads in place."""
        return await self.pulls.bring(owner, remote, nbytes, holder)

    async def ways(self, owner: Owner) -> Path | None:
        """Test the transports to the first pool here again. None if one of the two peers has
        no pool."""
        return None

    def gone(self, owner: Owner) -> None:
        """Handle a process that is no longer a member."""
