"""Rows that were lost with a peer: what a producer asks for, to make them again. Without I/O."""

from __future__ import annotations

from dataplane.client import arguments
from dataplane.client.core import Handle, Operation, milliseconds, wait_for
from dataplane.errors import PartitionGone, StreamEnd
from dataplane.wire.messages import Losses, LossesDone
from dataplane.wire.tables import Name


class Losing:
    """Keys of lost rows, list after list. `missed`: rows of which the peer had forgotten the names
    before they were asked for."""

    def __init__(self, handle: Handle, timeout: float | None) -> None:
        self.missed = 0
        self._handle = handle
        self._timeout = timeout
        self._after = 0
        self._ended = False

    def _next(self) -> Operation[list[Name]]:
        """What was lost beyond those told already; StreamEnd when no more can be."""
        if self._ended:
            raise StreamEnd("no more rows can be lost")
        timeout = arguments.seconds(self._timeout, "timeout")
        generation = yield from self._handle.attach_to_wait(timeout)
        body = Losses(self._handle.name, generation, self._after, milliseconds(timeout))
        try:
            done = yield from wait_for(body, LossesDone, timeout)
        except PartitionGone as exc:
            if exc.details.get("reason") == "lost":
                raise  # with all of its rows, which nobody can name
            done = LossesDone(self._after, ended=True)
        self._after, self._ended = done.after, done.ended
        self.missed += done.missed
        if done.ended:
            raise StreamEnd("no more rows can be lost")
        return done.names

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"{self._after} so far"
        return f"<Lost rows of {self._handle.name!r}: {state}>"
