"""What blocking differs in from awaiting: `aio.driver` has the same names."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from dataplane.client.aio.calls import Calls
from dataplane.client.core import DEFAULT_TIMEOUT_S, Offload, Operation
from dataplane.client.deadline import Deadline
from dataplane.client.operations.lease import Lease
from dataplane.client.operations.leased import LeasedRows
from dataplane.client.operations.loader import Loading
from dataplane.client.operations.plan import Feed
from dataplane.client.read.selection import Selection
from dataplane.client.session.connection import Connection
from dataplane.client.session.handshake import further
from dataplane.client.session.housekeeping import Housekeeper
from dataplane.client.tracebacks import is_ours, shorten
from dataplane.errors import DataplaneError, StreamEnd
from dataplane.wire.messages import Body

__all__ = [
    "Connecting",
    "Fetching",
    "Prefetch",
    "Run",
    "conversion",
    "exchange",
    "further",
    "leave",
    "offload",
]

T = TypeVar("T")
P = TypeVar("P")
B = TypeVar("B", bound=LeasedRows)

log = logging.getLogger(__name__)


def exchange(connection: Connection, frame: bytes, rid: int, deadline: Deadline) -> Body:
    """As `Connection.exchange`, which stops the event loop that it is called in: said once."""
    if asyncio._get_running_loop() is not None:
        _warn_of_loop()
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


class Run(Protocol):
    """How operations are carried out: `Plane.run`."""

    def __call__(self, operation: Operation[T], /) -> T: ...


def Connecting(kind: Callable[[Housekeeper], P], attach: Callable[[], Housekeeper]) -> P:  # noqa: N802
    try:
        return kind(attach())
    except DataplaneError as exc:
        shorten(exc)
        raise


def leave(keeper: Housekeeper, why: str) -> None:
    keeper.close(why)


class Fetching(Selection):
    """Fields that are not here are brought by `rows["field"]` itself."""

    def fetch(self, *fields: str, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        raise NotImplementedError

    def _bring(self, field: str) -> None:
        self.fetch(field)


# steps of operations


def conversion(work: Callable[[str], Any], device: str, nbytes: int) -> Operation[Any]:
    """What a caller asked for, made in the caller's thread, on the caller's streams."""
    return (yield Offload(lambda: work(device), nbytes))


def offload(step: Offload) -> Any:
    return step.work()


# a loader's prefetching


class Prefetch(Generic[B]):
    """A thread that claims up to so many batches which nobody has asked for yet."""

    def __init__(self, loader: Loading[B, Any] | Feed[Any]) -> None:
        self._run: Run = loader._run
        self._claim: Callable[[], Operation[Any]] = loader._claim
        self._make: Callable[[Any], B] = loader._make
        self._fresh, self._collate = loader._fresh, loader._collate
        self._ahead, self._wanted = loader._ahead, loader._wanted
        self._session = loader._handle.session
        self._calls = Calls(self._session)
        self._changed = threading.Condition()
        self._ready: deque[tuple[B, Any]] = deque()
        self._making: B | None = None
        """what collate has, or failed with"""
        self._failure: BaseException | None = None
        self._stopped = False
        self._cancel: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._work, name="dataplane-loader", daemon=True)
        self._thread.start()

    # the loop's side

    def next(self) -> tuple[B, Any]:
        """The next batch and what was made of it. Raises what the thread ended with."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._failure)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
        failure, self._failure = self._failure, StreamEnd("this loop is over")
        assert failure is not None
        raise failure

    def stop(self) -> None:
        """A claim that waits is taken back."""
        self._stopped = True
        self._cancel()
        if self._changed.acquire(blocking=False):  # else the thread holds it, and looks again
            self._changed.notify_all()
            self._changed.release()

    def end(self) -> None:
        """It has stopped when this returns."""
        self.stop()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._session.settle()

    def left(self) -> list[Lease]:
        """Of what was prefetched and is taken by nobody."""
        left, self._ready = [batch for batch, _ in self._ready], deque()
        return [batch.lease for batch in [*left, self._making] if batch is not None]

    # the thread's side

    def _work(self) -> None:
        failure: BaseException = StreamEnd("this loop is over")
        try:
            # On a loop of its own: a claim on one can be cancelled.
            with asyncio.Runner() as runner:
                while self._has_room():
                    made = self._made(runner)
                    with self._changed:
                        self._ready.append(made)
                        self._making = None
                        self._changed.notify_all()
                    del made
        except asyncio.CancelledError:
            pass
        except BaseException as exc:  # whatever it is, the loop is where it is told
            failure = exc
        with self._changed:
            self._failure = StreamEnd("this loop is over") if self._stopped else failure
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Waits until a batch may be claimed; False where none is wanted any more."""
        with self._changed:
            while not self._stopped and len(self._ready) >= self._ahead:
                self._changed.wait(1.0)
            if self._stopped or self._wanted == 0:
                return False
            if self._wanted is not None:
                self._wanted -= 1
            return True

    def _made(self, runner: asyncio.Runner) -> tuple[B, Any]:
        batch: B | None = None
        while batch is None:
            batch = self._run(self._fresh(self._make(runner.run(self._claimed()))))
        self._making = batch
        return batch, batch if self._collate is None else self._collate(batch)

    async def _claimed(self) -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            with contextlib.suppress(RuntimeError):  # the thread has ended
                loop.call_soon_threadsafe(task.cancel)

        self._cancel = cancel
        if self._stopped:
            raise asyncio.CancelledError
        return await self._calls.run(self._claim())
