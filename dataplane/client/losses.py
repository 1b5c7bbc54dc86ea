"""Rows that were lost with a peer: what a producer iterates over, to make them again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from dataplane.client import aio_batch, arguments, batch
from dataplane.client.core import Handle, Operation, milliseconds, wait_for
from dataplane.errors import PartitionGone
from dataplane.wire.messages import Losses, LossesDone
from dataplane.wire.tables import Name


def losses(handle: Handle, after: int, timeout: float | None) -> Operation[LossesDone]:
    """What was lost beyond the first `after` rows."""
    timeout = arguments.seconds(timeout, "timeout")
    generation = yield from handle.attach_to_wait(timeout)
    body = Losses(handle.name, generation, after, milliseconds(timeout))
    try:
        return (yield from wait_for(body, LossesDone, timeout))
    except PartitionGone:
        return LossesDone(after, ended=True)


class _Subscription:
    """`missed`: rows of which the peer had forgotten the names before they were asked for."""

    def __init__(self, handle: Handle, timeout: float | None) -> None:
        self.missed = 0
        self._handle = handle
        self._timeout = timeout
        self._after = 0
        self._ended = False

    def _next(self) -> Operation[LossesDone]:
        return losses(self._handle, self._after, self._timeout)

    def _take(self, done: LossesDone) -> list[Name]:
        self._after, self._ended = done.after, done.ended
        self.missed += done.missed
        return done.names

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"{self._after} so far"
        return f"<Lost rows of {self._handle.name!r}: {state}>"


class Lost(_Subscription, Iterator[list[Name]]):
    """Lists of keys, one after the other, until no row can be lost any more."""

    def __init__(self, run: batch.Run, handle: Handle, timeout: float | None) -> None:
        super().__init__(handle, timeout)
        self._run = run

    def __next__(self) -> list[Name]:
        names = [] if self._ended else self._take(self._run(self._next()))
        if self._ended:
            raise StopIteration
        return names


class AsyncLost(_Subscription, AsyncIterator[list[Name]]):
    """As `Lost`, with `async for`."""

    def __init__(self, run: aio_batch.Run, handle: Handle, timeout: float | None) -> None:
        super().__init__(handle, timeout)
        self._run = run

    async def __anext__(self) -> list[Name]:
        names = [] if self._ended else self._take(await self._run(self._next()))
        if self._ended:
            raise StopAsyncIteration
        return names
