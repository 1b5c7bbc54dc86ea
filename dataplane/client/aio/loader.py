"""What a loader is to its caller: something to iterate over. `client/operations/loader.py` has its
rules."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from dataplane.client.aio.batch import Batch
from dataplane.client.aio.driver import Prefetch
from dataplane.client.core import DEFAULT_TIMEOUT_S
from dataplane.client.operations.lease import Lease
from dataplane.client.operations.loader import Loading, refuse_workers
from dataplane.client.operations.stream import tell_what_is_left
from dataplane.errors import StreamEnd


class Loader(Loading[Batch, "Loop"]):
    """Iterate over it, in the training process itself. The next batch is claimed, and made what
    `collate` makes of it, while the body works on this one.

    A batch is acked when the loop asks for the next one, with what was added to it; `break`, an
    exception or the end of a `with` releases it. `batch` is the one in hand. `state_dict()` says
    what was given out, so that a loader of a restored plane goes on exactly behind it. InvalidCall
    inside a DataLoader's worker.
    """

    _kind = "aio.Loader"
    _behind: tuple[Prefetch[Batch], list[Lease]] | None = None
    """of the loop that was left last: the end of a `with` sees that it is back"""

    def __aiter__(self) -> Loop:
        refuse_workers()
        if self._loop is not None:
            self._loop.leave()
        loop = Loop(self)
        self._latest = weakref.ref(loop)
        return loop

    async def aclose(self) -> None:
        """Release the batch in hand and what was prefetched; the loop is over."""
        if self._loop is not None:
            self._loop.leave()
        if self._behind is None:
            return
        (prefetch, held), self._behind = self._behind, None
        await prefetch.end()
        for lease in held + prefetch.left():
            await self._run(lease.give_back(DEFAULT_TIMEOUT_S))

    async def __aenter__(self) -> Loader:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


class Loop(AsyncIterator[Any]):
    """One loop over a loader. When it goes, what it has is released."""

    def __init__(self, loader: Loader) -> None:
        self.batch: Batch | None = None
        self.over = False
        self._loader = loader
        self._prefetch: Prefetch[Batch] = Prefetch(loader)

    async def __anext__(self) -> Any:
        batch, self.batch = self.batch, None
        if batch is not None and batch.state == "leased":
            try:
                await batch.ack()
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

    def leave(self) -> None:
        """Release what is in hand and what was prefetched; the loop is over. Waits for nothing,
        which the end of the loader's `with` does."""
        if self.over:
            return
        self.over = True
        batch, self.batch = self.batch, None
        self._prefetch.stop()
        held = self._prefetch.left() + ([] if batch is None else [batch.lease])
        for lease in held:
            lease.abandon()
        self._loader._behind = self._prefetch, held

    def __del__(self) -> None:
        # Left by break, return or an exception.
        if hasattr(self, "_prefetch"):
            self.leave()
