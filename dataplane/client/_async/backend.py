"""How `dataplane.aio` waits, copies and prefetches. `_sync/backend.py` has the same names.

Each call in flight has a connection of its own. Cancelling the task closes it, which cancels the
call at the peer. Large copies run in the loop's executor. Several event loops and threads may use
one client.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from dataplane.client.arguments import Deadline
from dataplane.client.read.selection import Selection as Fetching
from dataplane.client.session import handshake
from dataplane.client.session.connection import GRACE_S, Connection, unwrap
from dataplane.client.session.housekeeping import Housekeeper
from dataplane.client.session.session import Session
from dataplane.client.tracebacks import shorten
from dataplane.errors import DataplaneError, DeadlineExceeded, InvalidCall, StreamEnd
from dataplane.gpu.torch_devices import place_named, settled
from dataplane.wire.messages import Body, Reply

if TYPE_CHECKING:
    from dataplane.client._async.batch import LeasedRows
    from dataplane.client._async.lease import Lease

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

OFFLOAD_BYTES = 1 << 20
"""Copies of at least this many bytes run outside the event loop."""

T = TypeVar("T")
P = TypeVar("P", bound="Closing")
B = TypeVar("B", bound="LeasedRows")


# connecting


class Closing(Protocol):
    async def close(self) -> None: ...


class _NotConnected(InvalidCall, AttributeError):
    """Both classes: as an AttributeError, it makes `hasattr` return False."""


class Connecting(Generic[P]):
    """A plane that is not connected yet. Await it, or use it in `async with`."""

    def __init__(self, kind: Callable[[Housekeeper], P], attach: Callable[[], Housekeeper]) -> None:
        self._kind, self._attach = kind, attach
        self._opened: P | None = None

    if not TYPE_CHECKING:  # hide `__getattr__` from type checkers

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # a probe for a special method
                raise AttributeError(name)
            raise _NotConnected(
                f"{name!r} was used before the plane was connected: use `plane = await "
                "dataplane.aio.connect()` or `async with dataplane.aio.connect() as plane`"
            )

    async def _open(self) -> P:
        loop = asyncio.get_running_loop()
        opening = loop.run_in_executor(None, self._attach)
        try:
            return self._kind(await asyncio.shield(opening))
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise
        except DataplaneError as exc:
            shorten(exc)
            raise

    def __await__(self) -> Generator[Any, None, P]:
        return self._open().__await__()

    async def __aenter__(self) -> P:
        self._opened = await self._open()
        return self._opened

    async def __aexit__(self, kind: object, exc: object, trace: object) -> None:
        if self._opened is not None:
            await self._opened.close()


def _close_unwanted(opening: asyncio.Future[Housekeeper]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close("connecting was cancelled: call dataplane.aio.connect() again")


async def leave(keeper: Housekeeper, why: str) -> None:
    await asyncio.get_running_loop().run_in_executor(None, keeper.close, why)


# copies


async def offload(work: Callable[[], T], nbytes: int) -> T:
    """Run `work`, which copies `nbytes`, in a thread if that is much. A cancelled task still waits
    until the thread has ended, because the thread writes into memory that must not be reused
    before."""
    if nbytes < OFFLOAD_BYTES:
        return work()
    loop = asyncio.get_running_loop()
    return await to_its_end(lambda: loop.run_in_executor(None, work))


async def to_its_end(work: Callable[[], Awaitable[T]]) -> T:
    """Do work that must not stop halfway. If the task is cancelled, even repeatedly, it ends after
    the work."""
    working = asyncio.ensure_future(work())
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            try:
                await asyncio.wait([working])
            except asyncio.CancelledError:
                continue
        raise


async def convert_off_loop(work: Callable[[str], T], device: str, nbytes: int) -> T:
    """Convert rows with `work(device)`, in a thread if there is much to copy. The thread uses the
    GPU that `device` means here, and its copies are done when this returns."""
    where = place_named(device)
    return await offload(lambda: settled(where, lambda: work(where)), nbytes)


# prefetching


class Prefetch(Generic[B]):
    """A task that claims batches before the loop needs them: up to `ahead` at a time, and `wanted`
    in total."""

    def __init__(
        self,
        take: Callable[[], Awaitable[B]],
        collate: Callable[[B], Any] | None,
        ahead: int,
        wanted: int | None,
        session: Session,
    ) -> None:
        self._take, self._collate = take, collate
        self._ahead, self._wanted = ahead, wanted
        self._session = session
        self._changed = asyncio.Condition()
        self._ready: deque[tuple[B, Any]] = deque()
        self._making: B | None = None
        """The batch that `collate` is working on, or failed on."""
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._work(), name="dataplane-loader")

    async def next(self) -> tuple[B, Any]:
        """Return the next batch and its collated value. Raises the error that ended the task."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ready or self._failure)
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
        """Cancel the task and withdraw its waiting claim."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def end(self, deadline: Deadline) -> None:
        """Cancel the task and wait until it has stopped. Then return to the peer what the peer has
        granted to the task, and wait for its replies at most until the deadline."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._loop.run_in_executor(None, self._session.settle, deadline.until)

    def left(self) -> list[Lease]:
        """Remove the unused prefetched batches, and return a list of their leases."""
        left, self._ready = [batch for batch, _ in self._ready], deque()
        return [batch.lease for batch in [*left, self._making] if batch is not None]

    async def _work(self) -> None:
        failure: BaseException = StreamEnd("this loader has ended: start a new one")
        try:
            while self._wanted != 0:
                async with self._changed:
                    await self._changed.wait_for(lambda: len(self._ready) < self._ahead)
                made = await self._made()
                self._wanted = None if self._wanted is None else self._wanted - 1
                async with self._changed:
                    self._ready.append(made)
                    self._making = None
                    self._changed.notify_all()
                del made
        except asyncio.CancelledError:
            if self._making is not None:  # the loop has not got this batch
                self._making._unused()
        except BaseException as exc:  # `next` raises it in the loop
            failure = exc
        self._failure = failure
        async with self._changed:
            self._changed.notify_all()

    async def _made(self) -> tuple[B, Any]:
        self._making = batch = await self._take()
        made = batch if self._collate is None else self._collate(batch)
        return batch, await made if inspect.isawaitable(made) else made


