"""Iterate over the rows that were lost with a peer.

Generated from dataplane/client/_async/lost.py: change that.
"""

from __future__ import annotations

from collections.abc import Iterator

from dataplane.client import arguments
from dataplane.client._sync.calls import attach_to_wait, milliseconds, public, wait_for
from dataplane.client.session.session import Handle
from dataplane.errors import PartitionGone
from dataplane.wire.messages import Losses, LossesDone
from dataplane.wire.tables import Name


class Lost(Iterator[list[Name]]):
    """An iterator over the keys of lost rows, one list at a time. It ends when no more rows can be
    lost: the partition was dropped, or it is sealed and every stage has received every row.
    `missed` is the number of rows that were lost so long ago that the peer has forgotten their
    keys."""

    def __init__(self, handle: Handle, timeout: float | None) -> None:
        self.missed = 0
        self._handle = handle
        self._timeout = timeout
        self._after = 0
        self._ended = False

    @public
    def __next__(self) -> list[Name]:
        if self._ended:
            raise StopIteration
        timeout = arguments.seconds(self._timeout, "timeout")
        generation = attach_to_wait(self._handle, timeout)
        body = Losses(self._handle.name, generation, self._after, milliseconds(timeout))
        try:
            done = wait_for(self._handle.session, body, LossesDone, timeout)
        except PartitionGone as exc:
            if exc.details.get("reason") == "lost":
                raise  # the shard was lost too, with the names of its rows
            done = LossesDone(self._after, ended=True)
        self._after, self._ended = done.after, done.ended
        self.missed += done.missed
        if done.ended:
            raise StopIteration
        return done.names

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"{self._after} so far"
        return f"<Lost rows of {self._handle.name!r}: {state}>"
