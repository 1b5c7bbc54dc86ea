"""What a caller holds while rows come and go: a stream, a loader, lost rows, permits.

The rules of each are in `client/operations`: `stream`, `loader`, `changes`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import AsyncIterator, Iterable
from typing import Any

from dataplane.client.aio.batch import Batch
from dataplane.client.aio.driver import Prefetch, Run
from dataplane.client.core import Handle
from dataplane.client.deadline import Deadline
from dataplane.client.operations.changes import Admitting, Losing, Producing, T
from dataplane.client.operations.lease import LEFT, Lease
from dataplane.client.operations.loader import Loading, refuse_workers
from dataplane.client.operations.stream import Looping, Streaming, tell_what_is_left
from dataplane.errors import DataplaneError, StreamEnd
from dataplane.wire.tables import Name

log = logging.getLogger(__name__)


class Stream(Streaming[Batch]):
    """An iterator over claimed batches. Asking for the next batch acks the current one, with what
    was added to it.

    Any other end of the loop (break, return, an exception, the end of a `with`) releases the
    current batch. Call `batch.ack()` before `break` to keep finished work. `batches=n` ends the
    loop after n batches and acks the last; `itertools.islice` and `zip` do not. Each loop over a
    stream has its own batch. Raises InvalidCall in a worker of torch's DataLoader.
    """

    _kind = "aio.Stream"

    def __aiter__(self) -> StreamLoop:
        return StreamLoop(self)

    async def aclose(self) -> None:
        """Release the current batch and end the stream."""
        await self._run(self._release())

    async def __aenter__(self) -> Stream:
        self._entered = True
        return self

    async def __aexit__(self, kind: object, exc: object, trace: object) -> None:
        try:
            await self.aclose()
        except DataplaneError as failure:
            self._failed(failure, exc)


class StreamLoop(Looping[Batch], AsyncIterator[Batch]):
    """What iterating over a stream begins. When it goes, the batch in hand is released."""

    async def __anext__(self) -> Batch:
        try:
            return await self._stream._run(self._advance())  # type: ignore[no-any-return]
        except StreamEnd:
            raise StopAsyncIteration from None


class Loader(Loading[Batch, "LoaderLoop"]):
    """An iterator for the training process. It claims the next batch and calls `collate` with it
    while the loop works on the current one.

    A batch is acked when the loop asks for the next one. `break`, an exception or the end of a
    `with` releases it. `batch` is the current one. `state_dict()` says which rows were handed out,
    so that a loader of a restored plane continues after them. Raises InvalidCall in a worker of
    torch's DataLoader.
    """

    _kind = "aio.Loader"
    _behind: tuple[Prefetch[Batch], list[Lease]] | None = None
    """of the loop that was left last: the end of a `with` sees that it is back"""
    _entered = False

    def __aiter__(self) -> LoaderLoop:
        refuse_workers()
        if self._loop is not None:
            self._loop.leave()
        loop = LoaderLoop(self)
        self._latest = weakref.ref(loop)
        return loop

    async def aclose(self) -> None:
        """Release the current batch and the prefetched ones, and end the loop."""
        if self._loop is not None:
            self._loop.leave()
        if self._behind is None:
            return
        (prefetch, held), self._behind = self._behind, None
        await prefetch.end()
        deadline = Deadline(self._limit_s)
        for lease in held + prefetch.left():
            await self._run(lease.give_back(deadline))

    async def __aenter__(self) -> Loader:
        self._entered = True
        return self

    async def __aexit__(self, kind: object, exc: object, trace: object) -> None:
        await self.aclose()


class LoaderLoop(AsyncIterator[Any]):
    """One loop over a loader. Its end releases the batches that it has."""

    def __init__(self, loader: Loader) -> None:
        self.batch: Batch | None = None
        self.over = False
        self._loader = loader
        self._prefetch: Prefetch[Batch] = Prefetch(loader)

    async def __anext__(self) -> Any:
        batch, self.batch = self.batch, None
        if batch is not None and batch.state == "leased":
            try:
                await batch.ack(timeout=self._loader._limit_s)
            except BaseException:
                self.batch = batch
                raise
        if self.over:
            raise StopAsyncIteration
        try:
            self.batch, made = await self._prefetch.next()
        except StreamEnd as exc:
            self.over = True
            tell_what_is_left(exc)
            raise StopAsyncIteration from None
        except Exception:
            await self._loader.aclose()
            raise
        self._loader._given += 1
        return made

    def leave(self, forgotten: tuple[str, str] | None = None) -> None:
        """Release what is in hand and what was prefetched; the loop is over. Waits for nothing,
        which the end of the loader's `with` does. forgotten: as in `Abandoned`, for the batch in
        hand."""
        if self.over:
            return
        self.over = True
        batch, self.batch = self.batch, None
        self._prefetch.stop()
        if batch is not None:
            batch.lease.abandon(forgotten)
        held = self._prefetch.left() + ([] if batch is None else [batch.lease])
        for lease in held:
            lease.abandon()
        self._loader._behind = self._prefetch, held

    def __del__(self) -> None:
        # Left by break, return or an exception.
        if hasattr(self, "_prefetch"):
            self.leave(None if self._loader._entered else LEFT)


class Lost(Losing, AsyncIterator[list[Name]]):
    """Lists of keys, until no row can be lost any more. `missed`: how many rows were lost so long
    ago that the peer has forgotten their names."""

    def __init__(self, run: Run, handle: Handle, timeout: float | None) -> None:
        super().__init__(handle, timeout)
        self._run = run

    async def __anext__(self) -> list[Name]:
        try:
            return await self._run(self._next())
        except StreamEnd:
            raise StopAsyncIteration from None


class Producer(Producing[T], AsyncIterator[T]):
    """The items of `part.producing(…)`. Ends when the partition takes no new rows."""

    def __init__(self, run: Run, handle: Handle, items: Iterable[T]) -> None:
        super().__init__(handle, items)
        self._run = run

    async def __anext__(self) -> T:
        try:
            return await self._run(self._next())
        except StreamEnd:
            raise StopAsyncIteration from None


class Admission(Admitting):
    """`part.admit(…)`: waits when its `with` begins, and returns unused permits at its end. `n`
    groups may start; `version` is the trainer's."""

    def __init__(
        self,
        run: Run,
        handle: Handle,
        n: int,
        max_lag: int,
        per_version: int,
        timeout: float | None,
    ) -> None:
        super().__init__(handle, n, max_lag, per_version, timeout)
        self._run = run

    async def __aenter__(self) -> Admission:
        await self._run(self._admit())
        return self

    async def __aexit__(self, kind: object, exc: object, trace: object) -> None:
        try:
            await self._run(self._give_back())
        except DataplaneError as failure:
            # The peer gives them back with the session, if it has not heard this.
            log.warning(
                "%r: could not return the permits, which are freed when the session ends: %s",
                self,
                failure,
            )