# calls


async def further(session: Session, deadline: Deadline) -> Connection:
    """Open one more connection. If the caller is cancelled, later calls use it, unless the peer
    does not reply within another second: the end of the event loop waits for the thread."""
    loop, cancelled = asyncio.get_running_loop(), threading.Event()
    begun: list[Connection] = []

    def connected() -> Connection:
        if cancelled.is_set():  # cancelled before the thread started
            raise DeadlineExceeded("the call was cancelled while it waited for a connection")
        return handshake.further(session, deadline, begun.append)

    opening = loop.run_in_executor(None, connected)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:

        def keep(opened: asyncio.Future[Connection]) -> None:
            if not opened.cancelled() and opened.exception() is None:
                session.connections.give_back(opened.result())

        def end() -> None:
            if not opening.done():
                for connection in begun:
                    connection.shut()

        cancelled.set()
        opening.add_done_callback(keep)
        loop.call_later(handshake.LEAST_S, end)
        raise


async def exchange(connection: Connection, frame: bytes, rid: int, deadline: Deadline) -> Body:
    """Send a request and return its reply, as `Connection.exchange` does."""
    try:
        waits = connection.waits(deadline, GRACE_S)
        if frame:
            await _send(connection, frame, waits)
            reply = await _receive(connection, waits)
        else:  # it was sent with the call before
            reply = connection.take_early() or await _receive(connection, waits)
        while reply.rid != rid:
            connection.keep_early(reply, rid)
            reply = await _receive(connection, waits)
    except BaseException as exc:
        connection.fail(exc)
        raise
    return unwrap(reply.body)


async def _send(connection: Connection, frame: bytes, waits: Iterator[float]) -> None:
    loop, rest = asyncio.get_running_loop(), memoryview(frame)
    while rest := rest[connection.send_some(rest) :]:
        await _ready(connection.sock, loop.add_writer, loop.remove_writer, next(waits))


async def _receive(connection: Connection, waits: Iterator[float]) -> Reply:
    loop, sock = asyncio.get_running_loop(), connection.sock
    while (reply := connection.arrived()) is None:
        try:
            wait_s = next(waits)
        except DeadlineExceeded:
            if (reply := connection.last()) is None:
                raise
            return reply
        await _ready(sock, loop.add_reader, loop.remove_reader, wait_s)
        # Not loop.sock_recv: if a task is cancelled just after it received, the bytes are lost, and
        # with them the reply that the housekeeper must undo.
        with contextlib.suppress(BlockingIOError):
            connection.take()
    return reply


async def _ready(
    sock: socket.socket,
    add: Callable[..., object],
    remove: Callable[..., object],
    limit_s: float,
) -> None:
    """Wait until the loop finds the socket readable, or writable, for at most `limit_s`."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(limit_s, _set, ready)
    add(sock, _set, ready)
    try:
        await ready
    finally:
        timer.cancel()
        remove(sock)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
