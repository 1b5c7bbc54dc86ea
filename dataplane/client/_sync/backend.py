"""How the blocking client waits, copies and prefetches. `_async/backend.py` has the same names."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import logging
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dataplane.client.arguments import Deadline
from dataplane.client.read.selection import Selection
from dataplane.client.session.connection import Cancelled, Connection
from dataplane.client.session.handshake import further
from dataplane.client.session.housekeeping import Housekeeper
from dataplane.client.session.session import Session
from dataplane.client.tracebacks import is_ours
from dataplane.errors import StreamEnd
from dataplane.wire.messages import Body

if TYPE_CHECKING:
    from dataplane.client._sync.batch import LeasedRows
    from dataplane.client._sync.lease import Lease

__all__ = [
    "Connecting",
    "Fetching",
    "Prefetch",
    "convert_off_loop",
    "exchange",
    "further",
    "leave",
    "offload",
    "to_its_end",
]

T = TypeVar("T")
P = TypeVar("P")
B = TypeVar("B", bound="LeasedRows")

log = logging.getLogger(__name__)


# connecting


def Connecting(kind: Callable[[Housekeeper], P], attach: Callable[[], Housekeeper]) -> P:  # noqa: N802
    return kind(attach())


def leave(keeper: Housekeeper, why: str) -> None:
    keeper.close(why)


class Fetching(Selection):
    """Rows whose `rows["field"]` fetches a missing field."""

    def fetch(self, *fields: str) -> None:
        raise NotImplementedError

    def _bring(self, field: str) -> None:
        self.fetch(field)


# copies


def offload(work: Callable[[], T], nbytes: int) -> T:
    """Run `work` in the caller's thread."""
    return work()


def to_its_end(work: Callable[[], T]) -> T:
    """Do work that must not be left half done: nothing can cancel a blocking call."""
    return work()


def convert_off_loop(work: Callable[[str], T], device: str, nbytes: int) -> T:
    """Convert rows with `work(device)`, in the caller's thread, on the caller's streams."""
    return work(device)


# prefetching


class Prefetch(Generic[B]):
    """A thread that claims up to `ahead` batches before the loop needs them, and `wanted` in
    total."""

    def __init__(
        self,
        take: Callable[[], B],
        collate: Callable[[B], Any] | None,
        ahead: int,
        wanted: int | None,
        session: Session,
    ) -> None:
        self._take, self._collate = take, collate
        self._ahead, self._wanted = ahead, wanted
        self._session = session
        self._changed = threading.Condition()
        self._ready: deque[tuple[B, Any]] = deque()
        self._making: B | None = None
        """The batch that `collate` is working on, or failed on."""
        self._failure: BaseException | None = None
        self._stopped = False
        self._cancel = _Cancel()
        self._thread = threading.Thread(target=self._work, name="dataplane-loader", daemon=True)
        self._thread.start()

    # the loop's side

    def next(self) -> tuple[B, Any]:
        """Return the next batch and its collated value. Raises the error that ended the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._failure)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
        failure, self._failure = (
            self._failure,
            StreamEnd("this loader has ended: start a new one"),
        )
        assert failure is not None
        raise failure

    def stop(self) -> None:
        """End the thread and withdraw its waiting claim."""
        self._stopped = True
        self._cancel.cancel()
        if self._changed.acquire(blocking=False):  # else the thread holds it, and looks again
            self._changed.notify_all()
            self._changed.release()

    def end(self, deadline: Deadline) -> None:
        """End the thread and wait until it has stopped. Then return to the peer what the peer has
        granted to the thread, and wait for its replies at most until the deadline."""
        self.stop()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._session.settle(deadline.until)

    def left(self) -> list[Lease]:
        """Forget the prefetched batches that were not used. Returns their leases."""
        left, self._ready = [batch for batch, _ in self._ready], deque()
        return [batch.lease for batch in [*left, self._making] if batch is not None]

    # the thread's side

    def _work(self) -> None:
        failure: BaseException = StreamEnd("this loader has ended: start a new one")
        _of_thread.cancel = self._cancel
        try:
            while self._has_room():
                made = self._made()
                with self._changed:
                    self._ready.append(made)
                    self._making = None
                    self._changed.notify_all()
                del made
        except Cancelled:
            pass
        except BaseException as exc:  # the loop raises it, whatever it is
            failure = exc
        self._cancel.close()
        with self._changed:
            if self._stopped:  # the loop ended before it got these batches
                for batch in (*(batch for batch, _ in self._ready), self._making):
                    if batch is not None:
                        batch._unused()
            self._failure = (
                StreamEnd("this loader has ended: start a new one") if self._stopped else failure
            )
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until a batch may be taken; False if none is wanted any more."""
        with self._changed:
            while not self._stopped and len(self._ready) >= self._ahead:
                self._changed.wait(1.0)
            if self._stopped or self._wanted == 0:
                return False
            if self._wanted is not None:
                self._wanted -= 1
            return True

    def _made(self) -> tuple[B, Any]:
        self._making = batch = self._take()
        return batch, batch if self._collate is None else self._collate(batch)


class _Cancel:
    """Ends the calls of one thread, from any thread and any finalizer."""

    def __init__(self) -> None:
        self._event = io.FileIO(os.eventfd(0), "wb")
        self.fd = self._event.fileno()
        self.requested = False
        # A write in another thread must not meet a number that was closed and given to another
        # file. Reentrant, because a finalizer can run in the middle of `close`.
        self._lock = threading.RLock()

    def cancel(self) -> None:
        self.requested = True
        with self._lock, contextlib.suppress(ValueError):  # the thread has ended
            self._event.write((1).to_bytes(8, "little"))

    def close(self) -> None:
        with self._lock:
            self._event.close()


class _OfThread(threading.local):
    cancel: _Cancel | None = None


_of_thread = _OfThread()


# calls


def exchange(connection: Connection, frame: bytes, rid: int, deadline: Deadline) -> Body:
    """Send a request and return its reply, as `Connection.exchange` does. Warn once if that blocks
    an event loop."""
    if asyncio._get_running_loop() is not None:
        _warn_of_loop()
    cancel = _of_thread.cancel
    if cancel is None:
        return connection.exchange(frame, rid, deadline)
    if cancel.requested:
        raise Cancelled
    with connection.cancelled_by(cancel.fd):
        return connection.exchange(frame, rid, deadline)


@functools.cache
def _warn_of_loop() -> None:
    caller = next(
        (one for one in reversed(traceback.extract_stack()) if not is_ours(one.filename)), None
    )
    log.warning(
        "a blocking dataplane call%s runs inside an event loop and blocks the loop until it "
        "returns: use dataplane.aio and await it, or asyncio.to_thread",
        f" ({caller.filename}:{caller.lineno}: {caller.line})" if caller else "",
    )
