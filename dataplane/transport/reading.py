"""One read in flight in a bulk worker, as its thread and a cancellation share it."""

from __future__ import annotations

import threading
import time

from dataplane.errors import DataplaneError, DeadlineExceeded, TransferFailed
from dataplane.transport.seam import Records, Remote
from dataplane.transport.stream import BulkStream


class Reading:
    """One read in flight: what it copies, its connection, and the error that stopped it."""

    def __init__(self, remote: Remote, copies: Records, deadline: float) -> None:
        self.remote = remote
        self.copies = copies
        self.deadline = deadline
        self._stream: BulkStream | None = None
        self._lock = threading.Lock()
        self._error: DataplaneError | None = None

    @property
    def stopped(self) -> bool:
        return self._error is not None

    def watch(self, stream: BulkStream) -> None:
        """Use a stream from now on, and abort it when this read stops."""
        with self._lock:
            self._stream = stream
            if self._error:
                stream.abort()

    def unwatch(self) -> bool:
        """Stop using the stream. Return whether other reads may use it. Call this before it is
        closed, so that no abort meets a reused descriptor."""
        with self._lock:
            self._stream = None
            return not self._error

    def cancel(self) -> DataplaneError:
        """Make the read raise soon. Return its error."""
        why = "the caller cancelled the read: repeat the call if the values are still needed"
        return self.stop(TransferFailed(why))

    def stop(self, error: DataplaneError) -> DataplaneError:
        """Stop with an error. Return the first one, because later ones come from the aborted
        stream."""
        with self._lock:
            self._error = self._error or error
            if self._stream is not None:
                self._stream.abort()
            return self._error

    def check(self) -> None:
        """Raise the error that stopped the read, or DeadlineExceeded if its time is over."""
        if self._error is not None:
            raise self._error
        if time.monotonic() >= self.deadline:
            raise self.late()

    def late(self) -> DataplaneError:
        """Return the error of a read that did not end by its deadline."""
        remote = self.remote
        return DeadlineExceeded(
            f"peer {remote.owner.peer!r} at {remote.address} did not send all requested bytes "
            "before the deadline: the peer may be busy, suspended, dead, or cut off. Check "
            "`dataplane status`, then repeat the call",
            peer=remote.owner.peer,
        )
