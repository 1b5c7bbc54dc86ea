"""Streams: iterate over a stage's batches until the partition is sealed and drained.

Advancing to the next batch, or `ack()`, acks the current batch. A loop that ends in any other way
releases it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any, NoReturn
from weakref import WeakSet

from dataplane.client import arguments
from dataplane.client._async.batch import Batch
from dataplane.client._async.calls import UNKNOWN, public
from dataplane.client._async.claiming import Claiming
from dataplane.client._async.lease import LEFT, Lease
from dataplane.client._async.loader import log_remaining, refuse_workers
from dataplane.client.arguments import Deadline, Demand
from dataplane.client.session.session import Handle
from dataplane.errors import DataplaneError, StreamEnd

log = logging.getLogger(__name__)


class Stream:
    """An iterator over claimed batches. Advancing to the next batch acks the current one and stores
    the fields that were added to it.

    Leaving the loop early (`break`, `return`, an exception, or leaving the `with` block) releases
    the current batch. To keep finished work, call `batch.ack()` before `break`. To stop after n
    batches and ack the last one, pass `batches=n`; stopping with `itertools.islice` or `zip` does
    not ack that batch. Several loops over the same stream each have their own batch. Raises
    InvalidCall inside a PyTorch DataLoader worker.
    """

    _kind = "aio.Stream"

    def __init__(
        self,
        handle: Handle,
        stage: str,
        demand: Demand,
        batches: int | None = None,
        **how: Any,
    ) -> None:
        self.batches = None if batches is None else arguments.count(batches, "batches")
        # Built here, so that wrong arguments raise here and not in the loop.
        self._claiming = Claiming(handle, stage, demand, **how)
        self._what = f"{handle.name!r} for {stage!r}"
        self._loops: WeakSet[StreamLoop] = WeakSet()
        self._left: list[Lease] = []
        """Leases of loops that have ended in a `with` block. The end of the block releases them."""
        self._entered = False
        self._closed = False

    def __aiter__(self) -> StreamLoop:
        return StreamLoop(self)

    @public
    async def aclose(self) -> None:
        """Release the current batch and end the stream."""
        self._closed = True
        await self._settle(self._held())

    async def __aenter__(self) -> Stream:
        self._entered = True
        return self

    async def __aexit__(self, kind: object, exc: object, trace: object) -> None:
        if isinstance(exc, UNKNOWN):  # the peer did not reply: do not wait again
            self._closed = True
            for lease in self._held():
                lease.abandon()
            return
        try:
            await self.aclose()
        except DataplaneError as failure:
            if exc is None:
                raise
            # Show the exception of the body instead.
            log.warning(
                "%r: could not release a batch: %s. Its rows return to the stage when the session "
                "ends",
                self,
                failure,
            )

    def _held(self) -> list[Lease]:
        """Return the current batches of all loops."""
        return [loop.lease for loop in list(self._loops) if loop.lease is not None]

    async def _settle(self, held: list[Lease]) -> None:
        held, self._left = self._left + held, []
        deadline = Deadline(self._claiming.limit_s)
        try:
            while held:
                await held[0].give_back(deadline)
                del held[0]
        except BaseException:
            for lease in held:
                lease.abandon()
            raise

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be sent to another process: send the "
            f"partition, and call its {type(self).__name__.lower()}(…) there"
        )

    def __repr__(self) -> str:
        rows = ", ".join(f"{lease.open_rows} rows" for lease in self._held()) or "no batch"
        state = "ended" if self._closed else f"holds {rows}"
        return f"<{self._kind} of {self._what}: {state}>"


class StreamLoop(AsyncIterator[Batch]):
    """One loop over a stream, and the lease of its current batch. When the loop is
    garbage-collected, it releases the batch."""

    def __init__(self, stream: Stream) -> None:
        self.lease: Lease | None = None
        refuse_workers()
        self._stream = stream
        self._given = 0
        self._over = False
        stream._loops.add(self)

    @public
    async def __anext__(self) -> Batch:
        try:
            return await self._advance()
        except StreamEnd:
            raise StopAsyncIteration from None

    async def _advance(self) -> Batch:
        """Ack the current batch and claim the next, in one message. Raise StreamEnd if there is
        none."""
        stream, lease, call = self._stream, self.lease, None
        try:
            if lease is not None and lease.state == "leased" and not stream._closed:
                if not self._is_over:
                    call = stream._claiming.call(after=lease.id)
                deadline = Deadline(stream._claiming.limit_s)
                await lease.finish("ack", deadline, then=call)
            lease = self.lease = None
            await stream._settle([])
            if self._is_over:
                raise StreamEnd("this loop has already ended: start a new loop over the stream")
            claims = stream._claiming
            if call is not None and call.sent is not None:  # it was sent with the ack
                claimed = await claims.claimed(call)
            else:
                claimed = await claims.claim()
        except StreamEnd as exc:
            if not self._is_over:
                self._over = True
                log_remaining(exc)
            raise
        finally:
            if call is not None:  # abandon its reply, unless the loop got it
                call.leave(stream._claiming._handle.session)
        batch = Batch(claims._handle, claims._stage, *claimed)
        self.lease, self._given = batch.lease, self._given + 1
        if stream._closed:  # another thread or task closed it
            self.lease = None
            await batch.lease.give_back(Deadline(stream._claiming.limit_s))
            raise StreamEnd("this stream was closed: call part.stream(…) again")
        return batch

    @property
    def _is_over(self) -> bool:
        return self._over or self._stream._closed or self._given == self._stream.batches

    def __del__(self) -> None:
        # Left by break, return or an exception. The caller may still hold the batch, so its end
        # cannot trigger the release, and `__del__` must not wait.
        lease = self.lease
        if lease is not None and lease.state == "leased":
            lease.abandon(None if self._stream._entered else LEFT)  # a `with` releases on purpose
            if self._stream._entered:
                self._stream._left.append(lease)
