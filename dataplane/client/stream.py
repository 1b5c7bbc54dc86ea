"""Stream: a stage's batches one after the other, until the partition is sealed and drained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType

from dataplane.client.batch import Batch
from dataplane.errors import StreamEnd


class Stream(Iterator[Batch]):
    """Iterate over it. Asking for the next batch acks the one before, with what was added to it.

    Leaving the loop early (break, an exception, `close`) releases the batch in hand: ack it before
    a `break` to keep it.
    """

    def __init__(self, claim: Callable[[], Batch], what: str) -> None:
        self._claim = claim
        self._what = what
        self._batch: Batch | None = None
        self._ended = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Batch:
        self._ack()
        if self._ended:
            raise StopIteration
        try:
            self._batch = self._claim()
        except StreamEnd:
            self._ended = True
            raise StopIteration from None
        return self._batch

    def _ack(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None and batch.state == "leased":
            try:
                batch.ack()
            except BaseException:
                self._batch = batch
                raise

    def close(self) -> None:
        """Release the batch in hand; the stream has ended."""
        self._ended = True
        batch, self._batch = self._batch, None
        if batch is not None and batch.state == "leased":
            batch.release()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._ack()
        self.close()

    def __del__(self) -> None:
        # The caller may still hold the batch, so its own end cannot be waited for.
        batch = self._batch
        if batch is not None and batch.state == "leased":
            batch.lease.abandon()

    def __repr__(self) -> str:
        state = "ended" if self._ended else repr(self._batch) if self._batch else "before a batch"
        return f"<Stream of {self._what}: {state}>"
