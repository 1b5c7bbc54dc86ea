"""What a stream is to its caller: something to iterate over. Its rule is in
`client/operations/stream.py`.

Made of dataplane/client/aio/stream.py, which is the one to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from dataplane.client.operations.stream import Looping, Streaming
from dataplane.client.sync.batch import Batch
from dataplane.errors import DataplaneError, StreamEnd


class Stream(Streaming[Batch]):
    """Iterate over it. Asking for the next batch acks the one before, with what was added to it.

    Whatever else ends the loop (break, return, an exception, the end of a `with` around it)
    releases the batch in hand: `ack()` it before a `break` to keep what was done. The rows are back
    within moments, in a `with` when that ends at the latest. `batches=n` ends the loop after n and
    acks the last, which `itertools.islice` and `zip` do not: they never ask after their last one.
    Each loop over a stream has a batch of its own in hand.
    """

    _kind = "Stream"

    def __iter__(self) -> Loop:
        return Loop(self)

    def close(self) -> None:
        """Release what is in hand; the stream has ended."""
        self._run(self._release())

    def __enter__(self) -> Stream:
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except DataplaneError as failure:
            self._failed(failure, exc)


class Loop(Looping[Batch], Iterator[Batch]):
    """What iterating over a stream begins. When it goes, the batch in hand is released."""

    def __next__(self) -> Batch:
        try:
            return self._stream._run(self._advance())  # type: ignore[no-any-return]
        except StreamEnd:
            raise StopIteration from None
