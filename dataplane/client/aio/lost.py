"""What a producer iterates over, to make rows again that were lost with a peer."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dataplane.client.aio.driver import Run
from dataplane.client.core import Handle
from dataplane.client.operations.losses import Losing
from dataplane.errors import StreamEnd
from dataplane.wire.tables import Name


class Lost(Losing, AsyncIterator[list[Name]]):
    """Lists of keys, one after the other, until no row can be lost any more. `missed`: rows of
    which the peer had forgotten the names before they were asked for."""

    def __init__(self, run: Run, handle: Handle, timeout: float | None) -> None:
        super().__init__(handle, timeout)
        self._run = run

    async def __anext__(self) -> list[Name]:
        try:
            return await self._run(self._next())
        except StreamEnd:
            raise StopAsyncIteration from None
