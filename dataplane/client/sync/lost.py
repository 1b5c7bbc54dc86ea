"""What a producer iterates over, to make rows again that were lost with a peer.

Made of dataplane/client/aio/lost.py, which is the one to change.
"""

from __future__ import annotations

from collections.abc import Iterator

from dataplane.client.core import Handle
from dataplane.client.operations.losses import Losing
from dataplane.client.sync.driver import Run
from dataplane.errors import StreamEnd
from dataplane.wire.tables import Name


class Lost(Losing, Iterator[list[Name]]):
    """Lists of keys, one after the other, until no row can be lost any more. `missed`: rows of
    which the peer had forgotten the names before they were asked for."""

    def __init__(self, run: Run, handle: Handle, timeout: float | None) -> None:
        super().__init__(handle, timeout)
        self._run = run

    def __next__(self) -> list[Name]:
        try:
            return self._run(self._next())
        except StreamEnd:
            raise StopIteration from None
