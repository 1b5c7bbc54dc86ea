"""One read in flight in a bulk worker, as its threads and its connections share it."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np

from dataplane.errors import DataplaneError, DeadlineExceeded, TransferFailed
from dataplane.transport.seam import Mask, Records, Remote
from dataplane.transport.slices import Slice
from dataplane.transport.stream import BulkStream


class Reading:
    """One read in flight: the slices that are left, its streams, and the error that stopped it."""

    def __init__(self, remote: Remote, copies: Records, deadline: float) -> None:
        self.remote = remote
        self.copies = copies
        self.deadline = deadline
        self.gone = np.zeros(len(copies), bool)
        self.nbytes = 0
        self.left: deque[Slice] = deque()
        self._streams: set[BulkStream] = set()
        self._lock = threading.Lock()
        self._error: DataplaneError | None = None

    @property
    def stopped(self) -> bool:
        return self._error is not None

    def next(self) -> Slice | None:
        with self._lock:
            return None if self._error or not self.left else self.left.popleft()

    def watch(self, stream: BulkStream) -> None:
        """Use a stream from now on, and abort it when this read stops."""
        with self._lock:
            self._streams.add(stream)
            if self._error:
                stream.abort()

    def unwatch(self, stream: BulkStream) -> bool:
        """Stop using a stream. Return whether other reads may use it. Call this before it is
        closed, so that no abort meets a reused descriptor."""
        with self._lock:
            self._streams.discard(stream)
            return not self._error

    def arrived(self, part: Slice, gone: Mask, nbytes: int) -> None:
        with self._lock:
            self.gone[part.index[gone]] = True
            self.nbytes += nbytes

    def cancel(self) -> None:
        """Make the read raise soon."""
        why = "the caller cancelled the read: repeat the call if the values are still needed"
        self.stop(TransferFailed(why))

    def stop(self, error: DataplaneError) -> None:
        """Stop with an error. The first error counts, because later ones come from the aborted
        streams."""
        with self._lock:
            if self._error is None:
                self._error = error
            for stream in self._streams:
                stream.abort()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def check(self) -> None:
        """Raise the error that stopped the read, or DeadlineExceeded if its time is over."""
        self.raise_error()
        if time.monotonic() >= self.deadline:
            raise DeadlineExceeded(
                "the transfer waited for other transfers until its deadline: repeat the call, "
                "perhaps with a longer timeout="
            )
