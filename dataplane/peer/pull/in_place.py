"""Pulls for clients that read values in place elsewhere than in the host arena, as the rest of the
peer calls them. A peer without device arenas has `PullsInPlace` itself, and one with some has the
subclass in `dataplane.gpu.peer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dataplane.errors import TransportMissing
from dataplane.metadata.tables.references import Array
from dataplane.peer.pull.paths import Path
from dataplane.peer.pull.pulls import Pulls
from dataplane.transport.engine import BulkEngine
from dataplane.transport.registry import DEVICE_ONLY
from dataplane.wire.tables import Owner


class PullsInPlace:
    """The pulls of a peer whose clients read everything in the host arena."""

    def __init__(self, pulls: Pulls) -> None:
        self.pulls = pulls

    @property
    def address(self) -> str:
        """The address at which other peers request values on the devices here, or ""."""
        return ""

    def stats(self) -> dict[str, Any]:
        """The settings, the transports that the worker runs, why others do not run, and the
        transport per peer."""
        return {"requested": str(self.pulls.transport), "runs": [], "missing": {}, "peers": {}}

    async def start(self, made: Callable[..., BulkEngine], between_hosts: str) -> None:
        """Start the worker for devices. between_hosts: the engine for host memory. Raises
        TransportMissing."""

    async def close(self) -> None:
        """Stop the worker."""

    async def bring(
        self, owner: Owner, remote: Array, nbytes: Array, holder: int
    ) -> tuple[Array, list[int]]:
        """As `Pulls.bring`, to where this holder reads in place."""
        return await self.pulls.bring(owner, remote, nbytes, holder)

    async def ways(self, owner: Owner) -> Path | None:
        """Test the transports to the first device here again. None if one of the two peers has
        no device."""
        return None

    def gone(self, owner: Owner) -> None:
        """Handle a process that is no longer a member."""

    def check(self) -> None:
        """Raise TransportMissing if the settings require a transport for memory that this peer
        does not have."""
        choice = self.pulls.transport
        if choice.required in DEVICE_ONLY:
            raise TransportMissing(
                f"--transport {choice} moves only device memory, but this peer has "
                "no device arena: add one with --device-arena, or choose another "
                "--transport",
                transport=choice.required,
            )
