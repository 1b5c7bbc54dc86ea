"""What a stream is to its caller: something to iterate over. Its rule is in
`client/operations/stream.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType

from dataplane.client.aio.batch import Batch
from dataplane.client.operations.stream import Looping, Streaming
from dataplane.errors import DataplaneError, StreamEnd


class Stream(Streaming[Batch]):
    """Iterate over it. Asking for the next batch acks the one before, with what was added to it.

    Whatever else ends the loop (break, return, an exception, the end of a `with` around it)
    releases the batch in hand: `ack()` it before a `break` to keep what was done. The rows are back
    within moments, in a `with` when that ends at the latest. `batches=n` ends the loop after n and
    acks the last, which `itertools.islice` and `zip` do not: they never ask after their last one.
    Each loop over a stream has a batch of its own in hand.
    """

    _kind = "aio.Stream"

    def __aiter__(self) -> Loop:
        return Loop(self)

    async def aclose(self) -> None:
        """Release what is in hand; the stream has ended."""
        await self._run(self._release())

    async def __aenter__(self) -> Stream:
        self._entered = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.aclose()
        except DataplaneError as failure:
            self._failed(failure, exc)


class Loop(Looping[Batch], AsyncIterator[Batch]):
    """What iterating over a stream begins. When it goes, the batch in hand is released."""

    async def __anext__(self) -> Batch:
        try:
            return await self._stream._run(self._advance())  # type: ignore[no-any-return]
        except StreamEnd:
            raise StopAsyncIteration from None
